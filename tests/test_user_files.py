"""Where files of the user go, and a user without a home, as in many containers."""

from __future__ import annotations

import pwd
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from processes import error_line

from tinyserve_gguf import load, machine, miss_memory, user_files
from tinyserve_gguf._shim import Miss
from tinyserve_gguf.cli import main
from tinyserve_gguf.errors import OptionError
from tinyserve_gguf.facts import read_facts
from tinyserve_gguf.hot_list import HotList, read_list, write_list
from tinyserve_gguf.miss_auto import Choice
from tinyserve_gguf.miss_guard import MeasuredSplit

ModelFile = Callable[..., Path]
BASES = {"XDG_CACHE_HOME": user_files.cache_dir, "XDG_STATE_HOME": user_files.state_dir, "XDG_CONFIG_HOME": user_files.config_dir}


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the environment nor the list of users knows a home."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", *BASES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.parametrize("variable", BASES)
def test_an_absolute_base_directory_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv(variable, str(tmp_path / "base"))
    assert BASES[variable]() == tmp_path / "base" / "tinyserve-gguf"
    monkeypatch.setenv(variable, "relative")
    assert BASES[variable]().is_relative_to(tmp_path / "home")


@pytest.mark.usefixtures("homeless")
@pytest.mark.parametrize("variable", BASES)
def test_what_needs_a_home_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    with pytest.raises(OptionError, match=f"no home directory: set {variable} "):
        BASES[variable]()
    monkeypatch.setenv(variable, str(tmp_path))
    assert BASES[variable]() == tmp_path / "tinyserve-gguf"


@pytest.mark.usefixtures("homeless")
def test_nothing_is_kept_without_a_home(model_file: ModelFile) -> None:
    """Each costs a line."""
    facts = read_facts(model_file("qwen3moe"))
    found = [
        machine.recall("CPU")[1],
        machine.remember(machine.Measured("CPU", "2026-01-02", {"cpu": 5e9})),
        miss_memory.recall("here")[1],
        miss_memory.remember("here", Choice(Miss(), {})),
        miss_memory.recall_splits("here")[1],
        miss_memory.remember_splits("here", [MeasuredSplit(4, 50.0, 100, 8, 0)]),
        read_list(facts)[1],
        write_list(facts, HotList(1.0, {})),
    ]
    for line in found:
        assert line and "set XDG_CACHE_HOME" in line and "\n" not in line


@pytest.mark.usefixtures("homeless")
def test_commands_without_a_home(model_file: ModelFile) -> None:
    path = str(model_file("qwen3moe"))
    done = CliRunner().invoke(main, ["info", path])
    assert done.exit_code == 0, done.output
    assert "what doctor remembered in machine.json is not used: this user has no home directory" in done.output
    for command in (["demo"], ["chat", "-hf", "someone/model-GGUF", "--prompt", "hello"]):
        assert "set XDG_CACHE_HOME" in error_line(CliRunner().invoke(main, command, prog_name="tinyserve-gguf"))


@pytest.mark.usefixtures("homeless")
@pytest.mark.parametrize("options", [{"miss": "auto"}, {"warm": True}, {}])
def test_models_without_a_home(model_file: ModelFile, options: dict[str, object]) -> None:
    with load(model_file("qwen3moe"), expert_cache="25%", device="CPU", n_ctx=64, n_threads=1, **options) as model:
        assert list(model.generate("Hello", max_tokens=3))
