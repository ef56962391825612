"""Estimates against what was measured, the rates behind them, and what `doctor` remembered."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from geometries import GPT_OSS_20B, QWEN3_30B
from gguf import GGUFWriter

from tinyserve_gguf.dryrun import DryRun
from tinyserve_gguf.errors import OptionError
from tinyserve_gguf.estimate import Estimate, estimate, expected_hit_rate, hit_exponent
from tinyserve_gguf.facts import ModelFacts, read_facts
from tinyserve_gguf.geometry import Geometry
from tinyserve_gguf.machine import ASSUMED_LINK, MEMORY, Machine, Measured, rates, recall, remember, with_link
from tinyserve_gguf.needs import Setting, estimated_needs
from tinyserve_gguf.placement import pick_device
from tinyserve_gguf.plan import GIB, Budget

# The machine of the README's results: link as printed in that run, memory of an H200 from its data sheet, 13.2 MB of MXFP4 in 0.32 ms on 16 cores.
# Its prefill is what llama.cpp reached with everything on the GPU.
H200 = Machine("H200", 140 * GIB, 128 * GIB, rates({"link": 54.1e9, "gpu": 4.8e12, "cpu": 42e9, "prefill": 36e12}))
LAPTOP = Machine("laptop", 8 * GIB, 32 * GIB, rates(link_gbps=12, mem_gbps=60, gpu_gbps=288))

# README, Results: (geometry, expert cache, hit rate, decode, prefill of 2k); batches of 2,048, llama.cpp's unpaged rates are in the rows of 100 %
MEASURED = [
    (GPT_OSS_20B, "100%", 1.0, 293.1, 13190),
    (GPT_OSS_20B, "50%", 0.937, 201.7, 12090),
    (GPT_OSS_20B, "25%", 0.714, 95.5, 9727),
    (QWEN3_30B, "100%", 1.0, 280.7, 11429),
    (QWEN3_30B, "50%", 0.980, 232.0, 10459),
    (QWEN3_30B, "25%", 0.858, 148.7, 7738),
]


def on_h200(geometry: Geometry, cache: str, hit_rate: float | None, machine: Machine = H200) -> Estimate:
    return estimate(geometry.facts(), machine, n_ctx=9216, n_ubatch=2048, expert_cache=cache, hit_rate=hit_rate)


# ---- against measurements -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("geometry", "cache", "hit_rate", "decode", "prefill"), MEASURED, ids=lambda value: getattr(value, "name", str(value)))
def test_measured_speeds(geometry: Geometry, cache: str, hit_rate: float, decode: float, prefill: float) -> None:
    """Within 25 % with the hit rate that is assumed, within 15 % with the one that was measured."""
    assumed, known = on_h200(geometry, cache, None), on_h200(geometry, cache, hit_rate)
    assert assumed.fits
    assert assumed.decode == pytest.approx(decode, rel=0.25)
    assert assumed.prefill == pytest.approx(prefill, rel=0.25)
    assert known.decode == pytest.approx(decode, rel=0.15)
    assert known.hit_rate == hit_rate


# README, misses on consumer links, `scripts/gpu-miss`: (geometry, GB/s, expert cache, fetch, cpu)
CONSUMER = [
    (GPT_OSS_20B, 13.8, "25%", 34.2, 78.6),
    (GPT_OSS_20B, 6.9, "12%", 9.1, 58.4),
    (QWEN3_30B, 13.8, "25%", 72.4, 148.8),
    (QWEN3_30B, 6.9, "12%", 16.6, 93.2),
]


@pytest.mark.parametrize(("geometry", "gbps", "cache", "fetch", "cpu"), CONSUMER, ids=lambda value: getattr(value, "name", str(value)))
def test_measured_speeds_over_a_slow_link(geometry: Geometry, gbps: float, cache: str, fetch: float, cpu: float) -> None:
    """With the hit rates that are assumed. What the CPU computes is within 30 %: it was measured beside the GPU, which is not in the rate."""
    found = on_h200(geometry, cache, None, with_link(H200, gbps * 1e9))
    assert found.decode == pytest.approx(fetch, rel=0.25)
    assert found.decode_cpu == pytest.approx(cpu, rel=0.30)
    assert any(line.startswith("with --miss cpu: ~") for line in found.lines())
    assert not any("--miss cpu" in line for line in on_h200(geometry, "50%", None).lines())


def test_measured_prefill_over_a_slow_link() -> None:
    half = on_h200(GPT_OSS_20B, "50%", 0.937, with_link(H200, 13.8e9))
    assert half.decode == pytest.approx(110.1, rel=0.15)
    assert half.prefill == pytest.approx(4885, rel=0.25)


def test_measured_bytes_over_the_link() -> None:
    for geometry, cache, hit_rate, mb in ((GPT_OSS_20B, "50%", 0.937, 79.7), (GPT_OSS_20B, "25%", 0.714, 364.0), (QWEN3_30B, "25%", 0.858, 144.3)):
        assert on_h200(geometry, cache, hit_rate).link_bytes / 1e6 == pytest.approx(mb, rel=0.03)


def test_measured_hit_rates() -> None:
    for n_expert, n_used, share, found in ((32, 4, 0.5, 0.937), (32, 4, 0.25, 0.714), (128, 8, 0.5, 0.980), (128, 8, 0.25, 0.858)):
        assert expected_hit_rate(share, n_expert, n_used) == pytest.approx(found, abs=0.03)
    assert expected_hit_rate(0, 32, 4) == 0
    assert expected_hit_rate(1, 32, 4) == 1
    assert hit_exponent(8, 4) == 1  # nothing is assumed of a router without room for favourites
    assert hit_exponent(512, 8) == hit_exponent(128, 8)  # nor more than what was measured


# ---- verdicts -------------------------------------------------------------------------------------------------------------------------------


def test_yes_with_a_reason_and_assumptions() -> None:
    found = estimate(QWEN3_30B.facts(), LAPTOP, n_ctx=16384)
    verdict, *_, assumed = found.lines()
    assert verdict.startswith("yes: ~") and " tok/s decode (hit rate ~0." in verdict and " tok/s prefill, because " in verdict
    assert "% of the experts stay in" in verdict and "MB a token cross a link of 12.0 GB/s" in verdict
    for part in ("assumed: a hit rate of 1 - (1 - 0.", "link 12.0 GB/s (given)", "CPU experts 36.0 GB/s (assumed)", "estimated from the header"):
        assert part in assumed
    assert found.plan and found.plan.total_bytes < 8 * GIB
    assert json.loads(json.dumps(found.as_dict()))["plan"]["n_ctx"] == 16384


def test_no_with_the_arithmetic() -> None:
    small = estimate(QWEN3_30B.facts(), replace(LAPTOP, vram=3 * GIB), n_ctx=65536)
    assert not small.fits
    assert small.lines() == [small.line()]
    assert small.line().startswith("no: qwen3-30b-a3b does not fit on the GPU: ") and "; what fits: -c " in small.line()
    poor = estimate(QWEN3_30B.facts(), replace(LAPTOP, ram=8 * GIB))
    assert poor.line().startswith("no: host memory does not hold it: 15.19 GiB experts + ") and "and there are 8.00 GiB" in poor.line()
    assert json.loads(json.dumps(poor.as_dict()))["fits"] is False
    assert estimate(QWEN3_30B.facts(), replace(LAPTOP, vram=24 * GIB, ram=8 * GIB)).fits  # all resident: memory holds no expert


def test_more_of_anything_is_never_slower() -> None:
    facts = GPT_OSS_20B.facts()
    decode = [estimate(facts, replace(LAPTOP, vram=n * GIB)).decode for n in (4, 6, 8, 12, 16)]
    assert decode == sorted(decode)
    assert len(set(decode)) > 3
    for faster in ({"link_gbps": 24}, {"gpu_gbps": 600}):
        given: dict[str, Any] = {"link_gbps": 12, "mem_gbps": 60, "gpu_gbps": 288} | faster
        assert estimate(facts, replace(LAPTOP, rates=rates(**given))).decode > decode[2]
    long = estimate(facts, LAPTOP, n_ctx=65536)
    assert long.hit_rate < estimate(facts, LAPTOP).hit_rate
    assert estimate(facts, LAPTOP, budget=Budget.of(reserve=3)).hit_rate < estimate(facts, LAPTOP).hit_rate


def test_experts_that_cannot_be_page_locked_are_slower() -> None:
    tight = replace(LAPTOP, ram=16 * GIB)  # holds 12 GiB of experts, but not as nine tenths
    geometry = replace(GPT_OSS_20B, expert_bits=6.5)
    found, easy = estimate(geometry.facts(), replace(tight, ram=int(18.5 * GIB))), estimate(geometry.facts(), LAPTOP)
    assert found.plan and easy.plan
    assert (found.plan.host.rung, easy.plan.host.rung) == ("mapped", "mapped")
    limited = estimate(geometry.facts(), LAPTOP, budget=Budget.of(ram=4))
    assert limited.plan and limited.plan.host.rung == "pageable"
    assert limited.decode < easy.decode


def test_without_a_gpu() -> None:
    machine = Machine("box", 0, 64 * GIB, rates({"cpu": 42e9}, has_gpu=False))
    found = estimate(GPT_OSS_20B.facts(), machine)
    assert found.decode == pytest.approx(1 / ((found.plan.needs.weights + 24 * 4 * 13.2e6) / 42e9), rel=0.02)  # type: ignore[union-attr]
    assert "of memory" in found.reason and "link" not in found.line()


# ---- rates ----------------------------------------------------------------------------------------------------------------------------------


def test_without_a_gpu_the_file_must_fit_into_memory_beside_the_cache() -> None:
    """The experts stay in the mapped file: what the memory does not hold would come from the disk, token by token."""
    found = estimate(GPT_OSS_20B.facts(), replace(LAPTOP, vram=0, ram=11 * GIB), n_ctx=4096, expert_cache="25%")
    assert not found.fits
    assert "expert cache, weights and context" in found.reason
    assert estimate(GPT_OSS_20B.facts(), replace(LAPTOP, vram=0, ram=24 * GIB), n_ctx=4096, expert_cache="25%").fits


def test_given_rates_come_before_measured_ones_and_those_before_assumed_ones() -> None:
    found = rates({"link": 25e9, "memory": 50e9, "cpu": 30e9, "gpu": 500e9, "prefill": 9e12}, gpu_gbps=1000, known_as="measured here")
    assert (found.link, found.gpu, found.memory, found.cpu) == (25e9, 1000e9, 50e9, 30e9)
    assert found.sources == {"link": "measured here", "memory": "measured here", "cpu": "measured here", "gpu": "given", "prefill": "assumed"}
    assert found.prefill > 9e12  # was measured on another GPU
    assert rates({"cpu": 30e9}, mem_gbps=20).cpu < 20e9
    assert rates().link == ASSUMED_LINK
    assert set(rates().assumed()) == {"link", "memory", "gpu", "cpu", "prefill"}
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(OptionError, match="--mem-gbps is above 0 GB/s"):
            rates(mem_gbps=wrong)


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where doctor's measurements are kept in this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return MEMORY.path


@pytest.mark.usefixtures("memory")
def test_memory_of_measurements() -> None:
    assert recall("CUDA0") == (None, None)
    first, second = Measured("CUDA0", "2026-01-02", {"link": 25e9}), Measured("CPU", "2026-01-03", {"cpu": 5e9})
    assert remember(first) is None
    assert remember(second) is None
    assert recall("CUDA0") == (first, None)
    assert recall("CPU") == (second, None)
    assert recall("CUDA1") == (None, None)


DAMAGED = ["", "[]", "{}", '{"version": 99, "machines": {}}', '{"version": 1, "machines": []}', "\xff"]
DAMAGED += ['{"version": 1, "machines": {"KEY": {"rates": 3}}}']


@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_memory_is_one_line_and_gets_replaced(memory: Path, content: str) -> None:
    remember(Measured("CPU", "2026-01-02", {"cpu": 5e9}))
    key = next(iter(json.loads(memory.read_text())["machines"]))
    memory.write_bytes(content.replace("KEY", key).encode("latin-1"))
    found, trouble = recall("CPU")
    assert found is None
    assert trouble and trouble.startswith(f"what doctor remembered in {memory} is not used: ") and "\n" not in trouble
    assert remember(Measured("CPU", "2026-01-02", {"cpu": 5e9})) is None
    assert recall("CPU")[0] is not None


def test_what_cannot_be_written_is_one_line(memory: Path) -> None:
    memory.parent.write_text("")
    trouble = remember(Measured("CPU", "2026-01-02", {"cpu": 5e9}))
    assert trouble and trouble.startswith("the measurements cannot be remembered: ")


# ---- geometry, beside a header of that geometry ---------------------------------------------------------------------------------------------


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/make_model.py as a module."""
    spec = importlib.util.spec_from_file_location("make_model", Path(__file__).parent.parent / "scripts" / "make_model.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "make_model", module)  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def hollow(script: ModuleType, name: str, path: Path) -> ModelFacts:
    """Facts of a real model's header; what stands for its weights is a hole in the file."""
    model = script.MODELS[name]
    writer, total = GGUFWriter(path, model.arch), 0
    script.metadata(writer, replace(model, vocab=256))  # the size of the vocabulary is that of the embedding table
    for tensor in script.tensors(model, 1.0):
        is_float = tensor.kind.name in ("F32", "F16")
        kind = np.dtype(np.float16 if tensor.kind.name == "F16" else np.float32 if is_float else np.uint8)
        shape = tensor.shape[::-1] if is_float else tensor.bytes_shape()
        n_bytes = int(np.prod(shape)) * kind.itemsize
        writer.add_tensor_info(tensor.name, shape, kind, n_bytes, raw_dtype=None if is_float else tensor.kind)
        total += -(-n_bytes // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, -(-path.stat().st_size // 32) * 32 + total)
    return read_facts(path)


@pytest.mark.parametrize("geometry", [GPT_OSS_20B, QWEN3_30B], ids=lambda geometry: geometry.name)
def test_real_geometries(script: ModuleType, tmp_path: Path, geometry: Geometry) -> None:
    """The facts of a geometry lead to the plan of the file, and the estimate of what a context takes holds what llama.cpp says of it."""
    facts, few = hollow(script, geometry.name, tmp_path / "m.gguf"), geometry.facts()
    assert few.expert_bytes == pytest.approx(facts.expert_bytes, rel=0.01)
    assert len(few.expert_layers) == len(facts.expert_layers)
    with DryRun(facts, pick_device("CPU")) as dry:
        for setting in (Setting(4096, 512), Setting(4096, 4096), Setting(16384, 2048), Setting(65536, 512)):
            asked, estimated = dry.needs(setting), estimated_needs(facts, setting)
            assert asked.kv == estimated.kv
            assert asked.compute <= estimated.compute <= 1.4 * asked.compute
            assert asked.device <= estimated.device <= 1.15 * asked.device
            assert estimated_needs(few, setting).device == pytest.approx(estimated.device, rel=0.06)
    exact, rough = (estimate(found, LAPTOP, n_ctx=16384) for found in (facts, few))
    assert rough.decode == pytest.approx(exact.decode, rel=0.1)
