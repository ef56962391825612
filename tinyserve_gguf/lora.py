"""LoRA adapters: what their files hold, and what of it lies on a device. They lie there whole, beside the weights that they change."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tinyserve_gguf._ggufio import read_header
from tinyserve_gguf._llama import C, NativeModel, explained
from tinyserve_gguf.errors import ModelFileError, OptionError
from tinyserve_gguf.facts import INPUTS, ModelFacts
from tinyserve_gguf.needs import Needs
from tinyserve_gguf.plan import size

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter at one scale. `sizes`: bytes per weight that it changes."""

    path: Path
    scale: float
    sizes: dict[str, int] = field(repr=False)

    def __str__(self) -> str:
        return f"{self.path}, scale {self.scale:g}, {size(sum(self.sizes.values()))} for {len(self.sizes)} weights"

    def open_for(self, model: NativeModel) -> None:
        """Contexts that are made from now on use it. ModelFileError if llama.cpp refuses it."""
        with explained() as cause:
            adapter = C.llama_adapter_lora_init(model.handle, os.fsencode(self.path))
            if not adapter:
                raise ModelFileError(f"{self.path}: llama.cpp cannot load this adapter: {cause()}")
        model.hold_adapter(adapter, self.scale)

    def bytes_on(self, part: ModelFacts) -> int:
        """Device memory where these tensors of the model lie, which may be those of one of several devices."""
        return sum(self.sizes.get(tensor.name, 0) for tensor in part.tensors if tensor.name not in INPUTS)


def read_adapters(
    facts: ModelFacts, lora: PathLike | Sequence[PathLike] = (), lora_scaled: Sequence[tuple[PathLike, float]] = ()
) -> tuple[Adapter, ...]:
    """Adapters for a model, those of `lora` at scale 1. ModelFileError for a file that is none, or is for another model; OptionError for a scale
    that would do nothing."""
    plain = (lora,) if isinstance(lora, str | os.PathLike) else lora
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in lora_scaled):
        raise OptionError(f"lora_scaled is a list of pairs of a file and its scale, not {lora_scaled!r}")
    return tuple(_read(facts, Path(path), float(scale)) for path, scale in (*((path, 1.0) for path in plain), *lora_scaled))


def with_adapters(needs: Needs, adapters: Sequence[Adapter], part: ModelFacts) -> Needs:
    """What is needed of a device that holds these tensors of the model, adapters included."""
    return replace(needs, weights=needs.weights + sum(adapter.bytes_on(part) for adapter in adapters))


def _read(facts: ModelFacts, path: Path, scale: float) -> Adapter:
    if not math.isfinite(scale) or scale == 0:
        raise OptionError(f"{path}: the scale of an adapter is a number other than 0, not {scale:g}")
    header = read_header(path)
    if (header.metadata.get("general.type"), header.metadata.get("adapter.type")) != ("adapter", "lora"):
        raise ModelFileError(f"{path}: is no LoRA adapter; llama.cpp's convert_lora_to_gguf.py makes one")
    architecture = header.metadata.get("general.architecture")
    if architecture != facts.architecture:
        raise ModelFileError(f"{path}: is an adapter for {architecture}, and {facts.name} is {facts.architecture}")
    sizes: Counter[str] = Counter()
    for tensor in header.tensors:
        sizes[tensor.name.removesuffix(".lora_a").removesuffix(".lora_b")] += tensor.n_bytes
    unknown = sorted(sizes.keys() - {tensor.name for tensor in facts.tensors})
    if unknown:
        raise ModelFileError(f"{path}: changes {unknown[0]}, which {facts.name} has not: it is an adapter for another model")
    return Adapter(path, scale, dict(sizes))
