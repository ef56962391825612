"""Geometries of real models, from the numbers of their config.json, with the types of `scripts/make_model.py`."""

from __future__ import annotations

from tinyserve_gguf.geometry import Geometry

GPT_OSS_20B = Geometry(
    name="gpt-oss-20b",
    architecture="gpt-oss",
    n_blocks=24,
    n_expert=32,
    n_used=4,
    embedding_length=2880,
    expert_ff=2880,
    vocabulary=201088,
    other_weights=24 * (2 * 2880 * 4096 + 2 * 2880 * 512 + 32 * 2880),
    kv_numbers=24 * 2 * 512,
    context_length=131072,
    expert_bits=4.25,
    other_bits=8.5,
    sliding_window=128,
)
QWEN3_30B = Geometry(
    name="qwen3-30b-a3b",
    architecture="qwen3moe",
    n_blocks=48,
    n_expert=128,
    n_used=8,
    embedding_length=2048,
    expert_ff=768,
    vocabulary=151936,
    other_weights=48 * (2 * 2048 * 4096 + 2 * 2048 * 512 + 2048 * 128),
    kv_numbers=48 * 2 * 512,
    context_length=131072,
    expert_bits=4.5,
    other_bits=4.5,
)
