"""`Llama`: llama-cpp-python's class of that name, with the experts paged. All that it can do is its base's; what is added is said here.

The base loads a model in its constructor: it sets `model_params`, then `_model`, then makes the context. Properties of these names are where paging
comes in, so that no code of llama-cpp-python is copied or replaced.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from typing import Any

from tinyserve_gguf._llama import (  # before numpy
    C,
    NativeContext,
    StockBatch,
    StockCandidates,
    StockContext,
    StockLlama,
    StockModel,
    StockTokenizer,
    explained,
)

# isort: split
import numpy as np
import numpy.typing as npt

from tinyserve_gguf.context import plan_window
from tinyserve_gguf.errors import ModelFileError, OptionError
from tinyserve_gguf.experts import Experts
from tinyserve_gguf.live import ExpertMap, Resized
from tinyserve_gguf.llama_context import CLOSED, PagedContext
from tinyserve_gguf.llama_options import STOCK_DEFAULTS, Decision, PagedOptions, check_known, decide
from tinyserve_gguf.plan import Plan
from tinyserve_gguf.sequence import TokenSequence
from tinyserve_gguf.stats import Stats
from tinyserve_gguf.weights import Weights
from tinyserve_gguf.window import Rolling, WindowCounts

log = logging.getLogger("tinyserve_gguf")

ENDLESS = 1 << 30  # tokens: what the base may count to where a window holds the last ones


class Llama(StockLlama):  # type: ignore[misc]
    """A llama_cpp.Llama whose routed experts are paged. Every option of llama-cpp-python 0.3.36 is taken and means what it means there.

    Args:
        model_path: the GGUF, or any shard of a split one.
        expert_cache, policy, device, miss, miss_admit, miss_threads, window, sinks, vram, vram_reserve, ram, warm: as in `tinyserve_gguf.load`. A
            window takes the place of `n_ctx`.
        kv_type, kv_type_v: as in `load`, by name; they take the place of `type_k` and `type_v`.
        n_gpu_layers: left out, every layer goes to `device`. 0 is the CPU, -1 every layer. A part of the layers clashes with paging: OptionError.
        use_mmap, use_mlock: for what llama.cpp loads itself; the experts stay in the mapped file, whose pages a GPU's driver locks.

    A dense GGUF simply runs. Raises UnknownOptionError (a TypeError) for options that do not exist, and ModelFileError, OptionError (ValueErrors) or
    CapacityError as `load` does.
    """

    # Of the base, as far as it is written here
    _seed: int
    _lora_adapter: Any
    _chat_handlers: dict[str, Any]
    tokenizer_: Any
    input_ids: npt.NDArray[np.intc]
    scores: npt.NDArray[np.float32]

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        expert_cache: str | int = "auto",
        policy: str = "lfru",
        device: str = "auto",
        miss: str = "fetch",
        window: int | None = None,
        sinks: int | None = None,
        kv_type: str | None = None,
        kv_type_v: str | None = None,
        miss_admit: int | None = None,
        miss_threads: int | None = None,
        vram: float | None = None,
        vram_reserve: float | None = None,
        ram: float | None = None,
        warm: bool = False,
        **stock: Any,
    ) -> None:
        self._begin()
        check_known(stock, OWN_NAMES)
        paged = PagedOptions(
            expert_cache, policy, device, window, sinks, kv_type, kv_type_v, miss, miss_admit, miss_threads, vram, vram_reserve, ram, warm
        )
        self._open(model_path, paged, stock)

    def _begin(self) -> None:
        """What `close` needs, before anything can fail."""
        self._stack = ExitStack()
        self._weights: Weights | None = None
        self._sequence: TokenSequence | None = None
        self._counts = WindowCounts()
        self._step_at: float | None = None  # when the decoding of a single token began

    def _open(self, model_path: str | os.PathLike[str], paged: PagedOptions, given: dict[str, Any]) -> None:
        path = os.fspath(model_path)
        self._paged, self._given = paged, given
        try:
            if given.get("vocab_only"):
                if paged != PagedOptions():
                    raise OptionError("vocab_only loads no weights: there is nothing to page, leave the options of paging out")
                self._construct(path, given)
                return
            decision = decide(path, paged, given)
            self._weights = Weights(decision.plan, decision.device, paged.policy, decision.misses, decision.n_threads, warm=paged.warm)
            self._construct(decision.path, decision.stock)
            self.model_path = path
            self._first_seed = self._seed
            if self._lora_adapter:
                self._weights.native.hold_adapter(self._lora_adapter, self.lora_scale)
                self._lora_adapter = None  # freed with the weights, which other contexts may share
            self._lines: tuple[str, ...] = ()
            self._rolling: Rolling | None = None
            self._plan_window(decision)
            self._start_context()
        except BaseException:
            self.close()
            raise
        self._say(self.lines())

    def _say(self, lines: list[str]) -> None:
        for line in lines:
            log.info("%s", line)
            if self.verbose:
                print(line, file=sys.stderr)

    def _construct(self, path: str, options: dict[str, Any]) -> None:
        """The base's constructor, with llama.cpp's own reason where it fails."""
        with explained() as cause:
            try:
                super().__init__(path, **options)
                if self.lora_path and not self._lora_adapter:  # the base takes a null pointer for an adapter
                    raise ModelFileError(f"{self.lora_path}: llama.cpp cannot load this adapter: {cause()}")
            except ValueError as error:
                if str(error).startswith("Failed to load model"):
                    raise (self._weights and self._weights.why_not_loaded()) or ModelFileError(
                        f"{path}: llama.cpp cannot load it: {cause()}"
                    ) from error
                if str(error).startswith("Failed to create llama_context"):
                    raise OptionError(f"llama.cpp cannot make this context (try a smaller n_ctx or n_batch): {cause()}") from error
                raise

    # ---- where the base's constructor is met ----

    @property
    def model_params(self) -> Any:
        return self._model_params

    @model_params.setter
    def model_params(self, params: Any) -> None:
        self._model_params = params
        if self._weights:
            self._weights.prepare(params)

    @property
    def _model(self) -> Any:
        return self._stock_model

    @_model.setter
    def _model(self, model: Any) -> None:
        self._stock_model = model
        if self._weights:
            model._exit_stack.pop_all()  # it would free the llama_model with this context
            self._weights.adopt(model.model)

    # ---- contexts ----

    def _plan_window(self, decision: Decision) -> None:
        """How a window is kept, now that llama.cpp can say whether positions can move."""
        context = decision.context
        if context is None:
            return
        self._lines, self._rolling = context.lines, context.rolling
        if context.rolling and context.rolling.shifts and not C.llama_memory_can_shift(self._ctx.memory):
            assert decision.device
            kv = decision.kv
            self._rolling, text = plan_window(decision.plan.facts, context.rolling.window, kv, decision.device, can_shift=False)
            self._lines = (*context.lines[:-1], f"window: {text}")

    def _start_context(self) -> None:
        """What is ours of a context that the base has made."""
        assert self._weights
        self._ctx.__class__ = PagedContext
        self._ctx.sequence = None
        if self._rolling:
            native = NativeContext.borrowed(self._weights.native, self._ctx.ctx)
            self._stack.callback(native.close)
            self._sequence = self._ctx.sequence = TokenSequence(native, self._rolling, self._counts)
            self._n_ctx = ENDLESS
        self._weights.watch(self._counts)

    def new_context(self) -> Llama:
        """Another Llama over the same weights, pager and slots, with a KV cache of its own; empty, with the seed that this one had at first. It may
        be used from another thread at the same time, and is closed by itself: the weights go with the last. Chat handlers and a draft model are
        shared; a cache (`set_cache`) is not."""
        if self._weights is None:
            raise OptionError("there is nothing to share: the model is closed, or was opened with vocab_only")
        self._weights.hold()
        other: Llama = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._begin()
        other._weights = self._weights
        try:
            other._make_context(self)
        except BaseException:
            other.close()
            raise
        return other

    def _make_context(self, like: Llama) -> None:
        """What the base's constructor does after loading."""
        model = StockModel.__new__(StockModel)
        model.__dict__.update(like._stock_model.__dict__)
        model._exit_stack = ExitStack()
        self._stock_model = self._stack.enter_context(closing(model))
        with explained() as cause:
            try:
                context = StockContext(model=model, params=self.context_params, verbose=self.verbose)
            except ValueError as error:
                raise OptionError(f"llama.cpp cannot make one more context: {cause()}") from error
        self._ctx = self._stack.enter_context(closing(context))
        batch = StockBatch(n_tokens=self.n_batch, embd=0, n_seq_max=self.context_params.n_ctx, verbose=self.verbose)
        self._batch = self._stack.enter_context(closing(batch))
        assert self._weights
        self._weights.native.adapt(self._ctx.ctx)
        if type(self.tokenizer_) is StockTokenizer:
            self.tokenizer_ = StockTokenizer(self)
        self._candidates = StockCandidates(n_vocab=self._n_vocab)
        self._chat_handlers = dict(like._chat_handlers)
        self.input_ids, self.scores = np.empty_like(like.input_ids), np.empty_like(like.scores)
        self.n_tokens, self._requires_eval, self._sampler, self.cache = 0, True, None, None
        self._seed = self._first_seed
        self._start_context()

    def close(self) -> None:
        """Free this context, and with the last one weights and slots. What is used afterwards is an OptionError."""
        self._stack.close()
        weights, self._weights = self._weights, None
        if weights:
            weights.release(self._counts)
        self._sequence = None
        self._stock_model = self._ctx = self.tokenizer_ = CLOSED

    def __del__(self) -> None:
        if "_stack" in vars(self):  # else the constructor did not even begin
            self.close()

    # ---- decoding ----

    def eval(self, tokens: Sequence[int]) -> None:
        """As the base's. With a window the oldest tokens leave when it is full, and `n_tokens` counts them too."""
        sequence = self._sequence
        if self._weights and self._weights.watch_misses and len(tokens) == 1:
            self._step_at = time.perf_counter()
        if sequence is None:
            super().eval(tokens)
            return
        held = sequence.cut(self.n_tokens)
        pending = [*self.input_ids[held : self.n_tokens].tolist(), *map(int, tokens)]
        end = held + len(pending)
        if end > len(self.input_ids):
            self.input_ids = np.concatenate([self.input_ids, np.empty(end, np.intc)])
        self.input_ids[held:end] = pending
        while pending:
            chunk = pending[: sequence.step(sequence.context.n_batch)]
            del pending[: len(chunk)]
            sequence.append(chunk, want_logits=not pending)
            self.n_tokens = sequence.n_tokens
        self._requires_eval = False

    def reset(self) -> None:
        super().reset()
        if self._sequence:
            self._sequence.clear()

    def sample(self, *arguments: Any, **options: Any) -> int:
        token = int(super().sample(*arguments, **options))
        watch = self._weights.watch_misses if self._weights else None
        if self._step_at is not None and watch:
            watch.decoded(time.perf_counter() - self._step_at)
            self._step_at = None
            self._say(watch.take_notes())
        return token

    # ---- state ----

    def save_state(self) -> Any:
        state = super().save_state()
        if self._sequence:
            state.track = self._sequence.save()
        return state

    def load_state(self, state: Any) -> None:
        """OptionError for a state that another kind of context saved: one with a window, or with another one."""
        track = getattr(state, "track", None)
        if (track is None) != (self._sequence is None):
            raise OptionError("this state was saved " + ("with a window" if track else "without a window") + ": load it into a context of that kind")
        super().load_state(state)
        if self._sequence and track:
            self._sequence.load(track)

    def __getstate__(self) -> dict[str, Any]:
        """The options of the constructor: what is unpickled loads the model again."""
        state: dict[str, Any] = super().__getstate__()
        ours = (
            {"n_gpu_layers"} | ({"n_ctx"} if self._paged.window else set()) | ({"type_k", "type_v", "flash_attn"} if self._paged.kv_type else set())
        )
        for name in ours:
            del state[name]
            if name in self._given:
                state[name] = self._given[name]
        return state | asdict(self._paged)

    # ---- what is added ----

    @property
    def plan(self) -> Plan:
        """How the slots were decided, and why. OptionError with vocab_only, and once closed."""
        return self._held.plan

    @property
    def experts(self) -> Experts:
        """`experts[layer, expert]`. OptionError on a dense model."""
        return self._held.experts

    @property
    def is_paged(self) -> bool:
        """False for a dense model."""
        return self._held.pager is not None

    def stats(self) -> Stats:
        """Counters of the expert cache and of windows since the model was opened, of all contexts that share it."""
        return self._held.stats(windows=self._rolling is not None)

    def expert_map(self) -> ExpertMap:
        """Every expert at one moment; may be called several times a second while replies run. OptionError on a dense model."""
        return self._held.expert_map()

    def resize(self, expert_cache: str | int) -> Resized:
        """Give the expert cache another size, as `Model.resize` does; for every context over the same weights."""
        return self._held.resize(expert_cache)

    def reset_stats(self) -> None:
        self._held.reset_stats()

    def set_policy(self, policy: str) -> None:
        """Change the eviction policy; residency stays."""
        self._held.set_policy(policy)

    def check_integrity(self) -> None:
        """EngineError if the expert cache contradicts itself."""
        if self._held.pager:
            self._held.pager.check_integrity()

    def lines(self) -> list[str]:
        """What was decided and why, for people."""
        return [*self._held.lines(), *self._lines]

    @property
    def _held(self) -> Weights:
        if self._weights is None:
            raise OptionError("the model is closed, or was opened with vocab_only")
        return self._weights


OWN = [parameter for parameter in inspect.signature(Llama.__init__).parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
OWN_NAMES = [parameter.name for parameter in OWN if parameter.kind is parameter.KEYWORD_ONLY]
# For help() and for who asks: the options of the base by name
_STOCK = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default) for name, default in STOCK_DEFAULTS.items()]
vars(Llama)["__init__"].__signature__ = inspect.Signature([*OWN, *_STOCK])
