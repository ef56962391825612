"""What `info` says of a machine: would the model run there, and how fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tinyserve_gguf.estimate import Estimate, estimate
from tinyserve_gguf.facts import ModelFacts
from tinyserve_gguf.machine import Machine, rates, recall
from tinyserve_gguf.plan import GIB, Budget, size


@dataclass(frozen=True, slots=True)
class Asked:
    """Options of `info`. Memory in GiB, rates in GB/s; None where nothing was given, and then this machine's count."""

    vram: float | None = None  # 0: no GPU
    vram_reserve: float | None = None
    ram: float | None = None
    link_gbps: float | None = None
    mem_gbps: float | None = None
    gpu_gbps: float | None = None
    n_ctx: int | None = None
    kv_type: str = "f16"
    kv_type_v: str | None = None
    n_ubatch: int | None = None
    expert_cache: str = "auto"

    @property
    def is_elsewhere(self) -> bool:
        """Another machine than this one is meant."""
        return any(value is not None for value in (self.vram, self.ram, self.link_gbps, self.mem_gbps, self.gpu_gbps))


@dataclass(frozen=True, slots=True)
class Outlook:
    machine: Machine
    estimate: Estimate
    notes: tuple[str, ...]

    @property
    def title(self) -> str:
        gpu = f"{size(self.machine.vram)} of GPU memory" if self.machine.has_gpu else "no GPU"
        return f"on {self.machine.name} with {gpu} and {size(self.machine.ram)} of memory"

    def lines(self, *, with_plan: bool) -> list[str]:
        """`with_plan`: also what would lie where."""
        plan = self.estimate.plan if with_plan else None
        where = [*plan.lines()[1:], plan.host_line()] if plan and plan.facts.is_moe else []
        return [*self.estimate.lines(), *where, *self.notes]

    def as_dict(self) -> dict[str, Any]:
        machine, r = self.machine, self.machine.rates
        given = {name: {"per_second": getattr(r, name), "source": r.sources[name]} for name in ("link", "memory", "gpu", "cpu", "prefill")}
        return {"machine": {"name": machine.name, "vram": machine.vram, "ram": machine.ram, "rates": given}, **self.estimate.as_dict()}


def outlook(facts: ModelFacts, asked: Asked) -> Outlook:
    """OptionError for options that mean nothing, or that would be ignored."""
    from tinyserve_gguf.context import ContextSpec  # loads llama.cpp

    machine, notes = machine_of(asked)
    budget = Budget.of(reserve=asked.vram_reserve)
    spec = ContextSpec.of(asked.n_ctx, None, None, asked.kv_type, asked.kv_type_v, "auto")
    found = estimate(facts, machine, n_ctx=spec.length(facts), kv=spec.kv, n_ubatch=asked.n_ubatch, expert_cache=asked.expert_cache, budget=budget)
    return Outlook(machine, found, (*spec.cut(facts), *notes))


def machine_of(asked: Asked) -> tuple[Machine, list[str]]:
    """The machine that is meant, and what there is to say of its rates. Loads the native library."""
    from tinyserve_gguf.devices import device_facts
    from tinyserve_gguf.host import host_memory
    from tinyserve_gguf.placement import pick_device

    here = pick_device("auto")
    free = 0 if here.is_cpu else device_facts(here).free
    vram = free if asked.vram is None else int(asked.vram * GIB)
    ram = host_memory().available if asked.ram is None else int(asked.ram * GIB)
    known, trouble = recall(here.name)
    notes = [trouble] if trouble else []
    measured = dict(known.rates) if known else {}
    if here.is_cpu and vram:  # what was measured without a GPU says nothing of one
        measured = {name: rate for name, rate in measured.items() if name in ("memory", "cpu")}
    options = {"link_gbps": asked.link_gbps, "mem_gbps": asked.mem_gbps, "gpu_gbps": asked.gpu_gbps}
    found = rates(measured, **options, has_gpu=vram > 0, known_as=f"measured here on {known.when}" if known else "")
    if not known:
        notes.append("tinyserve-gguf doctor measures the rates of this machine")
    return Machine("a machine" if asked.is_elsewhere else "this machine", vram, ram, found), notes
