"""Warm start of one open model: fills free slots with the experts that decode used most, and keeps count for the next time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from tinyserve_gguf._shim import Pager
from tinyserve_gguf.errors import EngineError
from tinyserve_gguf.facts import ExpertLayer, ModelFacts
from tinyserve_gguf.hot_list import HotList, Layer, read_list, write_list
from tinyserve_gguf.plan import size

log = logging.getLogger("tinyserve_gguf.warm")

MAX_SECONDS = 2.0  # of filling: a slow link or disk must not make a load feel slower. The most used experts come first


class WarmStart:
    """What decode wants of one model. Residency changes nothing but speed: logits stay the same, bit for bit."""

    def __init__(self, facts: ModelFacts, pager: Pager, layers: Mapping[Layer, tuple[int, ExpertLayer]]) -> None:
        self._facts = facts
        self._pager = pager
        self._layers = layers  # with the index of each in the pager
        self._before = self._nothing()  # counted, but reset in the pager since
        self.text = "warm start: off"

    def fill(self, hot: HotList, progress: Callable[[float], bool] | None = None) -> None:
        """Fill free slots, the most used experts first. EngineError if `progress` stopped it."""
        slots = self._pager.stats()
        start, n_loaded, n_bytes, cut = time.perf_counter(), 0, 0, False
        for layer, expert in hot.ranked():
            index, facts = self._layers[layer]
            cut = n_loaded > 0 and time.perf_counter() - start > MAX_SECONDS
            if cut or hot.uses[layer][expert] == 0:
                break
            if self._pager.preload(index, expert):
                n_loaded, n_bytes = n_loaded + 1, n_bytes + facts.bytes_per_expert
                if progress and not progress(n_loaded / slots.slots_total):
                    raise EngineError("loading was stopped")
        seconds = time.perf_counter() - start
        self.text = (
            f"warm start: {n_loaded} of {slots.slots_total} slots filled with the experts that decode used most, {size(n_bytes)} in {seconds:.2f} s"
            + (f"; stopped after {MAX_SECONDS:g} s" if cut else "")
        )

    def fill_from_file(self, progress: Callable[[float], bool] | None = None) -> None:
        """The same with the list that was kept of this model file, if it can be used."""
        if self._pager.stats().all_resident:
            self.text = "warm start: not needed, every expert has a slot"
            return
        hot, trouble = read_list(self._facts)
        if hot is None:
            self.text = f"warm start: {trouble or 'nothing is known of this model yet; this run is kept for the next one'}"
        else:
            self.fill(hot, progress)

    def absorb(self) -> None:
        """Before the pager's counters are reset."""
        self._before = self.counted()

    def counted(self) -> HotList:
        """What decode used since the model was opened."""
        return HotList(
            self._before.graphs + self._pager.stats().decode.graphs,
            {
                layer: tuple(old + state.uses for old, state in zip(self._before.uses[layer], self._pager.layer(index, facts.n_expert), strict=True))
                for layer, (index, facts) in self._layers.items()
            },
        )

    def keep(self) -> None:
        """Add what was counted to the list of this model file. Where everything is resident nobody looks experts up: then there is nothing to add."""
        found = self.counted()
        if found.graphs == 0 or self._pager.stats().all_resident:
            return
        earlier, _ = read_list(self._facts)
        if trouble := write_list(self._facts, earlier.followed_by(found) if earlier else found):
            log.warning("warm start: %s", trouble)

    def _nothing(self) -> HotList:
        return HotList(0.0, {layer: (0.0,) * facts.n_expert for layer, (_, facts) in self._layers.items()})
