"""What `--miss auto` and `bench --baseline` found out, in a small file of the user's cache directory: per machine, model file and settings."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tinyserve_gguf._shim import Miss
from tinyserve_gguf.choices import MISS_MODES
from tinyserve_gguf.errors import OptionError
from tinyserve_gguf.miss_auto import Choice
from tinyserve_gguf.miss_guard import MeasuredSplit
from tinyserve_gguf.outfile import OutputFile
from tinyserve_gguf.user_files import cache_dir

VERSION = 1  # raise it when the contents change their meaning


def memory_path() -> Path:
    """In the user's cache directory."""
    return cache_dir() / "miss.json"


def situation(*, model: Path, model_bytes: int, device: str, slots: int, threads: int, engine: str, link_gbps: float | None) -> str:
    """What a choice holds for. Another cache size, another link or another file is another question."""
    link = f"{link_gbps:g} GB/s" if link_gbps else "full link"
    return " | ".join((machine_and_file(model, model_bytes, device), f"{slots} slots", f"{threads} threads", f"engine {engine}", link))


def machine_and_file(model: Path, model_bytes: int, device: str) -> str:
    """What speeds of llama.cpp itself hold for."""
    return " | ".join((platform.node(), device, f"{os.cpu_count()} cores", model.name, f"{model_bytes} bytes"))


def recall(path: Path, key: str) -> tuple[Choice | None, str | None]:
    """What is remembered of a situation, and a line about a file that cannot be used."""
    try:
        found = _read(path)["choices"].get(key)
        return (None if found is None else _choice(found)), None
    except (OSError, ValueError, TypeError, KeyError) as error:
        return None, f"misses: what was remembered in {path} is not used: {error or type(error).__name__}"


def remember(path: Path, key: str, choice: Choice) -> str | None:
    """Keep a choice; what the file holds of other situations stays. A line, if it cannot be written."""
    error = _keep(path, "choices", key, {"miss": asdict(choice.miss), "figures": choice.figures, "rival": choice.rival})
    return f"misses: the choice cannot be remembered: {error}" if error else None


def recall_splits(path: Path, key: str) -> tuple[list[MeasuredSplit], str | None]:
    """The speeds of llama.cpp's splits that are kept for a `machine_and_file`, and a line about a file that cannot be used."""
    try:
        return [_split(found) for found in _read(path)["splits"].get(key, [])], None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return [], f"misses: what was measured of llama.cpp, in {path}, is not used: {error or type(error).__name__}"


def remember_splits(path: Path, key: str, splits: Sequence[MeasuredSplit]) -> str | None:
    """Keep such speeds, in place of those of the same blocks, threads and depth. A line, if they cannot be written."""
    kept = {(split.n_cpu_moe, split.threads, split.depth): split for split in (*recall_splits(path, key)[0], *splits)}
    error = _keep(path, "splits", key, [asdict(split) for split in kept.values()])
    return f"llama.cpp's speeds cannot be remembered: {error}" if error else None


def _keep(path: Path, table: str, key: str, value: object) -> OSError | OptionError | None:
    """Put one value into a table of the file; a file that is unusable, which reading it has said, begins anew."""
    try:
        content = _read(path)
    except (OSError, ValueError):
        content = _empty()
    content[table][key] = value
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        OutputFile(path).write_text(json.dumps({"version": VERSION, **content}, indent=2) + "\n")
    except (OSError, OptionError) as error:
        return error
    return None


def _empty() -> dict[str, dict[str, Any]]:
    return {"choices": {}, "splits": {}}


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """The tables of the file; empty ones if there is no file. ValueError if it is damaged or of another version."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return _empty()
    if not isinstance(content, dict) or not isinstance(content.get("choices"), dict) or not isinstance(content.get("splits", {}), dict):
        raise ValueError("it does not hold choices")
    if content.get("version") != VERSION:
        raise ValueError(f"it is of version {content.get('version')}, not {VERSION}")
    return _empty() | {table: dict(content[table]) for table in _empty() if table in content}


def _choice(found: dict[str, Any]) -> Choice:
    miss = Miss(**found["miss"])
    if miss.mode not in MISS_MODES:
        raise ValueError(f"there is no way {miss.mode!r}")
    return Choice(miss, {str(name): float(rate) for name, rate in found["figures"].items()}, str(found.get("rival", "")))


def _split(found: dict[str, Any]) -> MeasuredSplit:
    split = MeasuredSplit(**found)
    numbers = (split.n_cpu_moe, split.rate, split.expert_bytes, split.threads, split.depth)
    if not all(isinstance(number, int | float) for number in numbers) or split.rate <= 0:
        raise ValueError("a speed of llama.cpp is no number")
    return split
