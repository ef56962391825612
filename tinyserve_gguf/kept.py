"""Small JSON files in the user's cache directory, in which a run keeps what it found out for the next one. None is needed: what cannot be read or
written costs a line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinyserve_gguf.errors import OptionError
from tinyserve_gguf.outfile import OutputFile
from tinyserve_gguf.user_files import cache_dir

UNUSABLE = (OSError, ValueError, TypeError, KeyError, AttributeError)  # what reading one, and looking for something in it, may raise


class KeptFile:
    """`name`: folders in the cache directory and the file. `version`: of what it holds, to be raised when the contents change their meaning."""

    def __init__(self, *name: str, version: int) -> None:
        self._name = name
        self._version = version

    @property
    def path(self) -> Path:
        """OptionError without a home."""
        return cache_dir().joinpath(*self._name)

    def __str__(self) -> str:
        try:
            return str(self.path)
        except OptionError:
            return self._name[-1]

    def read(self) -> dict[str, Any] | None:
        """What it holds; None if there is no file. OSError or ValueError if it is damaged, of another version, or there is no home."""
        try:
            content = json.loads(self.path.read_text("utf-8"))
        except FileNotFoundError:
            return None
        if not isinstance(content, dict):
            raise ValueError("it does not hold an object")
        if content.get("version") != self._version:
            raise ValueError(f"it is of version {content.get('version')}, not {self._version}")
        return content

    def not_used(self, error: Exception) -> str:
        """A line about one of UNUSABLE, less what it was about."""
        return f"{self} is not used: {error or type(error).__name__}"

    def write(self, content: Mapping[str, object], *, indent: int | None = 2) -> str | None:
        """Put it in place of what is there. Why it cannot be written, if it cannot."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            OutputFile(self.path).write_text(json.dumps({"version": self._version, **content}, indent=indent) + "\n")
        except (OSError, OptionError) as error:
            return str(error)
        return None
