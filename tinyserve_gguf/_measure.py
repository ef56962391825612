"""What the shim measures of a device, without a model."""

from __future__ import annotations

from tinyserve_gguf._shim import Device, _ffi, _lib


class Measure:
    """What `doctor` measures on a device. Rates in bytes per second; 0 where memory is short or the device cannot."""

    def __init__(self, device: Device, n_threads: int) -> None:
        self._device, self._n_threads = _ffi.cast("void *", device.handle), n_threads

    def copy(self, *, to_device: bool, pinned: bool, size: int, repeats: int) -> float:
        """Between host and device; 0 also for `pinned` where the device has no page-locked memory."""
        return float(_lib.tsg_measure_copy(self._device, to_device, pinned, size, repeats))

    def device_memory(self, size: int, repeats: int) -> float:
        """Bytes read and written by copies on the device."""
        return float(_lib.tsg_measure_device_memory(self._device, size, self._n_threads, repeats))

    def host_memory(self, size: int, repeats: int) -> float:
        """Bytes read by all threads."""
        return float(_lib.tsg_measure_host_memory(size, self._n_threads, repeats))

    def experts(self, *, type_id: int, ne0: int, ne1: int, n_expert: int, n_used: int, n_tokens: int, repeats: int) -> float:
        """Seconds of one MUL_MAT_ID with such experts, whose weights are zeros."""
        load = {"type": type_id, "ne0": ne0, "ne1": ne1, "n_expert": n_expert, "n_used": n_used, "n_tokens": n_tokens}
        return float(_lib.tsg_measure_experts(self._device, _ffi.new("struct tsg_experts_load *", load), self._n_threads, repeats))

    def lockable(self, most: int, piece: int) -> int:
        """Bytes that could be page-locked, in pieces, `most` at most; by mlock where the device has no such memory."""
        return int(_lib.tsg_measure_lockable(self._device, most, piece))
