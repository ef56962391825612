"""What a `Llama` is asked to be, and what is made of it: which options go together, which device, how many slots. Loads no weights."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tinyserve_gguf._llama import C, StockLlama
from tinyserve_gguf._shim import Device
from tinyserve_gguf.choices import DEFAULT_SINKS, KV_TYPES
from tinyserve_gguf.context import ContextPlan, ContextSpec, plan_context, uses_flash
from tinyserve_gguf.errors import OptionError, UnknownOptionError
from tinyserve_gguf.facts import LayoutGroup, ModelFacts, read_facts
from tinyserve_gguf.kv import KvOptions
from tinyserve_gguf.lora import read_adapters
from tinyserve_gguf.miss import MissOptions
from tinyserve_gguf.placement import default_threads, pick_device, plan_for
from tinyserve_gguf.plan import Budget, CacheSpec, Plan
from tinyserve_gguf.split import check_split_mode
from tinyserve_gguf.weights import check_policy
from tinyserve_gguf.window import Window

# Names of llama_cpp.Llama's options, with their defaults
STOCK_DEFAULTS: dict[str, Any] = {
    name: parameter.default
    for name, parameter in inspect.signature(StockLlama.__init__).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}
_PLANNED_KEYS = ("expert_count", "expert_group_count", "expert_group_used_count", "block_count")  # what a plan rests on, beside the top-k


@dataclass(frozen=True, slots=True)
class PagedOptions:
    """What `Llama` takes beside llama-cpp-python's options. OptionError for values that no model goes with."""

    expert_cache: str | int = "auto"
    policy: str = "lfru"
    device: str = "auto"
    window: int | None = None
    sinks: int | None = None
    kv_type: str | None = None
    kv_type_v: str | None = None
    miss: str = "fetch"
    miss_admit: int | None = None
    miss_threads: int | None = None
    vram: float | None = None  # GiB, as the other two
    vram_reserve: float | None = None
    ram: float | None = None
    warm: bool = False

    def __post_init__(self) -> None:
        check_policy(self.policy)
        CacheSpec.parse(self.expert_cache)
        _ = self.misses, self.kept, self.budget
        KvOptions(self.kv_type or "f16", self.kv_type_v or "f16")
        if self.sinks is not None and self.window is None:
            raise OptionError("sinks need a window: without one nothing leaves the context")
        if self.kv_type_v is not None and self.kv_type is None:
            raise OptionError("kv_type_v is for values whose type is not that of the keys: give kv_type too")

    @property
    def kept(self) -> Window | None:
        """The window as it is kept."""
        return None if self.window is None else Window(self.window, DEFAULT_SINKS if self.sinks is None else self.sinks)

    @property
    def budget(self) -> Budget:
        return Budget.of(self.vram, self.vram_reserve, self.ram)

    @property
    def misses(self) -> MissOptions:
        return MissOptions(self.miss, self.miss_admit, self.miss_threads)


@dataclass(frozen=True, slots=True)
class Decision:
    """How a model is opened."""

    path: str  # for llama.cpp: the file, or its first shard
    stock: dict[str, Any]  # options for llama-cpp-python's constructor
    plan: Plan
    device: Device | None  # None: llama.cpp chooses
    misses: MissOptions
    n_threads: int
    kv: KvOptions
    context: ContextPlan | None  # with a window or KV types of ours


def check_known(given: Iterable[str], own: Iterable[str]) -> None:
    """UnknownOptionError for an option that neither llama-cpp-python nor this package has."""
    for name in given:
        if name not in STOCK_DEFAULTS:
            near = difflib.get_close_matches(name, [*STOCK_DEFAULTS, *own], 1)
            raise UnknownOptionError(f"Llama has no option {name!r}" + (f"; did you mean {near[0]}?" if near else ""))


def decide(path: str, paged: PagedOptions, given: dict[str, Any]) -> Decision:
    """`given`: llama-cpp-python's options as the caller gave them. ModelFileError, OptionError or CapacityError if it cannot be."""
    asked = STOCK_DEFAULTS | given
    facts = _overridden(read_facts(path), asked["kv_overrides"] or {})
    stock = dict(given)
    spec = _context_spec(paged, given)
    n_ubatch = min(asked["n_ubatch"], asked["n_batch"], spec.length(facts))
    n_gpu_layers = given.get("n_gpu_layers")
    where: dict[str, Any] = {"expert_cache": paged.expert_cache, "device": _device_name(paged, asked, n_gpu_layers), "budget": paged.budget}
    where["tensor_split"] = stock.pop("tensor_split", None)
    if asked["lora_path"] and asked["lora_scale"]:
        where["adapters"] = read_adapters(facts, (), [(asked["lora_path"], asked["lora_scale"])])
    plan, device = plan_for(facts, context=spec, n_ubatch=n_ubatch, cpu_misses=paged.misses.uses_cpu, **where)
    context = None
    if spec.window or paged.kv_type:
        context = plan_context(facts, spec, device, n_ubatch=n_ubatch, n_threads=1)
    if spec.window:
        stock["n_ctx"] = spec.window.size
    if paged.kv_type:
        stock |= {"type_k": spec.kv.keys.type_id, "type_v": spec.kv.values.type_id, "flash_attn": uses_flash(facts, spec.kv, device)}
    n_threads = asked["n_threads"] or default_threads()
    misses = paged.misses.completed(n_threads)
    if not facts.is_moe:
        if misses.uses_cpu:
            raise OptionError(f"{facts.name} is dense: there is no expert to miss, drop miss={paged.miss!r}")
        if n_gpu_layers is None:
            stock["n_gpu_layers"] = 0 if device.is_cpu else -1
        return Decision(
            str(facts.path), stock, plan, device if n_gpu_layers is None or paged.device != "auto" else None, misses, n_threads, spec.kv, context
        )
    _check_placement(facts, device, asked, n_gpu_layers)
    stock["n_gpu_layers"] = -1  # of the device that pages, which is the CPU's too where that plays the device
    return Decision(str(facts.path), stock, plan, device, misses, n_threads, spec.kv, context)


def _device_name(paged: PagedOptions, asked: dict[str, Any], n_gpu_layers: int | None) -> str:
    """The device to page on, or several. OptionError if the number of layers or the split mode contradicts it."""
    if n_gpu_layers == 0:
        if paged.device.lower() not in ("auto", "cpu"):
            raise OptionError(f"n_gpu_layers=0 leaves no layer for device={paged.device!r}: give n_gpu_layers=-1, or leave one of them out")
        return "CPU"
    if paged.device.lower() == "cpu" and n_gpu_layers is not None:
        raise OptionError(f"n_gpu_layers={n_gpu_layers} asks for a GPU and device='CPU' for none: leave one of them out")
    if asked["split_mode"] == C.LLAMA_SPLIT_MODE_NONE:
        if "," in paged.device:
            raise OptionError(f"split_mode=LLAMA_SPLIT_MODE_NONE is for one GPU, and device={paged.device!r} names several: leave one of them out")
        return pick_device(paged.device).name
    return paged.device


def _check_placement(facts: ModelFacts, device: Device, asked: dict[str, Any], n_gpu_layers: int | None) -> None:
    """OptionError for llama-cpp-python's ways of placing layers that clash with paging."""
    every = facts.n_blocks + 1  # the output layer counts
    if n_gpu_layers is not None and 0 < n_gpu_layers < every and not device.is_cpu:
        raise OptionError(
            f"n_gpu_layers={n_gpu_layers} clashes with paging: the experts alone stay in host memory, and all {every} layers go to {device.name}; "
            "give n_gpu_layers=-1, or leave it out"
        )
    if asked["split_mode"] not in (C.LLAMA_SPLIT_MODE_LAYER, C.LLAMA_SPLIT_MODE_NONE):
        check_split_mode("row" if asked["split_mode"] == C.LLAMA_SPLIT_MODE_ROW else "tensor")
    if asked["main_gpu"] != 0:
        raise OptionError(f"main_gpu={asked['main_gpu']} clashes with paging: name the GPU as device, such as device='CUDA1'")


def _context_spec(paged: PagedOptions, given: dict[str, Any]) -> ContextSpec:
    """OptionError for options that say the same thing twice, or what a window cannot give."""
    asked = STOCK_DEFAULTS | given
    if paged.kv_type:
        if twice := [name for name in ("type_k", "type_v") if given.get(name) is not None]:
            raise OptionError(f"kv_type and {twice[0]} say the same thing: give one of them")
        flash = "auto" if "flash_attn" not in given else "on" if given["flash_attn"] else "off"
        kv = KvOptions(paged.kv_type, paged.kv_type_v or paged.kv_type, flash)
    else:
        names = {kind.type_id: name for name, kind in KV_TYPES.items()}
        kv = KvOptions(*(names.get(asked[name] if asked[name] is not None else C.GGML_TYPE_F16, "f16") for name in ("type_k", "type_v")))
    if paged.kept is None:
        return ContextSpec(asked["n_ctx"], None, kv, any_length=True)
    if "n_ctx" in given:
        raise OptionError("window is the length of the context: give it or n_ctx, not both")
    for name in ("logits_all", "draft_model"):
        if asked[name]:
            raise OptionError(f"a window keeps no logits of tokens that left, and {name} needs them: give n_ctx instead of window")
    return ContextSpec(None, paged.kept, kv)


def _overridden(facts: ModelFacts, overrides: Mapping[str, object]) -> ModelFacts:
    """The facts with the top-k that the caller overrides. OptionError for overrides that a plan cannot follow."""
    prefix = f"{facts.architecture}."
    if not facts.is_moe:
        return facts
    for name in ("general.architecture", *(prefix + key for key in _PLANNED_KEYS)):
        if name in overrides:
            raise OptionError(f"kv_overrides of {name} would change what the experts are: convert the model again instead")
    n_used = overrides.get(f"{prefix}expert_used_count")
    if n_used is None:
        return facts
    if not isinstance(n_used, int) or not 0 < n_used <= facts.n_expert or len({layer.n_used for layer in facts.expert_layers}) > 1:
        raise OptionError(f"kv_overrides of {prefix}expert_used_count: one number for all layers, 1 to {facts.n_expert}, not {n_used!r}")
    changed = {id(layer): replace(layer, n_used=min(n_used, layer.n_expert)) for layer in facts.expert_layers}
    groups = tuple(LayoutGroup(group.layout, tuple(changed[id(layer)] for layer in group.layers)) for group in facts.groups)
    return replace(facts, n_used=n_used, expert_layers=tuple(changed.values()), groups=groups)
