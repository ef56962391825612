"""`--miss auto`: finds out, while real tokens are decoded, what is fastest for the misses of this model on this machine. Pure: it has no clock.

The candidates take turns. Each turn begins with tokens that are not counted, while experts and kernels settle. Who is clearly slower than the best
so far leaves after a few tokens, and of the ways that use the CPU the first stands for all: where it is clearly too slow the others are not tried.
Those that are close take more turns, in turned order each time, as a token takes longer or shorter by how many experts it happens to miss; all that
they took counts. Fetching gives the bits of llama.cpp, so another way must be faster by a margin.

Then the guard: if llama.cpp's own split of the same memory would be faster than the best of them, as measured or estimated, its placement takes
a turn too, and stays only if that is true.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from tinyserve_gguf._shim import Miss
from tinyserve_gguf.miss import LAYERS
from tinyserve_gguf.miss_guard import Costs, Decoded, Split, costs

WARM = 16  # tokens: the first turn waits until the hit rate rises by less than STEADY from one such stretch to the next,
STEADY = 0.02
WARM_MOST = 128  # but no longer. In a cold cache everything is slow, and the difference does not show
TURN = 24  # tokens of one turn,
SETTLE = 6  # of which the first do not count
TOO_SLOW = 1.25  # times the best so far: leaves early,
EARLY, LATER = 4, 8  # if so many tokens took that long, every one of them, or most of them
HOPELESS = 1.4  # if the first way that uses the CPU takes so many times as long, the others are not tried
CLOSE = (1.15, 1.1, 1.05)  # times the best: takes a second turn, a third and a fourth
MARGIN = 1.03  # that another way must be faster than fetching
WINDOW = 64  # tokens over which the choice is watched
SHIFTED_TIME = 1.3  # a window is another world if its tokens take so many times longer or shorter,
SHIFTED_RATE = 0.1  # or if its hit rate differs by this
LASTING = 4  # windows


def label(miss: Miss) -> str:
    """The way in a few words."""
    if miss.mode == "fetch":
        return "fetch"
    if miss.mode == "layers":
        return "whole layers"
    return f"{miss.mode}, 1 in {miss.every} enters the cache" if miss.every else f"{miss.mode}, none enters the cache"


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen. `figures`: tokens per second of every candidate that was tried, by label; of those that left early as far as they came.
    `rival`: what was known of llama.cpp's own split, for people."""

    miss: Miss
    figures: dict[str, float]
    rival: str = ""

    @property
    def rate(self) -> float:
        """Tokens per second, when it was chosen; 0 if that is not known."""
        return self.figures.get(label(self.miss), 0.0)

    def line(self) -> str:
        tried = ", ".join(f"{rate:.1f} ({name})" for name, rate in self.figures.items())
        return f"{label(self.miss)} is fastest here; tok/s: {tried}" + (f"; {self.rival}" if self.rival else "")


@dataclass(slots=True)
class _Turn:
    """One candidate's."""

    miss: Miss
    before: Decoded
    times: list[float] = field(default_factory=list)  # seconds of all its tokens

    @property
    def counted(self) -> list[float]:
        return self.times[SETTLE:]

    def is_slower_than(self, seconds: float) -> bool:
        """Beyond what chance does to a few tokens."""
        n = len(self.counted)
        return n >= EARLY and (min(self.counted) > seconds or (n >= LATER and median(self.counted) > seconds))


class Tuner:
    """Hears of every decoded token, and switches.

    `switch` puts a way to work. `able` is False once it is known that the CPU cannot compute the misses of this model. `counts` gives the counters of
    decode so far. `candidates` begin with fetching. With `remembered`, nothing is tried until speed or hit rate has shifted. `rival` gives
    llama.cpp's own split at the costs that were measured, `link_rate` is in bytes per second.
    """

    def __init__(
        self,
        candidates: Sequence[Miss],
        *,
        switch: Callable[[Miss], None],
        able: Callable[[], bool],
        counts: Callable[[], Decoded],
        chosen: Callable[[Choice], None],
        remembered: Choice | None = None,
        rival: Callable[[Costs], Split | None] = lambda _costs: None,
        link_rate: float = 0.0,
    ) -> None:
        self._candidates = tuple(candidates)
        self._ask_rival, self._link_rate = rival, link_rate
        self._switch, self._able, self._counts, self._chosen = switch, able, counts, chosen
        self.choice = remembered
        self.ended = False  # there is nothing to choose
        self._notes: list[str] = []
        self._forget()
        if remembered:
            switch(remembered.miss)
        else:
            self._begin(cold=True)

    def step(self, seconds: float) -> None:
        """One token was decoded in so many seconds."""
        if self.ended:
            return
        if self.choice:
            self._watch(seconds)
        elif self._warming:
            self._warm_up()
        else:
            self._try(seconds)

    def take_notes(self) -> list[str]:
        """Lines for people since the last call."""
        notes, self._notes = self._notes, []
        return notes

    # ---- trying ----

    def _begin(self, *, cold: bool) -> None:
        self.choice = None
        self._warming, self._warmed, self._before, self._rate = cold, 0, self._counts(), -1.0
        self._round = 1
        self._counted: dict[str, list[float]] = {}  # label -> seconds of its counted tokens
        self._results: dict[str, float] = {}  # label -> their median
        self._costs = Costs()
        self._rival: Split | None = None
        self._queue = list(self._candidates)
        self._next()

    def _hit_rate(self) -> float:
        """Since the last call."""
        now = self._counts()
        seen, self._before = now.since(self._before), now
        return seen.hits / seen.lookups if seen.lookups > 0 else 0.0

    def _warm_up(self) -> None:
        self._warmed += 1
        if self._warmed % WARM == 0:
            rate, before = self._hit_rate(), self._rate
            self._rate = rate
            self._warming = self._warmed < WARM_MOST and (before < 0 or rate - before >= STEADY)
            self._turn.before = self._before  # the first turn begins when this ends

    def _next(self) -> None:
        self._turn = _Turn(self._queue.pop(0), self._counts())
        self._switch(self._turn.miss)

    def _try(self, seconds: float) -> None:
        turn = self._turn
        turn.times.append(seconds)
        if turn.miss.mode != "fetch" and not self._able():
            self._give_up()
            return
        enough = len(turn.times) == TURN
        others = [time for name, time in self._results.items() if name != label(turn.miss)]
        if not enough and not (others and turn.is_slower_than(TOO_SLOW * min(others))):
            return
        self._counted.setdefault(label(turn.miss), []).extend(turn.counted)
        self._results[label(turn.miss)] = median(self._counted[label(turn.miss)])
        if turn.miss != LAYERS:
            seen = self._counts().since(turn.before)
            self._costs = self._costs.best(costs(turn.miss.mode, median(turn.counted), seen, len(turn.times), self._link_rate))
        if turn.miss == self._candidates[1] and median(turn.counted) > HOPELESS * min(others):
            self._queue.clear()
        if self._queue:
            self._next()
        elif label(LAYERS) not in self._counted and self._round <= len(CLOSE) and len(again := self._close()) > 1:
            self._round, self._queue = self._round + 1, again
            self._next()
        else:
            self._decide()

    def _give_up(self) -> None:
        self.ended = True
        self._switch(self._candidates[0])
        self._notes.append("misses: fetched, as the CPU cannot compute those of this model")

    def _close(self) -> list[Miss]:
        """Those worth another turn, in turned order: what the cache learns meanwhile shall favour none of them."""
        tried = [miss for miss in self._candidates if label(miss) in self._results]
        limit = CLOSE[self._round - 1] * min(map(self._weighed, tried))
        close = [miss for miss in tried if self._weighed(miss) <= limit]
        return close[::-1] if self._round % 2 else close

    def _weighed(self, miss: Miss) -> float:
        """Seconds a token, with what fetching has ahead."""
        return self._results[label(miss)] * (1 if miss.mode == "fetch" else MARGIN)

    def _best(self, tried: Sequence[Miss]) -> Miss:
        return min(tried, key=self._weighed)

    def _decide(self) -> None:
        tried = [miss for miss in (*self._candidates, LAYERS) if label(miss) in self._results]
        best = self._best(tried)
        if LAYERS not in tried:
            self._rival = self._ask_rival(self._costs)
            if self._rival and self._rival.beats(1 / self._results[label(best)]):
                self._queue = [LAYERS]
                self._next()
                return
        self.choice = Choice(best, {label(miss): 1 / self._results[label(miss)] for miss in tried}, str(self._rival or ""))
        self._switch(best)
        self._forget()
        self._notes.append(f"misses: {self.choice.line()}")
        if LAYERS in tried:
            self._notes.append(self._verdict(self._best([miss for miss in tried if miss != LAYERS])))
        self._chosen(self.choice)

    def _verdict(self, other: Miss) -> str:
        """What became of the guard's turn. `other`: the best without it."""
        stays, rate = self.choice and self.choice.miss == LAYERS, 1 / self._results[label(LAYERS)]
        begin = f"misses: {self._rival} against {1 / self._results[label(other)]:.1f} ({label(other)}):"
        if stays:
            return f"{begin} the placement is that split from now on, {rate:.1f} tok/s here"
        return f"{begin} its placement was tried and gave {rate:.1f} tok/s here, so it is not kept"

    # ---- watching ----

    def _forget(self) -> None:
        self._reference: tuple[float, float] | None = None  # seconds a token and hit rate of the first window
        self._window: list[float] = []
        self._shifted = 0
        self._before = self._counts()

    def _watch(self, seconds: float) -> None:
        self._window.append(seconds)
        if len(self._window) < WINDOW:
            return
        if self.choice and self.choice.miss.mode != "fetch" and not self._able():
            self._give_up()
            return
        seen = median(self._window), self._hit_rate()
        self._window = []
        if self._reference is None:
            self._reference = seen
            return
        ratio = seen[0] / self._reference[0]
        shifted = not 1 / SHIFTED_TIME < ratio < SHIFTED_TIME or abs(seen[1] - self._reference[1]) > SHIFTED_RATE
        self._shifted = self._shifted + 1 if shifted else 0
        if self._shifted == LASTING:
            was, is_now = (f"{1 / time:.1f} tok/s at {hit:.0%} hits" for time, hit in (self._reference, seen))
            self._notes.append(f"misses: what is fastest is measured again, as {was} became {is_now}")
            self._begin(cold=False)
