"""The context of a `Llama`, and what stands in its place once it is closed."""

from __future__ import annotations

from typing import Any

from tinyserve_gguf._llama import StockContext, explained
from tinyserve_gguf.errors import EngineError, OptionError
from tinyserve_gguf.sequence import TokenSequence


class PagedContext(StockContext):  # type: ignore[misc]
    """The base's context: failures give llama.cpp's reason, and with a window positions are counted by it."""

    sequence: TokenSequence | None

    def decode(self, batch: Any) -> None:
        with explained() as cause:
            try:
                super().decode(batch)
            except RuntimeError as error:
                raise EngineError(f"{error}: {cause()}") from error

    def kv_cache_clear(self) -> None:
        if self.sequence:
            self.sequence.clear()
        else:
            super().kv_cache_clear()

    def kv_cache_seq_rm(self, seq_id: int, p0: int, p1: int) -> bool:
        """With a window `p0` counts all tokens that were read, and whatever follows goes. False if less than `p0` could stay."""
        if self.sequence is None:
            return bool(super().kv_cache_seq_rm(seq_id, p0, p1))
        return self.sequence.cut(p0) == p0


class Closed:
    """In the place of what the base would hand to llama.cpp after it is freed."""

    def __getattr__(self, name: str) -> Any:
        raise OptionError("the model is closed")


CLOSED = Closed()
