"""`bench --window` and `--plot`: depths beyond the context, rows that say which window, a picture. No test looks at how long anything took."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from processes import error_line

from tinyserve_gguf import bench_plot
from tinyserve_gguf._shim import Device
from tinyserve_gguf.bench_plot import as_png, curves
from tinyserve_gguf.bench_table import Row, with_bounds
from tinyserve_gguf.cli import main

ModelFile = Callable[..., Path]

SMALL = ("--warmup", "6", "--repeat", "2", "--device", "CPU", "-t", "1", "-b", "32")


@pytest.fixture(autouse=True)
def link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "link_rate", lambda _self: 10e9)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, arguments)], prog_name="tinyserve-gguf")


def report_of(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, *SMALL, "--json")
    assert result.exit_code == 0, result.stderr
    return dict(json.loads(result.stdout))


def test_with_and_without(model_file: ModelFile) -> None:
    """Every cache, every window; bounds come from a run with the same window."""
    report = report_of(model_file("mixtral"), "-p", 24, "-n", 4, "--depth", "0,300", "--expert-cache", "all,50%", "--window", "0,64")
    rows = report["rows"]
    runs = ["expert cache all", "expert cache all, window 64", "expert cache 50%, lfru", "expert cache 50%, lfru, window 64"]
    assert [row["run"] for row in rows[::4]] == runs
    assert [row["test"] for row in rows] == ["pp24", "tg4", "pp24 @ d300", "tg4 @ d300"] * 4
    assert [row["window"] for row in rows] == ([None] * 4 + [64] * 4) * 2
    assert [row["bound_from"] for row in rows] == [None] * 8 + [runs[0]] * 4 + [runs[1]] * 4
    assert report["setup"]["n_ctx"] == 324


def test_depth_beyond_what_the_model_was_trained_with(model_file: ModelFile) -> None:
    path = model_file("mixtral")
    options = (path, "-p", 24, "-n", 4, "--depth", 3000, "--expert-cache", "all")
    assert "needs a context of 3024 tokens" in error_line(run(*options))
    report = report_of(*options, "--window", 64)
    assert [row["test"] for row in report["rows"]] == ["pp24 @ d3000", "tg4 @ d3000"]
    assert report["setup"]["n_ctx"] == 64
    assert "needs a context of 3024 tokens" in error_line(run(*options, "--window", 64, "--baseline"))


@pytest.mark.parametrize(("value", "part"), [("1", "--window is 2 or more"), ("x", "'x' is not a valid integer"), ("4000", "more than the 2048 pos")])
def test_bad_windows(model_file: ModelFile, value: str, part: str) -> None:
    assert part in error_line(run(model_file("mixtral"), "--window", value))


# ---- the picture ----------------------------------------------------------------------------------------------------------------------------


def row(name: str, depth: int, rate: float | None, n: int = 16, kind: str = "tg") -> Row:
    return Row(run=name, runner="tinyserve-gguf", test=f"{kind}{n} @ d{depth}", n_tokens=n, depth=depth, rate=rate)


def test_curves() -> None:
    rows = [row("b", 8, 3.0), row("b", 0, 4.0), row("a", 0, 5.0), row("a", 0, 9.0, kind="pp"), Row(run="c", runner="llama.cpp", error="no room")]
    assert curves(rows) == {"b": [(0, 4.0), (8, 3.0)], "a": [(0, 5.0)]}
    assert curves([row("a", 0, 5.0), row("a", 8, 4.0, n=32)]) == {"a, tg16": [(0, 5.0)], "a, tg32": [(8, 4.0)]}


def test_bounds_are_of_the_same_window() -> None:
    full = {window: Row(run=f"all {window}", runner="tinyserve-gguf", test="tg", rate=9.0, window=window, all_resident=True) for window in (None, 64)}
    half = Row(run="half", runner="tinyserve-gguf", test="tg", rate=4.0, window=64, link_gbps=1.0, mb_per_token=1.0)
    assert with_bounds([*full.values(), half])[-1].bound_from == "all 64"
    assert with_bounds([full[None], half])[-1].bound_from is None


def test_picture(model_file: ModelFile, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    path = tmp_path / "a.png"
    report_of(model_file("mixtral"), "-p", 0, "-n", 4, "--depth", "0,100", "--expert-cache", "all", "--window", "0,64", "--plot", path)
    picture = path.read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert picture != as_png([row("other", 0, 1.0), row("other", 8, 2.0)], "other")


def test_plot_is_refused_before_anything_runs(model_file: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model_file("mixtral")
    for options in (("--depth", "0"), ("--depth", "5,5"), ("--depth", "0,8", "-n", "0")):
        assert "give two or more --depth, and -n above 0" in error_line(run(path, "--plot", tmp_path / "a.png", *options))
    assert "--plot" in error_line(run(path, "--depth", "0,8", "--plot", tmp_path / "no" / "a.png"))
    found = importlib.util.find_spec
    monkeypatch.setattr(bench_plot, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    message = error_line(run(path, "--depth", "0,8", "--plot", tmp_path / "a.png"))
    assert "pip install 'tinyserve-gguf[plot]'" in message
    assert list(tmp_path.iterdir()) == []
