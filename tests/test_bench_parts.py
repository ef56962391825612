"""The parts of the benchmark: bounds, splits, which tokens are read where, needles. No test looks at how long anything took."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tinyserve_gguf import OptionError, load, placement, read_facts
from tinyserve_gguf._llama import ContextOptions, NativeContext
from tinyserve_gguf._shim import Counts, Device
from tinyserve_gguf.bench_baseline import cpu_pattern, open_stock
from tinyserve_gguf.bench_measure import Case, Measured, Subject, TokenSource, measure, percentile, total
from tinyserve_gguf.bench_needle import Needle, filler, hide, look
from tinyserve_gguf.bench_options import BenchOptions
from tinyserve_gguf.bench_table import Report, Row, as_markdown, bounds, guard_lines, measured_row, table, with_bounds
from tinyserve_gguf.miss_guard import all_on_cpu, resident_bytes, tightest_split
from tinyserve_gguf.sequence import TokenSequence
from tinyserve_gguf.window import WindowCounts

ModelFile = Callable[..., Path]


# ---- bounds ---------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("full", "megabytes", "serial", "overlapped"),
    [
        (100, 0, 100, 100),
        (100, 50, 66.667, 100),  # 10 ms and 5 ms
        (100, 100, 50, 100),
        (100, 300, 25, 33.333),  # 10 ms and 30 ms: the copy is the longer one
        (309, 97.3, 77.12, 102.77),
    ],
)
def test_bounds(full: float, megabytes: float, serial: float, overlapped: float) -> None:
    """At 10 GB/s 100 MB take 10 ms."""
    found = bounds(full, megabytes * 1e6, 10e9)
    assert found.serial == pytest.approx(serial, rel=1e-3)
    assert found.overlapped == pytest.approx(overlapped, rel=1e-3)


def paged(rate: float, mb: float, test: str = "tg64", **more: Any) -> Row:
    return Row(run=f"cache at {rate}", runner="tinyserve-gguf", test=test, rate=rate, mb_per_token=mb, **({"link_gbps": 10.0} | more))


def stock(rate: float, test: str = "tg64", **more: Any) -> Row:
    return Row(run="stock", runner="llama.cpp", test=test, rate=rate, **({"all_resident": True} | more))


def test_bounds_say_nothing_of_rows_that_the_cpu_computed() -> None:
    assert with_bounds([paged(40, 100, cpu_rows_per_token=3.5), stock(100)])[0].serial_bound is None
    assert with_bounds([paged(40, 100, cpu_rows_per_token=0), stock(100)])[0].serial_bound is not None


def test_the_guard_compares_with_the_best_split_of_no_more_memory() -> None:
    def split(rate: float, n_cpu_moe: int, expert_bytes: int, test: str = "tg64") -> Row:
        return stock(rate, test, all_resident=False, n_cpu_moe=n_cpu_moe, expert_bytes=expert_bytes)

    rivals = [stock(500, n_cpu_moe=0, expert_bytes=0), split(30, 48, 0), split(40, 30, 100), split(90, 10, 121), split(99, 30, 100, "pp512")]
    rows = [paged(60, 1, expert_bytes=100, stage_bytes=20), paged(32, 1, expert_bytes=120), paged(20, 1, "pp512"), paged(9, 0, all_resident=True)]
    faster, slower = guard_lines([*rows, *rivals])
    assert faster == "cache at 60, tg64: 1.50 times the 40.0 tok/s of stock, llama.cpp's best with no more memory for experts"
    assert slower.startswith("cache at 32, tg64: 0.80 times the 40.0 tok/s")
    assert slower.endswith(": use that, a larger --expert-cache, or --miss auto")
    assert guard_lines(rows) == []


def test_rows_are_judged_by_llama_cpp_of_the_same_test() -> None:
    rows = [paged(98, 0, all_resident=True), paged(40, 100), paged(40, 100, "pp512"), stock(100), stock(50, all_resident=False), stock(1000, "pp512")]
    resident, half, prefill, *rest = with_bounds(rows)
    assert (resident.bound_from, resident.serial_bound, resident.of_serial) == ("stock", 100, 0.98)
    assert (half.serial_bound, half.of_serial, half.overlapped_bound, half.of_overlapped) == pytest.approx((50, 0.8, 100, 0.4))
    assert (prefill.serial_bound, prefill.overlapped_bound) == pytest.approx((1 / 0.011, 100))
    assert rest == rows[3:]


def test_rows_are_judged_by_a_full_cache_else_and_by_nothing_else() -> None:
    rows = [paged(40, 100), paged(100, 0, all_resident=True)]
    half, resident = with_bounds(rows)
    assert (half.bound_from, half.serial_bound) == ("cache at 100", pytest.approx(50))
    assert resident == rows[1]
    for alone in (
        [paged(40, 100)],
        [paged(40, 100), paged(9, 0, "tg32", all_resident=True)],
        [paged(40, 100), replace(paged(100, 0, all_resident=True), found=True)],
        [paged(40, 100, link_gbps=None), stock(100)],
        [paged(40, 100), replace(stock(100), rate=None, error="does not fit")],
    ):
        assert with_bounds(alone) == alone


def test_a_throttled_link_is_the_one_that_counts() -> None:
    slow = with_bounds([paged(20, 100, link_gbps=2.5, link_throttled=True), stock(100)])[0]
    assert slow.serial_bound == pytest.approx(20)  # 10 ms and 40 ms


# ---- llama.cpp's splits ---------------------------------------------------------------------------------------------------------------------


def layers(*sizes: tuple[int, int]) -> Any:
    return SimpleNamespace(expert_layers=[SimpleNamespace(block=block, n_bytes=n) for block, n in sizes])


@pytest.mark.parametrize(("budget", "k"), [(1000, 0), (100, 0), (99, 2), (90, 2), (89, 3), (60, 3), (59, 4), (29, 5), (1, 5), (0, 5)])
def test_tightest_split(budget: int, k: int) -> None:
    """Blocks 1 to 4; block 0 is dense, so --n-cpu-moe 1 moves nothing."""
    facts = layers((1, 10), (2, 30), (3, 30), (4, 30))
    assert all_on_cpu(facts) == 5
    assert tightest_split(facts, budget) == k
    assert resident_bytes(facts, k) <= budget
    if k:
        assert resident_bytes(facts, k - 1) > budget


def test_split_of_a_dense_model() -> None:
    assert (all_on_cpu(layers()), tightest_split(layers(), 0), cpu_pattern(layers(), 0)) == (0, 0, "")


def test_cpu_pattern() -> None:
    facts = layers(*((block, 1) for block in range(12)))
    blocks = lambda k, name: [b for b in range(12) if re.search(cpu_pattern(facts, k), f"blk.{b}.{name}")]  # noqa: E731
    for name in ("ffn_gate_exps.weight", "ffn_up_exps.bias", "ffn_down_exps.weight", "ffn_gate_up_exps.weight", "ffn_up_chexps.weight"):
        assert blocks(1, name) == [0]
        assert blocks(11, name) == list(range(11))
        assert blocks(12, name) == list(range(12))
    for name in ("ffn_gate_inp.weight", "ffn_up_shexp.weight", "ffn_up.weight", "attn_q.weight"):
        assert blocks(11, name) == blocks(12, name) == []
    assert cpu_pattern(facts, 0) == ""


@pytest.mark.parametrize("k", [0, 1, 3])
def test_split_computes_the_same(model_file: ModelFile, k: int) -> None:
    facts = read_facts(model_file("gpt-oss"))
    gpu = replace(placement.pick_device("CPU"), is_cpu=False)

    def logits(device: Device) -> bytes:
        native = open_stock(facts, device, k, lambda _fraction: True)
        context = NativeContext(native, ContextOptions(n_ctx=64, n_batch=32, n_ubatch=32, n_threads=1))
        context.decode([5, 6, 7], 0, want_logits=True)
        found = context.logits().tobytes()
        context.close()
        native.close()
        return found

    assert logits(gpu) == logits(replace(gpu, is_cpu=True))


# ---- measuring ------------------------------------------------------------------------------------------------------------------------------


class Recorder:
    """A context that keeps what was done with it, and counts what it read as bytes over the link."""

    n_batch = 4
    n_ctx = 1000

    def __init__(self, *, can_go_back: bool = True) -> None:
        self.can_go_back = can_go_back
        self.calls: list[Any] = []  # (first position, tokens), "clear", ("keep", n)
        self.tokens: list[int] = []
        self.held = 0

    def decode(self, tokens: list[int], position: int, **_options: bool) -> None:
        assert position == self.held
        assert len(tokens) <= self.n_batch
        self.calls.append((position, len(tokens)))
        self.tokens += tokens
        self.held += len(tokens)

    def keep(self, n: int) -> bool:
        assert n <= self.held
        self.calls.append(("keep", n))
        self.held = n if self.can_go_back else self.held
        return self.can_go_back

    def clear(self) -> None:
        self.calls.append("clear")
        self.held = 0

    def synchronize(self) -> None:
        pass

    def logits(self) -> Any:
        return SimpleNamespace(argmax=lambda: 0)

    def snapshot(self) -> Any:
        n = len(self.tokens)
        notes = SimpleNamespace(host_ns=n * 1000, wait_cpu_ns=0, wait_device_ns=0)
        return SimpleNamespace(prefill=Counts(bytes_link=10 * n), decode=Counts(graphs=n), notes=notes)


def measured(context: Any, case: Case, repeat: int = 2, warmup: int = 0) -> Measured:
    return measure(Subject(TokenSequence(context, None, WindowCounts()), TokenSource(1000, 0), context.snapshot, lambda: None), case, repeat, warmup)


def test_prefill_goes_back_to_its_depth() -> None:
    context = Recorder()
    found = measured(context, Case("pp", 6, 5))
    test = [(5, 4), (9, 2)]
    assert context.calls == ["clear", (0, 4), (4, 1), *test, ("keep", 5), *test, ("keep", 5), *test]
    assert context.tokens == list(islice(TokenSource(1000, 0).stream(), 5 + 3 * 6))
    assert (len(found.repeats), len(found.first), found.steps) == (2, 2, ())
    assert found.counts == Counts(bytes_link=120, graphs=12)  # two repeats, without depth and warm-up


def test_prefill_reads_anew_where_the_memory_cannot_go_back() -> None:
    context = Recorder(can_go_back=False)
    found = measured(context, Case("pp", 2, 3))
    again = ["clear", (0, 3), (3, 2)]
    assert context.calls == [*again, ("keep", 3), "clear", *again, ("keep", 3), "clear", *again]
    assert found.counts == Counts(bytes_link=40, graphs=4)


@pytest.mark.parametrize(("depth", "warmup", "start"), [(0, 0, 0), (0, 3, 3), (2, 3, 3), (7, 3, 7), (6, 0, 6)])
def test_decode_starts_at_its_depth_when_warm(depth: int, warmup: int, start: int) -> None:
    context = Recorder()
    found = measured(context, Case("tg", 4, depth), warmup=warmup)
    prompt = [(at, min(4, start - warmup - at)) for at in range(0, start - warmup, 4)]
    assert context.calls == ["clear", *prompt, *((at, 1) for at in range(start - warmup, start + 8))]
    assert context.held == Case("tg", 4, depth).n_ctx(2, warmup)
    assert (len(found.repeats), len(found.steps), found.first) == (2, 8, ())
    assert sum(found.repeats) == pytest.approx(sum(found.steps))
    assert found.counts == Counts(bytes_link=80, graphs=8)
    assert found.host_seconds == pytest.approx(8e-6)


def test_measured_row() -> None:
    case = Case("tg", 10, 7)
    counts = Counts(lookups=8, hits=6, misses=2, bytes_link=40_000_000)
    base = Row(run="r", runner="tinyserve-gguf")
    row = measured_row(base, Measured(case, (1.0, 0.5), (), (0.1,) * 18 + (0.2, 0.3), counts, 1e-3))
    assert (row.test, row.n_tokens, row.depth, row.repeats) == ("tg10 @ d7", 10, 7, 2)
    assert (row.rate, row.rate_stdev) == pytest.approx((15, 50**0.5))  # of 10 and 20 tokens per second
    assert (row.p50_ms, row.p99_ms, row.hit_rate, row.mb_per_token, row.host_us_per_token) == pytest.approx((100, 300, 0.75, 2, 50))
    assert row.ttft_ms is None
    row = measured_row(base, Measured(Case("pp", 10, 0), (1.0,), (1.25,), (), None))
    assert (row.test, row.rate, row.ttft_ms, row.depth) == ("pp10", 10, 1250, 0)
    assert {row.rate_stdev, row.p50_ms, row.p99_ms, row.hit_rate, row.mb_per_token, row.host_us_per_token} == {None}


def test_percentile() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert [percentile(values, share) for share in (0.5, 0.99, 1.0, 0.0)] == [50, 99, 100, 1]
    assert percentile([7.0], 0.99) == 7


def test_total() -> None:
    assert total([Counts(lookups=1, hits=2), Counts(lookups=10)]) == Counts(lookups=11, hits=2)
    assert total([Counts(), None]) is None
    assert total([]) is None


def test_tokens() -> None:
    source = TokenSource(50, 3)
    tokens = list(islice(source.stream(), 500))
    assert tokens == list(islice(source.stream(), 500)) != list(islice(TokenSource(50, 4).stream(), 500))
    assert set(tokens) == set(range(50))
    assert list(islice(TokenSource(50, 3, (7, 8, 9)).stream(), 7)) == [7, 8, 9, 7, 8, 9, 7]


# ---- printing ------------------------------------------------------------------------------------------------------------------------------


def test_needle_reply_cannot_drive_a_terminal() -> None:
    setup = {"device": "D", "device_description": "d", "link_gbps": None, "n_ubatch": 1, "n_threads": 1, "n_ctx": 1, "warmup": 0}
    row = Row(
        run="r", runner="tinyserve-gguf", test="needle9", found=True, reply="a\x1b[2J\n\nb", number="12345", needle_at=0.25, n_tokens=9, tokens="t"
    )
    text = as_markdown(Report({"name": "m", "architecture": "a", "file_bytes": 1}, setup, [row]))
    assert "needle, r: found (12345 at 25% of 9 tokens of t)\n  reply: a\N{REPLACEMENT CHARACTER}[2J b" in text


def test_table_escapes() -> None:
    assert table(("a", "b"), [("x|y", "1")])[2] == "| x\\|y | 1 |"


# ---- needle ---------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [None, "One word. " * 30, "nobreak" * 100])
def test_hidden_needle(model_file: ModelFile, text: str | None) -> None:
    with load(model_file("qwen3moe"), device="CPU") as loaded:
        needles = [hide(loaded, 700, text, seed) for seed in range(5)]
        for needle in needles:
            prompt = loaded.detokenize(needle.tokens)
            assert 680 < len(needle.tokens) <= 700
            assert prompt.count(f"The secret number is {needle.number}.") == prompt.count(needle.number) == 1
            before = prompt.index(needle.number)
            assert needle.at == pytest.approx(before / len(prompt), abs=0.35)
            assert re.fullmatch(r"[1-9]\d{4}", needle.number)
        assert len({needle.number for needle in needles}) == 5
        assert len({needle.at for needle in needles}) > 1
        with pytest.raises(OptionError, match="is too short: the question alone takes"):
            hide(loaded, 60, text, 0)


def test_filler_has_no_digits() -> None:
    text = filler(600, 1)
    assert not re.search(r"\d", text)
    assert text == filler(600, 1) != filler(600, 2)
    assert all(len(sentence.split()) >= 5 for sentence in text.split(". "))


@pytest.mark.parametrize(("pieces", "found"), [(("The number", " is 123", "45."), True), (("It is 12,345",), False), ((), False)])
def test_looking_for_it(pieces: tuple[str, ...], found: bool) -> None:
    ticks = []
    session = SimpleNamespace(generate=lambda *_: iter(pieces), close=lambda: ticks.append("closed"), last=object())
    stub: Any = SimpleNamespace(session=lambda: session, text=lambda tokens: tokens)
    answer = look(stub, Needle("12345", 0.5, [1, 2]), lambda: ticks.append("tick"))
    assert (answer.found, answer.reply) == (found, "".join(pieces))
    assert ticks == ["tick"] * len(pieces) + ["closed"]


def test_every_case_once() -> None:
    options = BenchOptions("m", prompts=(8, 16), replies=(4,), depths=(0, 32), repeat=3, warmup=10)
    assert [case.name for case in options.cases] == ["pp8", "pp16", "tg4", "pp8 @ d32", "pp16 @ d32", "tg4 @ d32"]
    assert options.n_ctx == 48
    assert replace(options, replies=(9,)).n_ctx == 32 + 27
    assert replace(options, needle=100).n_ctx == 356
    assert all(a != b for a, b in pairwise(options.cases))
