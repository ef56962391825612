"""A model whose experts are paged: `load()` plans, opens and checks it; `Model` is what apps hold."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from threading import Lock
from types import TracebackType
from typing import Any

from tinyserve_gguf import _llama, _shim
from tinyserve_gguf._llama import NativeModel, Offload
from tinyserve_gguf._shim import Device, Pager
from tinyserve_gguf.choices import ENGINES
from tinyserve_gguf.context import ContextPlan, ContextSpec, confirm, plan_context
from tinyserve_gguf.errors import CapacityError, EngineError, ModelFileError, OptionError
from tinyserve_gguf.experts import Experts
from tinyserve_gguf.facts import read_facts
from tinyserve_gguf.group import open_pagers
from tinyserve_gguf.live import ExpertMap, Resized, read_map, resize
from tinyserve_gguf.lora import Adapter, read_adapters
from tinyserve_gguf.miss import MissOptions
from tinyserve_gguf.miss_tuning import Tuning, Watching, start_misses, watcher
from tinyserve_gguf.paging import EXPERT_PATTERN, Layers
from tinyserve_gguf.placement import default_threads, plan_for
from tinyserve_gguf.plan import Budget, Plan
from tinyserve_gguf.progress import LoadProgress
from tinyserve_gguf.sampling import Sampling
from tinyserve_gguf.session import Session
from tinyserve_gguf.split import check_split_mode, shares_of
from tinyserve_gguf.stats import LayerTime, Stats, layer_times, parts_of
from tinyserve_gguf.text import until, whole_characters
from tinyserve_gguf.warm import WarmStart
from tinyserve_gguf.weights import check_policy
from tinyserve_gguf.window import WindowCounts


def load(
    path: str | os.PathLike[str],
    *,
    expert_cache: str | int = "auto",
    policy: str = "lfru",
    device: str = "auto",
    tensor_split: Sequence[float] | None = None,
    split_mode: str = "layer",
    n_ctx: int | None = None,
    window: int | None = None,
    sinks: int | None = None,
    kv_type: str = "f16",
    kv_type_v: str | None = None,
    flash_attn: str = "auto",
    n_ubatch: int | None = None,
    n_threads: int | None = None,
    vram: float | None = None,
    vram_reserve: float | None = None,
    ram: float | None = None,
    engine: str = "auto",
    link_gbps: float | None = None,
    miss: str = "fetch",
    miss_admit: int | None = None,
    miss_threads: int | None = None,
    miss_remember: bool = True,
    warm: bool = False,
    lora: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    lora_scaled: Sequence[tuple[str | os.PathLike[str], float]] = (),
    progress: Callable[[float], bool] | None = None,
) -> Model:
    """Open a GGUF model with its routed experts paged through a pool of slots.

    Args:
        path: the GGUF, or any shard of a split one.
        expert_cache: "auto", "all", a number of experts such as 96, a share such as "25%", or a size such as "6GiB".
        policy: which expert leaves: lfru, lru, slru, lfu or fifo.
        device: ggml device, such as "CUDA0" or "CPU", or several, "CUDA0,CUDA1": each gets a part of the layers, and slots for their experts. "auto"
            takes the GPU with the most free memory, and all of them if one does not do.
        tensor_split: with several devices, the share of the layers that each gets, such as (3, 1); by default what fits best.
        split_mode: "layer". llama.cpp's "row" and "tensor" do not go with paging: OptionError.
        n_ctx: context in tokens, by default 4,096; 0 is what the model was trained with. Never more than that.
        window: instead of n_ctx: tokens that the context holds while the sequence goes on without end; the oldest leave.
        sinks: with a window, how many of the first tokens never leave; by default 4.
        kv_type: type of the keys in the KV cache: f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0, iq4_nl or f32.
        kv_type_v: type of the values; by default that of the keys.
        flash_attn: "auto", "on" or "off".
        n_ubatch: tokens computed at once in prefill; by default 512, on a GPU up to 4,096 as memory allows.
        n_threads: threads of CPU computation; by default one per core.
        vram: GiB of device memory to plan with, where less than what is free.
        vram_reserve: GiB of it that stay free; by default a twentieth, at least half a GiB.
        ram: GiB of host memory that may be page-locked for experts; by default nine tenths of what is available.
        engine: "auto", "host" (the host reads the router's choice once a layer) or "device" (one CUDA graph a token; an error where that cannot be).
        link_gbps: slow the host-to-device link down to so many GB/s, for what-if runs on the device engine.
        miss: what happens to misses of decode: "fetch" them, let the "cpu" compute them where they lie, "split" them so that link and CPU finish
            together, keep whole "layers" on the device and let the CPU compute the others, as llama.cpp's --n-cpu-moe does, or "auto": try all of
            that on the first tokens and go on with the fastest. On a GPU the CPU's part rounds differently from llama.cpp on that GPU.
        miss_admit: of the misses that the CPU computes at most one in so many enters the pool, in the background; 0 for none, by default 4.
        miss_threads: threads that compute them; by default `n_threads`, with one core left to the thread that drives the device.
        miss_remember: "auto" keeps its choice in the user's cache directory, and uses one that is kept there.
        warm: fill the slots with the experts that decode used most in earlier runs, and keep count of this one in the user's cache directory.
        lora: LoRA adapter in GGUF, or several, that every session uses, on attention, experts or whatever else they change.
        lora_scaled: the same as pairs of a file and its scale.
        progress: called with 0..1 while weights are loaded; returning False stops it with an EngineError.

    Raises ModelFileError, OptionError or CapacityError, one line each, before anything is left behind.
    """
    check_policy(policy)
    if engine not in ENGINES:
        raise OptionError(f"the engine is one of {', '.join(ENGINES)}, not {engine!r}")
    if link_gbps is not None and link_gbps <= 0:
        raise OptionError(f"the link is above 0 GB/s, not {link_gbps}")
    for name, value in (("-b", n_ubatch), ("-t", n_threads)):
        if value is not None and value < 1:
            raise OptionError(f"{name} is 1 or more, not {value}")
    misses = MissOptions(miss, miss_admit, miss_threads, miss_remember)
    if misses.uses_cpu and engine == "device":
        raise OptionError(f"the device engine fetches every miss: --miss {miss} needs --engine auto or host")
    check_split_mode(split_mode)
    spec = ContextSpec.of(n_ctx, window, sinks, kv_type, kv_type_v, flash_attn)
    facts = read_facts(path)
    adapters, budget = read_adapters(facts, lora, lora_scaled), Budget.of(vram, vram_reserve, ram)
    asked: dict[str, Any] = {"expert_cache": expert_cache, "device": device, "tensor_split": tensor_split, "context": spec, "n_ubatch": n_ubatch}
    plan, chosen = plan_for(facts, budget=budget, cpu_misses=misses.uses_cpu, adapters=adapters, ask=True, **asked)
    context = plan_context(plan.facts, spec, chosen, n_ubatch=plan.n_ubatch, n_threads=n_threads or default_threads())
    return Model(
        plan, chosen, policy, spec, context, engine=engine, link_gbps=link_gbps, misses=misses, warm=warm, adapters=adapters, progress=progress
    )


class Model:
    """An open model. Use it as a context manager, or call `close()`."""

    def __init__(
        self,
        plan: Plan,
        device: Device,
        policy: str,
        spec: ContextSpec,
        context: ContextPlan,
        *,
        engine: str = "auto",
        link_gbps: float | None = None,
        misses: MissOptions = MissOptions(),
        warm: bool = False,
        adapters: Sequence[Adapter] = (),
        progress: Callable[[float], bool] | None = None,
    ) -> None:
        self.plan = plan
        self.facts = plan.facts
        self.policy = policy
        self.context = context
        self.adapters = tuple(adapters)
        self._device = device
        self._pager: Pager | None = None
        self._native: NativeModel | None = None
        self._sessions: set[Session] = set()  # open ones
        self._own: Session | None = None  # that of generate()
        self._formatter: Callable[[list[dict[str, str]]], str] | None = None
        self._closed_windows, self._windows_before = WindowCounts(), WindowCounts()  # of closed sessions; at the last reset of the counters
        self._watch: Tuning | Watching | None = None  # hears of every decoded token: --miss auto, or the guard of another way
        self._warm: WarmStart | None = None
        self._keeps_warm = warm
        self._watcher: Callable[[], Tuning | Watching | None] | None = None  # begins that, for the cache as large as it is then
        self._resizing = Lock()
        try:
            self._open(engine, link_gbps, misses.completed(context.options.n_threads), progress)
            self.context = confirm(context, self.facts, spec, device, self.native)
        except BaseException:
            self.close()
            raise

    def _open(self, engine: str, link_gbps: float | None, misses: MissOptions, progress: Callable[[float], bool] | None) -> None:
        layers: Layers = {}
        offload: Offload | None = self._device.offload(shares_of(self.plan))
        stage = LoadProgress(progress)
        if self.facts.is_moe:
            self._pager, layers = open_pagers(self.plan, self._device, self.policy, engine, misses.threads)
            offload = self._pager.offload(EXPERT_PATTERN)
        try:
            self._native = NativeModel(str(self.facts.path), offload, progress=stage.part(0, 0.5 if self._pager else 1))
        except ModelFileError as error:
            if stage.stopped:
                raise EngineError("loading was stopped") from error
            if self._pager and "cannot be had" in _shim.last_error():
                raise CapacityError(f"{_shim.last_error()}; close other programs, or use a smaller quantisation") from error
            raise
        self._native.require_generative(self.facts.path, self.facts.architecture)
        if self._pager:
            self._pager.ready(stage.part(0.5, 0.9 if self._keeps_warm else 1))
            self._experts = Experts(self._pager, layers)
            self._warm = WarmStart(self.facts, self._pager, layers)
            if self._keeps_warm:
                self._warm.fill_from_file(stage.part(0.9, 1))
            if link_gbps is not None:
                self._pager.set_link(link_gbps * 1e9)
            asked = self._pager, misses, self.facts, self._device, engine, link_gbps, self.context.options.n_threads
            self._watch = start_misses(*asked)
            self._watcher = partial(watcher, *asked)
        elif link_gbps is not None or engine != "auto" or misses.uses_cpu:
            raise OptionError(f"{self.facts.name} is dense: there is no expert engine to choose, no link to slow down and no expert to miss")
        for adapter in self.adapters:
            adapter.open_for(self._native)

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Free contexts, weights and slots. Sessions and expert handles of this model are dead afterwards."""
        if self._warm and self._keeps_warm:
            self._warm.keep()
        self._warm = None
        for session in list(self._sessions):
            session.close()
        self._own = self._formatter = None
        if self._native:
            self._native.close()
            self._native = None
        if self._pager:
            self._pager.close()
            self._pager = None

    # ---- what it is ----

    @property
    def native(self) -> NativeModel:
        if self._native is None:
            raise OptionError("the model is closed")
        return self._native

    @property
    def is_paged(self) -> bool:
        """False for a dense model."""
        return self._pager is not None

    def __repr__(self) -> str:
        return f"<Model {self.facts.name!r}: {self.plan.n_slots} slots on {self.plan.device.name}>" if self._pager else f"<Model {self.facts.name!r}>"

    @property
    def experts(self) -> Experts:
        """`experts[layer, expert]`. OptionError on a dense model."""
        if self._open_pager() is None:
            raise OptionError(f"{self.facts.name} is dense: it has no experts")
        return self._experts

    @property
    def warm(self) -> WarmStart:
        """What decode used so far, and filling free slots with what it used elsewhere. OptionError on a dense model."""
        if self._open_pager() is None or self._warm is None:
            raise OptionError(f"{self.facts.name} is dense: it has no experts")
        return self._warm

    @property
    def engine(self) -> str:
        """Which expert engine runs, and why, for people."""
        return self._pager.engine if self._pager else "llama.cpp alone"

    def lines(self) -> list[str]:
        """What was decided and why, for people: the plan, and what could only be known once the model was loaded."""
        engine = [f"engine: {self.engine}; host pool: {self.host_pool}", f"misses: {self.miss}"] if self._pager else []
        warm = [self._warm.text] if self._warm and self._keeps_warm else []
        adapters = [f"adapter: {adapter}" for adapter in self.adapters]
        return [*self.plan.lines(), *engine, *adapters, *warm, *self.context.lines]

    @property
    def miss(self) -> str:
        """What happens to misses of decode, and why, for people."""
        if self._pager is None:
            return "none, nothing is paged"
        return self._watch.text if self._watch else self._pager.miss

    def decoded(self, seconds: float) -> None:
        """Tell `--miss auto`, or the guard of another way, how long a token took. Sessions do; who decodes by himself must."""
        if self._watch:
            self._watch.decoded(seconds)

    def take_notes(self) -> list[str]:
        """What they found out since the last call, for people."""
        return self._watch.take_notes() if self._watch else []

    @property
    def host_pool(self) -> str:
        """How the device reads experts that are in no slot, and why so, for people."""
        return self._pager.host if self._pager else "none, nothing is paged"

    @property
    def n_ctx(self) -> int:
        """Context in tokens that sessions of this model have; with a window, what they hold at once."""
        return self.context.options.n_ctx

    def stats(self) -> Stats:
        """Counters of the expert cache and of windows since the model was opened."""
        window = self._windows().since(self._windows_before) if self.context.rolling else None
        pager = self._open_pager()
        return Stats(self._snapshot(), self.policy, self.plan.device.name, window, parts_of(pager))

    def reset_stats(self) -> None:
        pager = self._open_pager()
        self._windows_before = self._windows()
        if self._warm:
            self._warm.absorb()
        if pager:
            pager.reset_stats()

    def set_profile(self, on: bool) -> None:
        """Take the time of every layer of every decoded graph, from zero; or no longer. The host-driven engine is slower meanwhile: it waits for the
        device between the parts. OptionError for a dense model."""
        if not self._pager:
            raise OptionError(f"{self.facts.name} is dense: it has no expert layers to profile")
        self._pager.set_profile(on)

    def layer_times(self) -> list[LayerTime]:
        """Since `set_profile(True)`, of every layer that ran, and last what follows them. OptionError unless times are taken.
        Layers whose pool holds all its experts count as the attention of the next."""
        return layer_times(self._pager, self.plan) if self._pager else []

    def _windows(self) -> WindowCounts:
        """Of all sessions, also closed ones."""
        total = self._closed_windows
        for session in self._sessions:
            total = total.plus(session.counts)
        return total

    def _open_pager(self) -> Pager | None:
        """None for a dense model. OptionError for one that is closed, of which nothing is known any more."""
        return self._pager if self.native else None

    def _snapshot(self) -> _shim.PagerStats | None:
        return self._pager.stats() if self._pager else None

    def set_policy(self, policy: str) -> None:
        """Change the eviction policy; residency stays."""
        check_policy(policy)
        pager = self._open_pager()
        self.policy = policy
        if pager:
            pager.set_policy(policy)

    def expert_map(self) -> ExpertMap:
        """Every expert at one moment: resident, hits, last use. May be asked several times a second while replies run. OptionError if dense."""
        return read_map(self.experts.pager, self.plan)

    def resize(self, expert_cache: str | int) -> Resized:
        """Give the expert cache another size, as in `load`, while the model is in use; replies go on, with the same logits. Experts that are resident
        stay so as far as there is room, in the order of the policy; pinned ones always. CapacityError, OptionError or EngineError for a size that
        cannot be: nothing changed."""
        with self._resizing:
            self.plan, done = resize(self.experts.pager, self.plan, expert_cache, self._device)
            if self._watcher:  # what is fastest depends on the size
                self._watch = self._watcher()
        return done

    def check_integrity(self) -> None:
        """EngineError if the expert cache contradicts itself."""
        if pager := self._open_pager():
            pager.check_integrity()

    # ---- text ----

    @property
    def chat_template(self) -> str | None:
        """The Jinja template in the file."""
        return self.native.metadata("tokenizer.chat_template")

    def tokenize(self, text: str, *, add_bos: bool = True, special: bool = False) -> list[int]:
        """Tokens of `text`. `add_bos` as the model wants it; `special` reads markers such as <|im_end|> as tokens."""
        return self.native.tokenize(text, add_special=add_bos, parse_special=special)

    def detokenize(self, tokens: Sequence[int]) -> str:
        return b"".join(self.native.piece(token) for token in tokens).decode("utf-8", "replace")

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """Prompt text of `messages` by the chat template, up to where the assistant begins. ModelFileError without a template, OptionError where the
        template refuses or fails: a role it does not know, an order it does not take."""
        formatter = self._formatter or self._compile_template()
        try:
            return formatter(list(messages))
        except _llama.TEMPLATE_ERRORS as error:
            raise OptionError(f"the chat template refuses these messages: {error}") from error

    def _compile_template(self) -> Callable[[list[dict[str, str]]], str]:
        """For `render`, once a model: templates of 9 kB, as tool callers have them, took 150 ms to compile and 0.05 ms to render."""
        template = self.chat_template
        if template is None:
            raise ModelFileError(f"{self.facts.path} has no chat template: it is a base model, use Model.generate")
        self._formatter = formatter = _llama.chat_formatter(template, bos=self.native.bos_text(), eos=self.native.eos_text())
        return formatter

    def prompt_tokens(self, text: str) -> list[int]:
        """Tokens of what `render` gave: markers are tokens, and a template that writes the BOS itself gets no second one."""
        bos = self.native.bos_text()
        return self.tokenize(text, add_bos=not (bos and text.startswith(bos)), special=True)

    def session(self) -> Session:
        """A new KV cache of `n_ctx` tokens. It is closed with the model at the latest."""
        session = Session(self.native, self.context.options, self.context.rolling, self._snapshot, on_close=self._closed, on_step=self.decoded)
        self._sessions.add(session)
        return session

    def _closed(self, session: Session) -> None:
        if session in self._sessions:
            self._sessions.discard(session)
            self._closed_windows = self._closed_windows.plus(session.counts)

    def text(self, tokens: Iterator[int]) -> Iterator[str]:
        """Pieces of text for tokens as they come; a character that is split over tokens comes when it is whole."""
        return whole_characters(self.native.piece(token) for token in tokens)

    def generate(self, prompt: str, *, max_tokens: int = 128, sampling: Sampling = Sampling(), stop: str | Sequence[str] = ()) -> Iterator[str]:
        """Complete `prompt`, as it is, in pieces of text; ends before the first of `stop`. Calls share one KV cache and reuse its prefix."""
        if self._own is None:
            self._own = self.session()
        return until(self.text(self._own.generate(self.tokenize(prompt), max_tokens, sampling)), (stop,) if isinstance(stop, str) else stop)

    def chat(self, messages: Sequence[dict[str, str]], *, max_tokens: int = -1, sampling: Sampling = Sampling()) -> Iterator[str]:
        """The reply to `messages` ({"role", "content"}) through the model's chat template. Calls share one KV cache and reuse its prefix."""
        if self._own is None:
            self._own = self.session()
        return self.text(self._own.generate(self.prompt_tokens(self.render(messages)), max_tokens, sampling))
