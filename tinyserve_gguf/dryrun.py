"""Asks llama.cpp what a model would take, without memory for it: a load that allocates nothing, and contexts of that.

llama.cpp has no C function that says so, but it logs every buffer: "CUDA0 compute buffer size = 398.50 MiB".
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

from tinyserve_gguf import _llama, _ops
from tinyserve_gguf._llama import ALL_LAYERS, C, ContextOptions, NativeContext, NativeModel, Offload, explained, loader_params
from tinyserve_gguf._shim import Device, Pager
from tinyserve_gguf.errors import ModelFileError
from tinyserve_gguf.facts import ModelFacts
from tinyserve_gguf.needs import MIB, Needs, Setting, device_tensors

EXPERT_PATTERN = r"\.ffn_(gate|up|down|gate_up)_(ch)?exps\.weight"  # everything else, biases and scales too, stays where llama.cpp puts it

_BUFFER = re.compile(r": +(\S+) +(model|KV|RS|compute|output) buffer size = +([\d.]+) MiB")
_CACHE = re.compile(r"llama_kv_cache\w*: size = +([\d.]+) MiB \(")


@dataclass(frozen=True, slots=True)
class Buffer:
    """One that llama.cpp logged. `n_bytes` is rounded to a hundredth of a MiB."""

    place: str  # name of its buffer type: "CUDA0", "CPU", "CUDA_Host", "CPU_Mapped"
    kind: str  # "model", "KV", "RS", "compute" or "output"
    n_bytes: int


def buffers(lines: list[str]) -> list[Buffer]:
    """What these lines of llama.cpp's log say of buffers."""
    return [Buffer(match[1], match[2], round(float(match[3]) * MIB)) for line in lines if (match := _BUFFER.search(line))]


@contextmanager
def listening() -> Iterator[list[str]]:
    """Gives a list that fills with the lines that llama.cpp logs on this thread, instead of the log."""
    _llama.start()
    thread, lines = threading.get_ident(), list[str]()
    outer = _llama.log_lines.listeners.get(thread)
    _llama.log_lines.listeners[thread] = lines
    try:
        yield lines
    finally:
        if outer is None:
            del _llama.log_lines.listeners[thread]
        else:
            _llama.log_lines.listeners[thread] = outer


def _load_nothing(facts: ModelFacts, offload: Offload | None) -> NativeModel:
    """Without memory for weights. The vocabulary, which is most of the time that it would take, is left out too: a second with 200,000 tokens."""
    vocabulary = next((tensor.ne(1) for tensor in facts.tensors if tensor.name == "token_embd.weight"), 0)
    overrides = (C.llama_model_kv_override * 3)()  # the last one, without a key, is the end
    overrides[0].tag, overrides[0].key = C.LLAMA_KV_OVERRIDE_TYPE_STR, b"tokenizer.ggml.model"
    overrides[0].value.val_str = b"none"
    overrides[1].tag, overrides[1].key = C.LLAMA_KV_OVERRIDE_TYPE_INT, f"{facts.architecture}.vocab_size".encode()
    overrides[1].value.val_i64 = vocabulary
    with listening(), explained() as cause:
        params = C.llama_model_default_params()
        params.n_gpu_layers = ALL_LAYERS if offload else 0
        params.split_mode = C.LLAMA_SPLIT_MODE_LAYER
        params.no_alloc, params.load_mode, params.kv_overrides = True, C.LLAMA_LOAD_MODE_NONE, overrides
        keep = loader_params(params, offload)
        model = C.llama_model_load_from_file(os.fsencode(facts.path), params)
        del keep
        if not model:
            raise ModelFileError(f"{facts.path}: llama.cpp cannot load it: {cause()}")
    return NativeModel.adopted(model)


class DryRun:
    """A model without memory. Use it as a context manager."""

    def __init__(self, facts: ModelFacts, device: Device) -> None:
        """ModelFileError if llama.cpp does not load the model, or if it does not write text."""
        self._facts, self._device = facts, device
        self._pager: Pager | None = None
        self._model: NativeModel | None = None
        self._known: dict[Setting, Needs] = {}
        self._weights = _ops.allocated(device.handle, ((tensor.type_id, tensor.shape) for tensor in device_tensors(facts)))
        offload: Offload | None = None if device.is_cpu else Offload(device.handle)
        try:
            if facts.is_moe:
                self._pager = Pager(device, "lfru")  # without pools: its device and buffer type are what the graph is built for
                self._pager.commit()
                offload = self._pager.offload(EXPERT_PATTERN)
            self._model = _load_nothing(facts, offload)
            self._model.require_generative(facts.path, facts.architecture)
        except BaseException:
            self.close()
            raise

    def needs(self, setting: Setting) -> Needs:
        """CapacityError if llama.cpp makes no such context."""
        if setting not in self._known:
            self._known[setting] = self._ask(setting)
        return self._known[setting]

    def _ask(self, setting: Setting) -> Needs:
        assert self._model
        options = ContextOptions(
            n_ctx=setting.n_ctx,
            n_batch=setting.n_ubatch,
            n_ubatch=setting.n_ubatch,
            n_threads=1,
            flash_attention=setting.kv.flash,
            type_k=setting.kv.keys.type_id,
            type_v=setting.kv.values.type_id,
        )
        with listening() as heard:
            NativeContext(self._model, options).close()
        found = buffers(heard)
        computes = [buffer for buffer in found if buffer.kind == "compute"]
        largest = max(computes, key=lambda buffer: buffer.n_bytes, default=None)
        on_device = next((buffer for buffer in computes if buffer.place == self._device.name), largest)  # a buffer type may have another name
        caches = sum(round(float(match[1]) * MIB) for line in heard if (match := _CACHE.search(line)))
        states = sum(buffer.n_bytes for buffer in found if buffer.kind == "RS")
        # Where the CPU plays the device both have one kind of memory and share a buffer, which a dry run names twice
        others = 0 if self._device.is_cpu else sum(buffer.n_bytes for buffer in computes if buffer is not on_device)
        return Needs(
            weights=self._weights,
            kv=caches + states,
            compute=on_device.n_bytes if on_device else 0,
            host_weights=self._facts.input_bytes,
            host_compute=others + sum(buffer.n_bytes for buffer in found if buffer.kind == "output"),
            is_exact=True,
        ).times(setting.n_contexts)

    def close(self) -> None:
        if self._model:
            self._model.close()
            self._model = None
        if self._pager:
            self._pager.close()
            self._pager = None

    def __enter__(self) -> DryRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
