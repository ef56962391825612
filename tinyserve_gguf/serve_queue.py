"""A bounded queue before several contexts, a thread for each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

Context = TypeVar("Context")
Result = TypeVar("Result")


class QueueFullError(Exception):
    """As many wait as may."""


class ClosingError(Exception):
    """No new work is taken: the server is shutting down."""


class Dispatcher(Generic[Context]):
    """Runs work on contexts, first come first served. `n_queue`: how many may wait while all contexts are busy.

    `closeness(context, work)` says how well they fit, the higher the better: of the idle contexts the best one is taken.
    """

    def __init__(self, contexts: Sequence[Context], n_queue: int, closeness: Callable[[Context, Sequence[int]], int] = lambda _c, _t: 0) -> None:
        self._idle = list(contexts)
        self._n_contexts = len(contexts)
        self._n_queue = n_queue
        self._closeness = closeness
        self._pool = ThreadPoolExecutor(len(contexts), thread_name_prefix="context")
        self._lock = threading.Lock()
        self._unfinished: set[Future[Any]] = set()
        self._closing = False

    @property
    def running(self) -> int:
        """Contexts at work."""
        with self._lock:
            return self._n_contexts - len(self._idle)

    @property
    def waiting(self) -> int:
        """Work in the queue."""
        with self._lock:
            return max(0, len(self._unfinished) - (self._n_contexts - len(self._idle)))

    @property
    def is_closing(self) -> bool:
        return self._closing

    def submit(self, work: Callable[[Context], Result], tokens: Sequence[int] = ()) -> Future[Result]:
        """Have it done. QueueFullError if too many wait, ClosingError after `drain`. A future that is cancelled while it waits never runs."""
        with self._lock:
            if self._closing:
                raise ClosingError
            if len(self._unfinished) >= self._n_contexts + self._n_queue:
                raise QueueFullError
            future = self._pool.submit(self._run, work, tokens)
            self._unfinished.add(future)
        future.add_done_callback(self._done)
        return future

    def _done(self, future: Future[Any]) -> None:
        with self._lock:
            self._unfinished.discard(future)

    def _run(self, work: Callable[[Context], Result], tokens: Sequence[int]) -> Result:
        with self._lock:  # there are as many threads as contexts, so one is idle
            context = max(self._idle, key=lambda idle: self._closeness(idle, tokens))
            self._idle.remove(context)
        try:
            return work(context)
        finally:
            with self._lock:
                self._idle.append(context)

    def drain(self) -> None:
        """Take nothing new, and forget what waits; what runs goes on."""
        with self._lock:
            self._closing = True
            unfinished = list(self._unfinished)
        for future in unfinished:
            future.cancel()  # does nothing to one that runs

    def close(self) -> None:
        """Drain, and wait for what runs."""
        self.drain()
        self._pool.shutdown(wait=True)
