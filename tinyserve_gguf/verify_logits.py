"""Logits of stock llama.cpp and of paged models over the same tokens, compared bit by bit; where they part, the layer is looked for."""

from __future__ import annotations

import ctypes
import hashlib
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt

from tinyserve_gguf import _llama
from tinyserve_gguf._llama import ContextOptions, NativeContext, NativeModel
from tinyserve_gguf.facts import ModelFacts

NEAR = 0.05  # of the deviation of a token's logits: typical distance from llama.cpp's that misses on the CPU of a GPU machine may have
NEAR_TIMES = 2.0  # or so many times that of llama.cpp itself with all experts on that CPU: kernels of CPU and GPU round differently, by type
UBATCH = 512  # tokens
_LAYER = re.compile(r"l_out-(\d+)")  # how llama.cpp names what a block gives

Logits = npt.NDArray[np.float32]  # [1 + decode, n_vocab]


@dataclass(frozen=True, slots=True)
class Workload:
    """Random tokens: prompts of these lengths, and so many tokens decoded one by one behind each."""

    prompts: tuple[int, ...]
    decode: int
    n_threads: int

    @staticmethod
    def of(facts: ModelFacts, n_threads: int, *, quick: bool) -> Workload:
        """Prompts around the sizes where paging changes its ways: what goes through slots, what through stages, a second batch."""
        prompts, decode = ((1, 7, 40), 4) if quick else ((1, 7, 40, UBATCH + 1, UBATCH + 7), 16)
        room = (facts.context_length or UBATCH * 2) - decode
        return Workload(tuple(n for n in prompts if n <= room) or (1,), decode, n_threads)

    @property
    def n_tokens(self) -> int:
        return sum(self.prompts) + self.decode * len(self.prompts)

    def options(self) -> ContextOptions:
        return ContextOptions(n_ctx=max(self.prompts) + self.decode, n_batch=UBATCH, n_ubatch=UBATCH, n_threads=self.n_threads)

    def tokens(self, prompt: int, n_vocab: int) -> list[int]:
        rng = random.Random(prompt)
        return [rng.randrange(n_vocab) for _ in range(prompt + self.decode)]


@dataclass(frozen=True, slots=True)
class Difference:
    """Logits that are not llama.cpp's."""

    largest: float  # absolute
    in_deviations: float  # of the logits of that token
    prompt: int
    step: int  # 0: after the prompt; else after so many decoded tokens
    same_likeliest: float  # share of the tokens with the same likeliest next one
    typical: float = 0.0  # root mean square, over the tokens, of a token's largest difference in deviations

    def line(self) -> str:
        where = f"after a prompt of {self.prompt}" + (f" and {self.step} decoded" if self.step else "")
        return f"differ by {self.largest:.2g} ({self.in_deviations:.1g} deviations) {where}, same likeliest token {self.same_likeliest:.0%}"

    def is_near(self, on_cpu: Difference | None) -> bool:
        """Whether the CPU's other rounding explains it; `on_cpu` is how far llama.cpp itself is off with all experts on the CPU."""
        return self.typical <= near_limit(on_cpu)


def near_limit(on_cpu: Difference | None) -> float:
    """Largest `typical` that counts as near."""
    return max(NEAR, NEAR_TIMES * on_cpu.typical) if on_cpu else NEAR


def read(native: NativeModel, load: Workload, show: Callable[[float], None]) -> list[Logits]:
    """Logits after each prompt and each decoded token, one array a prompt."""
    found = []
    for i, prompt in enumerate(load.prompts):
        show(i / len(load.prompts))
        context = NativeContext(native, load.options())
        try:
            found.append(np.stack(_steps(context, load, prompt)))
        finally:
            context.close()
    return found


def _steps(context: NativeContext, load: Workload, prompt: int) -> list[Logits]:
    tokens = load.tokens(prompt, context.model.n_vocab)
    for start in range(0, prompt, UBATCH):
        context.decode(tokens[start : min(prompt, start + UBATCH)], start, want_logits=start + UBATCH >= prompt)
    found = [context.logits()]
    for at in range(prompt, prompt + load.decode):
        context.decode(tokens[at : at + 1], at, want_logits=True)
        found.append(context.logits())
    return found


def are_finite(found: Sequence[Logits]) -> bool:
    """Whether all of them are numbers."""
    return all(bool(np.isfinite(logits).all()) for logits in found)


def compare(load: Workload, stock: Sequence[Logits], paged: Sequence[Logits]) -> Difference | None:
    """None if every bit is the same, also where a model gives NaN."""
    if all(np.array_equal(a.view(np.uint32), b.view(np.uint32)) for a, b in zip(stock, paged, strict=True)):
        return None
    worst, same, n, squares = (-1.0, 0.0, 0, 0), 0, 0, 0.0
    for prompt, a, b in zip(load.prompts, stock, paged, strict=True):
        apart = np.nan_to_num(np.abs(a.astype(np.float64) - b), nan=np.inf).max(axis=1)
        deviation = np.maximum(a.std(axis=1, dtype=np.float64), np.finfo(np.float32).tiny)
        step = int(apart.argmax())
        worst = max(worst, (float(apart[step]), float((apart / deviation).max()), prompt, step))
        same += int((a.argmax(axis=1) == b.argmax(axis=1)).sum())
        n += len(a)
        squares += float(np.square(apart / deviation).sum())
    return Difference(*worst, same / n, (squares / n) ** 0.5)


# ---- the first layer --------------------------------------------------------------------------------------------------------------------------


@cache
def _ggml() -> SimpleNamespace:
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    return _llama.bind(
        ("ggml_get_name", ctypes.c_char_p, [pointer]),
        ("ggml_nbytes", size, [pointer]),
        ("ggml_backend_tensor_get", None, [pointer, pointer, size, size]),
    )


def layer_hashes(native: NativeModel, load: Workload, prompt: int) -> list[tuple[int, str]]:
    """(block, hash) of what each block gives, for every step of this prompt in turn; empty where llama.cpp does not name it. The graph is computed
    in pieces for this, on both sides alike."""
    found: list[tuple[int, str]] = []

    def on_node(tensor: int, ask: bool) -> bool:
        ggml = _ggml()
        match = _LAYER.fullmatch(ggml.ggml_get_name(tensor).decode("utf-8", "replace"))
        if match and not ask:
            data = ctypes.create_string_buffer(ggml.ggml_nbytes(tensor))
            ggml.ggml_backend_tensor_get(tensor, data, 0, len(data))
            found.append((int(match[1]), hashlib.sha256(data).hexdigest()))
        return match is not None or not ask

    context = NativeContext(native, load.options(), on_node)
    try:
        _steps(context, load, prompt)
    finally:
        context.close()
    return found


def first_layer(stock: Sequence[tuple[int, str]], paged: Sequence[tuple[int, str]]) -> int | None:
    """Block where they part; None if they do not, or if nobody can tell."""
    return next((block for (block, a), (_, b) in zip(stock, paged, strict=False) if a != b), None)
