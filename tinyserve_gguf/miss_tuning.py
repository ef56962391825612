"""How misses of one open model are watched: the tuner of `--miss auto`, or the break-even guard, at its pager; what is remembered and said."""

from __future__ import annotations

from functools import cache, cached_property, partial
from threading import Lock

from tinyserve_gguf._shim import Device, Pager
from tinyserve_gguf.facts import ModelFacts
from tinyserve_gguf.miss import MissOptions, candidates
from tinyserve_gguf.miss_auto import Choice, Tuner
from tinyserve_gguf.miss_guard import BreakEven, Costs, Decoded, Split, rival
from tinyserve_gguf.miss_memory import machine_and_file, recall, recall_splits, remember, situation

LINK_PROBE = 64 << 20  # bytes, copied LINK_REPEATS times: some 30 ms on a slow link
LINK_REPEATS = 4


class Rival:
    """llama.cpp's own split beside one open model, as measured or estimated. There is none on a CPU device, where nothing is split."""

    def __init__(self, pager: Pager, facts: ModelFacts, device: Device, n_threads: int) -> None:
        """`n_threads`: what llama.cpp would compute experts with."""
        stats = pager.stats()
        self._pager, self._facts, self._threads = pager, facts, n_threads
        self._room = stats.pool_bytes + stats.stage_bytes
        self.applies = not device.is_cpu and not stats.all_resident
        self._known, self.trouble = recall_splits(file_key(facts, device)) if self.applies else ([], None)

    def split(self, found: Costs) -> Split | None:
        """At these costs."""
        return rival(self._facts, self._room, self._known, found) if self.applies else None

    def split_measured_now(self, found: Costs) -> Split | None:
        """The same, where no token has told yet what an expert costs on the CPU."""
        return self.split(found if found.row else Costs(found.device, self._row))

    @cached_property
    def _row(self) -> float | None:
        return self._pager.cpu_seconds(self._threads) or None


def file_key(facts: ModelFacts, device: Device) -> str:
    """Under which speeds of llama.cpp on this file are kept."""
    return machine_and_file(facts.path, facts.file_bytes, _name(device))


def _name(device: Device) -> str:
    return f"{device.name} {device.description}"


def _decoded(pager: Pager) -> Decoded:
    stats = pager.stats()
    d, n = stats.decode, stats.notes
    return Decoded(d.hits, d.lookups, d.bytes_link, d.cpu_rows, n.cpu_ns, n.wait_cpu_ns)


class Tuning:
    """`--miss auto`. Safe to call from any thread. Every session of a model reports here."""

    def __init__(
        self, pager: Pager, misses: MissOptions, facts: ModelFacts, device: Device, engine: str, link_gbps: float | None, against: Rival
    ) -> None:
        self._pager = pager
        self._lock = Lock()
        self._key = situation(
            model=facts.path,
            model_bytes=facts.file_bytes,
            device=_name(device),
            slots=pager.stats().slots_total,
            threads=misses.threads or 0,
            engine=engine,
            link_gbps=link_gbps,
        )
        self._remembers = misses.remember
        known, trouble = recall(self._key) if misses.remember else (None, None)
        self._notes = [line for line in (trouble or against.trouble,) if line]
        if known and _overtaken(known, against):
            known = None
        link_rate = link_gbps * 1e9 if link_gbps else device.link_rate()
        self._tuner = Tuner(
            candidates(link_rate),
            switch=pager.set_miss,
            able=lambda: not pager.stats().cpu_cannot,
            counts=lambda: _decoded(pager),
            chosen=self._chosen,
            remembered=known,
            rival=against.split,
            link_rate=link_rate,
        )
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

    def _chosen(self, choice: Choice) -> None:
        unwritten = remember(self._key, choice) if self._remembers else None
        self._notes += [unwritten] if unwritten else []


def _overtaken(known: Choice, against: Rival) -> bool:
    """Whether llama.cpp's split was measured since the choice was made, and is faster: then all is tried again."""
    split = against.split(Costs())
    return split is not None and str(split) != known.rival and split.beats(known.rate)


class Watching:
    """Of a way that the user chose: whether the CPU can do its part, and the break-even guard. Safe to call from any thread."""

    def __init__(self, pager: Pager, misses: MissOptions, guard: BreakEven | None, trouble: str | None) -> None:
        self._pager, self._lock, self._guard = pager, Lock(), guard
        self._notes = [trouble] if trouble else []
        self._n = 0  # tokens
        self._may_fail = misses.uses_cpu and not pager.stats().cpu_cannot  # what is known now is in `text`

    def decoded(self, seconds: float) -> None:
        """A token took so long."""
        with self._lock:
            self._n += 1
            if self._may_fail and self._n & (self._n - 1) == 0 and self._pager.stats().cpu_cannot:  # seldom asked: at the powers of two
                self._may_fail = False
                self._notes.append(f"misses: {self._pager.miss}")
            if self._guard:
                self._guard.step(seconds)
                self._notes += [f"misses: {note}" for note in self._guard.take_notes()]

    def take_notes(self) -> list[str]:
        """What there is to say since the last call."""
        with self._lock:
            notes, self._notes = self._notes, []
        return notes

    @property
    def text(self) -> str:
        """What is decided, for people."""
        return self._pager.miss


def watcher(
    pager: Pager, misses: MissOptions, facts: ModelFacts, device: Device, engine: str, link_gbps: float | None, n_threads: int
) -> Tuning | Watching | None:
    """Who hears of every token that this model decodes; nobody where there is nothing to find out. `n_threads`: of other CPU work."""
    if pager.stats().all_resident:
        return None
    against = Rival(pager, facts, device, n_threads)
    if misses.mode == "auto":
        return Tuning(pager, misses, facts, device, engine, link_gbps, against)

    def link_rate() -> float:
        return link_gbps * 1e9 if link_gbps else device.link_rate(LINK_PROBE, LINK_REPEATS)

    guard = None
    if against.applies and misses.mode != "layers":
        advice = "--miss auto tries what is faster here" + (", without --engine device" if engine == "device" else "")
        counts, split = partial(_decoded, pager), against.split_measured_now
        guard = BreakEven(misses.mode, advice=advice, counts=counts, link_rate=cache(link_rate), split=split)
    return Watching(pager, misses, guard, against.trouble) if guard or misses.uses_cpu else None


def start_misses(
    pager: Pager, misses: MissOptions, facts: ModelFacts, device: Device, engine: str, link_gbps: float | None, n_threads: int
) -> Tuning | Watching | None:
    """Let the misses of a pager that is ready be what was asked for, and return their `watcher`."""
    if misses.uses_cpu and misses.mode != "auto":
        pager.set_miss(misses.resolve(lambda: link_gbps * 1e9 if link_gbps else device.link_rate()))
    return watcher(pager, misses, facts, device, engine, link_gbps, n_threads)
