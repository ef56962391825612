"""A window over an endless sequence: its first tokens stay (sinks), and when the cache is full the oldest after them leave. Pure arithmetic.

Tokens leave in blocks, because moving the positions of what stays costs a pass over all keys; a block is a quarter of what may leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace

from tinyserve_gguf.choices import DEFAULT_SINKS, DEFAULT_WINDOW
from tinyserve_gguf.errors import OptionError


@dataclass(frozen=True, slots=True)
class Window:
    """How many tokens the KV cache holds, sinks included, and how many of them are sinks. OptionError if that cannot be."""

    size: int = DEFAULT_WINDOW
    sinks: int = DEFAULT_SINKS

    def __post_init__(self) -> None:
        if self.size < 2:
            raise OptionError(f"--window is 2 or more tokens, not {self.size}")
        if self.sinks < 0:
            raise OptionError(f"--sinks is 0 or more tokens, not {self.sinks}")
        if self.sinks > self.size // 2:
            raise OptionError(f"{self.sinks} sinks are more than half of a window of {self.size}: give a larger --window, or fewer --sinks")

    @property
    def block(self) -> int:
        """Tokens that leave at once."""
        return max(1, (self.size - self.sinks) // 4)

    def step(self, n_held: int, most: int) -> int:
        """How many tokens to read next, `most` at once: what is free, or a block, for which one block leaves."""
        return min(most, max(self.size - n_held, self.block))

    def leaving(self, n_held: int, n_new: int) -> int:
        """How many tokens leave so that `n_new` fit beside `n_held`: 0, or whole blocks."""
        over = n_held + n_new - self.size
        return 0 if over <= 0 else -(-over // self.block) * self.block


@dataclass(slots=True)
class WindowCounts:
    """What a window did."""

    shifts: int = 0  # passes over all keys, because the positions of what stayed moved down
    evicted_tokens: int = 0
    rereads: int = 0  # times that what stayed was read again, from position 0 on

    def plus(self, other: WindowCounts) -> WindowCounts:
        return WindowCounts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def since(self, before: WindowCounts) -> WindowCounts:
        return WindowCounts(*(a - b for a, b in zip(astuple(self), astuple(before), strict=True)))

    def line(self) -> str:
        """For people."""
        parts = [f"{self.evicted_tokens} tokens left", f"{self.shifts} shifts"]
        return ", ".join(parts + [f"{self.rereads} times read again"] * bool(self.rereads))


@dataclass(frozen=True, slots=True)
class Rolling:
    """A window, and how it is kept on one model: blocks leave, and what stays moves down (`shifts`), or keeps its positions and is read again from
    position 0 on once `n_positions` are used up."""

    window: Window
    shifts: bool
    n_positions: int


@dataclass(slots=True)
class Track:
    """Which tokens of one sequence are in the cache, and at which positions.

    The cache holds `tokens[:sinks]` at positions 0, 1, ... and `tokens[sinks + lost:]` at the positions after them, `gap` further up. Where positions
    move down when a block leaves, the gap stays 0.
    """

    sinks: int = 0  # of the sequence as it is; only meaningful once tokens are lost
    tokens: list[int] = field(default_factory=list)  # all that was read
    lost: int = 0
    gap: int = 0

    def copy(self) -> Track:
        return replace(self, tokens=list(self.tokens))

    @property
    def n_held(self) -> int:
        return len(self.tokens) - self.lost

    @property
    def held(self) -> list[int]:
        """Tokens in the cache, in order."""
        return self.tokens[: self.sinks] + self.tokens[self.sinks + self.lost :] if self.lost else list(self.tokens)

    @property
    def next(self) -> int:
        """Position of the next token."""
        return self.n_held + self.gap

    def lose(self, n: int, *, moves: bool) -> None:
        """`n` tokens after the sinks have left; `moves` if the positions of the rest moved down."""
        self.lost += n
        self.gap += 0 if moves else n

    def common(self, tokens: Sequence[int]) -> int:
        """Length of the longest common prefix with all that was read."""
        pairs = enumerate(zip(self.tokens, tokens, strict=False))
        return next((i for i, (a, b) in pairs if a != b), min(len(self.tokens), len(tokens)))

    def reachable(self, n: int, least: int) -> int:
        """To how many tokens the sequence can be cut, if `n` shall stay: to `n` where the cache then holds all of them or at least `least`, else to
        the sinks, because what has left would be missed."""
        return n if not self.lost or n == len(self.tokens) or n - self.lost >= min(n, least) else min(n, self.sinks)

    def cut(self, n: int) -> int:
        """Forget all but the first `n` tokens, a number that `reachable` gave; returns the position from which on the cache is to be cut."""
        if n <= self.sinks:
            self.lost = self.gap = 0
        del self.tokens[n:]
        return self.next
