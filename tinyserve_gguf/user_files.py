"""Where files of the user lie that nobody named: the base directories of the XDG standard."""

from __future__ import annotations

import os
from pathlib import Path

NAME = "tinyserve-gguf"


def _base(configured: str, otherwise: Path) -> Path:
    """The standard ignores a path that is not absolute."""
    path = Path(configured)
    return path if path.is_absolute() else otherwise


def cache_base() -> Path:
    """The cache directory that programs share: XDG_CACHE_HOME, else ~/.cache. RuntimeError without a home."""
    return _base(os.environ.get("XDG_CACHE_HOME", ""), Path("~/.cache").expanduser())


def cache_dir() -> Path:
    """Ours in it."""
    return cache_base() / NAME


def config_dir() -> Path:
    """Under XDG_CONFIG_HOME, else ~/.config. RuntimeError without a home."""
    return _base(os.environ.get("XDG_CONFIG_HOME", ""), Path("~/.config").expanduser()) / NAME
