"""Proves on this machine that paging changes nothing: logits against llama.cpp, kernels against float64, bytes in slots against the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tinyserve_gguf import _llama, verify_logits
from tinyserve_gguf._shim import Device
from tinyserve_gguf.bench_baseline import open_stock
from tinyserve_gguf.errors import EngineError, OptionError
from tinyserve_gguf.facts import ExpertLayer, ModelFacts, read_facts
from tinyserve_gguf.miss_guard import all_on_cpu
from tinyserve_gguf.model import Model, load
from tinyserve_gguf.needs import context_bytes, weight_bytes
from tinyserve_gguf.placement import default_threads, pick_device, plan_for
from tinyserve_gguf.plan import CacheSpec, Plan, minimum, size
from tinyserve_gguf.split import SplitPlan, shares_of
from tinyserve_gguf.verify_kernels import KernelRow, check_kernels, unequal_slots
from tinyserve_gguf.verify_logits import UBATCH, Difference, Logits, Workload

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MINIMUM = "minimum"
CACHES = (MINIMUM, "25%", "50%", "all")
CACHES_QUICK = (MINIMUM, "50%")
STOCK_DONE, PAGED_DONE = 0.2, 0.8  # of the progress, where the parts end

Show = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """What to check. Empty lists: by `quick`."""

    path: str
    device: str = "auto"  # auto: one GPU
    tensor_split: tuple[float, ...] | None = None  # with several devices
    caches: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    miss: str = "fetch"
    quick: bool = False
    n_threads: int | None = None
    batches: tuple[int, ...] = ()  # tokens of prompts, and of the matmuls beside float64


@dataclass(frozen=True, slots=True)
class PagedRow:
    """One paged run beside llama.cpp."""

    cache: str
    policy: str
    n_slots: int
    n_experts: int
    difference: Difference | None  # None: every bit the same
    first_layer: int | None  # where a difference was first seen, if it could be told
    is_near: bool  # only with misses on the CPU of a GPU machine: near enough
    slots_checked: int
    bytes_checked: int
    wrong_bytes: tuple[str, ...]
    fault: str  # what the expert cache itself found wrong

    @property
    def holds(self) -> bool:
        return not self.problems()

    def problems(self) -> list[str]:
        """What is wrong, for people."""
        found = [] if self.difference is None or self.is_near else [self.difference.line()]
        if found and self.first_layer is not None:
            found[0] += f", first seen in block {self.first_layer}"
        if self.wrong_bytes:
            more = f" and {len(self.wrong_bytes) - 1} more" if len(self.wrong_bytes) > 1 else ""
            found.append(f"the slot of {self.wrong_bytes[0]}{more} does not hold what the file holds")
        if self.fault:
            found.append(self.fault)
        if not self.slots_checked:
            found.append("no slot was in use: llama.cpp computed none of these experts")
        return found


@dataclass(slots=True)
class Report:
    """All that was found."""

    facts: ModelFacts
    device: str
    n_tokens: int  # of each run, prompt and decoded
    finite: bool = True  # llama.cpp's own logits are numbers
    on_cpu: Difference | None = None  # llama.cpp's own with all experts on the CPU; only where misses are computed there, beside a GPU
    paged: list[PagedRow] = field(default_factory=list)
    kernels: list[KernelRow] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return (
            self.finite
            and bool(self.paged)
            and bool(self.kernels)
            and all(row.holds for row in self.paged)
            and all(row.holds for row in self.kernels)
        )


def verify(options: VerifyOptions, show: Show) -> Report:
    """Run every check. ModelFileError, OptionError or CapacityError, one line each, where it cannot be run."""
    facts = read_facts(options.path)
    if not facts.is_moe:
        raise OptionError(f"{facts.name} is dense: nothing is paged, so there is nothing to verify")
    caches = options.caches or (CACHES_QUICK if options.quick else CACHES)
    policies = options.policies or (("lfru",) if options.quick else ("lfru", "lru"))
    device, split = pick_device(options.device), options.tensor_split
    sizes = {cache: _size(facts, cache, device) for cache in caches}
    for cache in sizes.values():  # refuses what cannot be, before anything is loaded
        plan, device = plan_for(facts, expert_cache=cache, device=device.name, tensor_split=split, n_ubatch=UBATCH)
    n_threads = options.n_threads or default_threads()
    work = Workload(options.batches, 1, n_threads) if options.batches else Workload.of(facts, n_threads, quick=options.quick)
    _check_room(facts, device, work)
    report = Report(facts, device.name, work.n_tokens)
    native = _llama.NativeModel(str(facts.path), _reference(device, plan), extra_bufts=False)
    try:
        native.require_generative(facts.path, facts.architecture)
        stock = verify_logits.read(native, work, _within(show, "llama.cpp", 0, STOCK_DONE))
    finally:
        native.close()
    report.finite = verify_logits.are_finite(stock)
    if options.miss != "fetch" and not device.is_cpu:
        native = open_stock(facts, device, all_on_cpu(facts), lambda _done: True)
        try:
            on_cpu = verify_logits.read(native, work, lambda _done: show("llama.cpp, all experts on the CPU", STOCK_DONE))
        finally:
            native.close()
        report.on_cpu = verify_logits.compare(work, stock, on_cpu)
    step = (PAGED_DONE - STOCK_DONE) / len(sizes)
    for i, (cache, asked) in enumerate(sizes.items()):
        run = _Run(facts, device, split, work, stock, report.on_cpu, options.miss)
        for j, policy in enumerate(policies):
            start = STOCK_DONE + (i + j / len(policies)) * step
            text = f"expert cache {cache}, {policy}"
            row, resident = run.paged(cache, asked, policy, _within(show, text, start, start + step / len(policies)))
            report.paged.append(row)
            if resident:
                break  # nobody leaves: the policies are one
    for part, member, label in _each_device(plan, device):
        rows = check_kernels(
            part,
            member,
            quick=options.quick,
            batches=options.batches,
            n_threads=n_threads,
            show=lambda text, done: show(text, PAGED_DONE + done * (1 - PAGED_DONE)),
        )
        report.kernels += [replace(row, type=f"{row.type}{label}") for row in rows]
    return report


def _each_device(plan: Plan, device: Device) -> Iterator[tuple[ModelFacts, Device, str]]:
    """What lies on each device, the device, and what its rows have behind the type."""
    if not isinstance(plan, SplitPlan):
        yield plan.facts, device, ""
        return
    for part, member, label in zip(plan.parts, device.members, plan.labels, strict=True):
        yield part.facts, member, f" on {label}"


def _reference(device: Device, plan: Plan) -> _llama.Offload:
    """llama.cpp alone on the same devices; the CPU as a device, too."""
    return device.offload(shares_of(plan)) or _llama.Offload(device.handle)


def _size(facts: ModelFacts, cache: str, device: Device) -> str:
    if cache != MINIMUM:
        return cache
    # On several devices it depends on the split: so small a share that every pool has what one token needs
    return "0.001%" if len(device.members) > 1 else str(sum(minimum(group) for group in facts.groups))


def check_cache(text: str) -> str:
    """`text`, if it is a size of the expert cache or "minimum". OptionError if not."""
    if text != MINIMUM:
        CacheSpec.parse(text)
    return text


def _check_room(facts: ModelFacts, device: Device, work: Workload) -> None:
    """llama.cpp alone must fit on the device: it is the reference."""
    needed = weight_bytes(facts) + facts.expert_bytes + context_bytes(facts, work.options().n_ctx, UBATCH)
    if not device.is_cpu and needed > device.memory_free:
        raise OptionError(
            f"llama.cpp with everything on {device.name} is the reference, and it needs {size(needed)} where {size(device.memory_free)} are free; "
            "use --device CPU, or a device that holds the whole model"
        )


def _within(show: Show, text: str, low: float, high: float) -> Callable[[float], None]:
    """Progress of a part, from `low` to `high` of the whole."""
    return lambda done: show(text, low + done * (high - low))


@dataclass(frozen=True, slots=True)
class _Run:
    """What paged runs share."""

    facts: ModelFacts
    device: Device
    split: tuple[float, ...] | None
    work: Workload
    stock: list[Logits]
    on_cpu: Difference | None
    miss: str

    def paged(self, cache: str, asked: str, policy: str, show: Callable[[float], None]) -> tuple[PagedRow, bool]:
        """The row of one run, and whether every expert was resident."""
        facts, work = self.facts, self.work
        with load(
            facts.path,
            expert_cache=asked,
            policy=policy,
            device=self.device.name,
            tensor_split=self.split,
            n_ctx=work.options().n_ctx,
            n_ubatch=UBATCH,
            n_threads=work.n_threads,
            miss=self.miss,
        ) as model:
            logits = verify_logits.read(model.native, work, show)
            fault = ""
            try:
                model.check_integrity()
            except EngineError as error:
                fault = str(error)
            n, n_bytes, wrong = unequal_slots(facts, _held(model))
            difference = verify_logits.compare(work, self.stock, logits)
            layer = _first_layer(facts, self.device, model, work, difference) if difference else None
            rounds_otherwise = self.miss != "fetch" and not self.device.is_cpu
            near = rounds_otherwise and difference is not None and difference.is_near(self.on_cpu)
            total = sum(group.n_experts for group in facts.groups)
            row = PagedRow(cache, policy, model.plan.n_slots, total, difference, layer, near, n, n_bytes, tuple(wrong), fault)
            return row, all(pool.is_resident for pool in model.plan.pools)


def _held(model: Model) -> Iterator[tuple[ExpertLayer, int, dict[str, npt.NDArray[np.uint8]]]]:
    """Every expert that is in a slot, with the bytes there."""
    states = model.experts.states()
    for layer in model.facts.expert_layers:
        for number, state in enumerate(states[layer.block, layer.family]):
            if state.slot >= 0:
                weights = model.experts[layer.block, number, layer.family].weights
                yield layer, number, {role: weight.in_slot() for role, weight in weights.items()}


def _first_layer(facts: ModelFacts, device: Device, model: Model, work: Workload, difference: Difference) -> int | None:
    """The paged model runs the prompt again, and llama.cpp beside it; on a device with room for one of them only it stays unknown."""
    if not device.is_cpu and facts.device_bytes + facts.expert_bytes > pick_device(device.name).memory_free:
        return None
    paged = verify_logits.layer_hashes(model.native, work, difference.prompt)
    native = _llama.NativeModel(str(facts.path), _reference(device, model.plan), extra_bufts=False)
    try:
        return verify_logits.first_layer(verify_logits.layer_hashes(native, work, difference.prompt), paged)
    finally:
        native.close()
