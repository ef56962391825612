"""What contexts of a model will be: how long, of which types, with which window; and what was decided, in words."""

from __future__ import annotations

from dataclasses import dataclass, field

from tinyserve_gguf import _ops
from tinyserve_gguf._llama import ContextOptions, NativeContext, NativeModel
from tinyserve_gguf._shim import Device
from tinyserve_gguf.choices import DEFAULT_SINKS, KvType
from tinyserve_gguf.errors import OptionError
from tinyserve_gguf.facts import ModelFacts
from tinyserve_gguf.kv import KvOptions, check_kv, keep_window, why_no_shift
from tinyserve_gguf.window import Rolling, Window

DEFAULT_CTX = 4096


@dataclass(frozen=True, slots=True)
class ContextSpec:
    """What the user asked for. `n_ctx`: tokens, 0 = the model's own, None = not said. `any_length`: also more than the model was trained with."""

    n_ctx: int | None = None
    window: Window | None = None
    kv: KvOptions = field(default_factory=KvOptions)
    any_length: bool = False

    @staticmethod
    def of(n_ctx: int | None, window: int | None, sinks: int | None, kv_type: str, kv_type_v: str | None, flash_attn: str) -> ContextSpec:
        """From single values. OptionError for what cannot be, and for what would be ignored."""
        if sinks is not None and window is None:
            raise OptionError("--sinks needs --window: without one nothing leaves the context")
        if n_ctx is not None and window is not None:
            raise OptionError("--window is the length of the context: give it or -c, not both")
        if n_ctx is not None and n_ctx < 0:
            raise OptionError(f"-c is 0 or more, not {n_ctx}")
        kept = None if window is None else Window(window, DEFAULT_SINKS if sinks is None else sinks)
        return ContextSpec(n_ctx, kept, KvOptions(kv_type, kv_type_v or kv_type, flash_attn))

    def length(self, facts: ModelFacts) -> int:
        """Tokens that the KV cache holds: never more than the model was trained with, unless any length will do."""
        asked = self.window.size if self.window else DEFAULT_CTX if self.n_ctx is None else self.n_ctx
        return asked if asked and self.any_length else min(asked or facts.context_length, facts.context_length or asked)

    def cut(self, facts: ModelFacts) -> list[str]:
        """A line, if that is less than was asked for."""
        length = self.length(facts)
        if not self.n_ctx or length == self.n_ctx:
            return []
        return [f"context: {length:,} tokens in place of -c {self.n_ctx}, as the model was trained with no more"]


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """A spec that goes with a model and a device."""

    options: ContextOptions
    rolling: Rolling | None
    lines: tuple[str, ...]


def uses_flash(facts: ModelFacts, kv: KvOptions, device: Device) -> bool:
    """Whether flash attention is used. OptionError if these types do not go with the model or the device."""
    attention = facts.attention

    def has_flash(key_length: int, value_length: int, keys: KvType, values: KvType) -> bool:
        return all(
            _ops.has_flash_attention(
                member.handle,
                n_head=attention.n_head,
                n_head_kv=attention.n_head_kv,
                key_length=key_length,
                value_length=value_length,
                type_k=keys.type_id,
                type_v=values.type_id,
                mla=attention.is_mla,
            )
            for member in device.members
        )

    return check_kv(attention, kv, device.name, has_flash)


def plan_window(facts: ModelFacts, window: Window, kv: KvOptions, device: Device, *, can_shift: bool = True) -> tuple[Rolling, str]:
    """How a window is kept, and that in words. `can_shift`: what llama.cpp says. OptionError if it cannot be."""

    def has_cast(kind: KvType, length: int) -> bool:
        return all(_ops.has_cast(member.handle, kind.type_id, length) for member in device.members)

    reason = why_no_shift(facts.attention, kv.k, has_cast)
    return keep_window(facts.attention, window, reason or ("" if can_shift else "llama.cpp cannot move them in the cache of this model"))


def plan_context(facts: ModelFacts, spec: ContextSpec, device: Device, *, n_ubatch: int, n_threads: int) -> ContextPlan:
    """OptionError if the spec does not go with the model or the device."""
    lines = spec.cut(facts)
    lines += [] if spec.kv == KvOptions() else [f"KV cache: {spec.kv.line(uses_flash(facts, spec.kv, device))}"]
    options = ContextOptions(
        n_ctx=spec.length(facts),
        n_batch=n_ubatch,
        n_ubatch=n_ubatch,
        n_threads=n_threads,
        flash_attention=spec.kv.flash,
        type_k=spec.kv.keys.type_id,
        type_v=spec.kv.values.type_id,
    )
    rolling = None
    if spec.window:
        rolling, text = plan_window(facts, spec.window, spec.kv, device)
        lines.append(f"window: {text}")
    return ContextPlan(options, rolling, tuple(lines))


def confirm(plan: ContextPlan, facts: ModelFacts, spec: ContextSpec, device: Device, model: NativeModel) -> ContextPlan:
    """The same plan, after asking llama.cpp whether positions can move: it aborts the process where they cannot."""
    if plan.rolling is None or not plan.rolling.shifts:
        return plan
    context = NativeContext(
        model, ContextOptions(n_ctx=1, n_batch=1, n_ubatch=1, n_threads=1, type_k=plan.options.type_k, type_v=plan.options.type_v)
    )
    try:
        can_shift = context.can_shift()
    finally:
        context.close()
    assert spec.window
    rolling, text = plan_window(facts, spec.window, spec.kv, device, can_shift=can_shift)
    return ContextPlan(plan.options, rolling, (*plan.lines[:-1], f"window: {text}"))
