#!/usr/bin/env python3
"""Write a random GGUF in the geometry of a real MoE model, for benchmarks without a model hub.

    python scripts/make_model.py gpt-oss-20b model.gguf            # MXFP4 experts, 12 GB
    python scripts/make_model.py qwen3-30b-a3b model.gguf --skew 2 --experts Q6_K

The weights are random valid blocks of the right scale, so sizes, shapes and kernels are the real ones and the text is noise. Embeddings carry
a constant that the router sees through --skew: a normal bias per expert and layer, so that some experts are picked more often than others, as in
real models.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
    expert_type: str
    other_type: str
    pre: str  # tokenizer


MODELS = {
    "gpt-oss-20b": Geometry("gpt-oss", 24, 32, 4, 2880, 2880, 64, 8, 64, 201088, "MXFP4", "Q8_0", "gpt-4o"),
    "gpt-oss-120b": Geometry("gpt-oss", 36, 128, 4, 2880, 2880, 64, 8, 64, 201088, "MXFP4", "Q8_0", "gpt-4o"),
    "qwen3-30b-a3b": Geometry("qwen3moe", 48, 128, 8, 2048, 768, 32, 4, 128, 151936, "Q4_K", "Q4_K", "qwen2"),
}

# Where the block's float16 (or exponent) scales lie, and what makes the values of a block of random bytes have a standard deviation of 1.
SCALES: dict[T, Callable[[Bytes, float], None]] = {
    T.MXFP4: lambda a, std: a.__setitem__((slice(None), 0), round(127 + np.log2(std / 3.3))),
    T.Q4_K: lambda a, std: _put(a, (0, std / 200), (2, std / 200 * 7.5)),
    T.Q5_K: lambda a, std: _put(a, (0, std / 300), (2, std / 300 * 15.5)),
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
        return (*self.shape[:0:-1], self.shape[0] // block * size)

    def data(self) -> npt.NDArray[np.generic]:
        if self.make is not None:
            return self.make().astype(np.float16 if self.kind == T.F16 else np.float32)
        blocks = noise(int(np.prod(self.bytes_shape()))).reshape(-1, gguf.GGML_QUANT_SIZES[self.kind][1])
        SCALES[self.kind](blocks, self.std)
        return blocks.reshape(self.bytes_shape())


def normal(*shape: int, std: float = 1.0, mean: float = 0.0) -> Callable[[], npt.NDArray[np.float32]]:
    return lambda: (RNG.standard_normal(shape, dtype=np.float32) * std + mean).astype(np.float32)


def tensors(g: Geometry, skew: float) -> Iterator[Tensor]:
    is_oss = g.arch == "gpt-oss"
    other, expert = T[g.other_type], T[g.expert_type]
    # What layers add to the residual stream is the same for all tokens in a random network; damped, routing stays a matter of the token in deep
    # layers too.
    damp = 1.0 if is_oss else 0.1

    def embedding() -> npt.NDArray[np.float32]:
        values = RNG.standard_normal((g.vocab, g.embd), dtype=np.float32)
        values[:, 0] = 30.0  # the constant that the router's first column turns into a bias per expert
        return values

    def router() -> npt.NDArray[np.float32]:
        values = normal(g.experts, g.embd, std=g.embd**-0.5)()
        if not is_oss:  # gpt-oss has a router bias of its own
            values[:, 0] = RNG.standard_normal(g.experts) * skew / 25
        return values

    if is_oss:
        yield Tensor("token_embd.weight", other, (g.embd, g.vocab), 1.0)
    else:
        yield Tensor("token_embd.weight", T.F16, (g.embd, g.vocab), make=embedding)
    yield Tensor("output_norm.weight", T.F32, (g.embd,), make=normal(g.embd, std=0, mean=1))
    yield Tensor("output.weight", other, (g.embd, g.vocab), g.embd**-0.5)
    for layer in range(g.layers):
        p = f"blk.{layer}."
        for name in ("attn_norm", "post_attention_norm" if is_oss else "ffn_norm"):
            yield Tensor(f"{p}{name}.weight", T.F32, (g.embd,), make=normal(g.embd, std=0, mean=1))
        for name, rows in (("attn_q", g.heads * g.head), ("attn_k", g.kv_heads * g.head), ("attn_v", g.kv_heads * g.head)):
            yield Tensor(f"{p}{name}.weight", other, (g.embd, rows), g.embd**-0.5)
            if is_oss:
                yield Tensor(f"{p}{name}.bias", T.F32, (rows,), make=normal(rows, std=0.02))
        yield Tensor(f"{p}attn_output.weight", other, (g.heads * g.head, g.embd), damp * (g.heads * g.head) ** -0.5)
        if is_oss:
            yield Tensor(f"{p}attn_output.bias", T.F32, (g.embd,), make=normal(g.embd, std=0.02))
            yield Tensor(f"{p}attn_sinks.weight", T.F32, (g.heads,), make=normal(g.heads))
            yield Tensor(f"{p}ffn_gate_inp.bias", T.F32, (g.experts,), make=normal(g.experts, std=skew))
        else:
            for name in ("attn_q_norm", "attn_k_norm"):
                yield Tensor(f"{p}{name}.weight", T.F32, (g.head,), make=normal(g.head, std=0, mean=1))
        yield Tensor(f"{p}ffn_gate_inp.weight", T.F32, (g.embd, g.experts), make=router)
        for name, columns, rows in (("gate", g.embd, g.expert_ff), ("up", g.embd, g.expert_ff), ("down", g.expert_ff, g.embd)):
            yield Tensor(f"{p}ffn_{name}_exps.weight", expert, (columns, rows, g.experts), (damp if name == "down" else 1.0) * columns**-0.5)
            if is_oss:
                yield Tensor(f"{p}ffn_{name}_exps.bias", T.F32, (rows, g.experts), make=normal(g.experts, rows, std=0.02))


def metadata(writer: GGUFWriter, g: Geometry) -> None:
    writer.add_block_count(g.layers)
    writer.add_context_length(131072)
    writer.add_embedding_length(g.embd)
    writer.add_feed_forward_length(g.expert_ff)
    writer.add_expert_feed_forward_length(g.expert_ff)
    writer.add_head_count(g.heads)
    writer.add_head_count_kv(g.kv_heads)
    writer.add_key_length(g.head)
    writer.add_value_length(g.head)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(150000.0 if g.arch == "gpt-oss" else 1e6)
    writer.add_expert_count(g.experts)
    writer.add_expert_used_count(g.used)
    if g.arch == "gpt-oss":
        writer.add_sliding_window(128)
        writer.add_rope_dimension_count(g.head)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(g.pre)
    writer.add_token_list([bytes([i]).decode("latin1") if i < 256 else f"<{i}>" for i in range(g.vocab)])
    writer.add_token_types([1] * g.vocab)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def write(g: Geometry, path: Path, skew: float) -> None:
    writer = GGUFWriter(path, g.arch)
    metadata(writer, g)
    everything = list(tensors(g, skew))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--experts", choices=[kind.name for kind in SCALES], help="type of the expert weights")
    parser.add_argument("--layers", type=int, help="fewer layers, for a quick try")
    parser.add_argument("--skew", type=float, default=1.0, help="standard deviation of the router's bias per expert")
    args = parser.parse_args()
    g = MODELS[args.model]
    g = Geometry(**{**g.__dict__, "expert_type": args.experts or g.expert_type, "layers": args.layers or g.layers})
    write(g, args.out, args.skew)


if __name__ == "__main__":
    main()
