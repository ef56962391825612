"""Asks a ggml device whether it has a kernel, with an operation as llama.cpp would submit it, built and never computed."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

from tinyserve_gguf import _llama

N_KV = 256  # cells in the cache; llama.cpp pads to this
_F16, _F32 = 1, 0


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


@cache
def _ggml() -> SimpleNamespace:
    """The functions of ggml.h and ggml-backend.h, with their prototypes."""
    pointer: Any
    pointer, i64, size, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t, ctypes.c_float
    return _llama.bind(
        ("ggml_init", pointer, [_InitParams]),
        ("ggml_free", None, [pointer]),
        ("ggml_new_tensor_4d", pointer, [pointer, ctypes.c_int, i64, i64, i64, i64]),
        ("ggml_row_size", size, [ctypes.c_int, i64]),
        ("ggml_view_4d", pointer, [pointer, pointer, i64, i64, i64, i64, size, size, size, size]),
        ("ggml_cast", pointer, [pointer, pointer, ctypes.c_int]),
        ("ggml_flash_attn_ext", pointer, [pointer, pointer, pointer, pointer, pointer, real, real, real]),
        ("ggml_backend_dev_supports_op", ctypes.c_bool, [pointer, pointer]),
        ("ggml_backend_dev_buffer_type", pointer, [pointer]),
        ("ggml_backend_buft_get_alignment", size, [pointer]),
        ("ggml_backend_buft_get_alloc_size", size, [pointer, pointer]),
        ("ggml_backend_dev_backend_reg", pointer, [pointer]),
        ("ggml_backend_reg_get_proc_address", pointer, [pointer, ctypes.c_char_p]),
    )


class _Feature(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("value", ctypes.c_char_p)]


def features(device: int) -> dict[str, str]:
    """How the backend of the ggml_backend_dev_t at `device` was built, as ggml tells it ({"AVX2": "1", ...}); empty if it does not."""
    ggml = _ggml()
    registry = ggml.ggml_backend_dev_backend_reg(device)
    address = ggml.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_get_features")
    if not address:
        return {}
    found: dict[str, str] = {}
    entries = ctypes.CFUNCTYPE(ctypes.POINTER(_Feature), ctypes.c_void_p)(address)(registry)
    while entries[len(found)].name:
        found[entries[len(found)].name.decode()] = entries[len(found)].value.decode()
    return found


@contextmanager
def _context() -> Iterator[int]:
    """A ggml_context for a few tensors without data."""
    context = _ggml().ggml_init(_InitParams(mem_size=1 << 16, mem_buffer=None, no_alloc=True))
    try:
        yield context
    finally:
        _ggml().ggml_free(context)


def has_flash_attention(device: int, *, n_head: int, n_head_kv: int, key_length: int, value_length: int, type_k: int, type_v: int, mla: bool) -> bool:
    """Whether the ggml_backend_dev_t at `device` runs flash attention for one token over these heads. `mla`: values are the front of the keys."""
    ggml = _ggml()
    if min(n_head, n_head_kv, key_length, value_length) < 1 or n_head % n_head_kv:
        return False  # a damaged header, which the loader refuses
    type_k, type_v = (_F16 if kind == _F32 else kind for kind in (type_k, type_v))  # llama_graph casts F32 before it
    with _context() as context:
        row = ggml.ggml_row_size(type_k, key_length)
        n_head_kv = 1 if mla else n_head_kv
        q = ggml.ggml_new_tensor_4d(context, _F32, key_length, 1, n_head, 1)
        k = ggml.ggml_new_tensor_4d(context, type_k, key_length, N_KV, n_head_kv, 1)
        if mla:
            v = ggml.ggml_view_4d(context, k, value_length, N_KV, n_head_kv, 1, row, row * N_KV, row * N_KV, 0)
        else:
            v = ggml.ggml_new_tensor_4d(context, type_v, value_length, N_KV, n_head_kv, 1)
        mask = ggml.ggml_new_tensor_4d(context, _F16, N_KV, 1, 1, 1)
        return bool(ggml.ggml_backend_dev_supports_op(device, ggml.ggml_flash_attn_ext(context, q, k, v, mask, key_length**-0.5, 0.0, 0.0)))


def allocated(device: int, tensors: Iterable[tuple[int, tuple[int, ...]]]) -> int:
    """Bytes that tensors, each given as (ggml_type, shape), take on the ggml_backend_dev_t at `device`: it may pad rows, and aligns."""
    ggml, total = _ggml(), 0
    kind = ggml.ggml_backend_dev_buffer_type(device)
    alignment = ggml.ggml_backend_buft_get_alignment(kind)
    for type_id, shape in tensors:
        with _context() as context:
            tensor = ggml.ggml_new_tensor_4d(context, type_id, *shape, *(1,) * (4 - len(shape)))
            n_bytes = ggml.ggml_backend_buft_get_alloc_size(kind, tensor)
        total += -(-n_bytes // alignment) * alignment
    return int(total)


def has_cast(device: int, kind: int, length: int) -> bool:
    """Whether the device turns rows of `length` numbers of this ggml_type into F32."""
    ggml = _ggml()
    with _context() as context:
        rows = ggml.ggml_new_tensor_4d(context, kind, length, N_KV, 1, 1)
        return bool(ggml.ggml_backend_dev_supports_op(device, ggml.ggml_cast(context, rows, _F32)))
