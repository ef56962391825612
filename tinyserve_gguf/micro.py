"""Writes a micro MoE with experts of any type that ggml knows, through ggml's own GGUF writer: two blocks of eight experts, random, no vocabulary."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from tinyserve_gguf import _llama
from tinyserve_gguf._types import WeightType, quantize, weight_types
from tinyserve_gguf.errors import ModelFileError

N_BLOCKS, N_EXPERTS, N_USED = 2, 8, 2
EMBED, FF = 256, 256  # multiples of the largest blocks
HEADS, KV_HEADS, HEAD_DIM, VOCAB, CONTEXT = 4, 2, 64, 256, 512
_NUMBERS = {
    "vocab_size": VOCAB,
    "context_length": CONTEXT,
    "embedding_length": EMBED,
    "block_count": N_BLOCKS,
    "feed_forward_length": FF,
    "expert_count": N_EXPERTS,
    "expert_used_count": N_USED,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "rope.dimension_count": HEAD_DIM,
}


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


@cache
def _ggml() -> SimpleNamespace:
    pointer: Any
    pointer, text, i64, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int
    return _llama.bind(
        ("ggml_init", pointer, [_InitParams]),
        ("ggml_free", None, [pointer]),
        ("ggml_new_tensor", pointer, [pointer, number, number, ctypes.POINTER(i64)]),
        ("ggml_set_name", pointer, [pointer, text]),
        ("ggml_get_data", pointer, [pointer]),
        ("ggml_nbytes", ctypes.c_size_t, [pointer]),
        ("gguf_init_empty", pointer, []),
        ("gguf_free", None, [pointer]),
        ("gguf_set_val_str", None, [pointer, text, text]),
        ("gguf_set_val_u32", None, [pointer, text, ctypes.c_uint32]),
        ("gguf_set_val_f32", None, [pointer, text, ctypes.c_float]),
        ("gguf_add_tensor", None, [pointer, pointer]),
        ("gguf_write_to_file", ctypes.c_bool, [pointer, text, ctypes.c_bool]),
    )


def write_micro(path: Path, kind: WeightType) -> Path:
    """Write the model with all its experts of this type, and return `path`. ModelFileError if the file cannot be written."""
    ggml = _ggml()
    tensors = list(_tensors(kind))
    file = ggml.gguf_init_empty()
    memory = ggml.ggml_init(_InitParams(mem_size=sum(data.nbytes for _, _, _, data in tensors) + (1 << 20), mem_buffer=None, no_alloc=False))
    try:
        for key, value in (("general.architecture", "llama"), ("general.name", f"micro {kind.name}"), ("tokenizer.ggml.model", "none")):
            ggml.gguf_set_val_str(file, key.encode(), value.encode())
        for key, number in _NUMBERS.items():
            ggml.gguf_set_val_u32(file, f"llama.{key}".encode(), number)
        ggml.gguf_set_val_f32(file, b"llama.attention.layer_norm_rms_epsilon", 1e-5)
        for name, type_id, shape, data in tensors:
            tensor = ggml.ggml_new_tensor(memory, type_id, len(shape), (ctypes.c_int64 * len(shape))(*shape))
            ggml.ggml_set_name(tensor, name.encode())
            assert ggml.ggml_nbytes(tensor) == data.nbytes, name
            ctypes.memmove(ggml.ggml_get_data(tensor), data.ctypes.data, data.nbytes)
            ggml.gguf_add_tensor(file, tensor)
        with _llama.explained() as cause:
            if not ggml.gguf_write_to_file(file, os.fsencode(path), False):
                raise ModelFileError(f"{path}: cannot be written: {cause()}")
    finally:
        ggml.gguf_free(file)
        ggml.ggml_free(memory)
    return path


def _tensors(kind: WeightType) -> Iterator[tuple[str, int, tuple[int, ...], npt.NDArray[np.uint8]]]:
    """(name, ggml_type, shape in ggml order, bytes)."""
    rng = np.random.default_rng(kind.type_id)
    plain = weight_types()["F32"]

    def made(name: str, *shape: int, std: float | None = None, mean: float = 0.0, type_: WeightType = plain) -> Any:
        values = rng.standard_normal(shape[::-1], dtype=np.float32) * np.float32(shape[0] ** -0.5 if std is None else std) + np.float32(mean)
        importance = rng.uniform(0.1, 2.0, shape[0]).astype(np.float32)  # a synthetic imatrix
        return f"{name}.weight", type_.type_id, shape, quantize(values, type_, importance)

    yield made("token_embd", EMBED, VOCAB, std=1.0)
    yield made("output_norm", EMBED, std=0.1, mean=1.0)
    yield made("output", EMBED, VOCAB)
    for block in range(N_BLOCKS):
        p = f"blk.{block}."
        yield made(f"{p}attn_norm", EMBED, std=0.1, mean=1.0)
        yield made(f"{p}attn_q", EMBED, HEADS * HEAD_DIM)
        yield made(f"{p}attn_k", EMBED, KV_HEADS * HEAD_DIM)
        yield made(f"{p}attn_v", EMBED, KV_HEADS * HEAD_DIM)
        yield made(f"{p}attn_output", HEADS * HEAD_DIM, EMBED)
        yield made(f"{p}ffn_norm", EMBED, std=0.1, mean=1.0)
        yield made(f"{p}ffn_gate_inp", EMBED, N_EXPERTS, std=2 * EMBED**-0.5)
        for part, ne0, ne1 in (("gate", EMBED, FF), ("up", EMBED, FF), ("down", FF, EMBED)):
            yield made(f"{p}ffn_{part}_exps", ne0, ne1, N_EXPERTS, type_=kind)
