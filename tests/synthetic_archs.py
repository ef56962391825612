"""Compact descriptions of tiny MoE models: metadata, tensor names, shapes and types, per architecture of llama.cpp 0.3.36 (`src/models/*.cpp`).

Only facts; `synthetic.py` fills in the numbers and writes the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

Types = str | tuple[str, ...]  # one type for every block, or a cycle over the blocks
Metadata = dict[str, int | float | bool | str | list[int]]  # keys without the "ARCH." prefix
KV_RANK = 512  # of MLA: the only one that ggml-cuda's flash attention knows


@dataclass(frozen=True, slots=True)
class Description:
    """One model. Widths must be multiples of the block size of the types used for them (see `synthetic.typed`)."""

    arch: str
    layers: int = 3  # blocks that are computed
    experts: int = 8
    used: int = 2  # top-k
    embd: int = 64
    ff: int = 96  # hidden units of one expert
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    vocab: int = 320
    context: int = 2048
    window: int = 32  # of the sliding-window layers, where the architecture has them
    gate: Types = "F32"  # type of the gate (or the fused gate_up) experts
    up: Types = "F32"
    down: Types = "F32"
    dense: str = "F32"  # type of attention, shared-expert and dense FFN matrices
    fused: bool = False  # one ffn_gate_up_exps instead of gate and up
    scales: tuple[str, ...] = ()  # expert parts with a per-expert .scale
    mtp: int = 0  # trailing MTP blocks, which carry experts and are not computed
    groups: int = 0  # expert groups, half of which are eligible for a token
    bias_std: float = 1.0  # of per-expert biases, where the architecture has them
    router_std: float = 2.0  # of the router's logits
    seed: int = 0
    more: Metadata = field(default_factory=dict)  # further metadata


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to fill: `shape` in ggml order (ne0 first), numbers from N(mean, std); `std=None` is 1/sqrt(ne0)."""

    name: str
    shape: tuple[int, ...]
    type: str = "F32"
    std: float | None = None
    mean: float = 0.0


def norm(name: str, n: int) -> Tensor:
    return Tensor(f"{name}.weight", (n,), std=0.1, mean=1.0)


def bias(name: str, *shape: int, std: float = 0.1) -> Tensor:
    return Tensor(f"{name}.bias", shape, std=std)


def of_block(types: Types, block: int) -> str:
    return types if isinstance(types, str) else types[block % len(types)]


# ---- parts that architectures share ---------------------------------------------------------------------------------------------------------


def experts(d: Description, b: int, *, gated: bool = True, biases: bool = False, family: str = "exps", ff: int = 0, n: int = 0) -> Iterator[Tensor]:
    """The expert tensors of block `b`; each weight is followed by its bias and its scale, so that a split file parts them."""
    ff, n = ff or d.ff, n or d.experts
    parts = {"gate": (d.embd, ff, d.gate), "up": (d.embd, ff, d.up), "down": (ff, d.embd, d.down)}
    if d.fused:
        parts = {"gate_up": (d.embd, 2 * ff, d.gate), "down": parts["down"]}
    elif not gated:
        del parts["gate"]
    for part, (ne0, ne1, types) in parts.items():
        name = f"blk.{b}.ffn_{part}_{family}"
        yield Tensor(f"{name}.weight", (ne0, ne1, n), of_block(types, b))
        if biases:
            yield bias(name, ne1, n, std=d.bias_std)
        if part in d.scales and family == "exps":
            yield Tensor(f"{name}.scale", (n,), std=0.3, mean=1.0)


def router(d: Description, b: int) -> Tensor:
    return Tensor(f"blk.{b}.ffn_gate_inp.weight", (d.embd, d.experts), std=d.router_std / d.embd**0.5)


def ffn(d: Description, b: int, suffix: str = "", *, gated: bool = True) -> Iterator[Tensor]:
    """A dense FFN of an expert's width: the leading blocks, or (`suffix="_shexp"`) a shared expert."""
    if gated:
        yield Tensor(f"blk.{b}.ffn_gate{suffix}.weight", (d.embd, d.ff), d.dense)
    yield Tensor(f"blk.{b}.ffn_up{suffix}.weight", (d.embd, d.ff), d.dense)
    yield Tensor(f"blk.{b}.ffn_down{suffix}.weight", (d.ff, d.embd), d.dense)


def attention(d: Description, b: int, *, qk_norm: bool = False, biases: bool = False, gated: bool = False, kv_heads: int = 0) -> Iterator[Tensor]:
    p, q, kv = f"blk.{b}.attn_", d.heads * d.head_dim, (kv_heads or d.kv_heads) * d.head_dim
    for name, ne0, ne1 in (("q", d.embd, q * 2 if gated else q), ("k", d.embd, kv), ("v", d.embd, kv), ("output", q, d.embd)):
        yield Tensor(f"{p}{name}.weight", (ne0, ne1), d.dense)
        if biases:
            yield bias(p + name, ne1)
    if qk_norm:
        yield norm(f"{p}q_norm", d.head_dim)
        yield norm(f"{p}k_norm", d.head_dim)


def mtp(d: Description, b: int) -> Iterator[Tensor]:
    """What a block for multi-token prediction has more than others; nothing for those."""
    if b >= d.layers:
        yield Tensor(f"blk.{b}.nextn.eh_proj.weight", (2 * d.embd, d.embd))
        for key in ("enorm", "hnorm", "shared_head_norm"):
            yield norm(f"blk.{b}.nextn.{key}", d.embd)


# ---- architectures: tensors of one block ----------------------------------------------------------------------------------------------------


def llama(d: Description, b: int, *, qk_norm: bool = False) -> Iterator[Tensor]:
    yield norm(f"blk.{b}.attn_norm", d.embd)
    yield from attention(d, b, qk_norm=qk_norm)
    yield norm(f"blk.{b}.ffn_norm", d.embd)
    yield router(d, b)
    yield from experts(d, b)


def qwen3moe(d: Description, b: int) -> Iterator[Tensor]:
    yield from llama(d, b, qk_norm=True)


def grovemoe(d: Description, b: int) -> Iterator[Tensor]:
    """Besides its experts it has half as many "chunk" experts, with ids and a width of their own."""
    yield from qwen3moe(d, b)
    yield from experts(d, b, family="chexps", ff=d.ff // 2, n=d.experts // 2)


def gpt_oss(d: Description, b: int) -> Iterator[Tensor]:
    yield norm(f"blk.{b}.attn_norm", d.embd)
    yield from attention(d, b, biases=True)
    yield Tensor(f"blk.{b}.attn_sinks.weight", (d.heads,), std=1.0)
    yield norm(f"blk.{b}.post_attention_norm", d.embd)
    yield router(d, b)
    yield bias(f"blk.{b}.ffn_gate_inp", d.experts, std=d.router_std / 2)
    yield from experts(d, b, biases=True)


def deepseek2(d: Description, b: int) -> Iterator[Tensor]:
    """MLA; block 0 is dense; the others have a shared expert and a selection bias."""
    p, rope, nope = f"blk.{b}.", d.head_dim // 2, d.head_dim // 2
    yield norm(f"{p}attn_norm", d.embd)
    yield Tensor(f"{p}attn_q_a.weight", (d.embd, d.embd), d.dense)
    yield norm(f"{p}attn_q_a_norm", d.embd)
    yield Tensor(f"{p}attn_q_b.weight", (d.embd, d.heads * d.head_dim), d.dense)
    yield Tensor(f"{p}attn_kv_a_mqa.weight", (d.embd, KV_RANK + rope), d.dense)
    yield norm(f"{p}attn_kv_a_norm", KV_RANK)
    yield Tensor(f"{p}attn_k_b.weight", (nope, KV_RANK, d.heads), d.dense)
    yield Tensor(f"{p}attn_v_b.weight", (KV_RANK, d.head_dim, d.heads), d.dense)
    yield Tensor(f"{p}attn_output.weight", (d.heads * d.head_dim, d.embd), d.dense)
    yield norm(f"{p}ffn_norm", d.embd)
    if b == 0:
        yield from ffn(d, b)
        return
    yield router(d, b)
    yield bias(f"{p}exp_probs_b", d.experts)
    yield from experts(d, b)
    yield from ffn(d, b, "_shexp")
    yield from mtp(d, b)


def gemma4(d: Description, b: int) -> Iterator[Tensor]:
    """Sliding-window blocks, a dense FFN beside the experts, a scaled router. Block 1 has no window."""
    p = f"blk.{b}."
    for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
        yield norm(p + name, d.embd)
    yield from attention(d, b, qk_norm=True)
    if b % 2 == 1:
        yield Tensor(f"{p}rope_freqs.weight" if b != 1 else "rope_freqs.weight", (d.head_dim // 2,), std=0.1, mean=1.0)
    yield from ffn(d, b)
    yield router(d, b)
    yield Tensor(f"{p}ffn_gate_inp.scale", (d.embd,), std=0.1, mean=d.embd**0.5)
    yield from experts(d, b)


def nemotron_h_moe(d: Description, b: int) -> Iterator[Tensor]:
    """Each block is one of Mamba-2, attention, or experts without a gate (squared ReLU) and a shared expert."""
    p, state, inner, heads = f"blk.{b}.", SSM_STATE, 2 * d.head_dim, 2
    yield norm(f"{p}attn_norm", d.embd)
    if b % 4 == 0:
        yield Tensor(f"{p}ssm_in.weight", (d.embd, 2 * inner + 2 * state + heads))
        yield Tensor(f"{p}ssm_conv1d.weight", (4, inner + 2 * state))
        yield bias(f"{p}ssm_conv1d", inner + 2 * state)
        yield bias(f"{p}ssm_dt", heads)
        yield Tensor(f"{p}ssm_a", (1, heads), std=0.1, mean=-1.0)
        yield Tensor(f"{p}ssm_d", (1, heads), std=0.1, mean=1.0)
        yield Tensor(f"{p}ssm_norm.weight", (inner, 1), std=0.1, mean=1.0)
        yield Tensor(f"{p}ssm_out.weight", (inner, d.embd))
    elif b % 4 == 2:
        yield from attention(d, b)
    else:
        yield router(d, b)
        yield bias(f"{p}exp_probs_b", d.experts)
        yield from experts(d, b, gated=False)
        yield from ffn(d, b, "_shexp", gated=False)


def qwen35moe(d: Description, b: int) -> Iterator[Tensor]:
    """Gated delta net (even blocks) and gated attention (odd blocks), each with experts and a gated shared expert."""
    p, inner, heads = f"blk.{b}.", 2 * d.head_dim, 2
    yield norm(f"{p}attn_norm", d.embd)
    if b % 2 == 0 and b < d.layers:
        yield Tensor(f"{p}attn_qkv.weight", (d.embd, 3 * inner), d.dense)
        yield Tensor(f"{p}attn_gate.weight", (d.embd, inner), d.dense)
        yield Tensor(f"{p}ssm_conv1d.weight", (4, 3 * inner))
        yield bias(f"{p}ssm_dt", heads)
        yield Tensor(f"{p}ssm_a", (heads,), std=0.1, mean=-1.0)
        yield Tensor(f"{p}ssm_beta.weight", (d.embd, heads))
        yield Tensor(f"{p}ssm_alpha.weight", (d.embd, heads))
        yield norm(f"{p}ssm_norm", d.head_dim)
        yield Tensor(f"{p}ssm_out.weight", (inner, d.embd), d.dense)
    else:
        yield from attention(d, b, qk_norm=True, gated=True)
    yield norm(f"{p}post_attention_norm", d.embd)
    yield router(d, b)
    yield from experts(d, b)
    yield Tensor(f"{p}ffn_gate_inp_shexp.weight", (d.embd,), std=d.embd**-0.5)
    yield from ffn(d, b, "_shexp")
    yield from mtp(d, b)


SSM_STATE = 128  # ggml-cuda's scan knows 128 and 256
BLOCKS = {
    "qwen3moe": qwen3moe,
    "llama": llama,
    "grovemoe": grovemoe,
    "gpt-oss": gpt_oss,
    "deepseek2": deepseek2,
    "gemma4": gemma4,
    "nemotron_h_moe": nemotron_h_moe,
    "qwen35moe": qwen35moe,
}


# ---- whole models ---------------------------------------------------------------------------------------------------------------------------


def tensors(d: Description) -> list[Tensor]:
    """Every tensor of the file, in the order of the file."""
    found = [Tensor("token_embd.weight", (d.embd, d.vocab), std=1.0), norm("output_norm", d.embd), Tensor("output.weight", (d.embd, d.vocab))]
    for block in range(d.layers + d.mtp):
        found += BLOCKS[d.arch](d, block)
    return found


def metadata(d: Description) -> Metadata:
    """Hyperparameters of the model, without tokenizer and general keys."""
    blocks = range(d.layers + d.mtp)
    found: Metadata = {
        "context_length": d.context,
        "embedding_length": d.embd,
        "block_count": len(blocks),
        "feed_forward_length": d.ff,
        "expert_feed_forward_length": d.ff,
        "expert_count": d.experts,
        "expert_used_count": d.used,
        "attention.head_count": d.heads,
        "attention.head_count_kv": d.kv_heads,
        "attention.key_length": d.head_dim,
        "attention.value_length": d.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": d.head_dim,
        "rope.freq_base": 10000.0,
    }
    if d.mtp:
        found["nextn_predict_layers"] = d.mtp
    if d.groups:
        found |= {"expert_group_count": d.groups, "expert_group_used_count": d.groups // 2}
    ssm: Metadata = {"ssm.conv_kernel": 4, "ssm.inner_size": 2 * d.head_dim, "ssm.time_step_rank": 2}
    extra: dict[str, Metadata] = {
        "grovemoe": {"expert_chunk_feed_forward_length": d.ff // 2, "expert_group_scale": 0.05, "experts_per_group": 2},
        "gpt-oss": {"attention.sliding_window": d.window},
        "deepseek2": {
            "leading_dense_block_count": 1,
            "expert_shared_count": 1,
            "expert_gating_func": 2,  # sigmoid
            "expert_weights_norm": True,
            "expert_weights_scale": 1.5,
            "attention.head_count_kv": 1,
            "attention.q_lora_rank": d.embd,
            "attention.kv_lora_rank": KV_RANK,
            "attention.key_length": KV_RANK + d.head_dim // 2,
            "attention.value_length": KV_RANK,
            "attention.key_length_mla": d.head_dim,
            "attention.value_length_mla": d.head_dim,
            "rope.dimension_count": d.head_dim // 2,
        },
        "gemma4": {
            "attention.sliding_window": d.window,
            "attention.sliding_window_pattern": [block % 2 == 0 for block in blocks],
            "attention.key_length_swa": d.head_dim,
            "attention.value_length_swa": d.head_dim,
            "rope.dimension_count_swa": d.head_dim,
            "embedding_length_per_layer_input": 0,
        },
        "nemotron_h_moe": ssm
        | {
            "ssm.state_size": SSM_STATE,
            "ssm.group_count": 1,
            "attention.head_count_kv": [d.kv_heads if block % 4 == 2 else 0 for block in blocks],
            "feed_forward_length": [d.ff if block % 2 == 1 else 0 for block in blocks],
            "attention.layer_norm_epsilon": 1e-5,
            "expert_shared_feed_forward_length": d.ff,
            "expert_shared_count": 1,
            "expert_weights_norm": True,
        },
        "qwen35moe": ssm
        | {
            "ssm.state_size": d.head_dim,
            "ssm.group_count": 2,
            "full_attention_interval": 2,
            "expert_shared_feed_forward_length": d.ff,
            "rope.dimension_sections": [d.head_dim // 8] * 4,
        },
    }
    return found | extra.get(d.arch, {}) | d.more


MODELS = {
    "qwen3moe": Description("qwen3moe", gate="Q4_0", up="Q4_0", down="Q4_0", dense="Q8_0"),
    "gpt-oss": Description("gpt-oss", gate="MXFP4", up="MXFP4", down="MXFP4", dense="Q8_0"),
    "gpt-oss-f32": Description("gpt-oss"),
    "mixtral": Description("llama", gate="Q8_0", up="Q8_0", down="Q8_0"),
    "deepseek2": Description("deepseek2", gate="Q5_0", up="Q5_0", down="Q8_0", groups=4, used=3),
    "deepseek2-fused": Description("deepseek2", fused=True, gate="Q4_1", down="Q5_1"),
    "deepseek2-mtp": Description("deepseek2", mtp=1),
    "gemma4": Description("gemma4", fused=True, scales=("down",), gate="Q8_0", down="Q8_0"),
    "scaled": Description("qwen3moe", scales=("gate", "up", "down"), gate="F16", up="F16", down="F16"),
    "nemotron_h_moe": Description("nemotron_h_moe", layers=4, up="Q8_0", down="Q8_0"),
    "qwen35moe": Description("qwen35moe", layers=4, fused=True, gate="Q8_0", down="Q8_0"),
    "qwen35moe-mtp": Description("qwen35moe", layers=4, mtp=1),
    "grovemoe": Description("grovemoe", ff=64),
    "mixed": Description("qwen3moe", layers=4, embd=256, ff=256, gate=("Q4_K", "Q5_0"), up=("Q4_K", "Q5_0"), down=("Q6_K", "Q4_K")),
}
