"""The expert cache of an open model: looked at as a whole, and resized while replies run. Logits are compared with stock llama.cpp throughout."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import exact
import numpy as np
import pytest
from reshaped import dense

from tinyserve_gguf import CapacityError, EngineError, Llama, Model, OptionError, Sampling, devices, load
from tinyserve_gguf.choices import POLICIES
from tinyserve_gguf.needs import MIB
from tinyserve_gguf.plan import CacheSpec
from tinyserve_gguf.planner import replan

ModelFile = Callable[..., Path]

PROMPTS = (1, 40, 200)
STEPS = 12
SIZES = ("minimum", "25%", "50%", "80%", "all")


def opened(path: Path, cache: str = "25%", policy: str = "lfru", miss: str = "fetch") -> Model:
    return load(path, expert_cache=cache, policy=policy, device="CPU", n_ctx=512, n_threads=1, miss=miss, miss_remember=False)


def cache_size(model: Model, name: str) -> str:
    return str(sum(max(layer.n_used for layer in pool.group.layers) for pool in model.plan.pools)) if name == "minimum" else name


@pytest.fixture
def model(model_file: ModelFile) -> Iterator[Model]:
    """gpt-oss with 3 layers of 8 experts, top-2, and 12 slots."""
    with opened(model_file("gpt-oss"), "50%") as found:
        yield found


# ---- the map --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt-oss", "mixed", "grovemoe"])
def test_map_is_what_the_experts_say(model_file: ModelFile, name: str) -> None:
    with opened(model_file(name)) as model:
        before = model.expert_map()
        assert (before.tick, before.slots_resident, before.evictions, before.bytes_moved) == (0, 0, 0, 0)
        assert not any(layer.last_use.any() or layer.resident.any() for layer in before.layers)
        exact.run(model.native, 40, 20)
        found, states, stats = model.expert_map(), model.experts.states(), model.stats().pager
        assert stats is not None
        assert [(layer.block, layer.family) for layer in found.layers] == sorted(states)
        for layer in found.layers:
            expected = states[layer.block, layer.family]
            assert layer.resident.tolist() == [state.slot >= 0 for state in expected]
            for array, field in ((layer.hits, "hits"), (layer.misses, "misses"), (layer.last_use, "last_use")):
                assert array.tolist() == [getattr(state, field) for state in expected]
        assert (found.prefill, found.decode) == (stats.prefill, stats.decode)
        assert found.bytes_moved == stats.prefill.bytes_link + stats.decode.bytes_link > 0
        assert found.evictions == stats.prefill.evictions + stats.decode.evictions > 0
        assert (found.slots_total, found.slots_resident) == (model.plan.n_slots, sum(int(layer.resident.sum()) for layer in found.layers))
        assert found.tick == max(int(layer.last_use.max()) for layer in found.layers)
        plain = json.loads(json.dumps(found.as_dict()))
        assert plain["slots"] == {"total": found.slots_total, "resident": found.slots_resident}
        assert plain["layers"][0]["hits"] == found.layers[0].hits.tolist()
        assert set(plain["layers"][0]["resident"]) <= {0, 1}
        assert 0 < plain["hit_rate"]["decode"] < 1


def test_map_is_one_moment_while_another_thread_decodes(model: Model) -> None:
    """Every snapshot agrees with itself, and looking changes no logits."""
    expected = exact.stock(model.facts.path, STEPS, PROMPTS)
    found: list[dict[int, str]] = []
    thread = threading.Thread(target=lambda: found.extend(exact.paged(model, STEPS, PROMPTS) for _ in range(3)))
    thread.start()
    maps = []
    while thread.is_alive():
        maps.append(model.expert_map())
        time.sleep(0.005)
    thread.join()
    assert found == [expected] * 3
    assert len({snapshot.tick for snapshot in maps}) > 5
    for snapshot in maps:
        assert snapshot.slots_resident == sum(int(layer.resident.sum()) for layer in snapshot.layers) <= 12
        assert sum(int(layer.hits.sum()) for layer in snapshot.layers) == snapshot.prefill.hits + snapshot.decode.hits
        assert sum(int(layer.misses.sum()) for layer in snapshot.layers) == snapshot.prefill.misses + snapshot.decode.misses
    for one, other in itertools.pairwise(maps):
        assert one.tick <= other.tick
        assert one.bytes_moved <= other.bytes_moved


def test_map_of_a_dense_or_closed_model(model_file: ModelFile, tmp_path: Path, model: Model) -> None:
    with load(dense(model_file("mixtral"), tmp_path / "dense.gguf"), device="CPU") as plain:
        for call in (plain.expert_map, lambda: plain.resize("50%")):
            with pytest.raises(OptionError, match="is dense"):
                call()
    model.close()
    with pytest.raises(OptionError, match="closed"):
        model.expert_map()
    with pytest.raises(OptionError, match="closed"):
        model.resize("50%")


# ---- another size ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["gpt-oss", "mixed"])
def test_every_size_gives_the_same_logits(model_file: ModelFile, name: str, policy: str) -> None:
    expected = exact.stock(model_file(name), STEPS, PROMPTS)
    with opened(model_file(name), "50%", policy) as model:
        order = [*SIZES, *SIZES[::-1]]
        random.Random(policy).shuffle(order)
        for step in order:
            model.resize(cache_size(model, step))
            assert exact.paged(model, STEPS, PROMPTS) == expected, step
            assert model.expert_map().slots_total == model.plan.n_slots


def test_from_and_to_everything(model_file: ModelFile) -> None:
    """Also a model that was loaded with everything resident, whose experts were never looked up."""
    expected = exact.stock(model_file("gpt-oss"), STEPS, PROMPTS)
    with opened(model_file("gpt-oss"), "all") as model:
        assert "uncut" in model.engine
        assert exact.paged(model, STEPS, PROMPTS) == expected
        done = model.resize("25%")
        assert (done.slots_before, done.slots, done.kept, done.evicted, done.loaded, done.beside) == (24, 6, 6, 18, 0, True)
        assert "no CUDA device" in model.engine
        assert "reads them there" in model.host_pool
        assert [int(layer.resident.sum()) for layer in model.expert_map().layers] == [2, 2, 2]  # each layer a share
        assert exact.paged(model, STEPS, PROMPTS) == expected
        done = model.resize("all")
        assert (done.kept, done.evicted, done.loaded) == (6, 0, 18)
        assert done.bytes_link == 18 * model.experts[0, 0].n_bytes
        assert "18 came" in done.line()
        assert "every expert is resident" in model.miss
        found = model.expert_map()
        assert found.all_resident
        assert exact.paged(model, STEPS, PROMPTS) == expected
        assert model.expert_map().bytes_moved == found.bytes_moved


def test_survivors_are_warm(model: Model) -> None:
    """Who stays is who was resident; growing moves nothing; counters go on."""
    exact.run(model.native, 40, 40)
    before = model.expert_map()
    done = model.resize("8")
    after = model.expert_map()
    assert (done.kept, done.evicted, done.loaded, done.bytes_link) == (8, 4, 0, 0)
    assert done.line() == "expert cache: 8 of 24 experts instead of 12; 8 stayed, 4 left"
    assert "8 of 24 experts resident" in model.plan.lines()[1]
    for old, new in zip(before.layers, after.layers, strict=True):
        assert not (new.resident & ~old.resident).any()
        assert np.array_equal(new.hits, old.hits)
        assert np.array_equal(new.last_use, old.last_use)
    assert after.evictions == before.evictions + 4
    assert (after.bytes_moved, after.decode.lookups) == (before.bytes_moved, before.decode.lookups)
    model.resize("20")
    grown = model.expert_map()
    assert all(np.array_equal(new.resident, old.resident) for new, old in zip(grown.layers, after.layers, strict=True))
    resident = [model.experts[block, x] for block in range(3) for x in range(8) if model.experts[block, x].resident]
    assert len(resident) == 8
    assert all((weight.in_slot() == weight.raw).all() for expert in resident for weight in expert.weights.values())


def test_lru_keeps_the_most_recent(model: Model) -> None:
    model.set_policy("lru")
    exact.run(model.native, 1, 60)
    before = {(layer.block, x): int(layer.last_use[x]) for layer in model.expert_map().layers for x in range(8) if layer.resident[x]}
    model.resize("6")
    kept = {(layer.block, x) for layer in model.expert_map().layers for x in range(8) if layer.resident[x]}
    assert kept <= before.keys()
    assert min(before[key] for key in kept) >= max(before[key] for key in before.keys() - kept)


def test_pins_are_kept_or_the_size_refused(model: Model) -> None:
    pinned = [model.experts[2, x] for x in range(5)]
    for expert in pinned:
        expert.pin()
    with pytest.raises(EngineError, match="5 experts are pinned and one token needs 2 more: 6 slots are too few, give 7 or unpin experts"):
        model.resize("25%")
    assert model.plan.n_slots == model.expert_map().slots_total == 12
    model.resize("7")
    assert exact.paged(model, STEPS, PROMPTS) == exact.stock(model.facts.path, STEPS, PROMPTS)
    assert all(expert.pinned and expert.resident for expert in pinned)


def test_sizes_that_cannot_be(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    exact.run(model.native, 40, 5)
    before, plan = model.expert_map(), model.plan
    with pytest.raises(OptionError, match="the expert cache is all, auto, a number"):
        model.resize("many")
    with pytest.raises(OptionError, match="an expert cache of 1 is too small, give 2 or more"):
        model.resize("1")
    with pytest.raises(CapacityError, match=r"needs .* at least .* room for 10.0 KiB on CPU"):
        model.resize("10KiB")
    monkeypatch.setattr(devices._shim, "memory_free", lambda _device: 10_000)
    arithmetic = r"cache of all takes .* for 24 slots, .*; on CPU 9.8 KiB are free and the cache so far is .*: .* too few"
    with pytest.raises(CapacityError, match=arithmetic):
        model.resize("all")
    assert model.plan is plan
    after = model.expert_map()
    assert after.slots_total == 12
    assert all(np.array_equal(old.resident, new.resident) for old, new in zip(before.layers, after.layers, strict=True))
    model.resize("9")  # needs less than there is


def test_auto_takes_what_is_free(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    model.resize("auto")
    assert model.plan.n_slots == 24
    assert "auto:" in model.plan.lines()[1]
    monkeypatch.setattr(devices._shim, "memory_free", lambda _device: 100_000)
    with pytest.raises(CapacityError, match="there is room for 0 bytes"):
        model.resize("auto")
    assert model.plan.n_slots == 24


def test_auto_counts_what_comes_free(model: Model) -> None:
    """On a GPU: nothing but the reserve is left out, and the memory of the cache so far counts as free."""
    plan = model.plan
    plan = replace(plan, device=replace(plan.device, name="CUDA0", is_cpu=False))
    assert replan(plan, CacheSpec.parse("auto"), 512 * MIB).n_slots < plan.n_slots  # two stages there
    assert replan(plan, CacheSpec.parse("auto"), 600 * MIB).n_slots == 24
    with pytest.raises(CapacityError, match="at least"):
        replan(plan, CacheSpec.parse("auto"), 300 * MIB)


@pytest.mark.parametrize("miss", ["fetch", "cpu"])
def test_while_replies_run(model_file: ModelFile, miss: str) -> None:
    """Two sessions in threads of their own, the cache resized all the while: every reply is the one given alone."""
    path = model_file("gpt-oss")
    rng = random.Random(1)
    prompts = [[rng.randrange(5, 300) for _ in range(20 + 30 * i)] for i in range(4)]

    def replies(model: Model) -> list[list[int]]:
        session = model.session()
        return [list(session.generate(prompt, 40, Sampling(temp=0))) for prompt in prompts]

    with opened(path, "all") as model:
        alone = replies(model)
    with opened(path, "50%", miss=miss) as model:
        found: list[list[list[int]]] = []
        threads = [threading.Thread(target=lambda: found.extend(replies(model) for _ in range(2))) for _ in range(2)]
        for thread in threads:
            thread.start()
        sizes = set()
        while any(thread.is_alive() for thread in threads):
            sizes.add(model.resize(rng.choice(("4", "25%", "50%", "80%", "all"))).slots)
            model.set_policy(rng.choice(POLICIES))
            model.check_integrity()
            time.sleep(0.01)
        assert found == [alone] * 4
        assert len(sizes) == 5


def test_miss_auto_begins_again(model_file: ModelFile) -> None:
    """What is fastest depends on the size; where everything is resident there is nothing to find."""
    with opened(model_file("gpt-oss"), "all", miss="auto") as model:
        assert "every expert is resident" in model.miss
        model.resize("25%")
        assert "is tried while the first tokens are decoded" in model.miss
        assert len(list(model.session().generate([10, 20, 30], 20, Sampling(temp=0)))) == 20
        model.resize("all")
        assert "every expert is resident" in model.miss


def test_llama_and_its_other_contexts(model_file: ModelFile) -> None:
    """The drop-in class has both too; contexts over the same weights share one cache."""
    options = {"expert_cache": "25%", "device": "CPU", "n_ctx": 128, "n_threads": 1, "verbose": False}
    with closing(Llama(str(model_file("gpt-oss")), **options)) as one:
        alone = one.create_completion([10, 20, 30], max_tokens=8, temperature=0)["choices"][0]["text"]
        two = one.new_context()
        assert two.resize("50%").slots == 12
        assert one.expert_map().slots_total == two.expert_map().slots_total == 12
        assert two.create_completion([10, 20, 30], max_tokens=8, temperature=0)["choices"][0]["text"] == alone
        two.close()


def test_the_shim_checks_by_itself(model: Model) -> None:
    with pytest.raises(OptionError, match="a pool of 1 slots cannot hold the 2 experts"):
        model.experts.pager.resize([1])
