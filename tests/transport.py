"""What tests of push and pull need: small bundles, a web server that fails on request, programs."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import http.server
import os
import random
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import fake_device
import pytest

from runtime import manifest as mf

PARAMS = 300_000  # bytes
# What it says of the bundle are bytes nobody runs.
FILES = {"model.vmfb": 20_000, "params.irpa": PARAMS, "reference.json": 3_000, "tokenizer.json": 0}


def alone(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache, a docker configuration and a working directory under `directory`, no other keys."""
    monkeypatch.setenv("SCANWRIGHT_CACHE", str(directory / "cache"))
    monkeypatch.setenv("DOCKER_CONFIG", str(directory / "docker"))
    monkeypatch.delenv("SCANWRIGHT_REGISTRY_AUTH", raising=False)
    monkeypatch.chdir(directory)


def made(directory: Path, target: str = "cpu", code: int = 1) -> Path:
    """A bundle of random bytes; `code` seeds the module, all other files are the same ones."""
    directory.mkdir(parents=True)
    refs: dict[str, mf.FileRef] = {}
    for name, size in FILES.items():
        data = random.Random(code if name == "model.vmfb" else name).randbytes(size)
        (directory / name).write_bytes(data)
        refs[name] = mf.FileRef(name, hashlib.sha256(data).hexdigest(), size)
    module, params, reference, tokenizer = refs.values()
    base = fake_device.manifest()
    manifest = dataclasses.replace(
        base,
        files=dataclasses.replace(
            base.files, module=module, params=params, reference=reference, tokenizer=(tokenizer,)
        ),
        target=dataclasses.replace(base.target, name=target),
    )
    (directory / mf.FILE_NAME).write_text(mf.dumps(manifest))
    return directory


def contents(bundle: Path) -> dict[str, bytes]:
    """Every file below a directory, by relative name."""
    return {
        str(path.relative_to(bundle)): path.read_bytes()
        for path in bundle.rglob("*")
        if path.is_file()
    }


def left_over(parent: Path) -> list[str]:
    """Names in a directory that start with a dot: what a failure must not leave."""
    return [path.name for path in parent.iterdir() if path.name.startswith(".")]


# A web server ------------------------------------------------------------------------------------


@dataclass
class Answer:
    """What is said for a path: fields of it, sent with ranges."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    drop_at: int | None = None  # bytes after which the connection closes, once
    ranges: bool = True


class Web:
    """`answers` by path; `log` has (path, Range, Authorization) of every request."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.log: list[tuple[str, str | None, str | None]] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer._answer(self)

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.host = f"127.0.0.1:{self._http.server_port}"
        self.url = f"http://{self.host}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> Web:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def serve(self, bundle: Path, below: str = "") -> None:
        """Answer for every file of a bundle."""
        for name, data in contents(bundle).items():
            self.answers[f"{below}/{name}"] = Answer(data)

    def _answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        wanted = request.headers.get("Range")
        self.log.append((request.path, wanted, request.headers.get("Authorization")))
        answer = self.answers.get(request.path.partition("?")[0], Answer(b"nothing here", 404))
        body, status, headers = answer.body, answer.status, dict(answer.headers)
        if wanted and answer.ranges and status == 200:
            first = int(wanted.removeprefix("bytes=").rstrip("-"))
            headers.setdefault("Content-Range", f"bytes {first}-{len(body) - 1}/{len(body)}")
            status, body = (206, body[first:]) if first < len(body) else (416, b"")
        request.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            request.send_header(name, value)
        request.end_headers()
        if answer.drop_at is not None:
            body, answer.drop_at = body[: answer.drop_at], None
            request.close_connection = True
        request.wfile.write(body)


# Programs ----------------------------------------------------------------------------------------


def free_port() -> int:
    """A port of the loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def program(argv: list[str], url: str, **environment: str) -> Iterator[None]:
    """A server process that answers at `url`; it is ended after the block."""
    process = subprocess.Popen(
        argv, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(url, timeout=5).close()
                break
            except urllib.error.HTTPError as error:
                error.close()
                break
            except OSError as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{argv[0]} does not answer at {url}") from error
                time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.communicate(timeout=30)


@contextlib.contextmanager
def registry(directory: Path, htpasswd: str | None = None) -> Iterator[str]:
    """Debian's docker-registry, its data in `directory`; its host with the port."""
    host = f"127.0.0.1:{free_port()}"
    lines = [
        "version: 0.1",
        "log: {level: error}",
        f"storage: {{filesystem: {{rootdirectory: {directory / 'data'}}}}}",
        f"http: {{addr: '{host}'}}",
    ]
    if htpasswd is not None:
        (directory / "htpasswd").write_text(htpasswd)
        lines.append(f"auth: {{htpasswd: {{realm: here, path: {directory / 'htpasswd'}}}}}")
    config = directory / "config.yml"
    config.write_text("\n".join(lines))
    tool = shutil.which("docker-registry")
    assert tool is not None, "Debian's docker-registry is needed: apt-get install docker-registry"
    with program([tool, "serve", str(config)], f"http://{host}/v2/"):
        yield host
