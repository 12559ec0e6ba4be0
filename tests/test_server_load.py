"""The server under load: 64 clients, 500 requests, many of which leave in the middle.

Measured on 2 cores that other programs used too: resident memory 92.0 MB after the warm-up, 92.8
after 500 requests, from 92.5 to 94.2 after 1,000 to 3,000 (it settles); time between two tokens
beside long prompts: median 7.9 to 17 ms, p99 1.4 to 3.9 times as much, the less the quieter.
"""

from __future__ import annotations

import json
import queue
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import demo
import numpy as np
import pytest
from bundles import Opened
from server import Server, post

from runtime.engine import Engine
from runtime.request import Choice, Ending, Request
from runtime.sampling import SamplingParams
from runtime.worker import Worker

pytestmark = [pytest.mark.iree, pytest.mark.slow]
CLIENTS, REQUESTS, WARM_UP = 64, 500, 150
CHUNK = 32
QUEUE = 40  # fewer than the clients, so that some are refused and ask again
SEED = 20260
GROWTH = 0.02
TEXTS = ("In the beginning", "And the LORD said unto Moses,", "é", "the son of", "Behold, I ")


@dataclass(frozen=True)
class Answers:
    """Each choice of one request, as far as it came."""

    texts: list[str]
    tokens: list[list[int]]
    logprobs: list[list[float]]
    reasons: list[str | None]

    @classmethod
    def empty(cls, choices: int) -> Answers:
        """Nothing has come yet."""
        tokens: list[list[int]] = [[] for _ in range(choices)]
        scores: list[list[float]] = [[] for _ in range(choices)]
        return cls([""] * choices, tokens, scores, [None] * choices)

    def add(self, choice: dict[str, Any]) -> None:
        """One more piece of a choice, or all of it."""
        at = choice["index"]
        self.texts[at] += choice["text"]
        self.tokens[at] += choice["token_ids"]
        if choice["logprobs"]:
            self.logprobs[at] += choice["logprobs"]["token_logprobs"]
        self.reasons[at] = choice["finish_reason"] or self.reasons[at]

    def check(self, whole: Answers, complete: bool) -> None:
        """Assert that these are `whole`, or the start of it."""
        for at, (text, tokens, scores) in enumerate(
            zip(self.texts, self.tokens, self.logprobs, strict=True)
        ):
            assert whole.texts[at].startswith(text), (at, text, whole.texts[at])
            assert whole.tokens[at][: len(tokens)] == tokens, (at, tokens, whole.tokens[at])
            assert scores == pytest.approx(whole.logprobs[at][: len(scores)], abs=1e-4), at
        if complete:
            assert self.texts == whole.texts and self.tokens == whole.tokens
            assert self.reasons == whole.reasons


@dataclass(frozen=True)
class Plan:
    """One request: what is asked, and when its client leaves.

    `leave`: never; after `delay` seconds, with half of the body sent ("sending") or all of it and
    nothing read ("waiting"); or after `delay` events of a stream ("reading").
    """

    kind: int
    fields: dict[str, Any]
    stream: bool
    leave: str = "never"
    delay: float = 0.0
    abort: bool = False

    @property
    def body(self) -> bytes:
        """The request's body."""
        return json.dumps({**self.fields, "stream": self.stream}).encode()


@dataclass
class Load:
    """What the clients report together."""

    ended: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def kinds(rng: random.Random, count: int = 48) -> list[dict[str, Any]]:
    """Different requests: prompts of one token and of many chunks, greedy and sampled."""
    found = []
    for number in range(count):
        length = rng.choice((1, 1, 2, 31, 32, 33, rng.randint(40, 200), rng.randint(300, 700)))
        prompt: Any = [rng.randrange(1, 2048) for _ in range(length)]
        if number % 4 == 3:
            prompt = rng.choice(TEXTS)
        fields = {"prompt": prompt, "max_tokens": rng.choice((1, 2, 8, 24, 48)),
                  "ignore_eos": rng.random() < 0.7, "return_token_ids": True}  # fmt: skip
        if number % 2:
            fields |= {"temperature": rng.choice((0.6, 1.0, 1.5)), "seed": number, "top_p": 0.95,
                       "top_k": rng.choice((0, 40)), "frequency_penalty": rng.choice((0, 0.5)),
                       "dry_multiplier": rng.choice((0, 0.8))}  # fmt: skip
        else:
            fields["temperature"] = 0
        if number % 5 == 0:
            fields["n"] = 2
        if number % 6 == 1:
            fields["logprobs"] = 2
        if number % 7 == 2:
            fields["stop"] = ["the", "."]
        found.append(fields)
    return found


def plans(rng: random.Random, asked: Sequence[dict[str, Any]], count: int) -> list[Plan]:
    """`count` requests in random order; two in five leave before their end."""
    found = []
    for _ in range(count):
        kind = rng.randrange(len(asked))
        leave = rng.choice(("never",) * 6 + ("sending", "waiting", "reading", "reading"))
        stream = leave == "reading" or rng.random() < 0.5
        delay = rng.randrange(6) if leave == "reading" else rng.choice((0, 0.01, rng.random()))
        found.append(Plan(kind, asked[kind], stream, leave, delay, rng.random() < 0.5))
    return found


# --- clients ----------------------------------------------------------------------------------


def ask(server: Server, plan: Plan, whole: Answers) -> str:
    """Carry out a plan; how it ended. Raises AssertionError for a wrong answer."""
    if plan.leave in ("sending", "waiting"):
        sent = plan.body if plan.leave == "waiting" else plan.body[: len(plan.body) // 2]
        with server.connect(60) as sock:
            sock.sendall(post("/v1/completions", plan.body) + sent)
            time.sleep(plan.delay)
            if plan.abort:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        return plan.leave
    found = Answers.empty(plan.fields.get("n", 1))
    if not plan.stream:
        answer = server.ask("POST", "/v1/completions", plan.body, timeout=60)
        if answer.status == 503 and answer.error(503)["code"] == "queue_full":
            return "refused"
        assert answer.status == 200, (answer.status, answer.body[:300])
        for choice in answer.json()["choices"]:
            found.add(choice)
        found.check(whole, complete=True)
        return "whole"
    with server.stream(timeout=60, **plan.fields) as events:
        if events.status == 503 and events.headers.get("retry-after") == "1":
            return "refused"
        assert events.status == 200, events.status
        for number, event in enumerate(events):
            if plan.leave == "reading" and number >= plan.delay:
                break
            assert "error" not in event, event
            for choice in event["choices"]:
                found.add(choice)
        found.check(whole, complete=events.done)
        assert events.done or plan.leave == "reading", "a stream without [DONE]"
        return "stream" if events.done else "reading"


def client(server: Server, work: queue.SimpleQueue[Plan], whole: Sequence[Answers], load: Load,
           start: threading.Barrier) -> None:  # fmt: skip
    """One client: plans in turn, asking again where it was refused, until none is left."""
    start.wait()
    while True:
        try:
            plan = work.get_nowait()
        except queue.Empty:
            return
        try:
            while (ended := ask(server, plan, whole[plan.kind])) == "refused":
                load.ended["refused"] += 1
                time.sleep(0.3)
            load.ended[ended] += 1
        except Exception as error:
            load.failures.append(f"{plan}: {type(error).__name__}: {error}"[:2000])


def run(server: Server, todo: Sequence[Plan], whole: Sequence[Answers]) -> Load:
    """All of `todo`, by 64 clients at once."""
    load, work, start = Load(), queue.SimpleQueue(), threading.Barrier(CLIENTS)
    for plan in todo:
        work.put(plan)
    clients = [
        threading.Thread(target=client, args=(server, work, whole, load, start))
        for _ in range(CLIENTS)
    ]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    return load


def alone(server: Server, asked: Sequence[dict[str, Any]]) -> list[Answers]:
    """Each request's answer from a server that does nothing else."""
    found = []
    for fields in asked:
        answer = server.complete(**fields)
        assert answer.status == 200, answer.body
        found.append(Answers.empty(fields.get("n", 1)))
        for choice in answer.json()["choices"]:
            found[-1].add(choice)
    return found


# --- the process ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Usage:
    """Of a process that is idle: resident bytes, open files, threads."""

    resident: int
    files: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        """As the kernel counts them now."""
        proc = Path("/proc") / str(pid)
        pages = int((proc / "statm").read_text().split()[1])
        files = len(list((proc / "fd").iterdir()))
        return cls(pages * 4096, files, len(list((proc / "task").iterdir())))


@pytest.fixture(scope="module")
def bundle() -> Path:
    """The model that ships with the project, eight slots."""
    return demo.bundle("b8-p32")


@pytest.fixture
def server(bundle: Path) -> Iterator[Server]:
    """A fresh server that must end well and say nothing."""
    with Server(bundle, "--queue", QUEUE) as running:
        yield running
        running.signal()
        assert running.wait() == 0
    assert running.errors == ""


# --- between two tokens -----------------------------------------------------------------------


class Clock:
    """A running request: when each token came, and how much of other prompts was read by then."""

    def __init__(self, engine: Engine) -> None:
        self.times: list[float] = []
        self.read: list[int] = []
        self._engine = engine

    def token(self, choice: Choice) -> bool:
        self.times.append(time.perf_counter())
        self.read.append(self._engine.snapshot().prefill_tokens)
        return False

    def finish(self, ending: Ending) -> None:
        """Nothing: the request is cancelled at the end."""


class Admit:
    """Long prompts, one after the other: each is followed by the next at once."""

    def __init__(self, worker: Worker, vocab: int) -> None:
        self.count, self.on = 0, True
        self._worker, self._vocab = worker, vocab
        self._rng = random.Random(SEED)

    def next(self) -> None:
        """Submit one of 6 to 30 chunks."""
        length = self._rng.randint(6 * CHUNK, 30 * CHUNK)
        prompt = tuple(self._rng.randrange(1, self._vocab) for _ in range(length))
        self._worker.submit(Request(prompt, self._rng.randint(1, 4), ignore_eos=True), self)

    def token(self, choice: Choice) -> bool:
        return False

    def finish(self, ending: Ending) -> None:
        """Called on the engine's thread, from which a request may be submitted too."""
        self.count += 1
        if self.on:
            self.next()


def between(bundle: Path, seconds: float) -> tuple[float, float, int]:
    """(median, p99) of the seconds between two tokens of five running requests while long prompts
    are admitted without a pause, and the number of prompts. Between two tokens lies at most one
    chunk."""
    opened = Opened.open(bundle)
    manifest = opened.manifest
    engine = Engine(opened.session(), manifest)
    worker = Worker(engine)
    worker.start()
    clocks = [Clock(engine) for _ in range(5)]
    for number, clock in enumerate(clocks):
        sampling = SamplingParams(0.8 * (number % 2), seed=number)
        worker.submit(Request((1, 2, 3), 10**9, sampling, ignore_eos=True), clock)
    admit = Admit(worker, manifest.model.vocab_size)
    for _ in range(3):
        admit.next()
    time.sleep(0.5)
    began = time.perf_counter()
    time.sleep(seconds)
    ended = time.perf_counter()
    admit.on = False
    worker.close()
    gaps, read = [], []
    for clock in clocks:
        inside = [place for place, at in enumerate(clock.times) if began <= at <= ended]
        gaps.append(np.diff(np.array(clock.times)[inside]))
        read.append(np.diff(np.array(clock.read)[inside]))
    assert np.concatenate(read).max() <= CHUNK
    assert np.concatenate(read).mean() > CHUNK * 0.8, "prompts were not admitted all the time"
    median, late = np.percentile(np.concatenate(gaps), (50, 99))
    return float(median), float(late), admit.count


def test_long_prompts_hold_running_requests_up_evenly(bundle: Path) -> None:
    """At p99 a token waits for one chunk of a prompt, and not for two.

    A chunk of 32 tokens takes about 2.4 steps of eight rows, so one makes p99 3.4 times the median
    and two 5.8. What else the machine does only ever adds, so one round of five is enough.
    """
    found = []
    for _ in range(5):
        found.append(between(bundle, 3.0))
        median, late, count = found[-1]
        print(f"median {median * 1e3:.2f} ms, p99 {late * 1e3:.2f} ms, {count} prompts")
        assert count >= 4
        if late <= 4.5 * median:
            return
    raise AssertionError(found)


# --- all together -----------------------------------------------------------------------------


def test_load(server: Server) -> None:
    """No wrong stream, no stuck slot, no lost file or thread, no growing memory."""
    rng = random.Random(SEED)
    asked = kinds(rng)
    whole = alone(server, asked)
    usage = []
    for count in (WARM_UP, REQUESTS, REQUESTS):
        if len(usage) == 2 and usage[1].resident <= usage[0].resident * (1 + GROWTH):
            break  # else it has not settled yet: it must not grow any more
        began = time.monotonic()
        load = run(server, plans(rng, asked, count), whole)
        assert not load.failures, "\n".join([f"{len(load.failures)} failures", *load.failures[:5]])
        server.until(lambda: server.busy() == 0, 1)
        usage.append(Usage.of(server.process.pid))
        print(f"{time.monotonic() - began:.1f} s", dict(load.ended), usage[-1])
    assert all(load.ended[word] > 20 for word in ("whole", "stream", "reading", "refused"))
    found = server.slots()
    assert {slot["phase"] for slot in found["slots"]} == {"idle"} and found["waiting"] == 0
    assert found["submitted"] == sum(found["finished"].values()) and not found["finished"]["error"]
    assert found["finished"]["cancelled"] > 20
    before, after = usage[-2:]
    assert after.files <= before.files + 3 and after.threads <= before.threads, usage
    assert after.resident <= before.resident * (1 + GROWTH), usage
    again = alone(server, asked[:8])
    for got, want in zip(again, whole, strict=False):
        got.check(want, complete=True)
