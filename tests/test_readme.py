"""The README tells the truth: its commands and flags exist, its tree is the tree, its Python runs."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from tinyserve_gguf.cli import COMMANDS, main
from tinyserve_gguf.cli.repl import HELP

ModelFile = Callable[..., Path]

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
FOREIGN_FLAGS = {"-m", "--n-cpu-moe", "--no-binary", "--force-reinstall", "--no-cache-dir"}  # of python, llama.cpp and pip
FOREIGN_PROGRAMS = {"curl", "git", "ollama", "python3", ".venv/bin/pip"}
SCRIPTS = (
    "scripts/fuzz",
    "scripts/admission-gain",
    "scripts/gpu-check",
    "scripts/gpu-kernels",
    "scripts/gpu-miss",
    "scripts/gpu-plan",
    "scripts/proxy-cost",
    "scripts/make_model.py",
    "scripts/test",
    "scripts/verify-all",
    "scripts/window-quality",
)
OPTION = re.compile(r"(?<![\w-])--?[a-zA-Z][\w-]*")

FENCES = [(match[1] is not None, match[2], match[3]) for match in re.finditer(r"(<!-- runnable -->\n)?```(\w+)\n(.*?)```", README, re.DOTALL)]
PROSE = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
SNIPPETS = [(runnable, text) for runnable, language, text in FENCES if language == "python"]
SPANS = re.findall(r"`([^`\n]+)`", PROSE)


# ---- commands and flags ---------------------------------------------------------------------------------------------------------------------


def defined(help_text: str) -> set[str]:
    """The options that a `--help` output lists, not those that it only mentions."""
    return {name for line in re.findall(r"^  (-\S.*?)(?:  |$)", help_text, re.MULTILINE) for name in OPTION.findall(line)}


@cache
def command_options(name: str) -> set[str]:
    command = COMMANDS[name][0]() if name else main
    return defined(command.get_help(click.Context(command, info_name=name)))


@cache
def script_options(script: str) -> set[str]:
    """Of a script in Python what it declares to argparse and shows in its help; of one in bash what its second line names."""
    text = (ROOT / script).read_text("utf-8")
    if "python" not in text.splitlines()[0]:
        return set(OPTION.findall(text.splitlines()[1]))
    declared = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_argument")]
    shown = [call for call in declared if not any(ast.unparse(word.value) == "argparse.SUPPRESS" for word in call.keywords)]
    return {name for call in shown for argument in call.args if (name := ast.literal_eval(argument)).startswith("-")}


def calls(line: str) -> Iterator[list[str]]:
    """The words of each program that a line of shell runs."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, "|"]:
        if word != "|":
            words.append(word)
        elif words:
            yield words[: words.index(">")] if ">" in words else words
            words = []


def check_call(words: list[str]) -> None:
    """The program exists, and so do its flags. Arguments of our own command line are parsed by it, values and all."""
    if words[:3] == ["python", "-m", "tinyserve_gguf"]:
        words = ["tinyserve-gguf", *words[3:]]
    if words[0] in ("python", ".venv/bin/python"):
        words = words[1:]
    if words[0] == "scripts/demo":
        words = ["tinyserve-gguf", "chat", "demo.gguf", *words[1:]]
    if words[0] == "tinyserve-gguf":
        assert words[1] in COMMANDS, f"there is no command {words[1]}"
        COMMANDS[words[1]][0]().make_context(words[1], words[2:])
    elif words[0].startswith("scripts/"):
        assert (ROOT / words[0]).is_file(), f"there is no {words[0]}"
        assert {word for word in words[1:] if word.startswith("--")} <= script_options(words[0]), words
    else:
        assert words[0] in FOREIGN_PROGRAMS or words[0].startswith("CMAKE_ARGS="), f"what is {words[0]}?"


@pytest.mark.parametrize("line", [line for _, language, text in FENCES if language == "sh" for line in text.splitlines() if line])
def test_shell_lines(line: str) -> None:
    for words in calls(line):
        check_call(words)


@pytest.mark.parametrize("span", dict.fromkeys(span for span in SPANS if re.match(r"(scripts/|tinyserve-gguf |python )", span)))
def test_calls_in_the_text(span: str) -> None:
    check_call([word.replace("COMMAND", "demo") for word in shlex.split(span)])


def test_flags_in_the_text() -> None:
    known = set().union(*map(command_options, ["", *COMMANDS]), *map(script_options, SCRIPTS), FOREIGN_FLAGS)
    named = {flag for span in SPANS for flag in OPTION.findall(span)}
    assert len(named) > 30
    assert named <= known


def section(command: str) -> str:
    found = re.search(rf"^### `{command}`\n(.*?)^##", README, re.MULTILINE | re.DOTALL)
    assert found, f"the README has no section on {command}"
    return found[1]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_section_names_every_option_of_its_command(command: str) -> None:
    """And none of another."""
    named = {flag for span in re.findall(r"`([^`\n]+)`", section(command)) if not span.startswith("pip ") for flag in OPTION.findall(span)}
    assert named - FOREIGN_FLAGS == command_options(command) - {"-h", "--help"}


def test_no_other_command_is_described() -> None:
    assert re.findall(r"^### `([\w-]+)`$", README, re.MULTILINE) == list(COMMANDS)


def test_slash_commands() -> None:
    named = {match[0] for span in SPANS if (match := re.match(r"/[a-z]+", span))}
    assert named == set(re.findall(r"^/[a-z]+", HELP, re.MULTILINE))


def test_results_have_the_columns_of_gpu_check() -> None:
    source = ast.parse((ROOT / "scripts" / "gpu-check").read_text("utf-8"))
    values = [node.value for node in source.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "HEAD"]
    assert f"<!-- results -->\n| {' | '.join(ast.literal_eval(values[0]))} |\n" in README


# ---- the tree -------------------------------------------------------------------------------------------------------------------------------


def tree() -> dict[str, str]:
    """Path to what the tree says of it; folders end with a slash."""
    block = README.split("## The tree\n", 1)[1].split("```text\n", 1)[1].split("```", 1)[0]
    found: dict[str, str] = {}
    folders: list[str] = []
    for line in block.splitlines():
        indent, name, text = re.fullmatch(r"( *)(\S+) {2,}(\S.*)", line).groups()  # type: ignore[union-attr]
        del folders[len(indent) // 2 :]
        path = "".join([*folders, name])
        assert path not in found, f"{path} is there twice"
        found[path] = text
        if name.endswith("/"):
            folders.append(name)
    return found


def test_every_path_of_the_tree_exists() -> None:
    for path in tree():
        assert (ROOT / path).is_dir() if path.endswith("/") else (ROOT / path).is_file(), path


def test_every_tracked_path_is_in_the_tree() -> None:
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout: nothing says which files belong to it")
    files = [path for path in listed.stdout.split("\0") if path and (ROOT / path).exists()]
    folders = {f"{folder.as_posix()}/" for path in files for folder in Path(path).parents if folder != Path()}
    assert {*files, *folders} - set(tree()) == set()


# ---- Python ---------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [text for _, text in SNIPPETS])
def test_snippets_compile(text: str) -> None:
    compile(text, "README.md", "exec")


@pytest.mark.filterwarnings("ignore:`langchain-community` is being sunset:DeprecationWarning")
@pytest.mark.parametrize("text", [text for runnable, text in SNIPPETS if runnable])
def test_snippets_run(text: str, model_file: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a synthetic model, whose text is noise: what counts is that every line works."""
    (tmp_path / "model.gguf").symlink_to(model_file("qwen3moe"))
    monkeypatch.chdir(tmp_path)
    exec(compile(text, "README.md", "exec"), {"__name__": "__main__"})
    out = capsys.readouterr().out
    assert "qwen3moe" in out
    assert "hit rate" in out or "decode" in out
