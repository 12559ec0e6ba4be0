"""Servers whose answers do not end, unfold, or hardly come: one line, in bounded memory and time.

test_pull.py has answers that are wrong, test_hub_attacks.py what a hub may lie about.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from attack_answers import KINDS

HERE = Path(__file__).resolve().parent
MIB = 200  # answers of 32 MiB and their copies; one that is read whole would take a gigabyte
SENT = 1 << 30  # bytes that the server gives up after
BOMB = gzip.compress(bytes(SENT), 1)
MODES = ("endless", "length", "chunks", "bomb", "headers")


class _Hostile(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self._begin(200, {"Content-Length": "100", "ETag": '"x"'})

    def do_GET(self) -> None:
        mode = next((m for m in (*MODES, "trickle") if m in self.path), "absent")
        self.close_connection = True
        try:
            getattr(self, f"_{mode}")()
        except OSError:
            return

    def _begin(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Connection": "close", **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def _absent(self) -> None:
        self._begin(404, {"Content-Length": "0"})

    def _pour(self, before: bytes = b"", behind: bytes = b"") -> None:
        piece = before + b'"' + b"x" * 65_535 + behind
        for _ in range(SENT >> 16):
            self.wfile.write(piece)

    def _endless(self) -> None:
        self._begin(200, {})
        self._pour()

    def _length(self) -> None:
        self._begin(200, {"Content-Length": str(1 << 50)})
        self._pour()

    def _chunks(self) -> None:
        self._begin(200, {"Transfer-Encoding": "chunked"})
        self._pour(b"10000\r\n", b"\r\n")

    def _bomb(self) -> None:
        self._begin(200, {"Content-Length": str(len(BOMB)), "Content-Encoding": "gzip"})
        self.wfile.write(BOMB)

    def _headers(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\n")
        for number in range(SENT >> 10):
            self.wfile.write(b"X-%d: %s\r\n" % (number, b"x" * 1000))

    def _trickle(self) -> None:
        self._begin(200, {"Content-Length": "100000"})
        for _ in range(1000):
            self.wfile.write(b" ")
            self.wfile.flush()
            time.sleep(0.05)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hostile)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("kind", KINDS)
def test_no_answer_takes_more_than_its_bound(kind: str, url: str) -> None:
    modes = [*MODES, *(["trickle"] if kind in ("web", "registry") else [])]
    done = subprocess.run(
        [sys.executable, HERE / "attack_answers.py", kind, url, *modes],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    ends = [json.loads(line) for line in done.stdout.splitlines()]
    assert [end["mode"] for end in ends] == modes, done.stderr[-2000:]
    for end in ends:
        (line,) = end["error"]
        assert line.startswith("error: ") and line.isprintable() and len(line) < 600, end
        assert end["mib"] < MIB and not end["left"], end
