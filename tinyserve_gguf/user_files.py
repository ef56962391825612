"""Where files of the user lie that nobody named: the base directories of the XDG standard."""

from __future__ import annotations

import os
from pathlib import Path

NAME = "tinyserve-gguf"


def _base(configured: str, otherwise: str) -> Path:
    """The standard ignores a path that is not absolute. A home is looked for only where it is needed."""
    path = Path(configured)
    return path if path.is_absolute() else Path(otherwise).expanduser()


def cache_base() -> Path:
    """The cache directory that programs share: XDG_CACHE_HOME, else ~/.cache. RuntimeError without a home."""
    return _base(os.environ.get("XDG_CACHE_HOME", ""), "~/.cache")


def cache_dir() -> Path:
    """Ours in it."""
    return cache_base() / NAME


def state_dir() -> Path:
    """Under XDG_STATE_HOME, else ~/.local/state. RuntimeError without a home."""
    return _base(os.environ.get("XDG_STATE_HOME", ""), "~/.local/state") / NAME


def config_dir() -> Path:
    """Under XDG_CONFIG_HOME, else ~/.config. RuntimeError without a home."""
    return _base(os.environ.get("XDG_CONFIG_HOME", ""), "~/.config") / NAME
