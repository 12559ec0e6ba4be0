"""The engine's step: order, stalls, retirement, cancellation, deadlines, priorities, failures."""

from __future__ import annotations

from dataclasses import dataclass, field

import fake_device
import numpy as np
import pytest
from fake_device import EOS, FakeDevice, V, following, spread, zero
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.engine import Engine
from runtime.errors import UserError
from runtime.request import Choice, Ending, Request
from runtime.sampling import SamplingParams
from runtime.scheduler import QueueFull, Ticket
from runtime.session import Session


@dataclass
class Take:
    """A sink that keeps everything, and stops after `stop_after` tokens."""

    tokens: list[int] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    stop_after: int | None = None
    fails_at: int | None = None

    def token(self, choice: Choice) -> bool:
        assert not self.endings, "a token after the end"
        if not choice.prompt:
            self.tokens.append(choice.token)
        self.choices.append(choice)
        if len(self.tokens) == self.fails_at:
            raise RuntimeError("planted")
        return len(self.tokens) == self.stop_after

    def finish(self, ending: Ending) -> None:
        self.endings.append(ending)

    @property
    def reason(self) -> str:
        (ending,) = self.endings
        return ending.reason


class Rig:
    """A fake device, its session and an engine with a clock that stands still."""

    def __init__(self, rule: fake_device.Rule = spread, slots: int = 3, queue: int = 64) -> None:
        self.now = 0.0
        self.device = FakeDevice(fake_device.manifest(slots=slots), rule)
        self.session: Session = self.device.session()
        self.engine = Engine(
            self.session, self.device.manifest, queue=queue, clock=lambda: self.now
        )

    def submit(self, request: Request, sink: Take | None = None) -> tuple[Ticket, Take]:
        sink = sink or Take()
        return self.engine.submit(request, sink), sink

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    def finish(self) -> None:
        while self.engine.step():
            pass
        assert all(zero(self.session, slot) for slot in range(self.session.slots))
        assert self.engine.snapshot().waiting == 0
        assert all(view.phase == "idle" for view in self.engine.snapshot().slots)


def solo(request: Request, rule: fake_device.Rule = spread) -> list[int]:
    rig = Rig(rule)
    _, sink = rig.submit(request)
    rig.finish()
    return sink.tokens


def test_a_long_prompt_holds_the_others_up_for_one_chunk_at_most() -> None:
    rig = Rig()
    _, running = rig.submit(Request((1,), 30, ignore_eos=True))
    rig.steps(2)
    _, reading = rig.submit(Request(tuple(range(30)), 4, ignore_eos=True))
    before = len(running.tokens)
    rig.device.calls.clear()
    rig.steps(6)
    assert [c for c in rig.device.calls if c != "seed"][:10] == [
        "prefill_8", "decode", "prefill_8", "decode", "prefill_8", "decode", "prefill_4", "decode",
        "prefill_4", "decode",
    ]  # fmt: skip
    assert len(running.tokens) == before + 6
    assert len(reading.tokens) > 0
    rig.finish()


def test_short_prompts_pass_long_ones_and_none_starves() -> None:
    rig = Rig()
    _, long = rig.submit(Request(tuple(range(31)) * 2, 1, ignore_eos=True))
    rig.steps(1)
    _, short = rig.submit(Request((1,), 2, ignore_eos=True))
    rig.steps(2)
    assert len(short.tokens) >= 1 and not long.tokens
    for _ in range(20):  # a stream of short ones
        rig.submit(Request((2,), 1, ignore_eos=True))
    rig.steps(16)
    assert len(long.tokens) == 1
    rig.finish()


def test_rows_stand_at_their_own_positions() -> None:
    rig = Rig()
    wants = [Request(tuple(range(n)), 9, ignore_eos=True) for n in (1, 7, 12)]
    sinks = [rig.submit(request)[1] for request in wants]
    rig.finish()
    assert [sink.tokens for sink in sinks] == [solo(request) for request in wants]
    assert rig.device.calls.count("decode") < 3 * 8


def test_greedy_reads_only_ids_and_sampling_only_its_own_rows() -> None:
    rig = Rig()
    rig.submit(Request((1, 2), 8, ignore_eos=True))
    rig.submit(Request((1, 2), 8, SamplingParams(1.0, seed=1), ignore_eos=True))
    rig.finish()
    assert set(rig.device.read) == {"argmax", "logits[0]", "logits[1]"}
    assert rig.device.read.count("logits[0]") == 1  # its prefill
    rig.device.read.clear()
    rig.submit(Request((1, 2), 8, ignore_eos=True))
    rig.finish()
    assert set(rig.device.read) == {"argmax"}


@pytest.mark.parametrize(
    ("request_", "sink", "reason", "count"),
    [
        (Request((1, 2), 9), Take(), "stop", 3),
        (Request((1, 2), 2), Take(), "length", 2),
        (Request((1, 2), 9, ignore_eos=True), Take(stop_after=5), "stop", 5),
        (Request((1, 2), 9, ignore_eos=True), Take(stop_after=1), "stop", 1),
        (Request((1, 2), 0), Take(), "length", 0),
    ],
)
def test_what_ends_a_request(request_: Request, sink: Take, reason: str, count: int) -> None:
    rig = Rig(following(5, 6, EOS, 7, 8, 9, 1, 2, 3, 4))
    rig.submit(request_, sink)
    rig.finish()
    assert (sink.reason, len(sink.tokens)) == (reason, count)
    assert [choice.eos for choice in sink.choices] == [
        token == EOS and not request_.ignore_eos for token in sink.tokens
    ]


def test_the_context_ends_a_request() -> None:
    rig = Rig()
    _, sink = rig.submit(Request(tuple(range(30)) * 2, 99, ignore_eos=True))
    rig.finish()
    assert (sink.reason, len(sink.tokens)) == ("length", fake_device.CONTEXT - 60 + 1)


def test_the_queue_is_bounded_and_first_come_first_served() -> None:
    rig = Rig(slots=1, queue=2)
    sinks = [rig.submit(Request((i,), 3, ignore_eos=True))[1] for i in range(3)]
    with pytest.raises(QueueFull, match=r"queue: 3 requests wait, expected at most 2; try again"):
        rig.submit(Request((9,), 1))
    assert rig.engine.snapshot().rejected == 1
    order: list[int] = []
    while rig.engine.step():
        order += [i for i, sink in enumerate(sinks) if sink.endings and i not in order]
    assert order == [0, 1] or order == [0, 1, 2]
    assert all(sink.reason == "length" for sink in sinks)
    rig.submit(Request((9,), 1))
    rig.finish()


def test_cancellation_at_every_moment() -> None:
    want = Request(tuple(range(20)), 6, ignore_eos=True)
    other = Request((3, 1), 12, SamplingParams(1.0, seed=3), ignore_eos=True)
    expected = solo(other)
    for moment in range(14):
        for keep in (False, True):
            rig = Rig(slots=2)
            _, beside = rig.submit(other)
            request = Request(want.prompt, 6, ignore_eos=True, keep=keep)
            ticket, sink = rig.submit(request)
            rig.steps(moment)
            rig.engine.cancel(ticket, "the client left")
            rig.engine.cancel(ticket, "twice")
            rig.finish()
            rig.engine.cancel(ticket, "late")
            rig.finish()
            assert sink.reason in ("cancelled", "length")
            if sink.reason == "cancelled":
                assert sink.endings[0].message == "the client left"
            assert beside.tokens == expected
    rig = Rig(slots=1)
    rig.submit(other)
    ticket, sink = rig.submit(want)
    rig.steps(3)
    rig.engine.cancel(ticket)  # while it waits
    rig.steps(1)
    assert sink.reason == "cancelled" and rig.engine.snapshot().waiting == 0
    rig.finish()


def test_a_request_that_comes_and_is_cancelled_while_others_are_taken_in() -> None:
    """As a client on another thread may do it, at the worst moment: here from within the step."""
    rig, late = Rig(slots=1), Take()

    class Asks(Take):
        def finish(self, ending: Ending) -> None:
            super().finish(ending)
            ticket, _ = rig.submit(Request((4,), 5), late)
            rig.engine.cancel(ticket)

    _, running = rig.submit(Request((1,), 9, ignore_eos=True))
    rig.steps(1)
    ticket, _ = rig.submit(Request((2,), 5), Asks())
    _, waiting = rig.submit(Request((3,), 5, ignore_eos=True))
    rig.engine.cancel(ticket)
    rig.finish()
    assert late.reason == "cancelled" and not late.tokens
    assert running.reason == waiting.reason == "length"


def test_deadlines_hold_while_waiting_reading_and_decoding() -> None:
    rig = Rig(slots=2)
    reading = rig.submit(Request(tuple(range(31)), 9, deadline_s=1.0, ignore_eos=True))[1]
    decoding = rig.submit(Request((1,), 60, deadline_s=2.0, ignore_eos=True))[1]
    waiting = rig.submit(Request((1,), 9, deadline_s=1.5, ignore_eos=True))[1]
    calm = rig.submit(Request((1,), 9, deadline_s=99.0, ignore_eos=True))[1]
    rig.steps(2)
    rig.now = 1.5
    rig.steps(1)
    assert reading.reason == waiting.reason == "deadline" and not decoding.endings
    assert "1 s have passed" in reading.endings[0].message
    rig.now = 2.5
    rig.finish()
    assert decoding.reason == "deadline" and decoding.tokens
    assert calm.reason == "length"


def test_a_higher_priority_takes_a_slot_and_gives_it_back() -> None:
    low = [
        Request((i, 5), 20, SamplingParams(0.9, seed=i), ignore_eos=True, priority=0)
        for i in range(3)
    ]
    rig = Rig()
    sinks = [rig.submit(request)[1] for request in low]
    rig.steps(8)
    urgent = Request(tuple(range(20)), 5, ignore_eos=True, priority=2)
    _, first = rig.submit(urgent)
    rig.steps(1)
    snap = rig.engine.snapshot()
    assert snap.preempted == snap.parked == 1 and snap.waiting == 0
    assert not any(view.ticket == 3 for view in snap.slots)  # the latest gave way
    assert zero(rig.session, 2)
    rig.submit(Request((1,), 1, priority=0))  # no higher: takes nothing
    rig.finish()
    assert rig.engine.snapshot().preempted == 1
    assert first.tokens == solo(urgent)
    assert [sink.tokens for sink in sinks] == [solo(request) for request in low]


def test_a_prompt_in_the_middle_of_being_read_can_be_preempted() -> None:
    rig = Rig(slots=1)
    want = Request(tuple(range(28)), 5, ignore_eos=True)
    _, sink = rig.submit(want)
    rig.steps(2)
    _, first = rig.submit(Request((1, 2), 5, ignore_eos=True, priority=1))
    rig.finish()
    assert sink.tokens == solo(want) and first.endings[0].ended <= sink.endings[0].ended
    assert [position for position, _ in rig.device.fed].count(20) == 1  # nothing read twice


def test_a_common_prefix_is_never_shared() -> None:
    prefix = tuple(range(24))
    rig = Rig()
    for last in (1, 2, 1):
        rig.submit(Request((*prefix, last), 2, ignore_eos=True))
    rig.finish()
    rig.submit(Request((*prefix, 1), 2, ignore_eos=True))
    rig.finish()
    for position, token in enumerate(prefix):
        assert rig.device.fed.count((position, token)) == 4
    assert rig.device.manifest.prefix_sharing is False


def test_prompt_tokens_are_scored_by_decode_steps() -> None:
    rig = Rig()
    prompt = (3, 1, 4, 1, 5)
    for count in (0, 1, 3):
        _, sink = rig.submit(
            Request(prompt, count, ignore_eos=True, logits=True, score_prompt=True)
        )
        rig.finish()
        asked = [choice for choice in sink.choices if choice.prompt]
        assert tuple(choice.token for choice in asked) == prompt and asked[0].logits is None
        for place, choice in enumerate(asked[1:], 1):
            np.testing.assert_array_equal(choice.logits, spread(list(prompt[:place])))
        assert sink.tokens == solo(Request(prompt, count, ignore_eos=True))
        assert sink.reason == "length"
    assert not any(call.startswith("prefill") for call in rig.device.calls)
    assert len(rig.submit(Request((1,), 0, score_prompt=True))[1].choices) == 0
    rig.finish()


def test_logits_that_are_not_numbers_end_their_own_request_only() -> None:
    def rule(history: list[int]) -> np.ndarray:
        row = spread(history)
        return row * np.nan if history[0] == 7 and len(history) > 4 else row

    for sampling in (SamplingParams(1.0, seed=1), SamplingParams()):
        rig = Rig(rule)
        good = Request((1, 2), 9, sampling, ignore_eos=True)
        _, sink = rig.submit(good)
        _, bad = rig.submit(Request((7, 2), 9, sampling, ignore_eos=True))
        rig.finish()
        assert bad.reason == "error" and bad.endings[0].message.startswith("logits: found n")
        assert len(bad.tokens) == 3 and sink.tokens == solo(good)


def test_a_sink_that_fails_ends_its_own_request_only(capsys: pytest.CaptureFixture) -> None:
    rig = Rig()
    good = Request((1, 2), 9, ignore_eos=True)
    _, sink = rig.submit(good)
    _, bad = rig.submit(good, Take(fails_at=3))

    class Deaf(Take):
        def finish(self, ending: Ending) -> None:
            raise RuntimeError("planted")

    rig.submit(good, Deaf())
    rig.finish()
    assert bad.reason == "error" and bad.endings[0].message.startswith("unexpected RuntimeError")
    assert sink.tokens == solo(good)
    assert capsys.readouterr().err.splitlines() == [
        "error: planted",
        "error: planted",
        f"error: request 3: its sink failed: {bad.endings[0].message}",
    ]


@pytest.mark.parametrize("function", ["prefill_4", "decode", "seed", "extract"])
def test_a_device_that_fails_ends_everything_with_its_reason(function: str) -> None:
    rig = Rig(slots=1)
    sinks = [rig.submit(Request((1, 2), 9, ignore_eos=True, keep=True))[1] for _ in range(3)]
    rig.device.broken = function
    with pytest.raises(UserError, match="planted"):
        while rig.engine.step():
            pass
    assert all(sink.reason == "error" and "planted" in sink.endings[0].message for sink in sinks)
    with pytest.raises(UserError, match=r"engine: stopped, .*planted"):
        rig.submit(Request((1,), 1))
    assert rig.engine.step() is False and rig.engine.snapshot().waiting == 0


@pytest.mark.parametrize(
    ("request_", "line"),
    [
        (Request((1, V), 1), "prompt: found token id 32"),
        (Request(tuple([1] * 99), 1), "prompt: found 99 tokens, expected at most 64"),
        (Request((1,), 1, SamplingParams(logit_bias=((V, 1.0),))), "logit-bias: found token id"),
    ],
)
def test_what_the_model_cannot_run_is_refused_at_once(request_: Request, line: str) -> None:
    rig = Rig()
    with pytest.raises(UserError, match=line):
        rig.submit(request_)
    assert rig.engine.step() is False and rig.device.calls == []


def test_chunks_must_be_compiled() -> None:
    device = FakeDevice(fake_device.manifest())
    with pytest.raises(UserError, match=r"chunks: found 16, expected compiled sizes: \[4, 8\]"):
        Engine(device.session(), device.manifest, chunks=[4, 16])
    engine = Engine(device.session(), device.manifest, chunks=[4])
    engine.submit(Request(tuple(range(9)), 1), Take())
    while engine.step():
        pass
    assert set(device.calls) == {"prefill_4"}


ACTION = st.one_of(
    st.tuples(
        st.just("submit"),
        st.integers(1, 20),  # prompt
        st.integers(0, 8),  # tokens
        st.integers(0, 2),  # priority
        st.booleans(),  # sampled
        st.booleans(),  # scored
    ),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("step"), st.integers(1, 4)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(ACTION, max_size=40), st.integers(1, 3))
def test_any_schedule_gives_every_request_its_solo_tokens(actions: list, slots: int) -> None:
    rig = Rig(slots=slots)
    every: list[tuple[Request, Ticket, Take]] = []
    for action in actions:
        if action[0] == "submit":
            _, prompt, tokens, priority, sampled, scored = action
            sampling = SamplingParams(1.0, seed=prompt) if sampled else SamplingParams()
            request = Request(
                tuple((prompt * 7 + i) % V for i in range(prompt)),
                tokens,
                sampling,
                priority=priority,
                score_prompt=scored,
            )
            every.append((request, *rig.submit(request)))
        elif action[0] == "cancel" and every:
            rig.engine.cancel(every[action[1] % len(every)][1])
        elif action[0] == "step":
            rig.steps(action[1])
    rig.finish()
    for request, _, sink in every:
        alone = solo(request)
        if sink.reason == "cancelled":
            assert sink.tokens == alone[: len(sink.tokens)]
        else:
            assert sink.tokens == alone
