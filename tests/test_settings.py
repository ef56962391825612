"""The config file, completion, versions, and what is said where: the parts of the command line around the commands."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_fakes import FakeModel, fake_modules
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result
from processes import environment, error_line

from tinyserve_gguf.cli import COMMANDS, main
from tinyserve_gguf.cli.settings import options_of, read_settings
from tinyserve_gguf.errors import EngineError, ModelFileError


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[FakeModel]:
    """The models that the fake `load` made."""
    modules, models = fake_modules()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return models


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of our config file."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / "config" / "tinyserve-gguf"
    folder.mkdir(parents=True)
    return folder


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), prog_name="tinyserve-gguf")


FILE = """
expert-cache = "50%"
threads = 3
[chat]
temp = 0.25
threads = 4
window = true
[model."gpt-oss-20b"]
threads = 5
[model."Qwen*.gguf"]
expert-cache = "25%"
[model."Qwen*.gguf".chat]
threads = 6
keep-system = false
warm = false
"""


# ---- what holds ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "cache", "threads"),
    [
        (("m.gguf",), "50%", 4),  # the table of the command over the top
        (("dir/qwen3.gguf",), "25%", 6),  # the model over both
        (("dir/qwen3.gguf", "-t", "7"), "25%", 7),  # the command line over all
        (("-t", "7", "qwen3.gguf", "--expert-cache", "all"), "all", 7),
    ],
)
def test_what_is_more_special_wins(loaded: list[FakeModel], home: Path, arguments: tuple[str, ...], cache: str, threads: int) -> None:
    (home / "config.toml").write_text(FILE)
    result = run("chat", *arguments, "-p", "x")
    assert result.exit_code == 0, result.stderr
    assert (loaded[0].options["expert_cache"], loaded[0].options["n_threads"]) == (cache, threads)
    assert loaded[0].options["window"] == 2048  # as --window without a value
    assert loaded[0].options["warm"] is ("qwen" not in str(arguments))


def test_a_known_name_has_its_section(loaded: list[FakeModel], home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "config.toml").write_text(FILE)
    monkeypatch.setattr("tinyserve_gguf.resolve.resolve", lambda *_: "found.gguf")
    for arguments in (("gpt-oss-20b:MXFP4",), ("-hf", "ggml-org/gpt-oss-20b-GGUF")):
        run("chat", *arguments, "-p", "x")
        assert loaded[-1].path == "found.gguf"
        assert loaded[-1].options["n_threads"] == 5


def test_lists_are_lists(home: Path) -> None:
    (home / "config.toml").write_text("[bench]\nn-gen = [64, 256]\nn-prompt = 0\njson = true\n")
    bench = COMMANDS["bench"][0]()
    settings = read_settings(home / "config.toml", must_exist=True, main=main, commands={"bench": bench})
    context = bench.make_context("bench", ["m.gguf"], default_map=settings.defaults("bench", options_of(bench)))
    assert (context.params["replies"], context.params["prompts"], context.params["style"]) == ((64, 256), (0,), "json")


def test_another_file(loaded: list[FakeModel], home: Path, tmp_path: Path) -> None:
    (home / "config.toml").write_text("threads = 1")
    (tmp_path / "other.toml").write_text("threads = 2")
    run("--config", str(tmp_path / "other.toml"), "chat", "m", "-p", "x")
    assert loaded[0].options["n_threads"] == 2
    assert "no such file" in error_line(run("--config", str(tmp_path / "none.toml"), "chat", "m", "-p", "x"))


def test_a_relative_home_is_ignored(loaded: list[FakeModel], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the XDG standard has it."""
    (home / "config.toml").write_text("threads = 1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", "config")
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    run("chat", "m", "-p", "x")
    assert loaded[0].options["n_threads"] is None


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("thread = 3", r"config\.toml: thread is no option of any command; did you mean threads\?"),
        ("[chat]\nprompts = 3", r"\[chat\]: prompts is no option of chat; did you mean prompt\?"),
        ("[chats]\ntemp = 3", r"chats is no command; did you mean chat\?"),
        ("[model.x]\nnonsense = 3", r'\[model\."x"\]: nonsense is no option of any command; write long names'),
        ("[model.x.info]\ntemp = 3", r'\[model\."x"\.info\]: temp is no option of info'),
        ("model = 3", r'sections of models are written \[model\."NAME"\]'),
        ("[chat]\nprompt = {a = 1}", r"\[chat\]: prompt is text, a number or a list, not"),
        ("[chat]\ntemp = true", r"\[chat\]: temp is text, a number or a list, not True"),
        ("[chat]\nkeep-system = 1", r"\[chat\]: keep-system is true or false, not 1"),
        ("[chat]\ntemp = -1", r"'--temp': -1.* \(set in .*config\.toml\)"),
        ("help = true", r"help is no option"),
        ("version = true", r"version is no option"),
        ("threads = 3\nthreads = 4", "is no TOML"),
        ("\x00", "is no TOML"),
    ],
)
def test_mistakes_are_one_line(home: Path, text: str, error: str) -> None:
    (home / "config.toml").write_text(text)
    assert re.search(error, error_line(run("chat", "m", "-p", "x")))
    assert run("--version").exit_code == 0
    assert run("--help").exit_code == 0


def test_config_show(home: Path) -> None:
    assert "there is no such file" in run("config", "show").output
    (home / "config.toml").write_text(FILE)
    place = str(home / "config.toml")
    rows = json.loads(run("config", "show", "--json").output)["values"]
    assert {"option": "threads", "value": 6, "from": f'{place} [model."Qwen*.gguf".chat]'} in rows
    assert len(rows) == 10
    held = {row["option"]: row for row in json.loads(run("config", "show", "chat", "qwen.gguf", "--json").output)["values"]}
    assert held["threads"] == {"option": "threads", "value": 6, "from": f'{place} [model."Qwen*.gguf".chat]'}
    assert held["temp"]["from"] == f"{place} [chat]"
    assert held["top-k"] == {"option": "top-k", "value": 40, "from": "default"}
    assert re.search(r"threads +4 +\S+config\.toml \[chat\]", run("config", "show", "chat").output.replace("\n", ""))
    assert "there is no command" in error_line(run("config", "show", "nothing"))


def test_options_of_the_whole_program(loaded: list[FakeModel], home: Path, tmp_path: Path) -> None:
    (home / "config.toml").write_text(f'quiet = true\nlog-file = "{tmp_path / "log"}"')
    assert run("chat", "m", "-p", "x").stderr == ""
    assert "plan: all experts resident" in (tmp_path / "log").read_text()
    assert loaded


# ---- what is said ---------------------------------------------------------------------------------------------------------------------------


def test_quiet(loaded: list[FakeModel]) -> None:
    result = run("-q", "chat", "m", "-p", "hello")
    assert result.stdout == "you said hello\n"
    assert result.stderr == ""
    assert "give one of them" in error_line(run("-q", "-v", "chat", "m", "-p", "x"))
    assert len(loaded) == 1


def test_the_log_file_has_all_of_it(loaded: list[FakeModel], tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert run("--log-file", str(log), "chat", "m", "-p", "hello").stderr == "plan: all experts resident\n[status stop]\n"
    assert re.search(r"INFO +tinyserve_gguf\.cli: \[status stop\]", log.read_text())
    assert "cannot write" in error_line(run("--log-file", str(tmp_path / "no" / "log"), "chat", "m", "-p", "x"))
    assert not logging.getLogger("tinyserve_gguf").handlers  # none is left behind
    assert loaded


@pytest.fixture
def llama_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """`info` logs as llama.cpp does, warns, and fails."""
    import click

    @click.command()
    @click.argument("how")
    def info(how: str) -> None:
        for i in range(50):
            logging.getLogger("tinyserve_gguf.llama").log(logging.WARNING if how == "ours" else logging.ERROR, "line %d of llama.cpp", i)
        logging.getLogger("tinyserve_gguf.warm").warning("one of ours")
        if how != "well":
            raise ModelFileError("a bad file") if how == "file" else EngineError("it broke")

    monkeypatch.setitem(COMMANDS, "info", (lambda: info, ""))


@pytest.mark.usefixtures("llama_fails")
def test_llama_cpps_log_is_shown_when_it_fails() -> None:
    shown = run("info", "engine").stderr.splitlines()
    assert shown[0] == "one of ours"
    assert shown[1:41] == [f"llama.cpp: line {i} of llama.cpp" for i in range(10, 50)]
    assert shown[41:] == ["error: it broke"]
    assert run("info", "file").stderr == "one of ours\nerror: a bad file\n"  # the user's mistake: one line says it
    assert run("info", "ours").stderr == "one of ours\nerror: it broke\n"
    assert run("info", "well").stderr == "one of ours\n"
    assert run("-v", "info", "engine").stderr.count("line 49 of llama.cpp") == 1


@pytest.mark.usefixtures("llama_fails")
def test_llama_cpps_log_on_request(tmp_path: Path) -> None:
    assert run("-v", "info", "well").stderr.count("of llama.cpp\n") == 50
    run("--log-file", str(tmp_path / "log"), "info", "engine")
    log = (tmp_path / "log").read_text()
    assert log.count("of llama.cpp\n") == 50
    assert "ERROR   tinyserve_gguf.cli: it broke" in log


# ---- completion and versions ----------------------------------------------------------------------------------------------------------------


def completed(words: list[str], incomplete: str) -> list[tuple[str, str]]:
    found = ShellComplete(main, {}, "tinyserve-gguf", "_TINYSERVE_GGUF_COMPLETE").get_completions(words, incomplete)
    return [(item.type, item.value) for item in found]


def test_names_and_files_complete(home: Path) -> None:
    (home / "config.toml").write_text("nonsense = [")  # must not get in the way
    assert completed(["chat"], "gpt") == [("plain", "gpt-oss-20b"), ("plain", "gpt-oss-120b"), ("file", "gpt")]
    assert completed(["bench"], "./x") == [("file", "./x")]
    assert ("plain", "--no-warm") in completed(["chat"], "--no-w")
    assert ("plain", "verify") in completed([], "ver")
    assert ("plain", "lfru") in completed(["chat", "--policy"], "lf")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_of_completion(shell: str) -> None:
    script = run("completion", shell).output
    assert "_TINYSERVE_GGUF_COMPLETE" in script
    assert "tinyserve-gguf" in script
    assert "'ksh' is not one of" in error_line(run("completion", "ksh"))


def test_a_shell_gets_what_it_asks_for(tmp_path: Path) -> None:
    asked = environment(_TINYSERVE_GGUF_COMPLETE="bash_complete", COMP_WORDS="tinyserve-gguf info qwen3-n", COMP_CWORD="2")
    code = "from tinyserve_gguf.cli import main; main(prog_name='tinyserve-gguf')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=asked, timeout=60, check=True)
    assert done.stdout == "plain,qwen3-next-80b-a3b\nfile,qwen3-n\n"


def test_every_component_has_a_version() -> None:
    lines = dict(line.split(" ", 1) for line in run("--version").output.splitlines())
    assert {"tinyserve-gguf", "Python", "ggml", "shim", "llama-cpp-python", "numpy", "gguf", "cffi", "click", "rich", "huggingface-hub"} <= set(lines)
    assert lines["llama-cpp-python"] == "0.3.36"
    assert lines["ggml"] == "0.25.3"
    assert lines["shim"] == "for ggml 0.25.3"
