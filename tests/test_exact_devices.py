"""Bundles for other devices than this CPU generate what transformers generates.

Vulkan runs on any driver, llvmpipe included; aarch64 under qemu, with the runtime that
`tests/aarch64_runtime.sh DIR` downloads (SCANWRIGHT_AARCH64_RUNTIME=DIR).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import bundles
import cases
import numpy as np
import pytest
import references
from bundles import Opened, check_no_argmax, check_references, relative, same_bits, worst

from artifacts import devices
from recipes.resolve import resolve_target
from runtime.selftest import selftest
from runtime.session import storage, zero_state

SHAPE = "b5-p8"  # a slot for each of the handed prompts
SPLIT = 1e-5
TARGETS = {"vulkan": "vulkan", "cpu-aarch64": "qemu-aarch64"}
MARKS = {"vulkan": pytest.mark.vulkan, "cpu-aarch64": pytest.mark.aarch64}


EMULATED = ("mamba2", "nemotron_h")  # families that run under qemu, where a call is a process
ALIKE = ("falcon_mamba", "kimi_linear", "plamo2")  # of layers as others have: in thorough runs
COMPANY = EMULATED  # a fixed state, and a cache beside it


def often(family: str) -> pytest.MarkDecorator:
    """How often the family runs on devices."""
    return pytest.mark.thorough if family in ALIKE else bundles.often(family)


def on_devices(families: Sequence[str]) -> list[Any]:
    """(family, target) for the fixture `opened`."""
    return [
        pytest.param((family, t), marks=[MARKS[t], often(family)], id=f"{family}-{t}")
        for t in TARGETS
        for family in families
        if family in EMULATED or t != "cpu-aarch64"
    ]


@pytest.fixture(scope="module", params=on_devices(cases.FAMILIES))
def opened(request: pytest.FixtureRequest) -> Opened:
    """A handed checkpoint on the device; skipped where the build would not find it either."""
    family, target = request.param
    recipe = resolve_target(target)
    device, why_not = devices.usable(recipe, None)
    if device is None:
        pytest.skip(str(why_not))
    assert device == TARGETS[target]
    return Opened.open(bundles.build(f"{family}/handed", target, SHAPE), device)


def test_the_build_proved_the_bundle_on_the_device(opened: Opened) -> None:
    proof = opened.manifest.proof
    assert (proof.status, proof.reason, proof.flags) == ("passed", None, "fast")


def test_handed_checkpoint_generates_the_reference(opened: Opened) -> None:
    check_references(opened, references.recorded(f"{opened.family}/handed")[1])


def test_schedules_on_the_device(opened: Opened) -> None:
    """The same bits again and with other padding; other splits within bounds; slots kept apart."""
    prompt = np.random.default_rng(0).integers(0, 256, 19).tolist()
    found = []
    for cuts in (None, None, [(8, 1), (8, 7), (8, 5), (8, 6)]):
        work = opened.session().start(prompt, cuts=cuts)
        while not work.step():
            pass
        found.append((opened.host(work.logits), opened.hosts(work.state or [])))
    assert same_bits([found[1][0], *found[1][1]], [found[0][0], *found[0][1]])
    assert relative(found[2][0], found[0][0]) <= SPLIT
    assert worst(found[2][1], found[0][1]) <= SPLIT
    session, state = opened.session(), found[0][1]
    poison = [np.full_like(array, np.nan) for array in state]
    for slot, arrays in ((1, state), (3, poison)):
        session.seed(slot, [opened.device.to_device(array) for array in arrays])
    inputs = np.zeros((3, 5), np.int32)
    inputs[:, 4] = 7, 0, 1
    logits = opened.host(session.decode(*inputs)[0])
    assert np.isfinite(logits[4]).all()
    assert same_bits(opened.hosts(session.extract(1)), state)
    # a NaN that goes through a kernel may come out with another payload
    assert all(np.isnan(array).all() for array in opened.hosts(session.extract(3)))
    fresh = opened.session()
    assert same_bits([opened.host(fresh.decode(*inputs)[0])[4]], [logits[4]])


def test_padding_on_the_device(opened: Opened) -> None:
    outcomes: list[Any] = []
    for padding in (0, 255, 2**31 - 1, -(2**31)):
        tokens = np.full((1, 8), padding, np.int32)
        tokens[0, :5] = [3, 1, 4, 1, 5]
        given = [tokens, np.array([5], np.int32), np.zeros(1, np.int32)]
        arguments = [opened.device.to_device(array) for array in given]
        arguments += zero_state(opened.device, opened.manifest, 1)
        arguments += storage(opened.device, opened.manifest, 1)
        outcomes.append(opened.hosts(opened.device.call("prefill_8", arguments)))
    assert all(same_bits(outcome, outcomes[0]) for outcome in outcomes)


def test_rows_that_are_not_numbers_have_no_argmax_on_the_device(opened: Opened) -> None:
    check_no_argmax(opened)


@pytest.mark.parametrize("opened", on_devices(COMPANY), indirect=True)
def test_requests_in_company_on_the_device(opened: Opened) -> None:
    """As tests/test_selftest.py; a few requests where an emulator makes every call a process.

    The engine asks nothing of a device that the tests above do not: some families are enough.
    """
    emulated = opened.manifest.target.name == "cpu-aarch64"
    report = selftest(opened.device, opened.manifest, 3 if emulated else 16, seed=5)
    assert report.failures == []
    assert report.other_slot[0] > 0 and report.worst <= 1e-6
