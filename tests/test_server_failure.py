"""A device that fails under the server, and defects of its own: what clients and operators see."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bundles import Opened
from server import Answer, toy_bundle

from runtime.engine import Engine
from runtime.errors import UserError
from runtime.server import app as server_app
from runtime.server.app import Server, Settings
from runtime.server.model import Model
from runtime.server.streams import Bridge
from runtime.worker import Worker

pytestmark = pytest.mark.iree
ASKED = {"prompt": [1, 2], "max_tokens": 50, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy with tokenizer and chat template."""
    return toy_bundle(tmp_path_factory.mktemp("failure") / "toy")


def serve(bundle: Path, breaks_after: int, client: Callable[[Server, Any], Any]) -> Any:
    """Run `client(server, ask)` on a loop with a real engine, whose device raises after a while."""
    opened = Opened.open(bundle)
    bridge = Bridge()
    session = opened.session()
    call, left = opened.device.call, breaks_after

    def breaking(function: str, arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise UserError("the device is lost")
        return call(function, arguments)

    opened.device.call = breaking  # type: ignore[method-assign]
    worker = Worker(Engine(session, opened.manifest), bridge.after_step)

    async def run() -> Any:
        bridge.attach(asyncio.get_running_loop())
        worker.start()
        server = Server(Model.open(bundle), worker, bridge, Settings())
        app = server.app()

        async def ask(method: str, path: str, **fields: Any) -> Answer:
            return await asgi(app, method, path, json.dumps(fields).encode() if fields else b"")

        return await client(server, ask)

    try:
        return asyncio.run(run())
    finally:
        worker.close()


async def asgi(app: Any, method: str, path: str, body: bytes) -> Answer:
    """One request to an ASGI application, and its whole answer."""
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "scheme": "http", "headers": [(b"host", b"localhost")], "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }  # fmt: skip
    sent: list[Any] = []
    asked = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Any:
        return next(asked, None) or await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    headers = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
    return Answer(sent[0]["status"], headers, b"".join(m.get("body", b"") for m in sent[1:]))


def test_a_failed_device(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def client(server: Server, ask: Any) -> None:
        assert (await ask("POST", "/v1/completions", **{**ASKED, "max_tokens": 3})).status == 200
        first, streamed = await asyncio.gather(
            ask("POST", "/v1/completions", **ASKED),
            ask("POST", "/v1/completions", **ASKED, stream=True),
        )
        assert "the device is lost" in first.error(500)["message"]
        *_, last = streamed.body.decode().strip().split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
        health = await ask("GET", "/health")
        assert "the device is lost" in health.error(500)["message"]
        (await ask("GET", "/ready")).error(503)
        refused = await ask("POST", "/v1/completions", **ASKED)
        assert refused.error(503)["code"] == "failed" and "retry-after" not in refused.headers
        metrics = (await ask("GET", "/metrics")).body.decode()
        assert 'scanwright_rejected_requests_total{reason="failed"} 1.0' in metrics
        assert 'scanwright_finished_sequences_total{reason="error"} 2.0' in metrics
        assert 'scanwright_slots{phase="idle"} 3.0' in metrics
        assert await server.quiet(1)

    serve(bundle, 25, client)
    err = capsys.readouterr().err
    assert "the device is lost" in err and err.count("\n") == 1


def test_a_defect_is_a_500_without_its_words(
    bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a secret")

    async def client(server: Server, ask: Any) -> None:
        monkeypatch.setattr(server_app.objects, "models", broken)
        with pytest.raises(ZeroDivisionError):  # for the connection, which uvicorn then closes
            await ask("GET", "/v1/models")
        assert (await ask("GET", "/health")).status == 200

    serve(bundle, 1000, client)
    err = capsys.readouterr().err
    assert err == "error: /v1/models: unexpected ZeroDivisionError: a secret\n"


def test_quiet_waits_for_answers(bundle: Path) -> None:
    async def client(server: Server, ask: Any) -> None:
        assert await server.quiet(0.01)
        task = asyncio.create_task(ask("POST", "/v1/completions", **{**ASKED, "max_tokens": 2000}))
        await asyncio.sleep(0.01)
        assert not await server.quiet(0.001)
        server.draining = True
        (await ask("POST", "/v1/completions", **ASKED)).error(503)
        assert (await task).status == 200
        assert await server.quiet(1)

    serve(bundle, 10_000, client)


def test_a_waiting_stream_is_kept_alive(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.server import answer

    monkeypatch.setattr(answer, "KEEP_ALIVE_S", 0.0005)

    async def client(server: Server, ask: Any) -> None:
        many = [ask("POST", "/v1/completions", **ASKED, stream=True) for _ in range(6)]
        answers = [found.body.split(b"\n\n") for found in await asyncio.gather(*many)]
        assert {parts[-2] for parts in answers} == {b"data: [DONE]"}
        assert any(b": waiting" in parts for parts in answers)
        texts = {
            "".join(json.loads(p[6:])["choices"][0]["text"] for p in parts[:-2] if p[:1] != b":")
            for parts in answers
        }
        assert len(texts) == 1

    serve(bundle, 10_000, client)
