"""Guards against llama.cpp's own split: what it is taken to reach, when that is said, and whole layers as its placement."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from exact import THREADS, options, paged, run, stock

from tinyserve_gguf import Model, load, placement, read_facts
from tinyserve_gguf._llama import NativeContext
from tinyserve_gguf._shim import Device
from tinyserve_gguf.facts import ModelFacts
from tinyserve_gguf.miss import LAYERS
from tinyserve_gguf.miss_guard import (
    IN_A_ROW,
    WARM,
    WINDOW,
    BreakEven,
    Costs,
    Decoded,
    MeasuredSplit,
    Split,
    costs,
    resident_bytes,
    rival,
    rows_on_cpu,
    tightest_split,
)
from tinyserve_gguf.miss_memory import remember_splits
from tinyserve_gguf.miss_tuning import file_key

ModelFile = Callable[..., Path]


@pytest.fixture(scope="module")
def facts(model_file: ModelFile) -> ModelFacts:
    return read_facts(model_file("mixtral", layers=6))


# ---- what the split is taken to reach -------------------------------------------------------------------------------------------------------


def test_tokens_tell_what_the_device_and_the_cpu_need() -> None:
    fetch = costs("fetch", 0.030, Decoded(bytes_link=10 * 138_000_000), 10, 13.8e9)
    assert fetch == Costs(pytest.approx(0.020), None)
    cpu = costs("cpu", 0.015, Decoded(cpu_rows=200, cpu_ns=64_000_000, wait_cpu_ns=40_000_000), 10, 13.8e9)
    assert cpu == Costs(pytest.approx(0.011), pytest.approx(0.00032))
    assert fetch.best(cpu) == cpu.best(fetch) == Costs(cpu.device, cpu.row)
    assert costs("fetch", 0.030, Decoded(bytes_link=1 << 40), 10, 13.8e9) == Costs()  # no link is that fast: nothing is known


def test_the_split_of_the_same_memory_is_estimated_unless_it_was_measured(facts: ModelFacts) -> None:
    room = resident_bytes(facts, 4) + 1
    assert tightest_split(facts, room) == 4
    assert rows_on_cpu(facts, 4) == sum(layer.n_used for layer in facts.expert_layers[:4])
    found = Costs(0.010, 0.001)
    estimated = Split(4, 1 / (0.010 + 0.001 * rows_on_cpu(facts, 4)), "estimated")
    assert rival(facts, room, [], found) == estimated
    assert rival(facts, room, [], Costs(0.010, None)) is None
    exact, smaller, larger = (MeasuredSplit(k, rate, resident_bytes(facts, k), 8, 0) for k, rate in ((4, 30.0), (6, 1.0), (2, 99.0)))
    assert rival(facts, room, [exact, smaller, larger], found) == Split(4, 30.0, "measured")
    assert rival(facts, room, [smaller, larger], found) == estimated  # one needs more memory, the other is slower
    assert rival(facts, room, [replace(smaller, rate=98.0), larger], found) == Split(6, 98.0, "measured")


# ---- break-even -----------------------------------------------------------------------------------------------------------------------------


class Fetching:
    """A model that fetches, and takes `seconds` a token, of which 20 ms are copies."""

    def __init__(self, split: Split | None, bytes_token: int = 200_000_000, mode: str = "fetch") -> None:
        self.seen, self.bytes_token, self.mode = Decoded(), bytes_token, mode
        self.asked: list[Costs] = []
        self.guard = BreakEven(
            mode, advice="do better", counts=lambda: self.seen, link_rate=lambda: 10e9, split=lambda found: self.asked.append(found) or split
        )

    def decode(self, n: int, seconds: float = 0.025) -> list[str]:
        for _ in range(n):
            more = (60, 100, self.bytes_token, 0, 0, 0) if self.mode == "fetch" else (60, 100, 0, 40, 18_000_000, 15_000_000)
            self.seen = Decoded(*(a + b for a, b in zip(self.seen, more, strict=True)))
            self.guard.step(seconds)
        return self.guard.take_notes()


def test_paging_below_break_even_is_told_once_with_the_numbers() -> None:
    model = Fetching(Split(16, 51.0, "estimated"))
    assert model.decode(WARM + (IN_A_ROW - 1) * WINDOW) == []
    assert model.decode(WINDOW) == [
        "they cost 20.0 of 25.0 ms a token (200.0 MB over a link of 10.0 GB/s): below break-even, 40.0 tok/s against "
        "llama.cpp's --n-cpu-moe 16 (51.0 tok/s, estimated); do better"
    ]
    assert model.decode(1000) == []
    assert model.asked[0].device == pytest.approx(0.005)


def test_a_cpu_that_computes_misses_is_watched_too() -> None:
    model = Fetching(Split(16, 51.0, "measured"), mode="cpu")
    (note,) = model.decode(WARM + IN_A_ROW * WINDOW)
    assert note.startswith("they cost 15.0 of 25.0 ms a token: below break-even, 40.0 tok/s against llama.cpp's --n-cpu-moe 16")
    assert model.asked[0] == Costs(pytest.approx(0.010), pytest.approx(0.00045))


@pytest.mark.parametrize("split", [None, Split(16, 43.0, "estimated"), Split(16, 41.0, "measured")])
def test_above_break_even_nothing_is_told(split: Split | None) -> None:
    assert Fetching(split).decode(1000) == []


def test_where_misses_cost_little_nothing_is_measured() -> None:
    model = Fetching(Split(16, 51.0, "estimated"), bytes_token=5_000_000)
    assert (model.decode(1000), model.asked) == ([], [])


def test_one_slow_stretch_is_not_told() -> None:
    model = Fetching(Split(16, 51.0, "measured"))
    model.guard.step(1.0)
    for _ in range(3):
        assert model.decode(WINDOW, 0.025) == []
        model.bytes_token = 0  # everything hits for a while
        assert model.decode(WINDOW, 0.005) == []
        model.bytes_token = 200_000_000


# ---- a real model ---------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Device:
    """Makes the CPU pass for a GPU. What is remembered goes to `tmp_path`."""
    pretended = replace(placement.pick_device("CPU"), is_cpu=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(placement, "pick_device", lambda _name: pretended)
    return pretended


def open_model(path: Path, **options: object) -> Model:
    return load(path, expert_cache="40%", device="CPU", n_threads=THREADS, n_ctx=1024, **options)  # type: ignore[arg-type]


def decode(model: Model, n: int, seconds: Callable[[Model], float]) -> list[str]:
    """`n` tokens that are said to take so long; what the model has to say of it."""
    with closing(NativeContext(model.native, options(1024))) as context:
        for i in range(n):
            context.decode([5 + i % 50], i, want_logits=True)
            context.synchronize()
            model.decoded(seconds(model))
    return model.take_notes()


@pytest.mark.usefixtures("gpu")
def test_a_model_tells_that_it_is_below_break_even(model_file: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link so slow that half of every token is copies, a CPU as fast as it is."""
    path = model_file("mixtral", layers=6)
    with open_model(path) as model:
        decode(model, WARM, lambda _model: 1.0)
        pager = model.stats().pager
        assert pager is not None
        monkeypatch.setattr(Device, "link_rate", lambda *_args: pager.decode.bytes_link / WARM / 0.5)
    with open_model(path) as model:
        (note,) = decode(model, 200, lambda _model: 1.0)
        assert note.startswith("misses: they cost ")
        assert " ms a token (" in note and " (" in note and "estimated); --miss auto tries what is faster here" in note
    with open_model(path, engine="host", miss="layers") as model:
        assert decode(model, 200, lambda _model: 1.0) == []  # it is that split
    with open_model(path, miss="auto") as model:
        assert not [note for note in decode(model, 200, lambda _model: 1.0) if "below break-even" in note]
    assert 0 < open_seconds(path) < 1


def open_seconds(path: Path) -> float:
    with open_model(path) as model:
        return model._pager.cpu_seconds(THREADS)  # type: ignore[union-attr]


@pytest.mark.parametrize(("seconds", "kept"), [(0.5, True), (1.5, False)])
def test_auto_changes_the_placement_and_back(model_file: ModelFile, gpu: Device, seconds: float, kept: bool) -> None:
    """Below what bench --baseline measured of llama.cpp's split its placement is tried, and stays if it is faster. Bits are those of llama.cpp."""
    path = model_file("mixtral", layers=6)
    facts = read_facts(path)
    known = [MeasuredSplit(k, 1.8, resident_bytes(facts, k), THREADS, 0) for k in range(1, 7)]
    assert remember_splits(file_key(facts, gpu), known) is None

    def took(model: Model) -> float:
        way = model._pager.miss  # type: ignore[union-attr]
        return 1.0 if way.startswith("fetched") else seconds if "last" in way else 2.0

    def one_line(model: Model) -> str:
        (note,) = [note for note in decode(model, 240, took) if "--n-cpu-moe" in note and "is fastest here" not in note]
        return note

    with open_model(path, miss="auto") as model:
        note = one_line(model)
        assert ", measured) against 1.0 (fetch): " in note
        assert note.endswith("the placement is that split from now on, 2.0 tok/s here" if kept else "gave 0.7 tok/s here, so it is not kept")
        assert ("none in the last" in model.miss) == kept
        assert paged(model, 16, (1, 5, 40)) == stock(path, 16, (1, 5, 40))
    with open_model(path, miss="auto") as model:  # as remembered
        assert decode(model, 10, took) == []
        assert ("none in the last" in model.miss) == kept
        assert "as remembered" in model.miss
        assert run(model.native, 7, 16) == run_stock(path, 7)
    faster = [replace(split, rate=3.0) for split in known]
    assert remember_splits(file_key(facts, gpu), faster) is None
    with open_model(path, miss="auto") as model:  # measured anew since, and faster: everything is tried again
        assert "tried while the first tokens are decoded" in model.miss
        assert "(3.0 tok/s, measured)" in one_line(model)


def run_stock(path: Path, prompt: int) -> str:
    return stock(path, 16, (prompt,))[prompt]


# ---- whole layers ---------------------------------------------------------------------------------------------------------------------------


def test_whole_layers_take_what_slots_and_stages_hold(model_file: ModelFile) -> None:
    path = model_file("mixtral", layers=6)
    facts = read_facts(path)
    n_expert = facts.n_expert
    for slots, layers in ((n_expert - 1, 1), (2 * n_expert, 3), (2 * n_expert + 3, 3), (4 * n_expert, 5)):  # a stage holds one
        with load(path, expert_cache=str(slots), device="CPU", n_threads=THREADS, miss="layers", miss_threads=THREADS) as model:
            assert model.miss.startswith(
                f"none in the last {layers} of 6 layers, whose experts stay on the device; in the others computed by the CPU"
            )
            assert paged(model, 8, (1, 7, 40)) == stock(path, 8, (1, 7, 40))
            model.reset_stats()
            run(model.native, 1, 8)
            pager = model.stats().pager
            assert pager is not None
            if slots % n_expert == 0:  # no slot is left over: every expert of the other layers is computed by the CPU, and none enters
                assert pager.decode.cpu_rows == 9 * rows_on_cpu(facts, 6 - layers)
                assert pager.decode.admitted == 0
            else:
                assert pager.decode.cpu_rows <= 9 * rows_on_cpu(facts, 6 - layers)


def test_experts_by_hand_beside_whole_layers(model_file: ModelFile) -> None:
    """Pinned ones keep their slots, and what lay in the others comes back when the way changes."""
    path = model_file("mixtral", layers=6)
    n_expert = read_facts(path).n_expert
    with load(path, expert_cache=str(3 * n_expert), device="CPU", n_threads=THREADS, miss="cpu", miss_threads=THREADS) as model:
        expected = run(model.native, 7, 16)
        model.experts[0, 1].pin()
        pager = model._pager
        assert pager is not None
        pager.set_miss(LAYERS)
        assert "none in the last 3 of 6 layers" in pager.miss  # one less: a pinned expert of another layer has its slot
        assert model.experts[0, 1].resident
        assert all(expert.slot is not None for expert in (model.experts[5, e] for e in range(n_expert)))
        with pytest.raises(Exception, match="layer 5 stays in the slots as a whole"):
            model.experts[5, 0].evict()
        model.check_integrity()
        assert run(model.native, 7, 16) == expected
        pager.set_miss(replace(LAYERS, mode="cpu"))
        model.check_integrity()
        assert run(model.native, 7, 16) == expected
        before = slots(model)
        pager.set_miss(LAYERS)
        assert slots(model) != before
        pager.set_miss(replace(LAYERS, mode="fetch"))
        assert slots(model) == before
        for block, e in (key for key, slot in before.items() if slot >= 0):
            for weight in model.experts[block, e].weights.values():
                assert (weight.in_slot() == weight.raw).all()
        model.check_integrity()


def slots(model: Model) -> dict[tuple[int, int], int]:
    """The slot of every expert by block and number, -1 for none."""
    return {(block, e): state.slot for (block, _), states in model.experts.states().items() for e, state in enumerate(states)}
