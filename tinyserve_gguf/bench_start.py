"""The start of a session: the first tokens behind a load, with a pool that is empty and with one that a hot list filled."""

from __future__ import annotations

import time
from itertools import islice

from tinyserve_gguf.bench_measure import Case, Measured, Subject, decode_one
from tinyserve_gguf.hot_list import HotList
from tinyserve_gguf.stats import phases
from tinyserve_gguf.warm import WarmStart

TOKENS = 64  # that are timed
LEARNED = 256  # decoded behind them, of which the list is made: never those that are timed
CASE = Case("start", TOKENS, 0)


def measure_start(subject: Subject) -> Measured:
    """Decode the first tokens of the stream. `first` is the very first one."""
    stream, before = subject.source.stream(), subject.snapshot()
    steps = []
    for token in islice(stream, TOKENS):
        subject.tick()
        steps.append(decode_one(subject, token))
    return Measured(CASE, (sum(steps),), (steps[0],), tuple(steps), phases(subject.snapshot(), before))


def learn(subject: Subject, warm: WarmStart) -> HotList:
    """Decode the tokens that follow, and say what they used."""
    before = warm.counted()
    for token in islice(subject.source.stream(), TOKENS, TOKENS + LEARNED):
        subject.tick()
        decode_one(subject, token)
    return warm.counted().since(before)


def timed_fill(warm: WarmStart, hot: HotList) -> float:
    """Seconds that filling took."""
    start = time.perf_counter()
    warm.fill(hot)
    return time.perf_counter() - start
