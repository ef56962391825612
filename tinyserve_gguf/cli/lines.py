"""Where the lines of a chat come from: a terminal with line editing and a history, or a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

import click

from tinyserve_gguf.errors import OptionError
from tinyserve_gguf.user_files import state_dir

KEPT = 1000  # lines of history offered again


class LineDropped(KeyboardInterrupt):
    """Ctrl-C on a line that already held text."""


def utf8(text: str, what: str) -> str:
    """`text` itself, or OptionError when it came from bytes that are not UTF-8 (they arrive as lone surrogates)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise OptionError(f"{what} is not UTF-8 text") from None
    return text


def decoded(raw: bytes, what: str) -> str:
    """`raw` as text, or OptionError when it is not UTF-8."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise OptionError(f"{what} is not UTF-8 text") from None


def pipe_reader(stream: BinaryIO) -> Callable[[str], str]:
    """A reader that gives one line of the stream a call, without its line end, and raises EOFError after the last. It shows no prompt."""

    numbered = enumerate(stream, 1)

    def read(_prompt: str) -> str:
        for number, line in numbered:
            return decoded(line, f"line {number} of the standard input").rstrip("\r\n")
        raise EOFError

    return read


def history_file() -> Path:
    """Where the chat history lies: under $XDG_STATE_HOME if that is an absolute path, else ~/.local/state. OptionError without a home."""
    return state_dir() / "chat-history"


class TerminalReader:
    """Reads lines with readline where Python has it (not on Windows, whose console edits lines itself), and keeps a history file.

    The file is ours, plain lines and append only: GNU readline and libedit cannot read each other's. Trouble with it is said once; the chat goes on.
    """

    def __init__(self) -> None:
        self._history: Path | None = None
        self._readline: ModuleType | None = None
        try:
            import readline
        except ImportError:
            return
        self._readline = readline
        try:
            self._history = history_file()
            self._load_history(self._history, readline)
        except (OSError, OptionError) as error:
            self._give_up(error)

    def __call__(self, prompt: str) -> str:
        """One line. EOFError on Ctrl-D, KeyboardInterrupt on Ctrl-C (LineDropped if the line held text), OptionError if it is not UTF-8."""
        if not sys.stdout.isatty():  # input() would write the prompt into the redirected output
            click.echo(prompt, nl=False, err=True)
            prompt = ""
        try:
            line = utf8(input(prompt), "that line")
        except UnicodeDecodeError:
            raise OptionError("that line is not UTF-8 text") from None
        except KeyboardInterrupt:
            if self._readline and self._readline.get_line_buffer():
                raise LineDropped from None
            raise
        self._remember(line)
        return line

    def _load_history(self, path: Path, readline: ModuleType) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        lines = path.read_text("utf-8", "replace").splitlines()
        for line in lines[-KEPT:]:
            readline.add_history(line)
        if len(lines) > 2 * KEPT:
            path.write_text("\n".join(lines[-KEPT:]) + "\n", "utf-8")

    def _remember(self, line: str) -> None:
        if self._history and line.strip() and "\n" not in line:  # a pasted block is one entry, and the file has one entry a line
            try:
                with self._history.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._history = None
        click.echo(f"no history is kept: {error}", err=True)
