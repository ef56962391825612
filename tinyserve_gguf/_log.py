"""llama.cpp's log, line by line: to Python's logger, to who listens, and the last lines for error messages."""

from __future__ import annotations

import logging
import threading
from collections import deque

log = logging.getLogger("tinyserve_gguf.llama")

_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}  # enum ggml_log_level; 5 continues the line


class Log:
    """Every line goes to the logger `tinyserve_gguf.llama`, unless the thread that it is logged on has a listener."""

    def __init__(self) -> None:
        self.recent: deque[tuple[int, str]] = deque(maxlen=400)  # (level, line)
        self.listeners: dict[int, list[str]] = {}  # by thread: where its lines go instead
        self._level = logging.INFO
        self._partial = ""

    def add(self, level: int, text: bytes) -> None:
        """A piece of the log as llama.cpp gives it: a line, several, or a part of one."""
        self._level = _LEVELS.get(level, self._level)
        self._partial += text.decode("utf-8", "replace")
        *lines, self._partial = self._partial.split("\n")
        heard = self.listeners.get(threading.get_ident())
        for line in lines:
            self.recent.append((self._level, line))
            if heard is None:
                log.log(self._level, "%s", line)
            else:
                heard.append(line)

    def cause(self) -> str:
        """The first line logged as an error, else the last line, without llama.cpp's function name. llama.cpp logs the reason first and what it
        was doing after it: "tensor 'x' has offset 1, expected 0", then "failed to read tensor data"."""
        lines = list(self.recent)
        reason = next((line for level, line in lines if level == logging.ERROR and line), lines[-1][1] if lines else "llama.cpp gave no reason")
        return reason.split(": ", 1)[-1].strip()
