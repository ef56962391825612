"""What a run says beside its results: status lines, warnings, llama.cpp's log; on stderr, in a log file, or nowhere."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from tinyserve_gguf.errors import OptionError

OURS = "tinyserve_gguf"
LLAMA = "tinyserve_gguf.llama"  # llama.cpp's own log
KEPT = 40  # lines of that which a failure shows
log = logging.getLogger("tinyserve_gguf.cli")


def is_quiet() -> bool:
    """Whether the running command was called with --quiet."""
    context = click.get_current_context(silent=True)
    return bool(context and context.find_root().params.get("quiet"))


def say(text: str) -> None:
    """A status line: dim on stderr, unless the run is quiet; in the log file in any case."""
    log.info("%s", text)
    if not is_quiet():
        click.echo(click.style(text, dim=True), err=True)


class Tail(logging.Handler):
    """Keeps the last lines of llama.cpp's log, for `show`."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: deque[str] = deque(maxlen=KEPT)
        self._failed = False

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())
        self._failed |= record.levelno >= logging.ERROR

    def show(self) -> None:
        """On stderr, if there is an error among what was logged: else it was not llama.cpp that failed."""
        for line in self._lines if self._failed else ():
            click.echo(f"llama.cpp: {line}", err=True)


class _OnStderr(logging.StreamHandler):  # type: ignore[type-arg]  # generic for type checkers only
    """Warnings of ours; with `verbose` all that is logged, llama.cpp's lines too. Status lines are there already."""

    def __init__(self, verbose: bool) -> None:
        super().__init__(sys.stderr)
        self._verbose = verbose

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == log.name:
            return False
        return self._verbose or (record.levelno >= logging.WARNING and record.name != LLAMA)


@contextmanager
def logging_to(verbose: bool, log_file: Path | None) -> Iterator[Tail]:
    """Where log lines go while the block runs. OptionError if the log file cannot be written."""
    tail = Tail()
    handlers: list[tuple[logging.Logger, logging.Handler]] = [(logging.getLogger(OURS), _OnStderr(verbose)), (logging.getLogger(LLAMA), tail)]
    if log_file:
        try:
            file = logging.FileHandler(log_file, mode="w", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise OptionError(f"cannot write {log_file} (--log-file): {error.strerror}") from None
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
        handlers.append((logging.getLogger(OURS), file))
    logging.getLogger(OURS).setLevel(logging.DEBUG if log_file else logging.INFO)
    for logger, handler in handlers:
        logger.addHandler(handler)
    try:
        yield tail
    finally:
        for logger, handler in handlers:
            logger.removeHandler(handler)
            handler.close()
