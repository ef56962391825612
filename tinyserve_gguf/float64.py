"""Who multiplies in float64 for `verify`: torch where it is installed, else numpy.

Torch does it in a process of its own: loaded into this one, beside llama.cpp, it took the whole process down on a GPU machine.
"""

from __future__ import annotations

import atexit
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt

from tinyserve_gguf.errors import EngineError

Matrix = npt.NDArray[np.float64]
Multiply = Callable[[Matrix, Matrix], Matrix]


class _Torch:
    """The other process, until this one ends. `version` is empty if torch does not load there."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tinyserve_gguf._torch"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self._process.stdin and self._process.stdout
        self._to, self._back = self._process.stdin, self._process.stdout
        self.version = self._back.readline().decode().strip()
        if self.version:
            atexit.register(self._close)
        else:
            self._close()

    def multiply(self, x: Matrix, weights: Matrix) -> Matrix:
        try:
            pickle.dump((np.ascontiguousarray(x), weights), self._to)
            self._to.flush()
            product: Matrix = pickle.load(self._back)
        except (OSError, EOFError) as error:
            raise EngineError(f"the process in which torch multiplies has ended: {error}") from error
        return product

    def _close(self) -> None:
        self._to.close()  # it ends then
        self._back.close()
        self._process.wait()


def reference_maths() -> tuple[str, Multiply]:
    """Who multiplies, and the function: [n, columns] times [rows, columns] transposed gives [n, rows]."""
    if find_spec("torch") is None:
        return f"numpy {np.__version__}", _by_numpy
    torch = _torch()
    if not torch.version:
        return f"numpy {np.__version__}, as torch does not load", _by_numpy
    return f"torch {torch.version}", torch.multiply


@cache
def _torch() -> _Torch:
    return _Torch()


def _by_numpy(x: Matrix, weights: Matrix) -> Matrix:
    return x @ weights.T
