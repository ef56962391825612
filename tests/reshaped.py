"""Synthetic models with their experts taken apart: a dense model, and the old layout with one tensor per expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, GGUFWriter, ReaderTensor
from synthetic import finish

from tinyserve_gguf.demo import copy_metadata

Named = Iterator[tuple[str, npt.NDArray[np.generic]]]


def dense(moe: Path, path: Path) -> Path:
    """Write the first expert of every block of `moe`, a llama, as the block's only FFN."""

    def parts(name: str, tensor: ReaderTensor) -> Named:
        yield name.replace("_exps", ""), tensor.data[0]

    return _write(moe, path, parts, skip=("llama.expert_count", "llama.expert_used_count"))


def per_expert(moe: Path, path: Path) -> Path:
    """Write `moe`, a llama, as Mixtral files were before April 2024."""

    def parts(name: str, tensor: ReaderTensor) -> Named:
        for i, data in enumerate(tensor.data):
            yield name.replace("_exps", f".{i}"), data

    return _write(moe, path, parts)


def _write(moe: Path, path: Path, parts: Callable[[str, ReaderTensor], Named], skip: tuple[str, ...] = ()) -> Path:
    reader = GGUFReader(moe)
    writer = GGUFWriter(path, "llama")
    copy_metadata(reader, writer, skip)
    for tensor in reader.tensors:
        if skip and tensor.name.endswith("ffn_gate_inp.weight"):
            continue  # a dense model has no router
        for name, data in parts(tensor.name, tensor) if "_exps" in tensor.name else ((tensor.name, tensor.data),):
            writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=gguf.GGMLQuantizationType(tensor.tensor_type))
    finish(writer)
    return path
