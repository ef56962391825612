"""Misses of decode: computed by the CPU they give the logits of stock llama.cpp too, as long as the device is the CPU; and what the options say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from exact import THREADS, paged, stock
from processes import cli, error_line
from reshaped import dense
from synthetic import MODELS, typed

from tinyserve_gguf import Model, OptionError, load
from tinyserve_gguf._shim import Miss
from tinyserve_gguf.miss import LAYERS

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
            model._pager.set_miss(Miss("split", every=4, link_rate=1e9, cpu_rate=ratio * 1e9))  # type: ignore[union-attr]
            assert paged(model, STEPS, BATCHES) == expected
            rows.append(cpu_rows(model))
        assert rows[0] > 0
        assert rows[1] < rows[2] < rows[3]
        for miss in (LAYERS, Miss("fetch"), Miss("layers")):
            model._pager.set_miss(miss)  # type: ignore[union-attr]
            assert paged(model, STEPS, BATCHES) == expected


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


# ---- options --------------------------------------------------------------------------------------------------------------------------------


def test_a_value_that_would_be_ignored_is_refused(model_file: ModelFile, tmp_path: Path) -> None:
    path = model_file("mixtral")
    for options, message in (
        ({"miss": "guess"}, "--miss is one of fetch, cpu, split, layers"),
        ({"miss_admit": 4}, "--miss-admit is for --miss cpu, split, layers or auto"),
        ({"miss_threads": 1}, "--miss-threads is for --miss cpu, split, layers or auto"),
        ({"miss": "cpu", "miss_admit": -1}, "--miss-admit is 0 or more"),
        ({"miss": "cpu", "miss_threads": 0}, "--miss-threads is 1 or more"),
        ({"miss": "cpu", "engine": "device"}, "the device engine fetches every miss"),
    ):
        with pytest.raises(OptionError, match=message):
            load(path, device="CPU", **options)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="is dense"):
        load(dense(path, tmp_path / "dense.gguf"), device="CPU", miss="cpu")


def test_what_is_said(model_file: ModelFile) -> None:
    path = model_file("mixtral")
    with load(path, expert_cache="25%", device="CPU") as model:
        assert "misses: fetched" in model.lines()
    with open_missing(path, "all", miss="cpu") as model:
        assert "misses: none, every expert is resident" in model.lines()
    with open_missing(path, miss="cpu", miss_admit=0) as model:
        assert model.miss == "computed by the CPU with 1 thread, no miss enters the pool"
        paged(model, STEPS, (1,))
        assert any(line.startswith("misses computed by the CPU") for line in model.stats().lines())
        assert model.stats().as_dict()["decode"]["admitted"] == 0


def test_bench_compares_the_ways(model_file: ModelFile, tmp_path: Path) -> None:
    options = ("-p", "0", "-n", "4", "-r", "1", "--warmup", "4", "--device", "CPU", "-t", "1", "--expert-cache", "25%", "--json")
    done = cli("bench", str(model_file("mixtral")), "--miss", "fetch,cpu", "--miss-admit", "4,0", "--miss-threads", "1", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["run"] for row in rows] == [
        "expert cache 25%, lfru",
        "expert cache 25%, lfru, miss cpu, admit 1/4",
        "expert cache 25%, lfru, miss cpu, admit none",
    ]
    assert [row["cpu_rows_per_token"] > 0 for row in rows] == [False, True, True]
    assert rows[2]["admitted_per_token"] == rows[2]["mb_per_token"] == 0
    assert rows[1]["miss"].startswith("computed by the CPU with 1 thread, at most one in 4")
    line = error_line(cli("bench", model_file("mixtral"), "--miss-admit", "4", *options, cwd=tmp_path))
    assert "with fetch the CPU computes no expert" in line
