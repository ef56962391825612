"""What goes where and why: what was asked for, what there is, and what was decided. `planner` decides.

No call here touches a device or a file.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from tinyserve_gguf.errors import OptionError
from tinyserve_gguf.facts import LayoutGroup, ModelFacts
from tinyserve_gguf.needs import MIB, Needs, Setting

GIB = 1 << 30
_UNITS = {"": 1, "K": 1 << 10, "M": MIB, "G": GIB}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG])(?:i?B)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What `--expert-cache` asks for: exactly one of the kinds."""

    text: str
    kind: str  # "auto", "all", "experts", "share", "bytes"
    value: float = 0.0  # experts; share of all experts, 0..1; bytes of device memory including the prefill stage

    @staticmethod
    def parse(text: str | int) -> CacheSpec:
        """`all`, `auto`, a number of experts ("96"), a share ("25%") or a size ("6GiB", "800MiB")."""
        plain = str(text).strip()
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
class Budget:
    """Limits that the user gave, in bytes; None: what the machine has."""

    vram: int | None = None  # device memory in use at most, with the reserve
    reserve: int | None = None  # device memory that stays free
    ram: int | None = None  # host memory for experts: page-locked at most so much

    @staticmethod
    def of(vram: float | None = None, reserve: float | None = None, ram: float | None = None) -> Budget:
        """From GiB. OptionError for what is no size."""
        for name, value, least in (
            ("--vram", vram, "above 0"),
            ("--vram-reserve", reserve, "above 0: kernels and the driver take memory by themselves"),
            ("--ram", ram, "above 0"),
        ):
            if value is not None and not 0 < value < math.inf:
                raise OptionError(f"{name} is a number of GiB, {least}, not {value:g}")
        return Budget(*(None if value is None else int(value * GIB) for value in (vram, reserve, ram)))


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a plan needs to know of a device. Bytes; `free` is what may still be taken."""

    name: str
    free: int
    is_cpu: bool
    ram: int | None = None  # host memory that may be page-locked; None: not known, all that is asked for


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """One pool: slots for the experts of one layout."""

    group: LayoutGroup = field(repr=False)
    n_slots: int
    n_stages: int = 1  # 2 on a GPU: one layer is copied while another computes
    n_spare: int = 1  # slots of zeros behind the last: CUDA's matmuls read past it. Where the CPU computes misses one more, which stands for them

    @property
    def is_resident(self) -> bool:
        return self.n_slots >= self.group.n_experts

    @property
    def slot_bytes(self) -> int:
        return self.n_slots * self.group.bytes_per_expert

    @property
    def spare_bytes(self) -> int:
        """The slots of zeros, and that of the stages."""
        part = 0 if self.is_resident else self.n_stages * weight_bytes_per_expert(self.group)
        return (1 if self.is_resident else self.n_spare) * self.group.bytes_per_expert + part

    @property
    def stage_bytes(self) -> int:
        """Room for one whole layer, through which prefill streams what is not resident."""
        return 0 if self.is_resident else self.n_stages * stage_bytes(self.group)

    @property
    def device_bytes(self) -> int:
        return self.slot_bytes + self.spare_bytes + self.stage_bytes


@dataclass(frozen=True, slots=True)
class HostPlan:
    """Where experts lie that are in no slot. Bytes."""

    rung: str  # "mapped", "pageable"; "none" if every expert has a slot
    paged: int  # of the file, read through the mapping
    ring: int  # page-locked pieces that pageable experts pass through
    limit: int = 0  # page-locked at most; 0: what there is


@dataclass(frozen=True, slots=True)
class Plan:
    """Slots per layout group, the context beside them, and the reasons. Bytes."""

    facts: ModelFacts
    device: DeviceFacts
    pools: tuple[PoolPlan, ...]
    reason: str
    setting: Setting
    needs: Needs
    host: HostPlan

    @property
    def n_ubatch(self) -> int:
        """Tokens computed at once in prefill."""
        return self.setting.n_ubatch

    @property
    def n_slots(self) -> int:
        return sum(pool.n_slots for pool in self.pools)

    @property
    def device_bytes(self) -> int:
        """Device memory of the expert cache: slots and stages."""
        return sum(pool.device_bytes for pool in self.pools)

    @property
    def total_bytes(self) -> int:
        """Device memory of everything."""
        return self.needs.device + self.device_bytes

    @property
    def share(self) -> float:
        """Slots over experts, 0..1; 1 for a dense model."""
        return self.n_slots / sum(pool.group.n_experts for pool in self.pools) if self.pools else 1.0

    def lines(self) -> list[str]:
        """What was decided and why, for people."""
        if not self.facts.is_moe:
            return [f"{self.facts.name}: dense {self.facts.architecture}, nothing to page; llama.cpp runs it as it is on {self.device.name}"]
        n_experts = sum(pool.group.n_experts for pool in self.pools)
        slots, stage = sum(pool.slot_bytes for pool in self.pools), sum(pool.stage_bytes for pool in self.pools)
        return [
            f"{self.facts.name}: {self.facts.architecture}, {len(self.facts.expert_layers)} MoE layers of {self.facts.n_expert} experts, "
            f"top-{self.facts.n_used}, on {self.device.name}",
            f"expert cache: {self.n_slots} of {n_experts} experts resident ({self.share:.0%}), {size(slots)} of slots"
            + (f" and {size(stage)} of prefill stage" if stage else "")
            + f"; {self.reason}; prefill in batches of {self.n_ubatch} tokens",
            self.memory_line(),
        ]

    def memory_line(self) -> str:
        """Every byte on the device, for people."""
        parts = [*memory_parts(self.needs, self.setting), (self.device_bytes, "expert cache")]
        whole = "" if self.needs.is_exact else ", estimated"
        return (
            f"memory of {self.device.name}: {size(self.total_bytes)}{whole} = {' + '.join(f'{size(n)} {what}' for n, what in parts if n)}; "
            f"of {size(self.device.free)} stay free {size(max(0, self.device.free - self.total_bytes))}"
        )

    def host_line(self) -> str:
        """How the device will read experts that are in no slot, for people; once it is loaded the model knows better."""
        host = self.host
        if host.rung == "none":
            return "host pool: none, every expert has a slot"
        if host.rung == "mapped":
            locked = "" if self.device.is_cpu else ", page-locked"
            return f"host pool: {size(host.paged)} of the file{locked}"
        return (
            f"host pool: {size(host.paged)} of the file, pageable, through {size(host.ring)} of page-locked pieces: "
            f"{size(host.limit)} may be page-locked"
        )

    def as_dict(self) -> dict[str, object]:
        """Plain values, for JSON. Bytes."""
        return {
            "device": self.device.name,
            "device_free": self.device.free,
            "n_slots": self.n_slots,
            "share": self.share,
            "n_ctx": self.setting.n_ctx,
            "n_ubatch": self.n_ubatch,
            "weights": self.needs.weights,
            "kv": self.needs.kv,
            "compute": self.needs.compute,
            "is_exact": self.needs.is_exact,
            "pools": [
                {
                    "n_slots": pool.n_slots,
                    "n_experts": pool.group.n_experts,
                    "slots": pool.slot_bytes,
                    "spare": pool.spare_bytes,
                    "stages": pool.stage_bytes,
                }
                for pool in self.pools
            ],
            "total": self.total_bytes,
            "host_rung": self.host.rung,
            "host_paged": self.host.paged,
            "host_ring": self.host.ring,
            "host_weights": self.needs.host_weights,
            "reason": self.reason,
        }


def memory_parts(needs: Needs, setting: Setting) -> list[tuple[int, str]]:
    each = f"{setting.n_contexts} x " if setting.n_contexts > 1 else ""
    return [
        (needs.weights, "weights"),
        (needs.kv, f"KV cache ({each}-c {setting.n_ctx}" + (f", {setting.kv.k}" if setting.kv.k != "f16" else "") + ")"),
        (needs.compute, f"compute buffers ({each}-b {setting.n_ubatch})"),
    ]


def size(n_bytes: int) -> str:
    """Bytes for people: "204.8 KiB", "13.2 MiB", "12.45 GiB"."""
    value, units = float(n_bytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while round(value, 1) >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    digits = {"bytes": 0, "KiB": 1, "MiB": 1}.get(units[0], 2)
    return f"{value:.{digits}f} {units[0]}"


def weight_bytes_per_expert(group: LayoutGroup) -> int:
    """Of one expert, without bias and scale."""
    return sum(part.weight.n_bytes // part.weight.ne(2) for part in group.layers[0].parts)


def stage_bytes(group: LayoutGroup) -> int:
    return max(layer.n_expert for layer in group.layers) * weight_bytes_per_expert(group)


def minimum(group: LayoutGroup) -> int:
    """Slots that one token needs."""
    return max(layer.n_used for layer in group.layers)
