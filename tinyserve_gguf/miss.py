"""What happens to experts that decode misses: fetched into a slot, computed by the CPU where they lie, some of both, or by whole layers."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from tinyserve_gguf._shim import Miss
from tinyserve_gguf.choices import MISSES
from tinyserve_gguf.errors import OptionError

RATES = (4, 16)  # of admission, that auto tries
EVERY = 4  # co-execution: at most one miss in so many enters the pool


@dataclass(frozen=True, slots=True)
class MissOptions:
    """What the user asked for. `every` (0: no miss enters the pool) and `threads` are for a CPU that computes misses: OptionError where none does."""

    mode: str = "fetch"  # one of MISSES
    every: int | None = None
    threads: int | None = None
    remember: bool = True  # auto: keep what was found for the next time, and use what was kept

    def __post_init__(self) -> None:
        if self.mode not in MISSES:
            raise OptionError(f"--miss is one of {', '.join(MISSES)}, not {self.mode!r}")
        for name, value, least in (("--miss-admit", self.every, 0), ("--miss-threads", self.threads, 1)):
            if value is not None and value < least:
                raise OptionError(f"{name} is {least} or more, not {value}")
            if value is not None and not self.uses_cpu:
                raise OptionError(f"{name} is for --miss cpu, split, layers or auto: with fetch the CPU computes no expert")
        if self.mode == "auto" and self.every is not None:
            raise OptionError("--miss auto tries rates of admission by itself: leave --miss-admit out, or choose --miss cpu, split or layers")

    @property
    def uses_cpu(self) -> bool:
        return self.mode != "fetch"

    def completed(self, n_threads: int) -> MissOptions:
        """With threads, where other CPU work has `n_threads`: as many, but one core is left to the thread that drives the device."""
        return self if self.threads or not self.uses_cpu else replace(self, threads=max(1, min(n_threads, len(os.sched_getaffinity(0)) - 1)))

    def resolve(self, link_rate: Callable[[], float]) -> Miss:
        """The same for the shim; not for auto. `link_rate`, in bytes per second, is asked if it matters."""
        if self.mode == "fetch":
            return Miss()
        every = EVERY if self.every is None else self.every
        return Miss(self.mode, every=every, link_rate=link_rate() if self.mode == "split" else 0.0)


LAYERS = Miss("layers", every=EVERY)  # what the guard of auto falls back on


def candidates(link_rate: float) -> list[Miss]:
    """What auto tries. `link_rate` in bytes per second."""
    return [Miss(), *(Miss("cpu", every=every) for every in RATES), Miss("split", every=EVERY, link_rate=link_rate)]
