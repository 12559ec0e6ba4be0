"""Cutting prompts, and sequences in slots of a compiled toy model against the JAX graph."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import toy
from hypothesis import given
from hypothesis import strategies as st

from runtime import manifest as mf
from runtime.errors import UserError
from runtime.module import Module
from runtime.session import Session, cut

SIZES = st.lists(st.integers(1, 64), min_size=1, max_size=4, unique=True).map(sorted)
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]


@given(st.integers(0, 500), st.integers(0, 500), SIZES)
def test_cut_adds_up_and_depends_on_position_only(position, length, chunks):
    pieces = cut(position, length, chunks)
    assert sum(n for _, n in pieces) == length
    at = position
    for i, (size, count) in enumerate(pieces):
        assert size in chunks and 1 <= count <= size
        # the rest of a cut is the cut of the rest: no memory of where the request began
        assert cut(at, length - (at - position), chunks) == pieces[i:]
        if count == size > chunks[0]:
            assert at % size == 0
        larger = [p for p in chunks if p > size and at % p == 0]
        assert all(p > length - (at - position) for p in larger)
        end = at + count
        if count < size or size == chunks[0]:
            # a smallest chunk never crosses its own boundary and stops at the end or on one
            assert size == chunks[0]
            assert at // size == (end - 1) // size
            assert end % size == 0 or end == position + length
        at = end


@given(st.integers(0, 300), st.integers(1, 300), st.integers(1, 300))
def test_longer_prompts_share_full_boundaries(position, a, b):
    """With nested sizes, a boundary of the long cut inside the short one is also its boundary."""
    short, long = sorted((a, b))
    ends = []
    for length in (short, long):
        sums = np.cumsum([n for _, n in cut(position, length, (4, 8))]) + position
        ends.append({int(e) for e in sums if e % 4 == 0})
    assert {e for e in ends[1] if e <= position + short} <= ends[0] | {position + short}


def test_cut_examples():
    assert cut(0, 300, (32, 256)) == [(256, 256), (32, 32), (32, 12)]
    assert cut(5, 60, (32, 256)) == [(32, 27), (32, 32), (32, 1)]
    assert cut(0, 0, (4,)) == []


@pytest.fixture(params=["local", pytest.param("vulkan", marks=pytest.mark.vulkan)])
def session(request):
    bundle = toy.bundle(request.param)
    manifest = mf.load(bundle)
    return Session(Module.open(bundle, manifest), manifest)


def reference(session, prompt, count=6):
    """Tokens and logits of the JAX graph on the same parameters."""
    return toy.greedy(toy.jax_params(session.manifest.params, 7), prompt, count)


def run_slots(session, prompts, count):
    """Greedy tokens and logits of each prompt, each in its own slot, decoded together."""
    host = session.device.to_host
    tokens = np.zeros(session.slots, np.int32)
    positions = np.zeros(session.slots, np.int32)
    active = np.zeros(session.slots, np.int32)
    rows = {slot: [] for slot in prompts}
    found = {slot: [] for slot in prompts}
    for slot, prompt in prompts.items():
        logits, argmax = session.prefill(prompt)
        session.admit(slot)
        tokens[slot], positions[slot], active[slot] = host(argmax)[0], len(prompt), 1
        found[slot].append(int(tokens[slot]))
        rows[slot].append(host(logits)[0])
    for _ in range(count - 1):
        logits, argmax = session.decode(tokens, positions, active)
        tokens = host(argmax).copy()
        positions += active
        for slot in prompts:
            found[slot].append(int(tokens[slot]))
            rows[slot].append(host(logits)[slot])
    return found, rows


@pytest.mark.iree
def test_slots_decode_as_the_graph_does(session):
    prompts = {0: PROMPT, 2: [5], 1: PROMPT[:9]}
    found, rows = run_slots(session, prompts, 6)
    for slot, prompt in prompts.items():
        tokens, every = reference(session, prompt)
        assert found[slot] == tokens
        np.testing.assert_allclose(np.stack(rows[slot]), np.stack(every), rtol=2e-5, atol=2e-5)


@pytest.mark.iree
def test_other_cuts_agree_and_the_same_cut_is_the_same_bits(session):
    host = session.device.to_host
    whole = host(session.prefill(PROMPT)[0])
    assert np.array_equal(whole, host(session.prefill(PROMPT)[0]))
    odd = host(session.prefill(PROMPT, cuts=[(8, 3), (4, 4), (4, 1), (8, 5)])[0])
    np.testing.assert_allclose(odd, whole, rtol=1e-5, atol=1e-5)
    for bad in ([(8, 8)], [(8, 13)], [(5, 5), (8, 8)]):
        with pytest.raises(ValueError, match="cut"):
            session.start(PROMPT, cuts=bad)


@pytest.mark.iree
def test_extract_seed_and_reset(session):
    host = session.device.to_host
    session.prefill(PROMPT)
    session.admit(1)
    saved = session.extract(1)
    kept = [host(s) for s in saved]
    assert all(np.any(k) for k in kept)
    session.seed(2, saved)
    for spec, full, want in zip(toy.STATE, session.state, kept, strict=True):
        rows = np.moveaxis(host(full), spec.slot_axis, 0)
        want = np.moveaxis(want, spec.slot_axis, 0)[0]
        assert np.array_equal(rows[1], want) and np.array_equal(rows[2], want)
        assert not np.any(rows[0])
    session.reset(1)
    assert not any(np.any(host(s)) for s in session.extract(1))
    assert all(np.array_equal(host(a), b) for a, b in zip(session.extract(2), kept, strict=True))


@pytest.mark.iree
@pytest.mark.parametrize("slots", [1, toy.SLOTS])
def test_an_extracted_state_survives_later_steps(slots):
    """The toy updates its state in place, so a snapshot that shares storage would change."""
    bundle = toy.bundle("local", toy.V, False, slots)
    manifest = mf.load(bundle)
    session = Session(Module.open(bundle, manifest), manifest)
    host = session.device.to_host
    session.prefill(PROMPT)
    session.admit(0)
    saved = session.extract(0)
    kept = [host(s) for s in saved]
    ones = [1] * slots
    first = host(session.decode([4] * slots, [13] * slots, ones)[0])[0]
    session.decode([5] * slots, [14] * slots, ones)
    assert all(np.array_equal(host(a), b) for a, b in zip(saved, kept, strict=True))
    session.seed(0, saved)
    assert np.array_equal(host(session.decode([4] * slots, [13] * slots, ones)[0])[0], first)


@pytest.mark.iree
def test_a_single_slot_takes_the_state_of_its_prefill():
    """No call copies it; without a prefill the slot is zeros, and a lost state is found again."""
    bundle = toy.bundle("local", toy.V, False, 1)
    manifest = mf.load(bundle)
    session = Session(Module.open(bundle, manifest), manifest)
    host, call, called = session.device.to_host, session.device.call, []
    broken = False

    def told(function, args):
        called.append(function)
        if broken:
            raise UserError(f"{function} failed")
        return call(function, args)

    session.device.call = told
    assert not any(np.any(host(s)) for s in session.extract(0))
    first = host(session.decode([5], [0], [1])[0])
    want = reference(session, [5])[1][0]
    np.testing.assert_allclose(first[0], want, rtol=2e-5, atol=2e-5)
    called.clear()
    session.prefill(PROMPT)
    work = session.start(PROMPT)
    while not work.step():
        pass
    session.admit(0)
    assert set(called) == {"prefill_8", "prefill_4"}
    session.decode([4], [13], [1])
    broken = True
    with pytest.raises(UserError):
        session.decode([4], [14], [1])
    with pytest.raises(ValueError, match="lost"):
        _ = session.state
    broken = False
    session.admit(0, work)
    assert all(np.any(host(s)) for s in session.extract(0))


@pytest.mark.iree
def test_inactive_rows_keep_their_state(session):
    host = session.device.to_host
    session.prefill(PROMPT)
    session.admit(1)
    before = [host(s) for s in session.extract(1)]
    session.decode([3, 9, 3], [0, 0, 0], [1, 0, 1])
    assert all(np.array_equal(host(a), b) for a, b in zip(session.extract(1), before, strict=True))
    assert np.any(host(session.extract(0)[0]))


@pytest.mark.iree
def test_a_prefill_continues_from_a_saved_state(session):
    host = session.device.to_host
    whole = host(session.prefill(PROMPT)[0])
    first = session.start(PROMPT[:8])
    while not first.step():
        pass
    rest = session.start(PROMPT[8:], position=8, state=first.take())
    while not rest.step():
        pass
    assert rest.position == len(PROMPT)
    assert np.array_equal(host(rest.logits), whole)  # cut at a canonical boundary: same bits


@pytest.mark.iree
def test_states_are_used_once(session):
    session.prefill([1])
    session.admit(0)
    with pytest.raises(ValueError, match="nothing to admit"):
        session.admit(0)
    work = session.start([1])
    work.step()
    work.take()
    with pytest.raises(ValueError, match="taken"):
        session.admit(0, work)


@pytest.mark.iree
def test_bad_prompts_and_rows(session):
    for tokens, word in (([], "no tokens"), ([16], "token id 16"), ([-1], "token id -1")):
        with pytest.raises(UserError, match=word):
            session.prefill(tokens)
    with pytest.raises(ValueError, match="3 rows"):
        session.decode([1], [0], [1])
    for slot in (-1, 3):
        with pytest.raises(ValueError, match="slot"):
            session.reset(slot)
    short = dataclasses.replace(session.manifest.shape, context=10)
    session.manifest = dataclasses.replace(session.manifest, shape=short)
    session.prefill(PROMPT[:10])
    with pytest.raises(UserError, match="at most 10"):
        session.prefill(PROMPT)


def test_the_toy_graph_tells_positions_apart():
    params = toy.jax_params(toy.param_specs("local", toy.V), 7)
    h, tail = jnp.zeros((1, toy.D)), jnp.zeros((2, 1, toy.D))
    outs = [
        toy.prefill(
            params, jnp.asarray([[1, 2, 0, 0]]), jnp.asarray([2]), jnp.asarray([p]), h, tail
        )
        for p in (0, 1)
    ]
    assert not np.allclose(outs[0][0], outs[1][0], atol=1e-3)
