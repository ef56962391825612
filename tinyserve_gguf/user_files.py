"""Where files of the user lie that nobody named: the base directories of the XDG standard."""

from __future__ import annotations

import os
from pathlib import Path

from tinyserve_gguf.errors import OptionError

NAME = "tinyserve-gguf"


def _base(variable: str, configured: str, otherwise: str) -> Path:
    """The standard ignores a path that is not absolute. A home is looked for only where it is needed; OptionError if there is none."""
    path = Path(configured)
    if path.is_absolute():
        return path
    try:
        return Path(otherwise).expanduser()
    except RuntimeError:
        raise OptionError(f"this user has no home directory: set {variable} to a directory for such files") from None


def cache_base() -> Path:
    """The cache directory that programs share: XDG_CACHE_HOME, else ~/.cache. OptionError without a home."""
    return _base("XDG_CACHE_HOME", os.environ.get("XDG_CACHE_HOME", ""), "~/.cache")


def cache_dir() -> Path:
    """Ours in it."""
    return cache_base() / NAME


def state_dir() -> Path:
    """Under XDG_STATE_HOME, else ~/.local/state. OptionError without a home."""
    return _base("XDG_STATE_HOME", os.environ.get("XDG_STATE_HOME", ""), "~/.local/state") / NAME


def config_dir() -> Path:
    """Under XDG_CONFIG_HOME, else ~/.config. OptionError without a home."""
    return _base("XDG_CONFIG_HOME", os.environ.get("XDG_CONFIG_HOME", ""), "~/.config") / NAME
