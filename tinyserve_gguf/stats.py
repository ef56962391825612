"""What a model and a reply cost: counters of the expert cache, and times."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass
from typing import Any

from tinyserve_gguf._shim import Counts, Pager, PagerStats
from tinyserve_gguf.plan import Plan, size
from tinyserve_gguf.window import WindowCounts


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Mean time of one decoded graph in one layer, in microseconds; the parts follow each other. Source: the profile of the engine."""

    block: int | None  # None: behind the last layer (output norm and head), all in `attention`
    attention: float  # from the experts of the layer before to the router's choice
    lookup: float  # which of the chosen are resident, who leaves
    copy: float  # until the last byte is there; on the device engine the first expert matmul runs meanwhile
    experts: float  # the rest of the expert matmuls

    @property
    def total(self) -> float:
        return self.attention + self.lookup + self.copy + self.experts


def hit_rate(*counts: Counts) -> float | None:
    """Hits over lookups; None if nothing was looked up."""
    lookups = sum(c.lookups for c in counts)
    return sum(c.hits for c in counts) / lookups if lookups else None


def added(*counts: Counts) -> Counts:
    """Their sum, counter by counter."""
    return Counts(*map(sum, zip(*map(astuple, counts), strict=True)))


def _since(now: Counts, before: Counts) -> Counts:
    return Counts(*(a - b for a, b in zip(astuple(now), astuple(before), strict=True)))


@dataclass(frozen=True, slots=True)
class Stats:
    """A model's expert cache and windows since it was opened. `pager` is None when the model is dense: nothing is paged."""

    pager: PagerStats | None
    policy: str
    device: str
    window: WindowCounts | None = None  # of all sessions; None without a window
    parts: tuple[tuple[str, PagerStats], ...] = ()  # of each device, by name, where there are several

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        window = asdict(self.window) if self.window else None
        if self.pager is None:
            return {"device": self.device, "paged": False, "window": window}
        devices = {"devices": [{"device": name, **_with_rates(part)} for name, part in self.parts]} if self.parts else {}
        return {"device": self.device, "paged": True, "policy": self.policy, "window": window, **_with_rates(self.pager), **devices}

    def lines(self) -> list[str]:
        """The same for people."""
        pager = self.pager
        window = [f"window: {self.window.line()}"] if self.window else []
        if pager is None:
            return [f"dense model on {self.device}: nothing is paged", *window]
        lines = [
            f"{pager.slots_used} of {pager.slots_total} slots in use on {self.device}, {size(pager.pool_bytes)}; policy {self.policy}; "
            f"{size(pager.host_bytes)} of experts",
            f"host pool: {pager.host}",
        ]
        lines += self.device_lines()
        for name, c in (("prefill", pager.prefill), ("decode", pager.decode)):
            rate = hit_rate(c)
            if rate is not None:
                lines.append(
                    f"{name}: hit rate {rate:.1%} of {c.lookups} lookups, {c.evictions} evictions, {c.bytes_link / 1e6:.0f} MB over the link "
                    f"in {c.graphs} graphs"
                )
        if pager.cpu_cannot:
            lines.append(f"misses {pager.miss}")
        if pager.decode.cpu_rows:
            c, n = pager.decode, pager.notes
            lines.append(
                f"misses {pager.miss}: {c.cpu_rows} expert rows in {n.cpu_ns / 1e9:.2f} s, {c.admitted} experts entered the pool in the background; "
                f"waited {n.wait_cpu_ns / 1e9:.2f} s for the CPU, {n.wait_device_ns / 1e9:.2f} s for {self.device}"
            )
        return lines + window

    def device_lines(self) -> list[str]:
        """Each device, where there are several."""
        lines = []
        for name, part in self.parts:
            rate, c = hit_rate(part.decode), part.decode
            decode = "" if rate is None else f"; decode: hit rate {rate:.1%} of {c.lookups} lookups, {c.bytes_link / 1e6:.0f} MB over the link"
            lines.append(f"{name}: {part.slots_used} of {part.slots_total} slots in use, {size(part.pool_bytes)}{decode}")
        return lines


def _with_rates(stats: PagerStats) -> dict[str, Any]:
    values = asdict(stats)
    for phase in ("prefill", "decode"):
        values[phase]["hit_rate"] = hit_rate(getattr(stats, phase))
    return values


def parts_of(pager: Pager | None) -> tuple[tuple[str, PagerStats], ...]:
    """Counters of each device, if there are several."""
    parts = pager.parts() if pager else []
    return tuple((name, part.stats()) for name, part in parts) if len(parts) > 1 else ()


@dataclass(frozen=True, slots=True)
class ReplyStats:
    """One reply. Times in seconds; rates in tokens per second."""

    prompt_tokens: int
    reused_tokens: int  # of these, already in the KV cache
    reply_tokens: int
    prefill_seconds: float
    decode_seconds: float
    finish: str  # "stop", "length", "context" or "interrupted"
    prefill: Counts | None  # None when nothing is paged
    decode: Counts | None
    evicted_tokens: int = 0  # that left the window meanwhile
    shifts: int = 0  # times that positions moved down for it

    @property
    def prefill_rate(self) -> float:
        return (self.prompt_tokens - self.reused_tokens) / self.prefill_seconds if self.prefill_seconds > 0 else 0.0

    @property
    def decode_rate(self) -> float:
        """Of the tokens after the first, which prefill already paid for."""
        return max(0, self.reply_tokens - 1) / self.decode_seconds if self.decode_seconds > 0 else 0.0

    @property
    def hit_rate(self) -> float | None:
        """Of decode; of prefill for a reply too short to have decoded."""
        if self.prefill is None or self.decode is None:
            return None
        rate = hit_rate(self.decode)
        return hit_rate(self.prefill) if rate is None else rate

    @property
    def mb_per_token(self) -> float:
        """Megabytes over the link per decoded token."""
        return self.decode.bytes_link / 1e6 / max(1, self.reply_tokens - 1) if self.decode else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        rates = {name: getattr(self, name) for name in ("prefill_rate", "decode_rate", "hit_rate", "mb_per_token")}
        return {**asdict(self), **rates}

    def line(self) -> str:
        """The status line."""
        parts = [
            f"prefill {self.prompt_tokens - self.reused_tokens} tok at {self.prefill_rate:.1f} tok/s"
            + (f" ({self.reused_tokens} reused)" if self.reused_tokens else ""),
            f"decode {self.reply_tokens} tok at {self.decode_rate:.1f} tok/s",
        ]
        if self.hit_rate is not None:
            parts += [f"hit rate {self.hit_rate:.1%}", f"{self.mb_per_token:.1f} MB/tok"]
        if self.evicted_tokens:
            parts.append(f"{self.evicted_tokens} tok left the window")
        if self.decode and self.decode.cpu_rows:
            parts.append(f"{self.decode.cpu_rows / max(1, self.reply_tokens - 1):.1f} experts/tok on the CPU")
        if self.finish != "stop":
            parts.append({"length": "stopped at -n", "context": "context is full", "interrupted": "interrupted"}[self.finish])
        return " | ".join(parts)


def phases(now: PagerStats | None, before: PagerStats | None) -> Counts | None:
    """All that was counted between two snapshots, both phases together."""
    if now is None or before is None:
        return None
    return added(_since(now.prefill, before.prefill), _since(now.decode, before.decode))


def layer_times(pager: Pager, plan: Plan) -> list[LayerTime]:
    """Of every layer that ran since times are taken, and last what follows them."""
    blocks: list[int | None] = [layer.block for pool in plan.pools for layer in pool.group.layers]
    found = [(block, *pager.layer_time(i)) for i, block in enumerate([*blocks, None])]
    times = [LayerTime(block, *(ns / 1e3 / graphs for ns in parts)) for block, graphs, parts in found if graphs]
    return sorted(times, key=lambda time: (time.block is None, time.block))
