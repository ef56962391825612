"""A machine as far as speed goes: memory and rates, measured by `doctor`, given, or assumed; and the file that remembers what was measured."""

from __future__ import annotations

import math
import os
import platform
from dataclasses import dataclass, field, replace
from typing import Any

from tinyserve_gguf.errors import OptionError
from tinyserve_gguf.kept import UNUSABLE, KeptFile

MEMORY = KeptFile("machine.json", version=1)

# Where nothing was measured or given. Bytes per second, but for `prefill`: numbers multiplied and added per second, twice as many flops.
ASSUMED_LINK = 12e9  # PCIe 3.0 x16 or 4.0 x8
ASSUMED_MEMORY = 40e9  # two channels of DDR4-3200 or DDR5-4800, of which a program gets about 80 %
ASSUMED_GPU = 300e9  # a card of the middle: 288 (RTX 4060 Ti) to 360 (RTX 3060)
CPU_SHARE = 0.6  # of the memory bandwidth, that expert matmuls on the CPU reach
PREFILL_PER_BYTE = 10  # multiply-adds of prefill per byte of the GPU's memory bandwidth: 7.5 on an H200, more on cards with slower memory
CPU_PREFILL_PER_BYTE = 6  # the same per byte of experts that the CPU multiplies with in decode


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second, but for `prefill`: multiply-adds per second. `sources`: by name, where each is from."""

    link: float  # page-locked host memory to the device
    memory: float  # host memory, read
    gpu: float  # device memory, read
    cpu: float  # weights of experts that the CPU multiplies with, from host memory
    prefill: float  # on the device, in large batches
    sources: dict[str, str] = field(default_factory=dict)

    def assumed(self) -> list[str]:
        """Names of those that were neither measured nor given."""
        return [name for name, source in self.sources.items() if source == "assumed"]


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes. `vram` 0: no GPU, the CPU computes everything."""

    name: str
    vram: int  # free device memory
    ram: int  # host memory
    rates: Rates

    @property
    def has_gpu(self) -> bool:
        return self.vram > 0


def rates(
    known: dict[str, float] | None = None,
    *,
    link_gbps: float | None = None,
    mem_gbps: float | None = None,
    gpu_gbps: float | None = None,
    known_as: str = "measured",
    has_gpu: bool = True,
) -> Rates:
    """Given ones first, then `known` ones (as `Rates` has them), then what follows from those, then what is assumed. OptionError for no rate."""
    found = {name: (value, known_as) for name, value in (known or {}).items() if value > 0}
    for option, name, value in (("--link-gbps", "link", link_gbps), ("--mem-gbps", "memory", mem_gbps), ("--gpu-gbps", "gpu", gpu_gbps)):
        if value is not None and not 0 < value < math.inf:
            raise OptionError(f"{option} is above 0 GB/s, not {value:g}")
        if value is not None:
            found[name] = (value * 1e9, "given")
    if mem_gbps is not None:
        found.pop("cpu", None)  # measured on other memory
    if gpu_gbps is not None:
        found.pop("prefill", None)
    for name, value in (("link", ASSUMED_LINK), ("memory", ASSUMED_MEMORY), ("gpu", ASSUMED_GPU)):
        found.setdefault(name, (value, "assumed"))
    found.setdefault("cpu", (CPU_SHARE * found["memory"][0], "assumed"))
    found.setdefault("prefill", (PREFILL_PER_BYTE * found["gpu"][0] if has_gpu else CPU_PREFILL_PER_BYTE * found["cpu"][0], "assumed"))
    values = {name: value for name, (value, _) in found.items()}
    sources = {name: source for name, (_, source) in found.items()}
    return Rates(values["link"], values["memory"], values["gpu"], values["cpu"], values["prefill"], sources)


# ---- what doctor measured -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one device of one machine. `rates` as in `Rates`, without what could not be measured."""

    device: str  # "CUDA0"
    when: str  # ISO date
    rates: dict[str, float]


def recall(device: str) -> tuple[Measured | None, str | None]:
    """What was measured on this machine with a device, and a line about a file that cannot be used."""
    try:
        found = _machines().get(_key(device))
        if found is None:
            return None, None
        values = {str(name): float(value) for name, value in found["rates"].items()}
        if not all(0 < value < math.inf for value in values.values()):
            raise ValueError("a rate is no rate")
        return Measured(device, str(found["when"]), values), None
    except UNUSABLE as error:
        return None, f"what doctor remembered in {MEMORY.not_used(error)}"


def remember(measured: Measured) -> str | None:
    """Keep what was measured; other devices and machines stay. A line, if it cannot be written."""
    try:
        machines = _machines()
    except UNUSABLE:
        machines = {}  # unusable, which `recall` says
    machines[_key(measured.device)] = {"when": measured.when, "rates": measured.rates}
    trouble = MEMORY.write({"machines": machines})
    return f"the measurements cannot be remembered: {trouble}" if trouble else None


def _key(device: str) -> str:
    return f"{platform.node()} | {device} | {os.cpu_count()} cores"


def _machines() -> dict[str, Any]:
    """Of the file; none if there is no file. One of UNUSABLE if it cannot be used."""
    machines = (MEMORY.read() or {"machines": {}}).get("machines")
    if not isinstance(machines, dict):
        raise TypeError("it does not hold measurements")
    return machines


def with_link(machine: Machine, bytes_per_second: float) -> Machine:
    """The same with another link."""
    return replace(machine, rates=replace(machine.rates, link=bytes_per_second, sources={**machine.rates.sources, "link": "given"}))
