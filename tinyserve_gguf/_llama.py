"""The only importer of llama_cpp: thin, typed wrappers over the C API of llama.cpp.

Nothing here knows of experts. A model can be given a proxy device and a buffer type as plain addresses; what they do is the shim's business.
Source of every call: `llama.h` of llama.cpp 0c1e570, as bound by llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import llama_cpp  # before numpy: the other order crashed in libstdc++ on one GPU machine
import llama_cpp._internals as internals
import llama_cpp._logger as stock_log
import numpy as np
import numpy.typing as npt
from jinja2 import TemplateError, TemplateSyntaxError
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from tinyserve_gguf._log import Log
from tinyserve_gguf.errors import CapacityError, EngineError, ModelFileError, OptionError

C: Any = llama_cpp.llama_cpp  # the C API
API: Any = C  # of llama.cpp, for `dryrun`
StockLlama: Any = llama_cpp.Llama  # llama-cpp-python's own classes
StockModel: Any = internals.LlamaModel
StockContext: Any = internals.LlamaContext
StockBatch: Any = internals.LlamaBatch
StockCandidates: Any = internals.LlamaTokenDataArray
StockTokenizer: Any = llama_cpp.LlamaTokenizer
StockState: Any = llama_cpp.LlamaState
stock_formats: Any = llama_cpp.llama_chat_format
stock_grammars: Any = llama_cpp.llama_grammar

ALL_LAYERS = 0x7FFFFFFF  # n_gpu_layers that means every layer
FLASH_ATTENTION = {"auto": C.LLAMA_FLASH_ATTN_TYPE_AUTO, "off": C.LLAMA_FLASH_ATTN_TYPE_DISABLED, "on": C.LLAMA_FLASH_ATTN_TYPE_ENABLED}
TEMPLATE_ERRORS = (TemplateError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)  # of a template that runs


def library() -> ctypes.CDLL:
    """The loaded libllama. Symbols of ggml resolve through it, because dlsym walks its dependencies; `libggml.so` opened by name would be a
    second library with a second registry."""
    lib: ctypes.CDLL = C._lib
    return lib


def bind(*prototypes: tuple[str, Any, list[Any]]) -> SimpleNamespace:
    """Functions of the loaded libraries by name, each given as (name, result, arguments). Nobody else sees these prototypes."""
    functions = SimpleNamespace()
    for name, result, arguments in prototypes:
        function = library()[name]  # a fresh object each time, unlike library().name
        function.restype, function.argtypes = result, arguments
        setattr(functions, name, function)
    return functions


# ---- log ------------------------------------------------------------------------------------------------------------------------------------


log_lines = Log()


def _on_log(level: int, text: bytes, _user: object) -> None:
    if stock_log.logger.level == logging.DEBUG:  # after a Llama(verbose=True), llama-cpp-python's default, which sends it to stderr
        stock_log.llama_log_callback(level, text, None)
    log_lines.add(level, text)


_log_callback = C.llama_log_callback(_on_log)
_started = False


def start() -> None:
    """Initialise llama.cpp's backends once per process and take over its log."""
    global _started
    if not _started:
        C.llama_log_set(_log_callback, ctypes.c_void_p(0))
        C.llama_backend_init()
        _started = True


@contextmanager
def explained() -> Iterator[Callable[[], str]]:
    """Gives a function that names the cause llama.cpp logged since the block began."""
    start()
    log_lines.recent.clear()
    yield log_lines.cause


_AbortCallback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


@contextmanager
def last_words(say: Callable[[str], None]) -> Iterator[None]:
    """While the block runs, `say` hears why ggml aborts the process, in place of ggml's message and backtrace on stderr. Files with damaged
    hyperparameters can do that deep in llama.cpp. When `say` returns, the process ends by SIGABRT."""
    start()
    set_callback = library()["ggml_set_abort_callback"]
    set_callback.restype, set_callback.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    callback = _AbortCallback(lambda message: say(message.decode("utf-8", "replace")))
    before = set_callback(ctypes.cast(callback, ctypes.c_void_p))
    try:
        yield
    finally:
        set_callback(before)


# ---- versions and devices -------------------------------------------------------------------------------------------------------------------


def ggml_version() -> str:
    """Version of the loaded ggml, such as "0.25.3"."""
    function = library().ggml_version
    function.restype = ctypes.c_char_p
    return str(function().decode())


def struct_sizes() -> tuple[int, int]:
    """sizeof llama_model_params and llama_context_params as ctypes sees them, for the ABI guard."""
    return ctypes.sizeof(C.llama_model_params), ctypes.sizeof(C.llama_context_params)


def device_handles() -> list[int]:
    """Addresses of every registered ggml_backend_dev_t, in registry order."""
    start()
    lib = library()
    lib.ggml_backend_dev_count.restype = ctypes.c_size_t
    lib.ggml_backend_dev_get.restype = ctypes.c_void_p
    lib.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    return [int(lib.ggml_backend_dev_get(i)) for i in range(lib.ggml_backend_dev_count())]


# ---- model ----------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Offload:
    """Where a model's layers and experts go: a device or several, and a buffer type for the tensors whose name matches the pattern."""

    device: int  # ggml_backend_dev_t
    pattern: str = ""  # regular expression over tensor names; empty = no override
    buffer_type: int = 0  # ggml_backend_buffer_type_t
    others: tuple[int, ...] = ()  # more devices
    split: tuple[float, ...] = ()  # tensor_split: the share of the layers that each gets; empty = llama.cpp goes by free memory


class _Override(ctypes.Structure):
    _fields_ = [("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p)]


def loader_params(params: Any, offload: Offload | None) -> list[object]:
    """Name devices and buffer types in a llama_model_params; `None` is the CPU alone. Returns what must live until the model is loaded."""
    handles = (offload.device, *offload.others) if offload else ()
    devices = (ctypes.c_void_p * (len(handles) + 1))(*handles, None)
    keep: list[object] = [devices]
    if offload and offload.split:
        split = (ctypes.c_float * C.llama_max_devices())(*offload.split)
        keep.append(split)
        params.tensor_split = split
    params.devices = ctypes.cast(devices, ctypes.c_void_p)
    if offload and offload.pattern:
        overrides = (_Override * 2)(_Override(offload.pattern.encode(), offload.buffer_type), _Override(None, None))
        keep.append(overrides)
        params.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
    return keep


class NativeModel:
    """A llama_model. `offload=None` keeps everything on the CPU; `extra_bufts=False` stops llama.cpp from repacking weights for the CPU."""

    def __init__(
        self, path: str, offload: Offload | None, *, extra_bufts: bool = True, mmap: bool = True, progress: Callable[[float], bool] | None = None
    ) -> None:
        with explained() as cause:
            params = C.llama_model_default_params()
            params.n_gpu_layers = ALL_LAYERS if offload else 0
            params.use_extra_bufts = extra_bufts
            params.load_mode = C.LLAMA_LOAD_MODE_MMAP if mmap else C.LLAMA_LOAD_MODE_NONE
            params.split_mode = C.LLAMA_SPLIT_MODE_LAYER
            keep = loader_params(params, offload)
            if progress is not None:
                callback = C.llama_progress_callback(lambda fraction, _user: bool(progress(fraction)))
                keep.append(callback)
                params.progress_callback = callback
            self._model: Any = C.llama_model_load_from_file(os.fsencode(path), params)
            if not self._model:
                raise ModelFileError(f"{path}: llama.cpp cannot load it: {cause()}")
        self._use(self._model)

    @classmethod
    def adopted(cls, model: Any) -> NativeModel:
        """Over a llama_model that somebody else loaded, and that `close` frees from now on."""
        self = cls.__new__(cls)
        self._use(model)
        return self

    def _use(self, model: Any) -> None:
        self._model = model
        self._adapters: list[tuple[Any, float]] = []  # freed with the model
        self._vocab = C.llama_model_get_vocab(model)
        self.n_vocab: int = C.llama_vocab_n_tokens(self._vocab)

    @property
    def handle(self) -> Any:
        return self._model

    def hold_adapter(self, adapter: Any, scale: float) -> None:
        """Contexts that are made from now on use this llama_adapter_lora too, which was opened for this model."""
        self._adapters.append((adapter, scale))

    def adapt(self, context: Any) -> None:
        """Give a llama_context the adapters."""
        if not self._adapters:
            return
        n, (handles, scales) = len(self._adapters), zip(*self._adapters, strict=True)
        if C.llama_set_adapters_lora(context, (C.llama_adapter_lora_p_ctypes * n)(*handles), n, (ctypes.c_float * n)(*scales)):
            raise EngineError("llama.cpp cannot use these adapters in this context")

    def close(self) -> None:
        if self._model:
            C.llama_model_free(self._model)
            self._model = None

    def metadata(self, key: str) -> str | None:
        size = C.llama_model_meta_val_str(self._model, key.encode(), None, 0)
        if size < 0:
            return None
        buffer = ctypes.create_string_buffer(size + 1)
        C.llama_model_meta_val_str(self._model, key.encode(), buffer, size + 1)
        return buffer.value.decode("utf-8", "replace")

    def is_generative(self) -> bool:
        """A decoder that writes text token by token; not an encoder, not a diffusion model."""
        model = self._model
        return bool(C.llama_model_has_decoder(model) and not C.llama_model_has_encoder(model) and not C.llama_model_is_diffusion(model))

    def require_generative(self, path: object, architecture: str) -> None:
        """ModelFileError unless `is_generative`: to decode with another model can abort the process."""
        if not self.is_generative():
            raise ModelFileError(f"{path}: {architecture} does not write text token by token (an encoder or a diffusion model)")

    # vocabulary

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        raw = text.encode()
        n = -C.llama_tokenize(self._vocab, raw, len(raw), None, 0, add_special, parse_special)
        if n <= 0:
            return []
        tokens = (C.llama_token * n)()
        C.llama_tokenize(self._vocab, raw, len(raw), tokens, n, add_special, parse_special)
        return list(tokens)

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of one token; a character may be split over several tokens. OptionError for a token that does not exist."""
        if not 0 <= token < self.n_vocab:
            raise OptionError(f"token {token} is outside the vocabulary of {self.n_vocab}")
        buffer = ctypes.create_string_buffer(64)
        n = C.llama_token_to_piece(self._vocab, token, buffer, 64, 0, special)
        if n < 0:
            buffer = ctypes.create_string_buffer(-n)
            n = C.llama_token_to_piece(self._vocab, token, buffer, -n, 0, special)
        return buffer.raw[:n]

    def is_end(self, token: int) -> bool:
        """True for every end-of-generation token (end of text, end of turn)."""
        return bool(C.llama_vocab_is_eog(self._vocab, token))

    def token_text(self, token: int) -> str:
        return str(C.llama_vocab_get_text(self._vocab, token).decode("utf-8", "replace")) if token >= 0 else ""

    def bos_text(self) -> str:
        return self.token_text(C.llama_vocab_bos(self._vocab))

    def eos_text(self) -> str:
        return self.token_text(C.llama_vocab_eos(self._vocab))


def chat_formatter(template: str, *, bos: str, eos: str) -> Callable[[list[dict[str, str]]], str]:
    """A function from messages to prompt text, which may raise any of TEMPLATE_ERRORS: the model's Jinja template, rendered by llama-cpp-python.
    ModelFileError for a template that is none."""
    try:
        formatter = Jinja2ChatFormatter(template=template, bos_token=bos, eos_token=eos)
    except TemplateSyntaxError as error:
        repair = "write a right one into the file with gguf-new-metadata --chat-template"
        raise ModelFileError(f"the chat template in the file is broken, line {error.lineno}: {error.message}; {repair}") from error
    return lambda messages: str(formatter(messages=messages).prompt)


# ---- context --------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ContextOptions:
    n_ctx: int  # tokens
    n_batch: int
    n_ubatch: int
    n_threads: int
    flash_attention: str = "auto"
    type_k: int = C.GGML_TYPE_F16  # of the KV cache
    type_v: int = C.GGML_TYPE_F16


class NativeContext:
    """A llama_context with one sequence."""

    def __init__(self, model: NativeModel, options: ContextOptions, on_node: Callable[[int, bool], bool] | None = None) -> None:
        """`on_node` hears of every node: (address of the ggml_tensor, True) asks whether it is wanted, (address, False) says that it is computed."""
        if options.flash_attention not in FLASH_ATTENTION:
            raise OptionError(f"flash attention is one of {', '.join(FLASH_ATTENTION)}, not {options.flash_attention!r}")
        params = C.llama_context_default_params()
        params.n_ctx = -(-options.n_ctx // 256) * 256  # it rounds up by itself, but only after it took the least of this for the batch
        params.n_batch = options.n_batch
        params.n_ubatch = options.n_ubatch
        params.n_outputs_max = 1  # only the last token's logits are ever wanted: gpt-oss would reserve 411 MB for those of 512
        params.n_threads = params.n_threads_batch = options.n_threads
        params.flash_attn_type = FLASH_ATTENTION[options.flash_attention]
        params.type_k, params.type_v = options.type_k, options.type_v
        params.no_perf = True
        if on_node is not None:
            params.cb_eval = self._on_node = C.ggml_backend_sched_eval_callback(lambda tensor, ask, _user: bool(on_node(tensor, ask)))
        self.model = model
        with explained() as cause:
            self._ctx: Any = C.llama_init_from_model(model.handle, params)
            if not self._ctx:
                raise CapacityError(f"llama.cpp cannot make a context of {options.n_ctx} tokens (try a smaller -c or -b): {cause()}")
        model.adapt(self._ctx)
        self._use(self._ctx, options.n_batch, owns=True)

    @classmethod
    def borrowed(cls, model: NativeModel, context: Any) -> NativeContext:
        """Over a llama_context that somebody else made and frees; `close` only lets go of it."""
        self = cls.__new__(cls)
        self.model = model
        self._use(context, C.llama_n_batch(context), owns=False)
        return self

    def _use(self, context: Any, n_batch: int, *, owns: bool) -> None:
        self._ctx, self._owns = context, owns
        self._batch = C.llama_batch_init(n_batch, 0, 1)
        self.n_batch: int = C.llama_n_batch(context)
        self.n_ctx: int = C.llama_n_ctx(context)

    def close(self) -> None:
        if self._ctx:
            C.llama_batch_free(self._batch)
            if self._owns:
                C.llama_free(self._ctx)
            self._ctx = None

    def decode(self, tokens: Sequence[int], position: int, *, want_logits: bool) -> None:
        """Compute up to `n_batch` tokens from `position` on. Logits of the last one are kept if wanted."""
        context, batch = self.handle, self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = position + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = False
        batch.logits[len(tokens) - 1] = want_logits
        with explained() as cause:
            status = C.llama_decode(context, batch)
            if status != 0:
                raise EngineError(f"llama_decode of {len(tokens)} tokens at position {position} failed with {status}: {cause()}")

    def synchronize(self) -> None:
        C.llama_synchronize(self.handle)

    def logits(self) -> npt.NDArray[np.float32]:
        """Logits of the last decoded token, [n_vocab], a copy."""
        pointer = C.llama_get_logits_ith(self.handle, -1)
        if not pointer:
            raise OptionError("there are no logits: read tokens first")
        return np.array(np.ctypeslib.as_array(pointer, (self.model.n_vocab,)), dtype=np.float32)

    def keep(self, n: int) -> bool:
        """Forget everything from position `n` on. False if this memory cannot go back there, and then nothing changed: recurrent states, or a
        sliding-window cache that no longer holds all that the token at `n` looks back at."""
        held = C.llama_memory_seq_pos_max(self._memory, 0)
        window = C.llama_model_n_swa(self.model.handle)  # 0 = none; then every position is held
        if 0 < n <= held and C.llama_memory_seq_pos_min(self._memory, 0) > max(0, n - window):
            return False
        return bool(C.llama_memory_seq_rm(self._memory, 0, n, -1))

    def clear(self) -> None:
        C.llama_memory_clear(self._memory, True)

    def can_shift(self) -> bool:
        """Whether `move` is possible: it aborts the process where it is not."""
        return bool(C.llama_memory_can_shift(self._memory))

    def remove(self, start: int, end: int) -> None:
        """Forget the positions from `start` to before `end`, all before the last one. EngineError where this memory has no such thing."""
        if not C.llama_memory_seq_rm(self._memory, 0, start, end):
            raise EngineError(f"llama.cpp cannot take positions {start} to {end} out of the cache of this model")

    def move(self, start: int, by: int) -> None:
        """Add `by` to the positions from `start` on. The next decode rotates the keys accordingly."""
        C.llama_memory_seq_add(self._memory, 0, start, -1, by)

    @property
    def handle(self) -> Any:
        """OptionError once it is closed: llama.cpp would read freed memory."""
        if not self._ctx:
            raise OptionError("the session is closed")
        return self._ctx

    @property
    def _memory(self) -> Any:
        return C.llama_get_memory(self.handle)
