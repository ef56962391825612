"""The random models for benchmarks: their tensors are those of the real ones; with few experts and layers, llama.cpp and this package run them."""

from __future__ import annotations

import importlib.util
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import numpy as np
import pytest
from exact import options, paged, stock
from gguf import GGUFReader

from tinyserve_gguf import load
from tinyserve_gguf._llama import NativeContext

SCRIPT = Path(__file__).parent.parent / "scripts" / "make_model.py"
SMALL = {"gpt-oss-20b": 2, "qwen3-30b-a3b": 2, "qwen3.6-35b-a3b": 4}  # one per architecture; layers, of every kind it has
PROMPTS, DECODE = (1, 40), 4


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """make_model.py as a module, its random numbers at their beginning, its models with few experts and a small vocabulary."""
    spec = importlib.util.spec_from_file_location("make_model", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "make_model", module)  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder() -> Iterator[Path]:
    """Removed at once, unlike tmp_path: a model takes up to 300 MB."""
    with TemporaryDirectory() as name:
        yield Path(name)


def shrink(script: ModuleType, name: str) -> None:
    """Widths and types stay the real ones."""
    g = script.MODELS[name]
    script.MODELS[name] = replace(g, experts=2 * g.used, vocab=1024, layers=SMALL[name])


def call(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", ["make_model.py", *map(str, words)])
    script.main()


@pytest.mark.parametrize(
    ("name", "n_tensors", "n_f32", "billions"),
    [  # as llama.cpp's loader and llama-bench print them for the published files
        ("gpt-oss-20b", 459, 289, 20.91),
        ("gpt-oss-120b", 687, 433, 116.83),
        ("qwen3-30b-a3b", 579, 241, 30.53),
        ("qwen3.6-35b-a3b", 733, 301, 34.66),
    ],
)
def test_tensors_of_the_real_model(script: ModuleType, name: str, n_tensors: int, n_f32: int, billions: float) -> None:
    found = list(script.tensors(script.MODELS[name], 1.0))
    assert len({tensor.name for tensor in found}) == len(found) == n_tensors
    assert sum(tensor.kind.name == "F32" for tensor in found) == n_f32
    assert round(sum(math.prod(tensor.shape) for tensor in found) / 1e9, 2) == billions


@pytest.mark.parametrize("name", SMALL)
def test_loads_and_gives_the_logits_of_llama(script: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, name: str) -> None:
    path = folder / "model.gguf"
    shrink(script, name)
    call(script, monkeypatch, name, path)
    expected = stock(path, DECODE, PROMPTS)
    with load(path, expert_cache="50%", device="CPU", n_ctx=640, n_threads=1) as model:
        assert paged(model, DECODE, PROMPTS) == expected
        assert sum(group.n_experts for group in model.facts.groups) == 2 * script.MODELS[name].used * SMALL[name]


@pytest.mark.parametrize("name", SMALL)
def test_skew_makes_some_experts_popular(script: ModuleType, folder: Path, name: str) -> None:
    """Share of all lookups of the first layer that go to its most popular quarter of experts."""
    g = script.MODELS[name]
    delta = g.delta and replace(g.delta, attention_every=2)
    g = replace(g, layers=2, experts=32, expert_ff=64, vocab=1024, gate_types=("Q4_0",), down_types=("Q4_0",), delta=delta)
    shares = []
    for skew in (0.0, 3.0):
        path = folder / f"{skew}.gguf"
        script.write(g, path, skew)
        with load(path, expert_cache="50%", device="CPU", n_ctx=256, n_threads=1) as model:
            context = NativeContext(model.native, options(256))
            for i, token in enumerate(random.Random(0).sample(range(300, 1000), 50)):
                context.decode([token], i, want_logits=True)
            context.close()
            counts = sorted(expert.hits + expert.misses for expert in (model.experts[0, n] for n in range(32)))
        assert sum(counts) == 50 * g.used
        shares.append(sum(counts[-8:]) / sum(counts))
    assert shares[0] < 0.5 < shares[1] - 0.1


def test_types_and_layers_as_asked(script: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    path, name = folder / "model.gguf", "qwen3.6-35b-a3b"
    shrink(script, name)
    call(script, monkeypatch, name, path, "--layers", "5", "--experts", "Q5_K", "--down", "Q4_K,Q6_K", "--others", "Q8_0")
    types = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(path).tensors}
    assert {name.split(".")[1] for name in types if name.startswith("blk.")} == {"0", "1", "2", "3", "4"}
    for part, expected in (("gate", ["Q5_K"] * 5), ("up", ["Q5_K"] * 5), ("down", ["Q4_K", "Q6_K", "Q4_K", "Q6_K", "Q4_K"])):
        assert [types[f"blk.{layer}.ffn_{part}_exps.weight"] for layer in range(5)] == expected
    assert {types[f"blk.0.{part}.weight"] for part in ("attn_qkv", "ssm_out", "ffn_down_shexp")} == {types["output.weight"]} == {"Q8_0"}


def test_weights_have_the_scale_that_was_asked_for(script: ModuleType) -> None:
    """For every type: what ggml reads from the random blocks has the standard deviation of the tensor, about."""
    from gguf.quants import dequantize

    for kind in script.SCALES:
        values = dequantize(script.Tensor("a", kind, (2560, 64), 0.02).data(), kind)
        assert 0.7 < np.std(values) / 0.02 < 1.4, kind.name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("gpt-oss-20b {} --experts Q4_K", "blk.0.ffn_gate_exps.weight has rows of 2880 numbers, which blocks of 256 (Q4_K) do not divide"),
        ("qwen3-30b-a3b {} --down Q4_K,Q7", "'Q7' is none of MXFP4"),
        ("qwen3-30b-a3b {} --layers 0", "0 is not 1 or more"),
        ("qwen3.6-35b-a3b {} --layers 3", "qwen35moe has attention in layer 4 for the first time"),
        ("qwen3-30b-a3b {} --skew nan", "nan is not 0 or more"),
        ("qwen4 {}", "invalid choice: 'qwen4'"),
    ],
)
def test_mistakes(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        call(script, monkeypatch, *words.format(tmp_path / "model.gguf").split())
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
