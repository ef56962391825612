"""The types that weights can have: which there are, and numbers into their bytes and back, by ggml and by the gguf package."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from tinyserve_gguf import _llama

N_TYPES = 43  # GGML_TYPE_COUNT of ggml 0.25.3
_FLOATS = ("F32", "F16", "BF16")
_OF_ACTIVATIONS = ("Q8_1", "Q8_K")  # what ggml turns activations into; no file holds them


class _Traits(ctypes.Structure):
    """The beginning of struct ggml_type_traits."""

    _fields_ = [
        ("type_name", ctypes.c_char_p),
        ("block", ctypes.c_int64),
        ("block_interleave", ctypes.c_int64),
        ("block_bytes", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    ]


@dataclass(frozen=True, slots=True)
class WeightType:
    """A ggml_type that an expert can have."""

    type_id: int
    name: str  # "Q4_K"
    block: int  # numbers in a block
    block_bytes: int
    needs_imatrix: bool


@cache
def _ggml() -> SimpleNamespace:
    i64: Any
    pointer, i64, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    return _llama.bind(
        ("ggml_get_type_traits", ctypes.POINTER(_Traits), [number]),
        ("ggml_quantize_requires_imatrix", ctypes.c_bool, [number]),
        ("ggml_quantize_chunk", ctypes.c_size_t, [number, pointer, pointer, i64, i64, i64, pointer]),
    )


@cache
def weight_types() -> dict[str, WeightType]:
    """Every type of this ggml that weights can have, by name, in ggml's order."""
    found = {}
    for number in range(N_TYPES):
        traits = _ggml().ggml_get_type_traits(number).contents
        name = traits.type_name.decode().upper() if traits.type_name else ""
        if traits.block and (traits.is_quantized or name in _FLOATS) and name not in _OF_ACTIVATIONS:
            imatrix = bool(_ggml().ggml_quantize_requires_imatrix(number))
            found[name] = WeightType(number, name, traits.block, traits.block_bytes, imatrix)
    return found


def quantize(values: npt.NDArray[np.float32], kind: WeightType, importance: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """`values` [..., columns] as ggml's own quantiser writes them, rows as bytes. `importance` [columns] is the imatrix, which most types weigh
    errors with and some cannot do without."""
    columns = values.shape[-1]
    if columns % kind.block:
        raise ValueError(f"rows of {columns} numbers cannot be {kind.name}, whose blocks hold {kind.block}")
    if kind.name == "F32":
        return np.ascontiguousarray(values).view(np.uint8)
    values, importance = np.ascontiguousarray(values, np.float32), np.ascontiguousarray(importance, np.float32)
    out = np.empty((*values.shape[:-1], columns // kind.block * kind.block_bytes), np.uint8)
    rows = values.size // columns
    _ggml().ggml_quantize_chunk(kind.type_id, values.ctypes.data, out.ctypes.data, 0, rows, columns, importance.ctypes.data)
    return out


def dequantize(raw: npt.NDArray[np.uint8], type_id: int) -> tuple[npt.NDArray[np.float32], str]:
    """Numbers of `raw` [rows, bytes of a row], and whose dequantiser it was: "gguf", an independent one, or "ggml" where gguf has none."""
    try:
        return np.asarray(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(type_id)), dtype=np.float32), "gguf"
    except (NotImplementedError, ValueError):  # no dequantiser, or a type that it does not know
        traits = _ggml().ggml_get_type_traits(type_id).contents
    raw = np.ascontiguousarray(raw)
    out = np.empty((len(raw), raw.shape[1] // traits.block_bytes * traits.block), np.float32)
    traits.to_float(raw.ctypes.data, out.ctypes.data, out.size)
    return out, "ggml"
