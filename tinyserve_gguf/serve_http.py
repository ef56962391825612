"""Before the routes: keys, the size of bodies, and errors in the form that OpenAI's clients know. Plain ASGI, so that streams are not touched."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinyserve_gguf.errors import CapacityError, TinyserveError
from tinyserve_gguf.serve_request import RequestError

CODE_TOO_LARGE = "body_too_large"


class Guard:
    """Lets in who has a key, and bodies of up to `max_body` bytes. `/`, the files of the page and `/health` need no key.

    `observe(path, status)` hears of every answer.
    """

    def __init__(self, app: ASGIApp, *, keys: Sequence[str], max_body: int, observe: Callable[[str, int], None]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._max_body = max_body
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._observe(scope["path"], message["status"])
            await send(message)

        headers = dict(scope["headers"])
        if _needs_key(scope["path"]) and not self._knows(headers.get(b"authorization", b"")):
            given = b"authorization" in headers
            reason = "wrong API key" if given else "this server needs an API key: send the header Authorization: Bearer KEY"
            refusal = RequestError(reason, status=401, code="invalid_api_key")
            await _answer(refusal, {"WWW-Authenticate": "Bearer"})(scope, receive, observed)
            return
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body:
            await _answer(self._too_large())(scope, receive, observed)
            return
        await self._app(scope, self._counted(receive), observed)

    def _knows(self, header: bytes) -> bool:
        """Whether it is a bearer token with one of the keys. Takes as long for a wrong key as for a right one."""
        if not self._keys:
            return True
        scheme, _, key = header.partition(b" ")
        right = [hmac.compare_digest(key.strip(), known) for known in self._keys]  # all of them, whichever fits
        return scheme.lower() == b"bearer" and any(right)

    def _counted(self, receive: Receive) -> Receive:
        """For bodies that do not say how long they are."""
        n_bytes = 0

        async def counted() -> Message:
            nonlocal n_bytes
            message = await receive()
            n_bytes += len(message.get("body", b""))
            if n_bytes > self._max_body:
                raise HTTPException(413, self._too_large().message)  # the one error that passes through FastAPI's reading of bodies
            return message

        return counted

    def _too_large(self) -> RequestError:
        return RequestError(f"the body is larger than {self._max_body} bytes: raise --max-body", status=413, code=CODE_TOO_LARGE)


def _needs_key(path: str) -> bool:
    return path.startswith("/v1/") or path in ("/v1", "/metrics", "/openapi.json")


def _answer(error: RequestError, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse(error.body, error.status, headers)


def add_error_handlers(app: FastAPI) -> None:
    """Every error as {"error": {...}}. What is nobody's mistake is 500, and its traceback goes to the log."""

    @app.exception_handler(RequestError)
    def refused(_request: Request, error: RequestError) -> JSONResponse:
        return _answer(error, {"Retry-After": "1"} if error.status in (429, 503) else None)

    @app.exception_handler(RequestValidationError)
    def malformed(_request: Request, error: RequestValidationError) -> JSONResponse:
        return _answer(validation_error(error))

    @app.exception_handler(HTTPException)
    def http(request: Request, error: HTTPException) -> JSONResponse:
        told = {404: f"there is no {request.url.path} here", 405: f"{request.url.path} does not take {request.method}"}
        code = CODE_TOO_LARGE if error.status_code == 413 else None
        return _answer(RequestError(told.get(error.status_code, str(error.detail)), status=error.status_code, code=code), dict(error.headers or {}))

    @app.exception_handler(TinyserveError)
    def ours(_request: Request, error: TinyserveError) -> JSONResponse:
        return _answer(RequestError(str(error), status=503 if isinstance(error, CapacityError) else 500))

    @app.exception_handler(Exception)
    def unforeseen(_request: Request, error: Exception) -> JSONResponse:
        return _answer(RequestError(f"the server failed: {type(error).__name__}", status=500))


def validation_error(error: RequestValidationError) -> RequestError:
    """The first thing that is wrong, in one line."""
    first = min(error.errors(), key=lambda one: (one["type"] == "extra_forbidden", -len(one["loc"])))  # of several forms the one that fits best
    where = ".".join(str(part) for part in first["loc"] if part != "body" and not str(part)[:1].isupper() and "[" not in str(part))
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        return RequestError(f"{where!r} is not supported by this server", param=where)
    if first["type"] == "json_invalid":
        return RequestError(f"the body is not JSON: {first['ctx']['error']} at character {first['loc'][-1]}")
    if not where:
        return RequestError(message if first["type"] == "value_error" else "the body must be a JSON object, sent as application/json")
    return RequestError(f"{where}: {message}", param=where)
