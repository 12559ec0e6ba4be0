"""The HTTP side of a served bundle: OpenAI's endpoints, health, metrics, the playground.

| path | answer |
|---|---|
| POST /v1/completions, /v1/chat/completions | a generation, whole or as server-sent events |
| GET /v1/models, /v1/models/{id} | the one model that is served |
| GET /slots | what every slot is doing |
| GET /health | 200; 500 once the device has failed |
| GET /ready | 200; 503 while draining or after a failure |
| GET /metrics | Prometheus text |
| GET / | the playground |

Keys, where there are any, protect all but /health, /ready and /. Errors are OpenAI's objects. A
full queue, a draining server and a failed device answer 503, the first two with Retry-After.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.errors import UserError, report
from runtime.scheduler import QueueFull
from runtime.server import objects
from runtime.server.answer import Taker, events, whole
from runtime.server.calls import Call
from runtime.server.chat import parse_chat
from runtime.server.completions import parse_completion
from runtime.server.fields import ApiError
from runtime.server.guard import ClientGone, Guard, Keys, read_body, send_error
from runtime.server.metrics import Metrics
from runtime.server.model import Model
from runtime.server.page import page
from runtime.server.streams import Bridge, Stream
from runtime.worker import Draining, Worker

RETRY_AFTER_S = {"queue_full": 1, "draining": 5}
_INLINE_BYTES = 4096  # longer bodies are read on a thread: tokenizing takes its time
Parse = Callable[[bytes, Model], Call]


@dataclass(frozen=True)
class Settings:
    """`keys`: None serves anyone. `names`: host names a browser may use, None for any.

    `max_body` in bytes; `client_timeout_s` bounds the time a client takes to send a body.
    """

    keys: Keys | None = None
    names: Sequence[str] | None = ()
    max_body: int = 2 << 20
    client_timeout_s: float = 30.0


class Server:
    """One served model. Set `draining` to refuse new generations from that moment on."""

    def __init__(self, model: Model, worker: Worker, bridge: Bridge, settings: Settings) -> None:
        self.draining = False
        self._model = model
        self._worker = worker
        self._bridge = bridge
        self._settings = settings
        self._metrics = Metrics(model, worker.snapshot)
        self._page, self._page_headers = page()
        self._pool = ThreadPoolExecutor(2, "parse")
        self._active = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    def app(self) -> ASGIApp:
        """The ASGI application."""
        routes = [
            Route("/v1/completions", _Generate(self, parse_completion), methods=["POST"]),
            Route("/v1/chat/completions", _Generate(self, parse_chat), methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{id:path}", self._model_card),
            Route("/slots", self._slots),
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/metrics", self._exposition),
            Route("/", self._playground),
        ]
        paths = [route.path for route in routes]
        handlers = {ApiError: _api_error, HTTPException: _http_error, Exception: _unexpected}
        guard = Middleware(Guard, self._settings.keys, self._settings.names)
        measure = Middleware(_Measure, self._metrics, paths)
        app = Starlette(routes=routes, exception_handlers=handlers, middleware=[measure, guard])  # type: ignore[arg-type]
        app.router.redirect_slashes = False
        return app

    async def quiet(self, timeout_s: float) -> bool:
        """Wait until every generation is answered; False if `timeout_s` seconds passed first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._quiet.wait()
        except TimeoutError:
            return False
        return True

    async def generate(self, parse: Parse, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one generation. Raises ApiError as long as nothing of the answer is out."""
        self._check_open()
        settings = self._settings
        headers = Headers(scope=scope)
        self._active += 1
        self._quiet.clear()
        try:
            body = await read_body(headers, receive, settings.max_body, settings.client_timeout_s)
            self._check_open()  # a body may take its time
            call = await self._parse(parse, body)
            await self._run(call, self._submit(call), receive, send)
        finally:
            self._active -= 1
            if not self._active:
                self._quiet.set()

    def _check_open(self) -> None:
        if self.draining:
            raise self._unavailable(
                "draining", "server: shutting down; try another, or again later"
            )

    async def _parse(self, parse: Parse, body: bytes) -> Call:
        if len(body) <= _INLINE_BYTES and b"dry_" not in body:  # DRY may walk the vocabulary
            return parse(body, self._model)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, parse, body, self._model)

    def _submit(self, call: Call) -> Stream:
        try:
            return Stream(call, self._worker, self._bridge)
        except QueueFull as error:
            raise self._unavailable("queue_full", str(error)) from error
        except Draining as error:
            raise self._unavailable("draining", str(error)) from error
        except UserError as error:
            if self._worker.failed is not None:
                raise self._unavailable("failed", str(error)) from error
            raise ApiError.of(error) from error

    def _unavailable(self, reason: str, message: str) -> ApiError:
        self._metrics.rejected.labels(reason).inc()
        return unavailable(reason, message)

    async def _run(self, call: Call, stream: Stream, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(_watch(receive, stream))
        take = Taker(stream, len(call.requests), self._metrics)
        try:
            await (events if call.stream else whole)(call, stream, take, send)
        finally:
            watch.cancel()
            stream.cancel()
            if stream.gone:
                self._metrics.disconnects.inc()

    async def _models(self, request: Request) -> Response:
        return _json(objects.models(self._model))

    async def _model_card(self, request: Request) -> Response:
        name = request.path_params["id"]
        if name != self._model.name:
            raise ApiError(
                404,
                f"model: found {name[:100]!r}, expected {self._model.name!r}",
                "model",
                "model_not_found",
            )
        return _json(objects.model_card(self._model))

    async def _slots(self, request: Request) -> Response:
        manifest = self._model.manifest
        found = {
            "model": self._model.name,
            "target": manifest.target.name,
            "chat": self._model.template is not None,
            "draining": self.draining,
            **dataclasses.asdict(self._worker.snapshot()),
        }
        return _json(found)

    async def _health(self, request: Request) -> Response:
        if self._worker.failed is not None:
            raise ApiError(500, self._worker.failed, code="failed", type="server_error")
        return _json({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        if self._worker.failed is not None:
            raise unavailable("failed", self._worker.failed)
        if self.draining:
            raise unavailable("draining", "server: shutting down")
        return _json({"status": "ready"})

    async def _exposition(self, request: Request) -> Response:
        body, kind = self._metrics.exposition(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": kind, "cache-control": "no-store"})

    async def _playground(self, request: Request) -> Response:
        return Response(self._page, headers=self._page_headers)


class _Generate:
    """An endpoint that generates, as the ASGI application that a Route takes."""

    def __init__(self, server: Server, parse: Parse) -> None:
        self._server = server
        self._parse = parse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGone):
            await self._server.generate(self._parse, scope, receive, send)


class _Measure:
    """ASGI middleware: counts answers by endpoint and status, and times them."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: Sequence[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.perf_counter()
        path = scope["path"]
        endpoint = path if path in self._paths else "other"
        if path.startswith("/v1/models/"):
            endpoint = "/v1/models/{id}"
        status = "disconnected"

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, note)
        except Exception:
            status = "500"
            raise
        finally:
            self._metrics.answers.labels(endpoint, status).inc()
            self._metrics.latency.labels(endpoint).observe(time.perf_counter() - started)


async def _watch(receive: Receive, stream: Stream) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    stream.hang_up()


def unavailable(reason: str, message: str) -> ApiError:
    """A 503: try again after the time in Retry-After, if it has one."""
    wait = RETRY_AFTER_S.get(reason)
    headers = {} if wait is None else {"Retry-After": str(wait)}
    return ApiError(503, message, code=reason, type="server_error", headers=headers)


def _json(value: object, status: int = 200) -> Response:
    headers = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
    return Response(objects.encode(value), status, headers, "application/json")


class _ErrorResponse(Response):
    def __init__(self, error: ApiError) -> None:
        super().__init__()
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_error(send, self._error)


async def _api_error(request: Request, error: ApiError) -> Response:
    return _ErrorResponse(error)


async def _http_error(request: Request, error: HTTPException) -> Response:
    method, path = request.method, request.url.path[:100]
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"method: found {method} for {path}, expected {allowed}"
    else:
        message = f"path: found {path}, expected an endpoint such as /v1/completions"
    return _ErrorResponse(
        ApiError(error.status_code, message, code="not_found", headers=error.headers)
        if error.status_code == 404
        else ApiError(error.status_code, message, headers=error.headers)
    )


async def _unexpected(request: Request, error: Exception) -> Response:
    """A defect of ours: one line on stderr, and nothing of it to the client."""
    line = UserError(f"{request.url.path[:100]}: unexpected {type(error).__name__}: {error}")
    line.__cause__ = error
    report(line)
    return _ErrorResponse(ApiError(500, "server: an internal error", type="server_error"))
