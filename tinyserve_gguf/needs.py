"""What a model needs of a device beside its experts: weights, KV cache, compute buffers. Bytes. Pure.

Weights are exact. KV cache and compute buffers are estimates here, on the safe side; `dryrun` asks llama.cpp itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from tinyserve_gguf.facts import INPUTS, ModelFacts, TensorFacts
from tinyserve_gguf.kv import KvOptions

MIB = 1 << 20
CELLS = 256  # llama.cpp rounds a context up to this
STATE_SIZE = 128  # of recurrent blocks, as the larger models have it; the header has it per architecture
INDEXER_HEAD = 128  # numbers of a head that chooses keys in sparse attention
MARGIN = 1.1  # on what was found of compute buffers: with gpt-oss and Qwen3 geometries llama.cpp reserves 0.8 to 1.0 of the estimate


@dataclass(frozen=True, slots=True)
class Setting:
    """What contexts are made with."""

    n_ctx: int  # tokens
    n_ubatch: int  # tokens computed at once in prefill
    kv: KvOptions = field(default_factory=KvOptions)
    flash: bool = True
    n_contexts: int = 1  # at once, over the same weights


@dataclass(frozen=True, slots=True)
class Needs:
    """Of a model with its contexts, without the slots of experts. Bytes."""

    weights: int  # on the device
    kv: int  # keys, values and recurrent states, on the device
    compute: int  # buffers for activations, on the device
    host_weights: int  # embedding tables
    host_compute: int
    is_exact: bool  # llama.cpp said so

    @property
    def device(self) -> int:
        return self.weights + self.kv + self.compute

    def times(self, n_contexts: int) -> Needs:
        """With so many contexts for each one: they share the weights and nothing else."""
        n = n_contexts
        return replace(self, kv=n * self.kv, compute=n * self.compute, host_compute=n * self.host_compute)


def estimated_needs(facts: ModelFacts, setting: Setting) -> Needs:
    """From the header alone."""
    one = Needs(
        weights=weight_bytes(facts),
        kv=kv_bytes(facts, setting.n_ctx, setting.kv),
        compute=compute_bytes(facts, setting),
        host_weights=facts.input_bytes,
        host_compute=host_compute_bytes(facts, setting),
        is_exact=False,
    )
    return one.times(setting.n_contexts)


def device_tensors(facts: ModelFacts) -> list[TensorFacts]:
    """What lies on the device beside the slots: neither expert weights nor embedding tables, but a token embedding that is the output matrix too, and
    the biases and scales of experts, of which slots have their own."""
    experts = {part.weight.name for layer in facts.expert_layers for part in layer.parts}
    has_output = any(tensor.name == "output.weight" for tensor in facts.tensors)
    inputs = set(INPUTS) if has_output else INPUTS - {"token_embd.weight"}
    return [tensor for tensor in facts.tensors if tensor.name not in experts and tensor.name not in inputs and not facts.is_idle(tensor)]


def weight_bytes(facts: ModelFacts) -> int:
    """All weights on the device but those of routed experts."""
    return sum(tensor.n_bytes for tensor in device_tensors(facts))


# ---- KV cache -------------------------------------------------------------------------------------------------------------------------------


def kv_bytes_per_token(facts: ModelFacts, kv: KvOptions = KvOptions()) -> int:
    """Keys and values of one token: as many as the projections have rows. MLA keeps one compressed row, of which both are views."""
    k, v = (kind.n_bytes / kind.block for kind in (kv.keys, kv.values))
    attention = facts.attention
    fused = 2 * attention.n_head_kv / max(1, attention.n_head + 2 * attention.n_head_kv)  # of the rows of attn_qkv
    row = {"attn_k.weight": k, "attn_v.weight": v, "attn_qkv.weight": fused * (k + v) / 2, "attn_kv_a_mqa.weight": k if attention.is_mla else 2 * k}
    row |= {"attn_kv.weight": k, "indexer.attn_k.weight": k, "indexer.k_proj.weight": k}
    recurrent = {tensor.name.split(".")[1] for tensor in facts.tensors if ".ssm_" in tensor.name}  # blocks, whose attn_qkv feeds a state
    cached = (tensor for tensor in facts.tensors if not (_suffix(tensor) == "attn_qkv.weight" and tensor.name.split(".")[1] in recurrent))
    return math.ceil(sum(row.get(_suffix(tensor), 0) * tensor.ne(1) for tensor in cached))


def state_bytes(facts: ModelFacts) -> int:
    """Recurrent states of one sequence, in F32: a matrix a head, and the last inputs of the convolution."""
    shapes = {tensor.name: tensor for tensor in facts.tensors}
    total = 0
    for tensor in facts.tensors:
        if _suffix(tensor) == "ssm_conv1d.weight":
            total += 4 * (tensor.ne(0) - 1) * tensor.ne(1)
            out = shapes.get(tensor.name.replace("ssm_conv1d", "ssm_out"))
            total += 4 * STATE_SIZE * (out.ne(0) if out else tensor.ne(1))
    return total


def cells(n_ctx: int) -> int:
    """Tokens that llama.cpp makes room for."""
    return -(-n_ctx // CELLS) * CELLS


def kv_bytes(facts: ModelFacts, n_ctx: int, kv: KvOptions = KvOptions()) -> int:
    """KV cache of one context, with recurrent states."""
    return kv_bytes_per_token(facts, kv) * cells(n_ctx) + state_bytes(facts)


def _suffix(tensor: TensorFacts) -> str:
    """ "attn_k.weight" of "blk.3.attn_k.weight"."""
    return tensor.name.partition(".")[2].partition(".")[2]


# ---- compute buffers ------------------------------------------------------------------------------------------------------------------------


def compute_bytes(facts: ModelFacts, setting: Setting) -> int:
    """Activations of a batch, masks, logits of one token: an upper estimate of what llama.cpp reserves on the device."""
    n = min(setting.n_ubatch, setting.n_ctx)
    attention, embd = facts.attention, facts.embedding_length
    rows: dict[str, int] = {}  # the most of any block
    for tensor in facts.tensors:
        rows[_suffix(tensor)] = max(rows.get(_suffix(tensor), 0), tensor.ne(1))
    width = max((part.weight.ne(1) for layer in facts.expert_layers for part in layer.parts if part.role != "down"), default=0)
    dense = max(rows.get(f"ffn_{part}.weight", 0) for part in ("up", "gate_up"))
    queries = max(rows.get(f"attn_{name}.weight", 0) for name in ("q", "q_b", "qkv"))
    heads = attention.n_head * max((2 * k + v for k, v in zip(attention.key_lengths, attention.value_lengths, strict=True)), default=0)
    live = 2 * embd + max(2 * facts.n_used * (embd + width), 2 * (embd + dense), 4 * queries, heads)
    vocabulary = max((tensor.ne(1) for tensor in facts.tensors if tensor.name == "token_embd.weight"), default=0)
    n_cells = cells(setting.n_ctx)
    masks = (2 if attention.sliding_window else 1) * (2 if setting.flash else 4) * n_cells * n  # F16, or F32
    scores = 0 if setting.flash else 4 * n_cells * n * attention.n_head
    indexed = max(rows.get(f"indexer.{name}.weight", 0) for name in ("attn_q_b", "q_proj"))  # sparse attention scores every key first
    scores += 4 * n * (indexed + n_cells * (indexed // INDEXER_HEAD))
    return int(MARGIN * (4 * (vocabulary + n * live) + masks + scores))


def host_compute_bytes(facts: ModelFacts, setting: Setting) -> int:
    """Inputs of a batch, before they go to the device."""
    n = min(setting.n_ubatch, setting.n_ctx)
    return 4 * n * (2 * facts.embedding_length + cells(setting.n_ctx)) + 16 * MIB


def context_bytes(facts: ModelFacts, n_ctx: int, n_ubatch: int, kv: KvOptions = KvOptions()) -> int:
    """KV cache and compute buffers on the device."""
    return kv_bytes(facts, n_ctx, kv) + compute_bytes(facts, Setting(n_ctx, n_ubatch, kv))
