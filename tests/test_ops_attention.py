"""Attention over a KV region against float64, and the region itself place by place.

Float32 softmax over a few hundred keys: measured errors are 1e-7 to 6e-7 of the largest output.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import numpy as np
import oracles.attention
import pytest
from driver import relative

from emit.ops import attention

TOLERANCE = 2e-6
HUGE = 1e15  # what padding may hold
G, D = 3, 10
SCALE = 0.37

Tokens = tuple[np.ndarray, np.ndarray, np.ndarray]  # q, k, v


@pytest.fixture(autouse=True)
def strict_promotion() -> Any:
    with jax.numpy_dtype_promotion("strict"):
        yield


@cache
def compiled(name: str, window: int | None, softcap: float | None) -> Any:
    run = getattr(attention, name)
    return jax.jit(partial(run, scale=SCALE, window=window, softcap=softcap))


@dataclass
class Rows:
    """Sequences with a past: what each row's region holds, and where its next token belongs."""

    past_k: list[np.ndarray]  # [P, G, D] a row
    past_v: list[np.ndarray]
    keys: np.ndarray
    values: np.ndarray
    window: int | None
    softcap: float | None

    @classmethod
    def after(
        cls,
        pasts: list[int],
        capacity: int,
        window: int | None = None,
        softcap: float | None = None,
        seed: int = 0,
    ) -> Rows:
        """Rows after `pasts` tokens; places without a token hold the numbers of an older use."""
        rng = np.random.default_rng(seed)
        keys, values = (random(rng, len(pasts), G, capacity, D) for _ in range(2))
        past_k, past_v = ([random(rng, p, G, D) for p in pasts] for _ in range(2))
        for b, past in enumerate(pasts):
            place(keys[b], past_k[b], 0, past, capacity)
            place(values[b], past_v[b], 0, past, capacity)
        return cls(past_k, past_v, keys, values, window, softcap)

    @property
    def positions(self) -> np.ndarray:
        return np.array([len(p) for p in self.past_k], np.int32)

    def run(self, a: Tokens, lengths: Any, name: str | None = None) -> Any:
        name = name or ("step" if a[0].shape[1] == 1 else "scan")
        call = compiled(name, self.window, self.softcap)
        given = (self.positions, self.keys, self.values)
        return call(*a, np.asarray(lengths, np.int32), *given)

    def check(self, a: Tokens, lengths: Any, result: Any) -> None:
        """`result` against the oracle and against the places that each token must have."""
        (q, k, v), (y, keys, values) = a, map(np.asarray, result)
        for b, length in enumerate(lengths):
            past = (self.past_k[b], self.past_v[b])
            mine = (q[b, :length], k[b, :length], v[b, :length])
            if length:
                want = oracles.attention.attention(*mine, past, SCALE, self.window, self.softcap)
                assert relative(y[b, :length], want) < TOLERANCE
            for region, old, new in ((keys, self.keys, k), (values, self.values, v)):
                expected = old[b].copy()
                start = len(self.past_k[b])
                place(expected, new[b], start, int(length), region.shape[2])
                assert same_bits(region[b], expected)


def place(region: np.ndarray, tokens: np.ndarray, start: int, count: int, capacity: int) -> None:
    """Token by token, position p at place p mod capacity."""
    for t in range(count):
        region[:, (start + t) % capacity] = tokens[t]


def random(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def tokens(rows: int, steps: int, ratio: int = 2, seed: int = 1) -> Tokens:
    rng = np.random.default_rng(seed)
    q, k, v = (random(rng, rows, steps, heads, D) for heads in (G * ratio, G, G))
    return q, k, v


def same_bits(a: Any, b: Any) -> bool:
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


# --- against float64 -------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 63, 65, 200])
def test_scan_is_the_oracle_on_ragged_rows_with_a_past(steps: int) -> None:
    rows = Rows.after([0, 7, 31], capacity=240)
    a, lengths = tokens(3, steps), [steps, max(steps // 2, 1), min(steps, 3)]
    rows.check(a, lengths, rows.run(a, lengths, "scan"))


@pytest.mark.parametrize(
    ("ratio", "window", "softcap"), [(1, None, None), (4, None, 1.5), (1, 16, 1.5), (4, 16, None)]
)
def test_variants(ratio: int, window: int | None, softcap: float | None) -> None:
    for name, steps in (("step", 1), ("scan", 9)):
        rows = Rows.after([0, 7, 31, 16], 16 if window else 50, window, softcap)
        a, lengths = tokens(4, steps, ratio), [steps] * 4
        rows.check(a, lengths, rows.run(a, lengths, name))


@pytest.mark.parametrize(
    ("window", "steps"),
    [(1, 1), (1, 5), (2, 9), (16, 1), (16, 15), (16, 16), (16, 17), (16, 65), (63, 65), (100, 65)],
)
def test_a_ring_of_any_window_and_any_chunk(window: int, steps: int) -> None:
    """Windows below, at and above the chunk, dividing it or not; the past wraps or does not."""
    rows = Rows.after([0, 3, 64, 150], window, window)
    a, lengths = tokens(4, steps), [steps, max(steps - 1, 1), steps, max(steps // 3, 1)]
    rows.check(a, lengths, rows.run(a, lengths))


@pytest.mark.parametrize(("window", "capacity"), [(None, 96), (16, 16), (500, 96)])
def test_scan_is_folded_step(window: int | None, capacity: int) -> None:
    """From a past, 65 tokens at once and one by one; a window may be wider than its region."""
    a = tokens(2, 65)
    rows = Rows.after([5, 31], capacity, window)
    y, keys, values = rows.run(a, [65, 65])
    outputs = []
    call = compiled("step", window, None)
    ones, state = np.ones(2, np.int32), (rows.keys, rows.values)
    for t in range(65):
        one = (part[:, t : t + 1] for part in a)
        out, *state = call(*one, ones, rows.positions + np.int32(t), *state)
        outputs.append(out)
    assert relative(y, np.concatenate(outputs, axis=1)) < TOLERANCE
    assert same_bits(keys, state[0]) and same_bits(values, state[1])
    rows.check(a, [65, 65], (y, keys, values))


@pytest.mark.parametrize("window", [None, 8])
def test_any_split_is_one_scan(window: int | None) -> None:
    a = tokens(1, 40)
    rows = Rows.after([3], window or 43, window)
    y, keys, values = rows.run(a, [40])
    for cuts in ([1, 39], [16, 16, 8], [7, 1, 1, 31]):
        at, parts, state = 0, [], (rows.keys, rows.values)
        for size in cuts:
            given = tuple(
                np.pad(p[:, at : at + size], [(0, 0), (0, 40 - size), (0, 0), (0, 0)]) for p in a
            )
            position = np.array([3 + at], np.int32)
            out, *state = compiled("scan", window, None)(
                *given, np.array([size], np.int32), position, *state
            )
            parts.append(np.asarray(out)[:, :size])
            at += size
        assert relative(np.concatenate(parts, axis=1), y) < TOLERANCE
        assert same_bits(state[0], keys) and same_bits(state[1], values)


@pytest.mark.parametrize("window", [None, 16])
def test_blocks_of_tokens_are_the_whole(window: int | None, monkeypatch: Any) -> None:
    """A long context is attended to a few tokens at a time, whatever remains for the last block."""
    a, lengths = tokens(2, 13), [13, 5]
    rows = Rows.after([0, 7], window or 24, window)
    whole = rows.run(a, lengths)
    monkeypatch.setattr(attention, "SCORES", 2 * G * 4 * (window + 13 if window else 24))
    run = jax.jit(partial(attention.scan, scale=SCALE, window=window))
    given = (np.asarray(lengths, np.int32), rows.positions, rows.keys, rows.values)
    assert str(jax.make_jaxpr(run)(*a, *given)).count("dot_general") == (16 if window else 8)
    result = run(*a, *given)
    rows.check(a, lengths, result)
    assert relative(result[0][0], whole[0][0]) < TOLERANCE / 4


# --- the region's end ------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 5, 16, 40])
def test_the_last_places_of_a_region(steps: int) -> None:
    """A padded chunk whose tail would pass the end, exactly full, and a chunk above the region."""
    capacity = 16
    pasts = [15, 11, 0, 16, 9]
    lengths = [min(steps, capacity - past) for past in pasts]
    rows = Rows.after(pasts, capacity)
    a = tokens(5, steps)
    rows.check(a, lengths, rows.run(a, lengths))


@pytest.mark.parametrize(("name", "steps"), [("step", 1), ("scan", 6)])
def test_tokens_past_the_region_are_dropped(name: str, steps: int) -> None:
    rows = Rows.after([16, 14], 16)
    a = tokens(2, steps)
    _, keys, _ = rows.run(a, [steps, steps], name)
    want = rows.keys.copy()
    place(want[1], a[1][1], 14, min(steps, 2), 16)
    assert same_bits(keys, want)


# --- padding, rows ---------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 5, 16])
@pytest.mark.parametrize("steps", [1, 9])
def test_padding_changes_no_bit(window: int | None, steps: int) -> None:
    rows = Rows.after([0, 7, 12, 3], window or 24, window)
    lengths = np.minimum(np.array([0, steps, 3, 1], np.int32), steps)
    outcomes = []
    for padding in (0.0, HUGE, -3.0):
        a = tokens(4, steps)
        for part in a:
            for b, length in enumerate(lengths):
                part[b, length:] = padding
        y, keys, values = map(np.asarray, rows.run(a, lengths))
        assert same_bits(keys[0], rows.keys[0]) and same_bits(values[0], rows.values[0])
        valid = [y[b, :length].tobytes() for b, length in enumerate(lengths)]
        outcomes.append((valid, keys.tobytes(), values.tobytes()))
    assert outcomes[0] == outcomes[1] == outcomes[2]


@pytest.mark.parametrize("window", [None, 16])
def test_infinite_padding_changes_no_bit_of_a_scan(window: int | None) -> None:
    rows, a = Rows.after([7], 16 if window else 24, window), tokens(1, 9)
    want = [np.asarray(part)[:, :4] for part in rows.run(a, [4])]
    for part in a:
        part[:, 4:] = np.nan
    got = [np.asarray(part)[:, :4] for part in rows.run(a, [4])]
    assert all(same_bits(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("steps", [1, 9])
def test_places_of_an_older_use_change_no_bit(window: int | None, steps: int) -> None:
    """What stands where no token of the sequence is, must not matter."""
    a, outcomes = tokens(2, steps), []
    for filling in (0.0, HUGE):
        rows = Rows.after([0, 4], 16, window)
        for b, past in enumerate(rows.positions):
            rows.keys[b, :, past:] = filling
            rows.values[b, :, past:] = filling
        outcomes.append(np.asarray(rows.run(a, [steps, steps])[0]).tobytes())
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("steps", [1, 9])
def test_rows_of_a_batch_are_rows_alone(window: int | None, steps: int) -> None:
    rows = Rows.after([0, 7, 15], 16 if window else 24, window)
    a, lengths = tokens(3, steps), [steps, max(steps // 2, 1), 0]
    together = [np.asarray(part) for part in rows.run(a, lengths)]
    for b, length in enumerate(lengths):
        s = slice(b, b + 1)
        alone = Rows(rows.past_k[s], rows.past_v[s], rows.keys[s], rows.values[s], window, None)
        parts = [np.asarray(p) for p in alone.run((a[0][s], a[1][s], a[2][s]), [length])]
        assert same_bits(parts[1][0], together[1][b]) and same_bits(parts[2][0], together[2][b])
        if length:
            assert relative(parts[0][0, :length], together[0][b, :length]) < TOLERANCE / 4


@pytest.mark.parametrize("window", [None, 16])
def test_a_poisoned_row_touches_no_other(window: int | None) -> None:
    """A slot not in use holds NaN, and keeps it."""
    a, outcomes = tokens(3, 1), []
    for poison in (0.0, np.nan):
        rows = Rows.after([9, 7, 3], 16, window)
        rows.keys[1] = rows.values[1] = poison
        y, keys, values = map(np.asarray, rows.run(a, [1, 0, 1]))
        assert same_bits(keys[1], rows.keys[1]) and same_bits(values[1], rows.values[1])
        outcomes.append((y[[0, 2]].tobytes(), keys[[0, 2]].tobytes()))
    assert outcomes[0] == outcomes[1]
