"""The only importer of torch, an optional package. Import it where it is needed: it takes seconds. As a program it multiplies for `float64`."""

from __future__ import annotations

import ctypes
import pickle
import sys
from contextlib import suppress
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor as Tensor


def bytes_tensor(raw: npt.NDArray[np.uint8]) -> Tensor:
    """A uint8 tensor that shares memory with `raw`, which may be read-only: do not write to it."""
    address = raw.__array_interface__["data"][0]
    return torch.frombuffer((ctypes.c_uint8 * raw.nbytes).from_address(address), dtype=torch.uint8).view(raw.shape)


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """The version on a line, then a product for every two arrays, until there are no more."""
    answers.write(f"{torch.__version__}\n".encode())
    answers.flush()
    with suppress(EOFError):
        while True:
            x, weights = pickle.load(requests)
            pickle.dump((torch.from_numpy(x) @ torch.from_numpy(weights).T).numpy(), answers)
            answers.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
