"""Planning: cache sizes to slots, budgets that do not fit, the batch of prefill."""

from __future__ import annotations

from dataclasses import replace

import pytest
import synthetic

from tinyserve_gguf.errors import CapacityError, OptionError
from tinyserve_gguf.facts import ModelFacts, read_facts
from tinyserve_gguf.plan import GIB, MIB, CacheSpec, DeviceFacts, Plan, compute_bytes, context_bytes, kv_bytes_per_token, make_plan, pick_ubatch, size

GPU = DeviceFacts("CUDA0", 8 * GIB, is_cpu=False)
CPU = DeviceFacts("CPU", 8 * GIB, is_cpu=True)


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    return read_facts(synthetic.build("mixed", tmp_path_factory.mktemp("plan") / "mixed.gguf", layers=24))


def plan(facts: ModelFacts, cache: str, device: DeviceFacts = GPU) -> Plan:
    return make_plan(facts, CacheSpec.parse(cache), device, n_ctx=256)


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("all", "all", 0),
        ("AUTO", "auto", 0),
        ("96", "experts", 96),
        ("25%", "share", 0.25),
        ("0.5%", "share", 0.005),
        ("6GiB", "bytes", 6 * GIB),
        ("800 MB", "bytes", 800 * MIB),
        ("1.5g", "bytes", 1.5 * GIB),
    ],
)
def test_sizes_are_read(text: str, kind: str, value: float) -> None:
    spec = CacheSpec.parse(text)
    assert (spec.kind, spec.value) == (kind, value)


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (13_842_432, "13.2 MiB"),
        (MIB - 1, "1.0 MiB"),
        (13_368_080_000, "12.45 GiB"),
        (5 << 50, "5120.00 TiB"),
    ],
)
def test_sizes_are_written(n_bytes: int, text: str) -> None:
    assert size(n_bytes) == text


@pytest.mark.parametrize("text", ["", "0", "-1", "0%", "101%", "some", "6TiB", "0GiB", "%", "1e3", "25 %%"])
def test_sizes_that_mean_nothing(text: str) -> None:
    with pytest.raises(OptionError, match="the expert cache is all, auto, a number of experts"):
        CacheSpec.parse(text)


def test_every_group_gets_its_share_and_what_one_token_needs(facts: ModelFacts) -> None:
    assert len(facts.groups) > 1
    for cache, share in (("all", 1.0), ("50%", 0.5), ("1%", 0.01)):
        for pool in plan(facts, cache).pools:
            need = max(layer.n_used for layer in pool.group.layers)
            assert pool.n_slots == max(need, -(-round(share * 100) * pool.group.n_experts // 100))
            assert pool.is_resident == (share == 1)


def test_a_size_in_bytes_holds_slots_and_stages(facts: ModelFacts) -> None:
    everything = sum(group.n_experts * group.bytes_per_expert for group in facts.groups)
    for budget in (everything * 9 // 10, everything * 7 // 10):
        made = make_plan(facts, CacheSpec("x", "bytes", budget), GPU, n_ctx=256)
        assert made.device_bytes <= budget < made.device_bytes + max(group.bytes_per_expert for group in facts.groups) * (len(facts.groups) + 1)
    assert all(pool.is_resident for pool in make_plan(facts, CacheSpec("x", "bytes", everything), GPU, n_ctx=256).pools)


def test_two_stages_on_a_gpu_one_on_the_cpu(facts: ModelFacts) -> None:
    on_gpu, on_cpu = plan(facts, "50%"), plan(facts, "50%", CPU)
    assert [pool.slot_bytes for pool in on_gpu.pools] == [pool.slot_bytes for pool in on_cpu.pools]
    assert [pool.stage_bytes for pool in on_gpu.pools] == [2 * pool.stage_bytes for pool in on_cpu.pools]
    assert sum(pool.stage_bytes for pool in plan(facts, "all").pools) == 0


def test_what_does_not_fit_is_refused_with_the_arithmetic(facts: ModelFacts) -> None:
    with pytest.raises(CapacityError, match=r"an expert cache needs .* at least .* and there is room for .* on CUDA0"):
        plan(facts, "1KiB")
    with pytest.raises(CapacityError, match="there is room for 0 bytes"):
        plan(facts, "auto", replace(GPU, free=600 * MIB))
    with pytest.raises(OptionError, match=r"one token needs \d+ experts at once"):
        plan(facts, "1")


def test_auto_leaves_room_for_the_rest_and_a_reserve(facts: ModelFacts) -> None:
    rest = facts.device_bytes + context_bytes(facts, 256, 2048)
    everything = sum(group.n_experts * group.bytes_per_expert for group in facts.groups)
    tight = replace(GPU, free=512 * MIB + rest + everything)
    assert all(pool.is_resident for pool in make_plan(facts, CacheSpec.parse("auto"), tight, n_ctx=256, n_ubatch=2048).pools)
    made = make_plan(facts, CacheSpec.parse("auto"), replace(tight, free=tight.free - 1), n_ctx=256, n_ubatch=2048)
    assert not all(pool.is_resident for pool in made.pools)
    assert made.device_bytes + rest + 512 * MIB <= tight.free
    assert "auto: " in made.lines()[1] and "in reserve" in made.lines()[1]


def test_prefill_batches_are_large_where_memory_allows(facts: ModelFacts) -> None:
    assert pick_ubatch(facts, CPU) == 512
    assert pick_ubatch(facts, GPU) == 4096
    assert pick_ubatch(facts, replace(GPU, free=16 * compute_bytes(facts, 4096) - 1)) == 2048
    assert pick_ubatch(facts, replace(GPU, free=16 * compute_bytes(facts, 1024))) == 1024
    assert pick_ubatch(facts, replace(GPU, free=16 * compute_bytes(facts, 1024) - 1)) == 512
    assert pick_ubatch(facts, replace(GPU, free=0)) == 512
    assert plan(facts, "50%").n_ubatch == 4096
    assert make_plan(facts, CacheSpec.parse("50%"), GPU, n_ctx=256, n_ubatch=7).n_ubatch == 7
    assert "prefill in batches of 4096 tokens" in plan(facts, "50%").lines()[1]


def test_keys_and_values_are_counted_from_the_projections(facts: ModelFacts) -> None:
    rows = sum(t.ne(1) for t in facts.tensors if t.name.endswith(("attn_k.weight", "attn_v.weight")))
    assert kv_bytes_per_token(facts) == 2 * rows > 0
