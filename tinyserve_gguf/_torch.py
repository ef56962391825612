"""The only importer of torch, an optional package. Import it where it is needed: it takes seconds."""

from __future__ import annotations

import ctypes

from tinyserve_gguf import _llama  # noqa: F401  before torch: the other order crashed in libstdc++ on one GPU machine

# isort: split
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor as Tensor

VERSION = str(torch.__version__)


def bytes_tensor(raw: npt.NDArray[np.uint8]) -> Tensor:
    """A uint8 tensor that shares memory with `raw`, which may be read-only: do not write to it."""
    address = raw.__array_interface__["data"][0]
    return torch.frombuffer((ctypes.c_uint8 * raw.nbytes).from_address(address), dtype=torch.uint8).view(raw.shape)


def multiply(x: npt.NDArray[np.float64], weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """[n, columns] times [rows, columns] transposed, on the CPU: [n, rows]."""
    product: npt.NDArray[np.float64] = (torch.from_numpy(np.ascontiguousarray(x)) @ torch.from_numpy(weights).T).numpy()
    return product
