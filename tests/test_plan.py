"""Planning: cache sizes to slots, budgets that do not fit, the batch of prefill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import geometries
import pytest
import synthetic

from tinyserve_gguf.errors import CapacityError, OptionError
from tinyserve_gguf.facts import ModelFacts, read_facts
from tinyserve_gguf.kv import KvOptions
from tinyserve_gguf.needs import Setting, compute_bytes, context_bytes, kv_bytes_per_token, weight_bytes
from tinyserve_gguf.plan import GIB, MIB, Budget, CacheSpec, DeviceFacts, Plan, size
from tinyserve_gguf.planner import LEAST_RESERVE, make_plan, pick_ubatch

GPU = DeviceFacts("CUDA0", 8 * GIB, is_cpu=False, ram=32 * GIB)
CPU = DeviceFacts("CPU", 8 * GIB, is_cpu=True)
QWEN3_30B = replace(geometries.QWEN3_30B, context_length=40960, other_bits=6.5625)  # without YaRN; Q6_K for what is no expert


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    return read_facts(synthetic.build("mixed", tmp_path_factory.mktemp("plan") / "mixed.gguf", layers=24))


def plan(facts: ModelFacts, cache: str, device: DeviceFacts = GPU) -> Plan:
    return make_plan(facts, CacheSpec.parse(cache), device, n_ctx=256)


def test_contexts_share_the_weights_and_nothing_else() -> None:
    facts, auto = QWEN3_30B.facts(), CacheSpec.parse("auto")
    one, four = (make_plan(facts, auto, GPU, n_ctx=8192, n_ubatch=512, n_contexts=n) for n in (1, 4))
    assert (four.needs.weights, four.needs.kv, four.needs.compute) == (one.needs.weights, 4 * one.needs.kv, 4 * one.needs.compute)
    assert four.n_slots < one.n_slots
    assert "KV cache (4 x -c 8192) + " in four.memory_line()
    with pytest.raises(CapacityError, match=r"KV cache \(16 x -c 8192\) .* what fits: --parallel [1-9]"):
        make_plan(facts, auto, GPU, n_ctx=8192, n_ubatch=512, n_contexts=16)


# ---- sizes ----------------------------------------------------------------------------------------------------------------------------------


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


def test_budgets_are_read() -> None:
    assert Budget.of(8, 0.5, 32) == Budget(8 * GIB, GIB // 2, 32 * GIB)
    assert Budget.of() == Budget()
    for wrong in ({"vram": 0.0}, {"vram": float("nan")}, {"ram": float("inf")}, {"reserve": -1.0}, {"reserve": 0.0}):
        with pytest.raises(OptionError, match=f"--{'vram-' if 'reserve' in wrong else ''}{next(iter(wrong))} is a number of GiB"):
            Budget.of(**wrong)


# ---- slots ----------------------------------------------------------------------------------------------------------------------------------


def test_every_group_gets_its_share_and_what_one_token_needs(facts: ModelFacts) -> None:
    assert len(facts.groups) > 1
    for cache, share in (("all", 1.0), ("50%", 0.5), ("1%", 0.01)):
        for pool in plan(facts, cache).pools:
            need = max(layer.n_used for layer in pool.group.layers)
            assert pool.n_slots == max(need, -(-round(share * 100) * pool.group.n_experts // 100))
            assert pool.is_resident == (share == 1)


def test_a_size_in_bytes_holds_slots_and_stages(facts: ModelFacts) -> None:
    everything = plan(facts, "all").device_bytes
    for budget in (everything * 9 // 10, everything * 7 // 10):
        made = make_plan(facts, CacheSpec("x", "bytes", budget), GPU, n_ctx=256)
        assert made.device_bytes <= budget < made.device_bytes + max(group.bytes_per_expert for group in facts.groups) * (len(facts.groups) + 1)
    assert all(pool.is_resident for pool in make_plan(facts, CacheSpec("x", "bytes", everything), GPU, n_ctx=256).pools)


def test_two_stages_on_a_gpu_one_on_the_cpu(facts: ModelFacts) -> None:
    on_gpu, on_cpu = plan(facts, "50%"), plan(facts, "50%", CPU)
    assert [pool.slot_bytes for pool in on_gpu.pools] == [pool.slot_bytes for pool in on_cpu.pools]
    assert [pool.stage_bytes for pool in on_gpu.pools] == [2 * pool.stage_bytes for pool in on_cpu.pools]
    assert sum(pool.stage_bytes for pool in plan(facts, "all").pools) == 0


def test_a_cpu_that_computes_misses_takes_one_more_slot(facts: ModelFacts) -> None:
    with_cpu = make_plan(facts, CacheSpec.parse("50%"), GPU, n_ctx=256, cpu_misses=True)
    assert with_cpu.device_bytes - plan(facts, "50%").device_bytes == sum(group.bytes_per_expert for group in facts.groups)
    everything = make_plan(facts, CacheSpec.parse("all"), GPU, n_ctx=256, cpu_misses=True)
    assert everything.device_bytes == plan(facts, "all").device_bytes


# ---- budgets --------------------------------------------------------------------------------------------------------------------------------


def test_auto_leaves_room_for_the_rest_and_a_reserve(facts: ModelFacts) -> None:
    rest = weight_bytes(facts) + context_bytes(facts, 256, 2048)
    tight = replace(GPU, free=512 * MIB + rest + plan(facts, "all").device_bytes)
    assert all(pool.is_resident for pool in make_plan(facts, CacheSpec.parse("auto"), tight, n_ctx=256, n_ubatch=2048).pools)
    made = make_plan(facts, CacheSpec.parse("auto"), replace(tight, free=tight.free - 1), n_ctx=256, n_ubatch=2048)
    assert not all(pool.is_resident for pool in made.pools)
    assert made.total_bytes + 512 * MIB <= tight.free
    assert "auto: " in made.lines()[1] and "in reserve" in made.lines()[1]


@pytest.mark.parametrize("vram", [3, 6, 8, 12, 16, 24])
def test_auto_never_takes_the_whole_card_and_hardly_less_than_it_may(vram: int) -> None:
    facts = QWEN3_30B.facts()
    made = make_plan(facts, CacheSpec.parse("auto"), replace(GPU, free=vram * GIB), n_ctx=4096)
    reserve = max(512 * MIB, vram * GIB // 20)
    assert made.total_bytes <= vram * GIB - reserve
    assert made.share == 1 or made.total_bytes > vram * GIB - reserve - 2 * facts.groups[0].bytes_per_expert - 48 * MIB
    assert sum(n for n in (made.needs.weights, made.needs.kv, made.needs.compute, made.device_bytes)) == made.total_bytes
    assert len(made.lines()) <= 5


def test_budgets_of_the_user_hold() -> None:
    facts, auto = QWEN3_30B.facts(), CacheSpec.parse("auto")
    small = make_plan(facts, auto, GPU, n_ctx=4096, budget=Budget.of(vram=6, reserve=1))
    assert 4.9 * GIB < small.total_bytes <= 5 * GIB
    assert small.device.free == 6 * GIB
    assert make_plan(facts, auto, GPU, n_ctx=4096, budget=Budget.of(vram=80)).device.free == GPU.free
    with pytest.raises(OptionError, match=r"--vram-reserve is 0\.0625 GiB or more"):
        make_plan(facts, auto, GPU, n_ctx=4096, budget=Budget.of(reserve=0.06))
    more = make_plan(facts, auto, GPU, n_ctx=4096, budget=Budget.of(reserve=0.25))
    assert more.n_slots > make_plan(facts, auto, GPU, n_ctx=4096).n_slots


def test_experts_beyond_the_lockable_memory_pass_through_a_ring() -> None:
    facts, quarter = QWEN3_30B.facts(), CacheSpec.parse("25%")
    weight = facts.expert_layers[0].parts[0].weight
    assert make_plan(facts, quarter, GPU, n_ctx=4096).host.rung == "mapped"
    for limited in (
        make_plan(facts, quarter, replace(GPU, ram=8 * GIB), n_ctx=4096),
        make_plan(facts, quarter, GPU, n_ctx=4096, budget=Budget.of(ram=8)),
    ):
        assert (limited.host.rung, limited.host.paged, limited.host.limit) == ("pageable", facts.expert_bytes, 8 * GIB)
        assert limited.host.ring == 8 * weight.n_bytes // weight.ne(2)
        assert limited.host_line() == "host pool: 15.19 GiB of the file, pageable, through 6.8 MiB of page-locked pieces: 8.00 GiB may be page-locked"
    assert make_plan(facts, CacheSpec.parse("all"), replace(GPU, free=40 * GIB, ram=8 * GIB), n_ctx=4096).host.rung == "none"


def test_kv_cache_comes_before_experts() -> None:
    facts, auto = QWEN3_30B.facts(), CacheSpec.parse("auto")
    short, long = (make_plan(facts, auto, GPU, n_ctx=n, n_ubatch=512) for n in (4096, 32768))
    quantised = make_plan(facts, auto, GPU, n_ctx=32768, n_ubatch=512, kv=KvOptions("q8_0", "q8_0"))
    assert long.needs.kv == 8 * short.needs.kv == 32768 * 48 * 2 * 512 * 2
    assert quantised.needs.kv == long.needs.kv * 34 // 64
    assert short.n_slots > quantised.n_slots > long.n_slots


# ---- refusals -------------------------------------------------------------------------------------------------------------------------------


def test_what_is_below_one_token_is_refused(facts: ModelFacts) -> None:
    with pytest.raises(CapacityError, match=r"an expert cache needs .* at least .* and --expert-cache 1KiB is room for 1\.0 KiB on CUDA0: give more"):
        plan(facts, "1KiB")
    with pytest.raises(OptionError, match=r"one token needs \d+ experts at once"):
        plan(facts, "1")


@pytest.mark.parametrize(("gib", "n_ctx"), [(4.0, 40960), (2.5, 8192), (2.2, 40960), (2.15, 2048)])
def test_what_does_not_fit_is_refused_with_the_arithmetic_and_what_fits(gib: float, n_ctx: int) -> None:
    """Every setting that the refusal names does fit, and so would not a context of 1,024 tokens more."""
    facts, device = QWEN3_30B.facts(), replace(GPU, free=int(gib * GIB))
    auto = CacheSpec.parse("auto")
    with pytest.raises(CapacityError) as caught:
        make_plan(facts, auto, device, n_ctx=n_ctx, n_ubatch=512)
    message = str(caught.value)
    head, _, ways = message.partition("; what fits: ")
    assert "\n" not in message and "does not fit on CUDA0" in head and f"{size(device.free)} are free" in head
    terms = [
        float(n) * {"MiB": 1 / 1024, "GiB": 1}[unit]
        for n, unit in (term.split()[:2] for term in head.partition(": ")[2].split(" = ")[0].split(" + "))
    ]
    total = float(head.rpartition(" = ")[2].split()[0])
    assert sum(terms) == pytest.approx(total, abs=0.02)
    assert total > gib
    assert ways
    for way in ways.split(", or "):
        words = way.split()
        options = dict(zip(words[::2], words[1::2], strict=True))
        kind = options.get("--kv-type", "f16")
        context, batch = int(options.get("-c", n_ctx)), int(options.get("-b", 512))
        make_plan(facts, auto, device, n_ctx=context, n_ubatch=batch, kv=KvOptions(kind, kind))
        if "-c" in options and context >= 1024 and context + 1024 < n_ctx:
            with pytest.raises(CapacityError):
                make_plan(facts, auto, device, n_ctx=context + 1024, n_ubatch=batch, kv=KvOptions(kind, kind))


def test_a_cache_that_does_not_fit_names_the_one_that_does() -> None:
    facts, device = QWEN3_30B.facts(), replace(GPU, free=6 * GIB)
    with pytest.raises(CapacityError, match=r"--expert-cache 60%.* what fits: --expert-cache (\d+)%") as caught:
        make_plan(facts, CacheSpec.parse("60%"), device, n_ctx=4096, n_ubatch=512)
    share = int(str(caught.value).partition("what fits: --expert-cache ")[2].partition("%")[0])
    make_plan(facts, CacheSpec.parse(f"{share}%"), device, n_ctx=4096, n_ubatch=512)
    with pytest.raises(CapacityError):
        make_plan(facts, CacheSpec.parse(f"{share + 2}%"), device, n_ctx=4096, n_ubatch=512)


def test_where_nothing_fits_it_says_so() -> None:
    with pytest.raises(CapacityError, match="no smaller setting fits either: free device memory, or take a smaller quantisation"):
        make_plan(QWEN3_30B.facts(), CacheSpec.parse("auto"), replace(GPU, free=GIB), n_ctx=4096)


def test_a_size_that_was_asked_for_leaves_less_free_than_auto() -> None:
    facts = QWEN3_30B.facts()
    all_of_it = make_plan(facts, CacheSpec.parse("all"), replace(GPU, free=64 * GIB), n_ctx=4096, n_ubatch=512).total_bytes
    make_plan(facts, CacheSpec.parse("all"), replace(GPU, free=all_of_it + LEAST_RESERVE), n_ctx=4096, n_ubatch=512)
    with pytest.raises(CapacityError, match=r"256\.0 MiB in reserve"):
        make_plan(facts, CacheSpec.parse("all"), replace(GPU, free=all_of_it + LEAST_RESERVE - 1), n_ctx=4096, n_ubatch=512)


# ---- the batch, and what is counted ---------------------------------------------------------------------------------------------------------


def test_prefill_batches_are_large_where_memory_allows(facts: ModelFacts) -> None:
    def compute(n: int) -> int:
        return compute_bytes(facts, Setting(4096, n))

    picked: Callable[[int], int] = lambda free: pick_ubatch(replace(GPU, free=free), compute)  # noqa: E731
    assert pick_ubatch(CPU, compute) == 512
    assert picked(16 * compute(4096)) == 4096
    assert picked(16 * compute(4096) - 1) == 2048
    assert picked(16 * compute(1024)) == 1024
    assert picked(16 * compute(1024) - 1) == 512
    assert picked(0) == 512
    assert plan(facts, "50%").n_ubatch == 4096
    assert make_plan(facts, CacheSpec.parse("50%"), GPU, n_ctx=256, n_ubatch=7).n_ubatch == 7
    assert "prefill in batches of 4096 tokens" in plan(facts, "50%").lines()[1]


def test_keys_and_values_are_counted_from_the_projections(facts: ModelFacts) -> None:
    rows = sum(t.ne(1) for t in facts.tensors if t.name.endswith(("attn_k.weight", "attn_v.weight")))
    assert kv_bytes_per_token(facts) == 2 * rows > 0
