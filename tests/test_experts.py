"""Single experts: where their bytes lie, and what handles tell and do; counters that add up."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import exact
import gguf
import numpy as np
import pytest
from reshaped import dense
from synthetic import MODELS, TYPES, split, typed

from tinyserve_gguf import EngineError, Model, OptionError, Sampling, load
from tinyserve_gguf._shim import Counts, PagerStats
from tinyserve_gguf.experts import Expert

ModelFile = Callable[..., Path]


def opened(path: Path, cache: str = "25%", policy: str = "lfru") -> Model:
    return load(path, expert_cache=cache, policy=policy, device="CPU", n_ctx=1024, n_threads=1)


@pytest.fixture
def model(model_file: ModelFile) -> Iterator[Model]:
    """gpt-oss with 3 layers of 8 experts, top-2, and 6 slots."""
    with opened(model_file("gpt-oss")) as found:
        yield found


def run(model: Model, prompt: int = 40, decode: int = 20) -> str:
    return exact.run(model.native, prompt, decode, threads=1)


def counters(model: Model) -> PagerStats:
    pager = model.stats().pager
    assert pager is not None
    return pager


def every(model: Model) -> list[Expert]:
    layers = [(layer.block, layer.family, layer.n_expert) for layer in model.facts.expert_layers]
    return [model.experts[block, expert, family] for block, family, n in layers for expert in range(n)]


# ---- bytes ----------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["25%", "all"])
@pytest.mark.parametrize("name", MODELS)
def test_every_expert_byte_is_in_the_pool_and_nothing_else(model_file: ModelFile, name: str, cache: str, caplog: pytest.LogCaptureFixture) -> None:
    """By our own counters, and by the size of the buffer that llama.cpp says it filled."""
    with caplog.at_level(logging.INFO, "tinyserve_gguf.llama"), opened(model_file(name), cache) as model:
        facts, pager = model.facts, counters(model)
        weights = [part.weight for layer in facts.expert_layers for part in layer.parts]
        assert pager.host_tensors == len(weights)
        assert pager.host_bytes == sum(weight.n_bytes for weight in weights)
        found = [re.search(r"Experts model buffer size = +([\d.]+) MiB", line) for line in caplog.messages]
        assert [float(match[1]) for match in found if match] == [pytest.approx(pager.host_bytes / 2**20, abs=0.01)]
        assert pager.pool_bytes >= sum(pool.slot_bytes for pool in model.plan.pools)


@pytest.mark.parametrize("cache", ["25%", "all"])
@pytest.mark.parametrize("name", MODELS)
def test_raw_is_the_file_and_slots_hold_raw(model_file: ModelFile, name: str, cache: str) -> None:
    with opened(model_file(name), cache) as model:
        run(model)
        data = np.fromfile(model.facts.path, np.uint8)
        resident = 0
        for expert in every(model):
            for weight in expert.weights.values():
                facts = weight.facts.weight
                whole = data[facts.offset : facts.offset + facts.n_bytes].reshape(facts.ne(2), weight.shape[0], -1)
                assert np.array_equal(weight.raw, whole[expert.expert])
                assert not weight.raw.flags.writeable
                if expert.resident:
                    assert np.array_equal(weight.in_slot(), weight.raw)
                else:
                    with pytest.raises(EngineError, match="is in no slot"):
                        weight.in_slot()
            resident += expert.resident
        assert resident == counters(model).slots_used == model.plan.n_slots
        assert len(model.experts) == len(every(model))


def test_raw_of_a_split_file(model_file: ModelFile, tmp_path: Path) -> None:
    whole = tmp_path / "m.gguf"
    whole.write_bytes(model_file("mixed").read_bytes())
    with opened(split(whole, 3)[1]) as shards, opened(whole) as model:
        for one, other in zip(every(shards), every(model), strict=True):
            assert one.weights.keys() == other.weights.keys()
            assert all(np.array_equal(one.weights[role].raw, other.weights[role].raw) for role in one.weights)


@pytest.mark.parametrize("kind", [*(kind for kind in TYPES if kind != "Q1_0"), "IQ4_NL", "IQ4_XS"])
def test_dequantized(model_file: ModelFile, kind: str) -> None:
    path = model_file("qwen3moe", **typed(kind, layers=2))
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    with opened(path) as model:
        for role, weight in model.experts[1, 3].weights.items():
            tensor = tensors[f"blk.1.ffn_{role}_exps.weight"]
            values = weight.dequantize()
            assert weight.type == kind
            assert values.dtype == np.float32
            assert values.shape == weight.shape == tuple(int(n) for n in tensor.shape[1::-1])
            assert np.array_equal(values, gguf.quants.dequantize(tensor.data[3], tensor.tensor_type))
            assert 0.3 < values.std() * tensor.shape[0] ** 0.5 < 3  # numbers as they were made: N(0, 1/sqrt(ne0))


def test_type_without_a_dequantiser(model_file: ModelFile) -> None:
    with opened(model_file("qwen3moe", **typed("Q1_0", layers=2))) as model:
        weight = model.experts[0, 0].weights["up"]
        with pytest.raises(OptionError, match="the gguf package cannot dequantise Q1_0"):
            weight.dequantize()


def test_torch_shares_memory(model: Model) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: scripts/test --torch")
    weight = model.experts[1, 2].up
    assert weight is not None
    tensor = weight.torch()
    assert tensor.dtype == torch.uint8
    assert tuple(tensor.shape) == weight.raw.shape
    assert tensor.data_ptr() == weight.raw.__array_interface__["data"][0]
    assert np.array_equal(tensor.numpy(), weight.raw)


def test_roles(model_file: ModelFile) -> None:
    with opened(model_file("gpt-oss")) as model:
        expert = model.experts[0, 0]
        assert (expert.gate is None, expert.up is None, expert.down is None, expert.gate_up is None) == (False, False, False, True)
        assert expert.n_bytes == sum(weight.raw.nbytes for weight in expert.weights.values()) + 4 * (96 + 96 + 64)  # and its rows of biases
    with opened(model_file("deepseek2-fused")) as model:
        expert = model.experts[1, 0]
        assert (expert.gate is None, expert.up is None, expert.down is None, expert.gate_up is None) == (True, True, False, False)
    with opened(model_file("nemotron_h_moe")) as model:
        expert = model.experts[1, 0]
        assert (expert.gate is None, expert.up is None, expert.down is None, expert.gate_up is None) == (True, False, False, True)


def test_what_a_python_prompt_shows(model: Model) -> None:
    """Handles, facts and plans are looked at by hand: a line each, not every tensor of the model."""
    expert = model.experts[1, 2]
    n_bytes = f"<expert 2 of layer 1: {expert.n_bytes:,} bytes, "
    assert repr(expert) == n_bytes + "in host memory>"
    expert.pin()
    assert repr(expert) == n_bytes + f"pinned in slot {expert.slot}>"
    expert.unpin()
    assert repr(expert) == n_bytes + f"slot {expert.slot}>"
    assert repr(expert.down) == "<blk.1.ffn_down_exps.weight[2]: MXFP4 [64, 96]>"
    assert repr(model.experts) == "<24 experts in 3 layers>"
    assert repr(model) == f"<Model {model.facts.name!r}: 6 slots on CPU>"
    assert max(len(repr(model.facts)), len(repr(model.plan))) < 2000
    model.close()
    assert repr(expert) == n_bytes + "closed>"
    assert repr(model) == f"<Model {model.facts.name!r}>"


def test_wrong_numbers(model_file: ModelFile) -> None:
    with opened(model_file("deepseek2-mtp")) as model:
        assert model.experts.layers == [1, 2]
        for block in (0, 3, -1):  # dense, MTP, none
            with pytest.raises(KeyError, match=rf"layer {block} has no routed experts; layers that have: \[1, 2\]"):
                model.experts[block, 0]
        for expert in (8, -1):
            with pytest.raises(KeyError, match=f"layer 1 has experts 0 to 7, not {expert}"):
                model.experts[1, expert]
    with opened(model_file("grovemoe")) as model:
        assert len(model.experts) == 3 * (8 + 4)
        assert model.experts[0, 3, "chexps"].n_bytes < model.experts[0, 3].n_bytes
        with pytest.raises(KeyError, match="experts 0 to 3, not 4"):
            model.experts[0, 4, "chexps"]


def test_dense_has_no_experts(model_file: ModelFile, tmp_path: Path) -> None:
    with load(dense(model_file("mixtral"), tmp_path / "dense.gguf"), device="CPU") as model:
        assert not model.is_paged
        with pytest.raises(OptionError, match="is dense"):
            model.experts  # noqa: B018
        assert model.stats().as_dict() == {"device": "CPU", "paged": False, "window": None}
        assert "nothing is paged" in model.stats().lines()[0]
        model.set_policy("lru")
        model.reset_stats()
        model.check_integrity()
        session = model.session()
        assert len(list(session.generate([10, 20], 3, Sampling(temp=0)))) == 3
        assert session.last is not None
        assert (session.last.hit_rate, session.last.mb_per_token) == (None, 0)


# ---- residency by hand ----------------------------------------------------------------------------------------------------------------------


def test_prefetch_and_evict(model: Model) -> None:
    expert = model.experts[1, 5]
    assert (expert.resident, expert.slot, expert.hits, expert.misses, expert.pinned) == (False, None, 0, 0, False)
    before = counters(model)
    expert.prefetch()
    expert.prefetch()  # is there already
    after = counters(model)
    assert expert.resident
    assert expert.slot in range(6)
    assert after.slots_used == before.slots_used + 1
    assert after.decode.bytes_link - before.decode.bytes_link == expert.n_bytes
    assert (expert.hits, expert.misses) == (0, 0)  # nobody looked it up
    assert all((weight.in_slot() == weight.raw).all() for weight in expert.weights.values())
    expert.evict()
    expert.evict()
    assert expert.slot is None
    assert counters(model).slots_used == before.slots_used
    model.check_integrity()


def test_prefetch_saves_the_miss(model: Model) -> None:
    """What one token routed to in layer 0 is a hit there when it was prefetched."""
    exact.run(model.native, 1, 0, threads=1)
    used = [expert for expert in every(model) if expert.layer == 0 and expert.misses]
    assert len(used) == 2
    for expert in every(model):
        expert.evict()
    model.reset_stats()
    for expert in used:
        expert.prefetch()
    exact.run(model.native, 1, 0, threads=1)
    assert [(expert.hits, expert.misses) for expert in used] == [(1, 0)] * 2
    assert counters(model).decode.hits == 2
    assert counters(model).decode.misses == 4


def test_prefetch_goes_where_the_policy_says(model: Model) -> None:
    model.set_policy("fifo")
    experts = [model.experts[0, i] for i in range(7)]
    for expert in experts:
        expert.prefetch()
    assert [expert.resident for expert in experts] == [False] + [True] * 6
    assert experts[6].slot == 0
    model.check_integrity()


def test_pinned_experts_survive(model_file: ModelFile, model: Model) -> None:
    """Four of six slots pinned, two left for the rest of the model: the same logits, the same slots."""
    pinned = [model.experts[0, 1], model.experts[1, 7], model.experts[2, 0], model.experts[2, 3]]
    for expert in pinned:
        expert.pin()
        expert.pin()
    slots = [expert.slot for expert in pinned]
    assert None not in slots
    for prompt in (40, 519):
        assert exact.run(model.native, prompt) == exact.stock(model_file("gpt-oss"))[prompt]
    assert [expert.slot for expert in pinned] == slots
    for expert in pinned:
        assert expert.pinned
        assert expert.hits > 0
        assert expert.misses == 0
        assert all((weight.in_slot() == weight.raw).all() for weight in expert.weights.values())
    model.check_integrity()


def test_pins_leave_one_token_its_slots(model: Model) -> None:
    for i in range(4):
        model.experts[0, i].pin()
    with pytest.raises(EngineError, match="4 of 6 slots are pinned, and one token needs 2: unpin an expert first"):
        model.experts[0, 4].pin()
    assert not model.experts[0, 4].pinned
    model.experts[0, 0].unpin()
    model.experts[0, 0].unpin()  # is not pinned any more
    model.experts[0, 4].pin()
    with pytest.raises(EngineError, match="expert 4 of layer 0 is pinned: unpin it first"):
        model.experts[0, 4].evict()
    model.experts[0, 4].unpin()
    model.experts[0, 4].evict()
    model.check_integrity()


def test_unpinned_experts_leave(model: Model) -> None:
    expert = model.experts[0, 0]
    model.set_policy("lru")
    expert.pin()
    expert.unpin()
    for other in range(1, 7):
        model.experts[1, other].prefetch()
    assert not expert.resident


def test_everything_resident(model_file: ModelFile) -> None:
    with opened(model_file("gpt-oss"), "all") as model:
        assert counters(model).all_resident
        assert all(expert.resident for expert in every(model))
        assert len({expert.slot for expert in every(model)}) == 24
        expert = model.experts[0, 0]
        expert.prefetch()
        expert.pin()
        assert expert.pinned
        expert.unpin()
        with pytest.raises(EngineError, match="holds all its experts, none can leave"):
            expert.evict()
        run(model)
        pager = counters(model)
        assert pager.prefill.lookups == pager.prefill.hits == 40 * 3 * 2  # tokens, layers, top-2
        assert pager.decode.lookups == pager.decode.hits == 20 * 3 * 2
        assert (pager.prefill.bytes_link, pager.decode.bytes_link, pager.stage_bytes) == (0, 0, 0)
        model.check_integrity()


# ---- counters -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["lfru", "fifo"])
@pytest.mark.parametrize("name", ["gpt-oss", "mixed", "grovemoe"])
def test_counters_add_up(model_file: ModelFile, name: str, policy: str) -> None:
    with opened(model_file(name), "25%", policy) as model:
        for prompt in (1, 40, 519):
            run(model, prompt)
        pager, experts = counters(model), every(model)
        for phase in (pager.prefill, pager.decode):
            assert phase.hits + phase.misses == phase.lookups > 0
            assert phase.bytes_link > 0
        assert sum(expert.hits for expert in experts) == pager.prefill.hits + pager.decode.hits
        assert sum(expert.misses for expert in experts) == pager.prefill.misses + pager.decode.misses
        assert pager.prefill.graphs == 2  # 40, and 512 of 519
        assert pager.decode.graphs == 1 + 1 + 3 * 20  # the first token, the other 7 of 519, and the steps
        assert (pager.slots_used, pager.slots_total) == (sum(expert.resident for expert in experts), model.plan.n_slots)
        states = model.experts.states()
        assert [state for layer in model.facts.expert_layers for state in states[layer.block, layer.family]] == [e.state for e in experts]


def test_lookups_of_decode_are_the_routers_choices(model: Model) -> None:
    run(model, 1, 19)
    decode = counters(model).decode
    assert decode.lookups == 20 * 3 * 2  # tokens, layers, top-2
    assert decode.bytes_link == decode.misses * model.experts[0, 0].n_bytes  # what is missed moves, whole, once
    assert (decode.streamed, decode.bytes_device) == (0, 0)
    assert decode.evictions == decode.misses - 6  # all but those that found a free slot
    assert counters(model).prefill == Counts()


def test_reset_stats(model: Model) -> None:
    run(model)
    slots = [expert.slot for expert in every(model)]
    model.reset_stats()
    pager = counters(model)
    assert pager.prefill == pager.decode == Counts()
    assert all((expert.hits, expert.misses) == (0, 0) for expert in every(model))
    assert [expert.slot for expert in every(model)] == slots  # residency stays
    assert pager.slots_used == 6


def test_reply_counts_what_the_model_counts(model: Model) -> None:
    session = model.session()
    run(model)  # not part of the replies below
    for prompt in ([*range(20, 60)], [*range(20, 60), 7, 8, 9]):
        before = counters(model)
        assert len(list(session.generate(prompt, 10, Sampling(temp=0)))) == 10
        after, reply = counters(model), session.last
        assert reply is not None
        assert reply.prefill is not None
        assert reply.decode is not None
        for name, value in asdict(reply.prefill).items():
            total = sum(getattr(now, name) - getattr(then, name) for now, then in ((after.prefill, before.prefill), (after.decode, before.decode)))
            assert value + getattr(reply.decode, name) == total, name
        assert reply.decode.lookups == 9 * 3 * 2  # the first token came from prefill
        assert reply.mb_per_token == pytest.approx(reply.decode.misses * model.experts[0, 0].n_bytes / 1e6 / 9)
        assert reply.hit_rate == reply.decode.hits / reply.decode.lookups


def test_set_policy(model: Model) -> None:
    run(model)
    slots = [expert.slot for expert in every(model)]
    for policy in ("slru", "lru", "lfu", "fifo", "lfru"):
        model.set_policy(policy)
        assert [expert.slot for expert in every(model)] == slots
        assert model.stats().policy == policy
        assert f"policy {policy}" in model.stats().lines()[0]
        model.check_integrity()
    with pytest.raises(OptionError, match="one of lfru, lru, slru, lfu, fifo, not 'random'"):
        model.set_policy("random")
    assert model.policy == "lfru"


def test_policies_differ(model_file: ModelFile) -> None:
    """Or else one of them is not wired up."""
    misses = {}
    for policy in ("lfru", "lru", "slru", "lfu", "fifo"):
        with opened(model_file("qwen3moe"), "50%", policy) as model:
            run(model, 40, 64)
            misses[policy] = counters(model).decode.misses
    assert len(set(misses.values())) >= 4, misses
