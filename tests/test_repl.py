"""The chat loop with a fake conversation: commands, several lines, Ctrl-C, the end of the input; and once on a real terminal."""

from __future__ import annotations

import io
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import FakeConversation
from processes import environment

from tinyserve_gguf.cli.interrupt import Interrupt
from tinyserve_gguf.cli.lines import KEPT, LineDropped, TerminalReader, history_file, pipe_reader
from tinyserve_gguf.cli.repl import HELP, Repl
from tinyserve_gguf.errors import ContextFullError, OptionError


class Scripted:
    """A reader that gives the lines one by one, raises the exceptions among them, then EOFError."""

    def __init__(self, *lines: str | type[BaseException]) -> None:
        self.rest = list(lines)
        self.prompts: list[str] = []

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        if not self.rest:
            raise EOFError
        line = self.rest.pop(0)
        if isinstance(line, str):
            return line
        raise line


def make(*lines: str | type[BaseException], interactive: bool = True, during: Callable[[], None] | None = None) -> tuple[Any, FakeConversation]:
    conversation = FakeConversation(during=during)
    sampling: Any = "sampling"
    repl = Repl(
        conversation,
        read=Scripted(*lines),
        out=io.StringIO(),
        err=io.StringIO(),
        max_tokens=9,
        sampling=sampling,
        stats_lines=lambda: ["hits 7 of 9"],
        interactive=interactive,
    )
    return repl, conversation


def out(repl: Any) -> str:
    return str(repl._out.getvalue())


def err(repl: Any) -> str:
    return str(repl._err.getvalue())


def test_turns_stream_to_out_and_status_to_err() -> None:
    repl, conversation = make("one", "", "  ", " two ", "/exit", "never")
    assert repl.run() is True
    assert conversation.asked == [("one", 9, "sampling"), ("two", 9, "sampling")]
    assert out(repl) == "you said one\nyou said two\n"
    assert err(repl).count("[status stop]") == len(repl.turns) == 2
    assert "\x1b" not in err(repl)  # no colours outside a terminal


def test_reply_that_ends_in_a_newline_gets_no_second_one() -> None:
    repl, _ = make()
    repl.answer("x\n")
    assert out(repl) == "you said x\n"


@pytest.mark.parametrize(("line", "told"), [("/stats", "hits 7 of 9"), ("/help", HELP), ("/?", HELP), ("/system", "no system prompt")])
def test_commands_that_only_tell(line: str, told: str) -> None:
    repl, conversation = make(line)
    assert repl.run() is True
    assert told in err(repl)
    assert not conversation.asked
    assert not out(repl)


@pytest.mark.parametrize("line", ["/exit", "/quit", "/bye"])
def test_exit_leaves_the_rest_unread(line: str) -> None:
    repl, conversation = make(line, "more")
    assert repl.run() is True
    assert not conversation.asked


@pytest.mark.parametrize("line", ["/reset", "/clear"])
def test_reset(line: str) -> None:
    repl, conversation = make("hi", line)
    repl.run()
    assert conversation.resets == 1


def test_system_sets_and_shows() -> None:
    repl, conversation = make("/system Speak  French.", "/system", "/system Two\\", "lines")
    repl.run()
    assert "Speak  French." in err(repl)
    assert conversation.messages == [{"role": "system", "content": "Two\nlines"}]


def test_save(tmp_path: Path) -> None:
    repl, _ = make("hi", f"/save {tmp_path}/my talk.json", f"/save {tmp_path}/none/x", "/save", "still here")
    repl.run()
    assert (tmp_path / "my talk.json").read_text() == "saved"
    assert "saved 2 messages" in err(repl)
    assert f"error: cannot write {tmp_path}/none/x" in err(repl)
    assert "needs the name of a file" in err(repl)
    assert out(repl).endswith("still here\n")


def test_failed_save_ends_a_script(tmp_path: Path) -> None:
    repl, _ = make(f"/save {tmp_path}/missing/x", interactive=False)
    with pytest.raises(OptionError, match="cannot write"):
        repl.run()


@pytest.mark.parametrize("line", ["/nope", "/resett", "/ reset", "/etc/passwd is what?"])
def test_unknown_command_is_not_sent(line: str) -> None:
    repl, conversation = make(line)
    repl.run()
    assert not conversation.asked
    assert "is no command" in err(repl)
    assert "/help" in err(repl)


@pytest.mark.parametrize(
    ("lines", "sent"),
    [
        (["a\\", "b\\", "c"], "a\nb\nc"),
        (["a\\"], "a"),
        (['"""', "a", "", "  b", '"""'], "a\n\n  b"),
        (['"""a', 'b"""'], "a\nb"),
        (['"""/reset"""'], "/reset"),
        (['"""', "/exit", "ends in \\", '"""'], "/exit\nends in \\"),
        (["pasted\nlines"], "pasted\nlines"),
    ],
)
def test_several_lines(lines: list[str], sent: str) -> None:
    repl, conversation = make(*lines)
    repl.run()
    assert [text for text, _, _ in conversation.asked] == [sent]
    assert repl._read.prompts[0] == "> "
    assert set(repl._read.prompts[1 : len(lines)]) <= {". "}


def test_unclosed_quotes_are_not_sent() -> None:
    repl, conversation = make('"""', "half")
    assert repl.run() is True
    assert not conversation.asked
    assert "not sent" in err(repl)
    with pytest.raises(OptionError):
        make('"""', "half", interactive=False)[0].run()


def test_empty_script_is_an_error() -> None:
    with pytest.raises(OptionError, match="no prompt"):
        make("", " ", interactive=False)[0].run()


def test_full_context_keeps_a_session_and_ends_a_script() -> None:
    repl, _ = make("FULL", "on")
    assert repl.run() is True
    assert "error: the prompt does not fit" in err(repl)
    assert out(repl) == "you said on\n"
    assert len(repl.turns) == 1
    with pytest.raises(ContextFullError):
        make("FULL", "on", interactive=False)[0].run()


def test_error_after_half_a_reply_begins_a_new_line() -> None:
    def fail() -> None:
        raise ContextFullError("full")

    repl, _ = make("x", during=fail)
    repl.run()
    assert out(repl) == "you \n"


def test_empty_reply_is_an_empty_line() -> None:
    class Silent(FakeConversation):
        def reply(self, *_: Any, **__: Any) -> Generator[str, None, None]:
            yield from ("", "")

    repl, _ = make("one", "two", interactive=False)
    repl._conversation = Silent()
    assert repl.run() is True
    assert out(repl) == "\n\n"


def test_reply_cut_by_the_context_says_what_to_do() -> None:
    repl, _ = make("LONG")
    repl.run()
    assert "/reset starts over" in err(repl)


# ---- Ctrl-C


def sigint_once() -> Callable[[], None]:
    signals = iter([signal.SIGINT])

    def during() -> None:
        for number in signals:
            signal.raise_signal(number)
            return

    return during


def test_interrupt_stops_the_reply_at_a_piece_and_keeps_the_session() -> None:
    handler = signal.getsignal(signal.SIGINT)
    repl, conversation = make("one", "two", during=sigint_once())
    assert repl.run() is True
    assert out(repl) == "you said \nyou said two\n"  # the signal came after "you "; the piece on its way is still shown
    assert [turn.finish for turn in repl.turns] == ["interrupted", "stop"]
    assert conversation.messages[1] == {"role": "assistant", "content": "you "}
    assert signal.getsignal(signal.SIGINT) is handler


def test_interrupt_before_the_first_piece_stops_at_once() -> None:
    class Prefilling(FakeConversation):
        def reply(self, text: str, max_tokens: int, sampling: Any) -> Generator[str, None, None]:
            if text == "long":
                signal.raise_signal(signal.SIGINT)
                pytest.fail("the signal was put off")
            yield from super().reply(text, max_tokens, sampling)

    repl, _ = make("long", "short")
    repl._conversation = Prefilling()
    assert repl.run() is True
    assert out(repl) == "\nyou said short\n"


def test_interrupted_script_stops() -> None:
    repl, conversation = make("one", "two", interactive=False, during=sigint_once())
    assert repl.run() is False
    assert [text for text, _, _ in conversation.asked] == ["one"]
    assert make(KeyboardInterrupt, interactive=False)[0].run() is False


def test_second_interrupt_at_an_empty_prompt_leaves() -> None:
    repl, conversation = make(KeyboardInterrupt, KeyboardInterrupt, "never")
    assert repl.run() is True
    assert "Ctrl-C again" in err(repl)
    assert not conversation.asked


def test_interrupts_with_something_between_do_not_leave() -> None:
    repl, _ = make(KeyboardInterrupt, "hi", KeyboardInterrupt, LineDropped, KeyboardInterrupt, "bye", LineDropped, LineDropped, "end")
    assert repl.run() is True
    assert out(repl) == "you said hi\nyou said bye\nyou said end\n"


def test_interrupt_drops_the_lines_before() -> None:
    repl, conversation = make("a\\", KeyboardInterrupt, '"""', "b", KeyboardInterrupt, "c")
    repl.run()
    assert [text for text, _, _ in conversation.asked] == []  # two in a row, with nothing sent between, leave
    repl, conversation = make("a\\", LineDropped, "c")
    repl.run()
    assert [text for text, _, _ in conversation.asked] == ["c"]


def test_interrupt_while_a_stopped_reply_ends_is_not_taken_for_one_at_the_prompt() -> None:
    class Closing(FakeConversation):
        def reply(self, text: str, max_tokens: int, sampling: Any) -> Generator[str, None, None]:
            try:
                yield from super().reply(text, max_tokens, sampling)
            finally:
                signal.raise_signal(signal.SIGINT)

    repl, _ = make("one", KeyboardInterrupt, "two")
    repl._conversation = Closing(during=sigint_once())
    assert repl.run() is True
    assert len(repl.turns) == 2


def test_second_signal_raises() -> None:
    with pytest.raises(KeyboardInterrupt), Interrupt("ask") as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        signal.raise_signal(signal.SIGINT)


def test_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupt("raise") as interrupt:
            signal.raise_signal(signal.SIGINT)
            assert not interrupt.requested
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


# ---- output on a terminal, and where lines come from


def test_reply_cannot_steer_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    text = "\x1b]52;c;AAAA\x07\x9b2Jplain\ttab\r"
    repl, _ = make()
    repl.answer(text)
    assert out(repl) == f"you said {text}\n"  # a file gets the reply as it is
    repl._out = Terminal()
    repl.answer(text)
    assert out(repl) == "you said ]52;c;AAAA2Jplain\ttab\n"


def test_pipe_reader() -> None:
    read = pipe_reader(io.BytesIO("eins\r\nzwei ü\n\ndrei".encode()))
    assert [read("> ") for _ in range(4)] == ["eins", "zwei ü", "", "drei"]
    with pytest.raises(EOFError):
        read("> ")
    with pytest.raises(OptionError, match=r"line 2 .* not UTF-8"):
        read = pipe_reader(io.BytesIO(b"ok\n\xff\n"))
        read(""), read("")


def test_history_is_kept_and_trimmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("readline")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = history_file()
    assert path.is_relative_to(tmp_path)
    entered = iter(["first", " ", "pasted\nblock", "\udcff"])
    monkeypatch.setattr("builtins.input", lambda _prompt: next(entered))
    reader = TerminalReader()
    assert [reader("> ") for _ in range(3)] == ["first", " ", "pasted\nblock"]
    with pytest.raises(OptionError, match="not UTF-8"):
        reader("> ")
    assert path.read_text() == "first\n"
    assert path.stat().st_mode & 0o077 == 0
    path.write_text("".join(f"{i}\n" for i in range(3 * KEPT)))
    TerminalReader()
    assert path.read_text().splitlines() == [str(i) for i in range(2 * KEPT, 3 * KEPT)]


def test_history_that_cannot_be_kept_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("readline")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("builtins.input", lambda _prompt: "line")
    assert TerminalReader()("> ") == "line"
    assert "no history is kept" in capsys.readouterr().err


class Pty:
    """The chat command with fakes, on a terminal of its own."""

    def __init__(self, home: Path) -> None:
        import fcntl
        import pty
        import termios

        self.fd, terminal = pty.openpty()

        def take_terminal() -> None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a test run in the background may hand SIGINT down as ignored
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("cli_fakes.py"))],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
            preexec_fn=take_terminal,
            env=environment(XDG_STATE_HOME=str(home), TERM="dumb"),
        )
        os.close(terminal)
        self.seen = ""

    def expect(self, pattern: str, seconds: float = 30) -> None:
        """Read until the output after the last match has the pattern."""
        end = time.monotonic() + seconds
        while not (match := re.search(pattern, self.seen)):
            ready, _, _ = select.select([self.fd], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"no {pattern!r} in {self.seen!r}"
            try:
                self.seen += os.read(self.fd, 4096).decode()
            except OSError:  # Linux's end of file on a pty
                pytest.fail(f"the chat ended without {pattern!r}: {self.seen}")
        self.seen = self.seen[match.end() :]

    def send(self, text: str) -> None:
        os.write(self.fd, text.encode())


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pty")
def test_on_a_terminal(tmp_path: Path) -> None:
    chat = Pty(tmp_path)
    try:
        chat.expect("plan: all experts resident")
        chat.expect("> ")
        chat.send("hello\n")
        chat.expect("you said hello\r\n.*status stop")
        chat.expect("> ")
        chat.send("wait\n")
        chat.expect("tick tick ")
        chat.send("\x03")
        chat.expect("status interrupted")
        chat.expect("> ")
        chat.send("half a line")
        chat.expect("half a line")
        chat.send("\x03")
        chat.expect("\r\n> ")
        chat.send("\x03")
        chat.expect("Ctrl-C again or Ctrl-D leaves")
        chat.expect("> ")
        chat.send("\x04")
        assert chat.process.wait(30) == 0
        history = tmp_path / "tinyserve-gguf" / "chat-history"
        assert history.read_text() == "hello\nwait\n"
    finally:
        chat.process.kill()
        chat.process.wait()
        os.close(chat.fd)
