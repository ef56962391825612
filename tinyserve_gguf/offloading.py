"""`offload()`: pages the models that other code opens through llama_cpp.Llama, such as LangChain, LlamaIndex, guidance, Haystack or llama_cpp.server.

While any block is open, llama_cpp.Llama has another constructor. It asks whether this thread is inside a block: only then is the new object made one
of our `Llama`. When the last block closes, llama-cpp-python's own constructor is back in its place.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from tinyserve_gguf._llama import StockLlama
from tinyserve_gguf.facts import read_facts
from tinyserve_gguf.llama import Llama
from tinyserve_gguf.llama_options import PagedOptions


@dataclass(slots=True)
class _Block:
    options: PagedOptions
    thread: int
    outer: _Block | None
    is_open: bool = True


_block: ContextVar[_Block | None] = ContextVar("tinyserve_gguf.offload", default=None)  # not thread-local: an asyncio task has its own as well
_lock = threading.Lock()
_n_open = 0  # blocks, in all threads
_stock_init = StockLlama.__init__
_signature = inspect.signature(_stock_init)


@contextmanager
def offload(
    *,
    expert_cache: str | int = "auto",
    policy: str = "lfru",
    device: str = "auto",
    miss: str = "fetch",
    window: int | None = None,
    sinks: int | None = None,
    kv_type: str | None = None,
    kv_type_v: str | None = None,
    miss_admit: int | None = None,
    miss_threads: int | None = None,
    vram: float | None = None,
    vram_reserve: float | None = None,
    ram: float | None = None,
    warm: bool = False,
) -> Iterator[None]:
    """Every llama_cpp.Llama that this thread opens inside the block is a `tinyserve_gguf.Llama` with these options, and stays one; so is an object of
    a subclass. Models of other threads and of other asyncio tasks are not touched, nor are those opened before or after.

    The innermost block counts. As llama_cpp.Llama does, such a model takes keyword arguments that nobody knows. A window takes the place of the
    `n_ctx` that the code inside gives; `n_gpu_layers=0` keeps its meaning, which is the CPU; a dense model runs whatever `expert_cache` says.
    OptionError at once for options that no model goes with.
    """
    options = PagedOptions(
        expert_cache, policy, device, window, sinks, kv_type, kv_type_v, miss, miss_admit, miss_threads, vram, vram_reserve, ram, warm
    )
    block = _Block(options, threading.get_ident(), _block.get())
    token = _block.set(block)
    _install(1)
    try:
        yield
    finally:
        block.is_open = False
        _install(-1)
        with suppress(ValueError):  # closed in another asyncio task than it was opened in: there it stays, as a block that is not open
            _block.reset(token)


def _install(change: int) -> None:
    """Count the open blocks, and exchange the constructor with the first and after the last."""
    global _n_open, _stock_init
    with _lock:
        if _n_open == 0:
            _stock_init = StockLlama.__init__  # as it is now: others may have exchanged it too
        _n_open += change
        StockLlama.__init__ = _init if _n_open else _stock_init


def _current() -> _Block | None:
    """The innermost block that is open here. A task or a thread that began inside one may have outlived it, or be another thread."""
    block = _block.get()
    while block and not (block.is_open and block.thread == threading.get_ident()):
        block = block.outer
    return block


@functools.wraps(_stock_init)
def _init(self: Any, *arguments: Any, **options: Any) -> None:
    block = _current()
    if block is None or isinstance(self, Llama):
        _stock_init(self, *arguments, **options)
        return
    kind: Any = type(self)
    self.__class__ = Llama if kind is StockLlama else _paged_kind(kind)
    given = dict(_signature.bind(self, *arguments, **options).arguments)
    path = given.pop("model_path")
    for name in ("self", "kwargs"):  # the latter are those that nobody knows
        given.pop(name, None)
    paged = block.options
    if given.get("vocab_only"):
        paged = PagedOptions()
    elif not read_facts(path).is_moe:
        paged = replace(paged, expert_cache="auto", miss="fetch", miss_admit=None, miss_threads=None)
    if paged.window is not None:
        given.pop("n_ctx", None)
    self._begin()
    self._open(path, paged, given)


@functools.cache
def _paged_kind(kind: Any) -> type:
    """A subclass of llama_cpp.Llama as a subclass of ours, too."""
    return type(kind.__name__, (kind, Llama), {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__})
