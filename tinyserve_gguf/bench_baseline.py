"""llama.cpp alone on the same file: everything on the device, or the experts of the first K blocks on the CPU, as its own `--n-cpu-moe K` does."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace

from tinyserve_gguf import _llama
from tinyserve_gguf._llama import NativeModel
from tinyserve_gguf._shim import Device
from tinyserve_gguf.facts import ModelFacts
from tinyserve_gguf.miss_guard import all_on_cpu
from tinyserve_gguf.needs import context_bytes, weight_bytes

_EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"  # LLM_FFN_EXPS_REGEX of llama.cpp; biases go along with their weights


def cpu_pattern(facts: ModelFacts, n_cpu_moe: int) -> str:
    """Regular expression over the names of the tensors that go to the CPU; empty for none."""
    if n_cpu_moe == 0:
        return ""
    if n_cpu_moe >= all_on_cpu(facts):
        return _EXPERTS
    return rf"blk\.({'|'.join(map(str, range(n_cpu_moe)))})" + _EXPERTS


def label(facts: ModelFacts, n_cpu_moe: int, device: Device) -> str:
    """What such a row is called."""
    if n_cpu_moe == 0:
        return f"llama.cpp, everything on {device.name}"
    if n_cpu_moe >= all_on_cpu(facts):
        return "llama.cpp, all experts on the CPU"
    return f"llama.cpp --n-cpu-moe {n_cpu_moe}"


def full_bytes(facts: ModelFacts, n_ctx: int, n_ubatch: int) -> int:
    """An estimate of the device memory that llama.cpp needs to hold everything there."""
    return weight_bytes(facts) + facts.expert_bytes + context_bytes(facts, n_ctx, n_ubatch)


def open_stock(facts: ModelFacts, device: Device, n_cpu_moe: int, progress: Callable[[float], bool], *, split: tuple[float, ...] = ()) -> NativeModel:
    """The model by llama.cpp alone; on several devices with its own split, or the one given. Weights are not repacked, as in a paged
    model. Experts on the CPU are not mapped but read into page-locked memory: llama.cpp itself recommends it for speed."""
    offload = device.offload(split)
    if offload is None:
        return NativeModel(str(facts.path), None, extra_bufts=False, progress=progress)
    pattern = cpu_pattern(facts, n_cpu_moe)
    offload = replace(offload, pattern=pattern, buffer_type=_cpu_buffer_type() if pattern else 0)
    return NativeModel(str(facts.path), offload, extra_bufts=False, mmap=not pattern, progress=progress)


def _cpu_buffer_type() -> int:
    function = _llama.library().ggml_backend_cpu_buffer_type
    function.restype = ctypes.c_void_p
    return int(function())
