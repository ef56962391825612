"""Tiny encoders, dense and with experts: models for embeddings that write no text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from synthetic import _add_tokenizer, add_metadata, finish

WIDTH, HIDDEN, VOCAB, CONTEXT = 64, 96, 320, 128


def build_encoder(path: Path, experts: int = 0) -> Path:
    """A bert of two blocks; with experts a nomic-bert-moe, whose second block routes each token to two of them."""
    arch = "nomic-bert-moe" if experts else "bert"
    writer = GGUFWriter(path, arch)
    writer.add_name(f"tiny {arch}")
    sizes = {"block_count": 2, "context_length": CONTEXT, "embedding_length": WIDTH, "feed_forward_length": HIDDEN, "attention.head_count": 2}
    kind = {"attention.layer_norm_epsilon": 1e-5, "attention.causal": False, "pooling_type": 1}
    routing = {"moe_every_n_layers": 2, "expert_count": experts, "expert_used_count": 2, "rope.freq_base": 1000.0} if experts else {}
    add_metadata(writer, arch, sizes | kind | routing)
    _add_tokenizer(writer, VOCAB)
    writer.add_token_type_count(1)
    rng = np.random.default_rng(0)

    def add(name: str, *ne: int) -> None:
        writer.add_tensor(f"{name}.weight", rng.standard_normal(ne[::-1], dtype=np.float32) * np.float32(ne[0] ** -0.5))

    def add_norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", rng.standard_normal(WIDTH, dtype=np.float32) * np.float32(0.1) + 1)
        writer.add_tensor(f"{name}.bias", rng.standard_normal(WIDTH, dtype=np.float32) * np.float32(0.1))

    add("token_embd", WIDTH, VOCAB)
    add("token_types", WIDTH, 1)
    if not experts:
        add("position_embd", WIDTH, CONTEXT)
    add_norm("token_embd_norm")
    for block in range(2):
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{block}.{part}", WIDTH, WIDTH)
        routed, end = (experts, "_exps") if experts and block == 1 else (0, "")
        if routed:
            add(f"blk.{block}.ffn_gate_inp", WIDTH, routed)
        add(f"blk.{block}.ffn_up{end}", WIDTH, HIDDEN, *[routed] * bool(routed))
        add(f"blk.{block}.ffn_down{end}", HIDDEN, WIDTH, *[routed] * bool(routed))
        add_norm(f"blk.{block}.attn_output_norm")
        add_norm(f"blk.{block}.layer_output_norm")
    finish(writer)
    return path
