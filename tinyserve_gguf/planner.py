"""Decides the plan: a pure function from model facts, what was asked for, and budgets to slots per layout group, batch and host pool.

KV cache first, then experts. What a setting takes beside the experts comes from `needs.estimated_needs`, or from llama.cpp itself by `dryrun`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from tinyserve_gguf.errors import CapacityError, OptionError
from tinyserve_gguf.facts import LayoutGroup, ModelFacts
from tinyserve_gguf.kv import KvOptions
from tinyserve_gguf.needs import MIB, Needs, Setting, estimated_needs
from tinyserve_gguf.plan import (
    GIB,
    Budget,
    CacheSpec,
    DeviceFacts,
    HostPlan,
    Plan,
    PoolPlan,
    memory_parts,
    minimum,
    size,
    stage_bytes,
    weight_bytes_per_expert,
)

UBATCH_CPU = 512
USABLE_CTX = 1024  # a refusal that can name a longer context does
UBATCHES_GPU = (4096, 2048, 1024, 512)
LEAST_RESERVE = 256 * MIB  # of a GPU: for what its driver and kernels take by themselves; also where a size was asked for
SMALLEST_RESERVE = 64 * MIB  # that the user may ask for
RING_PIECES = 8  # TSG_RING_PIECES

Ask = Callable[[Setting], Needs]


@dataclass(frozen=True, slots=True)
class _Case:
    """What is planned for."""

    facts: ModelFacts
    device: DeviceFacts  # `free` is within the budget
    budget: Budget
    setting: Setting
    needs: Needs
    ask: Ask
    n_spare: int

    @property
    def reserve(self) -> int:
        """What `auto` leaves free: never plan the whole card."""
        return max(512 * MIB, self.device.free // 20) if self.budget.reserve is None else self.budget.reserve

    @property
    def least_reserve(self) -> int:
        """What a size that was asked for leaves free."""
        if self.budget.reserve is not None:
            return self.budget.reserve
        return 0 if self.device.is_cpu else LEAST_RESERVE

    @property
    def n_stages(self) -> int:
        return 1 if self.device.is_cpu else 2

    def pools(self, slots: Callable[[LayoutGroup], int]) -> tuple[PoolPlan, ...]:
        """So many slots per group, between what one token needs and all."""
        return tuple(
            PoolPlan(group, min(group.n_experts, max(minimum(group), slots(group))), self.n_stages, self.n_spare) for group in self.facts.groups
        )

    def plan(self, pools: tuple[PoolPlan, ...], reason: str) -> Plan:
        return Plan(self.facts, self.device, pools, reason, self.setting, self.needs, self.host(pools))

    def host(self, pools: tuple[PoolPlan, ...]) -> HostPlan:
        """The shim climbs down the same ladder, and may find that the system grants less."""
        parts = [part.weight for pool in pools if not pool.is_resident for layer in pool.group.layers for part in layer.parts]
        paged = sum(weight.n_bytes for weight in parts)
        limit = self.device.ram if self.budget.ram is None else self.budget.ram
        if not paged:
            return HostPlan("none", 0, 0)
        if self.device.is_cpu or not limit or paged <= limit:
            return HostPlan("mapped", paged, 0, limit or 0)
        return HostPlan("pageable", paged, RING_PIECES * max(weight.n_bytes // weight.ne(2) for weight in parts), limit)


def pick_ubatch(device: DeviceFacts, compute: Callable[[int], int]) -> int:
    """Tokens to compute at once. On a GPU many, because what is missing of a layer crosses the link once a batch; as long as their activations,
    `compute` of so many tokens in bytes, take at most a sixteenth of the free memory."""
    if device.is_cpu:
        return UBATCH_CPU
    return next((n for n in UBATCHES_GPU[:-1] if compute(n) <= device.free // 16), UBATCHES_GPU[-1])


def make_plan(
    facts: ModelFacts,
    spec: CacheSpec,
    device: DeviceFacts,
    *,
    n_ctx: int,
    n_ubatch: int | None = None,
    kv: KvOptions = KvOptions(),
    flash: bool = True,
    budget: Budget = Budget(),
    cpu_misses: bool = False,
    n_contexts: int = 1,
    needs: Ask | None = None,
) -> Plan:
    """Decide the pools, and the batch of prefill unless `n_ubatch` is given. `cpu_misses`: the CPU may compute misses. `n_contexts`: how many are
    open at once. `needs`: what a setting takes beside the experts; by default the estimate from the header.

    Raises CapacityError, with the arithmetic and what would fit, when the device cannot hold it; OptionError when the size asked for is below what
    one token needs.
    """
    ask = needs or (lambda setting: estimated_needs(facts, setting))
    if budget.reserve is not None and budget.reserve < SMALLEST_RESERVE and not device.is_cpu:
        raise OptionError(f"--vram-reserve is {SMALLEST_RESERVE / GIB:g} GiB or more: the driver and kernels take memory by themselves")
    if budget.vram is not None:
        device = replace(device, free=min(device.free, budget.vram))
    n_ubatch = n_ubatch or pick_ubatch(device, lambda n: ask(Setting(n_ctx, n, kv, flash, n_contexts)).compute)
    setting = Setting(n_ctx, n_ubatch, kv, flash, n_contexts)
    case = _Case(facts, device, budget, setting, ask(setting), ask, 1 + cpu_misses)
    if spec.kind == "auto" and facts.is_moe:
        return _auto(case)
    return _checked(case, case.plan(*_asked(case, spec)), spec)


def _asked(case: _Case, spec: CacheSpec) -> tuple[tuple[PoolPlan, ...], str]:
    """Pools of a size that was asked for, and that in words; none of a dense model."""
    facts = case.facts
    if not facts.is_moe:
        if spec.kind not in ("auto", "all"):
            raise OptionError(f"{facts.name} is dense: there are no experts to cache, drop --expert-cache {spec.text}")
        return (), "dense"
    groups, total = facts.groups, sum(group.n_experts for group in facts.groups)
    if spec.kind == "all":
        return case.pools(lambda group: group.n_experts), "all experts, as asked"
    if spec.kind == "share":
        return case.pools(lambda group: math.ceil(spec.value * group.n_experts)), f"{spec.text} of the experts, as asked"
    if spec.kind == "experts":
        need = sum(minimum(group) for group in groups)
        if spec.value < need:
            raise OptionError(f"one token needs {need} experts at once: an expert cache of {spec.text} is too small, give {need} or more")
        return case.pools(lambda group: int(spec.value) * group.n_experts // total), f"{spec.text} experts, as asked"
    found = _fit(case, int(spec.value))
    if found is None:
        raise CapacityError(_too_small(case, f"--expert-cache {spec.text} is room for {size(int(spec.value))} on {case.device.name}: give more"))
    return found, f"what fits into {spec.text}, as asked"


def _too_small(case: _Case, why: str) -> str:
    least = case.pools(minimum)
    stages, need = sum(pool.stage_bytes for pool in least), sum(pool.device_bytes for pool in least)
    parts = f"{size(stages)} of prefill stage and {size(need - stages)} for the experts of one token"
    return f"an expert cache needs {size(need)} at least ({parts}), and {why}"


def replan(plan: Plan, spec: CacheSpec, free: int) -> Plan:
    """The plan of a model that is open, with another cache size. `free`: bytes of the device that are free now, beside its slots and stages.

    Raises as `make_plan` does, and CapacityError for a size that does not fit.
    """
    facts, held, n_spare = plan.facts, plan.device_bytes, max((pool.n_spare for pool in plan.pools), default=1)
    room = free + held
    case = _Case(facts, replace(plan.device, free=free), Budget(ram=plan.host.limit or None), plan.setting, plan.needs, lambda _: plan.needs, n_spare)
    if spec.kind == "auto" and facts.is_moe:
        reserve = case.reserve + (facts.expert_bytes if plan.device.is_cpu else 0)  # on the CPU the host pool takes from the same memory
        pools = _fit(case, room - reserve)
        if pools is None:
            raise CapacityError(_too_small(case, f"there is room for {size(max(0, room - reserve))} on {plan.device.name}: free device memory"))
        return case.plan(pools, f"auto: {size(free)} free and {size(held)} of the cache so far, less {size(reserve)} in reserve")
    new = case.plan(*_asked(case, spec))
    if new.device_bytes > room:
        stage, name = sum(pool.stage_bytes for pool in new.pools), plan.device.name
        raise CapacityError(
            f"an expert cache of {spec.text} takes {size(new.device_bytes)} ({size(new.device_bytes - stage)} for {new.n_slots} slots, {size(stage)} "
            f"of prefill stage); on {name} {size(free)} are free and the cache so far is {size(held)}: {size(new.device_bytes - room)} too few"
        )
    return new


def _fit(case: _Case, room: int) -> tuple[PoolPlan, ...] | None:
    """As many slots as fit into `room` bytes, in proportion to the groups. None if not even one token's experts do."""
    everything = case.pools(lambda group: group.n_experts)
    if _bytes(everything) <= room:
        return everything
    least = case.pools(minimum)
    if _bytes(least) > room:
        return None
    fixed = sum(
        case.n_stages * (stage_bytes(group) + weight_bytes_per_expert(group)) + case.n_spare * group.bytes_per_expert for group in case.facts.groups
    )
    share = max(0.0, (room - fixed) / sum(group.n_experts * group.bytes_per_expert for group in case.facts.groups))
    pools = case.pools(lambda group: int(share * group.n_experts))
    while _bytes(pools) > room:  # the minimum of a small group may have pushed the sum over: take it from the largest pool
        largest = max(pools, key=lambda pool: pool.n_slots - minimum(pool.group))
        pools = tuple(replace(pool, n_slots=pool.n_slots - 1) if pool is largest else pool for pool in pools)
    return pools


def _bytes(pools: tuple[PoolPlan, ...]) -> int:
    return sum(pool.device_bytes for pool in pools)


def _auto(case: _Case) -> Plan:
    room = case.device.free - case.reserve - case.needs.device
    everything = case.pools(lambda group: group.n_experts)
    text = f"auto: {size(case.device.free)} free, less {size(case.needs.device)} for the rest of the model and {size(case.reserve)} in reserve"
    if _bytes(everything) <= room:
        return case.plan(everything, f"{text}: all")
    least = _bytes(case.pools(minimum))
    if case.device.is_cpu:  # the pages of the file take from the same memory; where there is none they leave it and are read again
        room = max(room - case.facts.expert_bytes, min(room, least))
    found = _fit(case, room)
    if found is None:
        raise CapacityError(_refusal(case, least, "prefill stage and experts of one token", case.reserve))
    return case.plan(found, text)


def _checked(case: _Case, plan: Plan, spec: CacheSpec) -> Plan:
    """The plan, if the device holds it."""
    if plan.total_bytes + case.least_reserve <= case.device.free:
        return plan
    what = "" if not plan.pools else f"--expert-cache {spec.text}"
    raise CapacityError(_refusal(case, plan.device_bytes, what, case.least_reserve))


# ---- refusing -------------------------------------------------------------------------------------------------------------------------------


def _refusal(case: _Case, experts: int, what: str, reserve: int) -> str:
    """What does not fit, in numbers, and the nearest settings that do. `experts`: bytes of `what`."""
    parts = [*memory_parts(case.needs, case.setting), (experts, what), (reserve, "in reserve")]
    total = sum(n for n, _ in parts)
    free = case.device.free
    text = " + ".join(f"{size(n)} {name}" for n, name in parts if n)
    head = f"{case.facts.name} does not fit on {case.device.name}: {text} = {size(total)}, and {size(free)} are free"
    room = free - reserve - experts
    ways = _smaller(case, lambda needs: needs.device <= room)
    if what.startswith("--expert-cache") and (found := _fit(case, free - reserve - case.needs.device)):
        share = sum(pool.n_slots for pool in found) / sum(pool.group.n_experts for pool in found)
        ways.insert(0, f"--expert-cache {max(1, int(100 * share))}%" if share >= 0.01 else f"--expert-cache {sum(pool.n_slots for pool in found)}")
    return f"{head}; " + (
        f"what fits: {', or '.join(ways)}" if ways else "no smaller setting fits either: free device memory, or take a smaller quantisation"
    )


def _smaller(case: _Case, fits: Callable[[Needs], bool]) -> list[str]:
    """Settings near the one asked for that fit: fewer contexts, a shorter one, a smaller KV type, a smaller batch; or all of that."""
    setting, ways = case.setting, []
    if n := next((n for n in range(setting.n_contexts - 1, 0, -1) if fits(case.ask(replace(setting, n_contexts=n)))), None):
        ways.append(f"--parallel {n}")
    shorter = _longest(case, setting, fits)
    if shorter:
        ways.append(f"-c {shorter}")
    eight = replace(setting, kv=KvOptions("q8_0", "q8_0")) if _takes_q8_0(case) else None
    if eight and fits(case.ask(eight)):
        ways.append("--kv-type q8_0")
    batches = [n for n in (2048, 1024, 512, 256, 128) if n < setting.n_ubatch]
    if n := next((n for n in batches if fits(case.ask(replace(setting, n_ubatch=n)))), None):
        ways.append(f"-b {n}")
    if not ways or (len(ways) == 1 and shorter and shorter < USABLE_CTX):
        least = replace(eight or setting, n_ubatch=min(setting.n_ubatch, 128))
        if (n_ctx := _longest(case, least, fits)) and n_ctx > (shorter or 0):
            ways.append(f"-c {n_ctx} -b {least.n_ubatch}" + (" --kv-type q8_0" if eight else ""))
    return ways


def _longest(case: _Case, setting: Setting, fits: Callable[[Needs], bool]) -> int | None:
    """The longest context that fits, below that of the setting, in steps that people would type."""
    steps = [256, 512, *range(1024, setting.n_ctx, 1024)]
    low, high = 0, len(steps)  # steps[:low] fit
    while low < high:
        middle = (low + high) // 2
        if steps[middle] < setting.n_ctx and fits(case.ask(replace(setting, n_ctx=steps[middle]))):
            low = middle + 1
        else:
            high = middle
    return steps[low - 1] if low else None


def _takes_q8_0(case: _Case) -> bool:
    attention = case.facts.attention
    lengths = (*attention.key_lengths, *attention.value_lengths)
    return (
        attention.is_cached and case.setting.kv.k in ("f16", "bf16", "f32") and attention.architecture != "grok" and not any(n % 32 for n in lengths)
    )
