"""How the next token is drawn."""

from __future__ import annotations

from dataclasses import dataclass

from tinyserve_gguf.errors import OptionError


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampler settings, with llama.cpp's meanings and defaults. `temp <= 0` is greedy, `seed=-1` draws one, `repeat_last_n=-1` is the context."""

    temp: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    seed: int = -1

    def __post_init__(self) -> None:
        for name, good, need in (
            ("temp", self.temp >= 0, "0 or more"),
            ("top_k", self.top_k >= 0, "0 or more (0 = off)"),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("repeat_penalty", self.repeat_penalty > 0, "above 0 (1 = off)"),
            ("repeat_last_n", self.repeat_last_n >= -1, "-1 or more"),
            ("seed", -1 <= self.seed < 2**32, "-1 (random) or below 2^32"),
        ):
            if not good:
                raise OptionError(f"{name} must be {need}, not {getattr(self, name)}")
