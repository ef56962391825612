"""What a benchmark is asked for, and who looks on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tinyserve_gguf import bench_profile, bench_start
from tinyserve_gguf.bench_measure import Case
from tinyserve_gguf.bench_needle import REPLY_TOKENS
from tinyserve_gguf.miss import MissOptions


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to measure. Tokens, unless said otherwise."""

    path: str
    prompts: tuple[int, ...] = (512,)  # pp tests
    replies: tuple[int, ...] = (128,)  # tg tests
    depths: tuple[int, ...] = (0,)
    expert_caches: tuple[str, ...] = ("auto",)
    policies: tuple[str, ...] = ("lfru",)
    misses: tuple[str, ...] = ("fetch",)
    miss_admits: tuple[int, ...] = ()  # rates of admission to compare where the CPU computes misses
    miss_threads: int | None = None
    windows: tuple[int, ...] = (0,)  # 0 = a context that holds everything
    device: str = "auto"  # auto: one GPU
    tensor_split: tuple[float, ...] | None = None  # with several devices
    engine: str = "auto"
    n_ubatch: int | None = None
    n_threads: int | None = None
    repeat: int = 3
    warmup: int = 200  # decoded before a tg test
    seed: int = 0
    text: str | None = None  # what the model reads; None = random tokens
    text_name: str = ""
    baseline: bool = False
    link_gbps: float | None = None  # throttle the link to this
    needle: int = 0  # length of that prompt; 0 = no such test
    profile: bool = False  # times of every layer behind every tg test
    warm: str = "off"  # also time the start of a session: from an empty pool ("off" alone: not at all), from one that is filled, or both

    @property
    def starts(self) -> tuple[bool, ...]:
        """Of sessions: with a pool that is filled?"""
        return {"off": (), "on": (True,), "both": (False, True)}[self.warm]

    @property
    def cases(self) -> list[Case]:
        tests = [("pp", n) for n in self.prompts] + [("tg", n) for n in self.replies]
        return [Case(kind, n, depth) for depth in self.depths for kind, n in tests]

    @property
    def n_ctx(self) -> int:
        """Context that the longest test needs."""
        start = bench_start.TOKENS + bench_start.LEARNED if self.starts else 0
        extra = bench_profile.tokens if self.profile else lambda _case: 0
        return max(
            [case.n_ctx(self.repeat, self.warmup) + extra(case) for case in self.cases] + [self.needle + REPLY_TOKENS if self.needle else 0, start]
        )


@dataclass(frozen=True, slots=True)
class Run:
    """One paged model to load."""

    expert_cache: str
    policy: str
    misses: MissOptions
    link_gbps: float | None
    paged: bool  # some experts have no slot
    window: int | None


class Watch(Protocol):
    """Who looks on. Both are called outside the timed stretches."""

    def show(self, text: str, done: float) -> None:
        """What happens next, and how much is done, 0..1."""

    def stopped(self) -> bool:
        """Whether the user wants to end."""
