"""Files that results go to: `--stats-json` of chat, `--output` and `--plot` of bench."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyserve_gguf.errors import OptionError

if TYPE_CHECKING:
    from tinyserve_gguf.stats import ReplyStats, Stats


class OutputFile:
    """A file that is replaced as a whole. Making one refuses, with OptionError, a path that could not be written later."""

    def __init__(self, path: Path, option: str) -> None:
        self._given = f"{option} {path}"
        self._path = Path(os.path.realpath(path))  # a link stays a link: its target is replaced
        self._part = self._path.with_name(f".{self._path.name}.{os.getpid()}.part")
        if self._path.exists() and not (self._path.is_file() and os.access(self._path, os.W_OK)):
            raise OptionError(f"{self._given}: not a regular file that can be written")
        try:
            self._part.touch(exist_ok=False)
            self._part.unlink()
        except OSError as error:
            raise self._refusal(error) from None

    def write_text(self, text: str) -> None:
        """Write and put in place in one step; a failure leaves an earlier file as it was."""
        self.write_bytes(text.encode())

    def write_bytes(self, data: bytes) -> None:
        """The same for what is no text."""
        try:
            self._part.write_bytes(data)
            self._part.replace(self._path)
        except OSError as error:
            raise self._refusal(error) from None
        finally:
            self._part.unlink(missing_ok=True)

    def _refusal(self, error: OSError) -> OptionError:
        return OptionError(f"{self._given}: cannot be written: {error.strerror}")


class StatsFile(OutputFile):
    """The JSON file of `--stats-json`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "--stats-json")

    def write(self, content: dict[str, Any]) -> None:
        self.write_text(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def content(model: str, turns: Sequence[ReplyStats], stats: Stats) -> dict[str, Any]:
    """What the file holds: `model` (the path as given), `turns` (one object a reply), `stats` (the model's, at the end)."""
    return {"model": model, "turns": [turn.as_dict() for turn in turns], "stats": stats.as_dict()}
