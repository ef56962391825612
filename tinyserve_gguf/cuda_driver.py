"""Asks the CUDA driver for its version and its devices, through its own library, whether or not llama.cpp was built for it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


@dataclass(frozen=True, slots=True)
class CudaDevice:
    name: str
    capability: tuple[int, int]


@cache
def _library() -> ctypes.CDLL | None:
    """None where there is no driver, or no GPU that it could use."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return library if library.cuInit(0) == 0 else None


def cuda_version() -> tuple[int, int] | None:
    """The newest CUDA that the driver speaks; None without a usable driver."""
    library, number = _library(), ctypes.c_int()
    if library is None or library.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return number.value // 1000, number.value % 1000 // 10


def cuda_devices() -> list[CudaDevice]:
    """In the driver's order, which CUDA_VISIBLE_DEVICES has cut down already."""
    library, count = _library(), ctypes.c_int()
    if library is None or library.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    found = []
    for i in range(count.value):
        device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        name = ctypes.create_string_buffer(256)
        library.cuDeviceGet(ctypes.byref(device), i)
        library.cuDeviceGetName(name, len(name), device)
        library.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
        library.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
        found.append(CudaDevice(name.value.decode("utf-8", "replace"), (major.value, minor.value)))
    return found
