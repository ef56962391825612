"""Where a model would run: the device, the threads, and the plan that fits there."""

from __future__ import annotations

import os
from collections.abc import Callable

from tinyserve_gguf import _shim
from tinyserve_gguf._shim import Device
from tinyserve_gguf.context import ContextSpec, uses_flash
from tinyserve_gguf.dryrun import DryRun
from tinyserve_gguf.errors import ModelFileError, OptionError
from tinyserve_gguf.facts import ModelFacts
from tinyserve_gguf.host import host_memory, lockable
from tinyserve_gguf.needs import Needs, Setting
from tinyserve_gguf.plan import GIB, Budget, CacheSpec, DeviceFacts, Plan
from tinyserve_gguf.planner import make_plan


def default_threads() -> int:
    """One thread per usable core; on larger machines half of them, because two hardware threads of a core share its units."""
    cores = len(os.sched_getaffinity(0))
    return cores if cores <= 8 else cores // 2


def pick_device(name: str) -> Device:
    """The ggml device called `name`; "auto" is the GPU with the most free memory, or the CPU."""
    found = _shim.devices()
    if name == "auto":
        gpus = [device for device in found if not device.is_cpu]
        return max(gpus, key=lambda device: device.memory_free) if gpus else next(device for device in found if device.is_cpu)
    for device in found:
        if device.name.lower() == name.lower():
            return device
    raise OptionError(f"there is no device {name!r} here; there is: {', '.join(device.name for device in found)}, or auto")


def device_facts(device: Device) -> DeviceFacts:
    """What is free there now. ggml says of the CPU that all memory is free."""
    free = min(device.memory_free, host_memory().available) if device.is_cpu else device.memory_free
    return DeviceFacts(device.name, free, device.is_cpu, ram=lockable())


def plan_for(
    facts: ModelFacts,
    *,
    expert_cache: str = "auto",
    device: str = "auto",
    context: ContextSpec = ContextSpec(),
    n_ubatch: int | None = None,
    budget: Budget = Budget(),
    cpu_misses: bool = False,
    ask: bool = False,
) -> tuple[Plan, Device]:
    """What `load` would decide with these options, and the device it is for. Loads nothing. `ask`: llama.cpp, which reads the header again, what the
    context takes; else that is estimated."""
    spec = CacheSpec.parse(expert_cache)
    chosen = pick_device(device)
    if budget.vram is not None and budget.vram > chosen.memory_total:
        raise OptionError(f"{chosen.name} has {chosen.memory_total / GIB:.2f} GiB in all: give --vram less; info --vram plans for another machine")
    for layer in facts.expert_layers:
        for part in layer.parts:
            w = part.weight
            if not chosen.multiplies(w.type_id, w.ne(0), w.ne(1), layer.n_expert, layer.n_used):
                raise ModelFileError(f"{facts.path}: {chosen.name} has no kernels for {w.name} of type {w.type}; use --device CPU")
    flash = uses_flash(facts, context.kv, chosen)

    def plan(needs: Callable[[Setting], Needs] | None) -> Plan:
        return make_plan(
            facts,
            spec,
            device_facts(chosen),
            n_ctx=context.length(facts),
            n_ubatch=n_ubatch,
            kv=context.kv,
            flash=flash,
            budget=budget,
            cpu_misses=cpu_misses,
            needs=needs,
        )

    if not ask:
        return plan(None), chosen
    with DryRun(facts, chosen) as dry:
        return plan(dry.needs), chosen
