"""The chat loop: entries in, replies and status out. It knows neither click's parsing nor how a model is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

import click

from tinyserve_gguf.cli.interrupt import Interrupt
from tinyserve_gguf.cli.lines import LineDropped
from tinyserve_gguf.errors import ContextFullError, OptionError

if TYPE_CHECKING:
    from tinyserve_gguf.sampling import Sampling
    from tinyserve_gguf.stats import ReplyStats

log = logging.getLogger("tinyserve_gguf.cli")
PROMPT = "> "
CONTINUED = ". "
QUOTES = '"""'
ALIASES = {"/quit": "/exit", "/bye": "/exit", "/clear": "/reset", "/?": "/help"}
HELP = """\
/reset          start a new conversation
/system TEXT    set the system prompt; without TEXT: show it
/stats          what the expert cache did so far
/save FILE      write the conversation to a file
/help           this text
/exit           leave (also Ctrl-D, or Ctrl-C twice)
A line that ends in \\ goes on in the next one. \"\"\" opens and closes a longer text. Ctrl-C stops a reply."""

# What a terminal would obey instead of show: a reply must not move its cursor or set its clipboard.
CONTROL = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class Conversation(Protocol):
    """What the loop needs of `tinyserve_gguf.chat.Conversation`."""

    messages: list[dict[str, str]]

    @property
    def last(self) -> ReplyStats | None: ...
    def reply(self, text: str, max_tokens: int, sampling: Sampling) -> Generator[str, None, None]: ...
    def reset(self) -> None: ...
    def set_system(self, text: str) -> None: ...
    def save(self, path: Path) -> None:
        """OptionError if it cannot be written."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What the user entered; `quoted` text is a message even where it begins with a slash."""

    text: str
    quoted: bool = False


class Repl:
    """Turns between a reader and a conversation.

    `read(prompt)` gives a line, raising EOFError at the end and KeyboardInterrupt on Ctrl-C. Replies go to `out` and nothing else does; all the
    rest goes to `err`. `turns` collects the stats of every reply. Not interactive (a script): errors and Ctrl-C end the run instead of being shown.
    """

    def __init__(
        self,
        conversation: Conversation,
        *,
        read: Callable[[str], str],
        out: TextIO,
        err: TextIO,
        max_tokens: int,
        sampling: Sampling,
        stats_lines: Callable[[], list[str]],
        notes: Callable[[], list[str]] = list,
        interactive: bool,
        quiet: bool = False,
    ) -> None:
        self.turns: list[ReplyStats] = []
        self._conversation = conversation
        self._read = read
        self._out = out
        self._err = err
        self._max_tokens = max_tokens
        self._sampling = sampling
        self._stats_lines = stats_lines
        self._notes = notes  # what the model has to say since the last call
        self._interactive = interactive
        self._quiet = quiet  # no status lines, no notes, no banner
        self._line_open = False  # whether `out` is in the middle of a line
        self._commands: dict[str, Callable[[str], None]] = {
            "/reset": self._reset,
            "/system": self._system,
            "/stats": self._stats,
            "/save": self._save,
            "/help": self._help,
        }

    def run(self) -> bool:
        """Serve entries until the user leaves or the input ends. False when Ctrl-C cut a script short. OptionError if the input was empty."""
        if self._interactive and not self._quiet:
            self._say("/help lists the commands, Ctrl-C stops a reply, Ctrl-D leaves")
        warned = False  # Ctrl-C at an empty prompt: the second one leaves
        served = False
        while True:
            try:
                entry = self._read_entry()
                if not entry.text.strip():
                    continue
                served, warned = True, False
                if not entry.quoted and entry.text.startswith("/"):
                    if not self._command(entry.text):
                        return True
                elif not self.answer(entry.text) and not self._interactive:
                    return False
            except EOFError:
                if not served and not self._interactive:
                    raise OptionError("the standard input holds no prompt: write one turn a line, or give -p TEXT") from None
                if self._interactive:
                    self._say("")  # the shell's prompt shall not follow ours on one line
                return True
            except KeyboardInterrupt as interrupt:
                if not self._interactive:
                    return False
                if warned and not isinstance(interrupt, LineDropped):
                    return True
                warned = not isinstance(interrupt, LineDropped)
                self._say("\nCtrl-C again or Ctrl-D leaves" if warned else "")
            except (ContextFullError, OptionError) as error:
                if not self._interactive:
                    raise
                self._say(f"error: {error}")

    def answer(self, text: str) -> bool:
        """Stream the reply to `text`. False when Ctrl-C stopped it; what was written so far stays in the conversation."""
        before = self._conversation.last
        with Interrupt("raise") as interrupt:
            reply = self._conversation.reply(text, self._max_tokens, self._sampling)
            try:
                self._stream(reply, interrupt)
            except KeyboardInterrupt:
                self._line_open = True  # the terminal has written ^C
            finally:
                interrupt.mode = "hold"
                reply.close()
                if self._line_open:
                    self._write("\n")
            self._finish(before)
        return not interrupt.requested

    def _stream(self, reply: Iterator[str], interrupt: Interrupt) -> None:
        written = False
        for piece in reply:
            interrupt.mode = "ask"  # pieces come often from here on, so stop between two; before the first, reading the prompt may take minutes
            self._write(piece)
            written = written or piece != ""
            if interrupt.requested:
                break
        self._line_open = self._line_open or not written  # an empty reply is an empty line

    def _finish(self, before: ReplyStats | None) -> None:
        stats = self._conversation.last
        if stats is None or stats is before:  # stopped before there was anything to count
            return
        self.turns.append(stats)
        for line in [stats.line(), *self._notes()]:
            log.info("%s", line)
            if not self._quiet:
                self._say(line)
        if stats.finish == "context":
            self._say("the context is full: /reset starts over, a larger -c makes room, --window goes on without end")

    # ---- input

    def _read_entry(self) -> Entry:
        line = self._read(PROMPT)
        if line.lstrip().startswith(QUOTES):
            return Entry(self._read_quoted(line.lstrip()[len(QUOTES) :]), quoted=True)
        while line.endswith("\\"):
            try:
                more = self._read(CONTINUED)
            except EOFError:
                more = ""
            line = line[:-1] + "\n" + more
        return Entry(line.strip())

    def _read_quoted(self, text: str) -> str:
        try:
            while not text.rstrip().endswith(QUOTES):
                text += "\n" + self._read(CONTINUED)
        except EOFError:
            raise OptionError(f"the text after {QUOTES} has no closing {QUOTES}; it was not sent") from None
        return text.rstrip()[: -len(QUOTES)].strip("\n")

    # ---- output

    def _write(self, text: str) -> None:
        self._out.write(text.translate(CONTROL) if self._out.isatty() else text)
        self._out.flush()
        if text:
            self._line_open = not text.endswith("\n")

    def _say(self, text: str) -> None:
        click.echo(click.style(text, dim=True), file=self._err)  # click drops the style unless this is a terminal

    # ---- commands

    def _command(self, line: str) -> bool:
        """Run a slash command. False if it ends the chat."""
        name, *argument = line.split(None, 1)
        name = ALIASES.get(name, name)
        if name == "/exit":
            return False
        command = self._commands.get(name)
        if command is None:
            self._say(f"{name} is no command and was not sent; /help lists them ({QUOTES} before and after sends a text as it is)")
        else:
            command(argument[0] if argument else "")
        return True

    def _reset(self, _argument: str) -> None:
        self._conversation.reset()
        self._say("new conversation")

    def _system(self, text: str) -> None:
        if text:
            self._conversation.set_system(text)
            self._say("system prompt set")
        else:
            current = [m["content"] for m in self._conversation.messages if m["role"] == "system"]
            self._say("\n".join(current) or "no system prompt")

    def _stats(self, _argument: str) -> None:
        for line in self._stats_lines():
            self._say(line)

    def _save(self, name: str) -> None:
        if not name:
            raise OptionError("/save needs the name of a file")
        try:
            path = Path(name).expanduser()
        except RuntimeError as error:  # no such user
            raise OptionError(f"/save {name}: {error}") from None
        self._conversation.save(path)
        self._say(f"saved {len(self._conversation.messages)} messages to {path}")

    def _help(self, _argument: str) -> None:
        self._say(HELP)
