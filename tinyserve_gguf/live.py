"""The expert cache of an open model: looked at as a whole, and given another size."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tinyserve_gguf._shim import Counts, Device, Pager  # loads llama.cpp, before numpy
from tinyserve_gguf.devices import memory_free
from tinyserve_gguf.plan import CacheSpec, Plan, size
from tinyserve_gguf.split import replan_all
from tinyserve_gguf.stats import hit_rate

import numpy as np  # isort: skip
import numpy.typing as npt  # isort: skip


@dataclass(frozen=True, slots=True)
class LayerMap:
    """The experts of one layer, arrays of [n_expert]."""

    block: int  # of the model
    family: str  # "exps"; GroveMoE's second one is "chexps"
    resident: npt.NDArray[np.bool_]
    hits: npt.NDArray[np.uint64]  # lookups that found it resident. Not counted while its pool holds everything
    misses: npt.NDArray[np.uint64]  # lookups that did not
    device: str  # whose slots they go to
    last_use: npt.NDArray[np.uint64]  # tick of the last use in decode, or of the last load; 0 = never


@dataclass(frozen=True, slots=True)
class ExpertMap:
    """All experts at one moment."""

    tick: int  # graphs that looked experts up so far: one a decoded token
    layers: tuple[LayerMap, ...]  # in the order of the model
    slots_total: int
    slots_resident: int
    all_resident: bool  # nothing moves, and nobody counts which experts are used
    prefill: Counts
    decode: Counts

    @property
    def evictions(self) -> int:
        """Experts that lost their slot."""
        return self.prefill.evictions + self.decode.evictions

    @property
    def bytes_moved(self) -> int:
        """Bytes over the link, host to device."""
        return self.prefill.bytes_link + self.decode.bytes_link

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        layers = [
            {
                "layer": layer.block,
                "family": layer.family,
                "device": layer.device,
                "resident": layer.resident.astype(int).tolist(),
                "hits": layer.hits.tolist(),
                "misses": layer.misses.tolist(),
                "last_use": layer.last_use.tolist(),
            }
            for layer in self.layers
        ]
        return {
            "tick": self.tick,
            "layers": layers,
            "slots": {"total": self.slots_total, "resident": self.slots_resident},
            "all_resident": self.all_resident,
            "hit_rate": {"prefill": hit_rate(self.prefill), "decode": hit_rate(self.decode)},
            "bytes_moved": self.bytes_moved,
            "evictions": self.evictions,
            "counts": {"prefill": asdict(self.prefill), "decode": asdict(self.decode)},
        }


def read_map(pager: Pager, plan: Plan) -> ExpertMap:
    """A consistent snapshot, of each device one. It waits for the graph that runs, a token at most, or one batch of a prompt."""
    layers = [layer for pool in plan.pools for layer in pool.group.layers]
    found = pager.expert_arrays(sum(layer.n_expert for layer in layers))
    resident = np.frombuffer(found.resident, np.bool_)
    hits, misses, last_use = (np.frombuffer(array, np.uint64) for array in (found.hits, found.misses, found.last_use))
    maps, start = [], 0
    for index, layer in enumerate(layers):
        part = slice(start, start + layer.n_expert)
        maps.append(LayerMap(layer.block, layer.family, resident[part], hits[part], misses[part], pager.device_of(index), last_use[part]))
        start += layer.n_expert
    maps.sort(key=lambda layer: (layer.block, layer.family))
    return ExpertMap(found.tick, tuple(maps), found.slots_total, found.slots_used, found.all_resident, found.prefill, found.decode)


@dataclass(frozen=True, slots=True)
class Resized:
    """What a change of the cache's size did."""

    slots_before: int
    slots: int
    n_experts: int
    kept: int  # experts that were resident and are
    evicted: int  # that were, and are not
    loaded: int  # that came over the link for it
    beside: bool  # the new pools were made beside the old ones; else there was no room for both
    bytes_link: int

    def line(self) -> str:
        """What was done, for people."""
        text = f"expert cache: {self.slots} of {self.n_experts} experts instead of {self.slots_before}; {self.kept} stayed, {self.evicted} left"
        if not self.beside:
            text += f"; there was no room for both sizes at once, so that those who stayed were read from host memory again ({size(self.bytes_link)})"
        elif self.loaded:
            text += f"; {self.loaded} came ({size(self.bytes_link)})"
        return text


def resize(pager: Pager, plan: Plan, expert_cache: str | int, device: Device) -> tuple[Plan, Resized]:
    """Give the pools of an open model another size. CapacityError with the arithmetic if it does not fit: nothing changed."""
    new = replan_all(plan, CacheSpec.parse(expert_cache), memory_free(device))
    before = pager.stats().slots_total
    done = pager.resize([pool.n_slots for pool in new.pools])
    n_experts = sum(pool.group.n_experts for pool in new.pools)
    return new, Resized(before, new.n_slots, n_experts, done.kept, done.evicted, done.loaded, done.beside, done.bytes_link)
