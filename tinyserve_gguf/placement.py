"""Where a model would run: the device, the threads, and the plan that fits there."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tinyserve_gguf import _shim
from tinyserve_gguf._shim import Device
from tinyserve_gguf.context import ContextSpec
from tinyserve_gguf.devices import DeviceGroup, plan_auto, plan_on
from tinyserve_gguf.errors import ModelFileError, OptionError
from tinyserve_gguf.facts import ModelFacts
from tinyserve_gguf.plan import CacheSpec, DeviceFacts, Plan, make_plan


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
        gpus = [device for device in found if not device.is_cpu]
        return max(gpus, key=lambda device: device.memory_free) if gpus else next(device for device in found if device.is_cpu)
    for device in found:
        if device.name.lower() == name.lower():
            return device
    raise OptionError(f"there is no device {name!r} here; there is: {', '.join(device.name for device in found)}, or auto")


def plan_for(
    facts: ModelFacts,
    *,
    expert_cache: str = "auto",
    device: str = "auto",
    tensor_split: Sequence[float] | None = None,
    context: ContextSpec = ContextSpec(),
    n_ubatch: int | None = None,
) -> tuple[Plan, Device]:
    """What `load` would decide with these options, and the device or DeviceGroup it is for. Loads nothing."""
    spec = CacheSpec.parse(expert_cache)
    n_ctx = context.length(facts)

    def plan_part(facts: ModelFacts, spec: CacheSpec, device: DeviceFacts, n_ubatch: int | None) -> Plan:
        return make_plan(facts, spec, device, n_ctx=n_ctx, n_ubatch=n_ubatch, kv=context.kv)

    if device.lower() == "auto":
        return plan_auto(facts, spec, _shim.devices(), plan_part, n_ubatch=n_ubatch, tensor_split=tensor_split, check=check_kernels)
    chosen = pick_device(device)
    check_kernels(facts, chosen)
    return plan_on(facts, spec, chosen, plan_part, n_ubatch=n_ubatch, tensor_split=tensor_split), chosen


def check_kernels(facts: ModelFacts, device: Device) -> None:
    """ModelFileError if the device cannot multiply experts of the file's types."""
    for layer in facts.expert_layers:
        for part in layer.parts:
            w = part.weight
            if not device.multiplies(w.type_id, w.ne(0), w.ne(1), layer.n_expert, layer.n_used):
                raise ModelFileError(f"{facts.path}: {device.name} has no kernels for {w.name} of type {w.type}; use --device CPU")
