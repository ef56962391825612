"""Where the time of decode goes: a pass of its own behind a tg test, so that the test itself is timed as it is."""

from __future__ import annotations

from itertools import islice

from tinyserve_gguf.bench_measure import Case, Subject
from tinyserve_gguf.model import Model
from tinyserve_gguf.stats import LayerTime

SETTLE = 3  # tokens that are not counted: the graph is captured anew when it is timed


def tokens(case: Case) -> int:
    """Of context that a profile takes behind a test."""
    return SETTLE + case.n if case.kind == "tg" else 0


def profile(subject: Subject, model: Model, case: Case, read: int) -> tuple[LayerTime, ...]:
    """Times of every layer over `case.n` tokens. Goes on with the tokens that follow the `read` ones of the test."""
    stream = islice(subject.source.stream(), read, read + tokens(case))
    try:
        for i, token in enumerate(stream):
            subject.tick()
            if i in (0, SETTLE):
                model.set_profile(True)
            subject.sequence.append([token], want_logits=True)
        subject.sequence.context.synchronize()
        return tuple(model.layer_times())
    finally:
        model.set_profile(False)
