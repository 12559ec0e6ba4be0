"""The engine's thread: submitting from many threads, draining, closing, failing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import fake_device
import pytest
from fake_device import FakeDevice, zero
from test_engine import Take, solo

from runtime.engine import Engine
from runtime.errors import UserError
from runtime.request import Ending, Request
from runtime.sampling import SamplingParams
from runtime.worker import Draining, Worker


class Wait(Take):
    """A sink that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Event()

    def finish(self, ending: Ending) -> None:
        super().finish(ending)
        self.ended.set()


class Rig:
    """A worker over a fake device whose decode steps take `pause` seconds."""

    def __init__(self, pause: float = 0.0) -> None:
        self.device = FakeDevice(fake_device.manifest())
        self.session = self.device.session()
        decode = self.session.decode

        def slow(*rows):
            time.sleep(pause)
            return decode(*rows)

        self.session.decode = slow  # type: ignore[method-assign]
        self.steps = 0
        self.worker = Worker(Engine(self.session, self.device.manifest), self.step)

    def step(self) -> None:
        self.steps += 1


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    rig.worker.start()
    yield rig
    rig.worker.close()


def test_many_threads_submit_and_every_stream_is_the_solo_one(rig: Rig) -> None:
    requests = [
        Request((i % 7, i % 5), 6, SamplingParams(1.0, seed=i), ignore_eos=True) for i in range(60)
    ]
    sinks: list[Wait | None] = [None] * 60

    def client(part: int) -> None:
        for i in range(part, 60, 6):
            sinks[i] = sink = Wait()
            ticket = rig.worker.submit(requests[i], sink)
            if i % 10 == 3:
                rig.worker.cancel(ticket)
            assert sink.ended.wait(20)

    threads = [threading.Thread(target=client, args=(part,)) for part in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for request, sink in zip(requests, sinks, strict=True):
        assert sink is not None
        alone = solo(request)
        if sink.reason == "cancelled":
            assert sink.tokens == alone[: len(sink.tokens)]
        else:
            assert sink.tokens == alone
    assert rig.worker.drain(5) and rig.steps > 0
    assert all(zero(rig.session, slot) for slot in range(3))


def test_an_idle_worker_sleeps(rig: Rig) -> None:
    sink = Wait()
    rig.worker.submit(Request((1,), 3, ignore_eos=True), sink)
    assert sink.ended.wait(5)
    time.sleep(0.1)
    before, cpu = rig.steps, time.process_time()
    time.sleep(0.3)
    assert rig.steps == before and time.process_time() - cpu < 0.1


def test_draining_finishes_what_runs_and_refuses_the_rest() -> None:
    rig = Rig(pause=0.01)
    rig.worker.start()
    sinks = [Wait() for _ in range(5)]  # two of them wait
    for sink in sinks:
        rig.worker.submit(Request((1,), 12, ignore_eos=True), sink)
    assert rig.worker.drain(0.01) is False and rig.worker.draining
    with pytest.raises(Draining, match="server: shutting down"):
        rig.worker.submit(Request((1,), 1), Wait())
    assert rig.worker.drain(20) is True
    assert [sink.reason for sink in sinks] == ["length"] * 5
    rig.worker.close()
    rig.worker.close()


def test_a_drain_that_is_cut_short_by_closing_is_over() -> None:
    for _ in range(20):
        rig = Rig(pause=0.002)
        rig.worker.start()
        for _ in range(3):
            rig.worker.submit(Request((1,), 60, ignore_eos=True), Wait())
        found: list[bool] = []
        thread = threading.Thread(
            target=lambda found=found, rig=rig: found.append(rig.worker.drain(9))
        )
        thread.start()
        time.sleep(0.005)
        rig.worker.close()
        thread.join(9)
        assert found == [True]


def test_closing_cancels_everything() -> None:
    rig = Rig(pause=0.01)
    rig.worker.start()
    sinks = [Wait() for _ in range(5)]
    for sink in sinks:
        rig.worker.submit(Request((1,), 40, ignore_eos=True), sink)
    time.sleep(0.05)
    rig.worker.close()
    assert [sink.reason for sink in sinks] == ["cancelled"] * 5
    assert sinks[0].endings[0].message == "server: shut down"
    with pytest.raises(Draining):
        rig.worker.submit(Request((1,), 1), Wait())


def test_a_worker_that_never_started_closes() -> None:
    rig = Rig()
    sink = Wait()
    rig.worker.submit(Request((1,), 1), sink)
    assert rig.worker.drain(0.1) is False
    rig.worker.close()
    assert sink.reason == "cancelled"


def test_a_failed_device_is_told_and_the_thread_lives(
    rig: Rig, capsys: pytest.CaptureFixture
) -> None:
    rig.device.broken = "decode"
    sinks = [Wait() for _ in range(5)]
    for sink in sinks:
        try:
            rig.worker.submit(Request((1, 2), 9, ignore_eos=True), sink)
        except UserError:
            sink.ended.set()
    assert all(sink.ended.wait(5) for sink in sinks)
    assert sinks[0].reason == "error"
    assert rig.worker.failed is not None and "planted" in rig.worker.failed
    with pytest.raises(UserError, match=r"engine: stopped, .*planted"):
        rig.worker.submit(Request((1,), 1), Wait())
    assert rig.worker.drain(5) is True
    rig.worker.close()
    assert "planted" in capsys.readouterr().err


def test_a_hook_that_fails_stops_nothing(capsys: pytest.CaptureFixture) -> None:
    rig = Rig()

    def hook() -> None:
        raise RuntimeError("planted hook")

    worker = Worker(Engine(rig.session, rig.device.manifest), hook)
    worker.start()
    sink = Wait()
    worker.submit(Request((1,), 3, ignore_eos=True), sink)
    assert sink.ended.wait(5) and sink.reason == "length"
    worker.close()
    assert "planted hook" in capsys.readouterr().err
