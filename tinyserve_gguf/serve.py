"""`serve`: opens a model and answers HTTP until it is told to stop."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Any

import uvicorn

from tinyserve_gguf._llama import stock_formats
from tinyserve_gguf.context import ContextSpec
from tinyserve_gguf.errors import OptionError
from tinyserve_gguf.facts import read_facts
from tinyserve_gguf.lora import read_adapters
from tinyserve_gguf.placement import default_threads, plan_for
from tinyserve_gguf.plan import Budget, CacheSpec
from tinyserve_gguf.serve_api import make_app
from tinyserve_gguf.serve_llama import ServedLlama
from tinyserve_gguf.serve_state import ServeOptions, Service
from tinyserve_gguf.split import check_split_mode, shares_of


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 is any that is free. OptionError if it cannot be had. Clients that connect before there is a model wait for it."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server((str(address[0]), int(address[1])), family=family, backlog=2048)
    except OSError as error:
        raise OptionError(f"cannot listen on {host}, port {port}: {error.strerror or error}; give another --host or --port") from error


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def open_llama(
    path: str,
    *,
    n_parallel: int = 1,
    expert_cache: str = "auto",
    n_ctx: int | None = None,
    window: int | None = None,
    sinks: int | None = None,
    kv_type: str = "f16",
    kv_type_v: str | None = None,
    flash_attn: str = "auto",
    device: str = "auto",
    tensor_split: Sequence[float] | None = None,
    split_mode: str = "layer",
    n_ubatch: int | None = None,
    n_threads: int | None = None,
    vram: float | None = None,
    vram_reserve: float | None = None,
    ram: float | None = None,
    lora: Sequence[str] = (),
    lora_scaled: Sequence[tuple[str, float]] = (),
    **paging: Any,
) -> tuple[ServedLlama, list[str]]:
    """A model with the options of `load`, ready to make contexts; and what was decided and why. Errors as `load` has them."""
    facts = read_facts(path)
    spec = ContextSpec.of(n_ctx, window, sinks, kv_type, kv_type_v, flash_attn)
    check_split_mode(split_mode)
    adapters = read_adapters(facts, lora, lora_scaled)
    if len(adapters) > 1:
        raise OptionError(f"the server takes one LoRA adapter, not {len(adapters)}: llama-cpp-python's Llama, on which it stands, has one")
    budget = Budget.of(vram, vram_reserve, ram)
    length, lines = spec.length(facts), spec.cut(facts)
    where: dict[str, Any] = {"expert_cache": expert_cache, "device": device, "tensor_split": tensor_split, "context": spec, "n_ubatch": n_ubatch}
    plan, chosen = plan_for(facts, budget=budget, adapters=adapters, n_contexts=n_parallel, **where)
    if n_parallel > 1 and facts.is_moe:
        if CacheSpec.parse(expert_cache).kind == "auto":
            expert_cache = str(plan.n_slots)
            lines.append(f"expert cache with room for {n_parallel} contexts: {plan.reason}")
        lines.append(f"{n_parallel} contexts: {plan.memory_line()}")
    threads = n_threads or default_threads()
    options: dict[str, Any] = {"window": window, "sinks": sinks} if window is not None else {"n_ctx": length}
    if flash_attn != "auto":
        options["flash_attn"] = flash_attn == "on"
    for adapter in adapters:
        options |= {"lora_path": str(adapter.path), "lora_scale": adapter.scale}
        lines.append(f"adapter: {adapter}")
    batch = min(plan.n_ubatch, length)
    llama = ServedLlama(
        path,
        expert_cache=expert_cache,
        device=chosen.name if shares_of(plan) else device,
        tensor_split=list(shares_of(plan)) or None,
        kv_type=kv_type,
        kv_type_v=kv_type_v,
        n_batch=batch,
        n_ubatch=batch,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
        vram=vram,
        vram_reserve=vram_reserve,
        ram=ram,
        **options,
        **paging,
    )
    return llama, [*llama.lines(), *lines]


def check_chat_format(llama: ServedLlama, name: str) -> None:
    """OptionError if llama-cpp-python has no chat format of this name."""
    known = sorted({*stock_formats.LlamaChatCompletionHandlerRegistry()._chat_handlers, *llama._chat_handlers})
    if name not in known:
        raise OptionError(f"there is no chat format {name!r}; there is: {', '.join(known)}")


class _Server(uvicorn.Server):
    """Finishes what runs when it is told to stop, and gives that up when it is told again."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.drain()
        told_twice = asyncio.create_task(self._give_up_when_told())
        await super().shutdown(sockets)
        told_twice.cancel()
        self._service.give_up()
        while self.server_state.tasks:  # they answer that it ends
            await asyncio.sleep(0.02)

    async def _give_up_when_told(self) -> None:
        while not self.force_exit:
            await asyncio.sleep(0.05)
        self._service.give_up()


def serve(llama: ServedLlama, options: ServeOptions, listener: socket.socket, *, ready: Callable[[], None], verbose: bool = False) -> None:
    """Answer on `listener` until SIGINT or SIGTERM; then replies that run are finished, and those that wait are refused. `ready` is called when
    contexts are open. Frees the model."""
    service = Service(llama, options)
    try:
        app = make_app(service)
        config = uvicorn.Config(app, log_level="info" if verbose else "error", access_log=verbose, server_header=False, lifespan="off", ws="none")
        server = _Server(config, service)
        before = [(number, signal.signal(number, lambda *_: None)) for number in (signal.SIGINT, signal.SIGTERM)]  # uvicorn sends them once more
        try:
            ready()
            server.run(sockets=[listener])
        finally:
            for number, handler in before:
                signal.signal(number, handler)
    finally:
        service.close()
        listener.close()
