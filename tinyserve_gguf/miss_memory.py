"""What `--miss auto` and `bench --baseline` found out, in a small file of the user's cache directory: per machine, model file and settings."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tinyserve_gguf._shim import Miss
from tinyserve_gguf.choices import MISS_MODES
from tinyserve_gguf.kept import UNUSABLE, KeptFile
from tinyserve_gguf.miss_auto import Choice
from tinyserve_gguf.miss_guard import MeasuredSplit

MEMORY = KeptFile("miss.json", version=1)


def situation(*, model: Path, model_bytes: int, device: str, slots: int, threads: int, engine: str, link_gbps: float | None) -> str:
    """What a choice holds for. Another cache size, another link or another file is another question."""
    link = f"{link_gbps:g} GB/s" if link_gbps else "full link"
    return " | ".join((machine_and_file(model, model_bytes, device), f"{slots} slots", f"{threads} threads", f"engine {engine}", link))


def machine_and_file(model: Path, model_bytes: int, device: str) -> str:
    """What speeds of llama.cpp itself hold for."""
    return " | ".join((platform.node(), device, f"{os.cpu_count()} cores", model.name, f"{model_bytes} bytes"))


def recall(key: str) -> tuple[Choice | None, str | None]:
    """What is remembered of a situation, and a line about a file that cannot be used."""
    try:
        found = _tables()["choices"].get(key)
        return (None if found is None else _choice(found)), None
    except UNUSABLE as error:
        return None, f"misses: what was remembered in {MEMORY.not_used(error)}"


def remember(key: str, choice: Choice) -> str | None:
    """Keep a choice; what the file holds of other situations stays. A line, if it cannot be written."""
    error = _keep("choices", key, {"miss": asdict(choice.miss), "figures": choice.figures, "rival": choice.rival})
    return f"misses: the choice cannot be remembered: {error}" if error else None


def recall_splits(key: str) -> tuple[list[MeasuredSplit], str | None]:
    """The speeds of llama.cpp's splits that are kept for a `machine_and_file`, and a line about a file that cannot be used."""
    try:
        return [_split(found) for found in _tables()["splits"].get(key, [])], None
    except UNUSABLE as error:
        return [], f"misses: what was measured of llama.cpp, in {MEMORY.not_used(error)}"


def remember_splits(key: str, splits: Sequence[MeasuredSplit]) -> str | None:
    """Keep such speeds, in place of those of the same blocks, threads and depth. A line, if they cannot be written."""
    kept = {(split.n_cpu_moe, split.threads, split.depth): split for split in (*recall_splits(key)[0], *splits)}
    error = _keep("splits", key, [asdict(split) for split in kept.values()])
    return f"llama.cpp's speeds cannot be remembered: {error}" if error else None


def _keep(table: str, key: str, value: object) -> str | None:
    """Put one value into a table of the file; a file that is unusable, which reading it has said, begins anew. Why it cannot be written, if so."""
    try:
        tables = _tables()
    except UNUSABLE:
        tables = {"choices": {}, "splits": {}}
    tables[table][key] = value
    return MEMORY.write(tables)


def _tables() -> dict[str, dict[str, Any]]:
    """Of the file; empty ones if there is no file. One of UNUSABLE if it cannot be used."""
    content = MEMORY.read() or {"choices": {}}
    tables = {"choices": content.get("choices"), "splits": content.get("splits", {})}
    if not all(isinstance(table, dict) for table in tables.values()):
        raise TypeError("it does not hold choices")
    return tables


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
