"""The synthetic models are what the other tests rest on: llama.cpp loads them, their text depends on the prompt, and every expert matters."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGUFReader
from synthetic import MODELS, build, describe, split, typed

from tinyserve_gguf._llama import ContextOptions, NativeContext, NativeModel, chat_formatter

Logits = npt.NDArray[np.float32]
PROMPT = list(range(40, 80))
DECODED = [5, 150, 261]


def logits(path: Path, prompts: Iterable[list[int]], then: Iterable[int] = ()) -> list[Logits]:
    """Stock llama.cpp's logits after each prompt, and after each token of `then` behind it."""
    model = NativeModel(str(path), None, extra_bufts=False)
    context = NativeContext(model, ContextOptions(n_ctx=256, n_batch=64, n_ubatch=64, n_threads=1))
    found = []
    for prompt in prompts:
        context.clear()
        context.decode(prompt, 0, want_logits=True)
        found.append(context.logits())
        for i, token in enumerate(then):
            context.decode([token], len(prompt) + i, want_logits=True)
            found.append(context.logits())
    context.close()
    model.close()
    return found


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("synthetic")
    return {name: build(name, folder / f"{name}.gguf") for name in MODELS}


@pytest.mark.parametrize("name", MODELS)
def test_loads_and_answers(models: dict[str, Path], name: str) -> None:
    found = logits(models[name], [PROMPT, PROMPT[::-1]], then=DECODED)
    assert all(np.isfinite(one).all() and 0.5 < one.std() < 2 for one in found)
    for i, one in enumerate(found):
        assert all(np.abs(one - other).max() > 0.1 for other in found[:i])
    assert models[name].stat().st_size < 8e6


@pytest.mark.parametrize("name", MODELS)
def test_every_token_uses_its_own_experts(models: dict[str, Path], name: str, tmp_path: Path) -> None:
    """Give one expert of a layer its neighbour's weights: a token's logits change if and only if it is routed to that expert."""
    description, tokens = MODELS[name], [[token] for token in range(30, 190, 5)]
    stock = logits(models[name], tokens)
    hits = np.zeros((description.experts, len(tokens)), bool)
    for expert in range(description.experts):
        path = Path(shutil.copy(models[name], tmp_path / "changed.gguf"))
        weights = next(tensor.data for tensor in GGUFReader(path, "r+").tensors if tensor.name.endswith("ffn_down_exps.weight"))
        weights[expert] = weights[(expert + 1) % description.experts]
        del weights  # unmapped: written
        hits[expert] = [not np.array_equal(one, other) for one, other in zip(stock, logits(path, tokens), strict=True)]
    assert (hits.sum(axis=0) == description.used).all()
    assert hits.any(axis=1).all()
    assert not hits.all(axis=1).any()


@pytest.mark.parametrize("name", MODELS)
def test_experts_differ(models: dict[str, Path], name: str) -> None:
    tables = [tensor for tensor in GGUFReader(models[name]).tensors if "exps." in tensor.name]
    assert tables
    for tensor in tables:
        assert len({np.ascontiguousarray(one).tobytes() for one in tensor.data}) == len(tensor.data), tensor.name
        if tensor.name.endswith("exps.bias"):
            assert tensor.data.std() > 0.9


def test_deterministic(models: dict[str, Path], tmp_path: Path) -> None:
    assert build("gpt-oss", tmp_path / "again.gguf").read_bytes() == models["gpt-oss"].read_bytes()
    assert build("gpt-oss", tmp_path / "other.gguf", seed=1).read_bytes() != models["gpt-oss"].read_bytes()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3moe", typed("Q4_K", experts=4, used=1, layers=1)),
        ("gpt-oss", typed("Q8_0", experts=32, used=4, layers=2)),
        ("mixtral", typed("NVFP4", used=8)),
        ("deepseek2", typed("IQ4_NL", groups=0, layers=2, vocab=512)),
        ("qwen3moe", typed("BF16", gate=("F16", "Q8_0", "MXFP4"), scales=("up",))),
    ],
)
def test_changes(tmp_path: Path, name: str, changes: dict[str, object]) -> None:
    path, description = build(name, tmp_path / "changed.gguf", **changes), describe(name, **changes)
    found = logits(path, [PROMPT], then=DECODED)
    assert all(np.isfinite(one).all() and len(one) == description.vocab for one in found)
    types = [tensor.tensor_type.name for tensor in GGUFReader(path).tensors if tensor.name.endswith("gate_exps.weight")]
    cycle = (description.gate,) if isinstance(description.gate, str) else description.gate
    assert set(types) == set(cycle)


def test_impossible_changes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rows of 64 numbers cannot be Q4_K"):
        build("mixtral", tmp_path / "no.gguf", gate="Q4_K")
    with pytest.raises(ValueError, match="vocabulary"):
        build("mixtral", tmp_path / "no.gguf", vocab=259 + 26 * 26 + 1)


def test_tokenizer(models: dict[str, Path]) -> None:
    model = NativeModel(str(models["qwen3moe"]), None)
    text = "The quick brown fox: jumps\n\tover 12 dogs? ~{}|\\ naïve 猫"
    tokens = model.tokenize(text, add_special=False, parse_special=True)
    assert b"".join(model.piece(token) for token in tokens).decode() == text
    assert len(tokens) < len(text.encode())  # merges are used
    formatter = chat_formatter(str(model.metadata("tokenizer.chat_template")), bos=model.bos_text(), eos=model.eos_text())
    prompt = formatter([{"role": "user", "content": "hi"}])
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ends = [token for token in model.tokenize(prompt, add_special=False, parse_special=True) if model.is_end(token)]
    assert [model.token_text(token) for token in ends] == ["<|im_end|>"]
    model.close()


@pytest.mark.parametrize("n_shards", [1, 2, 3])
def test_split(models: dict[str, Path], tmp_path: Path, n_shards: int) -> None:
    whole = Path(shutil.copy(models["gpt-oss"], tmp_path / "My model.gguf"))
    shards = split(whole, n_shards)
    assert [shard.name for shard in shards] == [f"My model-{i + 1:05d}-of-{n_shards:05d}.gguf" for i in range(n_shards)]
    names = [{tensor.name for tensor in GGUFReader(shard).tensors} for shard in shards]
    assert sorted(name for some in names for name in some) == sorted(tensor.name for tensor in GGUFReader(whole).tensors)
    if n_shards > 1:
        assert not any(name.replace(".weight", ".bias") in some for some in names for name in some if name.endswith("_exps.weight"))
        assert "general.architecture" not in GGUFReader(shards[1]).fields
    whole.unlink()
    for one, other in zip(logits(models["gpt-oss"], [PROMPT], then=DECODED), logits(shards[0], [PROMPT], then=DECODED), strict=True):
        assert np.array_equal(one, other)
