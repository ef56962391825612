"""Handles of single experts: their bytes, where they are, and what may be done with them by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import gguf
import numpy as np
import numpy.typing as npt

from tinyserve_gguf._shim import ExpertState, Pager
from tinyserve_gguf.errors import OptionError
from tinyserve_gguf.facts import ExpertLayer, PartFacts

if TYPE_CHECKING:
    from tinyserve_gguf._torch import Tensor


@dataclass(frozen=True, slots=True)
class ExpertWeight:
    """One weight of one expert, [ne1, ne0] as numpy counts, in the host pool."""

    pager: Pager
    index: int  # of the layer in the pager
    expert: int
    part: int
    facts: PartFacts

    def __repr__(self) -> str:
        return f"<{self.facts.weight.name}[{self.expert}]: {self.type} {list(self.shape)}>"

    @property
    def type(self) -> str:
        """ggml type, such as "Q4_K"."""
        return self.facts.weight.type

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) = (output features, input features)."""
        return self.facts.weight.ne(1), self.facts.weight.ne(0)

    @property
    def raw(self) -> npt.NDArray[np.uint8]:
        """The quantised bytes, [rows, bytes of a row]: a read-only view of the host pool, valid while the model is open."""
        return np.frombuffer(self.pager.expert_host(self.index, self.expert, self.part), dtype=np.uint8).reshape(self.shape[0], -1)

    def torch(self) -> Tensor:
        """The same bytes as a uint8 tensor that shares memory with the host pool. Needs the extra `tinyserve-gguf[torch]`. Do not write to it."""
        from tinyserve_gguf import _torch

        return _torch.bytes_tensor(self.raw)

    def dequantize(self) -> npt.NDArray[np.float32]:
        """float32 values, [rows, columns], by gguf's reference dequantisers. OptionError for a type that has none there (Q1_0)."""
        kind = gguf.GGMLQuantizationType(self.facts.weight.type_id)
        try:
            values = gguf.quants.dequantize(self.raw, kind)
        except NotImplementedError as error:
            raise OptionError(f"the gguf package cannot dequantise {self.type}") from error
        return np.asarray(values, dtype=np.float32).reshape(self.shape)

    def in_slot(self) -> npt.NDArray[np.uint8]:
        """The bytes that lie in the expert's slot now, copied back from the device. EngineError if it is not resident."""
        raw = self.raw
        data = self.pager.expert_slot_bytes(self.index, self.expert, self.part, raw.nbytes)
        return np.frombuffer(data, dtype=np.uint8).reshape(raw.shape)


@dataclass(frozen=True, slots=True)
class Expert:
    """One routed expert of one layer. State is read anew with every property."""

    pager: Pager
    index: int  # of the layer in the pager
    layer: int  # block of the model
    expert: int
    facts: ExpertLayer

    def __repr__(self) -> str:
        family = "" if self.facts.family == "exps" else f" of {self.facts.family}"
        try:
            state = self.state
        except OptionError:
            where = "closed"
        else:
            where = ("pinned in " if state.pinned else "") + f"slot {state.slot}" if state.slot >= 0 else "in host memory"
        return f"<expert {self.expert}{family} of layer {self.layer}: {self.n_bytes:,} bytes, {where}>"

    def _weight(self, role: str) -> ExpertWeight | None:
        for i, part in enumerate(self.facts.parts):
            if part.role == role:
                return ExpertWeight(self.pager, self.index, self.expert, i, part)
        return None

    @property
    def gate(self) -> ExpertWeight | None:
        """None where the model has no gate, or a fused `gate_up`."""
        return self._weight("gate")

    @property
    def up(self) -> ExpertWeight | None:
        """None where the model has a fused `gate_up`."""
        return self._weight("up")

    @property
    def gate_up(self) -> ExpertWeight | None:
        return self._weight("gate_up")

    @property
    def down(self) -> ExpertWeight | None:
        return self._weight("down")

    @property
    def weights(self) -> dict[str, ExpertWeight]:
        """All its weights by role."""
        return {part.role: ExpertWeight(self.pager, self.index, self.expert, i, part) for i, part in enumerate(self.facts.parts)}

    @property
    def n_bytes(self) -> int:
        return self.facts.bytes_per_expert

    @property
    def device(self) -> str:
        """The device whose slots it goes to: that of its layer."""
        return self.pager.device_of(self.index)

    @property
    def state(self) -> ExpertState:
        return self.pager.expert(self.index, self.expert)

    @property
    def resident(self) -> bool:
        return self.state.slot >= 0

    @property
    def slot(self) -> int | None:
        """Slot in its pool, None while it lies in host memory only."""
        slot = self.state.slot
        return slot if slot >= 0 else None

    @property
    def hits(self) -> int:
        """Lookups that found it resident. Not counted while everything is resident: then nobody reads the router's ids."""
        return self.state.hits

    @property
    def misses(self) -> int:
        return self.state.misses

    @property
    def pinned(self) -> bool:
        return self.state.pinned

    def pin(self) -> None:
        """Load it and keep it. EngineError if too few slots would be left for one token."""
        self.pager.pin(self.index, self.expert, True)

    def unpin(self) -> None:
        self.pager.pin(self.index, self.expert, False)

    def prefetch(self) -> None:
        """Load it now, in the place of the expert that the policy would evict."""
        self.pager.prefetch(self.index, self.expert)

    def evict(self) -> None:
        """Free its slot. EngineError if it is pinned, or if its pool holds everything."""
        self.pager.evict(self.index, self.expert)


class Experts:
    """`experts[layer, expert]`: handles of every routed expert. `layer` is the block number of the model."""

    def __init__(self, pager: Pager, layers: dict[tuple[int, str], tuple[int, ExpertLayer]]) -> None:
        self.pager = pager
        self._layers = layers

    def __repr__(self) -> str:
        return f"<{len(self):,} experts in {len(self._layers)} layers>"

    def __getitem__(self, key: tuple[int, int] | tuple[int, int, str]) -> Expert:
        """KeyError with the valid range if there is no such layer or expert. GroveMoE's second family: `experts[layer, expert, "chexps"]`."""
        block, expert, family = (*key, "exps")[:3]
        if (block, family) not in self._layers:
            raise KeyError(f"layer {block} has no routed experts; layers that have: {sorted({b for b, f in self._layers if f == family})}")
        index, facts = self._layers[block, family]
        if not 0 <= expert < facts.n_expert:
            raise KeyError(f"layer {block} has experts 0 to {facts.n_expert - 1}, not {expert}")
        return Expert(self.pager, index, block, expert, facts)

    @property
    def layers(self) -> list[int]:
        """Blocks that have routed experts."""
        return sorted({block for block, _ in self._layers})

    def states(self) -> dict[tuple[int, str], list[ExpertState]]:
        """State of every expert, by (block, family)."""
        return {key: self.pager.layer(index, facts.n_expert) for key, (index, facts) in self._layers.items()}

    def __len__(self) -> int:
        return sum(facts.n_expert for _, facts in self._layers.values())
