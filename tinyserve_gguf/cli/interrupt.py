"""Ctrl-C as a request that is met at a safe point."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import final


@final
class Interrupt:
    """While active, a first Ctrl-C only sets `requested`, for a loop that looks at it between two steps; the second raises KeyboardInterrupt.

    With `polite` off every Ctrl-C raises at once: for stretches without such a loop. A process that ignores SIGINT (nohup) goes on ignoring it.
    """

    def __init__(self, *, polite: bool) -> None:
        self.polite = polite
        self.requested = False

    def __enter__(self) -> Interrupt:
        before = signal.getsignal(signal.SIGINT)
        self._before = signal.signal(signal.SIGINT, self._on_signal) if callable(before) else None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        polite_now = self.polite and not self.requested
        self.requested = True
        if not polite_now:
            raise KeyboardInterrupt
