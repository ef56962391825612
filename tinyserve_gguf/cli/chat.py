"""`chat MODEL`: talk to a model in the terminal, answer one prompt, or answer a script of turns."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from tinyserve_gguf.cli.interrupt import Interrupt
from tinyserve_gguf.cli.lines import TerminalReader, decoded, pipe_reader, utf8
from tinyserve_gguf.cli.model_argument import model_argument
from tinyserve_gguf.cli.options import placement_options, predict_option, sampling_options, take_sampling
from tinyserve_gguf.cli.output import is_quiet, say
from tinyserve_gguf.cli.repl import CONTROL, Repl
from tinyserve_gguf.cli.report import as_json
from tinyserve_gguf.errors import EXIT_BAD_INPUT, OptionError, TinyserveError
from tinyserve_gguf.outfile import OutputFile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tinyserve_gguf.model import Model

EPILOG = """\b
Examples:
  chat model.gguf                                  talk to it; /help lists the commands
  chat gpt-oss-20b                                 a known model, from a cache or the hub
  chat -hf unsloth/Qwen3.6-35B-A3B-GGUF:UD-Q4_K_M  any repository of the hub
  chat model.gguf -p "Name a river." --temp 0      one answer, on stdout alone
  git diff | chat model.gguf -p - > review.txt     the prompt from stdin
  chat model.gguf < turns.txt                      a script: every line is a turn
  chat model.gguf --expert-cache 6GiB -c 8192      how much of the device to use
  chat model.gguf --window --kv-type q8_0          without end, in 2,048 tokens of context
"""


@click.command(epilog=EPILOG)
@model_argument()
@click.option("-p", "--prompt", metavar="TEXT", help="Answer TEXT once and leave; - reads it from stdin.")
@click.option("--system", metavar="TEXT", help="System prompt.")
@click.option("--keep-system", is_flag=True, help="With --window: the system prompt never leaves, it counts as sinks.")
@predict_option
@placement_options
@sampling_options
@click.option(
    "--stats-json", type=click.Path(path_type=Path), metavar="FILE", help="Write the stats of every reply and of the model to FILE at the end."
)
def chat(model: str, prompt: str | None, system: str | None, keep_system: bool, n_predict: int, stats_json: Path | None, **options: Any) -> None:
    """Chat with MODEL: a GGUF file, or a name that `models` lists.

    Replies go to stdout, everything else to stderr. Without -p, and with stdin not a terminal, every line of stdin is one turn.
    """
    sampling = take_sampling(options)
    if prompt is not None:
        prompt = read_prompt(prompt)
    if system is not None:
        utf8(system, "--system")
    if keep_system and options["window"] is None:
        raise OptionError("--keep-system needs --window: without one nothing leaves the context")
    if keep_system and prompt is not None and not system:
        raise OptionError("--keep-system has no system prompt to keep: give --system TEXT")
    stats_file = OutputFile(stats_json, "--stats-json") if stats_json else None
    interactive = prompt is None and sys.stdin is not None and sys.stdin.isatty()
    read = no_lines if prompt else TerminalReader() if interactive else pipe_reader(standard_input())
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without the character shows ?, instead of an error in the middle of a reply
    with load_shown(model, options) as loaded:
        from tinyserve_gguf.chat import Conversation

        with abort_shown(model):
            conversation = Conversation(loaded, system, keep_system=keep_system)
        if keep_system:
            say(f"system prompt: stays in the window, {conversation.n_sinks} sinks")
        if sys.stderr is not None and sys.stderr.isatty():
            conversation.on_thought = show_thought
        repl = Repl(
            conversation,
            read=read,
            out=sys.stdout,
            err=sys.stderr,
            max_tokens=n_predict,
            sampling=sampling,
            stats_lines=lambda: loaded.stats().lines(),
            notes=loaded.take_notes,
            interactive=interactive,
            quiet=is_quiet(),
        )
        finished = repl.answer(prompt) if prompt else repl.run()
        if stats_file:
            stats_file.write_text(as_json(model, repl.turns, loaded.stats()))
    if not finished:
        raise KeyboardInterrupt


def show_thought(text: str) -> None:
    """What a reasoning model says to itself, dim: a reader may watch it, a pipe gets the answer alone."""
    click.secho(text.translate(CONTROL), dim=True, nl=False, err=True)


def read_prompt(given: str) -> str:
    """The text of -p, from stdin if it is "-". OptionError if it is empty."""
    text = decoded(standard_input().read(), "the prompt on stdin").rstrip("\r\n") if given == "-" else utf8(given, "-p")
    if not text.strip():
        raise OptionError("the prompt is empty: give -p TEXT, or -p - with text on stdin")
    return text


def standard_input() -> BinaryIO:
    """Stdin as bytes."""
    if sys.stdin is None:  # Python's way to say that file 0 is closed
        raise OptionError("stdin is closed: give -p TEXT")
    return sys.stdin.buffer


def no_lines(_prompt: str) -> str:
    """The reader of a run that has its only prompt already."""
    raise EOFError


@contextmanager
def load_shown(path: str, options: dict[str, Any]) -> Iterator[Model]:
    """The loaded model. Shows the progress on a terminal, then what the plan decided and why. Ctrl-C abandons the load."""
    from tinyserve_gguf.model import load

    with Interrupt("ask") as interrupt, progress_bar() as show:

        def on_progress(fraction: float) -> bool:
            show(fraction)
            return not interrupt.requested  # raising inside llama.cpp's callback would be lost

        try:
            with abort_shown(path):
                model = load(path, progress=on_progress, **options)
        except TinyserveError:
            if interrupt.requested:
                raise KeyboardInterrupt from None
            raise
    with model:
        if interrupt.requested:
            raise KeyboardInterrupt
        for line in model.lines():
            say(line)
        yield model


@contextmanager
def abort_shown(path: str) -> Iterator[None]:
    """Where llama.cpp aborts the process over a damaged file instead of refusing it, end as for any bad input: one line and exit code 2."""
    from tinyserve_gguf import _llama

    def end(reason: str) -> None:
        where, _, what = reason.partition(": ")
        click.echo(f"error: {path}: llama.cpp gives up on it: {what} ({Path(where).name}); fetch or convert the model again", err=True)
        sys.stderr.flush()
        os._exit(EXIT_BAD_INPUT)

    with _llama.last_words(end):
        yield


@contextmanager
def progress_bar() -> Iterator[Callable[[float], None]]:
    """A function that shows a fraction on stderr, if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal or is_quiet()) as progress:
        task = progress.add_task("loading", total=1.0)
        yield lambda fraction: progress.update(task, completed=fraction)
