"""`--miss auto`: which way it chooses at made-up speeds, what that costs, what it remembers; and a real model that it tunes."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from exact import THREADS
from processes import cli

from tinyserve_gguf import OptionError, Sampling, load
from tinyserve_gguf._shim import Miss
from tinyserve_gguf.miss import LAYERS, candidates
from tinyserve_gguf.miss_auto import LASTING, MARGIN, TURN, WARM, WARM_MOST, WINDOW, Choice, Tuner, label
from tinyserve_gguf.miss_guard import Costs, Decoded, MeasuredSplit, Split
from tinyserve_gguf.miss_memory import MEMORY, recall, recall_splits, remember, remember_splits

ModelFile = Callable[..., Path]
WAYS = candidates(10e9)
FETCH, FIRST, *_ = WAYS
ENOUGH = 600  # tokens in which a choice is made
LINK = 1e9  # bytes per second
BYTES = 200_000_000  # a token, over the link: 0.2 s
ROWS, ROW_NS, WAIT_NS = 10, 20_000_000, 100_000_000  # a token, where the CPU computes misses


class World:
    """Where every way takes its time for a token, in seconds, and hits so often."""

    def __init__(self, times: dict[str, float], remembered: Choice | None = None, rival: Split | None = None) -> None:
        self.times, self.hit_rate, self.able = times, 0.7, True
        self.used: list[str] = []  # of every token
        self.kept: list[Choice] = []
        self.seen = Decoded()
        self.asked: list[Costs] = []  # what the guard knew
        self.now = FETCH
        self.noise = itertools.cycle((0.99, 1.0, 1.01, 1.6))  # now and then a token takes long
        self.tuner = Tuner(
            WAYS,
            switch=lambda miss: setattr(self, "now", miss),
            able=lambda: self.able,
            counts=lambda: self.seen,
            chosen=self.kept.append,
            remembered=remembered,
            rival=lambda found: self.asked.append(found) or rival,
            link_rate=LINK,
        )

    def decode(self, n: int) -> float:
        """Seconds of `n` tokens."""
        total = 0.0
        for _ in range(n):
            self.used.append(label(self.now))
            fetch = self.now.mode == "fetch"
            more = (round(100 * self.hit_rate), 100, *((BYTES, 0, 0, 0) if fetch else (0, ROWS, ROWS * ROW_NS, WAIT_NS)))
            self.seen = Decoded(*(a + b for a, b in zip(self.seen, more, strict=True)))
            seconds = self.times.get(label(self.now), 1.0) * next(self.noise)
            self.tuner.step(seconds)
            total += seconds
        return total


def times(fetch: float, *others: float) -> dict[str, float]:
    return dict(zip(map(label, WAYS), (fetch, *others), strict=True))


@pytest.mark.parametrize("best", range(len(WAYS)))
def test_the_fastest_stays(best: int) -> None:
    world = World(times(*(0.8 if i == best else 1.0 for i in range(len(WAYS)))))
    world.decode(ENOUGH)
    assert world.now == WAYS[best]
    (choice,) = world.kept
    (note,) = world.tuner.take_notes()
    assert note == f"misses: {choice.line()}"
    assert note.startswith(f"misses: {label(WAYS[best])} is fastest here; tok/s: {1.0 if best else 1.2:.1f} (fetch)")
    assert choice.figures.keys() == set(map(label, WAYS))
    assert set(world.used[-100:]) == {label(WAYS[best])}


def test_chance_seldom_decides() -> None:
    """Tokens miss now more, now fewer experts: their times differ by a fifth, and the ways by less."""
    wrong = 0
    for seed in range(200):
        world, rng = World(times(5, 1, 1.08, 1.04)), random.Random(seed)
        world.noise = iter(lambda rng=rng: rng.lognormvariate(0, 0.2), None)
        world.decode(ENOUGH)
        wrong += world.now == WAYS[2]
    assert wrong <= 6


def test_fetching_wins_unless_another_way_is_faster_by_a_margin() -> None:
    for factor, expected in ((0.995 / MARGIN, FIRST), (1.005 / MARGIN, FETCH)):
        world = World(times(1, factor, 1.1, 1.1))
        world.decode(ENOUGH)
        assert world.now == expected


def test_where_fetching_is_best_finding_out_costs_little() -> None:
    """The full link: 2 % of 1,000 tokens."""
    for slow in (1.14, 1.2, 1.39, 1.5, 2.0, 3.0):
        world = World(times(1, *[slow] * 3))
        alone = World(times(1, *[1.0] * 3), Choice(FETCH, {}))
        assert world.decode(1000) <= (1.02 if slow >= 1.5 else 1.03) * alone.decode(1000)
        assert world.now == FETCH
    world = World(times(1, 1.6, 0.1, 0.1))
    world.decode(ENOUGH)
    assert world.now == FETCH  # the first stands for all
    assert len(world.kept[0].figures) == 2


def test_a_way_that_is_too_slow_leaves_early() -> None:
    world = World(times(4, 1, 3, 1.05))
    world.decode(ENOUGH)
    assert world.now == FIRST
    assert 0 < world.used.count(label(WAYS[2])) < TURN
    assert world.used[: 2 * WARM + TURN] == ["fetch"] * (2 * WARM + TURN)


def test_a_cold_cache_is_waited_for() -> None:
    for reached, warm in ((0.3, 5 * WARM), (2.0, WARM_MOST)):
        world = World(times(1, *[2.0] * 3))
        for i in range(20):
            world.hit_rate = min(reached, 0.1 * i)
            world.decode(WARM)
        assert world.used.index(label(FIRST)) == warm + TURN


@pytest.mark.parametrize(("change", "again"), [({"speed": 1.5}, True), ({"hits": 0.5}, True), ({"speed": 1.1, "hits": 0.65}, False)])
def test_a_lasting_shift_is_measured_again(change: dict[str, float], again: bool) -> None:
    world = World(times(1, *[2] * 3), Choice(FETCH, {"fetch": 1.0}))
    world.decode(3 * WINDOW)
    world.times = {name: time * change.get("speed", 1) for name, time in world.times.items()}
    world.hit_rate = change.get("hits", world.hit_rate)
    world.decode((LASTING - 1) * WINDOW)
    assert not world.tuner.take_notes()
    world.decode(WINDOW + ENOUGH)
    assert any("measured again" in note for note in world.tuner.take_notes()) == again
    assert (label(FIRST) in world.used) == again


def test_a_passing_shift_is_not() -> None:
    world = World(times(1, *[2] * 3), Choice(FETCH, {"fetch": 1.0}))
    world.decode(2 * WINDOW)
    for _ in range(5):
        world.hit_rate = 0.2
        world.decode((LASTING - 1) * WINDOW)
        world.hit_rate = 0.7
        world.decode(WINDOW)
    assert set(world.used) == {"fetch"}


def test_a_model_whose_misses_the_cpu_cannot_compute() -> None:
    world = World(times(1, *[0.1] * 3))
    world.able = False
    world.decode(100)
    assert world.now == FETCH
    assert world.used.count(label(FIRST)) == 1
    assert world.tuner.take_notes() == ["misses: fetched, as the CPU cannot compute those of this model"]
    assert not world.kept


# ---- the guard ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["measured", "estimated"])
def test_the_placement_of_a_faster_split_takes_a_turn_and_stays(how: str) -> None:
    world = World(times(1, 0.9, 1.1, 1.1) | {label(LAYERS): 0.6}, rival=Split(4, 1.6, how))
    world.decode(ENOUGH)
    assert world.now == LAYERS
    (choice,) = world.kept
    assert (choice.miss, choice.rival) == (LAYERS, f"llama.cpp's --n-cpu-moe 4 (1.6 tok/s, {how})")
    first, second = world.tuner.take_notes()
    assert first == f"misses: {choice.line()}"
    assert first.startswith("misses: whole layers is fastest here; tok/s: 1.0 (fetch), ")
    assert second == (
        f"misses: llama.cpp's --n-cpu-moe 4 (1.6 tok/s, {how}) against 1.1 (cpu, 1 in 4 enters the cache): "
        "the placement is that split from now on, 1.7 tok/s here"
    )


def test_a_split_that_is_slower_than_it_seemed_goes_again() -> None:
    world = World(times(1, 0.9, 1.1, 1.1) | {label(LAYERS): 2.0}, rival=Split(4, 1.6, "estimated"))
    world.decode(ENOUGH)
    assert world.now == FIRST
    assert world.used.count(label(LAYERS)) < TURN  # it left early
    assert world.tuner.take_notes()[1].endswith("its placement was tried and gave 0.5 tok/s here, so it is not kept")
    assert world.kept[0].figures[label(LAYERS)] == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize(("rate", "how", "tried"), [(1.04, "measured", True), (1.01, "measured", False), (1.08, "estimated", False)])
def test_a_split_must_be_faster_by_a_margin(rate: float, how: str, tried: bool) -> None:
    world = World(times(1, 1.2, 1.2, 1.2) | {label(LAYERS): 0.5}, rival=Split(4, rate, how))
    world.decode(ENOUGH)
    assert (label(LAYERS) in world.used) == tried
    assert len(world.tuner.take_notes()) == 1 + tried
    assert world.kept[0].rival == f"llama.cpp's --n-cpu-moe 4 ({rate:.1f} tok/s, {how})"


def test_the_guard_knows_what_the_tokens_told() -> None:
    world = World(times(1, 1.2, 1.2, 1.2))
    world.decode(ENOUGH)
    (found,) = world.asked
    assert found.device == pytest.approx(1 - BYTES / LINK, rel=0.02)  # a token of fetching, less its copies
    assert found.row == pytest.approx(ROW_NS / 1e9)


# ---- memory ---------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where choices are kept in this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return MEMORY.path


def test_a_choice_is_remembered_by_situation(memory: Path) -> None:
    choice = Choice(WAYS[-1], {"fetch": 29.3, "split": 69.1})
    assert recall("here") == (None, None)
    assert remember("here", choice) is None
    assert remember("there", Choice(FETCH, {})) is None
    assert recall("here") == (choice, None)
    assert recall("there") == (Choice(FETCH, {}), None)
    assert recall("elsewhere") == (None, None)
    assert [file.name for file in memory.parent.iterdir()] == ["miss.json"]


def test_speeds_of_llama_cpp_are_kept_beside_choices(memory: Path) -> None:
    choice = Choice(LAYERS, {"whole layers": 3.0}, "llama.cpp's --n-cpu-moe 4 (3.0 tok/s, measured)")
    old, new, other = MeasuredSplit(4, 50.0, 100, 8, 0), MeasuredSplit(4, 55.0, 100, 8, 0, 13.8), MeasuredSplit(6, 40.0, 50, 8, 0)
    assert recall_splits("here") == ([], None)
    assert remember_splits("here", [old, other]) is None
    assert remember("situation", choice) is None
    assert remember_splits("here", [new]) is None
    assert recall_splits("here") == ([new, other], None)
    assert recall("situation") == (choice, None)
    memory.write_text('{"version": 1, "choices": {}, "splits": {"here": [{"n_cpu_moe": 1}]}}')
    splits, line = recall_splits("here")
    assert (splits, line is not None and line.startswith("misses: what was measured of llama.cpp, in ")) == ([], True)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[1]", '{"version": 1}', '{"version": 0, "choices": {}}', '{"version": 1, "choices": {"here": 7}}', "\0\1",
     '{"version": 1, "choices": {"here": {"miss": {"mode": "guess"}, "figures": {}}}}',
     '{"version": 1, "choices": {"here": {"miss": {"mode": "cpu", "odd": 1}, "figures": {}}}}',
     '{"version": 1, "choices": {"here": {"miss": {"mode": "cpu"}, "figures": {"a": "x"}}}}'],
)  # fmt: skip
def test_what_cannot_be_used_is_one_line(memory: Path, content: str) -> None:
    memory.parent.mkdir()
    memory.write_text(content)
    choice, line = recall("here")
    assert choice is None
    assert line is not None
    assert "\n" not in line
    assert line.startswith(f"misses: what was remembered in {memory} is not used: ")
    assert remember("here", Choice(FETCH, {})) is None  # and is replaced
    assert recall("here") == (Choice(FETCH, {}), None)


def test_a_cache_that_cannot_be_written(memory: Path) -> None:
    memory.parent.touch()
    line = remember("here", Choice(FETCH, {}))
    assert line is not None
    assert "cannot be remembered" in line


# ---- a real model ---------------------------------------------------------------------------------------------------------------------------


def test_a_model_is_tuned_while_it_writes(model_file: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU every way gives the same text, so the choice, which is the clock's, does not matter."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path, greedy = model_file("gpt-oss", layers=2), Sampling(temp=0)
    text = []
    for miss in ("fetch", "auto", "auto"):
        with load(path, expert_cache="40%", device="CPU", n_threads=THREADS, miss=miss, miss_threads=None if miss == "fetch" else 1) as model:
            text.append("".join(model.generate("Once upon a time", max_tokens=450, sampling=greedy)))
            notes, lines, pager = model.take_notes(), model.lines(), model.stats().pager
            model.check_integrity()
            assert pager is not None
            if miss == "fetch":
                assert (notes, pager.decode.cpu_rows) == ([], 0)
            elif len(text) == 2:
                assert "is fastest here; tok/s: " in notes[0]  # a machine that becomes slower meanwhile may bring others
                assert pager.decode.cpu_rows > 0
                assert any("auto: " in line for line in lines)
                assert len(json.loads((tmp_path / "tinyserve-gguf" / "miss.json").read_text())["choices"]) == 1
            else:
                assert not [note for note in notes if "measured again" not in note and "is fastest here" not in note]
    assert text[0] == text[1] == text[2]
    with load(path, expert_cache="40%", device="CPU", miss="auto") as model:  # default threads: perhaps another situation
        assert any("auto: " in line for line in model.lines())
    with load(path, expert_cache="all", device="CPU", miss="auto") as model:
        assert "misses: none, every expert is resident" in model.lines()


def test_bench_starts_without_memory_and_says_what_was_chosen(model_file: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    where = ("-p", "0", "-n", "16", "-r", "1", "--warmup", str(ENOUGH), "--device", "CPU", "-t", "1", "--expert-cache", "25%", "--json")
    done = cli("bench", model_file("mixtral"), "--miss", "auto", *where, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert any("is fastest here; tok/s: " in note for note in report["notes"])
    assert "auto: " in report["rows"][0]["miss"]  # chosen, or, where the machine became slower, tried again
    assert not list(tmp_path.iterdir())


def test_auto_takes_no_rate(model_file: ModelFile) -> None:
    with pytest.raises(OptionError, match="leave --miss-admit out"):
        load(model_file("mixtral"), device="CPU", miss="auto", miss_admit=4)


def test_ways_differ_by_label() -> None:
    assert len(set(map(label, WAYS))) == len(WAYS)
    assert Miss() == FETCH
