"""What `--miss auto` found out, in a small file of the user's cache directory: per machine, model file and settings."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tinyserve_gguf._shim import MISS_MODES, Miss
from tinyserve_gguf.errors import OptionError
from tinyserve_gguf.miss_auto import Choice
from tinyserve_gguf.outfile import OutputFile
from tinyserve_gguf.user_files import cache_dir

VERSION = 1  # raise it when the contents change their meaning


def memory_path() -> Path:
    """In the user's cache directory."""
    return cache_dir() / "miss.json"


def situation(*, model: Path, model_bytes: int, device: str, slots: int, threads: int, engine: str, link_gbps: float | None) -> str:
    """What a choice holds for. Another cache size, another link or another file is another question."""
    link = f"{link_gbps:g} GB/s" if link_gbps else "full link"
    machine, file = (platform.node(), device, f"{os.cpu_count()} cores"), (model.name, f"{model_bytes} bytes")
    return " | ".join((*machine, *file, f"{slots} slots", f"{threads} threads", f"engine {engine}", link))


def recall(path: Path, key: str) -> tuple[Choice | None, str | None]:
    """What is remembered of a situation, and a line about a file that cannot be used."""
    try:
        choices = _read(path)
        found = choices.get(key)
        return (None if found is None else _choice(found)), None
    except (OSError, ValueError, TypeError, KeyError) as error:
        return None, f"misses: what was remembered in {path} is not used: {error or type(error).__name__}"


def remember(path: Path, key: str, choice: Choice) -> str | None:
    """Keep a choice; what the file holds of other situations stays. A line, if it cannot be written."""
    try:
        choices = _read(path)
    except (OSError, ValueError):
        choices = {}  # unusable, which `recall` has said
    choices[key] = {"miss": asdict(choice.miss), "figures": choice.figures}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        OutputFile(path).write_text(json.dumps({"version": VERSION, "choices": choices}, indent=2) + "\n")
    except (OSError, OptionError) as error:
        return f"misses: the choice cannot be remembered: {error}"
    return None


def _read(path: Path) -> dict[str, Any]:
    """The choices of the file; none if there is no file. ValueError if it is damaged or of another version."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    if not isinstance(content, dict) or not isinstance(content.get("choices"), dict):
        raise ValueError("it does not hold choices")
    if content.get("version") != VERSION:
        raise ValueError(f"it is of version {content.get('version')}, not {VERSION}")
    return dict(content["choices"])


def _choice(found: dict[str, Any]) -> Choice:
    miss = Miss(**found["miss"])
    if miss.mode not in MISS_MODES:
        raise ValueError(f"there is no way {miss.mode!r}")
    return Choice(miss, {str(name): float(rate) for name, rate in found["figures"].items()})
