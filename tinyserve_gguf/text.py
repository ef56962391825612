"""Text that comes in pieces: characters made whole, stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence


def whole_characters(pieces: Iterable[bytes]) -> Iterator[str]:
    """UTF-8 as text; a character that is split over pieces comes when it is whole, and bytes that are none as U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for piece in pieces:
        if text := decoder.decode(piece):
            yield text
    if rest := decoder.decode(b"", final=True):
        yield rest


def until(pieces: Iterator[str], stop: Sequence[str]) -> Iterator[str]:
    """Text before the first stop string; holds back what may be the beginning of one."""
    held = ""
    for piece in pieces:
        held += piece
        found = min((at for at in (held.find(s) for s in stop) if at >= 0), default=-1)
        if found >= 0:
            if held[:found]:
                yield held[:found]
            return
        keep = max((n for s in stop for n in range(1, len(s)) if held.endswith(s[:n])), default=0)
        if held[: len(held) - keep]:
            yield held[: len(held) - keep]
        held = held[len(held) - keep :]
    if held:
        yield held
