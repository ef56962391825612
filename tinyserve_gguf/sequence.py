"""One sequence of tokens in a KV cache: reads what follows, forgets what shall not stay, and with a window goes on without end."""

from __future__ import annotations

from collections.abc import Sequence

from tinyserve_gguf._llama import NativeContext
from tinyserve_gguf.errors import ContextFullError
from tinyserve_gguf.window import Rolling, Track, Window, WindowCounts


class TokenSequence:
    """The one sequence of a context. An interrupt leaves it so that `cut` and `append` go on from what is true.

    Without `rolling` it holds `n_ctx` tokens and no more.
    """

    def __init__(self, context: NativeContext, rolling: Rolling | None, counts: WindowCounts) -> None:
        self.context = context
        self.rolling = rolling
        self._counts = counts
        self.window = rolling.window if rolling else None  # with as many sinks as there are now
        self._track = self._empty()
        self._whole = True  # False while cache and track may differ

    def _empty(self) -> Track:
        return Track(self.window.sinks if self.window else 0)

    @property
    def held(self) -> tuple[int, ...]:
        """Tokens in the cache."""
        return tuple(self._track.held)

    @property
    def n_tokens(self) -> int:
        """Tokens read, those that left included."""
        return len(self._track.tokens)

    @property
    def is_full(self) -> bool:
        """Whether not even one more token fits."""
        return self.rolling is None and self._track.n_held >= self.context.n_ctx

    def set_sinks(self, n: int) -> None:
        """From now on the first `n` tokens stay. OptionError if they are more than half of the window. What is held is forgotten if some of it has
        left already."""
        if self.window is None or n == self.window.sinks:
            return
        self.window = Window(self.window.size, n)
        if self._track.lost:
            self.clear()
        self._track.sinks = n

    def clear(self) -> None:
        """Forget everything."""
        self._whole = False
        self.context.clear()
        self._track = self._empty()
        self._whole = True

    def save(self) -> Track:
        """What is held, to `load` with the state of the context."""
        return self._track.copy()

    def load(self, track: Track) -> None:
        """The context was set to the state that it had when this was saved."""
        self._track = track.copy()
        self._whole = True

    def common(self, tokens: Sequence[int]) -> int:
        """How many of the first of `tokens` were read already."""
        return self._track.common(tokens)

    def cut(self, n: int) -> int:
        """Forget what follows the first `n` tokens; returns how many are left, fewer where the memory cannot be cut there."""
        if not self._whole:
            self.clear()
        n = self._track.reachable(min(n, self.n_tokens), self.window.size // 2 if self.window else 0)
        self._whole = False
        if self.context.keep(self._track.cut(n)):
            self._whole = True
        else:
            self.clear()
        return self.n_tokens

    def step(self, most: int) -> int:
        """How many tokens to append next, `most` at once."""
        return self.window.step(self._track.n_held, most) if self.window else most

    def append(self, tokens: Sequence[int], *, want_logits: bool) -> None:
        """Compute `tokens`, at most as many as `step` gave; those that they push out leave first. ContextFullError without a window."""
        window, track = self.window, self._track
        if window is None:
            if track.n_held + len(tokens) > self.context.n_ctx:
                raise ContextFullError(f"{track.n_held + len(tokens)} tokens do not fit into the context of {self.context.n_ctx}")
        elif n := window.leaving(track.n_held, len(tokens)):
            self._evict(n)
        if self.rolling and track.next + len(tokens) > self.rolling.n_positions:
            self._reread()
        self.context.decode(tokens, self._track.next, want_logits=want_logits)
        self._track.tokens.extend(tokens)

    def _evict(self, n: int) -> None:
        """Take the `n` oldest tokens after the sinks out."""
        assert self.rolling
        track, shifts = self._track, self.rolling.shifts
        start = track.sinks + track.gap
        self._whole = False
        self.context.remove(start, start + n)
        if shifts:
            self.context.move(start + n, -n)
        track.lose(n, moves=shifts)
        self._whole = True
        self._counts.evicted_tokens += n
        self._counts.shifts += shifts

    def _reread(self) -> None:
        """Read what is held again, at the positions from 0 on."""
        held, track = self._track.held, self._track
        self._whole = False
        self.context.clear()
        for start in range(0, len(held), self.context.n_batch):
            self.context.decode(held[start : start + self.context.n_batch], start, want_logits=False)
        track.gap = 0
        self._whole = True
        self._counts.rereads += 1
