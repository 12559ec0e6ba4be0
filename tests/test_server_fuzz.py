"""Thirty thousand broken requests to the real server: no 500, no hung slot, nothing forgotten.

Every stream of requests follows from SEED and the number of its client, so a failure happens again.
"""

from __future__ import annotations

import http.client
import json
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from body_mutations import GOOD, NAMES, ODD, changed, places
from server import Answer, Server, read_answer, toy_bundle

pytestmark = [pytest.mark.iree, pytest.mark.slow]
SEED, CLIENTS, EACH = 3, 4, 8000
PATHS = ("/v1/completions", "/v1/chat/completions")
REFUSALS = {400, 403, 404, 405, 408, 411, 413, 415, 431, 501, 505}
KNOWN = {"prompt": [1, 2, 3], "max_tokens": 12, "temperature": 0, "return_token_ids": True,
         "ignore_eos": True}  # fmt: skip
NUMBERS = ("1e999", "-1e999", "NaN", "-Infinity", "-0", "0.1e-999", "9" * 400, "-" + "9" * 5000,
           "1" + "0" * 60_000, "0x10", "01", "1_0", "1e", ".5")  # fmt: skip
BYTES = (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x00", b"\xef\xbb\xbf",
         b"\\ud800", b"\\u0000", b"\\x", b"\x80", b"\n", b'"', b"\\")  # fmt: skip
TYPES = ("text/plain", "application/json; charset=utf-16", "multipart/form-data; boundary=x", "",
         "application/x-www-form-urlencoded", "application/json\t", "x" * 3000)  # fmt: skip
HEADERS = (
    b"Content-Encoding: gzip", b"Accept: " + b"a" * 60_000, b"X: " + b"a" * 70_000,
    b"Origin: http://evil.example", b"Origin: \xff", b"Expect: 100-continue", b"Expect: magic",
    b"Authorization: Bearer \xff\xfe", b"Connection: close", b"Connection: Upgrade, HTTP2-Settings",
    b"Upgrade: websocket", b"Upgrade: h2c", b"Content-Length: 3", b"Content-Length: +3",
    b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: xchunked", b"Te: trailers",
    b"X-Forwarded-For: ::1", b"Range: bytes=0-1", b": none", b"Bad Name: 1", b" folded",
    b"A: \x01\x02", b"Cookie: " + b"a=b;" * 5000, *[b"X-%d: y" % i for i in range(3)],
)  # fmt: skip


# --- what is sent -----------------------------------------------------------------------------


def fields(rng: random.Random) -> Any:
    """A good body with up to three changes in its fields."""
    value: Any = rng.choice(GOOD)
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        odd = rng.choice([*ODD, rng.uniform(-3, 3), rng.randint(-(2**40), 2**40)])
        if isinstance(value, dict) and rng.random() < 0.5:
            value = {**value, rng.choice(NAMES): odd}
        else:
            value = changed(value, rng.choice(places(value)), odd)
    return value


def spliced(rng: random.Random, data: bytes) -> bytes:
    """With up to three runs of bytes removed, put in, repeated or flipped."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randint(0, len(out))
        end = min(len(out), at + rng.choice((0, 1, 2, rng.randint(0, 60))))
        new = rng.choice(
            (b"", rng.choice(BYTES), rng.randbytes(rng.randint(1, 8)), out[at:end] * 2)
        )
        out[at:end] = new
    return bytes(out)


def in_text(rng: random.Random, new: str, value: Any) -> bytes:
    """The JSON of `value` with one place taken by `new`, which need not be JSON."""
    mark = "here-it-goes"
    text = json.dumps(changed(value, rng.choice(places(value)), mark))
    return text.replace(f'"{mark}"', new).encode("utf-8", "surrogateescape")


def nested(rng: random.Random) -> str:
    """Deep lists and objects, not always closed."""
    depth = rng.choice((3, 90, 990, 1010, 5000, 50_000))
    opening, closing = rng.choice((("[", "]"), ('{"a":', "}"), ("[[", "]]"), ('[{"":', "}]")))
    return opening * depth + "1" + closing * rng.choice((depth, depth, depth - 1, 0))


def body(rng: random.Random) -> bytes:
    """One body: most of them nearly good, so that they get past the first check."""
    kind = rng.random()
    value = fields(rng)
    if kind < 0.5:
        return json.dumps(value).encode()
    if kind < 0.75:
        return spliced(rng, json.dumps(value).encode())
    if kind < 0.83:
        return in_text(rng, rng.choice(NUMBERS), rng.choice(GOOD))
    if kind < 0.87:
        return in_text(rng, nested(rng), rng.choice(GOOD))
    if kind < 0.91:
        raw = rng.choice(BYTES).decode("utf-8", "surrogateescape")
        return in_text(rng, f'"a{raw}b"', rng.choice(GOOD))
    if kind < 0.94:
        return json.dumps(value).encode(rng.choice(("utf-16", "utf-32", "utf-8-sig")))
    if kind < 0.97:
        return nested(rng).encode()
    return rng.randbytes(rng.choice((0, 1, 7, 300, 5000)))


def chunks(rng: random.Random, data: bytes) -> bytes:
    """The chunked form of a body, sometimes wrong."""
    out, at = [], 0
    while at < len(data):
        piece = data[at : at + rng.choice((1, 7, 100, 4096))] if len(out) < 20 else data[at:]
        at += len(piece)
        size = b"%x" % len(piece)
        if rng.random() < 0.02:
            size = rng.choice((b"", b"-1", b"g", b"0x1", b"f" * 30, b"00000001", size + b";a=b"))
        out.append(size + b"\r\n" + piece + rng.choice((b"\r\n",) * 30 + (b"", b"\n")))
    return b"".join(out) + b"0\r\n" + rng.choice((b"", b"", b"X: y\r\n", b"bad\r\n")) + b"\r\n"


def request(rng: random.Random) -> tuple[bytes, bool]:
    """(a whole request, whether its client goes away instead of reading the answer)."""
    data = body(rng)
    path = PATHS[(b'"messages"' in data) ^ (rng.random() < 0.1)]
    lines = [f"POST {path} HTTP/1.1".encode(), b"Host: localhost"]
    if rng.random() < 0.03:
        lines[0] = rng.choice((b"PUT ", b"POST  ", b"post ", b"GET ", b"BREW ")) + lines[0][5:]
    if rng.random() < 0.02:
        lines[1] = rng.choice((b"Host: ", b"Host: evil", b"Host: [::1", b"Host: a@b:x", b"Y: z"))
    if rng.random() < 0.1:
        lines.append(f"Content-Type: {rng.choice(TYPES)}".encode())
    if rng.random() < 0.1:
        lines += rng.choices(HEADERS, k=rng.choice((1, 1, 2, 400)))
    if rng.random() < 0.15:
        lines.append(b"Transfer-Encoding: chunked")
        data = chunks(rng, data)
    else:
        lines.append(b"Content-Length: %d" % len(data))
    goes = rng.random() < 0.06
    whole = b"\r\n".join([*lines, b"", data])
    return (whole[: rng.randint(1, len(whole))] if goes and rng.random() < 0.8 else whole), goes


# --- the answers ------------------------------------------------------------------------------


class Wire:
    """A connection that is kept for as long as the server keeps it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._sock: socket.socket | None = None
        self.again = 0  # requests sent a second time

    def ask(self, data: bytes, goes: bool) -> Answer | None:
        """The answer to `data`; None for a client that goes away.

        A kept connection may end when what was wrong came after the answer before; then, and only
        then, `data` is sent once more.
        """
        if self._sock is not None:
            try:
                return self._ask(self._sock, data, goes)
            except (http.client.RemoteDisconnected, ConnectionResetError):
                self.again += 1
        self._sock = self._server.connect(20)
        return self._ask(self._sock, data, goes)

    def _ask(self, sock: socket.socket, data: bytes, goes: bool) -> Answer | None:
        try:
            try:
                sock.sendall(data)
                if goes:
                    sock.setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", len(data) % 2, 0)
                    )
            except (BrokenPipeError, ConnectionResetError):
                pass  # refused before all was sent; the answer may be there
            answer = None if goes else read_answer(sock)
        except BaseException:
            self.close()
            raise
        if answer is None or answer.headers.get("connection") == "close":
            self.close()
        return answer

    def close(self) -> None:
        """Hang up."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None


def check(answer: Answer) -> None:
    """Assert that an answer is one: an object, a stream with its end, or an error that names what
    is wrong."""
    if answer.status != 200:
        code = answer.json()["error"]["code"] if answer.status == 503 else None
        assert answer.status in REFUSALS or code == "queue_full", answer
        error = answer.error(answer.status)
        assert error["message"] and "\n" not in error["message"]
        if answer.status == 400:
            at, _, _ = error["message"].partition(":")
            assert error["param"] in (at, at.partition("[")[0], at.partition(".")[0]) or (
                error["param"] is None and at in ("body", "request")
            ), error
        return
    if answer.headers["content-type"].startswith("text/event-stream"):
        *events, last, end = answer.body.split(b"\n\n")
        assert last == b"data: [DONE]" and end == b"", answer.body[-300:]
        found = [strict(event[6:]) for event in events if not event.startswith(b":")]
        assert all("error" not in event for event in found)
    else:
        found = strict(answer.body)
        assert all(c["finish_reason"] in ("stop", "length") for c in found["choices"])


def strict(data: bytes) -> Any:
    """JSON without the numbers that JSON does not have."""

    def no(word: str) -> None:
        raise AssertionError(f"{word} in {data[:300]!r}")

    return json.loads(data, parse_constant=no)


def client(server: Server, number: int, count: int, seen: Counter[str],
           failures: list[str]) -> None:  # fmt: skip
    """`count` requests one after the other."""
    rng, wire = random.Random(f"{SEED}-{number}"), Wire(server)
    for place in range(count):
        data, goes = request(rng)
        began = time.monotonic()
        try:
            answer = wire.ask(data, goes)
            if answer is not None:
                check(answer)
        except Exception as error:
            head, _, rest = data.partition(b"\r\n\r\n")
            failures.append(
                f"seed {SEED}, client {number}, request {place}: {type(error).__name__}: {error}\n"
                f"  head {head[:800]!r}\n  body of {len(rest)} {rest[:2000]!r}"
            )
            if len(failures) > 20:
                break
        else:
            seen[f"{answer.status}" if answer else "gone"] += 1
        took = int(1000 * (time.monotonic() - began))
        if took > seen["slowest, ms"]:
            seen["slowest, ms"] = took
            print(f"{took} ms: client {number}, request {place}: {data[:120]!r}...{data[-60:]!r}")
    seen["sent again"] = wire.again
    wire.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The toy with tokenizer and chat template, which must end well and say nothing."""
    bundle = toy_bundle(tmp_path_factory.mktemp("fuzz") / "toy")
    with Server(bundle, "--max-tokens", 40, "--max-body", 100_000) as running:
        yield running
        running.signal()
        assert running.wait() == 0
    assert running.errors == ""


def together(work: Callable[[int], None]) -> None:
    """Run `work` for every client at once."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_no_body_breaks_the_server(server: Server) -> None:
    known = server.complete(**KNOWN).json()["choices"]
    assert len(known[0]["token_ids"]) == 12
    seen, failures = [Counter() for _ in range(CLIENTS)], []
    together(lambda number: client(server, number, EACH, seen[number], failures))
    total = sum(seen, Counter())
    print(dict(total), "slowest", max(each["slowest, ms"] for each in seen), "ms")
    assert not failures, "\n".join([f"{len(failures)} failures", *failures[:5]])
    assert sum(count for word, count in total.items() if word.isdigit()) >= 20_000
    assert total["sent again"] < 50, total
    for word, least in {"200": 3000, "400": 12_000, "gone": 500, "413": 10, "431": 10}.items():
        assert total[word] >= least, total  # else this tests something else
    server.until(lambda: server.busy() == 0, 5)
    assert server.slots()["finished"]["error"] == 0
    assert server.complete(**KNOWN).json()["choices"] == known
