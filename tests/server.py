"""A real `scanwright serve` process on a free loopback port, and small clients for it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import toy
from test_cli import with_tokenizer

from runtime import manifest as mf

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}k{% endif %}"
)
LONG = {"prompt": [1, 2, 3], "max_tokens": 1_000_000, "ignore_eos": True}  # far longer than a test


def toy_bundle(to: Path, chat: bool = True) -> Path:
    """The toy (three slots) with its tokenizer of 16 words and, with `chat`, a chat template."""
    bundle = with_tokenizer(toy.copy(toy.bundle(), to))
    if chat:
        path = bundle / "tokenizer_config.json"
        path.write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<end>"}))
        data = path.read_bytes()
        ref = mf.FileRef(path.name, hashlib.sha256(data).hexdigest(), len(data))
        manifest = mf.load(bundle)
        files = dataclasses.replace(manifest.files, tokenizer=(*manifest.files.tokenizer, ref))
        text = mf.dumps(dataclasses.replace(manifest, files=files))
        (bundle / mf.FILE_NAME).write_text(text)
    return bundle


@dataclass(frozen=True)
class Answer:
    """A whole HTTP answer; header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    def error(self, status: int) -> dict[str, Any]:
        """The error object, after checking the status and that it has OpenAI's shape."""
        assert self.status == status, (self.status, self.body[:300])
        assert self.headers["content-type"] == "application/json"
        found = self.json()
        assert list(found) == ["error"] and isinstance(found["error"]["message"], str)
        assert list(found["error"]) == ["message", "type", "param", "code"]
        return found["error"]


class Events:
    """A streamed answer: iterate for the JSON of each event up to [DONE]."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection
        self._response = connection.getresponse()
        self.status = self._response.status
        self.headers = {k.lower(): v for k, v in self._response.getheaders()}
        self.done = False  # [DONE] was seen

    def __iter__(self) -> Iterator[Any]:
        while line := self._response.readline():
            if not line.startswith(b"data: "):
                assert line == b"\n" or line.startswith(b": "), line
                continue
            if line == b"data: [DONE]\n":
                self.done = True
                assert self._response.read() == b"\n"
                return
            yield json.loads(line[6:])

    def close(self) -> None:
        """Hang up, wherever the answer is."""
        self._response.close()
        self._connection.close()

    def __enter__(self) -> Events:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Server:
    """`with Server(bundle, "--queue", 2) as server:` runs until the end of the block."""

    def __init__(self, bundle: Path, *options: object, key: str | None = None) -> None:
        self._words = [str(bundle), "--port", "0", *map(str, options)]
        self._key = key
        self.port = 0

    def __enter__(self) -> Server:
        command = [sys.executable, "-m", "runtime", "serve", *self._words]
        self._errors = tempfile.TemporaryFile("w+")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default"}
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=self._errors,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        match = re.search(r" at http://(?:127\.0\.0\.1|0\.0\.0\.0|\[::1\]):(\d+)$", self.line)
        if match is None:
            self.process.kill()
            self.__exit__()
            raise AssertionError(f"no URL in {self.line!r}; stderr: {self.errors}")
        self.port = int(match[1])
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.seek(0)
        self.errors = self._errors.read()  # stderr, once the block has ended
        self._errors.close()

    def connect(self, timeout: float = 20) -> socket.socket:
        """A raw connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout)

    def ask(
        self, method: str, path: str, body: bytes | None = None, timeout: float = 30, **headers: str
    ) -> Answer:
        """One request on a connection of its own; `_` in header names stands for `-`."""
        connection = self._request(method, path, body, timeout, headers)
        with contextlib.closing(connection):
            response = connection.getresponse()
            found = {k.lower(): v for k, v in response.getheaders()}
            return Answer(response.status, found, response.read())

    def get(self, path: str, **headers: str) -> Answer:
        """GET."""
        return self.ask("GET", path, None, 30, **headers)

    def complete(self, **fields: Any) -> Answer:
        """POST /v1/completions."""
        return self.ask("POST", "/v1/completions", json.dumps(fields).encode())

    def chat(self, **fields: Any) -> Answer:
        """POST /v1/chat/completions."""
        return self.ask("POST", "/v1/chat/completions", json.dumps(fields).encode())

    def stream(self, path: str = "/v1/completions", timeout: float = 30, **fields: Any) -> Events:
        """POST with `stream`; returns once the headers have come."""
        body = json.dumps({**fields, "stream": True}).encode()
        return Events(self._request("POST", path, body, timeout, {}))

    def send(self, body: Any, path: str = "/v1/completions") -> socket.socket:
        """A raw connection with a whole POST sent and nothing read."""
        data = json.dumps(body).encode()
        key = [] if self._key is None else [f"Authorization: Bearer {self._key}"]
        sock = self.connect()
        sock.sendall(post(path, data, *key) + data)
        return sock

    def slots(self) -> dict[str, Any]:
        """GET /slots."""
        return self.get("/slots").json()

    def busy(self) -> int:
        """Slots that are not idle, and sequences that wait for one."""
        found = self.slots()
        return sum(slot["phase"] != "idle" for slot in found["slots"]) + found["waiting"]

    def until(self, condition: Callable[[], bool], timeout: float = 10) -> None:
        """Wait for `condition`; fails after `timeout` seconds."""
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end, f"{condition} not within {timeout} s"
            time.sleep(0.01)

    def metric(self, line: str) -> float:
        """The value of a sample of /metrics, by its name and labels as they are written."""
        text = self.get("/metrics").body.decode()
        (found,) = re.findall(rf"^{re.escape(line)} (\S+)$", text, re.MULTILINE)
        return float(found)

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def wait(self, timeout: float = 20) -> int:
        """The exit code."""
        return self.process.wait(timeout)

    def _request(
        self, method: str, path: str, body: bytes | None, timeout: float, headers: dict[str, str]
    ) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if self._key is not None:
            sent.setdefault("Authorization", f"Bearer {self._key}")
        try:
            connection.request(method, path, body, sent)
        except OSError:
            connection.close()
            raise
        return connection


@contextlib.contextmanager
def running(bundle: Path) -> Iterator[Server]:
    """A server without a key, which must end well and without a word on stderr."""
    with Server(bundle, "--max-tokens", 1_000_000) as server:
        yield server
        server.signal()
        assert server.wait() == 0
    assert server.errors == ""


def post(path: str, data: bytes, *headers: str) -> bytes:
    """The head of a POST whose body is `data`."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(data)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


def read_answer(sock: socket.socket) -> Answer:
    """One whole answer from a raw connection."""
    response = http.client.HTTPResponse(sock)
    with contextlib.closing(response):
        response.begin()
        headers = {k.lower(): v for k, v in response.getheaders()}
        return Answer(response.status, headers, response.read())


def closed(sock: socket.socket) -> bool:
    """Whether the server has closed the connection, once it has sent the rest."""
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(65536):
            pass
    return True
