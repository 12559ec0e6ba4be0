"""The served bundle from the outside: endpoints, keys, metrics, drain. A real process each time."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server import LONG, Answer, Server, post, read_answer, running, toy_bundle

from runtime import cli

pytestmark = pytest.mark.iree


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy with tokenizer and chat template."""
    return toy_bundle(tmp_path_factory.mktemp("server") / "toy")


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[Server]:
    """One server for the tests that leave it as it was."""
    with running(bundle) as found:
        yield found


def test_it_says_where_it_is(server: Server) -> None:
    assert server.line == f"serving toy with 3 slots at http://127.0.0.1:{server.port}\n"


def test_models_health_and_readiness(server: Server) -> None:
    found = server.get("/v1/models").json()
    assert found["object"] == "list" and [m["id"] for m in found["data"]] == ["toy"]
    assert server.get("/v1/models/toy").json() == found["data"][0]
    error = server.get("/v1/models/a/b").error(404)
    assert error["code"] == "model_not_found" and "'toy'" in error["message"]
    assert server.get("/health").json() == {"status": "ok"}
    assert server.get("/ready").json() == {"status": "ready"}
    assert server.ask("HEAD", "/ready").status == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "word"),
    [
        ("GET", "/", 200, ""), ("GET", "/v1", 404, "/v1"), ("GET", "/v1/models/", 404, "model"),
        ("GET", "/v1/completions", 405, "POST"), ("DELETE", "/v1/chat/completions", 405, "POST"),
        ("POST", "/health", 405, "GET"), ("OPTIONS", "/v1/completions", 405, "POST"),
        ("GET", "/../../etc/passwd", 404, "etc"), ("GET", "/%00%ff", 404, "path"),
        ("POST", "/v1/embeddings", 404, "embeddings"),
    ],
)  # fmt: skip
def test_paths_and_methods(server: Server, method: str, path: str, status: int, word: str) -> None:
    answer = server.ask(method, path)
    if status == 200:
        assert answer.status == 200
        return
    assert word in answer.error(status)["message"]
    assert status != 405 or word in answer.headers["allow"]


def test_a_seed_gives_what_the_command_line_gives(
    server: Server, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--prompt", "abé", "--max-tokens", "40", "--ignore-eos", "--temperature", "3",
             "--seed", "4", "--json"]  # fmt: skip
    assert cli.main(["generate", str(bundle), *words]) == 0
    want = json.loads(capsys.readouterr().out)
    asked = {"prompt": "abé", "max_tokens": 40, "ignore_eos": True, "temperature": 3, "seed": 4}
    found = server.complete(**asked, return_token_ids=True).json()
    (choice,) = found["choices"]
    assert (choice["text"], choice["token_ids"]) == (want["text"], want["tokens"])
    assert choice["finish_reason"] == "length" and found["model"] == "toy"
    assert found["usage"] == {
        "prompt_tokens": 4, "completion_tokens": 40, "total_tokens": 44,
    }  # fmt: skip
    stop = want["text"][6:9]
    (choice,) = server.complete(**asked, stop=stop).json()["choices"]
    assert choice["text"] == want["text"][: want["text"].index(stop)]
    assert choice["finish_reason"] == "stop"
    with server.stream(**asked) as events:
        assert "".join(event["choices"][0]["text"] for event in events) == want["text"]


@pytest.mark.parametrize("n", [1, 5])
def test_a_stream_is_the_whole_answer_in_pieces(server: Server, n: int) -> None:
    asked = {"prompt": ["ab", "c"], "max_tokens": 12, "n": n, "seed": 9, "temperature": 2}
    whole = server.complete(**asked).json()
    with server.stream(**asked, stream_options={"include_usage": True}) as events:
        assert events.status == 200
        assert events.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert events.headers["cache-control"] == "no-cache"
        assert events.headers["x-accel-buffering"] == "no"
        *chunks, last = list(events)
        assert events.done
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert {chunk["id"] for chunk in chunks} == {last["id"]}
    texts, reasons = {}, {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert choice["index"] not in reasons
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        if choice["finish_reason"]:
            reasons[choice["index"]] = choice["finish_reason"]
    wanted = {c["index"]: (c["text"], c["finish_reason"]) for c in whole["choices"]}
    assert list(wanted) == list(range(2 * n))
    assert {i: (texts[i], reasons[i]) for i in texts} == wanted
    assert n == 1 or len(set(wanted.values())) > 2  # every choice has its own seed


def test_chat(server: Server) -> None:
    messages = [{"role": "user", "content": "abc"}]
    asked = {"messages": messages, "max_tokens": 9, "temperature": 0, "ignore_eos": True}
    whole = server.chat(**asked).json()
    plain = server.complete(prompt="abck", max_tokens=9, temperature=0, ignore_eos=True).json()
    (choice,) = whole["choices"]
    assert whole["object"] == "chat.completion"
    assert choice["message"]["content"] == plain["choices"][0]["text"]
    with server.stream("/v1/chat/completions", **asked) as events:
        deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0]["role"] == "assistant"
    text = "".join(delta.get("content") or "" for delta in deltas)
    assert text == choice["message"]["content"]


def test_a_model_without_a_template_has_no_chat(tmp_path: Path) -> None:
    with Server(toy_bundle(tmp_path / "toy", chat=False)) as plain:
        error = plain.chat(messages=[{"role": "user", "content": "a"}]).error(400)
        assert "chat template" in error["message"]
        assert plain.slots()["chat"] is False


def test_concurrent_streams_do_not_mix(server: Server) -> None:
    def asked(place: int) -> dict[str, Any]:
        return {"prompt": [1 + place % 15] * (1 + place), "max_tokens": 30, "temperature": 2,
                "seed": place, "ignore_eos": True}  # fmt: skip

    alone = [server.complete(**asked(i)).json()["choices"][0]["text"] for i in range(16)]
    found: dict[int, str] = {}

    def client(place: int) -> None:
        with server.stream(**asked(place)) as events:
            found[place] = "".join(event["choices"][0]["text"] for event in events)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(16)] == alone and len(set(alone)) > 8


def test_bad_requests_name_the_field(server: Server) -> None:
    cases = {
        "body": b"{", "prompt": b"{}", "max_tokens": b'{"prompt":"a","max_tokens":-1}',
        "n": b'{"prompt":"a","n":0}', "temperature": b'{"prompt":"a","temperature":"x"}',
    }  # fmt: skip
    for word, body in cases.items():
        error = server.ask("POST", "/v1/completions", body).error(400)
        assert error["message"].startswith(word), error
    before = server.slots()["submitted"]
    server.complete(prompt=[99]).error(400)
    server.complete(model="other", prompt="a").error(404)
    assert server.slots()["submitted"] == before


def test_slots_show_what_runs(server: Server) -> None:
    with server.stream(**LONG) as events:
        assert next(iter(events))["choices"]
        found = server.slots()
        (slot,) = [slot for slot in found["slots"] if slot["phase"] != "idle"]
        assert slot["phase"] == "decode" and slot["prompt_tokens"] == 3
        assert slot["position"] >= 3 and slot["generated"] >= 1
        assert [s["index"] for s in found["slots"]] == [0, 1, 2]
        assert found["model"] == "toy" and found["state_bytes"] == 3 * 96
    server.until(lambda: server.busy() == 0)


def test_metrics(bundle: Path) -> None:
    with Server(bundle) as fresh:
        asked = {"prompt": [1, 2, 3], "ignore_eos": True}
        assert fresh.complete(**asked, max_tokens=10, n=2).status == 200
        with fresh.stream(**asked, max_tokens=5) as events:
            assert len(list(events)) > 1
        fresh.complete(**asked, n=0).error(400)
        answer = fresh.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=")
        found = samples(answer)
        assert all(name.startswith("scanwright_") for name, _ in found)
        assert found["scanwright_prompt_tokens_total", ()] == 9
        assert found["scanwright_generated_tokens_total", ()] == 25
        assert found["scanwright_submitted_sequences_total", ()] == 3
        assert found["scanwright_finished_sequences_total", ("length",)] == 3
        assert found["scanwright_time_to_first_token_seconds_count", ()] == 3
        assert found["scanwright_inter_token_seconds_count", ()] == 22
        assert 0 < found["scanwright_time_to_first_token_seconds_sum", ()] < 5
        assert found["scanwright_request_seconds_count", ("/v1/completions",)] == 3
        assert found["scanwright_http_requests_total", ("/v1/completions", "200")] == 2
        assert found["scanwright_http_requests_total", ("/v1/completions", "400")] == 1
        assert found["scanwright_slots", ("idle",)] == 3
        assert found["scanwright_queue_requests", ()] == 0
        assert found["scanwright_state_bytes", ()] == 3 * 96
        assert found["scanwright_process_resident_memory_bytes", ()] > 1e6
        other = fresh.get("/metrics", Accept="application/openmetrics-text; version=1.0.0")
        assert other.headers["content-type"].startswith("application/openmetrics-text")
        assert other.body.endswith(b"# EOF\n")


def samples(answer: Answer) -> dict[tuple[str, tuple[str, ...]], float]:
    """Value by (name, label values)."""
    families = text_string_to_metric_families(answer.body.decode())
    return {
        (sample.name, tuple(v for k, v in sample.labels.items() if k != "le")): sample.value
        for family in families
        for sample in family.samples
    }


# --- who may ask ----------------------------------------------------------------------------------


def test_keys(bundle: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first-key\n\n  second-key  \n")
    with Server(bundle, "--api-key-file", keys, "--host", "0.0.0.0") as guarded:
        for path in ("/", "/health", "/ready"):
            assert guarded.get(path).status == 200
        for path in ("/v1/models", "/metrics", "/slots", "/nothing", "/v1/models/toy", "//", "/."):
            error = guarded.get(path).error(401)
            assert error["code"] == "invalid_api_key"
        wrong = ["Bearer first", "Bearer first-keyy", "Bearer ", "first-key", "Basic first-key",
                 "Bearer first-key second-key", "Bearer  \xff"]  # fmt: skip
        for value in wrong:
            answer = guarded.get("/v1/models", Authorization=value)
            answer.error(401)
            assert answer.headers["www-authenticate"] == "Bearer"
        guarded.complete(prompt="a").error(401)
        for value in ("Bearer first-key", "bearer second-key"):
            assert guarded.get("/v1/models", Authorization=value).status == 200
            assert guarded.get("/metrics", Authorization=value).status == 200
            assert guarded.get("/slots", Authorization=value).json()["submitted"] == 0


@pytest.mark.parametrize(
    ("text", "word"),
    [(None, "No such file"), ("\n \n", "no key"), ("a b\n", "line 1"), ("é\n", "not ASCII")],
)
def test_a_bad_key_file_is_refused(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, word: str
) -> None:
    keys = tmp_path / "keys"
    if text is not None:
        keys.write_text(text, "utf-8")
    line = refused(capsys, bundle, "--api-key-file", keys)
    assert str(keys) in line and word in line


def refused(capsys: pytest.CaptureFixture[str], bundle: Path, *words: object, code: int = 1) -> str:
    """The one line of a serve that must not start."""
    assert cli.main(["serve", str(bundle), "--port", "0", *map(str, words)]) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    return err


def test_other_machines_need_a_key(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for host in ("0.0.0.0", "::"):
        line = refused(capsys, bundle, "--host", host)
        assert "--api-key-file" in line and "--insecure" in line and host in line
    with Server(bundle, "--host", "0.0.0.0", "--insecure") as open_to_all:
        assert open_to_all.get("/v1/models", Host="some.name").status == 200
        origin = open_to_all.get("/v1/models", Origin="http://evil.example")
        assert "origin" in origin.error(403)["message"]


def test_wrong_options(bundle: Path, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert "host" in refused(capsys, bundle, "--host", "no.such.host.invalid")
    assert "free port" in refused(capsys, bundle, "--port", server.port)
    assert "4 or more" in refused(capsys, bundle, "--max-chunk", 3)
    for words in (["--port", "70000"], ["--queue", "-1"], ["--max-body", "x"],
                  ["--request-timeout", "0"], ["--drain-timeout", "nan"]):  # fmt: skip
        assert words[0] in refused(capsys, bundle, *words, code=2)


def test_no_other_web_page_can_use_it(server: Server) -> None:
    for host in (
        "evil.example",
        f"evil.example:{server.port}",
        "127.0.0.1.evil.example",
        "10.0.0.1",
    ):
        assert "host" in server.get("/v1/models", Host=host).error(403)["message"]
    for host in (f"localhost:{server.port}", "127.0.0.1", f"[::1]:{server.port}", "LOCALHOST"):
        assert server.get("/v1/models", Host=host).status == 200
    own = f"127.0.0.1:{server.port}"
    assert server.get("/v1/models", Origin=f"http://{own}").status == 200
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1", "http://["):
        assert "origin" in server.get("/v1/models", Origin=origin).error(403)["message"]


# --- the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_drain_finishes_what_runs_and_waits(bundle: Path, number: signal.Signals) -> None:
    asked = {"prompt": [1, 2, 3], "ignore_eos": True, "max_tokens": 6000, "temperature": 0}
    with Server(bundle, "--max-tokens", 10_000) as server:
        running = [server.stream(**asked) for _ in range(3)]
        waiting = server.send({**asked, "max_tokens": 5})
        server.until(lambda: server.slots()["waiting"] == 1)
        with server.connect() as idle:  # a connection without a request holds nothing up
            server.signal(number)
            server.until(lambda: server.get("/ready").status == 503)
            assert server.get("/ready").headers["retry-after"] == "5"
            answer = server.complete(prompt="a", max_tokens=1)
            assert answer.error(503)["code"] == "draining"
            assert answer.headers["retry-after"] == "5"
            assert server.get("/health").status == 200
            assert server.metric('scanwright_rejected_requests_total{reason="draining"}') == 1
            texts = []
            for events in running:
                with events:
                    texts.append("".join(e["choices"][0]["text"] for e in events))
                    assert events.done
            assert len(set(texts)) == 1 and texts[0]
            with waiting:
                assert read_answer(waiting).json()["usage"]["completion_tokens"] == 5
            assert server.wait() == 0
            assert idle.recv(1) == b""
    assert server.errors == ""


def test_drain_waits_for_an_answer_that_is_read_late(bundle: Path) -> None:
    asked = {**LONG, "max_tokens": 8000, "stream": True, "logprobs": 5}  # more than sockets hold
    with Server(bundle, "--max-tokens", 8000) as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(20)
        sock.connect(("127.0.0.1", server.port))
        body = json.dumps(asked).encode()
        sock.sendall(post("/v1/completions", body) + body)
        server.until(lambda: server.busy() == 1)
        server.signal()
        server.until(lambda: server.busy() == 0)
        time.sleep(1.5)
        assert read_answer(sock).body.endswith(b"data: [DONE]\n\n")
        assert server.wait() == 0


def test_a_second_signal_stops_at_once(bundle: Path) -> None:
    with Server(bundle, "--max-tokens", 1_000_000) as server, server.stream(**LONG) as events:
        assert next(iter(events))
        server.signal(signal.SIGTERM)
        server.until(lambda: server.get("/ready").status == 503)
        server.signal(signal.SIGINT)
        assert server.wait(5) == 130
        *_, last = list(events)
        assert last["error"]["code"] == "cancelled" and not events.done
    assert server.errors == ""


def test_the_drain_timeout_cuts_off(bundle: Path) -> None:
    with Server(bundle, "--max-tokens", 1_000_000, "--drain-timeout", 0.3) as server:
        with server.stream(**LONG) as events:
            assert next(iter(events))
            server.signal()
            *_, last = list(events)
            assert last["error"]["code"] == "cancelled"
        assert server.wait(5) == 1
    assert server.errors.startswith("error: drain-timeout: ") and server.errors.count("\n") == 1


def test_a_body_that_is_still_coming_at_a_drain_is_turned_away_in_json(bundle: Path) -> None:
    body = json.dumps({"prompt": [1, 2], "max_tokens": 3}).encode()
    with Server(bundle) as server, server.connect() as sock:
        sock.sendall(post("/v1/completions", body) + body[:10])
        time.sleep(0.2)
        server.signal(signal.SIGTERM)
        server.until(lambda: server.get("/ready").status == 503)
        sock.sendall(body[10:])
        assert read_answer(sock).error(503)["code"] == "draining"
        assert server.wait() == 0


def test_choices_that_never_fit_are_refused_at_once(bundle: Path) -> None:
    with Server(bundle, "--queue", 2) as server:  # and three slots
        assert server.complete(prompt=[1], n=5, max_tokens=1).status == 200
        error = server.complete(prompt=[1], n=6, max_tokens=1).error(400)
        assert error["param"] == "n" and "at most 5" in error["message"]
        assert server.slots()["submitted"] == 5
