"""What the shim counts, as plain values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Counts:
    """Counters of one phase; see struct tsg_counts. `bytes_*` in bytes."""

    lookups: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    bytes_link: int = 0
    bytes_device: int = 0
    streamed: int = 0
    graphs: int = 0
    cpu_rows: int = 0
    admitted: int = 0


@dataclass(frozen=True, slots=True)
class Notes:
    """How the engine ran; see struct tsg_notes."""

    captures: int
    replays: int
    capture_failed: int
    edges_moved: int
    overlapped: int
    host_ns: int
    cpu_ns: int
    wait_cpu_ns: int
    wait_device_ns: int


@dataclass(frozen=True, slots=True)
class PagerStats:
    """Everything the pager counts; see struct tsg_stats."""

    prefill: Counts
    decode: Counts
    host_bytes: int
    host_tensors: int
    host_rung: str  # one of HOST_RUNGS: how the device reads experts that are in no slot
    host: str  # the same for people, and why
    pool_bytes: int
    stage_bytes: int
    slots_total: int
    slots_used: int
    all_resident: bool
    device_engine: bool
    miss: str  # what happens to misses of decode, and why
    cpu_cannot: bool  # the CPU cannot compute those of this model
    notes: Notes


@dataclass(frozen=True, slots=True)
class ExpertState:
    """Where an expert is and how it was used. `slot` is -1 when it lies in host memory only."""

    slot: int
    pinned: bool
    hits: int
    misses: int
    uses: int  # of both, those of decode
    last_use: int


@dataclass(frozen=True, slots=True)
class ExpertArrays:
    """Every expert of every layer at one moment, layers in the order that the pager knows them; see struct tsg_map.
    `resident` has one byte an expert, the others are 64-bit unsigned."""

    tick: int  # graphs that looked experts up so far
    slots_total: int
    slots_used: int
    all_resident: bool
    prefill: Counts
    decode: Counts
    resident: bytearray
    hits: bytearray
    misses: bytearray
    last_use: bytearray  # tick of the last use, 0 = never


@dataclass(frozen=True, slots=True)
class ResizeCounts:
    """What a change of the pools' size did; see struct tsg_resized."""

    kept: int  # experts that were resident and are
    evicted: int  # that were, and are not
    loaded: int  # that came over the link
    beside: bool  # the new pools were made beside the old ones; else there was no room, and all that stayed was loaded again
    bytes_link: int
