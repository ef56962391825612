"""`--miss auto` of one open model: the tuner at its pager, what is remembered, and what there is to say."""

from __future__ import annotations

from threading import Lock

from tinyserve_gguf._shim import Device, Pager
from tinyserve_gguf.facts import ModelFacts
from tinyserve_gguf.miss import MissOptions, candidates
from tinyserve_gguf.miss_auto import Choice, Tuner
from tinyserve_gguf.miss_memory import memory_path, recall, remember, situation


class Tuning:
    """Safe to call from any thread. Every session of a model reports here."""

    def __init__(self, pager: Pager, misses: MissOptions, facts: ModelFacts, device: Device, engine: str, link_gbps: float | None) -> None:
        self._pager = pager
        self._lock = Lock()
        self._notes: list[str] = []
        self._key = situation(
            model=facts.path,
            model_bytes=facts.file_bytes,
            device=f"{device.name} {device.description}",
            slots=pager.stats().slots_total,
            threads=misses.threads or 0,
            engine=engine,
            link_gbps=link_gbps,
        )
        self._remembers = misses.remember
        known, trouble = recall(memory_path(), self._key) if misses.remember else (None, None)
        self._notes += [trouble] if trouble else []
        link_rate = link_gbps * 1e9 if link_gbps else device.link_rate()
        self._tuner = Tuner(candidates(link_rate), switch=pager.set_miss, able=self._able, counts=self._counts, chosen=self._chosen, remembered=known)
        self._known = known

    def decoded(self, seconds: float) -> None:
        """A token took so long."""
        with self._lock:
            self._tuner.step(seconds)

    def take_notes(self) -> list[str]:
        """What there is to say since the last call."""
        with self._lock:
            notes, self._notes = self._notes + self._tuner.take_notes(), []
        return notes

    @property
    def text(self) -> str:
        """What is decided, for people."""
        choice = self._tuner.choice
        if self._tuner.ended or choice is None:
            return self._pager.miss if self._tuner.ended else "auto: what is fastest is tried while the first tokens are decoded"
        return f"{self._pager.miss}; auto: {choice.line()}" + (", as remembered" if choice is self._known else "")

    def _able(self) -> bool:
        return not self._pager.stats().cpu_cannot

    def _counts(self) -> tuple[int, int]:
        decode = self._pager.stats().decode
        return decode.hits, decode.lookups

    def _chosen(self, choice: Choice) -> None:
        unwritten = remember(memory_path(), self._key, choice) if self._remembers else None
        self._notes += [unwritten] if unwritten else []


def start_misses(pager: Pager, misses: MissOptions, facts: ModelFacts, device: Device, engine: str, link_gbps: float | None) -> Tuning | None:
    """Let the misses of a pager that is ready be what was asked for; for auto that begins here."""
    if not misses.uses_cpu:
        return None
    if misses.mode != "auto":
        pager.set_miss(misses.resolve(lambda: link_gbps * 1e9 if link_gbps else device.link_rate()))
    elif not pager.stats().all_resident:
        return Tuning(pager, misses, facts, device, engine, link_gbps)
    return None
