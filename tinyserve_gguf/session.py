"""One sequence of tokens in a model's KV cache: reads prompts, reuses what it already holds, generates."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from tinyserve_gguf._llama import ContextOptions, NativeContext, NativeModel
from tinyserve_gguf._sampler import Sampler
from tinyserve_gguf._shim import PagerStats
from tinyserve_gguf.errors import ContextFullError, OptionError
from tinyserve_gguf.sampling import Sampling
from tinyserve_gguf.sequence import TokenSequence
from tinyserve_gguf.stats import ReplyStats, phases
from tinyserve_gguf.window import Rolling, Window, WindowCounts


class Session:
    """Made by `Model.session()`. Not for two threads at once; two sessions of one model take turns by themselves."""

    def __init__(
        self,
        model: NativeModel,
        options: ContextOptions,
        rolling: Rolling | None,
        snapshot: Callable[[], PagerStats | None],
        on_close: Callable[[Session], None],
        on_step: Callable[[float], None],
    ) -> None:
        self._model = model
        self._context = NativeContext(model, options)
        self.counts = WindowCounts()
        self._sequence = TokenSequence(self._context, rolling, self.counts)
        self._rolling = rolling
        self._step = self._context.n_batch
        self._snapshot = snapshot
        self._on_close = on_close
        self._on_step = on_step  # hears how many seconds a decoded token took
        self._turn = 0  # of readers: who read first cannot go on when somebody else has read
        self.last: ReplyStats | None = None

    @property
    def n_ctx(self) -> int:
        """Tokens that fit; with a window, those that are held at once."""
        return self.window.size if self.window else self._context.n_ctx

    @property
    def window(self) -> Window | None:
        """The window as the model was loaded with it, if it was."""
        return self._rolling.window if self._rolling else None

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens in the KV cache. With a window these are the sinks and the newest ones."""
        return self._sequence.held

    @property
    def n_sinks(self) -> int:
        """Tokens at the beginning that never leave the window; 0 without one."""
        return self._sequence.window.sinks if self._sequence.window else 0

    def set_sinks(self, n: int) -> None:
        """Let the first `n` tokens stay when others leave. OptionError without a window, or if they would be more than half of it."""
        if self._rolling is None:
            raise OptionError("sinks need a window: give --window")
        self._sequence.set_sinks(n)

    def close(self) -> None:
        self._context.close()
        self._on_close(self)

    def clear(self) -> None:
        """Forget everything."""
        self._turn += 1
        self._sequence.clear()

    def read(self, tokens: Sequence[int]) -> int:
        """Bring the cache to `tokens`; returns how many of them had been read before. The logits of the last one are then ready. With a window, a
        sequence that is longer than it is read in steps, and the oldest tokens after the sinks leave.

        Raises ContextFullError, changing nothing, if they do not fit. May be interrupted between two steps and called again.
        """
        if not tokens:
            raise OptionError("the prompt is empty: give at least one token")
        unknown = [token for token in tokens if not 0 <= token < self._model.n_vocab]
        if unknown:
            raise OptionError(f"token {unknown[0]} is outside the vocabulary of {self._model.n_vocab}")
        if self._rolling is None and len(tokens) > self.n_ctx:
            raise ContextFullError(
                f"{len(tokens)} tokens do not fit into the context of {self.n_ctx}: give a larger -c, or --window to go on without end, "
                "or /reset the conversation"
            )
        self._turn += 1
        same = self._sequence.common(tokens)
        reused = self._sequence.cut(min(same, len(tokens) - 1))  # at least one token must be computed to have logits
        start = reused
        while start < len(tokens):
            chunk = tokens[start : start + self._sequence.step(self._step)]
            start += len(chunk)
            self._sequence.append(chunk, want_logits=start == len(tokens))
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
        before, evicted, shifts = self._snapshot(), self.counts.evicted_tokens, self.counts.shifts
        start = time.perf_counter()
        reused, made, finish = 0, 0, "interrupted"
        read_at, after_read = start, before
        try:
            reused = self.read(tokens)
            turn = self._turn
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
                if self._turn != turn:
                    raise OptionError("another prompt was read in this session, so this reply cannot go on: give each a session() of its own")
                if made == max_tokens:
                    break
                if self._sequence.is_full:
                    finish = "context"
                    return
                self._sequence.cut(self._sequence.n_tokens)  # drops a token that an interrupt left behind
                step_at = time.perf_counter()
                self._sequence.append([token], want_logits=True)
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
                evicted_tokens=self.counts.evicted_tokens - evicted,
                shifts=self.counts.shifts - shifts,
            )

    def logits(self) -> object:
        """Logits of the last token read, float32 [n_vocab]."""
        return self._context.logits()
