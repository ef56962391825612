"""Where a `Llama` puts layers: `n_gpu_layers` keeps its meaning, and what clashes with paging is an error. The GPU is the CPU under another name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llamas import COMMON, logits_of, opened, stock

from tinyserve_gguf import Llama, OptionError, _shim
from tinyserve_gguf.llama_options import Decision, PagedOptions, decide

ModelFile = Callable[..., Path]

PROMPT = list(range(10, 60))


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with CUDA0. `all` keeps the plan from asking how much memory is free."""
    real = _shim.devices()
    fake = replace(next(device for device in real if device.is_cpu), name="CUDA0", is_cpu=False)
    monkeypatch.setattr(_shim, "devices", lambda: [fake, *real])


def decided(path: Path, device: str = "auto", **given: Any) -> Decision:
    return decide(str(path), PagedOptions(expert_cache="all", device=device), given)


@pytest.mark.parametrize(
    ("device", "n_gpu_layers", "runs_on"),
    [
        ("auto", None, "CUDA0"),
        ("auto", -1, "CUDA0"),
        ("auto", 4, "CUDA0"),  # all three blocks and the output
        ("auto", 99, "CUDA0"),
        ("auto", 0, "CPU"),
        ("CPU", None, "CPU"),
        ("CPU", 0, "CPU"),
        ("cuda0", -1, "CUDA0"),
    ],
)
def test_layers_of_a_moe(model_file: ModelFile, device: str, n_gpu_layers: int | None, runs_on: str) -> None:
    given = {} if n_gpu_layers is None else {"n_gpu_layers": n_gpu_layers}
    found = decided(model_file("qwen3moe"), device, **given)
    assert found.device is not None
    assert (found.device.name, found.plan.device.name) == (runs_on, runs_on)
    assert found.stock["n_gpu_layers"] == -1  # of the device that pages


@pytest.mark.parametrize(
    ("device", "n_gpu_layers", "problem"),
    [
        ("auto", 1, "all 4 layers go to CUDA0; give n_gpu_layers=-1"),
        ("CUDA0", 3, "all 4 layers go to CUDA0"),
        ("CUDA0", 0, "leaves no layer for device='CUDA0'"),
        ("CPU", -1, "leave one of them out"),
    ],
)
def test_layers_that_clash(model_file: ModelFile, device: str, n_gpu_layers: int, problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        decided(model_file("qwen3moe"), device, n_gpu_layers=n_gpu_layers)


@pytest.mark.parametrize(
    ("device", "n_gpu_layers", "runs_on", "layers"),
    [
        ("auto", None, "CUDA0", -1),
        ("CPU", None, "CPU", 0),
        ("auto", 2, None, 2),  # llama.cpp's own choice of devices, and a part of the layers
        ("CUDA0", 2, "CUDA0", 2),
        ("CPU", 0, "CPU", 0),
    ],
)
def test_layers_of_a_dense_model(dense_file: Path, device: str, n_gpu_layers: int | None, runs_on: str | None, layers: int) -> None:
    given = {} if n_gpu_layers is None else {"n_gpu_layers": n_gpu_layers}
    found = decided(dense_file, device, **given)
    assert (found.device.name if found.device else None, found.stock["n_gpu_layers"]) == (runs_on, layers)


def test_it_loads_there(model_file: ModelFile) -> None:
    path = model_file("qwen3moe")
    with opened(stock(path, logits_all=True), Llama(path, expert_cache="25%", n_gpu_layers=-1, logits_all=True, **COMMON)) as (theirs, ours):
        assert ours.plan.device.name == "CUDA0"
        assert (logits_of(ours, PROMPT) == logits_of(theirs, PROMPT)).all()
        assert ours.__getstate__()["n_gpu_layers"] == -1


def test_what_the_plan_reserves(model_file: ModelFile) -> None:
    """n_ctx may be more than the model was trained with, and the batch is what the base makes of it."""
    found = decided(model_file("qwen3moe"), n_ctx=8192, n_batch=64)
    assert found.plan.n_ubatch == 64
    assert decided(model_file("qwen3moe")).plan.n_ubatch == 512
    assert decided(model_file("qwen3moe"), n_ctx=100).plan.n_ubatch == 100
