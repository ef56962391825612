"""Against llama.cpp's own split: how fast its best `--n-cpu-moe` would be in the same memory, and whether paging loses to it. Pure: it has no clock.

In decode that split takes the device's time for everything that is no paged expert, and the CPU's for the experts of the blocks that are there.
Both are known from tokens: the first is what a token takes less what it waits for misses, the second is what the CPU needs for one expert, a real
matmul of ggml over host memory. Where `bench --baseline` has measured the split itself, that counts instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from tinyserve_gguf.facts import ModelFacts

SURPLUS = {"measured": 1.03, "estimated": 1.1}  # times as fast as what there is: from there on the split is worth a try, or a word
WARM = 64  # tokens that `BreakEven` lets pass
WINDOW = 64  # tokens that it looks at,
IN_A_ROW = 2  # and so many times in a row


class Decoded(NamedTuple):
    """Counters of decode so far; see struct tsg_counts and struct tsg_notes."""

    hits: int = 0
    lookups: int = 0
    bytes_link: int = 0
    cpu_rows: int = 0
    cpu_ns: int = 0
    wait_cpu_ns: int = 0

    def since(self, before: Decoded) -> Decoded:
        return Decoded(*(now - then for now, then in zip(self, before, strict=True)))


# ---- the split ------------------------------------------------------------------------------------------------------------------------------


def all_on_cpu(facts: ModelFacts) -> int:
    """The least K with which `--n-cpu-moe K` leaves no expert on the device."""
    return max((layer.block + 1 for layer in facts.expert_layers), default=0)


def resident_bytes(facts: ModelFacts, n_cpu_moe: int) -> int:
    """Device memory of the experts that `--n-cpu-moe` leaves there."""
    return sum(layer.n_bytes for layer in facts.expert_layers if layer.block >= n_cpu_moe)


def tightest_split(facts: ModelFacts, budget: int) -> int:
    """The least K whose experts on the device take no more than `budget` bytes: the fastest, because every block left on the device is one that the
    CPU does not compute."""
    return next(k for k in range(all_on_cpu(facts) + 1) if resident_bytes(facts, k) <= budget)


def rows_on_cpu(facts: ModelFacts, n_cpu_moe: int) -> int:
    """Experts that the CPU computes of one token."""
    return sum(layer.n_used for layer in facts.expert_layers if layer.block < n_cpu_moe)


@dataclass(frozen=True, slots=True)
class MeasuredSplit:
    """Decode by llama.cpp alone with some experts on the CPU, as `bench --baseline` measured it."""

    n_cpu_moe: int
    rate: float  # tokens per second
    expert_bytes: int  # device memory of the experts there
    threads: int
    depth: int  # tokens in the context before
    link_gbps: float | None = None  # what the link was throttled to in that run; llama.cpp's split does not feel it


@dataclass(frozen=True, slots=True)
class Split:
    """llama.cpp's best split in the memory of a paged model."""

    n_cpu_moe: int
    rate: float  # tokens per second
    how: str  # "measured" or "estimated"

    def __str__(self) -> str:
        return f"llama.cpp's --n-cpu-moe {self.n_cpu_moe} ({self.rate:.1f} tok/s, {self.how})"

    def beats(self, rate: float) -> bool:
        """Whether it is clearly faster than so many tokens per second."""
        return self.rate > rate * SURPLUS[self.how]


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one token, in seconds. None: not known."""

    device: float | None = None  # of all that is no paged expert
    row: float | None = None  # of one expert on the CPU

    def best(self, other: Costs) -> Costs:
        """The smaller of each that is known: every way adds something of its own to what the device needs."""
        pairs = ((self.device, other.device), (self.row, other.row))
        return Costs(*(min((cost for cost in pair if cost is not None), default=None) for pair in pairs))


def costs(mode: str, seconds: float, seen: Decoded, tokens: int, link_rate: float) -> Costs:
    """What `tokens` tokens tell, of `seconds` each, in which all that is in `seen` was counted. `link_rate` in bytes per second."""
    row = seen.cpu_ns / 1e9 / seen.cpu_rows if seen.cpu_rows > 0 else None
    if mode == "fetch":
        device = seconds - seen.bytes_link / tokens / link_rate if link_rate > 0 else None
    else:
        device = seconds - seen.wait_cpu_ns / 1e9 / tokens
    return Costs(device if device is not None and device > 0 else None, row)


def rival(facts: ModelFacts, room: int, known: Iterable[MeasuredSplit], found: Costs) -> Split | None:
    """llama.cpp's best split with no more than `room` bytes for experts on the device, as far as that can be said."""
    k = tightest_split(facts, room)
    within = [split for split in known if split.n_cpu_moe >= k and split.expert_bytes <= room]
    measured = max((Split(split.n_cpu_moe, split.rate, "measured") for split in within), key=lambda split: split.rate, default=None)
    if any(split.n_cpu_moe == k for split in within) or found.device is None or found.row is None or k == 0:
        return measured
    estimated = Split(k, 1 / (found.device + rows_on_cpu(facts, k) * found.row), "estimated")
    return estimated if measured is None or estimated.rate > measured.rate else measured


# ---- break-even -----------------------------------------------------------------------------------------------------------------------------


class BreakEven:
    """For a fixed way to handle misses: hears of every decoded token, and says once if llama.cpp's own split would be faster.

    `counts` gives the counters of decode. `link_rate`, bytes per second, and `split`, the split at given costs, are asked only where the answer may
    matter: both may cost a measurement.
    """

    def __init__(
        self, mode: str, *, advice: str, counts: Callable[[], Decoded], link_rate: Callable[[], float], split: Callable[[Costs], Split | None]
    ) -> None:
        self._mode, self._advice = mode, advice
        self._counts, self._link_rate, self._split = counts, link_rate, split
        self._skip = WARM
        self._times: list[float] = []
        self._before = Decoded()
        self._in_a_row = 0
        self._notes: list[str] = []
        self.said = False

    def step(self, seconds: float) -> None:
        """One token was decoded in so many seconds."""
        if self.said:
            return
        if self._skip:
            self._skip -= 1
            self._before = Decoded() if self._skip else self._counts()
            return
        self._times.append(seconds)
        if len(self._times) == WINDOW:
            line = self._judge(median(self._times), self._counts().since(self._before))
            self._in_a_row = self._in_a_row + 1 if line else 0
            if line and self._in_a_row == IN_A_ROW:
                self._notes.append(line)
                self.said = True
            self._times, self._before = [], self._counts()

    def take_notes(self) -> list[str]:
        """Lines for people since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def _judge(self, seconds: float, seen: Decoded) -> str | None:
        """What there is to say of one window, if there is."""
        if seen.hits == seen.lookups:
            return None
        link_rate = self._link_rate() if self._mode == "fetch" else 0.0
        found = costs(self._mode, seconds, seen, WINDOW, link_rate)
        if found.device is None or seconds < found.device * min(SURPLUS.values()):
            return None  # misses cost too little for anything to be faster
        split = self._split(found)
        if split is None or not split.beats(1 / seconds):
            return None
        paging, bytes_token = (seconds - found.device) * 1e3, seen.bytes_link / WINDOW
        cost = f"they cost {paging:.1f} of {seconds * 1e3:.1f} ms a token"
        if self._mode == "fetch":
            cost += f" ({bytes_token / 1e6:.1f} MB over a link of {link_rate / 1e9:.1f} GB/s)"
        return f"{cost}: below break-even, {1 / seconds:.1f} tok/s against {split}; {self._advice}"
