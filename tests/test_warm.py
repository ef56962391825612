"""Warm start: the list that a run leaves, how the next one uses it, and that logits stay those of llama.cpp."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import exact
import pytest

from tinyserve_gguf import EngineError, Llama, Model, OptionError, hot_list, load, warm
from tinyserve_gguf._llama import NativeContext
from tinyserve_gguf.facts import read_facts
from tinyserve_gguf.hot_list import HotList, list_file, read_list, write_list

ModelFile = Callable[..., Path]
PROMPTS = (1, 40)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def opened(path: Path, *, cache: str = "50%", policy: str = "lfru", warm: bool = True, **options: object) -> Model:
    return load(path, expert_cache=cache, policy=policy, device="CPU", n_ctx=1024, n_threads=1, warm=warm, **options)  # type: ignore[arg-type]


def decode(model: Model, n: int = 20) -> str:
    return exact.run(model.native, 1, n, threads=1)


def line(model: Model) -> str:
    return next(text for text in model.lines() if text.startswith("warm start: "))


# ---- logits ---------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("miss", ["fetch", "cpu"])
@pytest.mark.parametrize(
    ("name", "policy"), [("gpt-oss", "lfru"), ("qwen3moe", "lru"), ("qwen3moe", "slru"), ("deepseek2", "lfu"), ("gemma4", "fifo")]
)
def test_logits_stay_those_of_llama_cpp(model_file: ModelFile, name: str, policy: str, miss: str) -> None:
    path = model_file(name)
    reference = exact.stock(path, 16, PROMPTS)
    for run in range(2):
        with opened(path, cache="30%", policy=policy, miss=miss) as model:
            assert ("slots filled" in line(model)) == (run == 1)
            assert exact.paged(model, 16, PROMPTS) == reference
            model.check_integrity()


# ---- what a run leaves, and what the next one does with it ------------------------------------------------------------------------------------


def test_the_next_run_begins_with_full_slots(model_file: ModelFile) -> None:
    path = model_file("qwen3moe")
    with opened(path) as model:
        assert line(model).endswith("nothing is known of this model yet; this run is kept for the next one")
        decode(model)
        uses = model.warm.counted()
    with opened(path) as model:
        stats = model.stats().pager
        assert stats is not None
        assert stats.slots_used == stats.slots_total > 0
        assert (stats.decode.lookups, stats.decode.bytes_link, stats.decode.evictions) == (0, 0, 0)
        assert f"warm start: {stats.slots_total} of {stats.slots_total} slots filled" in line(model)
        states = model.experts.states()
        inside = {(layer, expert) for layer, found in states.items() for expert, state in enumerate(found) if state.slot >= 0}
        assert inside == set(uses.ranked()[: stats.slots_total])


def test_what_decode_wanted_is_there(model_file: ModelFile) -> None:
    """The first tokens, in a pool with room for what they want: all of them hits, where a cold pool has none."""
    path = model_file("qwen3moe")
    hits = []
    for _ in range(2):
        with opened(path, cache="75%") as model:
            decode(model, 8)
            stats = model.stats().pager
            assert stats is not None
            hits.append(stats.decode.hits / stats.decode.lookups)
    assert hits[1] > hits[0] + 0.1


def test_prefill_is_not_counted(model_file: ModelFile) -> None:
    path = model_file("qwen3moe")
    with opened(path) as model:
        with closing(NativeContext(model.native, exact.options(640))) as context:
            context.decode([random.Random(1).randrange(5, model.native.n_vocab - 5) for _ in range(40)], 0, want_logits=True)
        found = model.warm.counted()
        assert found.graphs == 0
        assert not any(n for uses in found.uses.values() for n in uses)
        stats = model.stats().pager
        assert stats is not None
        assert stats.prefill.lookups > 0
    assert read_list(read_facts(path)) == (None, None)  # and so there is nothing to keep


def test_counts_add_up(model_file: ModelFile) -> None:
    """Over a reset of the counters, over sessions, and over runs."""
    path = model_file("qwen3moe")
    facts = read_facts(path)
    with opened(path) as model:
        decode(model, 10)
        model.reset_stats()
        decode(model, 10)
        found = model.warm.counted()
        assert found.graphs == 22  # a prompt of one token is decoded too
        for layer in facts.expert_layers:
            assert sum(found.uses[layer.block, layer.family]) == 22 * layer.n_used
        assert max(n for uses in found.uses.values() for n in uses) <= 22
    kept, _ = read_list(facts)
    assert kept is not None
    assert kept.graphs == 22
    with opened(path) as model:
        decode(model, 9)
    kept, _ = read_list(facts)
    assert kept is not None
    assert kept.graphs == pytest.approx(10 + 22 * 0.5 ** (10 / hot_list.HALF_LIFE), abs=0.01)


@pytest.mark.parametrize("options", [{"warm": False}, {"cache": "all"}])
def test_when_nothing_is_kept(model_file: ModelFile, cache: Path, options: dict[str, object]) -> None:
    """Not asked for; and where all experts have a slot nobody looks them up."""
    with opened(model_file("qwen3moe"), **options) as model:  # type: ignore[arg-type]
        decode(model)
        assert [text for text in model.lines() if "warm" in text] == (
            ["warm start: not needed, every expert has a slot"] if "cache" in options else []
        )
    assert not cache.exists()


# ---- lists that cannot be used --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("", "is not used"),
        ("{", "is not used"),
        ("[]", "does not hold an object"),
        ({"version": 2}, "of version 2, not 1"),
        ({"layers": []}, "of a model with other experts"),
        ({"layers": [{"block": 0, "family": "exps", "uses": [1, 2]}]}, "of a model with other experts"),
        ({"layers": 3}, "is not used"),
        ({"graphs": None}, "is not used"),
        ({"graphs": float("nan")}, "no count"),
        ({"graphs": -1}, "no count"),
        (b"\xff\xfe", "is not used"),
    ],
)
def test_a_list_that_is_stale_or_damaged_is_one_line(model_file: ModelFile, damage: str | bytes | dict[str, object], reason: str) -> None:
    path = model_file("qwen3moe")
    file = list_file(read_facts(path)).path
    write_list(read_facts(path), HotList(10.0, {layer: (1.0,) * n for layer, n in hot_list.shape(read_facts(path)).items()}))
    good = json.loads(file.read_text())
    content = json.dumps({**good, **damage}) if isinstance(damage, dict) else damage
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with opened(path) as model:
        assert line(model).startswith(f"warm start: {file} is not used: ")
        assert reason in line(model)
        assert line(model).count("\n") == 0
        decode(model)
    assert read_list(read_facts(path))[0] is not None  # a good one has taken its place


def test_another_model_of_that_name_has_its_own(model_file: ModelFile, tmp_path: Path) -> None:
    first, second = tmp_path / "a" / "m.gguf", tmp_path / "b" / "m.gguf"
    for path, name in ((first, "qwen3moe"), (second, "gpt-oss")):
        path.parent.mkdir()
        path.write_bytes(model_file(name).read_bytes())
    assert list_file(read_facts(first)).path != list_file(read_facts(second)).path
    moved = tmp_path / "m.gguf"
    moved.symlink_to(first)
    assert list_file(read_facts(moved)).path == list_file(read_facts(first)).path


def test_a_cache_that_cannot_be_written_is_a_warning(model_file: ModelFile, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.write_text("not a folder")
    with caplog.at_level(logging.WARNING), opened(model_file("qwen3moe")) as model:
        decode(model)
    (record,) = [record for record in caplog.records if record.name == "tinyserve_gguf.warm"]
    assert record.getMessage().startswith("warm start: the hot list cannot be kept: ")


# ---- filling --------------------------------------------------------------------------------------------------------------------------------


def kept(path: Path) -> None:
    with opened(path) as model:
        decode(model)


def test_filling_ends_in_time(model_file: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model_file("qwen3moe")
    kept(path)
    monkeypatch.setattr(warm, "MAX_SECONDS", 0.0)
    with opened(path) as model:
        assert line(model).startswith("warm start: 1 of ")
        assert line(model).endswith("; stopped after 0 s")


def test_filling_is_progress_and_can_be_stopped(model_file: ModelFile) -> None:
    path = model_file("qwen3moe")
    kept(path)
    heard: list[float] = []

    def progress(fraction: float) -> bool:
        heard.append(fraction)
        return True

    with opened(path, progress=progress):
        assert heard == sorted(heard)
        assert heard[-1] == pytest.approx(1.0)
        assert sum(0.9 < fraction <= 1 for fraction in heard) > 3
    with pytest.raises(EngineError, match="loading was stopped"):
        opened(path, progress=lambda fraction: fraction < 0.95)


def test_a_dense_model_has_none(model_file: ModelFile, tmp_path: Path) -> None:
    from reshaped import dense

    with opened(dense(model_file("mixtral"), tmp_path / "dense.gguf"), cache="auto") as model:
        assert not [text for text in model.lines() if "warm" in text]
        with pytest.raises(OptionError, match="it has no experts"):
            _ = model.warm


def test_lists_age() -> None:
    old = HotList(100.0, {(0, "exps"): (100.0, 0.0, 40.0)})
    new = HotList(float(hot_list.HALF_LIFE), {(0, "exps"): (0.0, 50.0, 0.0)})
    both = old.followed_by(new)
    assert both == HotList(hot_list.HALF_LIFE + 50.0, {(0, "exps"): (50.0, 50.0, 20.0)})
    assert both.ranked() == [((0, "exps"), 0), ((0, "exps"), 1), ((0, "exps"), 2)]
    assert both.since(HotList(50.0, {(0, "exps"): (50.0, 0.0, 20.0)})) == new


def test_llama_keeps_a_list_too(model_file: ModelFile) -> None:
    path = model_file("qwen3moe")
    for run in range(2):
        llama = Llama(str(path), expert_cache="50%", device="CPU", warm=True, n_ctx=256, n_threads=1, verbose=False)
        try:
            (text,) = [text for text in llama.lines() if text.startswith("warm start: ")]
            assert ("slots filled" in text) == (run == 1)
            llama.create_completion("a b c", max_tokens=8, temperature=0)
        finally:
            llama.close()
    assert list_file(read_facts(path)).path.exists()
