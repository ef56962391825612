"""Would a model run on a machine, and how fast: arithmetic over facts and rates, nothing is loaded. Pure.

Calibrated on the README's measurements on an H200 (gpt-oss-20b and Qwen3-30B-A3B in their real geometry); a test holds it within 25 % of them. What
is assumed is said in every estimate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tinyserve_gguf.errors import CapacityError
from tinyserve_gguf.facts import ModelFacts
from tinyserve_gguf.kv import KvOptions
from tinyserve_gguf.machine import Machine
from tinyserve_gguf.needs import Needs, Setting, estimated_needs
from tinyserve_gguf.plan import GIB, Budget, CacheSpec, DeviceFacts, Plan, size
from tinyserve_gguf.planner import make_plan

# Decode of one token: a fixed time a block, and its weights at the rate that matrix-vector kernels reach, which is not the memory's alone.
BLOCK_SECONDS = 55e-6  # kernels of a block that read little: 69 (gpt-oss) and 50 (Qwen3) on an H200
PAGED_BLOCK_SECONDS = 8e-6  # more where experts are looked up
GPU_SHARE = 0.75  # of the memory bandwidth, that kernels reach
KERNEL_RATE = 2.4e12  # bytes per second that matrix-vector kernels reach on memory without limit
LINK_SHARE = 0.94  # of the link, that kernels reach which read mapped memory: 51.3 of 54.1 to 55.3 GB/s
OVERLAP_LOSS = 0.25  # of the shorter of copying and computing in prefill, that the longer does not hide
# Hit rate of decode = 1 - (1 - share)**exponent. Measured at half and a quarter of the experts: exponents of 4.0 and 4.4 with 32 experts, top-4
# (gpt-oss), 5.6 and 6.8 with 128, top-8 (Qwen3). A line through both over the logarithm of experts per used one; 1 is a router without favourites.
HIT_AT_8, HIT_PER_DOUBLING, HIT_RANGE = 4.2, 2.0, (1.0, 6.2)
OTHER_RAM = 2 * GIB  # of the host, for the system and llama.cpp itself
LOCKABLE = 0.9  # of the host's memory, that the shim page-locks at most
PAGEABLE_SHARE = 0.5  # of the link, from memory that is not page-locked


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a machine would do. Rates in tokens per second, at a short context; bytes per token."""

    fits: bool
    reason: str  # why it fits or does not; one line
    plan: Plan | None = None  # None if it does not fit
    hit_rate: float = 0.0  # of decode, 0..1
    decode: float = 0.0  # with misses fetched, which is the default
    decode_cpu: float = 0.0  # with misses on the CPU
    prefill: float = 0.0  # prompts of a batch or more
    link_bytes: float = 0.0  # over the link for a token
    assumptions: tuple[str, ...] = ()

    def line(self) -> str:
        """The verdict."""
        if not self.fits:
            return f"no: {self.reason}"
        assert self.plan
        rate = f" (hit rate ~{self.hit_rate:.2f} assumed)" if self.hit_rate < 1 else ""
        return f"yes: ~{_rounded(self.decode)} tok/s decode{rate}, ~{_rounded(self.prefill)} tok/s prefill, because {self.reason}"

    def lines(self) -> list[str]:
        """The verdict, the better setting if there is one, and what was assumed."""
        if not self.fits:
            return [self.line()]
        better = (
            [f"with --miss cpu: ~{_rounded(self.decode_cpu)} tok/s decode, as the CPU is faster than the link"]
            if self.decode_cpu > 1.1 * self.decode
            else []
        )
        return [self.line(), *better, f"assumed: {'; '.join(self.assumptions)}"]

    def as_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return {
            "fits": self.fits,
            "reason": self.reason,
            "hit_rate": self.hit_rate,
            "decode_tok_s": self.decode,
            "decode_cpu_misses_tok_s": self.decode_cpu,
            "prefill_tok_s": self.prefill,
            "link_bytes_per_token": self.link_bytes,
            "assumptions": list(self.assumptions),
            "plan": self.plan.as_dict() if self.plan else None,
        }


def hit_exponent(n_expert: int, n_used: int) -> float:
    """Of `expected_hit_rate`: not beyond what was measured."""
    low, high = HIT_RANGE
    return min(high, max(low, HIT_AT_8 + HIT_PER_DOUBLING * (math.log2(n_expert / n_used) - 3)))


def expected_hit_rate(share: float, n_expert: int, n_used: int) -> float:
    """Of decode, when the cache holds this share of the experts, 0..1. How unequal routing is depends on model and text."""
    return 1 - math.pow(1 - min(1.0, max(0.0, share)), hit_exponent(n_expert, n_used))


def estimate(
    facts: ModelFacts,
    machine: Machine,
    *,
    n_ctx: int = 4096,
    kv: KvOptions = KvOptions(),
    n_ubatch: int | None = None,
    expert_cache: str = "auto",
    budget: Budget = Budget(),
    hit_rate: float | None = None,
    needs: Callable[[Setting], Needs] | None = None,
) -> Estimate:
    """Plan for `machine` and say how fast that would be. `hit_rate`: a measured one, in place of what the share lets expect. `facts` may be those of
    a `Geometry`. OptionError for an expert cache that means nothing; what does not fit is an Estimate that says so."""
    ask = needs or (lambda setting: estimated_needs(facts, setting))
    n_ctx = min(n_ctx or facts.context_length, facts.context_length or n_ctx)
    free = machine.vram if machine.has_gpu else machine.ram
    device = DeviceFacts("the GPU" if machine.has_gpu else "the CPU", free, not machine.has_gpu, ram=int(LOCKABLE * machine.ram))
    try:
        plan = make_plan(
            facts, CacheSpec.parse(expert_cache), device, n_ctx=n_ctx, n_ubatch=n_ubatch, kv=kv, flash=kv.flash != "off", budget=budget, needs=ask
        )
    except CapacityError as error:
        return Estimate(False, str(error))
    if problem := _host_problem(plan, machine):
        return Estimate(False, problem)
    return _speed(plan, machine, hit_rate)


def _host_problem(plan: Plan, machine: Machine) -> str:
    """Why the host's memory does not hold the rest; empty if it does."""
    parts = [(plan.host.paged, "experts"), (plan.needs.host_weights, "embedding tables"), (plan.needs.host_compute, "buffers")]
    if not machine.has_gpu:
        parts.append((plan.total_bytes, "expert cache, weights and context"))
    parts.append((OTHER_RAM, "everything else"))
    total = sum(n for n, _ in parts)
    if total <= machine.ram:
        return ""
    text = " + ".join(f"{size(n)} {what}" for n, what in parts if n)
    return f"host memory does not hold it: {text} = {size(total)}, and there are {size(machine.ram)}; take a smaller quantisation"


# ---- speed ----------------------------------------------------------------------------------------------------------------------------------


def _speed(plan: Plan, machine: Machine, hit_rate: float | None) -> Estimate:
    facts, rates = plan.facts, machine.rates
    active = sum(layer.n_used * layer.bytes_per_expert for layer in facts.expert_layers)
    always = plan.needs.weights  # every token reads these
    paged = any(not pool.is_resident for pool in plan.pools)
    hits = 1.0 if not paged else expected_hit_rate(plan.share, facts.n_expert, facts.n_used) if hit_rate is None else hit_rate
    missed = active * (1 - hits)
    n_blocks = facts.n_blocks - facts.n_idle_blocks
    if machine.has_gpu:
        reached = 1 / (1 / (GPU_SHARE * rates.gpu) + 1 / KERNEL_RATE)
        base = n_blocks * (BLOCK_SECONDS + (PAGED_BLOCK_SECONDS if paged else 0)) + (always + active) / reached
        link = rates.link * LINK_SHARE * (PAGEABLE_SHARE if plan.host.rung == "pageable" else 1)
        by_cpu = base - missed / reached + missed / rates.cpu
    else:
        base, link = n_blocks * PAGED_BLOCK_SECONDS + (always + active) / rates.cpu, rates.memory
        by_cpu = base
    batch = _batch_seconds(plan, machine, link)
    return Estimate(
        True,
        _because(plan, machine, missed),
        plan=plan,
        hit_rate=hits,
        decode=1 / (base + missed / link),
        decode_cpu=1 / by_cpu,
        prefill=plan.n_ubatch / batch,
        link_bytes=missed,
        assumptions=tuple(_assumptions(plan, machine, paged, hit_rate)),
    )


def _batch_seconds(plan: Plan, machine: Machine, link: float) -> float:
    """A full batch of prefill: every expert is wanted, and what has no slot is copied beside the computation."""
    facts = plan.facts
    numbers = sum(layer.n_used * part.weight.ne(0) * part.weight.ne(1) for layer in facts.expert_layers for part in layer.parts)
    for tensor in facts.tensors:
        if tensor.name.startswith("blk.") and "exps." not in tensor.name and not facts.is_idle(tensor):
            numbers += tensor.ne(0) * tensor.ne(1) * tensor.ne(2)
    computing = plan.n_ubatch * (numbers + 1) / machine.rates.prefill  # a damaged header may count none
    missing = sum((1 - pool.n_slots / pool.group.n_experts) * sum(layer.n_bytes for layer in pool.group.layers) for pool in plan.pools)
    copying = missing / link
    return max(computing, copying) + OVERLAP_LOSS * min(computing, copying)


def _because(plan: Plan, machine: Machine, missed: float) -> str:
    if not plan.facts.is_moe:
        return f"it is dense and takes {size(plan.total_bytes)} of {size(plan.device.free)}"
    where = "GPU" if machine.has_gpu else "memory"
    kept = f"{plan.share:.0%} of the experts stay in {size(plan.device_bytes)} of the {size(plan.device.free)} of {where}"
    if not missed:
        return kept
    way = f"cross a link of {machine.rates.link / 1e9:.1f} GB/s" if machine.has_gpu else f"are copied at {machine.rates.memory / 1e9:.1f} GB/s"
    return f"{kept} and {missed / 1e6:.0f} MB a token {way}"


def _assumptions(plan: Plan, machine: Machine, paged: bool, hit_rate: float | None) -> list[str]:
    lines = []
    if paged and hit_rate is None:
        exponent = hit_exponent(plan.facts.n_expert, plan.facts.n_used)
        lines.append(f"a hit rate of 1 - (1 - {plan.share:.2f})^{exponent:.1f}, from those measured with gpt-oss and Qwen3 geometries")
    lines.append(f"a short context, a prompt of {plan.n_ubatch:,} tokens or more")
    r = machine.rates
    values = {"link": r.link, "memory": r.memory, "gpu": r.gpu, "cpu": r.cpu}
    names = {"link": "link", "memory": "host memory", "gpu": "GPU memory", "cpu": "CPU experts"}
    used = ("link", "gpu", "cpu") if machine.has_gpu else ("memory", "cpu")
    lines.append("rates: " + ", ".join(f"{names[key]} {values[key] / 1e9:.1f} GB/s ({r.sources.get(key, 'given')})" for key in used))
    lines.append(f"prefill {r.prefill / 1e12:.2g} T multiply-adds a second ({r.sources.get('prefill', 'given')})")
    if not plan.needs.is_exact:
        lines.append("KV cache and compute buffers estimated from the header")
    return lines


def _rounded(rate: float) -> str:
    """Two or three digits: "7.4", "41", "1,900"."""
    if rate < 10:
        return f"{rate:.1f}"
    step = 10 ** max(0, len(str(int(rate))) - 2)
    return f"{round(rate / step) * step:,}"
