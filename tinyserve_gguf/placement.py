"""Where a model would run: the device, the threads, and the plan that fits there."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from tinyserve_gguf import _shim
from tinyserve_gguf._shim import Device
from tinyserve_gguf.context import ContextSpec, uses_flash
from tinyserve_gguf.devices import DeviceGroup, device_facts, plan_auto, plan_on, roomiest
from tinyserve_gguf.dryrun import DryRun
from tinyserve_gguf.errors import ModelFileError, OptionError
from tinyserve_gguf.facts import ModelFacts
from tinyserve_gguf.lora import Adapter, with_adapters
from tinyserve_gguf.needs import Needs, Setting, estimated_needs
from tinyserve_gguf.plan import GIB, Budget, CacheSpec, DeviceFacts, Plan
from tinyserve_gguf.planner import make_plan


def default_threads() -> int:
    """One thread per usable core; on larger machines half of them, because two hardware threads of a core share its units."""
    cores = len(os.sched_getaffinity(0))
    return cores if cores <= 8 else cores // 2


def pick_device(name: str) -> Device:
    """The ggml device called `name`; "auto" is the GPU with the most free memory, or the CPU. Names with commas between them are a DeviceGroup."""
    if "," in name:
        return DeviceGroup.of([pick_device(part.strip()) for part in name.split(",")])
    found = _shim.devices()
    if name == "auto":
        return roomiest(found)
    for device in found:
        if device.name.lower() == name.lower():
            return device
    raise OptionError(f"there is no device {name!r} here; there is: {', '.join(device.name for device in found)}, or auto")


def plan_for(
    facts: ModelFacts,
    *,
    expert_cache: str | int = "auto",
    device: str = "auto",
    tensor_split: Sequence[float] | None = None,
    context: ContextSpec = ContextSpec(),
    n_ubatch: int | None = None,
    budget: Budget = Budget(),
    cpu_misses: bool = False,
    n_contexts: int = 1,
    adapters: Sequence[Adapter] = (),
    ask: bool = False,
) -> tuple[Plan, Device]:
    """What `load` would decide with these options, and the device or DeviceGroup it is for. Loads nothing. `budget.vram` is for each device. `ask`:
    llama.cpp, which reads the header again, what the context takes; else, and on several devices, that is estimated."""
    spec = CacheSpec.parse(expert_cache)
    chosen = pick_device(device)
    for member in chosen.members:
        if budget.vram is not None and budget.vram > member.memory_total:
            raise OptionError(
                f"{member.name} has {member.memory_total / GIB:.2f} GiB in all: give --vram less; info --vram plans for another machine"
            )
    flash = uses_flash(facts, context.kv, chosen)

    def plan_part(
        part: ModelFacts, spec: CacheSpec, device: DeviceFacts, n_ubatch: int | None, needs: Callable[[Setting], Needs] | None = None
    ) -> Plan:
        def with_all(setting: Setting) -> Needs:
            return with_adapters(needs(setting) if needs else estimated_needs(part, setting), adapters, part)

        return make_plan(
            part,
            spec,
            device,
            n_ctx=context.length(facts),
            n_ubatch=n_ubatch,
            kv=context.kv,
            flash=flash,
            budget=budget,
            cpu_misses=cpu_misses,
            n_contexts=n_contexts,
            needs=with_all,
        )

    def plan_one(device: Device) -> Plan:
        if not ask:
            return plan_part(facts, spec, device_facts(device), n_ubatch)
        with DryRun(facts, device) as dry:
            return plan_part(facts, spec, device_facts(device), n_ubatch, dry.needs)

    if device.lower() == "auto":
        return plan_auto(facts, spec, _shim.devices(), plan_part, plan_one, n_ubatch=n_ubatch, tensor_split=tensor_split, check=check_kernels)
    check_kernels(facts, chosen)
    return plan_on(facts, spec, chosen, plan_part, plan_one, n_ubatch=n_ubatch, tensor_split=tensor_split), chosen


def check_kernels(facts: ModelFacts, device: Device) -> None:
    """ModelFileError if the device cannot multiply experts of the file's types."""
    for layer in facts.expert_layers:
        for part in layer.parts:
            w = part.weight
            if not device.multiplies(w.type_id, w.ne(0), w.ne(1), layer.n_expert, layer.n_used):
                raise ModelFileError(f"{facts.path}: {device.name} has no kernels for {w.name} of type {w.type}; use --device CPU")
