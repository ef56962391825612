"""What a server holds: the model, its contexts and their queue, and what is counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tinyserve_gguf.counters import PagerStats
from tinyserve_gguf.errors import OptionError
from tinyserve_gguf.sampling import Sampling
from tinyserve_gguf.serve_llama import ServedLlama
from tinyserve_gguf.serve_metrics import Metrics
from tinyserve_gguf.serve_prepare import Preparer
from tinyserve_gguf.serve_queue import Dispatcher
from tinyserve_gguf.serve_reply import Json
from tinyserve_gguf.serve_request import RequestError


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How to serve a model that is open. `n_queue`: requests that may wait while every context is busy."""

    model_id: str
    keys: tuple[str, ...] = ()
    n_parallel: int = 1
    n_queue: int = 16
    max_body: int = 4 << 20  # bytes
    expert_cache: str = "auto"  # as it was asked for
    pooling: str = "mean"
    chat_format: str | None = None
    sampling: Sampling = field(default_factory=Sampling)  # of requests that do not say


class Service:
    """Opens `n_parallel` contexts over the model. `close` frees all of them, the model's own too."""

    def __init__(self, llama: ServedLlama, options: ServeOptions) -> None:
        self._llama = llama
        self._options = options
        self._contexts = [llama]
        self._expert_cache = options.expert_cache
        self._embedder: Dispatcher[ServedLlama] | None = None
        self._lock = threading.Lock()  # of the embedder, and of resizing
        self.running: set[threading.Event] = set()  # each ends a reply that waits or runs; of the event loop's thread
        self._created = int(time.time())
        try:
            self.preparer = Preparer(llama, options.sampling, options.chat_format)
            while len(self._contexts) < options.n_parallel:
                other = llama.new_context()
                assert isinstance(other, ServedLlama)
                self._contexts.append(other)
        except BaseException:
            self._close_contexts()
            raise
        self.dispatcher = Dispatcher(self._contexts, options.n_queue, lambda context, tokens: context.n_common(tokens))
        self.metrics = Metrics(self._paging, lambda: self.dispatcher.running, lambda: self.dispatcher.waiting)

    @property
    def model_id(self) -> str:
        return self._options.model_id

    @property
    def keys(self) -> Sequence[str]:
        return self._options.keys

    @property
    def max_body(self) -> int:
        return self._options.max_body

    def check_model(self, name: str | None) -> None:
        """RequestError for a model that is not served here. Who names none gets the one that is."""
        if name is not None and name != self.model_id:
            raise RequestError(f"there is no model {name!r} here, there is {self.model_id!r}", status=404, code="model_not_found", param="model")

    def model_card(self) -> Json:
        facts = self._llama.plan.facts
        meta = {"n_ctx": self._llama.n_ctx(), "n_ctx_train": facts.context_length, "n_vocab": self._llama.n_vocab(), "window": self._llama.goes_on}
        return {"id": self.model_id, "object": "model", "created": self._created, "owned_by": "tinyserve-gguf", "meta": meta}

    # ---- embeddings ----

    def embedder(self, texts: Sequence[str]) -> Dispatcher[ServedLlama]:
        """Who makes the embeddings of these texts: a context of its own, opened when first asked for. RequestError if a text does not fit."""
        if self.dispatcher.is_closing:
            raise RequestError("the server is shutting down", status=503, code="closing")
        for number, text in enumerate(texts):
            n = len(self._llama.tokenize(text.encode()))
            if not 1 <= n <= self._n_embedded:
                raise RequestError(f"text {number} has {n} tokens, and embeddings are made of 1 to {self._n_embedded} (-b)", param="input")
        with self._lock:
            if self._embedder is None:
                try:
                    context = self._llama.embedding_context(self._options.pooling)
                except OptionError as error:
                    raise RequestError(f"no embeddings: {error}", status=503) from error
                self._contexts.append(context)
                self._embedder = Dispatcher([context], self._options.n_queue)
            return self._embedder

    @property
    def _n_embedded(self) -> int:
        return int(self._llama.context_params.n_ubatch)

    # ---- paging ----

    def _paging(self) -> PagerStats | None:
        return self._llama.stats().pager

    def expert_map(self) -> Json:
        """Every expert at one moment, and what was counted. RequestError for a dense model."""
        facts = self._llama.plan.facts
        if not self._llama.is_paged:
            raise RequestError(f"{facts.name} is dense: it has no experts", status=404)
        shown = {"n_expert": facts.n_expert, "n_used": facts.n_used, "expert_cache": self._expert_cache, "tokens": self.metrics.tokens()}
        return shown | self._llama.expert_map().as_dict()

    def resize(self, expert_cache: str) -> Json:
        """Change the size of the expert cache while replies run. OptionError or CapacityError, changing nothing, if that cannot be."""
        with self._lock:
            done = self._llama.resize(expert_cache)
            self._expert_cache = expert_cache
            return {"expert_cache": expert_cache, "slots": done.slots, "lines": [done.line(), *self._llama.plan.lines()[1:]]}

    # ---- life ----

    def drain(self) -> None:
        """Take nothing new; what runs goes on."""
        self.dispatcher.drain()
        if self._embedder:
            self._embedder.drain()

    def give_up(self) -> None:
        """End what runs, soon and unfinished."""
        for cancelled in list(self.running):
            cancelled.set()

    def close(self) -> None:
        """Wait for what runs, then free everything."""
        self.dispatcher.close()
        if self._embedder:
            self._embedder.close()
        self._close_contexts()

    def _close_contexts(self) -> None:
        for context in reversed(self._contexts):
            context.close()
