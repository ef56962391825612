"""Misses of decode: computed by the CPU they give the logits of stock llama.cpp too, as long as the device is the CPU; and what the options say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from exact import THREADS, paged, stock
from synthetic import MODELS, typed

from tinyserve_gguf import Model, load
from tinyserve_gguf._shim import Miss

ModelFile = Callable[..., Path]

BATCHES = tuple(range(1, 9))  # all that counts as decode
STEPS = 12
SPLITS = (0.01, 1.0, 100.0)  # how fast the CPU is taken to be beside the link: from none of the misses on it to all


def open_missing(path: Path, cache: str = "30%", **options: object) -> Model:
    return load(path, expert_cache=cache, device="CPU", n_threads=THREADS, miss_threads=THREADS, **options)  # type: ignore[arg-type]


def cpu_rows(model: Model) -> int:
    pager = model.stats().pager
    assert pager is not None
    assert pager.decode.hits + pager.decode.misses == pager.decode.lookups > 0
    assert pager.prefill.cpu_rows == 0
    return pager.decode.cpu_rows


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_and_split(model_file: ModelFile, name: str) -> None:
    path = model_file(name)
    expected = stock(path, STEPS, BATCHES)
    with open_missing(path, miss="cpu", miss_admit=2) as model:
        assert paged(model, STEPS, BATCHES) == expected
        rows = [cpu_rows(model)]
        for ratio in SPLITS:
            model.reset_stats()
            model._pager.set_miss(Miss("split", every=4, window=16, link_rate=1e9, cpu_rate=ratio * 1e9))  # type: ignore[union-attr]
            assert paged(model, STEPS, BATCHES) == expected
            rows.append(cpu_rows(model))
        assert rows[0] > 0
        assert rows[1] < rows[2] < rows[3]


@pytest.mark.parametrize("kind", ["F16", "Q4_K", "Q8_0", "MXFP4", "IQ4_NL", "NVFP4", "TQ2_0"])
@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss", "gemma4"])
def test_types(model_file: ModelFile, name: str, kind: str) -> None:
    path, batches = model_file(name, **typed(kind)), (1, 5, 8)
    with open_missing(path, miss="cpu") as model:
        assert paged(model, STEPS, batches) == stock(path, STEPS, batches)
        assert cpu_rows(model) > 0


def test_long_prompts_between(model_file: ModelFile) -> None:
    path, prompts = model_file("gpt-oss"), (40, 3, 513, 1, 519)
    with open_missing(path, "25%", miss="cpu") as model:
        assert paged(model, STEPS, prompts) == stock(path, STEPS, prompts)
        assert cpu_rows(model) > 0


def test_several_threads_on_both_sides(model_file: ModelFile) -> None:
    path = model_file("mixtral")
    with load(path, expert_cache="30%", device="CPU", n_threads=2, miss="cpu", miss_threads=2) as model:
        assert paged(model, STEPS, BATCHES) == stock(path, STEPS, BATCHES)
        assert cpu_rows(model) > 0
