"""Writes tiny GGUFs for tests of the header, good ones and broken ones. Weights are zeros, and there is no vocabulary: nothing here can be loaded.

Everything a damaged file can have is a parameter: a type number nobody knows, an offset that overlaps, a name that comes twice, a file cut short.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

EMBED, FF = 64, 32  # columns and rows of the experts: multiples of the smallest blocks
ALIGNMENT = 32
U16, U32, I32, F32, BOOL, STRING, ARRAY = 2, 4, 5, 6, 7, 8, 9


@dataclass(frozen=True)
class Typed:
    """A metadata value stored as this gguf type."""

    kind: int
    value: int


Value = str | bool | int | float | Typed | list[int] | list[str]


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]  # ggml order
    type: str = "F32"
    type_id: int | None = None  # written in place of the number of `type`
    shift: int = 0  # added to the offset

    @property
    def n_bytes(self) -> int:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[self.type]]
        return math.prod(self.shape) // block * size


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Value) -> bytes:
    if isinstance(value, Typed):
        return struct.pack("<I", value.kind) + struct.pack("<" + {U16: "H", U32: "I", I32: "i"}[value.kind], value.value)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _text(value)
    if isinstance(value, bool):
        return struct.pack("<I?", BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", U32, value)
    if isinstance(value, float):
        return struct.pack("<If", F32, value)
    if value and isinstance(value[0], str):
        return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(_text(str(item)) for item in value)
    return struct.pack("<IIQ", ARRAY, U32, len(value)) + b"".join(struct.pack("<I", item) for item in value)


def write_gguf(
    path: Path, arch: str, metadata: Mapping[str, Value], tensors: Iterable[Tensor], *, version: int = 3, cut: int = 0, repeat: str = ""
) -> Path:
    """Writes a GGUF and gives its path. A key without a dot gets the prefix of the architecture; `arch=""` writes no architecture.

    `cut` takes so many bytes off the end; `repeat` is a key to write twice.
    """
    pairs: list[tuple[str, Value]] = [("general.architecture", arch)] if arch else []
    pairs += [(key if "." in key else f"{arch}.{key}", value) for key, value in metadata.items()]
    pairs += [(key, value) for key, value in pairs if key == repeat]
    listed = list(tensors)
    header = b"GGUF" + struct.pack("<IQQ", version, len(listed), len(pairs))
    for key, value in pairs:
        header += _text(key) + _value(value)
    offset = 0
    for tensor in listed:
        type_id = GGMLQuantizationType[tensor.type].value if tensor.type_id is None else tensor.type_id
        header += _text(tensor.name) + struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        header += struct.pack("<IQ", type_id, offset + tensor.shift)
        offset += _padded(tensor.n_bytes)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(header)
        file.truncate((_padded(len(header)) if listed else len(header)) + offset - cut)
    return path


def _padded(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


def keys(n_blocks: int = 2, n_expert: int = 4, n_used: int | list[int] = 2, **more: Value) -> dict[str, Value]:
    """Metadata of a MoE."""
    return {
        "general.name": "Tiny",
        "block_count": n_blocks,
        "context_length": 256,
        "embedding_length": EMBED,
        "expert_count": n_expert,
        "expert_used_count": n_used,
        **more,
    }


def experts(
    block: int, *, n: int = 4, gate: str = "Q8_0", up: str = "Q8_0", down: str = "Q8_0", bias: bool = False, scale: bool = False
) -> list[Tensor]:
    """Expert weights of one block."""
    parts = (("gate", gate, EMBED, FF), ("up", up, EMBED, FF), ("down", down, FF, EMBED))
    found = [Tensor(f"blk.{block}.ffn_{role}_exps.weight", (ne0, ne1, n), kind) for role, kind, ne0, ne1 in parts]
    if bias:
        found += [Tensor(f"blk.{block}.ffn_{role}_exps.bias", (ne1, n)) for role, _, _, ne1 in parts]
    if scale:
        found += [Tensor(f"blk.{block}.ffn_{role}_exps.scale", (n,)) for role, _, _, _ in parts]
    return found


def fused(block: int, *, n: int = 4) -> list[Tensor]:
    """Expert weights of one block with gate and up in one tensor."""
    return [
        Tensor(f"blk.{block}.ffn_gate_up_exps.weight", (EMBED, 2 * FF, n), "Q8_0"),
        Tensor(f"blk.{block}.ffn_down_exps.weight", (FF, EMBED, n), "Q8_0"),
    ]


def rest(n_blocks: int = 2, *, n_expert: int = 4, shared: bool = False, output: bool = True) -> list[Tensor]:
    """Everything of a model but the experts, as far as facts look at it."""
    found = [Tensor("token_embd.weight", (EMBED, 100), "F16")]
    found += [Tensor("output.weight", (EMBED, 100), "Q8_0")] if output else []
    for block in range(n_blocks):
        found.append(Tensor(f"blk.{block}.attn_norm.weight", (EMBED,)))
        found.append(Tensor(f"blk.{block}.ffn_gate_inp.weight", (EMBED, n_expert)))
        if shared:
            found.append(Tensor(f"blk.{block}.ffn_up_shexp.weight", (EMBED, FF), "Q8_0"))
    return found


def write_shards(
    folder: Path, prefix: str, parts: list[list[Tensor]], *, total: int | None = None, extra: Mapping[str, Value] | None = None
) -> list[Path]:
    """A split model, one file per list of tensors. `total` is what split.tensors.count says; `extra` goes into every file."""
    paths = []
    for i, tensors in enumerate(parts):
        split: dict[str, Value] = {
            "split.no": Typed(U16, i),
            "split.count": Typed(U16, len(parts)),
            "split.tensors.count": Typed(I32, sum(map(len, parts)) if total is None else total),
        }
        path = folder / f"{prefix}-{i + 1:05d}-of-{len(parts):05d}.gguf"
        paths.append(write_gguf(path, "qwen3moe", {**(keys() if i == 0 else {}), **split, **(extra or {})}, tensors))
    return paths
