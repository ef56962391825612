"""The command line with a fake model: options, bad values, exit codes, what goes to which stream, the error boundary."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from cli_fakes import FakeConversation, FakeModel, fake_modules
from click.testing import CliRunner, Result
from processes import environment, error_line

from tinyserve_gguf import Sampling, errors
from tinyserve_gguf.cli import COMMANDS, main
from tinyserve_gguf.cli.chat import chat as chat_command
from tinyserve_gguf.cli.options import SAMPLING

conversations: list[FakeConversation] = []


class Recorded(FakeConversation):
    def __init__(self, model: object, system: str | None, **options: Any) -> None:
        super().__init__(model, system, **options)
        conversations.append(self)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[FakeModel]:
    """The models that the fake `load` made."""
    conversations.clear()
    modules, models = fake_modules(Recorded)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return models


def run(*arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(main, list(arguments), input=stdin, prog_name="tinyserve-gguf")


# ---- one answer


def test_reply_alone_on_stdout(loaded: list[FakeModel]) -> None:
    result = run("chat", "m.gguf", "-p", "hello")
    assert result.exit_code == 0
    assert result.stdout == "you said hello\n"
    assert result.stderr == "plan: all experts resident\n[status stop]\n"
    assert loaded[0].closed


BUDGET = ("vram", "vram_reserve", "ram")
CONTEXT = {"n_ctx": None, "window": None, "sinks": None, "kv_type": "f16", "kv_type_v": None, "flash_attn": "auto"}


def test_defaults(loaded: list[FakeModel]) -> None:
    run("chat", "m.gguf", "-p", "x")
    assert loaded[0].path == "m.gguf"
    where = {"expert_cache": "auto", "policy": "lfru", "device": "auto", "n_ubatch": None, "n_threads": None} | dict.fromkeys(BUDGET)
    where |= {"tensor_split": None, "split_mode": "layer", "lora": (), "lora_scaled": ()}
    assert loaded[0].options == CONTEXT | where | {"miss": "fetch", "miss_admit": None, "miss_threads": None, "warm": True}
    ((_, max_tokens, sampling),) = conversations[0].asked
    assert max_tokens == -1
    assert sampling == Sampling()


def test_sampling_defaults_in_help_are_those_of_sampling() -> None:
    shown = {p.name: p.default for p in chat_command.params if p.name in SAMPLING}
    assert shown == {f.name: f.default for f in dataclasses.fields(Sampling) if f.name in SAMPLING}


def test_every_option_arrives(loaded: list[FakeModel]) -> None:
    where = "-c 99 -b 64 -t 3 --expert-cache 25% --policy slru --device C0,C1 --tensor-split 3,1 --kv-type q8_0 --kv-type-v q4_0 --flash-attn on"
    how = "--miss cpu --miss-admit 4 --miss-threads 2 --vram 8 --vram-reserve 0.5 --ram 24 --no-warm"
    how += " --lora a,b --lora c --lora-scaled d:0.5,C:/e:-1"
    what = "-p x -n 7 --system S --temp 0 --top-k 5 --top-p 0.5 --min-p 0.1 --repeat-penalty 1.2 --seed 42"
    run("chat", "m", *where.split(), *how.split(), *what.split())
    context = {**CONTEXT, "n_ctx": 99, "kv_type": "q8_0", "kv_type_v": "q4_0", "flash_attn": "on"}
    place = {"expert_cache": "25%", "policy": "slru", "device": "C0,C1", "n_ubatch": 64, "n_threads": 3}
    place |= {"tensor_split": (3.0, 1.0), "split_mode": "layer"}
    place |= {"vram": 8.0, "vram_reserve": 0.5, "ram": 24.0}
    place |= {"lora": ("a", "b", "c"), "lora_scaled": (("d", 0.5), ("C:/e", -1.0))}
    assert loaded[0].options == context | place | {"miss": "cpu", "miss_admit": 4, "miss_threads": 2, "warm": False}
    assert conversations[0].asked == [("x", 7, Sampling(temp=0, top_k=5, top_p=0.5, min_p=0.1, repeat_penalty=1.2, seed=42))]
    assert conversations[0].messages[0] == {"role": "system", "content": "S"}


@pytest.mark.parametrize(
    ("spelling", "name", "value"),
    [
        ("--predict 4", None, 4),
        ("-n -1", None, -1),
        ("--ctx-size 4", "n_ctx", 4),
        ("--ubatch 4", "n_ubatch", 4),
        ("-ub 4", "n_ubatch", 4),
        ("--ubatch-size 4", "n_ubatch", 4),
        ("--threads 4", "n_threads", 4),
        ("--expert-cache all", "expert_cache", "all"),
        ("--expert-cache 12", "expert_cache", "12"),
        ("--expert-cache 6GiB", "expert_cache", "6GiB"),
        ("--device CUDA0", "device", "CUDA0"),
        ("--split-mode tensor", "split_mode", "tensor"),
        ("--window", "window", 2048),
        ("--window -n 4", "window", 2048),
        ("--window=64", "window", 64),
        ("--window 64 --sinks 0", "sinks", 0),
        ("--kv-type iq4_nl", "kv_type", "iq4_nl"),
        ("--kv-type-v bf16", "kv_type_v", "bf16"),
        ("--flash-attn off", "flash_attn", "off"),
    ],
)
def test_spellings(loaded: list[FakeModel], spelling: str, name: str | None, value: object) -> None:
    assert run("chat", "m", "-p", "x", *spelling.split()).exit_code == 0
    assert (loaded[0].options[name] if name else conversations[0].asked[0][1]) == value


@pytest.mark.usefixtures("loaded")
def test_keep_system_says_what_stays() -> None:
    result = run("chat", "m", "-p", "x", "--window", "--system", "S", "--keep-system")
    assert conversations[0].keep_system
    assert "system prompt: stays in the window, 12 sinks\n" in result.stderr
    run("chat", "m", "-p", "x", "--window", "--system", "S")
    assert not conversations[1].keep_system


@pytest.mark.usefixtures("loaded")
def test_prompt_from_stdin() -> None:
    result = run("chat", "m", "-p", "-", stdin="two\nlines ü\n")
    assert result.stdout == "you said two\nlines ü\n"


# ---- scripts


@pytest.mark.usefixtures("loaded")
def test_lines_of_stdin_are_turns() -> None:
    result = run("chat", "m", stdin="one\n\ntwo\n/stats\n/exit\nnever\n")
    assert result.exit_code == 0
    assert result.stdout == "you said one\nyou said two\n"
    assert "hits 7 of 9" in result.stderr
    assert "> " not in result.stderr


# ---- bad values: one line, exit code 2, no model loaded


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ("", "MODEL"),
        ("m --temp -1", "--temp"),
        ("m --temp nan", "--temp"),
        ("m --temp inf", "--temp"),
        ("m --temp warm", "--temp"),
        ("m --top-k -1", "--top-k"),
        ("m --top-k 4294967296", "--top-k"),
        ("m --top-p 0", "--top-p"),
        ("m --top-p 1.1", "--top-p"),
        ("m --min-p -0.1", "--min-p"),
        ("m --repeat-penalty 0", "--repeat-penalty"),
        ("m --seed -2", "--seed"),
        ("m --seed 4294967296", "--seed"),
        ("m -n 0", "-n"),
        ("m -n -2", "-n"),
        ("m -c -1", "-c"),
        ("m -c 4k", "-c"),
        ("m -b 0", "-b"),
        ("m -b 70000", "-b"),
        ("m -t 0", "-t"),
        ("m -t 513", "-t"),
        ("m --policy mru", "lfru"),
        ("m --expert-cache some", "--expert-cache"),
        ("m --expert-cache -3", "--expert-cache"),
        ("m --device CPU,,CUDA0", "--device"),
        ("m --tensor-split 3,x", "--tensor-split"),
        ("m --window 1", "--window"),
        ("--window m", "write --window after MODEL, or --window=N"),
        ("m --sinks -1", "--sinks"),
        ("m --kv-type q6_k", "iq4_nl"),
        ("m --kv-type-v Q8_0x", "--kv-type-v"),
        ("m --flash-attn yes", "auto"),
        ("m --system S --keep-system", "--keep-system needs --window"),
        ("m -p x --window --keep-system", "give --system TEXT"),
        ("m --nope", "--nope"),
        ("m more", "more"),
        ("m -p", "-p"),
    ],
)
def test_impossible_values(loaded: list[FakeModel], arguments: str, names: str) -> None:
    assert names in error_line(run("chat", *arguments.split(), stdin="x\n"))
    assert not loaded


def test_empty_values(loaded: list[FakeModel]) -> None:
    for option in ("--expert-cache", "--device", "--policy"):
        assert option in error_line(run("chat", "m", "-p", "x", option, ""))
    for prompt in ("", "  \n"):
        assert "prompt is empty" in error_line(run("chat", "m", "-p", prompt))
    assert "prompt is empty" in error_line(run("chat", "m", "-p", "-", stdin="\n"))
    assert not loaded


def test_text_that_is_not_utf8(loaded: list[FakeModel]) -> None:
    for arguments in (("-p", "\udcff"), ("-p", "x", "--system", "\udcff")):
        assert "not UTF-8" in error_line(run("chat", "m", *arguments))
    assert "not UTF-8" in error_line(run("chat", "m", "-p", "-", stdin=b"\xff\xfe"))
    assert not loaded


def test_unknown_command() -> None:
    assert "nope" in error_line(run("nope"))


# ---- --stats-json


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.usefixtures("loaded")
def test_stats_json(tmp_path: Path) -> None:
    path = tmp_path / "stats.json"
    assert run("chat", "m.gguf", "--stats-json", str(path), stdin="one\ntwo\n").exit_code == 0
    found = json.loads(path.read_text())
    assert found["model"] == "m.gguf"
    assert found["stats"] == {"hits": 7}
    assert [turn["finish"] for turn in found["turns"]] == ["stop", "stop"]
    assert found["turns"][0]["hit_rate"] is None
    assert found["turns"][0]["prefill_rate"] == 10.0
    assert names(tmp_path) == ["stats.json"]


def test_stats_json_is_refused_before_the_load(loaded: list[FakeModel], tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "x", Path("/dev/null")):
        assert str(path) in error_line(run("chat", "m", "-p", "x", "--stats-json", str(path)))
    assert not loaded
    assert names(tmp_path) == []
    assert Path("/dev/null").is_char_device()


# ---- the error boundary


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Makes the command `info` fail with an error."""

    def fail_with(error: BaseException) -> None:
        @click.command()
        def info() -> None:
            raise error

        monkeypatch.setitem(COMMANDS, "info", (lambda: info, ""))

    return fail_with


@pytest.mark.parametrize("kind", [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.TinyserveError)])
def test_every_error_of_ours_is_one_line(kind: type[Exception], failing: Callable[[BaseException], None]) -> None:
    failing(kind("it broke:\n  mend it"))
    assert error_line(run("info")) == "error: it broke: mend it\n"


def test_interrupt_is_130_and_quiet(failing: Callable[[BaseException], None]) -> None:
    failing(KeyboardInterrupt())
    result = run("info")
    assert result.exit_code == 130
    assert result.output.strip() == ""


def test_a_bug_is_not_hidden(failing: Callable[[BaseException], None]) -> None:
    failing(ZeroDivisionError())
    assert isinstance(run("info").exception, ZeroDivisionError)


def test_interrupted_answer_is_130_and_still_writes_stats(loaded: list[FakeModel], tmp_path: Path) -> None:

    class Interrupted(FakeConversation):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options, during=lambda: signal.raise_signal(signal.SIGINT))

    vars(sys.modules["tinyserve_gguf.chat"])["Conversation"] = Interrupted
    result = run("chat", "m", "-p", "x", "--stats-json", str(tmp_path / "s"))
    assert result.exit_code == 130
    assert json.loads((tmp_path / "s").read_text())["turns"][0]["finish"] == "interrupted"
    assert loaded[0].closed


def test_interrupt_during_the_load_abandons_it(monkeypatch: pytest.MonkeyPatch) -> None:
    modules, _ = fake_modules()

    def load(_path: str, *, progress: Callable[[float], bool], **_: Any) -> None:
        assert progress(0.1)
        signal.raise_signal(signal.SIGINT)
        assert not progress(0.2)
        raise errors.ModelFileError("llama.cpp cannot load it")

    vars(modules["tinyserve_gguf.model"])["load"] = load
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    result = run("chat", "m", "-p", "x")
    assert result.exit_code == 130
    assert result.output.strip() == ""


# ---- as a process


def process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, **options}
    return subprocess.run([sys.executable, *arguments], stderr=subprocess.PIPE, text=True, timeout=60, env=environment(), check=False, **options)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_loads_no_library(command: str) -> None:
    code = """if True:
        import sys
        from tinyserve_gguf.cli import main
        try:
            main(sys.argv[1:])
        except SystemExit as error:
            assert error.code == 0
        print(*{"llama_cpp", "cffi", "numpy", "gguf", "rich", "jinja2", "readline", "tinyserve_gguf._shim"} & set(sys.modules), file=sys.stderr)
    """
    done = process("-c", code, command, "--help")
    assert done.stdout.startswith("Usage: ")
    assert set(done.stderr.split()) <= ({"rich"} if command in ("info", "demo", "doctor") else set())  # which print with it; no native code


def test_help_and_version() -> None:
    assert run().output == run("--help").output
    for name in COMMANDS:
        assert f"\n  {name}  " in run("--help").output
        assert run(name, "--help").exit_code == 0
    assert "llama-cpp-python 0.3." in run("--version").output


def test_python_m() -> None:
    done = process("-m", "tinyserve_gguf", "chat", "m", "--temp", "-1")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="pipes end differently")
def test_broken_pipe_is_quiet() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer) as closed:
        done = process(str(Path(__file__).with_name("cli_fakes.py")), "-p", "hello", stdout=closed)
    assert done.stderr == "plan: all experts resident\n"
