"""The benchmark as a command, on the CPU: rows, formats, options, interrupts. No test looks at how long anything took."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from processes import error_line
from reshaped import dense

from tinyserve_gguf import CapacityError, bench, load, placement, read_facts
from tinyserve_gguf._shim import Device
from tinyserve_gguf.bench import Bench
from tinyserve_gguf.bench_options import BenchOptions
from tinyserve_gguf.bench_table import COLUMNS, Report, Row, as_csv, as_json, as_markdown
from tinyserve_gguf.cli import bench as command
from tinyserve_gguf.cli import main
from tinyserve_gguf.miss_guard import resident_bytes

ModelFile = Callable[..., Path]

SMALL = ("-p", "24", "-n", "4", "--warmup", "6", "--repeat", "2", "--device", "CPU", "-t", "1")


class Onlooker:
    """A `Watch` that keeps what it was shown, and wants to stop when that is `last`."""

    def __init__(self, last: str = "") -> None:
        self.seen: list[tuple[str, float]] = []
        self._last = last

    def show(self, text: str, done: float) -> None:
        self.seen.append((text, done))

    def stopped(self) -> bool:
        return bool(self.seen and self.seen[-1][0] == self._last)


@pytest.fixture(autouse=True)
def link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "link_rate", lambda _self: 10e9)  # the real one takes a second


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int], None]:
    """Makes the CPU pass for a GPU with so much free memory. What --baseline keeps goes to `tmp_path`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def pretend(free: int) -> None:
        pick = placement.pick_device
        for module in (bench, placement):
            monkeypatch.setattr(module, "pick_device", lambda name: replace(pick(name), is_cpu=False, memory_free=free))

    return pretend


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, arguments)], prog_name="tinyserve-gguf")


def rows_of(*arguments: object) -> list[dict[str, Any]]:
    result = run(*arguments, *SMALL, "--json")
    assert result.exit_code == 0, result.stderr
    return list(json.loads(result.stdout)["rows"])


# ---- rows of a whole run --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(model_file: ModelFile) -> Iterator[tuple[Report, int]]:
    """A report with everything in it, and how many models were loaded for it."""
    loads = 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal loads
        loads += 1
        return load(*arguments, **options)

    options = BenchOptions(
        path=str(model_file("gpt-oss")),
        prompts=(24,),
        replies=(4,),
        depths=(0, 8),
        expert_caches=("all", "50%", "25%"),
        policies=("lfru", "lru"),
        device="CPU",
        n_threads=1,
        repeat=2,
        warmup=6,
        baseline=True,
        needle=500,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "load", counted)
        patch.setattr(Device, "link_rate", lambda _self: 10e9)
        watch = Onlooker()
        made = Bench(options, watch)
        made.run()
    done = [share for _, share in watch.seen]
    assert done == sorted(done)
    assert done[0] == 0
    assert done[-1] < 1
    yield made.report(), loads


TESTS = ["pp24", "tg4", "pp24 @ d8", "tg4 @ d8"]
RUNS = ["expert cache all", *(f"expert cache {share}, {policy}" for share in ("50%", "25%") for policy in ("lfru", "lru"))]


def test_rows(whole: tuple[Report, int]) -> None:
    report, loads = whole
    timed = [(row.run, row.test) for row in report.rows if row.is_timed]
    assert timed == [(name, test) for name in ["llama.cpp, everything on CPU", *RUNS] for test in TESTS]
    assert [row.run for row in report.rows if not row.is_timed] == RUNS
    assert loads == len(RUNS)  # once each, and one policy where it decides nothing
    assert any("is 'llama.cpp, everything on CPU', not measured twice" in note for note in report.notes)
    assert not any("bounds need" in note for note in report.notes)


def test_numbers(whole: tuple[Report, int]) -> None:
    for row in whole[0].rows:
        assert row.error is None
        assert row.load_seconds
        assert row.device_bytes is None  # of a CPU
        if not row.is_timed:
            continue
        assert row.rate and row.rate_stdev is not None and row.repeats == 2 and row.tokens == "random"
        is_prompt = row.n_tokens == 24
        assert [value is not None for value in (row.ttft_ms, row.p50_ms, row.p99_ms)] == [is_prompt, not is_prompt, not is_prompt]
        if row.runner == "llama.cpp":
            assert {row.hit_rate, row.mb_per_token, row.serial_bound, row.link_gbps, row.expert_cache} == {None}
            assert (row.n_cpu_moe, row.all_resident) == (0, True)
            continue
        assert row.bound_from == "llama.cpp, everything on CPU"
        assert row.serial_bound and row.of_serial == row.rate / row.serial_bound
        assert row.all_resident == (row.expert_cache == "all") == (row.policy is None) == (row.hit_rate == 1) == (row.mb_per_token == 0)
        assert bool(row.stage_bytes) != row.all_resident
        assert row.link_gbps == 10
        assert not row.link_throttled


def test_needle_rows(whole: tuple[Report, int]) -> None:
    needles = [row for row in whole[0].rows if not row.is_timed]
    assert {(row.test, row.number, row.needle_at, row.tokens) for row in needles} == {
        ("needle500", needles[0].number, needles[0].needle_at, "generated text")
    }
    assert {row.reply for row in needles} == {needles[0].reply}  # greedy, and the logits are the same with every cache
    for row in needles:
        assert row.found == (row.number in row.reply)  # type: ignore[operator]
        assert row.n_tokens and 480 < row.n_tokens <= 500


def test_json(whole: tuple[Report, int]) -> None:
    found = json.loads(as_json(whole[0]))
    assert set(found) == {"model", "setup", "rows", "notes"}
    assert len(found["rows"]) == len(whole[0].rows)
    assert all(list(row) == [f.name for f in fields(Row)] for row in found["rows"])
    assert found["model"]["architecture"] == "gpt-oss"
    assert found["setup"] | {"link_gbps": 10.0, "n_threads": 1, "warmup": 6, "repeat": 2, "seed": 0, "device": "CPU"} == found["setup"]


def test_csv(whole: tuple[Report, int]) -> None:
    found = list(csv.DictReader(io.StringIO(as_csv(whole[0]), newline="")))
    assert [(row["run"], row["test"]) for row in found] == [(row.run, row.test or "") for row in whole[0].rows]
    assert list(found[0]) == [f.name for f in fields(Row) if f.name != "profile"]
    assert [float(row["rate"]) for row in found] == [row.rate for row in whole[0].rows]
    assert found[0]["hit_rate"] == ""


def test_markdown(whole: tuple[Report, int]) -> None:
    lines = as_markdown(whole[0]).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    timed = [row for row in whole[0].rows if row.is_timed]
    assert len(rows) == 2 + len(timed)
    assert {len(line) for line in rows} == {len(rows[0])}
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in rows]
    assert tuple(cells[0]) == COLUMNS
    assert [row[:3] for row in cells[2:]] == [[row.run, row.test, "random"] for row in timed]
    assert all(re.fullmatch(r"\d+\.\d\d ± \d+\.\d\d", row[3]) for row in cells[2:])
    by_title = [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]
    assert {row["serial bound"] for row in by_title[:4]} == {""}
    assert all(re.fullmatch(r"\d+\.\d \(\d+%\)", row["overlapped bound"]) for row in by_title[4:])
    assert lines[0].startswith("synthetic gpt-oss (gpt-oss, ")
    assert "link 10.0 GB/s as measured" in lines[0]
    assert sum(line.startswith("needle, ") for line in lines) == len(RUNS)
    assert lines[-1].startswith("- ")


# ---- profile --------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def profiled(model_file: ModelFile) -> Report:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Device, "link_rate", lambda _self: 10e9)
        options = BenchOptions(
            path=str(model_file("gpt-oss")),
            prompts=(24,),
            replies=(5,),
            expert_caches=("all", "25%"),
            device="CPU",
            n_threads=1,
            repeat=2,
            warmup=6,
            profile=True,
        )
        made = Bench(options, Onlooker())
        made.run()
        return made.report()


def test_profile_of_every_paged_layer(profiled: Report, model_file: ModelFile) -> None:
    blocks = [layer.block for layer in read_facts(model_file("gpt-oss")).expert_layers]
    assert [(row.expert_cache, row.test, row.profile is not None) for row in profiled.rows] == [
        ("all", "pp24", False),
        ("all", "tg5", False),
        ("25%", "pp24", False),
        ("25%", "tg5", True),
    ]
    times = profiled.rows[-1].profile
    assert times is not None
    assert [time.block for time in times] == [*blocks, None]
    assert all(time.attention > 0 and time.lookup > 0 and time.experts > 0 for time in times[:-1])
    assert any(time.copy > 0 for time in times[:-1])
    assert (times[-1].lookup, times[-1].copy, times[-1].experts) == (0, 0, 0) != times[-1].attention


def test_profile_is_printed_layer_by_layer(profiled: Report) -> None:
    lines = as_markdown(profiled).splitlines()
    start = lines.index(next(line for line in lines if line.startswith("expert cache 25%, lfru, tg5: microseconds a token; ")))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start + 2 :] if line.startswith("|")]
    times = profiled.rows[-1].profile
    assert times is not None
    assert cells[0] == ["block", "attention", "lookup", "copy", "experts", "total"]
    assert [row[0] for row in cells[2:]] == [*(str(time.block) for time in times[:-1]), "output", "all"]
    assert float(cells[-1][-1]) == pytest.approx(sum(time.total for time in times), abs=0.06)
    assert [float(cell) for cell in cells[2][1:]] == pytest.approx(
        [times[0].attention, times[0].lookup, times[0].copy, times[0].experts, times[0].total], abs=0.06
    )
    found = json.loads(as_json(profiled))["rows"][-1]["profile"]
    assert found[0] == {"block": 0, **{part: getattr(times[0], part) for part in ("attention", "lookup", "copy", "experts")}}


# ---- llama.cpp beside a GPU -----------------------------------------------------------------------------------------------------------------


def test_baseline_on_a_gpu(model_file: ModelFile, gpu: Callable[[int], None], tmp_path: Path) -> None:
    path = model_file("gpt-oss", layers=6)
    gpu(64 << 30)
    result = run(path, *SMALL, "--expert-cache", "all,50%,8", "--policy", "lfru,lru", "--baseline", "--json")
    report = json.loads(result.stdout)
    names = [row["run"] for row in report["rows"] if row["test"] == "pp24"]
    assert names[0] == "llama.cpp, everything on CPU"
    assert names[-3] == "llama.cpp, all experts on the CPU"
    assert all(name.startswith("llama.cpp --n-cpu-moe ") for name in names[-2:])
    facts = read_facts(path)
    splits = [row for row in report["rows"] if row["n_cpu_moe"] and row["n_cpu_moe"] < 6]
    for split, cache in zip(splits[::2], ("50%", "8"), strict=True):
        paged = next(row for row in report["rows"] if row["expert_cache"] == cache)
        budget, k = paged["expert_bytes"] + paged["stage_bytes"], split["n_cpu_moe"]
        assert split["expert_bytes"] == resident_bytes(facts, k) <= budget < resident_bytes(facts, k - 1)
        assert any(f"--n-cpu-moe {k} is llama.cpp's best at the device memory of expert cache {cache}" in note for note in report["notes"])
    assert all(row["device_bytes"] == 0 for row in report["rows"])  # what the pretended device says
    assert not any(row["all_resident"] for row in splits)
    (kept,) = json.loads((tmp_path / "tinyserve-gguf" / "miss.json").read_text())["splits"].values()
    decoded = [row for row in report["rows"] if row["n_cpu_moe"] and row["test"].startswith("tg")]
    assert [(split["n_cpu_moe"], split["rate"], split["expert_bytes"]) for split in kept] == [
        (row["n_cpu_moe"], row["rate"], row["expert_bytes"]) for row in decoded
    ]
    assert {row["depth"] for row in decoded} == {split["depth"] for split in kept}


def test_baseline_that_does_not_fit(model_file: ModelFile, gpu: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(1 << 30)
    monkeypatch.setattr(bench, "full_bytes", lambda *_given: 2 << 30)
    result = run(model_file("gpt-oss"), *SMALL, "-p", "24", "-n", 0, "--expert-cache", "50%", "--baseline", "-ub", 512, "--device", "CPU")
    assert result.exit_code == 0, result.stderr
    assert "llama.cpp, everything on CPU: not measured, it needs about " in result.stdout
    assert "| llama.cpp, all experts on the CPU " in result.stdout
    assert "bounds need the compute time" in result.stdout


def test_dense_model(model_file: ModelFile, tmp_path: Path) -> None:
    path = dense(model_file("mixtral"), tmp_path / "dense.gguf")
    rows = rows_of(path, "--baseline")
    assert [row["run"] for row in rows] == ["llama.cpp, everything on CPU"] * 2 + ["expert cache auto"] * 2
    assert {row["hit_rate"] for row in rows} == {None}
    assert "there are no experts to cache" in error_line(run(path, "--expert-cache", "50%"))


# ---- options --------------------------------------------------------------------------------------------------------------------------------


def test_throttled_link(model_file: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """`load` does it; the rows say so, except where nothing moves."""
    asked = []

    def unthrottled(*arguments: Any, link_gbps: float | None, **options: Any) -> Any:
        asked.append(link_gbps)
        return load(*arguments, **options)

    monkeypatch.setattr(bench, "load", unthrottled)
    rows = rows_of(model_file("gpt-oss"), "--expert-cache", "all,50%", "--link-gbps", 2.5)
    assert asked == [None, 2.5]
    assert [row["run"] for row in rows[1:3]] == ["expert cache all", "expert cache 50%, lfru, link 2.5 GB/s (throttled)"]
    assert [(row["link_gbps"], row["link_throttled"]) for row in rows[1:3]] == [(10, False), (2.5, True)]
    last = rows[-1]
    assert last["serial_bound"] == pytest.approx(1 / (1 / rows[1]["rate"] + last["mb_per_token"] / 2500))
    assert "give less" in error_line(run(model_file("gpt-oss"), "--expert-cache", "50%", "--link-gbps", 10.1))
    assert "nothing to slow down" in error_line(run(model_file("gpt-oss"), "--expert-cache", "all", "--link-gbps", 1))


def test_engine(model_file: ModelFile) -> None:
    row = rows_of(model_file("gpt-oss"), "--expert-cache", "50%", "--engine", "host")[0]
    assert row["run"] == "expert cache 50%, lfru, host engine"
    assert "CUDA" in error_line(run(model_file("gpt-oss"), *SMALL, "--engine", "device", "--expert-cache", "50%"))


def test_prompt_file(model_file: ModelFile, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Short words.", "utf-8")
    result = run(model_file("gpt-oss"), *SMALL, "--prompt-file", text, "--json")
    report = json.loads(result.stdout)
    assert {row["tokens"] for row in report["rows"]} == {"text text.txt"}
    assert [note for note in report["notes"] if "text.txt" in note] == ["text.txt holds 12 tokens: longer tests read it again from its start"]


def test_output(model_file: ModelFile, tmp_path: Path) -> None:
    file = tmp_path / "out.csv"
    result = run(model_file("gpt-oss"), *SMALL, "--csv", "--output", file)
    assert (result.exit_code, result.stdout) == (0, "")
    assert len(file.read_text("utf-8").splitlines()) == 3
    assert "--output" in error_line(run(model_file("gpt-oss"), "--output", tmp_path / "no" / "out"))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ("-p 1,,2", "is not a list like A,B,C"),
        ("-p 512,x", "'x' is not a valid integer"),
        ("-n -1", "is not in the range"),
        ("--depth 1.5", "'1.5' is not a valid integer"),
        ("--expert-cache 25%,lots", "not 'lots'"),
        ("--expert-cache 1", "too small"),
        ("--policy lru,best", "'best' is not one of"),
        ("--repeat 0", "--repeat"),
        ("--warmup -1", "--warmup"),
        ("--link-gbps 0", "--link-gbps"),
        ("--link-gbps nan", "--link-gbps"),
        ("--engine fast", "--engine"),
        ("--device CUDA7", "there is no device"),
        ("-p 0 -n 0", "there is nothing to measure"),
        ("-p 2000 --depth 100", "needs a context of 2100 tokens and synthetic gpt-oss has 2048"),
        ("-n 700", "needs a context of 2300 tokens"),
        ("--needle 1800", "needs a context of 2056 tokens"),
        ("-p 0 -n 0 --needle 20", "--needle 20 is too short"),
        ("--prompt-file no.txt", "cannot be read"),
        ("--profile -n 0", "there is no tg test"),
        ("--profile --expert-cache all", "--profile has nothing to tell apart"),
        ("--profile --csv", "--profile has no place in --csv"),
    ],
)
def test_bad_values(model_file: ModelFile, monkeypatch: pytest.MonkeyPatch, arguments: str, part: str) -> None:
    if "--needle 20" not in arguments:  # that one asks the model's tokenizer
        monkeypatch.setattr(bench, "load", None)
    assert part in error_line(run(model_file("gpt-oss"), *arguments.split()))


@pytest.mark.parametrize(("content", "part"), [(b" \n", "there is no text"), (b"\xff", "is not UTF-8")])
def test_bad_prompt_file(model_file: ModelFile, tmp_path: Path, content: bytes, part: str) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(content)
    assert part in error_line(run(model_file("gpt-oss"), "--prompt-file", text))


def test_what_does_not_fit_is_a_row(model_file: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: str, **options: Any) -> Any:
        if options["expert_cache"] in full_at:
            raise CapacityError("no room for the slots")
        return load(path, **options)

    full_at = {"all"}
    monkeypatch.setattr(bench, "load", full)
    rows = rows_of(model_file("gpt-oss"), "--expert-cache", "all,50%")
    assert [(row["run"], row["error"]) for row in rows if row["error"]] == [("expert cache all", "no room for the slots")]
    assert [row["test"] for row in rows if not row["error"]] == ["pp24", "tg4"]
    full_at.add("50%")
    assert "expert cache 50%: no room for the slots" in error_line(run(model_file("gpt-oss"), *SMALL, "--expert-cache", "all,50%"))


# ---- interrupt ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("last", "kept"), [("expert cache 50%, lfru: loading", 1), ("expert cache 50%: pp8", 1), ("expert cache all: pp8", 0)])
def test_interrupt_keeps_what_was_measured(model_file: ModelFile, last: str, kept: int) -> None:
    options = BenchOptions(str(model_file("gpt-oss")), prompts=(8,), replies=(), expert_caches=("all", "50%"), device="CPU", n_threads=1)
    made = Bench(options, Onlooker(last.replace("50%: pp8", "50%, lfru: pp8")))
    with pytest.raises(KeyboardInterrupt):
        made.run()
    assert len(made.report().rows) == kept


def test_interrupted_command_prints_it(model_file: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Onlooker("expert cache 50%, lfru: tg4")
    monkeypatch.setattr(command, "ProgressWatch", lambda _show, _interrupt: watch)
    result = run(model_file("gpt-oss"), *SMALL, "--expert-cache", "50%")
    assert result.exit_code == 130
    assert "| expert cache 50%, lfru | pp24 | " in result.stdout
    assert "tg4" not in result.stdout


# ---- the start of a session -----------------------------------------------------------------------------------------------------------------


def test_starts_cold_and_warm(model_file: ModelFile) -> None:
    path = model_file("qwen3moe")
    result = run(path, "-p", "0", "-n", "0", "--expert-cache", "75%,all", "--warm", "both", "--device", "CPU", "-t", "1", "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    cold, warm = report["rows"]  # where every expert has a slot there is nothing to warm up
    assert [row["run"] for row in (cold, warm)] == ["expert cache 75%, lfru, cold start", "expert cache 75%, lfru, warm start"]
    assert [row["warm"] for row in (cold, warm)] == [False, True]
    for row in (cold, warm):
        assert row["test"] == "start64"
        assert row["ttft_ms"] > 0
        assert row["rate"] > 0
    assert warm["hit_rate"] > cold["hit_rate"]  # room for most of what decode wants, and none of it there at first
    assert warm["mb_per_token"] < cold["mb_per_token"]
    assert (cold["fill_seconds"], warm["fill_seconds"] > 0) == (None, True)
    assert any("slots filled with the experts that decode used most" in note for note in report["notes"])
    assert not any("bounds need" in note for note in report["notes"])


def test_a_start_of_one_kind(model_file: ModelFile) -> None:
    rows = json.loads(run(model_file("qwen3moe"), "-p", "0", "-n", "0", "--expert-cache", "50%", "--warm", "on", "-t", "1", "--json").stdout)["rows"]
    assert [row["warm"] for row in rows] == [True]
    assert "nothing to measure" in error_line(run(model_file("qwen3moe"), "-p", "0", "-n", "0"))
