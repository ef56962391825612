"""Several devices that together run one model: what of a device is asked of all of them, and when `auto` takes several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from tinyserve_gguf import _shim
from tinyserve_gguf._llama import Offload
from tinyserve_gguf._shim import Device
from tinyserve_gguf.errors import CapacityError, OptionError
from tinyserve_gguf.facts import ModelFacts
from tinyserve_gguf.host import host_memory, lockable
from tinyserve_gguf.plan import CacheSpec, DeviceFacts, Plan
from tinyserve_gguf.split import PlanPart, check_shares, plan_split


@dataclass(frozen=True, slots=True)
class DeviceGroup(Device):
    """Devices in the order that the layers go to. Its name is their names, with commas; memory is the sum."""

    devices: tuple[Device, ...]

    @staticmethod
    def of(devices: Sequence[Device]) -> DeviceGroup:
        """OptionError for devices that cannot be together."""
        names = [device.name for device in devices]
        if len({device.is_cpu for device in devices}) > 1:
            raise OptionError(
                f"--device {','.join(names)}: layers are split over GPUs only; the CPU computes experts of a GPU's layers with --miss cpu or split"
            )
        for device in devices:
            if names.count(device.name) > 1 and not device.is_cpu:
                raise OptionError(f"--device {','.join(names)}: {device.name} is there twice")
        return DeviceGroup(
            handle=devices[0].handle,
            name=",".join(names),
            description=", ".join(dict.fromkeys(device.description for device in devices)),
            memory_free=sum(device.memory_free for device in devices) // names.count(names[0]),
            memory_total=sum(device.memory_total for device in devices) // names.count(names[0]),
            is_cpu=devices[0].is_cpu,
            devices=tuple(devices),
        )

    @property
    def members(self) -> tuple[Device, ...]:
        return self.devices

    @property
    def labels(self) -> tuple[str, ...]:
        """Their names; numbered where the CPU plays several devices."""
        names = [device.name for device in self.devices]
        return tuple(name if names.count(name) == 1 else f"{name} {i}" for i, name in enumerate(names))

    def offload(self, split: tuple[float, ...] = ()) -> Offload | None:
        if self.is_cpu:
            return None
        first, *others = (device.handle for device in self.devices)
        return Offload(first, others=tuple(others), split=split)

    def link_rate(self, size: int = 256 << 20, repeats: int = 8) -> float:
        """The slowest of them."""
        return min(device.link_rate(size, repeats) for device in dict.fromkeys(self.devices))

    def multiplies(self, type_id: int, ne0: int, ne1: int, n_expert: int, n_used: int) -> bool:
        return all(device.multiplies(type_id, ne0, ne1, n_expert, n_used) for device in dict.fromkeys(self.devices))


def roomiest(devices: Sequence[Device]) -> Device:
    """The GPU with the most free memory, or the CPU where there is none."""
    gpus = [device for device in devices if not device.is_cpu]
    return max(gpus, key=lambda device: device.memory_free) if gpus else next(device for device in devices if device.is_cpu)


def _equal_parts(device: Device, free: Sequence[int]) -> list[int]:
    """Of the bytes that are free on each member, its own: where the CPU plays several, they have equal parts of its memory."""
    handles = [member.handle for member in device.members]
    return [n // handles.count(handle) for n, handle in zip(free, handles, strict=True)]


def memory_free(device: Device) -> list[int]:
    """Bytes that are free now on each of its members."""
    return _equal_parts(device, [_shim.memory_free(member) for member in device.members])


def device_facts(device: Device) -> DeviceFacts:
    """What is free there now. ggml says of the CPU that all memory is free."""
    free = min(device.memory_free, host_memory().available) if device.is_cpu else device.memory_free
    return DeviceFacts(device.name, free, device.is_cpu, ram=lockable())


def plan_on(
    facts: ModelFacts,
    spec: CacheSpec,
    device: Device,
    plan_part: PlanPart,
    plan_one: Callable[[Device], Plan],
    *,
    n_ubatch: int | None = None,
    tensor_split: Sequence[float] | None = None,
    reason: str = "",
) -> Plan:
    """The plan for one device, by `plan_one`, or for a DeviceGroup. Raises as `split.plan_split`."""
    if not isinstance(device, DeviceGroup):
        if tensor_split is not None:
            raise OptionError(f"--tensor-split is for several devices, and here is {device.name}: name them, such as --device CUDA0,CUDA1")
        return plan_one(device)
    if device.is_cpu and not facts.is_moe:
        raise OptionError(f"{facts.name} is dense: there is nothing to split over the CPU, use --device CPU")
    found = [device_facts(member) for member in device.members]
    each = [replace(one, free=free) for one, free in zip(found, _equal_parts(device, [one.free for one in found]), strict=True)]
    shares = None if tensor_split is None else check_shares(tensor_split)
    return plan_split(facts, spec, each, device.labels, plan_part, shares=shares, n_ubatch=n_ubatch, reason=reason)


def plan_auto(
    facts: ModelFacts,
    spec: CacheSpec,
    devices: Sequence[Device],
    plan_part: PlanPart,
    plan_one: Callable[[Device], Plan],
    *,
    check: Callable[[ModelFacts, Device], None],
    n_ubatch: int | None = None,
    tensor_split: Sequence[float] | None = None,
) -> tuple[Plan, Device]:
    """The GPU with the most free memory, or the CPU where there is none. Several GPUs if one does not do: if the model does not fit there, or if
    `auto` leaves experts out that several have room for; all of them if a split was given. `check` raises for a device that cannot run the model."""
    gpus = [device for device in devices if not device.is_cpu]
    best = roomiest(devices)
    if tensor_split is not None and len(gpus) > 1:
        group = DeviceGroup.of(gpus)
        check(facts, group)
        return plan_on(facts, spec, group, plan_part, plan_one, n_ubatch=n_ubatch, tensor_split=tensor_split), group
    check(facts, best)
    one, why = None, ""
    try:
        one = plan_on(facts, spec, best, plan_part, plan_one, tensor_split=tensor_split)
        if len(gpus) < 2 or spec.kind != "auto" or one.n_slots >= sum(group.n_experts for group in facts.groups):
            return one, best
        why = f"auto: {best.name} alone holds {one.share:.0%} of the experts"
    except CapacityError as error:
        if len(gpus) < 2:
            raise
        why, refusal = f"auto: {best.name} alone does not do", error
    found: list[tuple[Plan, Device]] = [] if one is None else [(one, best)]
    for group in _groups(gpus):
        check(facts, group)
        with suppress(CapacityError):
            found.append((plan_on(facts, spec, group, plan_part, plan_one, n_ubatch=n_ubatch, reason=why), group))
    if not found:
        raise CapacityError(f"{refusal}; and all GPUs together do not do either")
    return max(found, key=lambda choice: choice[0].n_slots)


def _groups(gpus: Sequence[Device]) -> list[DeviceGroup]:
    """The two with the most free memory, the three, ... all; in the order in which ggml has them."""
    largest = sorted(gpus, key=lambda device: -device.memory_free)
    return [DeviceGroup.of([device for device in gpus if device in largest[:n]]) for n in range(2, len(gpus) + 1)]
