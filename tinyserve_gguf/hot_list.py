"""The hot list of a model: how often decode used each of its experts, over many runs. A small file in the user's cache directory."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import Any

from tinyserve_gguf.facts import ModelFacts
from tinyserve_gguf.kept import UNUSABLE, KeptFile

HALF_LIFE = 4096  # decoded graphs after which a use counts half. The pools forget in 128: they follow the text, the list follows the user
Layer = tuple[int, str]  # block of the model, family of experts


@dataclass(frozen=True, slots=True)
class HotList:
    """`uses[block, family][expert]`: graphs of decode that used the expert, out of `graphs`, older ones counting less."""

    graphs: float
    uses: dict[Layer, tuple[float, ...]]

    def ranked(self) -> list[tuple[Layer, int]]:
        """All experts, the most used ones first; equal ones in the order of the model."""
        found = [(layer, expert) for layer, uses in self.uses.items() for expert in range(len(uses))]
        return sorted(found, key=lambda one: -self.uses[one[0]][one[1]])

    def since(self, before: HotList) -> HotList:
        """What came after `before`, if neither aged."""
        uses = {layer: tuple(a - b for a, b in zip(now, before.uses[layer], strict=True)) for layer, now in self.uses.items()}
        return HotList(self.graphs - before.graphs, uses)

    def followed_by(self, later: HotList) -> HotList:
        """Both together, this one aged by the graphs of the later one."""
        kept = 0.5 ** (later.graphs / HALF_LIFE)
        uses = {layer: tuple(kept * a + b for a, b in zip(self.uses[layer], new, strict=True)) for layer, new in later.uses.items()}
        return HotList(kept * self.graphs + later.graphs, uses)


def list_file(facts: ModelFacts) -> KeptFile:
    """Where the list of this model file is kept. The model file is known by its name and size, as in `miss_memory`: it may move."""
    key = b"%s | %d bytes" % (os.fsencode(facts.path.name), facts.file_bytes)
    return KeptFile("hot", f"{facts.path.stem[:80]}-{hashlib.sha256(key).hexdigest()[:12]}.json", version=1)


def shape(facts: ModelFacts) -> dict[Layer, int]:
    """Experts of every layer, as a list must have them."""
    return {(layer.block, layer.family): layer.n_expert for layer in facts.expert_layers}


def read_list(facts: ModelFacts) -> tuple[HotList | None, str | None]:
    """What was kept, and a line about a file that cannot be used."""
    file = list_file(facts)
    try:
        content = file.read()
        return (None if content is None else _parse(content, shape(facts))), None
    except UNUSABLE as error:
        return None, file.not_used(error)


def write_list(facts: ModelFacts, found: HotList) -> str | None:
    """Keep it. A line, if it cannot be written."""
    layers = [{"block": block, "family": family, "uses": [round(n, 2) for n in uses]} for (block, family), uses in found.uses.items()]
    trouble = list_file(facts).write({"model": facts.path.name, "graphs": round(found.graphs, 2), "layers": layers}, indent=None)
    return f"the hot list cannot be kept: {trouble}" if trouble else None


def _parse(content: dict[str, Any], wanted: dict[Layer, int]) -> HotList:
    """One of UNUSABLE if it is damaged, or of another model."""
    uses = {(int(one["block"]), str(one["family"])): tuple(float(n) for n in one["uses"]) for one in content["layers"]}
    graphs = float(content["graphs"])
    if {layer: len(counts) for layer, counts in uses.items()} != wanted:
        raise ValueError("it is of a model with other experts")
    if not all(0 <= n < float("inf") for n in (graphs, *(n for counts in uses.values() for n in counts))):  # also false for nan
        raise ValueError("it holds a number that is no count")
    return HotList(graphs, uses)
