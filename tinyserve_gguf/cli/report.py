"""What `--stats-json` of chat writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinyserve_gguf.stats import ReplyStats, Stats


def as_json(model: str, turns: Sequence[ReplyStats], stats: Stats) -> str:
    """One object: `model` (the path as given), `turns` (one object a reply), `stats` (the model's, at the end)."""
    content = {"model": model, "turns": [turn.as_dict() for turn in turns], "stats": stats.as_dict()}
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
