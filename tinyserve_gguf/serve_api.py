"""The routes: OpenAI's, and those that show and change what paging does."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.staticfiles import StaticFiles

from tinyserve_gguf import serve_metrics
from tinyserve_gguf.errors import CapacityError, EngineError, OptionError
from tinyserve_gguf.serve_http import Guard, add_error_handlers
from tinyserve_gguf.serve_jobs import Reply
from tinyserve_gguf.serve_llama import GivenUpError
from tinyserve_gguf.serve_prepare import Prepared
from tinyserve_gguf.serve_queue import ClosingError, QueueFullError
from tinyserve_gguf.serve_reply import Json
from tinyserve_gguf.serve_request import CacheRequest, ChatRequest, CompletionRequest, EmbeddingRequest, RequestError
from tinyserve_gguf.serve_state import Service

WEB = Path(__file__).parent / "web"  # the page at /
GONE = object()  # in place of an event: the client is not there any more


def make_app(service: Service) -> Guard:
    """The ASGI application of one service."""
    app = FastAPI(title="tinyserve-gguf", docs_url=None, redoc_url=None)  # their pages come from a CDN
    add_error_handlers(app)
    metrics = service.metrics

    # ---- completions ----

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        service.check_model(body.model)
        return await answer(await run_in_threadpool(service.preparer.chat, body), request)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        service.check_model(body.model)
        return await answer(await run_in_threadpool(service.preparer.completion, body), request)

    async def answer(prepared: Prepared, request: Request) -> Response:
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Any] = asyncio.Queue()

        def put(event: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(events.put_nowait, event)

        reply = Reply(prepared, service.model_id, put)
        future = submitted(lambda: service.dispatcher.submit(reply.run, prepared.prompts[0]))
        future.add_done_callback(lambda _: metrics.observe_cost(reply.cost))
        future.add_done_callback(put)
        service.running.add(reply.cancelled)

        def give_up() -> None:
            """Nobody waits any more."""
            if not future.done() and not reply.cancelled.is_set():
                metrics.observe_disconnect()
            reply.cancelled.set()
            future.cancel()
            service.running.discard(reply.cancelled)

        watcher = asyncio.create_task(watch(request, give_up, events))

        async def parts(first: Json) -> AsyncIterator[bytes]:
            event: object = first
            try:
                while not isinstance(event, Future):
                    if event is GONE:
                        return
                    yield _event(event)
                    event = await events.get()
                error = failure(event)
                yield _event(_error_of(error).body) if error else b"data: [DONE]\n\n"
                if error and not isinstance(error, CancelledError | GivenUpError | RequestError):
                    raise error  # to the log
            finally:
                watcher.cancel()
                give_up()

        first = await events.get()
        if first is GONE or isinstance(first, Future):
            watcher.cancel()
            give_up()
            return JSONResponse(result_of(future)) if first is not GONE else Response(status_code=serve_metrics.GONE)
        return StreamingResponse(parts(first), media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    # ---- models, embeddings, health ----

    @app.get("/v1/models")
    def models() -> Json:
        return {"object": "list", "data": [service.model_card()]}

    @app.get("/v1/models/{name:path}")
    def model(name: str) -> Json:
        service.check_model(name)
        return service.model_card()

    @app.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest) -> Json:
        service.check_model(body.model)
        dispatcher = await run_in_threadpool(service.embedder, body.inputs)
        future = submitted(lambda: dispatcher.submit(lambda llama: llama.embed(body.inputs, normalize=True, truncate=False, return_count=True)))
        await asyncio.wait([done := asyncio.wrap_future(future)])
        _ = done.cancelled() or done.exception()  # seen, so that asyncio does not complain
        vectors, n_tokens = result_of(future)
        encode: Callable[[list[float]], Any] = _base64 if body.encoding_format == "base64" else list
        data = [{"object": "embedding", "index": number, "embedding": encode(vector)} for number, vector in enumerate(vectors)]
        return {"object": "list", "data": data, "model": service.model_id, "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens}}

    @app.get("/health")
    def health() -> Response:
        return JSONResponse({"status": "closing"}, 503) if service.dispatcher.is_closing else JSONResponse({"status": "ok"})

    # ---- paging ----

    @app.get("/metrics")
    def show_metrics() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/experts")
    def experts() -> Json:
        return service.expert_map()

    @app.put("/v1/experts/cache")
    def resize(body: CacheRequest) -> Json:
        try:
            return service.resize(body.expert_cache)
        except (CapacityError, EngineError) as error:  # EngineError: so many experts are pinned
            raise RequestError(str(error), status=409, code="does_not_fit", param="expert_cache") from error
        except OptionError as error:
            raise RequestError(str(error), param="expert_cache") from error

    app.mount("/", StaticFiles(directory=WEB, html=True))
    return Guard(app, keys=service.keys, max_body=service.max_body, observe=metrics.observe_answer)


async def watch(request: Request, give_up: Callable[[], None], events: asyncio.Queue[Any]) -> None:
    """Give up when the client hangs up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    give_up()
    events.put_nowait(GONE)


def submitted(submit: Callable[[], Future[Any]]) -> Future[Any]:
    """RequestError if nothing is taken now."""
    try:
        return submit()
    except QueueFullError:
        raise RequestError("too many requests wait already: try again later", status=429, code="queue_full") from None
    except ClosingError:
        raise RequestError("the server is shutting down", status=503, code="closing") from None


def failure(future: Future[Any]) -> BaseException | None:
    """Of one that is done."""
    return CancelledError() if future.cancelled() else future.exception()


def result_of(future: Future[Any]) -> Any:
    """Of one that is done. RequestError for what can be foreseen; anything else is raised as it is."""
    error = failure(future)
    if isinstance(error, CancelledError | GivenUpError):
        raise _error_of(error)
    return future.result()


def _error_of(error: BaseException) -> RequestError:
    if isinstance(error, RequestError):
        return error
    if isinstance(error, CancelledError | GivenUpError):
        return RequestError("the server is shutting down", status=503, code="closing")
    return RequestError(f"the server failed: {type(error).__name__}", status=500)


def _event(data: object) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _base64(vector: list[float]) -> str:
    return base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode()
