"""How large the expert cache is and why: a pure function from model facts, the size asked for and the device to slots per layout group.

No call here touches a device or a file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from tinyserve_gguf.errors import CapacityError, OptionError
from tinyserve_gguf.facts import LayoutGroup, ModelFacts
from tinyserve_gguf.kv import KvOptions

MIB = 1 << 20
GIB = 1 << 30
UBATCH_CPU = 512
UBATCHES_GPU = (4096, 2048, 1024, 512)
_UNITS = {"": 1, "K": 1 << 10, "M": MIB, "G": GIB}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG])(?:i?B)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What `--expert-cache` asks for: exactly one of the kinds."""

    text: str
    kind: str  # "auto", "all", "experts", "share", "bytes"
    value: float = 0.0  # experts; share of all experts, 0..1; bytes of device memory including the prefill stage

    @staticmethod
    def parse(text: str) -> CacheSpec:
        """`all`, `auto`, a number of experts ("96"), a share ("25%") or a size ("6GiB", "800MiB")."""
        plain = text.strip()
        if plain.lower() in ("all", "auto"):
            return CacheSpec(plain, plain.lower())
        if plain.isdecimal() and int(plain) > 0:
            return CacheSpec(plain, "experts", int(plain))
        if re.fullmatch(r"\d+(\.\d+)?%", plain) and 0 < float(plain[:-1]) <= 100:
            return CacheSpec(plain, "share", float(plain[:-1]) / 100)
        if (match := _SIZE.fullmatch(plain)) and float(match[1]) > 0:
            return CacheSpec(plain, "bytes", float(match[1]) * _UNITS[match[2].upper()])
        raise OptionError(f"the expert cache is all, auto, a number of experts, a share like 25% or a size like 6GiB, not {text!r}")


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a plan needs to know of a device. Bytes; `free` is what may still be taken."""

    name: str
    free: int
    is_cpu: bool


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """One pool: slots for the experts of one layout."""

    group: LayoutGroup
    n_slots: int
    n_stages: int = 1  # 2 on a GPU: one layer is copied while another computes

    @property
    def is_resident(self) -> bool:
        return self.n_slots >= self.group.n_experts

    @property
    def slot_bytes(self) -> int:
        return self.n_slots * self.group.bytes_per_expert

    @property
    def stage_bytes(self) -> int:
        """Room for one whole layer, through which prefill streams what is not resident."""
        return 0 if self.is_resident else self.n_stages * stage_bytes(self.group)


@dataclass(frozen=True, slots=True)
class Plan:
    """Slots per layout group, and the reasons."""

    facts: ModelFacts
    device: DeviceFacts
    pools: tuple[PoolPlan, ...]
    reason: str
    n_ubatch: int  # tokens computed at once in prefill

    @property
    def n_slots(self) -> int:
        return sum(pool.n_slots for pool in self.pools)

    @property
    def device_bytes(self) -> int:
        """Device memory of slots and stages."""
        return sum(pool.slot_bytes + pool.stage_bytes for pool in self.pools)

    @property
    def share(self) -> float:
        """Slots over experts, 0..1."""
        return self.n_slots / sum(pool.group.n_experts for pool in self.pools)

    def lines(self) -> list[str]:
        """What was decided and why, for people."""
        if not self.facts.is_moe:
            return [f"{self.facts.name}: dense {self.facts.architecture}, nothing to page; llama.cpp runs it as it is on {self.device.name}"]
        n_experts = sum(pool.group.n_experts for pool in self.pools)
        stage = sum(pool.stage_bytes for pool in self.pools)
        return [
            f"{self.facts.name}: {self.facts.architecture}, {len(self.facts.expert_layers)} MoE layers of {self.facts.n_expert} experts, "
            f"top-{self.facts.n_used}, on {self.device.name}",
            f"expert cache: {self.n_slots} of {n_experts} experts resident ({self.share:.0%}), {size(self.device_bytes - stage)} of slots"
            + (f" and {size(stage)} of prefill stage" if stage else "")
            + f"; {self.reason}; prefill in batches of {self.n_ubatch} tokens",
        ]


def size(n_bytes: int) -> str:
    """Bytes for people: "204.8 KiB", "13.2 MiB", "12.45 GiB"."""
    value, units = float(n_bytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while round(value, 1) >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    digits = {"bytes": 0, "KiB": 1, "MiB": 1}.get(units[0], 2)
    return f"{value:.{digits}f} {units[0]}"


def stage_bytes(group: LayoutGroup) -> int:
    widest = max(layer.n_expert for layer in group.layers)
    return widest * sum(part.weight.n_bytes // part.weight.ne(2) for part in group.layers[0].parts)


def minimum(group: LayoutGroup) -> int:
    """Slots that one token needs."""
    return max(layer.n_used for layer in group.layers)


def kv_bytes_per_token(facts: ModelFacts, kv: KvOptions = KvOptions()) -> int:
    """Keys and values of one token: as many as the projections have rows. MLA keeps one compressed row, counted twice to be safe."""
    k, v = (kind.n_bytes / kind.block for kind in (kv.keys, kv.values))
    row = {"attn_k.weight": k, "attn_v.weight": v, "attn_qkv.weight": max(k, v), "attn_kv_a_mqa.weight": 2 * k}
    return math.ceil(sum(row.get(tensor.name.partition(".")[2].partition(".")[2], 0) * tensor.ne(1) for tensor in facts.tensors))


def compute_bytes(facts: ModelFacts, n_ubatch: int) -> int:
    """A generous estimate of compute buffers on the device: logits of one token, activations of a batch."""
    vocabulary = max((tensor.ne(1) for tensor in facts.tensors if tensor.name == "token_embd.weight"), default=0)
    return 4 * (vocabulary + n_ubatch * 24 * facts.embedding_length) + 128 * MIB


def context_bytes(facts: ModelFacts, n_ctx: int, n_ubatch: int, kv: KvOptions = KvOptions()) -> int:
    """KV cache and compute buffers on the device."""
    return kv_bytes_per_token(facts, kv) * n_ctx + compute_bytes(facts, n_ubatch)


def pick_ubatch(facts: ModelFacts, device: DeviceFacts) -> int:
    """Tokens to compute at once. On a GPU many, because what is missing of a layer crosses the link once a batch; as long as their activations take
    at most a sixteenth of the free memory."""
    if device.is_cpu:
        return UBATCH_CPU
    return next((n for n in UBATCHES_GPU if compute_bytes(facts, n) <= device.free // 16), UBATCHES_GPU[-1])


def make_plan(
    facts: ModelFacts, spec: CacheSpec, device: DeviceFacts, *, n_ctx: int, n_ubatch: int | None = None, kv: KvOptions = KvOptions()
) -> Plan:
    """Decide the pools, and the batch of prefill unless `n_ubatch` is given.

    Raises CapacityError when a device budget cannot hold what one token needs, OptionError when the size asked for is below that.
    """
    n_ubatch = n_ubatch or pick_ubatch(facts, device)
    if not facts.is_moe:
        if spec.kind not in ("auto", "all"):
            raise OptionError(f"{facts.name} is dense: there are no experts to cache, drop --expert-cache {spec.text}")
        return Plan(facts, device, (), "dense", n_ubatch)
    groups = facts.groups
    total = sum(group.n_experts for group in groups)
    if spec.kind == "all":
        return _pools(facts, device, n_ubatch, lambda group: group.n_experts, "all experts, as asked")
    if spec.kind == "share":
        return _pools(facts, device, n_ubatch, lambda group: math.ceil(spec.value * group.n_experts), f"{spec.text} of the experts, as asked")
    if spec.kind == "experts":
        need = sum(minimum(group) for group in groups)
        if spec.value < need:
            raise OptionError(f"one token needs {need} experts at once: an expert cache of {spec.text} is too small, give {need} or more")
        return _pools(facts, device, n_ubatch, lambda group: int(spec.value) * group.n_experts // total, f"{spec.text} experts, as asked")
    if spec.kind == "bytes":
        return _fit(facts, device, n_ubatch, int(spec.value), f"what fits into {spec.text}, as asked")
    return _auto(facts, device, context_bytes(facts, n_ctx, n_ubatch, kv), n_ubatch)


def _pools(facts: ModelFacts, device: DeviceFacts, n_ubatch: int, slots: Callable[[LayoutGroup], int], reason: str) -> Plan:
    """A plan with so many slots per group, between what one token needs and all."""
    pools = tuple(PoolPlan(group, min(group.n_experts, max(minimum(group), slots(group))), _stages(device)) for group in facts.groups)
    return Plan(facts, device, pools, reason, n_ubatch)


def _stages(device: DeviceFacts) -> int:
    return 1 if device.is_cpu else 2


def _fit(facts: ModelFacts, device: DeviceFacts, n_ubatch: int, budget: int, reason: str) -> Plan:
    """As many slots as fit into `budget` bytes, in proportion to the groups."""
    if sum(group.n_experts * group.bytes_per_expert for group in facts.groups) <= budget:
        return _pools(facts, device, n_ubatch, lambda group: group.n_experts, f"{reason}: all")
    stages = _stages(device) * sum(stage_bytes(group) for group in facts.groups)
    least = sum(minimum(group) * group.bytes_per_expert for group in facts.groups)
    if budget < stages + least:
        raise CapacityError(
            f"an expert cache needs {size(stages + least)} at least ({size(stages)} of prefill stage "
            f"and {size(least)} for the experts of one token), and there is room for {size(max(0, budget))} on {device.name}; "
            "free device memory, or give a smaller -c or -b"
        )
    share = (budget - stages) / sum(group.n_experts * group.bytes_per_expert for group in facts.groups)
    plan = _pools(facts, device, n_ubatch, lambda group: int(share * group.n_experts), reason)
    while plan.device_bytes > budget:  # the minimum of a small group may have pushed the sum over: take it from the largest pool
        pools = sorted(plan.pools, key=lambda pool: pool.n_slots - minimum(pool.group))
        shrunk = replace(pools[-1], n_slots=pools[-1].n_slots - 1)
        plan = replace(plan, pools=tuple(shrunk if pool is pools[-1] else pool for pool in plan.pools))
    return plan


def replan(plan: Plan, spec: CacheSpec, free: int) -> Plan:
    """The plan of a model that is open, with another cache size. `free`: bytes of the device that are free now, without its slots and stages.

    Raises as `make_plan` does, and CapacityError for a size that does not fit.
    """
    facts, device, held = plan.facts, replace(plan.device, free=free), plan.device_bytes
    room = free + held
    if spec.kind == "auto":
        reserve = max(512 * MIB, free // 20) + (facts.expert_bytes if device.is_cpu else 0)  # on the CPU the host pool takes from the same memory
        reason = f"auto: {size(free)} free and {size(held)} of the cache so far, less {size(reserve)} in reserve"
        return _fit(facts, device, plan.n_ubatch, room - reserve, reason)
    new = make_plan(facts, spec, device, n_ctx=0, n_ubatch=plan.n_ubatch)
    if new.device_bytes > room:
        stage = sum(pool.stage_bytes for pool in new.pools)
        raise CapacityError(
            f"an expert cache of {spec.text} takes {size(new.device_bytes)} ({size(new.device_bytes - stage)} for {new.n_slots} slots, {size(stage)} "
            f"of prefill stage); on {device.name} {size(free)} are free and the cache so far is {size(held)}: {size(new.device_bytes - room)} too few"
        )
    return new


def _auto(facts: ModelFacts, device: DeviceFacts, context: int, n_ubatch: int) -> Plan:
    """`context`: bytes of KV cache and compute buffers."""
    reserve = max(512 * MIB, device.free // 20)
    rest = context + facts.device_bytes
    if device.is_cpu:
        rest += facts.expert_bytes  # here the host pool takes from the same memory
    budget = device.free - reserve - rest
    return _fit(
        facts, device, n_ubatch, budget, f"auto: {size(device.free)} free, less {size(rest)} for the rest of the model and {size(reserve)} in reserve"
    )
