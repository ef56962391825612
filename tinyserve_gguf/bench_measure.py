"""Timing of one test on one open context: a prompt read at once ("pp"), or tokens decoded one by one ("tg"), as llama-bench names them.

Nothing here knows whose context it is, so llama.cpp alone and a paged model are timed by the very same code. No text is sampled: the tokens to read
are given, and all runs read the same ones.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from tinyserve_gguf._shim import Counts, PagerStats
from tinyserve_gguf.sequence import TokenSequence
from tinyserve_gguf.stats import added, phases


@dataclass(frozen=True, slots=True)
class Case:
    """One test: `n` tokens after `depth` tokens that are already in the context."""

    kind: str  # "pp", "tg" or "start"
    n: int
    depth: int

    @property
    def name(self) -> str:
        """ "pp512", "tg64 @ d4096": as llama-bench writes it."""
        return f"{self.kind}{self.n}" + (f" @ d{self.depth}" if self.depth else "")

    def n_ctx(self, repeat: int, warmup: int) -> int:
        """Tokens of context that the test needs."""
        return self.depth + self.n if self.kind == "pp" else max(self.depth, warmup) + repeat * self.n


@dataclass(frozen=True, slots=True)
class TokenSource:
    """Where the tokens come from: the given text, over and over, or random ones. Every stream starts at the beginning."""

    n_vocab: int
    seed: int
    text: tuple[int, ...] = ()

    def stream(self) -> Iterator[int]:
        return cycle(self.text) if self.text else _random_tokens(self.n_vocab, self.seed)


def _random_tokens(n_vocab: int, seed: int) -> Iterator[int]:
    rng = random.Random(seed)
    while True:
        yield rng.randrange(n_vocab)


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured. `tick` is called outside the timed stretches and may raise to end the run."""

    sequence: TokenSequence
    source: TokenSource
    snapshot: Callable[[], PagerStats | None]  # counters of the expert cache; None where nothing is paged
    tick: Callable[[], None]
    decoded: Callable[[float], None] = lambda _seconds: None  # hears what every decoded token took


@dataclass(frozen=True, slots=True)
class Measured:
    """Times in seconds."""

    case: Case
    repeats: tuple[float, ...]  # each for case.n tokens
    first: tuple[float, ...]  # pp: from the prompt to its next token, of every repeat
    steps: tuple[float, ...]  # tg: every single token of all repeats
    counts: Counts | None  # of the timed stretches alone
    host_seconds: float | None = None  # tg: what the shim took of the calling thread
    wait_cpu_seconds: float | None = None  # tg: what that thread waited for the CPU, which computed misses,
    wait_device_seconds: float | None = None  # and for the device

    @property
    def rates(self) -> list[float]:
        """Tokens per second of every repeat."""
        return [self.case.n / seconds for seconds in self.repeats]


def measure(subject: Subject, case: Case, repeat: int, warmup: int) -> Measured:
    """Run one test, `repeat` times after a warm-up. `warmup`: tokens decoded before a tg test, so that the cache holds what decode uses."""
    return _measure_prefill(subject, case, repeat) if case.kind == "pp" else _measure_decode(subject, case, repeat, warmup)


def _measure_prefill(subject: Subject, case: Case, repeat: int) -> Measured:
    """The first run has the same shape and is not counted: it warms up allocators and kernels."""
    sequence, stream = subject.sequence, subject.source.stream()
    seconds, first, counts = [], [], []
    for run in range(1 + repeat):
        held = sequence.cut(case.depth) if run and case.depth else 0
        if held == 0:
            sequence.clear()
        _read(subject, list(islice(stream, case.depth - held)))
        tokens, before = list(islice(stream, case.n)), subject.snapshot()
        start = time.perf_counter()
        _read(subject, tokens)
        read_at = time.perf_counter()
        sequence.context.logits().argmax()  # a greedy pick
        picked_at = time.perf_counter()
        if run > 0:
            seconds.append(read_at - start)
            first.append(picked_at - start)
            counts.append(phases(subject.snapshot(), before))
    return Measured(case, tuple(seconds), tuple(first), (), total(counts))


def _measure_decode(subject: Subject, case: Case, repeat: int, warmup: int) -> Measured:
    """The warm-up ends where the timing starts: at `depth`, or after `warmup` tokens if that is more. Repeats go on from there."""
    stream = subject.source.stream()
    subject.sequence.clear()
    _read(subject, list(islice(stream, max(0, case.depth - warmup))))
    for token in islice(stream, warmup):
        decode_one(subject, token)
    before, steps = subject.snapshot(), []
    for token in islice(stream, repeat * case.n):
        subject.tick()
        steps.append(decode_one(subject, token))
    seconds = tuple(sum(steps[i : i + case.n]) for i in range(0, len(steps), case.n))
    after = subject.snapshot()
    counts = phases(after, before)
    if not (after and before):
        return Measured(case, seconds, (), tuple(steps), counts)
    names = ("host_ns", "wait_cpu_ns", "wait_device_ns")
    host, cpu, device = ((getattr(after.notes, name) - getattr(before.notes, name)) / 1e9 for name in names)
    return Measured(case, seconds, (), tuple(steps), counts, host, cpu, device)


def _read(subject: Subject, tokens: Sequence[int]) -> None:
    sequence, at = subject.sequence, 0
    while at < len(tokens):
        subject.tick()
        chunk = tokens[at : at + sequence.step(sequence.context.n_batch)]
        at += len(chunk)
        sequence.append(chunk, want_logits=at == len(tokens))
    sequence.context.synchronize()


def decode_one(subject: Subject, token: int) -> float:
    """Seconds of one decoded token; where it pushes a block out of a window, that too."""
    start = time.perf_counter()
    subject.sequence.append([token], want_logits=True)
    subject.sequence.context.synchronize()
    seconds = time.perf_counter() - start
    subject.decoded(seconds)
    return seconds


def total(counts: Sequence[Counts | None]) -> Counts | None:
    """The sum; None if any of them is."""
    known = [c for c in counts if c is not None]
    return added(*known) if len(known) == len(counts) > 0 else None


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` (0..1) of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
