"""Paged models give the very logits of stock llama.cpp: prefill and decode, every pool size, every policy, every type. The reference is llama.cpp."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import exact
import pytest
from exact import PROMPTS, THREADS, paged, stock
from gguf import GGUFReader
from synthetic import MODELS, TYPES, split, typed

from tinyserve_gguf import Model, load, read_facts
from tinyserve_gguf._llama import NativeModel
from tinyserve_gguf.choices import POLICIES
from tinyserve_gguf.plan import minimum

ModelFile = Callable[..., Path]

SHORT = (1, 7, 40)
FEW = 8  # decode steps where a test is about something else


def open_paged(path: Path, cache: str, policy: str = "lfru") -> Model:
    """The model on the CPU; the cache "least" is the smallest that is accepted."""
    if cache == "least":
        cache = str(sum(minimum(group) for group in read_facts(path).groups))
    return load(path, expert_cache=cache, policy=policy, device="CPU", n_threads=THREADS)


def assert_counts(model: Model) -> None:
    """Every lookup is a hit or a miss, and experts move exactly when not all are resident."""
    pager = model.stats().pager
    assert pager is not None
    for phase in (pager.prefill, pager.decode):
        assert phase.hits + phase.misses == phase.lookups > 0
        assert (phase.misses == 0) == (phase.bytes_link == 0) == pager.all_resident


@pytest.mark.parametrize("cache", ["least", "25%", "50%", "75%", "all"])
@pytest.mark.parametrize("name", MODELS)
def test_every_pool_size(model_file: ModelFile, name: str, cache: str) -> None:
    path = model_file(name)
    with open_paged(path, cache) as model:
        assert paged(model) == stock(path)
        assert_counts(model)


def test_smaller_than_the_least_is_refused(model_file: ModelFile) -> None:
    least = minimum(read_facts(model_file("mixtral")).groups[0])
    with pytest.raises(ValueError, match=f"give {least} or more"):
        load(model_file("mixtral"), expert_cache=str(least - 1), device="CPU")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("cache", ["25%", "50%"])
@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss", "deepseek2", "mixed"])
def test_every_policy(model_file: ModelFile, name: str, cache: str, policy: str) -> None:
    path = model_file(name)
    with open_paged(path, cache, policy) as model:
        assert paged(model) == stock(path)
        assert model.stats().policy == policy


@pytest.mark.parametrize("name", ["gpt-oss", "grovemoe"])
def test_policy_swapped_between_and_during_decode(model_file: ModelFile, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model_file(name)
    expected = stock(path)
    policies = itertools.cycle(POLICIES)
    decode_one = exact.decode_one
    with open_paged(path, "25%") as model:

        def swapping(*arguments: object) -> object:
            model.set_policy(next(policies))
            logits = decode_one(*arguments)  # type: ignore[arg-type]
            model.check_integrity()
            return logits

        for policy in POLICIES:
            model.set_policy(policy)
            assert exact.run(model.native, 40) == expected[40]
        monkeypatch.setattr(exact, "decode_one", swapping)
        assert paged(model) == expected
        assert_counts(model)


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek2", "gemma4", "scaled"])
def test_batches_of_1_to_64_tokens(model_file: ModelFile, name: str) -> None:
    """Around the size from which a step no longer goes through slots."""
    path, prompts = model_file(name), tuple(range(1, 65))
    with open_paged(path, "50%") as model:
        assert paged(model, 1, prompts) == stock(path, 1, prompts)


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek2", "nemotron_h_moe"])
def test_prompts_a_little_longer_than_batches(model_file: ModelFile, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The first batches go through the stage, the 1 to 8 tokens that are left over through slots."""
    monkeypatch.setattr(exact, "UBATCH", 40)
    path, prompts = model_file(name), tuple(40 * n + rest for n in (1, 2) for rest in range(1, 9))
    with open_paged(path, "50%") as model:
        assert paged(model, 1, prompts) == stock(path, 1, prompts)


@pytest.mark.parametrize("cache", ["25%", "all"])
def test_two_threads(model_file: ModelFile, cache: str) -> None:
    """The proxy passes the number of threads on."""
    native = NativeModel(str(model_file("gpt-oss")), None, extra_bufts=False)
    expected = [exact.run(native, prompt, FEW, threads=2) for prompt in SHORT]
    native.close()
    with open_paged(model_file("gpt-oss"), cache) as model:
        assert [exact.run(model.native, prompt, FEW, threads=2) for prompt in SHORT] == expected


# ---- types ----------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*TYPES, "IQ4_NL", "IQ4_XS", "IQ3_S", "TQ1_0", "TQ2_0"])
def test_every_type(model_file: ModelFile, kind: str) -> None:
    path = model_file("qwen3moe", **typed(kind, layers=2))
    with open_paged(path, "25%") as model:
        assert paged(model, FEW, SHORT) == stock(path, FEW, SHORT)


@pytest.mark.parametrize("kind", ["F16", "Q4_K", "Q8_0", "MXFP4", "IQ4_NL"])
@pytest.mark.parametrize("name", ["gpt-oss", "gemma4", "deepseek2-fused"])
def test_types_with_biases_scales_and_fused_weights(model_file: ModelFile, name: str, kind: str) -> None:
    path = model_file(name, **typed(kind))
    with open_paged(path, "25%") as model:
        assert paged(model, FEW, SHORT) == stock(path, FEW, SHORT)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3moe", {"experts": 64, "used": 8}),
        ("gpt-oss", {"experts": 32, "used": 4, "bias_std": 20.0}),
        ("mixtral", {"used": 8}),  # every expert in every step
        ("mixtral", {"used": 1, "layers": 1}),
        ("mixtral", {"gate": "Q4_0", "up": "F16", "down": "Q8_0"}),  # types differ within a layer
        ("qwen3moe", {"scales": ("up",), "gate": ("F16", "Q8_0", "MXFP4")}),  # three layout groups
    ],
)
@pytest.mark.parametrize("cache", ["least", "50%"])
def test_other_shapes(model_file: ModelFile, name: str, changes: dict[str, object], cache: str) -> None:
    path = model_file(name, **changes)
    with open_paged(path, cache) as model:
        assert paged(model, FEW) == stock(path, FEW)


# ---- split files ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt-oss", "scaled", "mixed"])
def test_split_file_is_the_same_model(model_file: ModelFile, tmp_path: Path, name: str) -> None:
    """A weight and its bias or scale lie in different shards; any shard may be given."""
    path = model_file(name)
    shards = split(Path(shutil.copy(path, tmp_path / "My model.gguf")), 3)
    (tmp_path / "My model.gguf").unlink()
    for given in (shards[0], shards[2]):
        with open_paged(given, "25%") as model:
            assert paged(model) == stock(path)


# ---- as many experts as slots ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("prompt", [4, 6, 40])
def test_distinct_experts_about_as_many_as_slots(model_file: ModelFile, prompt: int, more: int) -> None:
    """A step that wants one expert less than there are slots, as many, and one more. Only then it goes through the stage instead of the slots."""
    path = model_file("mixtral", layers=2, experts=16)  # the second and last layer sees one token
    with open_paged(path, "75%") as probe:
        expected, distinct = exact.run(probe.native, prompt, 0), distinct_of_first_layer(probe)
    assert distinct > 3
    with open_paged(path, str(distinct - more)) as model:
        assert exact.run(model.native, prompt, 0) == expected == stock(path, 0, (prompt,))[prompt]
        assert distinct_of_first_layer(model) == distinct
        pager = model.stats().pager
        assert pager is not None
        through_stage = prompt > 32 or more > 0
        assert pager.prefill.streamed + pager.decode.streamed == through_stage
        model.check_integrity()


def distinct_of_first_layer(model: Model) -> int:
    pager = model.stats().pager
    assert pager is not None
    return pager.prefill.lookups + pager.decode.lookups - model.facts.n_used


# ---- the demo model -------------------------------------------------------------------------------------------------------------------------


def test_demo_model(demo_model: Path) -> None:
    prompts = (7, 513)
    expected = stock(demo_model, FEW, prompts)
    for cache in ("25%", "all"):
        with open_paged(demo_model, cache) as model:
            assert paged(model, FEW, prompts) == expected
            assert_counts(model)


# ---- this can fail --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("qwen3moe", "blk.1.ffn_down_exps.weight"),
        ("deepseek2-fused", "blk.1.ffn_gate_up_exps.weight"),
        ("gpt-oss", "blk.0.ffn_up_exps.bias"),
        ("scaled", "blk.1.ffn_gate_exps.scale"),
    ],
)
def test_one_changed_bit_shows(model_file: ModelFile, tmp_path: Path, name: str, tensor: str) -> None:
    """One bit of one expert: other logits, and again those of stock llama.cpp."""
    path = model_file(name)
    changed = Path(shutil.copy(path, tmp_path / "changed.gguf"))
    data = next(one.data for one in GGUFReader(changed, "r+").tensors if one.name == tensor)
    data.reshape(len(data), -1).view("u1")[5, -2] ^= 1 << 4
    del data  # unmapped: written
    with open_paged(changed, "25%") as model:
        found = paged(model)
        assert found == stock(changed)
        assert all(found[prompt] != stock(path)[prompt] for prompt in PROMPTS if prompt > 7)


def test_another_expert_shows(model_file: ModelFile, tmp_path: Path) -> None:
    """What a wrong slot would do: two experts of a layer swapped in the file."""
    path = model_file("mixtral")
    changed = Path(shutil.copy(path, tmp_path / "changed.gguf"))
    data = next(one.data for one in GGUFReader(changed, "r+").tensors if one.name == "blk.1.ffn_up_exps.weight")
    data[[2, 6]] = data[[6, 2]]
    del data
    with open_paged(changed, "50%") as model:
        assert all(paged(model)[prompt] != stock(path)[prompt] for prompt in PROMPTS if prompt > 7)
