"""The gate: every request in company as alone, on compiled modules; and that it can fail."""

from __future__ import annotations

import json
from pathlib import Path

import bundles
import numpy as np
import pytest
import toy
from bundles import Opened

from runtime import company
from runtime.cli import main
from runtime.engine import Engine
from runtime.request import Choice
from runtime.selftest import Report, selftest
from runtime.session import Session

pytestmark = pytest.mark.iree
MUST = (
    "cancelled", "preempted", "saved and restored", "poisoned", "steps with prefill beside decode",
    "steps with every slot decoding",
)  # fmt: skip


def check(report: Report, count: int) -> None:
    """Passed, to the bit in every slot, and everything that can happen happened."""
    assert report.failures == []
    assert report.requests == count and report.tokens > 8 * count
    assert all(report.events[event] > 0 for event in MUST)
    for compared, equal in (report.prefill, report.same_slot, report.other_slot):
        assert compared == equal > 0
    assert report.worst == 0


@pytest.mark.parametrize("hybrid", [False, True])
def test_two_hundred_requests_on_the_toys(hybrid: bool) -> None:
    opened = Opened.open(toy.bundle(hybrid=hybrid))
    kinds = {spec.kind for spec in opened.manifest.state}
    assert kinds == ({"fixed", "per_position"} if hybrid else {"fixed"})
    check(selftest(opened.device, opened.manifest, 200, seed=3), 200)


@pytest.mark.parametrize("name", bundles.HANDED)
def test_two_hundred_requests_on_a_model(name: str) -> None:
    opened = Opened.open(bundles.build(name, base="b4-p4+16"))
    check(selftest(opened.device, opened.manifest, 200, seed=4), 200)


def test_the_command(capsys: pytest.CaptureFixture) -> None:
    bundle = str(toy.bundle())
    assert main(["selftest", bundle, "--requests", "60"]) == 0
    out = capsys.readouterr().out
    assert out.endswith("passed: every request as when it ran alone\n")
    assert main(["selftest", bundle, "--requests", "60", "--json", "--seed", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] is True and found["failures"] == [] and found["requests"] == 60
    weightless = str(toy.bundle(weight_free=True))
    assert main(["selftest", weightless, "--requests", "9", "--random-params"]) == 0
    capsys.readouterr()
    for words, line in (
        (["--requests", "0"], "requests: found 0, expected 1 or more"),
        (["--seed", "-1"], "seed: found -1, expected 0 or more"),
        (["--device", "cuda"], "device 'cuda'"),
    ):
        assert main(["selftest", bundle, *words]) == 1
        assert line in capsys.readouterr().err


FAULTS = {
    "a slot's state leaks into its neighbour": "neighbour",
    "a freed slot keeps its state": "dirty",
    "rows differ in their last bit": "tail",
    "the private state is shared between prompts": "shared",
}


class Faulty(Session):
    """A session with one fault."""

    fault = ""

    def seed(self, slot: int, state: list) -> None:
        """As Session.seed, but the neighbour's fault changes another slot too."""
        if self.fault == "neighbour" and self.slots > 1:
            other = (slot + 1) % self.slots
            nudged = [self.device.to_host(b) * np.float32(1.5) for b in self.extract(other)]
            super().seed(other, [self.device.to_device(array) for array in nudged])
        super().seed(slot, state)

    def reset(self, slot: int) -> None:
        """As Session.reset, unless the fault is to leave it."""
        if self.fault != "dirty":
            super().reset(slot)

    def decode(self, tokens, positions, active):
        """As Session.decode; row 1's logits may be off by a bit."""
        logits, argmax = super().decode(tokens, positions, active)
        if self.fault == "tail":
            rows = self.device.to_host(logits).copy()
            rows[1] = np.nextafter(rows[1], np.float32(np.inf))
            logits = self.device.to_device(rows)
        return logits, argmax

    def start(self, tokens, position=0, state=None, cuts=None):
        """As Session.start; prompts may begin where the last one ended."""
        kept = getattr(self, "kept", None)
        if self.fault == "shared" and state is None and kept is not None and kept.state:
            state = [self.device.to_device(self.device.to_host(b)) for b in kept.state]
        self.kept = super().start(tokens, position, state, cuts)
        return self.kept


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Opened.open(toy.bundle(hybrid=True))
    monkeypatch.setattr(Faulty, "fault", fault)
    monkeypatch.setattr("runtime.selftest.Session", Faulty)
    report = selftest(opened.device, opened.manifest, 60, seed=1)
    assert report.events["cancelled"] > 0
    if fault == "tail":  # within 1e-6: told, not refused
        assert report.other_slot[1] < report.other_slot[0] and 0 < report.worst <= 1e-6
    else:
        assert report.failures


def test_every_order_of_arrival() -> None:
    """Five requests in all 120 orders of arrival on three slots."""
    import itertools

    opened = Opened.open(toy.bundle())
    every = company.requests(opened.manifest, 5, seed=9)
    session = Session(opened.device, opened.manifest)
    solo = [company.alone(session, opened.manifest, request) for request in every]
    for order in itertools.permutations(range(5)):
        engine = Engine(session, opened.manifest)
        runs: dict[int, company.Run] = {}
        for index in order:
            runs[index] = run = company.Run()
            run.ticket = engine.submit(every[index], run)
            engine.step()
        while engine.step():
            pass
        for index, run in runs.items():
            assert run.tokens == solo[index].tokens
            assert [p.digest for p in run.prints] == [p.digest for p in solo[index].prints]


def test_the_files_of_saved_conversations_are_gone(tmp_path: Path) -> None:
    opened = Opened.open(toy.bundle())
    import tempfile

    before = tempfile.tempdir
    tempfile.tempdir = str(tmp_path)
    try:
        selftest(opened.device, opened.manifest, 20)
    finally:
        tempfile.tempdir = before
    assert list(tmp_path.iterdir()) == []


def test_logits_handed_to_a_sink_stay_as_they_are() -> None:
    opened = Opened.open(toy.bundle())
    held: list[tuple[np.ndarray, bytes]] = []

    class Hold(company.Run):
        def token(self, choice: Choice) -> bool:
            assert choice.logits is not None
            held.append((choice.logits, choice.logits.tobytes()))
            return False

    session = Session(opened.device, opened.manifest)
    engine = Engine(session, opened.manifest)
    for request in company.requests(opened.manifest, 20, seed=2):
        engine.submit(request, Hold())
    while engine.step():
        pass
    for _ in range(100):  # whatever was freed is written over
        opened.device.to_device(np.full((3, toy.V), 7.0, np.float32))
    assert len(held) > 100
    assert all(row.tobytes() == before for row, before in held)


def test_one_slot_is_enough() -> None:
    opened = Opened.open(toy.bundle(slots=1))
    report = selftest(opened.device, opened.manifest, 60, seed=1)
    assert report.failures == [] and report.other_slot == [0, 0]
    assert all(report.events[event] for event in ("cancelled", "preempted", "saved and restored"))
