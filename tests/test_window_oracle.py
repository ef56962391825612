"""Windows against stock llama.cpp: keys after eviction are those of a fresh context at the same positions. A matrix of architectures and key types.

The comparisons are made to be able to fail: with a wrong position base, and with models whose keys llama.cpp moves wrongly, they do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from archs import build_arch, descriptions

from tinyserve_gguf import Model, OptionError, Sampling, load, read_facts
from tinyserve_gguf._llama import NativeContext, NativeModel
from tinyserve_gguf.choices import KV_TYPES
from tinyserve_gguf.kv import _SHIFTS, why_no_shift

ModelFile = Callable[..., Path]
Logits = npt.NDArray[np.float32]

GREEDY = Sampling(temp=0)
SIZE, SINKS, BLOCK = 64, 4, 15
SOFT = {"gate": "F32", "up": "F32", "down": "F32", "dense": "F32", "used": 8}  # all experts are used, so that small differences stay small
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 256}
DEEPSEEK_YARN = {**YARN, "rope.scaling.yarn_log_multiplier": 0.1}  # its two factors cancel out
# root mean square of the differences over the standard deviation of the logits, with a margin of 2 or more
TOLERANCE = {"f16": 1e-3, "q8_0": 4e-3, "q4_0": 0.05}


def tokens(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 300) for _ in range(n)]


@contextmanager
def opened(path: Path, *, shifts: bool | None = None, **options: object) -> Iterator[Model]:
    """`shifts` overrides what was decided about moving positions."""
    defaults = {"expert_cache": "all", "device": "CPU", "window": SIZE, "n_ubatch": 32, "n_threads": 1, "kv_type_v": "f16"}
    with load(path, **{**defaults, **options}) as model:  # type: ignore[arg-type]
        if shifts is not None:
            assert model.context.rolling
            model.context = replace(model.context, rolling=replace(model.context.rolling, shifts=shifts))
        yield model


def fresh(model: Model, held: Sequence[int], start: int) -> Logits:
    """Logits of stock llama.cpp after the sinks at positions 0, 1, ... and the rest of `held` at `start`, `start` + 1, ...

    llama.cpp takes no gap between positions, so other tokens fill it and are removed again. They are seen by the tokens after them, which changes
    nothing in the keys of a model of one layer.
    """
    native = NativeModel(str(model.facts.path), None, extra_bufts=False)
    context = NativeContext(native, replace(model.context.options, n_ctx=1024))
    try:
        sequence = [*held[:SINKS], *tokens(start - SINKS, seed=9), *held[SINKS:]]
        for at in range(0, len(sequence) - 1, 32):
            context.decode(sequence[at : min(at + 32, len(sequence) - 1)], at, want_logits=False)
        if start > SINKS:
            context.remove(SINKS, start)
        context.decode(sequence[-1:], len(sequence) - 1, want_logits=True)
        return context.logits()
    finally:
        context.close()
        native.close()


def distance(found: Sequence[Logits], expected: Sequence[Logits]) -> float:
    """Root mean square of the differences, over the standard deviation of the logits."""
    return float(np.sqrt(np.mean([np.mean(np.square(a - b)) / b.var() for a, b in zip(found, expected, strict=True)])))


def evicted(model: Model, evictions: int, seed: int) -> tuple[Logits, tuple[int, ...]]:
    """Logits after a prompt that made so many blocks leave, and the tokens that are held then."""
    session = model.session()
    session.read(tokens(SIZE + BLOCK * evictions, seed))
    found = np.asarray(session.logits()), session.tokens
    session.close()
    assert len(found[1]) == SIZE
    return found


# ---- one layer: exactly a fresh context of sinks and window ---------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("evictions", [1, 4])
def test_moved_keys(model_file: ModelFile, keys: str, evictions: int) -> None:
    """At the compacted positions, and a wrong base is told apart: the window one position too far, and not moved down at all."""
    with opened(model_file("qwen3moe", layers=1, **SOFT), kv_type=keys) as model:
        runs = [evicted(model, evictions, seed) for seed in range(8)]
        found = [logits for logits, _ in runs]
        off = {base: distance(found, [fresh(model, held, SINKS + base) for _, held in runs]) for base in (0, 1, BLOCK)}
    assert off[0] < TOLERANCE[keys]
    assert off[0] < off[1] < off[BLOCK]
    if keys == "q4_0":  # quantising twice does as much as one position
        assert off[0] < 0.75 * off[BLOCK]
    else:
        assert off[1] > 2 * TOLERANCE[keys]


@pytest.mark.parametrize("keys", ["f16", "q8_0", "q4_0", "bf16"])
def test_keys_that_stay(model_file: ModelFile, keys: str) -> None:
    """Where positions cannot move, the window is where it always was, and the keys are those that were computed there."""
    with opened(model_file("qwen3moe", layers=1, more=YARN, **SOFT), kv_type=keys) as model:
        assert not model.context.rolling.shifts  # type: ignore[union-attr]
        runs = [evicted(model, 3, seed) for seed in range(4)]
        off = {base: distance([logits for logits, _ in runs], [fresh(model, held, SINKS + base) for _, held in runs]) for base in (0, 3 * BLOCK)}
    assert off[3 * BLOCK] < 1e-3 < off[0]  # to the last bits but for F16 sums of another order


def test_keys_that_are_read_again(model_file: ModelFile) -> None:
    """When the positions that the model knows are used up, what is held starts again at 0, as in a fresh context, bit for bit."""
    with opened(model_file("qwen35moe", context=256), kv_type="f16") as model:
        session = model.session()
        session.read(tokens(256))
        assert model.stats().window.rereads == 0  # type: ignore[union-attr]
        held = session.tokens
        session.read([*tokens(256), 7])
        assert model.stats().window.rereads == 1  # type: ignore[union-attr]
        assert session.tokens == (*(held if len(held) < SIZE else held[:SINKS] + held[SINKS + BLOCK :]), 7)
        native = NativeModel(str(model.facts.path), None, extra_bufts=False)
        context = NativeContext(native, model.context.options)
        for at in range(0, len(session.tokens) - 1, 32):
            context.decode(session.tokens[at : min(at + 32, len(session.tokens) - 1)], at, want_logits=False)
        context.decode([7], len(session.tokens) - 1, want_logits=True)
        assert np.array_equal(np.asarray(session.logits()), context.logits())
        context.close()
        native.close()
        list(session.generate(tokens(300), 6 * SIZE, GREEDY))
        assert session.last.finish == "length"  # type: ignore[union-attr]
        assert model.stats().window.rereads > 2  # type: ignore[union-attr]


# ---- whole models: without sinks, moving everything changes nothing -------------------------------------------------------------------------


def moved_and_not(path: Path, keys: str) -> float:
    """How far logits are apart when the positions of all that is held move down, and when they stay: rotary embeddings are relative."""
    found = dict[bool, list[Logits]]()
    for shifts in (True, False):
        with opened(path, shifts=shifts, sinks=0, kv_type=keys) as model:
            session = model.session()
            found[shifts] = []
            for evictions in range(1, 5):
                session.read([token % model.native.n_vocab for token in tokens(SIZE + 16 * evictions)])
                found[shifts].append(np.asarray(session.logits()))
    return distance(found[True], found[False])


DEEP = {
    "grouped-query attention": ("qwen3moe", {}),
    "sliding window, attention sinks": ("gpt-oss", {}),
    "sliding window, other heads": ("gemma4", {}),
    "MLA": ("deepseek2", {"groups": 0}),
    "MLA, YaRN": ("deepseek2", {"groups": 0, "more": DEEPSEEK_YARN}),
    "recurrent hybrid": ("nemotron_h_moe", {}),
}


@pytest.mark.parametrize("keys", ["f16", "q8_0"])
@pytest.mark.parametrize("kind", DEEP)
def test_moving_all_changes_nothing(model_file: ModelFile, kind: str, keys: str) -> None:
    name, changes = DEEP[kind]
    path = model_file(name, **SOFT, **changes)
    if why_no_shift(read_facts(path).attention, keys, lambda *_: True):
        assert (kind[:3], keys) == ("MLA", "q8_0")
        return
    assert moved_and_not(path, keys) < 2 * TOLERANCE[keys]


ROTATED = sorted(arch for arch in _SHIFTS & descriptions().keys() if "rope.dimension_sections" not in descriptions()[arch]["metadata"])  # not M-RoPE


@pytest.mark.parametrize("arch", ROTATED)
def test_moving_all_changes_nothing_on_any_architecture(tmp_path: Path, arch: str) -> None:
    """Where llama.cpp rotates layers that have no rotary embedding (Llama 4), or keys that are normalised after it (Hunyuan), it is 0.09 and more."""
    path = build_arch(arch, tmp_path / "m.gguf", used=8)
    assert why_no_shift(read_facts(path).attention, "f16", lambda *_: True) == ""
    assert moved_and_not(path, "f16") < 5 * TOLERANCE["f16"]


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss"])
def test_yarn_scales_keys_at_every_move(model_file: ModelFile, name: str) -> None:
    """Why positions stay with YaRN: llama.cpp multiplies the keys by its factor again whenever it rotates them."""
    path = model_file(name, more=YARN, **SOFT)
    assert "scale" in why_no_shift(read_facts(path).attention, "f16", lambda *_: True)
    assert moved_and_not(path, "f16") > 0.1


# ---- the matrix -----------------------------------------------------------------------------------------------------------------------------

ALL = {"f16", "q8_0", "q4_0"}
MATRIX: dict[str, tuple[str, dict[str, object], set[str]]] = {  # architecture, changes, types of keys whose positions move
    "grouped-query attention": ("qwen3moe", {}, ALL),
    "sliding window in every other block": ("gpt-oss", {}, ALL),
    "the same with YaRN": ("gpt-oss", {"more": YARN}, set()),
    "sliding window, other heads": ("gemma4", {}, ALL),
    "MLA": ("deepseek2", {}, {"f16"}),
    "M-RoPE, recurrent hybrid": ("qwen35moe", {}, set()),
    "recurrent hybrid": ("nemotron_h_moe", {}, ALL),
}


@pytest.mark.parametrize("keys", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("kind", MATRIX)
def test_matrix(model_file: ModelFile, kind: str, keys: str) -> None:
    """Four windows of tokens, read and generated: moved where that is right, positions kept elsewhere; never an abort."""
    name, changes, moving = MATRIX[kind]
    with opened(model_file(name, **changes), kv_type=keys, kv_type_v=None, expert_cache="50%") as model:
        session = model.session()
        session.read(tokens(2 * SIZE))
        assert np.isfinite(session.logits()).all()
        list(session.generate(tokens(2 * SIZE), 2 * SIZE, GREEDY))
        assert np.isfinite(session.logits()).all()
        assert session.tokens[:SINKS] == tuple(tokens(SINKS))
        assert SIZE - BLOCK <= len(session.tokens) <= SIZE
        counts = model.stats().window
        assert counts is not None
        assert counts.evicted_tokens > 2 * SIZE
        assert counts.shifts == (counts.evicted_tokens // BLOCK if keys in moving else 0)
        line = model.lines()[-1]
        assert ("positions of the rest move down" in line) == (keys in moving)
        assert ("recurrent state" in line) == ("recurrent" in kind)


@pytest.mark.parametrize("keys", ["f16", "q8_0"])
def test_refused(model_file: ModelFile, monkeypatch: pytest.MonkeyPatch, keys: str) -> None:
    """Where a window would be wrong or impossible, before the weights are read."""

    def loaded(*_: object, **__: object) -> None:
        raise AssertionError

    path = model_file("qwen3moe")
    facts = read_facts(path)
    monkeypatch.setattr("tinyserve_gguf.model.NativeModel", loaded)
    for changes, reason in (
        ({"is_absolute": True}, "its positions are learned"),
        ({"architecture": "deepseek4"}, "nothing out of the middle"),
        ({"architecture": "mamba", "is_cached": False}, "no KV cache"),
    ):
        found = replace(facts, attention=replace(facts.attention, **changes))  # type: ignore[arg-type]
        monkeypatch.setattr("tinyserve_gguf.model.read_facts", lambda _path, found=found: found)
        with pytest.raises(OptionError, match=reason if keys == "f16" or found.attention.is_cached else "drop --kv-type"):
            load(path, device="CPU", window=SIZE, kv_type=keys)


@pytest.mark.parametrize("keys", KV_TYPES)
def test_every_type_of_key(model_file: ModelFile, keys: str) -> None:
    with opened(model_file("qwen3moe"), kv_type=keys, kv_type_v=None, expert_cache="50%") as model:
        assert model.context.rolling.shifts == (keys != "bf16")  # type: ignore[union-attr]
        session = model.session()
        session.read(tokens(4 * SIZE))
        assert np.isfinite(session.logits()).all()


def test_llama_cpp_is_asked_too(model_file: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows what a header does not say. Moving where it says no would abort the process."""
    monkeypatch.setattr(NativeContext, "can_shift", lambda _self: False)
    with opened(model_file("qwen3moe")) as model:
        assert "llama.cpp cannot move them in the cache of this model" in model.lines()[-1]
        model.session().read(tokens(4 * SIZE))
        assert model.stats().window.shifts == 0  # type: ignore[union-attr]
