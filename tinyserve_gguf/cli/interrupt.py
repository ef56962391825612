"""Ctrl-C as a request that is met at a safe point."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Literal, final

Mode = Literal["raise", "ask", "hold"]


@final
class Interrupt:
    """While active, Ctrl-C sets `requested`, and `mode` says what else it does.

    "raise": KeyboardInterrupt at once, for a long stretch that looks at nothing. "ask": nothing the first time, for a loop that looks at `requested`
    between two steps; KeyboardInterrupt the second time. "hold": nothing, for a short end that has to be reached. A process that ignores SIGINT
    (nohup) goes on ignoring it.
    """

    def __init__(self, mode: Mode) -> None:
        self.mode: Mode = mode
        self.requested = False

    def __enter__(self) -> Interrupt:
        before = signal.getsignal(signal.SIGINT)
        self._before = signal.signal(signal.SIGINT, self._on_signal) if callable(before) else None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        again = self.requested
        self.requested = True
        if self.mode == "raise" or (self.mode == "ask" and again):
            raise KeyboardInterrupt
