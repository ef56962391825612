"""`Llama` beside llama-cpp-python's own class, on the same file and with the same kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import llama_cpp.llama_cpp as C
import numpy as np
import pytest

from tinyserve_gguf import Llama

SIZES = ("0.1%", "25%", "all")  # the first is what one token needs
COMMON: dict[str, Any] = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False}


@contextmanager
def plain_kernels() -> Iterator[None]:
    """llama.cpp on the CPU repacks weights for kernels of other rounding; a paged model, as one on a GPU, has none of that."""
    defaults = C.llama_model_default_params

    def changed() -> Any:
        params = defaults()
        params.use_extra_bufts = False
        return params

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(C, "llama_model_default_params", changed)
        yield


def stock(path: Path, **options: Any) -> Any:
    """llama-cpp-python's own."""
    with plain_kernels():
        return llama_cpp.Llama(str(path), **COMMON | options)


def paged(path: Path, cache: str = "25%", **options: Any) -> Llama:
    return Llama(path, expert_cache=cache, device="CPU", **COMMON | options)


@contextmanager
def opened(*models: Any) -> Iterator[Any]:
    """Closes them at the end."""
    with ExitStack() as stack:
        for model in models:
            stack.callback(model.close)
        yield models if len(models) > 1 else models[0]


def answer(response: Any) -> Any:
    """A response without what is of the moment."""
    return {key: value for key, value in response.items() if key not in ("id", "created", "model")}


def answers(stream: Any) -> list[Any]:
    return [answer(chunk) for chunk in stream]


def tokens_of(model: Any, prompt: list[int], n: int, **options: Any) -> list[int]:
    """`n` greedy tokens."""
    return list(itertools.islice(model.generate(prompt, temp=0.0, **options), n))


def logits_of(model: Any, prompt: list[int]) -> np.ndarray:
    """Of every token of the prompt, read anew. Needs logits_all."""
    model.reset()
    model.eval(prompt)
    return np.array(model.scores[: len(prompt)])
