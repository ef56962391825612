"""A model on several devices: a pager for each, and one object that stands for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple

from tinyserve_gguf import _llama
from tinyserve_gguf._shim import HOST_RUNGS, Device, Miss, Pager
from tinyserve_gguf.counters import Counts, ExpertArrays, ExpertState, Notes, PagerStats, ResizeCounts
from tinyserve_gguf.errors import EngineError, OptionError, TinyserveError
from tinyserve_gguf.paging import Layers, open_pager
from tinyserve_gguf.plan import Plan
from tinyserve_gguf.progress import LoadProgress
from tinyserve_gguf.split import SplitPlan


def open_pagers(plan: Plan, device: Device, policy: str, engine: str, cpu_threads: int | None) -> tuple[Pager, Layers]:
    """The pager of a plan, or a group of them if it is for several devices; otherwise as `open_pager`."""
    if not isinstance(plan, SplitPlan):
        return open_pager(plan, device, policy, engine, cpu_threads)
    pagers: list[Pager] = []
    layers: Layers = {}
    try:
        for part, member in zip(plan.parts, device.members, strict=True):
            pager, own = open_pager(part, member, policy, engine, cpu_threads, beside=pagers[0] if pagers else None)
            pagers.append(pager)
            first = len(layers)
            layers |= {key: (first + index, facts) for key, (index, facts) in own.items()}
    except BaseException:
        for pager in pagers:
            pager.close()
        raise
    return PagerGroup(pagers, plan), layers


class PagerGroup(Pager):
    """All that a Pager can do once it is committed. Layers are numbered on from device to device, pools likewise; counters are sums."""

    def __init__(self, pagers: Sequence[Pager], plan: SplitPlan) -> None:
        self._handle = None  # there is no pager of its own
        self._pagers = tuple(pagers)
        self._labels, self._shares = plan.labels, plan.shares
        self._weights = [part.facts.expert_bytes for part in plan.parts]
        self._slots = [[pool.n_slots for pool in part.pools] for part in plan.parts]
        self._n_experts = [sum(pool.group.n_experts for pool in part.pools) for part in plan.parts]
        self._n_layers = [len(part.facts.expert_layers) for part in plan.parts]
        self._where = [(pager, i) for pager, n in zip(self._pagers, self._n_layers, strict=True) for i in range(n)]

    @property
    def _pager(self) -> object:
        """What is done while a pager is made is done to each of them, before they are a group."""
        raise EngineError("a group of pagers is complete")

    # ---- life ----

    def close(self) -> None:
        for pager in self._pagers:
            pager.close()

    def ready(self, progress: Callable[[float], bool] | None = None) -> None:
        stage, done, total = LoadProgress(progress), 0, max(1, sum(self._weights))
        for pager, weight in zip(self._pagers, self._weights, strict=True):
            pager.ready(stage.part(done / total, (done + weight) / total))
            done += weight

    def offload(self, pattern: str) -> _llama.Offload:
        """The proxy devices. No override: they take their experts by themselves, and llama.cpp gives up pipeline parallelism where there is one."""
        first, *others = (pager.offload(pattern).device for pager in self._pagers)
        return _llama.Offload(first, others=tuple(others), split=self._shares)

    # ---- each ----

    def parts(self) -> list[tuple[str, Pager]]:
        """The pagers, with the names of their devices."""
        return list(zip(self._labels, self._pagers, strict=True))

    def set_miss(self, miss: Miss) -> None:
        for pager in self._pagers:
            pager.set_miss(miss)

    def set_link(self, bytes_per_second: float) -> None:
        """Of the devices that use theirs: where every expert is resident there is none to slow down."""
        paging = [pager for pager in self._pagers if not pager.stats().all_resident]
        for pager in paging or self._pagers:
            pager.set_link(bytes_per_second)

    def set_policy(self, policy: str) -> None:
        for pager in self._pagers:
            pager.set_policy(policy)

    def set_profile(self, on: bool) -> None:
        for pager in self._pagers:
            pager.set_profile(on)

    def reset_stats(self) -> None:
        for pager in self._pagers:
            pager.reset_stats()

    def check_integrity(self) -> None:
        for label, pager in self.parts():
            _check(label, pager)

    def resize(self, n_slots: Sequence[int]) -> ResizeCounts:
        """All of them, or none: where one cannot, those before it get their old size back."""
        wanted, start = [], 0
        for old in self._slots:
            wanted.append(list(n_slots[start : start + len(old)]))
            start += len(old)
        done: list[ResizeCounts] = []
        try:
            for pager, slots in zip(self._pagers, wanted, strict=True):
                done.append(pager.resize(slots))
        except TinyserveError:
            for pager, slots in zip(self._pagers, self._slots[: len(done)], strict=False):
                pager.resize(slots)
            raise
        self._slots = wanted
        sums = [sum(values) for values in zip(*((one.kept, one.evicted, one.loaded, one.bytes_link) for one in done), strict=True)]
        return ResizeCounts(sums[0], sums[1], sums[2], all(one.beside for one in done), sums[3])

    # ---- all together ----

    def _said(self, what: Callable[[Pager], str]) -> str:
        """What they all say, or what each of them does."""
        texts = [what(pager) for pager in self._pagers]
        return texts[0] if len(set(texts)) == 1 else "; ".join(f"{label}: {text}" for label, text in zip(self._labels, texts, strict=True))

    @property
    def miss(self) -> str:
        return self._said(lambda pager: pager.miss)

    @property
    def host(self) -> str:
        return self._said(lambda pager: pager.host)

    @property
    def engine(self) -> str:
        return self._said(lambda pager: pager.engine)

    def cpu_seconds(self, n_threads: int) -> float:
        """On average over the devices' experts; 0.0 if it cannot be measured on one of them."""
        found = [(pager.cpu_seconds(n_threads), n) for pager, n in zip(self._pagers, self._n_experts, strict=True) if n]
        return sum(seconds * n for seconds, n in found) / sum(n for _, n in found) if all(seconds for seconds, _ in found) else 0.0

    def stats(self) -> PagerStats:
        all_of = [pager.stats() for pager in self._pagers]
        return PagerStats(
            prefill=_counts([stats.prefill for stats in all_of]),
            decode=_counts([stats.decode for stats in all_of]),
            host_bytes=sum(stats.host_bytes for stats in all_of),
            host_tensors=sum(stats.host_tensors for stats in all_of),
            host_rung=max((stats.host_rung for stats in all_of), key=HOST_RUNGS.index),
            host=self.host,
            pool_bytes=sum(stats.pool_bytes for stats in all_of),
            stage_bytes=sum(stats.stage_bytes for stats in all_of),
            slots_total=sum(stats.slots_total for stats in all_of),
            slots_used=sum(stats.slots_used for stats in all_of),
            all_resident=all(stats.all_resident for stats in all_of),
            device_engine=all(stats.device_engine for stats in all_of),
            miss=self.miss,
            cpu_cannot=any(stats.cpu_cannot for stats in all_of),
            notes=Notes(*map(sum, zip(*(astuple(stats.notes) for stats in all_of), strict=True))),
        )

    def expert_arrays(self, n_experts: int) -> ExpertArrays:
        """Each device at one moment of its own, one after the other."""
        assert n_experts == sum(self._n_experts)
        found = [pager.expert_arrays(n) for pager, n in zip(self._pagers, self._n_experts, strict=True)]
        return ExpertArrays(
            tick=max(one.tick for one in found),
            slots_total=sum(one.slots_total for one in found),
            slots_used=sum(one.slots_used for one in found),
            all_resident=all(one.all_resident for one in found),
            prefill=_counts([one.prefill for one in found]),
            decode=_counts([one.decode for one in found]),
            resident=_joined([one.resident for one in found]),
            hits=_joined([one.hits for one in found]),
            misses=_joined([one.misses for one in found]),
            last_use=_joined([one.last_use for one in found]),
        )

    def layer_time(self, layer: int) -> tuple[int, list[int]]:
        """One behind the last layer: what follows the last layer of each device."""
        if layer < len(self._where):
            pager, index = self._where[layer]
            return pager.layer_time(index)
        ends = [pager.layer_time(n) for pager, n in zip(self._pagers, self._n_layers, strict=True)]
        return max(graphs for graphs, _ in ends), [sum(ns) for ns in zip(*(ns for _, ns in ends), strict=True)]

    # ---- one expert ----

    def _at(self, layer: int) -> tuple[Pager, int]:
        if not 0 <= layer < len(self._where):
            raise OptionError(f"there is no layer {layer}")
        return self._where[layer]

    def device_of(self, layer: int) -> str:
        pager, _ = self._at(layer)
        return self._labels[self._pagers.index(pager)]

    def expert(self, layer: int, expert: int) -> ExpertState:
        pager, index = self._at(layer)
        return pager.expert(index, expert)

    def layer(self, layer: int, n_expert: int) -> list[ExpertState]:
        pager, index = self._at(layer)
        return pager.layer(index, n_expert)

    def expert_host(self, layer: int, expert: int, part: int) -> memoryview:
        pager, index = self._at(layer)
        return pager.expert_host(index, expert, part)

    def expert_slot_bytes(self, layer: int, expert: int, part: int, size: int) -> bytes:
        pager, index = self._at(layer)
        return pager.expert_slot_bytes(index, expert, part, size)

    def pin(self, layer: int, expert: int, on: bool) -> None:
        pager, index = self._at(layer)
        pager.pin(index, expert, on)

    def prefetch(self, layer: int, expert: int) -> None:
        pager, index = self._at(layer)
        pager.prefetch(index, expert)

    def preload(self, layer: int, expert: int) -> bool:
        pager, index = self._at(layer)
        return pager.preload(index, expert)

    def evict(self, layer: int, expert: int) -> None:
        pager, index = self._at(layer)
        pager.evict(index, expert)


def _check(label: str, pager: Pager) -> None:
    try:
        pager.check_integrity()
    except EngineError as error:
        raise EngineError(f"{label}: {error}") from error


def _counts(parts: Sequence[Counts]) -> Counts:
    """Their sum. A graph of llama.cpp's goes through all devices, and is one."""
    values = {name: sum(getattr(part, name) for part in parts) for name in Counts.__dataclass_fields__}
    return Counts(**values | {"graphs": max(part.graphs for part in parts)})


def _joined(arrays: Sequence[bytearray]) -> bytearray:
    return bytearray().join(arrays)
