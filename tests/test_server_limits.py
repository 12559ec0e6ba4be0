"""What a client cannot do to the server: too much, too slowly, malformed, or by going away."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from server import LONG, Server, closed, post, read_answer, toy_bundle

pytestmark = pytest.mark.iree
BODY = 4000  # --max-body
PATH = "/v1/completions"
SMALL = json.dumps({"prompt": [1, 2], "max_tokens": 2}).encode()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy with tokenizer and chat template."""
    return toy_bundle(tmp_path_factory.mktemp("limits") / "toy")


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[Server]:
    """Three slots, a queue of two, and clients that must be quick."""
    options = ("--queue", 2, "--max-body", BODY, "--max-tokens", 1_000_000, "--max-prompt", 9,
               "--max-n", 4, "--client-timeout", 1)  # fmt: skip
    with Server(bundle, *options) as running:
        yield running
        running.until(lambda: running.busy() == 0)
        running.signal()
        assert running.wait() == 0
    assert running.errors == ""


# --- malformed and oversized ----------------------------------------------------------------------

MALFORMED = {
    "noise": b"\x00\xff\x80nonsense\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    "old version": b"GET /health HTTP/3.7\r\n\r\n",
    "no method": b" /health HTTP/1.1\r\n\r\n",
    "header name": b"GET /health HTTP/1.1\r\nHo st: a\r\n\r\n",
    "header value": b"GET /health HTTP/1.1\r\nHost: a\x00b\r\n\r\n",
    "length": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -4\r\n\r\n",
    "two lengths": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n"
    b"Content-Length: 5\r\n\r\nabcd",
    "length and chunks": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunk size": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "url": b"GET http://[::1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "url bytes": b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_malformed_http_is_a_400(server: Server, data: bytes) -> None:
    with server.connect() as sock:
        sock.sendall(data)
        assert "request" in read_answer(sock).error(400)["message"]
        assert closed(sock)


def test_heads_are_bounded(server: Server) -> None:
    for filler in (b"X-Filler: " + b"a" * 70_000, b"X: a\r\n" * 20_000, b"GET" * 40_000):
        with server.connect() as sock:
            with contextlib.suppress(OSError):
                sock.sendall(b"GET /health HTTP/1.1\r\n" + filler)
            answer = read_answer(sock)
            assert answer.status in (400, 431)  # the last is no header at all
            answer.error(answer.status)
            assert closed(sock)
    with server.connect() as sock:  # large, but fine
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 50_000 + b"\r\n\r\n")
        assert read_answer(sock).status == 200


def test_a_body_over_the_limit_is_refused_before_it_is_sent(server: Server) -> None:
    with server.connect() as sock:
        sock.sendall(post(PATH, bytes(BODY + 1), "Expect: 100-continue"))
        error = read_answer(sock).error(413)
        assert str(BODY) in error["message"] and error["message"].startswith("body")
    with server.connect() as sock:
        sock.sendall(post(PATH, bytes(0), "X: y").replace(b"Length: 0", b"Length: 9" + b"9" * 30))
        assert read_answer(sock).status in (400, 413)


def test_a_body_at_the_limit_is_read(server: Server) -> None:
    body = SMALL + b" " * (BODY - len(SMALL))
    assert server.ask("POST", PATH, body).status == 200
    server.ask("POST", PATH, body + b" ").error(413)
    server.ask("POST", PATH, body + b" " * 3_000_000).error(413)  # sent whole, and answered


def test_an_early_answer_resets_nothing_for_a_client_that_closes(server: Server) -> None:
    """The server closes once the body has come, not on what is still on its way."""
    with server.connect() as sock:
        sock.sendall(post(PATH, bytes(3 * BODY), "Connection: close"))
        for _ in range(3):
            time.sleep(0.05)
            sock.sendall(bytes(BODY))
        started = time.monotonic()
        read_answer(sock).error(413)
        assert closed(sock) and time.monotonic() - started < 1


def test_chunked_bodies_are_counted_as_they_come(server: Server) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with server.connect() as sock:
        pieces = [SMALL[i : i + 7] for i in range(0, len(SMALL), 7)]
        sock.sendall(head + b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n")
        assert read_answer(sock).status == 200
    with server.connect() as sock:
        sock.sendall(head + b"3e8\r\n" + bytes(1000) + b"\r\n")
        sock.sendall((b"3e8\r\n" + bytes(1000) + b"\r\n") * 4)
        read_answer(sock).error(413)  # though its end has not come
    with server.connect() as sock:  # endless, and nothing but framing
        with contextlib.suppress(OSError):
            sock.sendall(head + b"1;" + b"x" * 3_000_000)
        assert read_answer(sock).error(431)
        assert closed(sock)


def test_an_endless_body_is_cut_off(server: Server) -> None:
    started = time.monotonic()
    with server.connect() as sock:
        sock.sendall(post(PATH, bytes(0)).replace(b"Length: 0", b"Length: 99999999999"))
        with pytest.raises(OSError):
            while time.monotonic() < started + 15:
                sock.sendall(bytes(100_000))
                time.sleep(0.001)
    assert time.monotonic() < started + 10


def test_compressed_bodies_are_refused(server: Server) -> None:
    error = server.ask("POST", PATH, SMALL, Content_Encoding="gzip").error(415)
    assert "gzip" in error["message"]


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"prompt": [1] * 10}, "prompt"), ({"prompt": "a" * 10}, "prompt"),
        ({"prompt": [1], "n": 5}, "n"), ({"prompt": [1], "max_tokens": 1_000_001}, "max_tokens"),
    ],
)  # fmt: skip
def test_limits_of_the_command_line(server: Server, fields: dict[str, object], word: str) -> None:
    assert server.complete(**fields).error(400)["param"] == word


# --- slow -----------------------------------------------------------------------------------------


def test_slow_heads_and_bodies_time_out(server: Server) -> None:
    with server.connect() as silent, server.connect() as head, server.connect() as body:
        started = time.monotonic()
        head.sendall(b"GET /health HTTP/1.1\r\nHost: loc")
        body.sendall(post(PATH, SMALL) + SMALL[:-1])
        assert "head" in read_answer(head).error(408)["message"]
        assert "body" in read_answer(body).error(408)["message"]
        assert 0.8 < time.monotonic() - started < 4
        assert closed(silent) and closed(head) and closed(body)
        assert 0.8 < time.monotonic() - started < 8


def test_a_head_that_drips_times_out(server: Server) -> None:
    started = time.monotonic()
    with server.connect() as sock, pytest.raises(OSError):
        sock.sendall(b"GET /health HTTP/1.1\r\n")
        while time.monotonic() < started + 10:
            sock.sendall(b"X: y\r\n")
            time.sleep(0.05)
    assert time.monotonic() < started + 5


def test_a_slow_reader_holds_no_one_up_and_is_dropped(server: Server) -> None:
    tokens = 30_000
    asked = {"prompt": [1, 2], "max_tokens": tokens, "ignore_eos": True, "stream": True,
             "logprobs": 2}  # fmt: skip
    body = json.dumps(asked).encode()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(20)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(post(PATH, body) + body)
        server.until(lambda: server.busy() == 1)
        for _ in range(5):  # others are served while nothing is read
            started = time.monotonic()
            assert server.complete(prompt=[1], max_tokens=3).status == 200
            assert time.monotonic() - started < 2
        before = server.metric("scanwright_disconnected_requests_total")
        server.until(
            lambda: server.metric("scanwright_disconnected_requests_total") == before + 1, 15
        )
        assert server.busy() == 0
        assert closed(sock)


def test_a_reader_that_is_only_slow_gets_everything(server: Server) -> None:
    asked = {"prompt": [1, 2], "max_tokens": 6_000, "ignore_eos": True, "temperature": 0}
    body = json.dumps({**asked, "stream": True}).encode()
    want = server.complete(**asked).json()["choices"][0]["text"]
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        sock.settimeout(20)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(post(PATH, body) + body)
        time.sleep(0.5)
        text = []
        for line in read_answer(sock).body.split(b"\n\n"):
            if line and line != b"data: [DONE]":
                text.append(json.loads(line[6:])["choices"][0]["text"])
    assert "".join(text) == want


# --- gone -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("abort", [False, True])
def test_a_client_that_goes_away_frees_its_slots(
    server: Server, stream: bool, n: int, abort: bool
) -> None:
    before = server.slots()
    gone = server.metric("scanwright_disconnected_requests_total")
    sock = server.send({**LONG, "stream": stream, "n": n})
    server.until(lambda: server.busy() == n)
    if abort:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    sock.close()
    server.until(lambda: server.busy() == 0, 2)
    cancelled = before["finished"]["cancelled"] + n
    server.until(lambda: server.slots()["finished"]["cancelled"] == cancelled, 2)
    server.until(lambda: server.metric("scanwright_disconnected_requests_total") == gone + 1, 2)


def test_a_slot_is_free_a_step_after_its_client_went(bundle: Path) -> None:
    """Two clients; when one goes, the other gets only a few tokens until its slot is idle."""
    with Server(bundle, "--max-tokens", 1_000_000) as server:
        with server.stream(**LONG) as stays, server.stream(**LONG) as goes:
            events = iter(stays)
            assert next(iter(goes)) and next(events)
            steps = server.slots()["steps"]
            goes.close()
            while True:
                found = server.slots()
                if sum(slot["phase"] != "idle" for slot in found["slots"]) == 1:
                    break
            # A step takes a fraction of the time of a question; two were asked at least.
            assert found["steps"] - steps < 100
            assert next(events)
        server.until(lambda: server.busy() == 0)


def test_a_client_that_goes_while_it_waits(server: Server) -> None:
    running = [server.send(LONG) for _ in range(3)]
    server.until(lambda: server.busy() == 3)
    waiting = server.send(LONG)
    server.until(lambda: server.slots()["waiting"] == 1)
    waiting.close()
    server.until(lambda: server.slots()["waiting"] == 0, 2)
    for sock in running:
        sock.close()


def test_a_client_that_goes_before_its_body_ends(server: Server) -> None:
    before = server.slots()["submitted"]
    with server.connect() as sock:
        sock.sendall(post(PATH, SMALL) + SMALL[:-3])
    time.sleep(0.1)
    assert server.slots()["submitted"] == before
    name = f'scanwright_http_requests_total{{endpoint="{PATH}",status="disconnected"}}'
    assert server.metric(name) >= 1


# --- full, late -----------------------------------------------------------------------------------


def test_a_full_queue_is_a_503(server: Server) -> None:
    before = server.metric('scanwright_rejected_requests_total{reason="queue_full"}')
    running = [server.send(LONG) for _ in range(5)]
    server.until(lambda: server.slots()["waiting"] == 2)
    answer = server.complete(prompt=[1])
    assert answer.error(503)["code"] == "queue_full" and answer.headers["retry-after"] == "1"
    running.pop().close()
    server.until(lambda: server.slots()["waiting"] == 1)
    server.complete(prompt=[1], n=2).error(503)  # room for one of two: neither is left behind
    server.until(lambda: server.slots()["waiting"] == 1)
    assert server.metric('scanwright_rejected_requests_total{reason="queue_full"}') == before + 2
    for sock in running:
        sock.close()


def test_a_request_that_takes_too_long_is_a_504(bundle: Path) -> None:
    with Server(bundle, "--request-timeout", 0.5, "--max-tokens", 1_000_000) as server:
        error = server.complete(**LONG).error(504)
        assert error["code"] == "timeout" and "0.5 s" in error["message"]
        with server.stream(**LONG) as events:
            *_, last = list(events)
            assert last["error"]["code"] == "timeout" and not events.done
        assert server.busy() == 0
        assert server.slots()["finished"]["deadline"] == 2


# --- connections ----------------------------------------------------------------------------------


def test_one_connection_serves_many_requests(server: Server) -> None:
    with server.connect() as sock:
        for _ in range(3):
            sock.sendall(post(PATH, SMALL) + SMALL)
            assert read_answer(sock).status == 200
            sock.sendall(post(PATH, b"{") + b"{")
            read_answer(sock).error(400)


def test_answers_are_sent_at_once(server: Server) -> None:
    """Small packets that wait for the client's acknowledgement of the last take 40 ms each."""
    times = []
    with server.connect() as sock:
        for _ in range(25):
            started = time.monotonic()
            sock.sendall(post(PATH, SMALL) + SMALL)
            assert read_answer(sock).status == 200
            times.append(time.monotonic() - started)
    assert sorted(times)[len(times) // 2] < 0.025, times


def test_a_request_before_the_answer_closes_the_connection(server: Server) -> None:
    with server.connect() as sock:
        sock.sendall(post(PATH, SMALL) + SMALL + post(PATH, SMALL) + SMALL + b"noise")
        received = b"".join(iter(lambda: sock.recv(65536), b""))
    assert re.findall(rb"HTTP/1\.1 (\d+) ", received) == [b"200"]
    assert json.loads(received.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 2
    sock = server.send(LONG)
    server.until(lambda: server.busy() == 1)
    sock.sendall(post(PATH, bytes(3000)) + bytes(2000))
    time.sleep(0.05)
    assert server.busy() == 1
    sock.close()  # is seen all the same
    server.until(lambda: server.busy() == 0, 2)


def test_max_chunk_leaves_larger_chunks_out(bundle: Path) -> None:
    """A prompt of 16 tokens: two steps of 8, or four of 4; then one token, which needs no step."""
    for words, steps in (([], 2), (["--max-chunk", 7], 4)):
        with Server(bundle, *words) as server:
            assert server.complete(prompt=[1] * 16, max_tokens=1, temperature=0).status == 200
            time.sleep(0.05)  # a step is counted at its end
            assert server.slots()["steps"] == steps


def test_priorities_are_for_servers_that_allow_them(bundle: Path) -> None:
    """The fourth request takes the slot of the last of three, which then ends all the same."""
    short = {"prompt": [1, 2], "max_tokens": 3, "ignore_eos": True, "priority": -1}
    with Server(bundle) as server:
        refused = server.complete(**short)
        assert refused.status == 400 and refused.json()["error"]["param"] == "priority"
    with Server(bundle, "--priorities", "--max-tokens", 1_000_000) as server:
        streams = [server.stream(prompt=[1, 2], max_tokens=3000, ignore_eos=True) for _ in range(3)]
        assert server.complete(**short).status == 200
        assert server.slots()["preempted"] == 1
        for events in streams:
            with events:
                assert len(list(events)) > 0 and events.done
