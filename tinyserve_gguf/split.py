"""Which layers go to which device, and the plan of each: pure, as `plan`.

Layers are split as llama.cpp splits them: `tensor_split` gives each device a share of the blocks, in their order, and the output counts as one more.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache

from tinyserve_gguf.errors import CapacityError, OptionError
from tinyserve_gguf.facts import LayoutGroup, ModelFacts
from tinyserve_gguf.needs import Needs
from tinyserve_gguf.plan import CacheSpec, DeviceFacts, HostPlan, Plan, minimum, size
from tinyserve_gguf.planner import replan

MAX_DEVICES = 16  # TSG_MAX_DEVICES, llama_max_devices()

PlanPart = Callable[[ModelFacts, CacheSpec, DeviceFacts, int | None], Plan]  # facts of a part, its cache, its device, batch of prefill or None

_BLOCK = re.compile(r"blk\.(\d+)\.")


def parse_split(text: str) -> tuple[float, ...]:
    """ "3,1" as shares. OptionError for what is none."""
    try:
        return check_shares([float(part) for part in text.replace("/", ",").split(",")])
    except ValueError as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError(f"--tensor-split is one number per device, such as 3,1, not {text!r}") from None


def check_split_mode(mode: str) -> None:
    """OptionError for llama.cpp's other ways to use several devices."""
    if mode not in ("layer", "row", "tensor"):
        raise OptionError(f"the split mode is layer, not {mode!r}")
    if mode != "layer":
        raise OptionError(f"--split-mode {mode} cuts every expert over all devices, and an expert is paged as a whole: use --split-mode layer")


def check_shares(shares: Sequence[float]) -> tuple[float, ...]:
    """OptionError for what is no share of the layers."""
    if not shares or not all(0 < share < math.inf for share in shares):
        raise OptionError(f"--tensor-split {_text(shares)}: every share is a number above 0; leave out the device that shall get no layer")
    return tuple(map(float, shares))


def _text(shares: Sequence[float]) -> str:
    return ",".join(f"{share:g}" for share in shares)


def _float(value: float) -> float:
    """As a float of C."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def layer_devices(n_blocks: int, shares: Sequence[float]) -> tuple[int, ...]:
    """The index of the device of each block, and last that of the output. As `get_layer_buft_list` in llama-model.cpp computes it, in floats."""
    sums, total = [], 0.0
    for share in shares:
        total = _float(total + _float(share))
        sums.append(total)
    ends = [_float(end / total) for end in sums]
    at = [_float(layer / (n_blocks + 1)) for layer in range(n_blocks + 1)]
    return tuple(next(i for i, end in enumerate(ends) if end > position) for position in at)


def part_of(facts: ModelFacts, devices: Sequence[int], device: int) -> ModelFacts:
    """What lies on one device: its blocks, and with the output all that is in no block."""

    def mine(name: str) -> bool:
        match = _BLOCK.match(name)
        return devices[int(match[1]) if match else -1] == device

    layers = tuple(layer for layer in facts.expert_layers if devices[layer.block] == device)
    groups = [(group.layout, tuple(layer for layer in group.layers if devices[layer.block] == device)) for group in facts.groups]
    return replace(
        facts,
        tensors=tuple(tensor for tensor in facts.tensors if mine(tensor.name)),
        expert_layers=layers,
        idle_layers=tuple(layer for layer in facts.idle_layers if devices[layer.block] == device),
        groups=tuple(LayoutGroup(layout, members) for layout, members in groups if members),
    )


@dataclass(frozen=True, slots=True)
class SplitPlan(Plan):
    """A plan of several devices. `pools` are those of all parts, in the order of the devices."""

    parts: tuple[Plan, ...]  # by device, for the facts that lie there
    labels: tuple[str, ...]  # of the devices: their names, numbered if one is there twice
    devices: tuple[int, ...]  # of each block, and last that of the output
    shares: tuple[float, ...]  # for llama.cpp

    def lines(self) -> list[str]:
        """What was decided and why, for people: the whole, then each device."""
        head = Plan.lines(self)
        if not self.facts.is_moe:
            return [*head, f"layers: {', '.join(f'{label}: {self._layers(i)}' for i, label in enumerate(self.labels))}"]
        lines = []
        for i, (label, part) in enumerate(zip(self.labels, self.parts, strict=True)):
            n_experts = sum(pool.group.n_experts for pool in part.pools)
            stage = sum(pool.stage_bytes for pool in part.pools)
            cached = "no experts there"
            if n_experts:
                slots = sum(pool.slot_bytes for pool in part.pools)
                cached = f"{part.n_slots} of {n_experts} experts resident ({part.share:.0%}), {size(slots)} of slots"
                cached += (f" and {size(stage)} of prefill stage" if stage else "") + f"; {part.reason}"
            lines.append(f"{label}: {self._layers(i)}; {cached}")
        return [*head[:2], *lines, *(part.memory_line() for part in self.parts)]

    def _layers(self, device: int) -> str:
        blocks = [block for block, owner in enumerate(self.devices[:-1]) if owner == device]
        text = f"blocks {blocks[0]} to {blocks[-1]}" if len(blocks) > 1 else f"block {blocks[0]}"
        return text + (" and the output" if self.devices[-1] == device else "")


def shares_of(plan: Plan) -> tuple[float, ...]:
    """What llama.cpp must be told to split the layers as planned; empty for one device."""
    return plan.shares if isinstance(plan, SplitPlan) else ()


def joined(
    facts: ModelFacts, parts: Sequence[Plan], labels: Sequence[str], devices: Sequence[int], shares: Sequence[float], reason: str
) -> SplitPlan:
    """One plan of those of the devices."""
    name = ",".join(part.device.name for part in parts)
    whole = {field.name: getattr(parts[-1], field.name) for field in fields(Plan)} | {
        "facts": facts,
        "device": DeviceFacts(name, sum(part.device.free for part in parts), all(part.device.is_cpu for part in parts)),
        "pools": tuple(pool for part in parts for pool in part.pools),
        "reason": reason,
        "needs": _all_needs([part.needs for part in parts]),
        "host": _all_hosts([part.host for part in parts]),
    }
    return SplitPlan(**whole, parts=tuple(parts), labels=tuple(labels), devices=tuple(devices), shares=tuple(shares))


def _all_needs(parts: Sequence[Needs]) -> Needs:
    sums = {name: sum(getattr(part, name) for part in parts) for name in ("weights", "kv", "compute", "host_weights", "host_compute")}
    return Needs(**sums, is_exact=all(part.is_exact for part in parts))


def _all_hosts(parts: Sequence[HostPlan]) -> HostPlan:
    """The lowest rung that one of them is on."""
    rung = max((part.rung for part in parts), key=("none", "mapped", "pageable").index)
    return HostPlan(rung, sum(part.paged for part in parts), sum(part.ring for part in parts), max(part.limit for part in parts))


def least_experts(facts: ModelFacts) -> int:
    """Slots that one token needs of these layers."""
    return sum(minimum(group) for group in facts.groups)


def spread(spec: CacheSpec, parts: Sequence[ModelFacts]) -> list[CacheSpec]:
    """What the cache size asks of each device: a share is the same everywhere, a size or a number of experts goes by how much lies there."""
    if spec.kind == "bytes":
        total = sum(part.expert_bytes for part in parts)
        return [replace(spec, value=spec.value * part.expert_bytes / max(1, total)) for part in parts]
    if spec.kind != "experts":
        return [spec] * len(parts)
    least = [least_experts(part) for part in parts]
    if spec.value < sum(least):
        raise OptionError(
            f"one token needs {' + '.join(map(str, least))} = {sum(least)} experts at once on these devices: an expert cache of {spec.text} is too "
            f"small, give {sum(least)} or more"
        )
    n_experts = [sum(group.n_experts for group in part.groups) for part in parts]
    counts = [max(low, int(spec.value * n // sum(n_experts))) for low, n in zip(least, n_experts, strict=True)]
    while sum(counts) > spec.value:  # the minimum of a small part pushed the sum over
        largest = max(range(len(counts)), key=lambda i: counts[i] - least[i])
        counts[largest] -= 1
    while sum(counts) < min(int(spec.value), sum(n_experts)):
        poorest = min((i for i, n in enumerate(n_experts) if counts[i] < n), key=lambda i: counts[i] / n_experts[i])
        counts[poorest] += 1
    return [replace(spec, value=count) for count in counts]


def replan_all(plan: Plan, spec: CacheSpec, free: Sequence[int]) -> Plan:
    """As `plan.replan`, for a plan of one device or of several. `free`: bytes of each. The layers stay where they are."""
    if not isinstance(plan, SplitPlan):
        return replan(plan, spec, free[0])

    def replanned(i: int, part: Plan, each: CacheSpec) -> Plan:
        try:
            return replan(part, each, free[i]) if part.pools else part
        except CapacityError as error:
            raise CapacityError(f"{plan.labels[i]}: {error}") from error

    specs = spread(spec, [part.facts for part in plan.parts])
    parts = [replanned(i, part, each) for i, (part, each) in enumerate(zip(plan.parts, specs, strict=True))]
    return joined(plan.facts, parts, plan.labels, plan.devices, plan.shares, "; ".join(dict.fromkeys(part.reason for part in parts if part.pools)))


def plan_split(
    facts: ModelFacts,
    spec: CacheSpec,
    devices: Sequence[DeviceFacts],
    labels: Sequence[str],
    plan_part: PlanPart,
    *,
    shares: tuple[float, ...] | None = None,
    n_ubatch: int | None = None,
    reason: str = "",
) -> SplitPlan:
    """Decide the split, if no shares are given, and the plan of each device.

    Without shares llama.cpp's own rule, by free memory, is where the search begins; layers then move between neighbours as long as a device is too
    small for what it has, or as long as that keeps a larger share of the experts on the device that keeps the smallest.
    Raises CapacityError that names the device which is too small, OptionError for what cannot be.
    """
    n, n_blocks = len(devices), facts.n_blocks
    if n > MAX_DEVICES:
        raise OptionError(f"llama.cpp splits a model over {MAX_DEVICES} devices at most, not {n}")
    if shares is not None and len(shares) != n:
        raise OptionError(f"--tensor-split gives {len(shares)} shares, and there are {n} devices: {', '.join(labels)}")
    if n_blocks < n:
        raise OptionError(f"{facts.name} has {n_blocks} blocks, too few for {n} devices")

    @cache
    def part(i: int, first: int, last: int) -> ModelFacts:
        return part_of(facts, [i if first <= layer < last else -1 for layer in range(n_blocks + 1)], i)

    @cache
    def plan(i: int, first: int, last: int, cache_spec: CacheSpec, batch: int | None) -> Plan:
        try:
            return plan_part(part(i, first, last), cache_spec, devices[i], batch)
        except CapacityError as error:
            raise CapacityError(f"{labels[i]}, with {last - first} of {n_blocks + 1} layers: {error}") from error

    def planned(given: tuple[float, ...], batch: int | None) -> SplitPlan:
        owners = layer_devices(n_blocks, given)
        ranges = [(i, owners.index(i), n_blocks + 1 - owners[::-1].index(i)) for i in range(n)]
        parts = [part(*where) for where in ranges]
        specs = [each if part.is_moe else CacheSpec("auto", "auto") for part, each in zip(parts, spread(spec, parts), strict=True)]
        plans = [plan(*where, each, batch) for where, each in zip(ranges, specs, strict=True)]
        least = min(plan.n_ubatch for plan in plans)
        if any(plan.n_ubatch != least for plan in plans):
            return planned(given, least)
        return joined(facts, plans, labels, owners, given, reason or "; ".join(dict.fromkeys(plan.reason for plan in plans if plan.pools)))

    if shares is not None:
        counts = _counts(n, layer_devices(n_blocks, shares))
        _check_counts(counts, labels, f"--tensor-split {_text(shares)}")
        return planned(shares, n_ubatch)
    found = _search(n_blocks, [device.free for device in devices], lambda counts: planned(tuple(map(float, counts)), n_ubatch))
    return planned(tuple(map(float, found)), n_ubatch)


def _counts(n: int, owners: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(owners.count(i) for i in range(n))


def _check_counts(counts: Sequence[int], labels: Sequence[str], what: str) -> None:
    for i, count in enumerate(counts):
        if count < 1 + (i == len(counts) - 1):  # the last one has the output, and should have a block
            raise OptionError(f"{what} leaves no block for {labels[i]}: give it a larger share, or leave it out of --device")


def _search(n_blocks: int, free: Sequence[int], planned: Callable[[tuple[int, ...]], SplitPlan]) -> tuple[int, ...]:
    """The number of layers of each device. Scans one border after the other until none moves."""

    @cache
    def score(counts: tuple[int, ...]) -> tuple[bool, float]:
        """Lower is better: does not fit; the smallest share of experts on a device."""
        try:
            plan = planned(counts)
        except CapacityError:
            return True, 0.0
        return False, -min((round(part.share, 3) for part in plan.parts if part.pools), default=0.0)

    counts = _start(n_blocks, free)
    for _ in range(len(counts)):
        before = counts
        for border in range(len(counts) - 1):
            both = counts[border] + counts[border + 1]
            last = border + 1 == len(counts) - 1
            moves = [(*counts[:border], k, both - k, *counts[border + 2 :]) for k in range(1, both - last)]
            here = counts[border]
            counts = min(moves, key=lambda move: (score(move), abs(move[border] - here)))
        if counts == before:
            break
    return counts


def _start(n_blocks: int, free: Sequence[int]) -> tuple[int, ...]:
    """By free memory, but at least one block each."""
    counts = list(_counts(len(free), layer_devices(n_blocks, [max(1, n) for n in free])))
    least = [1] * (len(free) - 1) + [2]
    for i, low in enumerate(least):
        while counts[i] < low:
            largest = max(range(len(counts)), key=lambda j: counts[j] - least[j])
            counts[largest] -= 1
            counts[i] += 1
    return tuple(counts)
