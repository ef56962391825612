"""A tiny model of every MoE architecture that llama.cpp 0.3.36 loads, from the compact descriptions in `archs.json`: metadata, tensor names, shapes.

A description is an object of "metadata" (without the prefix of the architecture) and "tensors" (name to shape in ggml order). `*` in a name is every
block that lacks a line of its own; `E` in a shape is the number of experts.
"""

from __future__ import annotations

import json
import re
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter
from synthetic import add_metadata, block_size, encode, finish

VOCAB = 128  # token ids only, there is no tokenizer
DIFFUSION = ("llada-moe", "rnd1")  # not token by token: refused
NEVER_COMPUTED = ("refact",)  # llama.cpp loads its experts, and its graph has none
_EXPERT = re.compile(r"blk\.\d+\.ffn_(gate|up|down|gate_up)_(ch)?exps\.weight")


@cache
def descriptions() -> dict[str, dict[str, Any]]:
    """By architecture."""
    found: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("archs.json").read_text("utf-8"))
    return found


def shapes(description: dict[str, Any], experts: int) -> dict[str, tuple[int, ...]]:
    """Every tensor with its shape, in ggml order."""
    n_blocks, found = int(description["metadata"]["block_count"]), {}
    for name, shape in description["tensors"].items():
        sizes = tuple(experts if n == "E" else int(n) for n in shape.split())
        for full in [name.replace("*", str(block)) for block in range(n_blocks)] if "*" in name else [name]:
            found[full] = sizes
    return found


def build_arch(arch: str, path: Path, *, experts: int = 8, used: int = 2, types: tuple[str, str] = ("F32", "F32"), scales: bool = False) -> Path:
    """Write the model and return `path`. `types`: of gate and up, and of down; F32 where rows are no multiple of a block. `scales`: every expert
    weight but a fused one has a scale per expert."""
    description = descriptions()[arch]
    writer = GGUFWriter(path, arch)
    writer.add_name(f"tiny {arch}")
    writer.add_tokenizer_model("none")
    add_metadata(writer, arch, {**description["metadata"], "expert_count": experts, "expert_used_count": used, "vocab_size": VOCAB})
    for name, shape in shapes(description, experts).items():
        match = _EXPERT.fullmatch(name)
        kind = types[match[1] == "down"] if match else "F32"
        kind = kind if shape[0] % block_size(kind) == 0 else "F32"
        writer.add_tensor(name, encode(numbers(name, shape), kind), raw_dtype=GGMLQuantizationType[kind])
        if match and scales and not match[2] and match[1] != "gate_up":  # llama.cpp reads no scale of those
            name = name.replace("weight", "scale")
            writer.add_tensor(name, np.abs(numbers(name, shape[-1:])) + np.float32(0.3), raw_dtype=GGMLQuantizationType.F32)
    finish(writer)
    return path


def numbers(name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Seeded by the name. Norms are about one, and what decays in recurrent blocks is negative."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    data = rng.standard_normal(shape[::-1], dtype=np.float32)
    if "norm" in name and name.endswith("weight"):
        return data * np.float32(0.1) + 1
    if name.endswith("ssm_a"):
        return -np.abs(data) - np.float32(0.1)
    if "ffn_gate_inp" in name:
        return data * np.float32(2 * shape[0] ** -0.5)
    return data * np.float32(0.1 if name.endswith("bias") or len(shape) == 1 else shape[0] ** -0.5)
