"""One progress callback over the parts of a load."""

from __future__ import annotations

from collections.abc import Callable


class LoadProgress:
    """The caller's callback, which hears 0..1 and may stop the load."""

    def __init__(self, progress: Callable[[float], bool] | None) -> None:
        self._progress = progress
        self.stopped = False

    def part(self, low: float, high: float) -> Callable[[float], bool] | None:
        """A callback for the part from `low` to `high` of the whole, whose own fraction goes from 0 to 1."""
        progress = self._progress
        if progress is None:
            return None

        def heard(fraction: float) -> bool:
            self.stopped = not progress(low + (high - low) * fraction)
            return not self.stopped

        return heard
