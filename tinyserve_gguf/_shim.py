"""The only owner of the native library: loads the shim, checks its ABI, and wraps its C API (`shim/tsg.h`) in Python.

The seam in one paragraph. `tsg.h` is installed next to the library and read by cffi in ABI mode, so there is no second declaration to drift. Python
finds ggml devices and hands them over as plain addresses; a `Pager` makes a proxy device around one of them and an expert buffer type, which
llama.cpp's loader then gets as plain addresses again. Every failing call turns into one exception by `_check`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cffi

from tinyserve_gguf import _llama
from tinyserve_gguf.choices import ENGINES, MISS_MODES, POLICIES
from tinyserve_gguf.counters import Counts as Counts
from tinyserve_gguf.counters import ExpertArrays as ExpertArrays
from tinyserve_gguf.counters import ExpertState as ExpertState
from tinyserve_gguf.counters import Notes as Notes
from tinyserve_gguf.counters import PagerStats as PagerStats
from tinyserve_gguf.counters import ResizeCounts as ResizeCounts
from tinyserve_gguf.errors import AbiMismatchError, CapacityError, EngineError, ModelFileError, OptionError, TinyserveError

HOST_RUNGS = ("none", "mapped", "pinned", "pageable")  # in the order of enum tsg_host_rung
_REPAIR = "run: pip install --force-reinstall --no-cache-dir tinyserve-gguf"


def _declarations(header: Path) -> str:
    text = header.read_text(encoding="utf-8")
    return text.split("// CDEF\n", 1)[1].split("// END\n", 1)[0]


def _open(folder: Path) -> tuple[cffi.FFI, Any]:
    """Load the shim from `folder` and check that it belongs to the loaded llama.cpp."""
    library, header = folder / "libtsg.so", folder / "tsg.h"
    for path in (library, header):
        if not path.exists():
            raise AbiMismatchError(f"{path.name} is missing from {folder}: the native library is not installed; {_REPAIR}")
    ffi = cffi.FFI()
    ffi.cdef(_declarations(header))
    _llama.start()
    try:
        lib = ffi.dlopen(str(library))
    except OSError as error:
        raise AbiMismatchError(f"the native library does not load ({error}); {_REPAIR}") from error
    address = ctypes.cast(_llama.library().ggml_version, ctypes.c_void_p).value
    if lib.tsg_abi_check(ffi.cast("void *", address), *_llama.struct_sizes()) != lib.TSG_OK:
        reason = ffi.string(lib.tsg_last_error()).decode()
        repair = "pip install llama-cpp-python==0.3.36 and then pip install --force-reinstall --no-cache-dir tinyserve-gguf"
        raise AbiMismatchError(f"{reason}; run: {repair}")
    return ffi, lib


_ffi, _lib = _open(Path(__file__).parent)
BUILT_FOR = str(_ffi.string(_lib.tsg_ggml_version()).decode())  # the version of ggml

_ERRORS: dict[int, type[TinyserveError]] = {
    _lib.TSG_E_ARGUMENT: OptionError,
    _lib.TSG_E_MEMORY: CapacityError,
    _lib.TSG_E_STATE: EngineError,
    _lib.TSG_E_ABI: AbiMismatchError,
    _lib.TSG_E_FILE: ModelFileError,
    _lib.TSG_E_STOPPED: EngineError,
}


def last_error() -> str:
    """What the shim last complained about on this thread."""
    return str(_ffi.string(_lib.tsg_last_error()).decode("utf-8", "replace"))


def _check(status: int) -> None:
    if status != _lib.TSG_OK:
        raise _ERRORS[status](last_error())


# ---- devices --------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Device:
    """A ggml device. Memory in bytes."""

    handle: int
    name: str
    description: str
    memory_free: int
    memory_total: int
    is_cpu: bool

    @property
    def members(self) -> tuple[Device, ...]:
        """The devices that it stands for: itself; see `devices.DeviceGroup`."""
        return (self,)

    def offload(self, split: tuple[float, ...] = ()) -> _llama.Offload | None:
        """For llama.cpp alone, everything on this device. None on the CPU, where llama.cpp needs no device."""
        return None if self.is_cpu else _llama.Offload(self.handle, split=split)

    def link_rate(self, size: int = 256 << 20, repeats: int = 8) -> float:
        """Measured host-to-device bandwidth, bytes per second; 0.0 if there is no memory to measure with."""
        return float(_lib.tsg_device_link_rate(_ffi.cast("void *", self.handle), size, repeats))

    def multiplies(self, type_id: int, ne0: int, ne1: int, n_expert: int, n_used: int) -> bool:
        """Whether the device has a MUL_MAT_ID kernel for expert weights of this type and shape."""
        return bool(_lib.tsg_device_supports(_ffi.cast("void *", self.handle), type_id, ne0, ne1, n_expert, n_used))


def memory_free(device: Device) -> int:
    """Bytes of the device that are free now. Of the CPU ggml says all memory; here it is what the machine can give without swapping."""
    if device.is_cpu:
        found = [line.split()[1] for line in Path("/proc/meminfo").read_text("ascii").splitlines() if line.startswith("MemAvailable:")]
        return int(found[0]) << 10 if found else device.memory_total
    return next(other.memory_free for other in devices() if other.handle == device.handle)


def devices() -> list[Device]:
    """Every device that ggml knows here, in its order."""
    found = []
    for handle in _llama.device_handles():
        out = _ffi.new("struct tsg_device *")
        _lib.tsg_device_get(_ffi.cast("void *", handle), out)
        found.append(
            Device(
                handle=handle,
                name=_ffi.string(out.name).decode(),
                description=_ffi.string(out.description).decode(),
                memory_free=out.memory_free,
                memory_total=out.memory_total,
                is_cpu=out.is_cpu,
            )
        )
    return found


def cpu_device() -> Device:
    """The CPU as a ggml device."""
    return next(device for device in devices() if device.is_cpu)


# ---- counters -------------------------------------------------------------------------------------------------------------------------------


def _numbers(struct: Any, kind: type[Any]) -> list[int]:
    """The members of a C structure that the fields of the dataclass `kind` name, in their order."""
    return [int(getattr(struct, name)) for name in kind.__dataclass_fields__]


def _state(e: Any) -> ExpertState:
    return ExpertState(int(e.slot), bool(e.pinned), int(e.hits), int(e.misses), int(e.uses), int(e.last_use))


# ---- pager ----------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """One weight of an expert layer; see struct tsg_part. The tables are float32 bytes, [n_expert][ne1] and [n_expert]."""

    weight: str
    type_id: int
    ne0: int
    ne1: int
    shard: int  # index of the file it lies in
    offset: int  # of its first byte there
    bias: str | None = None
    bias_data: bytes | None = None
    scale: str | None = None
    scale_data: bytes | None = None


@dataclass(frozen=True, slots=True)
class Miss:
    """What to do with misses of decode; see struct tsg_miss. Rates in bytes per second."""

    mode: str = "fetch"  # one of MISS_MODES
    every: int = 0  # of those that the CPU computes at most one in so many enters the pool; 0 = none
    link_rate: float = 0.0  # for "split"
    cpu_rate: float = 0.0  # likewise; 0 = measured over the first layers


class Pager:
    """Expert paging for one model on one device. Call order: add_file, add_pool, add_layer, commit, load the model, ready."""

    def __init__(self, device: Device, policy: str, engine: str = "auto") -> None:
        out = _ffi.new("struct tsg_pager **")
        _check(_lib.tsg_pager_new(_ffi.cast("void *", device.handle), POLICIES.index(policy), ENGINES.index(engine), out))
        self._handle: Any = out[0]
        self._device = device.name

    def close(self) -> None:
        """Let go of the pager. Buffers and streams that llama.cpp still holds keep the rest alive."""
        if self._handle:
            _lib.tsg_pager_free(self._handle)
            self._handle = None

    @property
    def _pager(self) -> Any:
        """OptionError once it is closed: handles of experts may outlive their model."""
        if not self._handle:
            raise OptionError("the model is closed")
        return self._handle

    def join(self, other: Pager) -> None:
        """Be one of the pagers of a model on several devices, before `commit`. `other`: the first one, or one that has joined it."""
        _check(_lib.tsg_pager_join(self._pager, other._pager))

    def add_file(self, path: Path) -> None:
        """The next shard. ModelFileError if it cannot be opened."""
        _check(_lib.tsg_pager_add_file(self._pager, os.fsencode(path)))

    def add_pool(self, n_slots: int, n_stages: int = 1) -> int:
        index = _ffi.new("int32_t *")
        _check(_lib.tsg_pager_add_pool(self._pager, n_slots, n_stages, index))
        return int(index[0])

    def add_layer(self, pool: int, n_expert: int, n_used: int, parts: Sequence[Part]) -> int:
        keep: list[Any] = []

        def text(value: str | None) -> Any:
            keep.append(_ffi.NULL if value is None else _ffi.new("char[]", value.encode()))
            return keep[-1]

        def table(value: bytes | None) -> Any:
            keep.append(_ffi.NULL if value is None else _ffi.from_buffer("float[]", value))
            return keep[-1]

        array = _ffi.new("struct tsg_part[]", len(parts))
        for i, part in enumerate(parts):
            array[i].weight, array[i].bias, array[i].scale = text(part.weight), text(part.bias), text(part.scale)
            array[i].bias_data, array[i].scale_data = table(part.bias_data), table(part.scale_data)
            array[i].type, array[i].ne0, array[i].ne1 = part.type_id, part.ne0, part.ne1
            array[i].shard, array[i].offset = part.shard, part.offset
        index = _ffi.new("int32_t *")
        _check(_lib.tsg_pager_add_layer(self._pager, pool, n_expert, n_used, array, len(parts), index))
        return int(index[0])

    def commit(self, host_limit: int = 0) -> None:
        """Allocate the slots on the device. CapacityError if they do not fit. `host_limit`: bytes of experts to page-lock at most; 0: no limit."""
        _check(_lib.tsg_pager_set_host_limit(self._pager, host_limit))
        _check(_lib.tsg_pager_commit(self._pager))

    def ready(self, progress: Callable[[float], bool] | None = None) -> None:
        """Check that the loader came past every byte of every expert, open the host pool and fill the pools that hold everything.

        `progress` hears 0..1 and returns False to stop: then EngineError. ModelFileError if the file is no longer what its header said.
        """
        raised: list[BaseException] = []
        callback = _ffi.NULL
        if progress is not None:

            def heard(fraction: float, _data: object) -> bool:
                return bool(progress(fraction))

            def failed(_kind: object, error: BaseException, _trace: object) -> None:
                raised.append(error)  # it cannot pass through C; the callback has returned False

            callback = _ffi.callback("bool(float, void *)", heard, error=False, onerror=failed)
        status = _lib.tsg_pager_ready(self._pager, callback, _ffi.NULL)
        if raised:
            raise raised[0]
        _check(status)

    def use_cpu(self, n_threads: int) -> None:
        """Let the CPU compute misses, with so many threads. Before `commit`."""
        _check(_lib.tsg_pager_use_cpu(self._pager, _ffi.cast("void *", cpu_device().handle), n_threads))

    def set_miss(self, miss: Miss) -> None:
        """What to do with misses from now on. EngineError for the CPU's part without `use_cpu`, or before `ready`."""
        rates = {"link_rate": miss.link_rate, "cpu_rate": miss.cpu_rate}
        options = {"mode": MISS_MODES.index(miss.mode), "every": miss.every} | rates
        _check(_lib.tsg_pager_set_miss(self._pager, _ffi.new("struct tsg_miss *", options)))

    def cpu_seconds(self, n_threads: int) -> float:
        """Seconds that the CPU needs for one expert out of the host pool, measured now, which takes some milliseconds; 0 if it cannot be measured."""
        return float(_lib.tsg_pager_cpu_seconds(self._pager, _ffi.cast("void *", cpu_device().handle), n_threads))

    @property
    def miss(self) -> str:
        """What happens to misses of decode, and why."""
        return str(_ffi.string(_lib.tsg_pager_miss(self._pager)).decode("utf-8", "replace"))

    @property
    def host(self) -> str:
        """How the device reads experts that are in no slot, and why so. Known after `ready`."""
        return str(_ffi.string(_lib.tsg_pager_host(self._pager)).decode("utf-8", "replace"))

    @property
    def engine(self) -> str:
        """Which engine runs, and why. Known after `ready`."""
        return str(_ffi.string(_lib.tsg_pager_engine(self._pager)).decode())

    def set_link(self, bytes_per_second: float) -> None:
        """Slow the link down, for what-if runs; 0 is the real one. OptionError unless the device engine runs."""
        _check(_lib.tsg_pager_set_link(self._pager, bytes_per_second))

    def offload(self, pattern: str) -> _llama.Offload:
        """What llama.cpp's loader needs: the proxy device, and the expert buffer type for tensors that match `pattern`."""
        return _llama.Offload(
            device=int(_ffi.cast("uintptr_t", _lib.tsg_pager_device(self._pager))),
            pattern=pattern,
            buffer_type=int(_ffi.cast("uintptr_t", _lib.tsg_pager_buffer_type(self._pager))),
        )

    def stats(self) -> PagerStats:
        out = _ffi.new("struct tsg_stats *")
        _lib.tsg_pager_stats(self._pager, out)
        return PagerStats(
            prefill=Counts(*_numbers(out.phase[_lib.TSG_PREFILL], Counts)),
            decode=Counts(*_numbers(out.phase[_lib.TSG_DECODE], Counts)),
            host_bytes=out.host_bytes,
            host_tensors=out.host_tensors,
            host_rung=HOST_RUNGS[out.host_rung],
            host=self.host,
            pool_bytes=out.pool_bytes,
            stage_bytes=out.stage_bytes,
            slots_total=out.slots_total,
            slots_used=out.slots_used,
            all_resident=out.all_resident,
            device_engine=out.device_engine,
            miss=self.miss,
            cpu_cannot=out.cpu_cannot,
            notes=Notes(*_numbers(out.notes, Notes)),
        )

    def reset_stats(self) -> None:
        _lib.tsg_pager_reset_stats(self._pager)

    def set_profile(self, on: bool) -> None:
        """Take the time of every layer of every decode graph, from zero; or no longer."""
        _check(_lib.tsg_pager_set_profile(self._pager, on))

    def layer_time(self, layer: int) -> tuple[int, list[int]]:
        """How many graphs, and nanoseconds of attention, lookup, copy and experts in all of them. One behind the last layer: the output."""
        out = _ffi.new("struct tsg_layer_time *")
        _check(_lib.tsg_pager_layer_time(self._pager, layer, out))
        return int(out.graphs), [int(ns) for ns in out.ns]

    def set_policy(self, policy: str) -> None:
        _check(_lib.tsg_pager_set_policy(self._pager, POLICIES.index(policy)))

    def resize(self, n_slots: Sequence[int]) -> ResizeCounts:
        """Another number of slots for every pool, in the order of `add_pool`. CapacityError, OptionError or EngineError: nothing changed."""
        out = _ffi.new("struct tsg_resized *")
        _check(_lib.tsg_pager_resize(self._pager, list(n_slots), out))
        return ResizeCounts(out.kept, out.evicted, out.loaded, out.beside, out.bytes_link)

    def expert_arrays(self, n_experts: int) -> ExpertArrays:
        """Every expert at one moment; `n_experts` of all layers together."""
        out = _ffi.new("struct tsg_map *")
        resident = bytearray(n_experts)
        hits, misses, last_use = (bytearray(8 * n_experts) for _ in range(3))
        arrays = [_ffi.from_buffer("uint8_t[]", resident), *(_ffi.from_buffer("uint64_t[]", array) for array in (hits, misses, last_use))]
        _check(_lib.tsg_pager_map(self._pager, out, *arrays))
        prefill, decode = (Counts(*_numbers(out.phase[phase], Counts)) for phase in (_lib.TSG_PREFILL, _lib.TSG_DECODE))
        return ExpertArrays(out.tick, out.slots_total, out.slots_used, out.all_resident, prefill, decode, resident, hits, misses, last_use)

    def check_integrity(self) -> None:
        """EngineError if slot maps or counters contradict each other."""
        _check(_lib.tsg_pager_check_integrity(self._pager))

    def parts(self) -> list[tuple[str, Pager]]:
        """The pagers of the devices of a model, by name; see `group.PagerGroup`."""
        return [(self._device, self)]

    # one expert

    def device_of(self, layer: int) -> str:  # noqa: ARG002 - one device holds them all
        """The device that holds the layer's slots."""
        return self._device

    def expert(self, layer: int, expert: int) -> ExpertState:
        out = _ffi.new("struct tsg_expert *")
        _check(_lib.tsg_expert_get(self._pager, layer, expert, out))
        return _state(out)

    def layer(self, layer: int, n_expert: int) -> list[ExpertState]:
        out = _ffi.new("struct tsg_expert[]", n_expert)
        _check(_lib.tsg_expert_get_layer(self._pager, layer, out))
        return [_state(e) for e in out]

    def expert_host(self, layer: int, expert: int, part: int) -> memoryview:
        """The expert's raw bytes in the host pool: no copy, read-only, valid while the model is open."""
        data, size = _ffi.new("const void **"), _ffi.new("size_t *")
        _check(_lib.tsg_expert_host(self._pager, layer, expert, part, data, size))
        return memoryview(_ffi.buffer(data[0], size[0])).toreadonly()

    def expert_slot_bytes(self, layer: int, expert: int, part: int, size: int) -> bytes:
        """The expert's bytes as they lie in its slot on the device, copied back."""
        out = _ffi.new("uint8_t[]", size)
        _check(_lib.tsg_expert_read_slot(self._pager, layer, expert, part, out, size))
        return bytes(_ffi.buffer(out))

    def pin(self, layer: int, expert: int, on: bool) -> None:
        _check(_lib.tsg_expert_pin(self._pager, layer, expert, on))

    def prefetch(self, layer: int, expert: int) -> None:
        _check(_lib.tsg_expert_prefetch(self._pager, layer, expert))

    def preload(self, layer: int, expert: int) -> bool:
        """Load it into a free slot. False if it has a slot, or none is free."""
        loaded = _ffi.new("bool *")
        _check(_lib.tsg_expert_preload(self._pager, layer, expert, loaded))
        return bool(loaded[0])

    def evict(self, layer: int, expert: int) -> None:
        _check(_lib.tsg_expert_evict(self._pager, layer, expert))
