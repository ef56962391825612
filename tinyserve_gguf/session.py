"""One sequence of tokens in a model's KV cache: reads prompts, reuses what it already holds, generates."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from tinyserve_gguf._llama import ContextOptions, NativeContext, NativeModel, Sampler, Sampling
from tinyserve_gguf._shim import PagerStats
from tinyserve_gguf.errors import ContextFullError, OptionError
from tinyserve_gguf.stats import ReplyStats, phases


class Session:
    """Made by `Model.session()`. Not for two threads at once; two sessions of one model take turns by themselves."""

    def __init__(
        self,
        model: NativeModel,
        options: ContextOptions,
        snapshot: Callable[[], PagerStats | None],
        on_close: Callable[[Session], None],
        on_step: Callable[[float], None],
    ) -> None:
        self._model = model
        self._context = NativeContext(model, options)
        self._step = options.n_ubatch
        self._snapshot = snapshot
        self._on_close = on_close
        self._on_step = on_step  # hears how many seconds a decoded token took
        self._held: list[int] = []  # tokens whose keys and values are in the cache
        self.last: ReplyStats | None = None

    @property
    def n_ctx(self) -> int:
        """Tokens that fit."""
        return self._context.n_ctx

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens in the KV cache."""
        return tuple(self._held)

    def close(self) -> None:
        self._context.close()
        self._on_close(self)

    def clear(self) -> None:
        """Forget everything."""
        self._context.clear()
        self._held.clear()

    def _cut(self, n: int) -> int:
        """Forget what follows the first `n` held tokens; returns how many are left, 0 where the memory cannot be cut."""
        if not self._context.keep(n):
            self._context.clear()
            n = 0
        del self._held[n:]
        return n

    def read(self, tokens: Sequence[int]) -> int:
        """Bring the cache to exactly `tokens`; returns how many of them were already there. The logits of the last one are then ready.

        Raises ContextFullError, changing nothing, if they do not fit. May be interrupted between two chunks and called again.
        """
        if not tokens:
            raise OptionError("the prompt is empty: give at least one token")
        unknown = [token for token in tokens if not 0 <= token < self._model.n_vocab]
        if unknown:
            raise OptionError(f"token {unknown[0]} is outside the vocabulary of {self._model.n_vocab}")
        if len(tokens) > self.n_ctx:
            raise ContextFullError(f"{len(tokens)} tokens do not fit into the context of {self.n_ctx}: give a larger -c, or /reset the conversation")
        same = next((i for i, (a, b) in enumerate(zip(self._held, tokens, strict=False)) if a != b), min(len(self._held), len(tokens)))
        reused = self._cut(min(same, len(tokens) - 1))  # at least one token must be computed to have logits
        for start in range(reused, len(tokens), self._step):
            chunk = list(tokens[start : start + self._step])
            self._context.decode(chunk, start, want_logits=start + len(chunk) == len(tokens))
            self._held.extend(chunk)
        return reused

    def generate(self, tokens: Sequence[int], max_tokens: int, sampling: Sampling) -> Iterator[int]:
        """Read `tokens` and yield up to `max_tokens` sampled ones (-1: until the model ends or the context is full), without the end token.

        `last` tells afterwards what it cost, also when the iterator was closed early. A reply that was not interrupted leaves all its yielded tokens
        in the cache, except perhaps the last.
        """
        if max_tokens < -1 or max_tokens == 0:
            raise OptionError(f"-n is 1 or more, or -1 for no limit, not {max_tokens}")
        sampler = Sampler(sampling, self._context)
        for token in tokens:
            sampler.accept(token)
        before = self._snapshot()
        start = time.perf_counter()
        reused, made, finish = 0, 0, "interrupted"
        read_at, after_read = start, before
        try:
            reused = self.read(tokens)
            self._context.synchronize()
            read_at, after_read = time.perf_counter(), self._snapshot()
            step_at = None
            while made != max_tokens:
                token = sampler.sample(self._context)  # waits for the logits
                if step_at is not None:
                    self._on_step(time.perf_counter() - step_at)
                if self._model.is_end(token):
                    finish = "stop"
                    return
                made += 1
                yield token
                if made == max_tokens:
                    break
                if len(self._held) == self.n_ctx:
                    finish = "context"
                    return
                self._cut(len(self._held))  # drops a token that an interrupt left behind
                step_at = time.perf_counter()
                self._context.decode([token], len(self._held), want_logits=True)
                self._held.append(token)
            finish = "length"
        finally:
            sampler.close()
            now = time.perf_counter()
            read_at = now if read_at == start else read_at
            self.last = ReplyStats(
                prompt_tokens=len(tokens),
                reused_tokens=reused,
                reply_tokens=made,
                prefill_seconds=read_at - start,
                decode_seconds=now - read_at,
                finish=finish,
                prefill=phases(after_read, before),
                decode=phases(self._snapshot(), after_read),
            )

    def logits(self) -> object:
        """Logits of the last token read, float32 [n_vocab]."""
        return self._context.logits()
