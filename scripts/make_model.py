#!/usr/bin/env python3
"""Write a random GGUF in the geometry of a real MoE model, for benchmarks without a model hub.

    python scripts/make_model.py gpt-oss-20b model.gguf                             # MXFP4 experts, 12 GB
    python scripts/make_model.py qwen3-30b-a3b model.gguf --skew 2 --experts Q6_K
    python scripts/make_model.py qwen3.6-35b-a3b model.gguf --down Q4_K,Q6_K        # types in turn over the layers, about as Q4_K_M has them
    python scripts/make_model.py qwen3.6-35b-a3b model.gguf --layers 4              # for a quick try; every fourth layer has attention

The weights are random valid blocks of the right scale, so sizes, shapes and kernels are the real ones and the text is noise. Embeddings carry
a constant that the router sees through --skew: a normal bias per expert and layer, so that some experts are picked more often than others, as in
real models. Blocks for multi-token prediction are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as T
from gguf import GGUFWriter
from rich.console import Console
from rich.progress import track

Bytes = npt.NDArray[np.uint8]
RNG = np.random.default_rng(7)
NOISE = RNG.integers(0, 256, size=64 << 20, dtype=np.uint8)  # random bytes are made once and reused from moving offsets


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta net in the place of attention, except in every `attention_every`th layer; and a gated shared expert in all layers."""

    key_heads: int = 16
    value_heads: int = 32
    head: int = 128
    conv: int = 4
    attention_every: int = 4
    shared_ff: int = 512
    rope: int = 64  # of the head of the attention layers
    rope_sections: tuple[int, ...] = (11, 11, 10, 0)


@dataclass(frozen=True)
class Geometry:
    arch: str
    layers: int
    experts: int
    used: int
    embd: int
    expert_ff: int
    heads: int
    kv_heads: int
    head: int
    vocab: int
    gate_types: tuple[str, ...]  # of the gate and up experts, in turn over the layers
    down_types: tuple[str, ...]
    other_type: str
    pre: str  # tokenizer
    context: int = 131072
    rope_base: float = 1e6
    norm_eps: float = 1e-5
    delta: DeltaNet | None = None

    def __post_init__(self) -> None:
        if self.delta and self.layers < self.delta.attention_every:
            raise ValueError(f"{self.arch} has attention in layer {self.delta.attention_every} for the first time, and llama.cpp aborts without any")


MODELS = {
    "gpt-oss-20b": Geometry("gpt-oss", 24, 32, 4, 2880, 2880, 64, 8, 64, 201088, ("MXFP4",), ("MXFP4",), "Q8_0", "gpt-4o", rope_base=150000.0),
    "gpt-oss-120b": Geometry("gpt-oss", 36, 128, 4, 2880, 2880, 64, 8, 64, 201088, ("MXFP4",), ("MXFP4",), "Q8_0", "gpt-4o", rope_base=150000.0),
    "qwen3-30b-a3b": Geometry("qwen3moe", 48, 128, 8, 2048, 768, 32, 4, 128, 151936, ("Q4_K",), ("Q4_K",), "Q4_K", "qwen2"),
    "qwen3.6-35b-a3b": Geometry(
        "qwen35moe", 40, 256, 8, 2048, 512, 16, 2, 256, 248320, ("Q4_K",), ("Q4_K",), "Q4_K", "qwen35", 262144, 1e7, 1e-6, DeltaNet()
    ),
}

# Where the block's float16 (or exponent) scales lie, and what makes the values of a block of random bytes have a standard deviation of about 1.
SCALES: dict[T, Callable[[Bytes, float], None]] = {
    T.MXFP4: lambda a, std: a.__setitem__((slice(None), 0), round(127 + np.log2(std / 3.3))),
    T.Q4_K: lambda a, std: _put(a, (0, std / 200), (2, std / 200 * 7.5)),
    T.Q5_K: lambda a, std: _put(a, (0, std / 527), (2, std / 527 * 15.5)),
    T.Q6_K: lambda a, std: _put(a, (208, std / (18 * 74))),
    T.Q8_0: lambda a, std: _put(a, (0, std / 74)),
    T.Q4_0: lambda a, std: _put(a, (0, std / 4.6)),
}


def _put(blocks: Bytes, *scales: tuple[int, float]) -> None:
    for at, value in scales:
        blocks[:, at : at + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)


def noise(n: int) -> Bytes:
    at = int(RNG.integers(0, len(NOISE)))
    return np.resize(np.roll(NOISE[: min(len(NOISE), n + 4096)], at % 4093), n)


@dataclass(frozen=True)
class Tensor:
    name: str
    kind: T
    shape: tuple[int, ...]  # ggml order, ne0 first
    std: float = 0.0
    make: Callable[[], npt.NDArray[np.float32]] | None = None  # for F32 and F16

    def bytes_shape(self) -> tuple[int, ...]:
        block, size = gguf.GGML_QUANT_SIZES[self.kind]
        if self.shape[0] % block:
            raise ValueError(f"{self.name} has rows of {self.shape[0]} numbers, which blocks of {block} ({self.kind.name}) do not divide")
        return (*self.shape[:0:-1], self.shape[0] // block * size)

    def data(self) -> npt.NDArray[np.generic]:
        if self.make is not None:
            return self.make().astype(np.float16 if self.kind == T.F16 else np.float32)
        blocks = noise(int(np.prod(self.bytes_shape()))).reshape(-1, gguf.GGML_QUANT_SIZES[self.kind][1])
        SCALES[self.kind](blocks, self.std)
        return blocks.reshape(self.bytes_shape())


def normal(*shape: int, std: float = 1.0, mean: float = 0.0) -> Callable[[], npt.NDArray[np.float32]]:
    return lambda: (RNG.standard_normal(shape, dtype=np.float32) * std + mean).astype(np.float32)


# ---- tensors of one layer -------------------------------------------------------------------------------------------------------------------


# What layers add to the residual stream is the same for all tokens in a random network; damped, routing stays a matter of the token in deep
# layers too.
DAMP = {"gpt-oss": 1.0, "qwen3moe": 0.1, "qwen35moe": 0.1}


def norm(name: str, n: int) -> Tensor:
    return Tensor(f"{name}.weight", T.F32, (n,), make=normal(n, std=0, mean=1))


def bias(name: str, *shape: int, std: float = 0.02) -> Tensor:
    """`shape` in ggml order."""
    return Tensor(f"{name}.bias", T.F32, shape, make=normal(*shape[::-1], std=std))


def matrix(g: Geometry, name: str, columns: int, rows: int, gain: float = 1.0) -> Tensor:
    return Tensor(f"{name}.weight", T[g.other_type], (columns, rows), gain * columns**-0.5)


def attention(g: Geometry, p: str, *, biases: bool = False, gated: bool = False) -> Iterator[Tensor]:
    q, kv = g.heads * g.head, g.kv_heads * g.head
    for name, rows in (("q", q * 2 if gated else q), ("k", kv), ("v", kv)):
        yield matrix(g, f"{p}attn_{name}", g.embd, rows)
        if biases:
            yield bias(f"{p}attn_{name}", rows)
    yield matrix(g, f"{p}attn_output", q, g.embd, DAMP[g.arch])
    if biases:
        yield bias(f"{p}attn_output", g.embd)
        yield Tensor(f"{p}attn_sinks.weight", T.F32, (g.heads,), make=normal(g.heads))
    else:
        yield norm(f"{p}attn_q_norm", g.head)
        yield norm(f"{p}attn_k_norm", g.head)


def delta_net(g: Geometry, d: DeltaNet, p: str) -> Iterator[Tensor]:
    inner = d.value_heads * d.head
    channels = inner + 2 * d.key_heads * d.head
    yield matrix(g, f"{p}attn_qkv", g.embd, channels)
    yield matrix(g, f"{p}attn_gate", g.embd, inner)
    yield Tensor(f"{p}ssm_conv1d.weight", T.F32, (d.conv, channels), make=normal(channels, d.conv, std=d.conv**-0.5))
    yield bias(f"{p}ssm_dt", d.value_heads)
    yield Tensor(f"{p}ssm_a", T.F32, (d.value_heads,), make=normal(d.value_heads, std=0.1, mean=-1))
    yield matrix(g, f"{p}ssm_beta", g.embd, d.value_heads)
    yield matrix(g, f"{p}ssm_alpha", g.embd, d.value_heads)
    yield norm(f"{p}ssm_norm", d.head)
    yield matrix(g, f"{p}ssm_out", inner, g.embd, DAMP[g.arch])


def router(g: Geometry, p: str, skew: float) -> Tensor:
    def values() -> npt.NDArray[np.float32]:
        found = normal(g.experts, g.embd, std=g.embd**-0.5)()
        if g.arch != "gpt-oss":  # which has a bias for that
            found[:, 0] = RNG.standard_normal(g.experts) * skew / 25
        return found

    return Tensor(f"{p}ffn_gate_inp.weight", T.F32, (g.embd, g.experts), make=values)


def experts(g: Geometry, layer: int, p: str, *, biases: bool = False) -> Iterator[Tensor]:
    for name, types, columns, rows, gain in (
        ("gate", g.gate_types, g.embd, g.expert_ff, 1.0),
        ("up", g.gate_types, g.embd, g.expert_ff, 1.0),
        ("down", g.down_types, g.expert_ff, g.embd, DAMP[g.arch]),
    ):
        yield Tensor(f"{p}ffn_{name}_exps.weight", T[types[layer % len(types)]], (columns, rows, g.experts), gain * columns**-0.5)
        if biases:
            yield bias(f"{p}ffn_{name}_exps", rows, g.experts)


def gpt_oss(g: Geometry, layer: int, p: str, skew: float) -> Iterator[Tensor]:
    yield norm(f"{p}attn_norm", g.embd)
    yield norm(f"{p}post_attention_norm", g.embd)
    yield from attention(g, p, biases=True)
    yield bias(f"{p}ffn_gate_inp", g.experts, std=skew)
    yield router(g, p, skew)
    yield from experts(g, layer, p, biases=True)


def qwen3moe(g: Geometry, layer: int, p: str, skew: float) -> Iterator[Tensor]:
    yield norm(f"{p}attn_norm", g.embd)
    yield norm(f"{p}ffn_norm", g.embd)
    yield from attention(g, p)
    yield router(g, p, skew)
    yield from experts(g, layer, p)


def qwen35moe(g: Geometry, layer: int, p: str, skew: float) -> Iterator[Tensor]:
    assert g.delta
    yield norm(f"{p}attn_norm", g.embd)
    yield norm(f"{p}post_attention_norm", g.embd)
    yield from delta_net(g, g.delta, p) if (layer + 1) % g.delta.attention_every else attention(g, p, gated=True)
    yield router(g, p, skew)
    yield from experts(g, layer, p)
    yield Tensor(f"{p}ffn_gate_inp_shexp.weight", T.F32, (g.embd,), make=normal(g.embd, std=g.embd**-0.5))
    yield matrix(g, f"{p}ffn_gate_shexp", g.embd, g.delta.shared_ff)
    yield matrix(g, f"{p}ffn_up_shexp", g.embd, g.delta.shared_ff)
    yield matrix(g, f"{p}ffn_down_shexp", g.delta.shared_ff, g.embd, DAMP[g.arch])


LAYERS = {"gpt-oss": gpt_oss, "qwen3moe": qwen3moe, "qwen35moe": qwen35moe}


# ---- whole models ---------------------------------------------------------------------------------------------------------------------------


def tensors(g: Geometry, skew: float) -> Iterator[Tensor]:
    """Every tensor of the file, in its order. Their numbers are drawn in that order too, so they stay what they are while the list does."""

    def embedding() -> npt.NDArray[np.float32]:
        values = RNG.standard_normal((g.vocab, g.embd), dtype=np.float32)
        values[:, 0] = 30.0  # the constant that the router's first column turns into a bias per expert
        return values

    if g.arch == "gpt-oss":
        yield Tensor("token_embd.weight", T[g.other_type], (g.embd, g.vocab), 1.0)
    else:
        yield Tensor("token_embd.weight", T.F16, (g.embd, g.vocab), make=embedding)
    yield norm("output_norm", g.embd)
    yield matrix(g, "output", g.embd, g.vocab)
    for layer in range(g.layers):
        yield from LAYERS[g.arch](g, layer, f"blk.{layer}.", skew)


def metadata(writer: GGUFWriter, g: Geometry) -> None:
    writer.add_block_count(g.layers)
    writer.add_context_length(g.context)
    writer.add_embedding_length(g.embd)
    writer.add_feed_forward_length(g.expert_ff)
    writer.add_expert_feed_forward_length(g.expert_ff)
    writer.add_head_count(g.heads)
    writer.add_head_count_kv(g.kv_heads)
    writer.add_key_length(g.head)
    writer.add_value_length(g.head)
    writer.add_layer_norm_rms_eps(g.norm_eps)
    writer.add_rope_freq_base(g.rope_base)
    writer.add_expert_count(g.experts)
    writer.add_expert_used_count(g.used)
    if g.arch == "gpt-oss":
        writer.add_sliding_window(128)
        writer.add_rope_dimension_count(g.head)
    if g.delta:
        writer.add_expert_shared_feed_forward_length(g.delta.shared_ff)
        writer.add_rope_dimension_count(g.delta.rope)
        writer.add_rope_dimension_sections(g.delta.rope_sections)
        writer.add_ssm_conv_kernel(g.delta.conv)
        writer.add_ssm_state_size(g.delta.head)
        writer.add_ssm_group_count(g.delta.key_heads)
        writer.add_ssm_time_step_rank(g.delta.value_heads)
        writer.add_ssm_inner_size(g.delta.value_heads * g.delta.head)
        writer.add_full_attention_interval(g.delta.attention_every)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(g.pre)
    writer.add_token_list([bytes([i]).decode("latin1") if i < 256 else f"<{i}>" for i in range(g.vocab)])
    writer.add_token_types([1] * g.vocab)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def write(g: Geometry, path: Path, skew: float) -> None:
    """ValueError, and no file, if a type's blocks do not divide the rows of a tensor."""
    everything = list(tensors(g, skew))
    for t in everything:
        t.bytes_shape()
    writer = GGUFWriter(path, g.arch)
    metadata(writer, g)
    for t in everything:
        if t.kind in (T.F32, T.F16):
            kind = np.dtype(np.float32 if t.kind == T.F32 else np.float16)
            writer.add_tensor_info(t.name, t.shape[::-1], kind, int(np.prod(t.shape)) * kind.itemsize)
        else:
            writer.add_tensor_info(t.name, t.bytes_shape(), np.dtype(np.uint8), int(np.prod(t.bytes_shape())), raw_dtype=t.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for t in track(everything, f"writing {path.name}", console=Console(stderr=True)):
        writer.write_tensor_data(t.data())
    writer.close()


def types(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in (kind.name for kind in SCALES):
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(kind.name for kind in SCALES)}")
    return names


def at_least(kind: type[int] | type[float], least: int) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = kind(text)
        if not least <= value < np.inf:
            raise argparse.ArgumentTypeError(f"{text} is not {least} or more")
        return value

    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--experts", type=types, metavar="TYPES", help="type of the expert weights, or several in turn over the layers: Q4_K,Q5_K")
    parser.add_argument("--down", type=types, metavar="TYPES", help="the same for the down experts alone")
    parser.add_argument("--others", choices=[kind.name for kind in SCALES], help="type of all other matrices")
    parser.add_argument("--layers", type=at_least(int, 1), help="fewer layers, for a quick try")
    parser.add_argument("--skew", type=at_least(float, 0), default=1.0, help="standard deviation of the router's bias per expert")
    args = parser.parse_args()
    g = MODELS[args.model]
    try:
        g = replace(
            g,
            gate_types=args.experts or g.gate_types,
            down_types=args.down or args.experts or g.down_types,
            other_type=args.others or g.other_type,
            layers=args.layers or g.layers,
        )
        write(g, args.out, args.skew)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
