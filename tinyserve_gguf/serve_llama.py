"""A context that serves: llama-cpp-python's own completion, and beside it what a server needs of it.

`create_completion` is driven by the code of `llama_cpp.Llama` (prompts, samplers, grammars, stop strings, chat handlers). Added are: text that is
never cut within a character, log probabilities without keeping the logits of the whole context, counts that are true, and an end at any token.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tinyserve_gguf._llama import C, NativeModel, explained, stock_formats  # before numpy

# isort: split
import numpy as np
import numpy.typing as npt

from tinyserve_gguf.counters import Counts
from tinyserve_gguf.llama import Llama
from tinyserve_gguf.serve_reply import Choice, Json, Piece, ReplyText
from tinyserve_gguf.serve_request import RequestError
from tinyserve_gguf.stats import Stats, added, hit_rate

_OF_THE_RUN = ("logprobs", "stopping_criteria", "seed", "logit_bias", "model")  # what create_completion is told, and the run knows better


POOLINGS = {"mean": C.LLAMA_POOLING_TYPE_MEAN, "last": C.LLAMA_POOLING_TYPE_LAST, "cls": C.LLAMA_POOLING_TYPE_CLS}


class GivenUpError(Exception):
    """Nobody waits for the reply any more."""


@dataclass(slots=True)
class Cost:
    """What replies cost. Counters are the model's: while several replies are computed at once, they count what all of them did."""

    prompt_tokens: int = 0
    read_tokens: int = 0  # of these, computed: the others a context held already
    reply_tokens: int = 0  # without the token that ends a reply
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    prefill: Counts | None = None  # None when nothing is paged
    decode: Counts | None = None

    def plus(self, other: Cost) -> Cost:
        """Both together; `other` is another reply to the same prompt, which counts once."""
        together = Cost.total([self, other])
        together.prompt_tokens = max(self.prompt_tokens, other.prompt_tokens)
        return together

    @staticmethod
    def total(costs: Sequence[Cost]) -> Cost:
        """Of different prompts."""
        paged = [(cost.prefill, cost.decode) for cost in costs if cost.prefill and cost.decode]
        return Cost(
            prompt_tokens=sum(cost.prompt_tokens for cost in costs),
            read_tokens=sum(cost.read_tokens for cost in costs),
            reply_tokens=sum(cost.reply_tokens for cost in costs),
            prefill_seconds=sum(cost.prefill_seconds for cost in costs),
            decode_seconds=sum(cost.decode_seconds for cost in costs),
            prefill=added(*(prefill for prefill, _ in paged)) if paged else None,
            decode=added(*(decode for _, decode in paged)) if paged else None,
        )

    def usage(self) -> Json:
        """As OpenAI has it, and under "tinyserve" what paging did: hit rates from 0 to 1 (null where nothing was looked up) and megabytes that
        went over the link for each decoded token."""
        paged = None
        if self.prefill and self.decode:
            paged = {
                "hit_rate": hit_rate(self.decode) if self.decode.lookups else hit_rate(self.prefill),
                "prefill_hit_rate": hit_rate(self.prefill),
                "mb_per_token": self.decode.bytes_link / 1e6 / max(1, self.decode.graphs),
            }
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.reply_tokens,
            "total_tokens": self.prompt_tokens + self.reply_tokens,
            "prompt_tokens_details": {"cached_tokens": max(0, self.prompt_tokens - self.read_tokens)},
            "tinyserve": paged,
        }


@dataclass(slots=True)
class Run:
    """One reply while it is computed. `cancelled` may be set from another thread."""

    seed: int
    limit: int | None = None  # most tokens
    logit_bias: dict[int, float] | None = None
    n_logprobs: int | None = None
    message_stops: list[str] | None = None  # while a handler lets the model choose between functions and a message: stop strings of the message
    cancelled: threading.Event = field(default_factory=threading.Event)
    cost: Cost = field(default_factory=Cost)
    finish: str = "length"  # why it ended
    text: ReplyText = field(default_factory=ReplyText)
    ready: Piece = field(default_factory=lambda: Piece(""))  # text that was not handed out yet
    offset: int = 0  # characters before the reply, for the offsets of its tokens
    shown: deque[Choice] = field(default_factory=deque)  # tokens of what was handed out, for whoever shows them another way
    sampled_at: float | None = None

    def check(self) -> None:
        if self.cancelled.is_set():
            raise GivenUpError

    def take(self) -> Piece:
        piece, self.ready = self.ready, Piece("")
        return piece

    def put(self, piece: Piece) -> None:
        self.ready = Piece(self.ready.text + piece.text, self.ready.choices + piece.choices, self.ready.offsets + piece.offsets)

    @property
    def rest(self) -> int | None:
        """Tokens that may still be made."""
        return None if self.limit is None else self.limit - self.cost.reply_tokens


class ServedLlama(Llama):
    """For one thread at a time. Outside `serving` it is a `Llama` like any other."""

    run: Run | None = None
    _last: Choice | None = None
    _sampler: Any

    def __init__(self, model_path: str, **options: Any) -> None:
        self._pieces: dict[int, bytes] = {}  # these two are shared with further contexts
        self._short: list[int] = []
        super().__init__(model_path, **options)

    @contextmanager
    def serving(self, run: Run, *, afresh: bool) -> Iterator[None]:
        """Let what is computed inside be `run`. `afresh`: read the prompt from its first token, so that the reply has the very bits that it has
        alone; else the beginning that is already there stays, which was computed in other batches."""
        if afresh:
            self.reset()
        self.run = run
        before = self._phases()
        try:
            yield
        finally:
            self.run = None
            now = self._phases()
            if before and now:
                run.cost.prefill, run.cost.decode = (_since(after, then) for after, then in zip(now, before, strict=True))

    def embedding_context(self, pooling: str) -> ServedLlama:
        """A context that gives embeddings of texts of up to `n_ubatch` tokens: one vector each, pooled as POOLINGS say. OptionError if it does not
        fit."""
        params = type(self.context_params).from_buffer_copy(self.context_params)
        params.embeddings, params.pooling_type, params.kv_unified = True, POOLINGS[pooling], True
        params.n_ctx = params.n_batch = params.n_ubatch
        params.n_seq_max = min(params.n_batch, C.llama_max_parallel_sequences())
        model = type(self).__new__(type(self))
        model.__dict__.update(self.__dict__)  # the same weights, to be asked for a context that is not like its own
        model.context_params, model.n_batch, model._rolling = params, params.n_batch, None
        try:
            made = model.new_context()
        finally:
            model._begin()  # it owns nothing
        assert isinstance(made, ServedLlama)
        made.run = None
        return made

    @property
    def native(self) -> NativeModel:
        return self._held.native

    @property
    def goes_on(self) -> bool:
        """With a window: the context is never full."""
        return self._rolling is not None

    def chat_handler_named(self, name: str) -> Any:
        """A handler of this file or one of llama-cpp-python's."""
        return self._chat_handlers.get(name) or stock_formats.get_chat_completion_handler(name)

    def grammar_error(self, text: str) -> str | None:
        """Why llama.cpp cannot sample by this grammar; None if it can. llama-cpp-python would crash on one that it cannot."""
        with explained() as cause:
            sampler = C.llama_sampler_init_grammar(C.llama_model_get_vocab(self.native.handle), text.encode(), b"root")
            if not sampler:
                return cause()
        C.llama_sampler_free(sampler)
        return None

    def _check_grammar(self) -> None:
        """RequestError where the grammar allows no token, such as one with a NUL: llama.cpp would end the process over any that it then takes."""
        chain = self._sampler.sampler
        unnamed = {number for number, _ in self._sampler.custom_samplers}  # llama.cpp would call a name that Python's samplers do not have
        for number in range(C.llama_sampler_chain_n(chain)):
            sampler = C.llama_sampler_chain_get(chain, number)
            if number in unnamed or C.llama_sampler_name(sampler) != b"grammar":
                continue
            if not any(self._allows(sampler, _candidates(tokens)) for tokens in (self._short_tokens(), range(self._n_vocab))):
                raise RequestError("the grammar allows no token of this model here", param="grammar")

    def _allows(self, grammar: Any, candidates: npt.NDArray[np.void]) -> bool:
        """Whether a grammar takes one of the candidates."""
        found = candidates.copy()
        data = found.ctypes.data_as(ctypes.POINTER(C.llama_token_data))
        C.llama_sampler_apply(grammar, ctypes.byref(C.llama_token_data_array(data=data, size=len(found), selected=-1, sorted=False)))
        return bool((found["logit"] > 0).any())

    def _short_tokens(self) -> list[int]:
        """Tokens of one byte, and those that end a reply. Where a grammar goes on, it nearly always goes on with one of them."""
        if not self._short:
            self._short += [token for token in range(self._n_vocab) if self.native.is_end(token) or len(self.piece(token)) == 1]
        return self._short

    def _phases(self) -> tuple[Counts, Counts] | None:
        stats: Stats = self.stats()
        return (stats.pager.prefill, stats.pager.decode) if stats.pager else None

    def n_common(self, tokens: Sequence[int]) -> int:
        """How many tokens at the beginning this context holds already."""
        held = self.input_ids[: min(self.n_tokens, len(tokens))]
        differ = np.nonzero(held != np.asarray(tokens[: len(held)], dtype=held.dtype))[0]
        return int(differ[0]) if len(differ) else len(held)

    # ---- text ----

    def piece(self, token: int) -> bytes:
        """The bytes of a token; none for control tokens."""
        if token not in self._pieces:
            self._pieces[token] = self.native.piece(token)
        return self._pieces[token]

    def detokenize(self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False) -> bytes:
        """Nothing while a reply is computed: its text is made of the bytes of tokens as they come. llama-cpp-python asks for the whole text at every
        token, and would take longer with each."""
        return b"" if self.run and not special else bytes(super().detokenize(tokens, prev_tokens=prev_tokens, special=special))

    def prompt_tokens(self, prompt: str | list[int]) -> list[int]:
        """The tokens that a completion of `prompt` reads."""
        return self.tokenize(prompt.encode(), add_bos=True, special=True) if isinstance(prompt, str) else prompt

    # ---- what llama_cpp.Llama's completion calls ----

    def eval(self, tokens: Sequence[int]) -> None:
        """In batches as ever, with a look between them at who still waits."""
        if self.run is None:
            super().eval(tokens)
            return
        for start in range(0, len(tokens), self.n_batch):
            self.run.check()
            batch = tokens[start : start + self.n_batch]
            super().eval(batch)
            if self.run.sampled_at is None:
                self.run.cost.read_tokens += len(batch)

    def sample(self, *args: Any, idx: int | None = None, **options: Any) -> int:
        run = self.run
        if run is None:
            return int(super().sample(*args, idx=idx, **options))
        run.check()
        self._check_grammar()
        logits = self._logits(idx) if run.n_logprobs is not None else None
        token = int(super().sample(*args, idx=idx, **options))
        now = time.perf_counter()
        if run.sampled_at is not None:
            run.cost.decode_seconds += now - run.sampled_at
        run.sampled_at = now
        self._last = None if logits is None else self._choice(token, logits, run.n_logprobs or 0)
        return token

    def _logits(self, idx: int | None) -> Any:
        row = -1 if idx is None else idx - self.n_tokens
        return np.array(np.ctypeslib.as_array(self._ctx.get_logits_ith(row), (self._n_vocab,)), dtype=np.float64)

    def _choice(self, token: int, logits: Any, n_top: int) -> Choice:
        logprobs = logits - logits.max()
        logprobs -= np.log(np.exp(logprobs).sum())
        best = np.argpartition(-logprobs, n_top)[:n_top] if 0 < n_top < len(logprobs) else np.arange(len(logprobs) if n_top else 0)
        best = best[np.argsort(-logprobs[best], kind="stable")]
        return Choice(self.piece(token), float(logprobs[token]), tuple((self.piece(int(i)), float(logprobs[i])) for i in best))

    def generate(self, tokens: Sequence[int], *args: Any, **options: Any) -> Iterator[int]:
        run = self.run
        if run is None:
            yield from super().generate(tokens, *args, **options)
            return
        run.cost.prompt_tokens = run.cost.prompt_tokens or len(tokens)
        start, run.sampled_at = time.perf_counter(), None
        rest = run.rest if self.goes_on else min(self._n_ctx - len(tokens), run.rest or self._n_ctx)
        for made, token in enumerate(super().generate(tokens, *args, **options), 1):
            if made == 1 and run.sampled_at is not None:
                run.cost.prefill_seconds += run.sampled_at - start
            if not self.native.is_end(token):
                run.cost.reply_tokens += 1
                run.put(run.text.add(self.piece(token), self._last))
            yield token
            # the base sees no text, and so no stop string
            if made == rest or run.text.stopped:
                return

    def create_completion(
        self,
        prompt: str | list[int],
        *,
        stream: bool = False,
        stop: str | list[str] | None = None,
        max_tokens: int | None = None,
        **options: Any,
    ) -> Any:
        """For chat handlers too. What some of them drop (the seed, the limit, the bias of tokens) is what the run says, whatever they ask."""
        if self.run is None:
            return super().create_completion(prompt, stream=stream, stop=stop, max_tokens=max_tokens, **options)
        limits = [n for n in (self.run.rest, max_tokens) if n is not None and (n > 0 or n is self.run.rest)]
        stops = [stop] if isinstance(stop, str) else list(stop or ())
        if self.run.message_stops is not None and isinstance(prompt, str) and prompt.endswith("message:\n"):
            options["grammar"] = None  # the handler leaves that of function names on, and no message could be written
            stops += self.run.message_stops
        chunks = self._chunks(self.run, self.prompt_tokens(prompt), [text for text in stops if text], min(limits, default=None), options)
        return chunks if stream else self._joined(self.run, list(chunks))

    def _chunks(self, run: Run, tokens: list[int], stops: list[str], limit: int | None, options: Json) -> Iterator[Json]:
        full = not self.goes_on and len(tokens) >= self._n_ctx  # a later call of a handler, which calls again with what the model said
        run.text = ReplyText(stops)
        chunk: Json = {"id": "", "object": "text_completion", "created": 0, "model": "", "choices": []}
        run.finish = "length"
        if not full and limit != 0:
            given = {name: value for name, value in options.items() if name not in _OF_THE_RUN}
            for chunk in self._create_completion(tokens, stream=True, max_tokens=limit or 0, seed=run.seed, logit_bias=run.logit_bias, **given):
                ended = chunk["choices"][0]["finish_reason"]
                run.finish = "stop" if run.text.stopped else ended or run.finish
                if not ended and run.ready.text:
                    yield _chunk(chunk, run.take(), run)
        run.put(run.text.finish())
        if run.ready.text or run.ready.choices:
            yield _chunk(chunk, run.take(), run)
        yield {**chunk, "choices": [{"index": 0, "text": "", "logprobs": None, "finish_reason": run.finish}]}

    def _joined(self, run: Run, chunks: list[Json]) -> Json:
        parts = [chunk["choices"][0] for chunk in chunks]
        logprobs: Json | None = None
        if run.n_logprobs is not None:
            shown = [part["logprobs"] for part in parts if part["logprobs"]]
            logprobs = {name: [value for one in shown for value in one[name]] for name in Piece("").logprobs(0)}
        choice = {"index": 0, "text": "".join(part["text"] for part in parts), "logprobs": logprobs, "finish_reason": run.finish}
        return {**chunks[-1], "choices": [choice], "usage": run.cost.usage()}

    def too_long(self, n_prompt: int) -> str:
        """What to say of a prompt that does not fit."""
        return (
            f"the prompt has {n_prompt} tokens, and the context holds {self.n_ctx()} with at least one for the reply: shorten it, or start the "
            "server with a larger -c, or with --window"
        )


def _candidates(tokens: Sequence[int]) -> npt.NDArray[np.void]:
    """An array of llama_token_data, all equally likely."""
    found = np.zeros(len(tokens), dtype=[("id", np.int32), ("logit", np.float32), ("p", np.float32)])
    found["id"], found["logit"] = tokens, 1
    return found


def _chunk(base: Json, piece: Piece, run: Run) -> Json:
    logprobs = None
    if run.n_logprobs is not None:
        logprobs = piece.logprobs(run.offset)
        run.shown += piece.choices
    return {**base, "choices": [{"index": 0, "text": piece.text, "logprobs": logprobs, "finish_reason": None}]}


def _since(now: Counts, before: Counts) -> Counts:
    return Counts(*(getattr(now, name) - getattr(before, name) for name in Counts.__dataclass_fields__))
