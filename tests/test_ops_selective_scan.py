"""Mamba's recurrence against float64: `scan` equals `step` folded, and padding changes nothing.

Float32 rounds each operation by 6e-8; errors measured here are 1e-7 to 4e-7 of the largest value.
TOLERANCE leaves a factor of a few, and a wrong index or mask costs 1e-2 or more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from driver import relative
from oracles.selective_scan import selective_scan as oracle

from emit.ops import selective_scan

TOLERANCE = 2e-6
LENGTHS = (1, 2, 63, 65, 200)
HUGE = 1e15  # what padding may hold: finite, and so are its products
WIDTH, N = 11, 7  # different: a swapped axis cannot pass
CHUNK = 16

Arrays = dict[str, Any]
step, scan = jax.jit(selective_scan.step), jax.jit(selective_scan.scan, static_argnums=7)


@pytest.fixture(autouse=True)
def strict_promotion() -> Any:
    with jax.numpy_dtype_promotion("strict"):
        yield


def inputs(steps: int, rows: int, spike: float = 0.5, seed: int = 0) -> Arrays:
    """Random inputs; one dt in five is up to `spike`, the rest up to 0.05; a few are exactly 0."""
    rng = np.random.default_rng(seed)

    def f32(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    dt = rng.uniform(0.0, np.where(rng.random((rows, steps, WIDTH)) < 0.2, spike, 0.05))
    dt[rng.random((rows, steps, WIDTH)) < 0.05] = 0.0
    return {
        "x": f32(rows, steps, WIDTH),
        "dt": dt.astype(np.float32),
        "A": -rng.uniform(1.0, 16.0, (WIDTH, N)).astype(np.float32),
        "Bm": f32(rows, steps, N),
        "Cm": f32(rows, steps, N),
        "D": f32(WIDTH),
        "state": f32(rows, WIDTH, N),
    }


def padded(a: Arrays, lengths: np.ndarray, padding: float) -> Arrays:
    """dt = 0 after each row's length, and `padding` in everything else there."""
    out = {name: array.copy() for name, array in a.items()}
    for b, length in enumerate(lengths):
        for name in ("x", "Bm", "Cm"):
            out[name][b, length:] = padding
        out["dt"][b, length:] = 0.0
    return out


def oracle_row(a: Arrays, b: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    x, dt, Bm, Cm = (a[name][b, :length] for name in ("x", "dt", "Bm", "Cm"))
    return oracle(x, dt, a["A"], Bm, Cm, a["D"], a["state"][b])


def folded(a: Arrays) -> tuple[np.ndarray, Any]:
    """`step` over every token."""
    state: Any = a["state"]
    rows = []
    for t in range(a["x"].shape[1]):
        at = {name: a[name][:, t : t + 1] for name in ("x", "dt", "Bm", "Cm")}
        y, state = step(at["x"], at["dt"], a["A"], at["Bm"], at["Cm"], a["D"], state)
        rows.append(np.asarray(y))
    return np.concatenate(rows, axis=1), state


def same_bits(a: Any, b: Any) -> bool:
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize(("steps", "chunk"), [*((n, CHUNK) for n in LENGTHS), (65, 4)])
def test_scan_is_the_oracle_on_ragged_rows(steps: int, chunk: int) -> None:
    lengths = np.array([steps, steps // 2, min(steps, 1)], np.int32)
    a = padded(inputs(steps, rows=3, seed=steps), lengths, HUGE)
    y, state = scan(*a.values(), chunk)
    assert y.dtype == state.dtype == jnp.float32 and y.shape == a["x"].shape
    for b, length in enumerate(lengths):
        want_y, want_state = oracle_row(a, b, length)
        if length:
            assert relative(y[b, :length], want_y) < TOLERANCE
        assert relative(state[b], want_state) < TOLERANCE


@pytest.mark.parametrize("steps", LENGTHS)
def test_step_folded_is_the_oracle_and_the_scan(steps: int) -> None:
    a = inputs(steps, rows=2, seed=steps)
    y, state = folded(a)
    for b in range(2):
        want_y, want_state = oracle_row(a, b, steps)
        assert relative(y[b], want_y) < TOLERANCE and relative(state[b], want_state) < TOLERANCE
    scanned, scanned_state = scan(*a.values(), CHUNK)
    assert relative(scanned, y) < TOLERANCE and relative(scanned_state, state) < TOLERANCE


@pytest.mark.parametrize("spike", [5.0, 50.0, 1e4])
def test_forgets_and_remembers_in_one_chunk(spike: float) -> None:
    """Tokens that erase the state (exp(-800) and less) beside tokens that keep it."""
    a = inputs(100, rows=2, spike=spike, seed=3)
    y, state = scan(*a.values(), CHUNK)
    for b in range(2):
        want_y, want_state = oracle_row(a, b, 100)
        assert relative(y[b], want_y) < TOLERANCE
        for channel in range(WIDTH):
            assert relative(state[b, channel], want_state[channel]) < 4 * TOLERANCE


@pytest.mark.parametrize("dt", [0.0, 1e-3, 0.1, 100.0])
def test_every_dt_at_a_limit(dt: float) -> None:
    a = inputs(70, rows=1)
    a["dt"][:] = dt
    want_y, want_state = oracle_row(a, 0, 70)
    for y, state in (folded(a), scan(*a.values(), CHUNK)):
        assert relative(y[0], want_y) < TOLERANCE and relative(state[0], want_state) < TOLERANCE
        if dt == 0.0:
            assert same_bits(state, a["state"])


@pytest.mark.parametrize("steps", [1, 7, 70])
def test_padding_changes_no_bit(steps: int) -> None:
    run: Callable[..., Any] = step if steps == 1 else scan
    extra = () if steps == 1 else (CHUNK,)
    lengths = np.minimum(np.array([0, steps, 33, 1], np.int32), steps)
    a = inputs(steps, rows=4)
    outcomes = []
    for padding in (0.0, HUGE, -3.0):
        given = padded(a, lengths, padding)
        y, state = run(*given.values(), *extra)
        assert same_bits(state[0], a["state"][0]), "a row of length 0 keeps its state"
        valid = [np.asarray(y)[b, :length] for b, length in enumerate(lengths)]
        outcomes.append((np.asarray(state).tobytes(), [v.tobytes() for v in valid]))
    assert outcomes[0] == outcomes[1] == outcomes[2]


@pytest.mark.parametrize("steps", [1, 40])
def test_a_row_is_the_row_alone(steps: int) -> None:
    run: Callable[..., Any] = step if steps == 1 else scan
    extra = () if steps == 1 else (CHUNK,)
    a = inputs(steps, rows=3)
    y, state = run(*a.values(), *extra)
    for b in range(3):
        one = {n: v if n in "AD" else v[b : b + 1] for n, v in a.items()}
        alone, alone_state = run(*one.values(), *extra)
        assert relative(y[b], alone[0]) < TOLERANCE
        assert relative(state[b], alone_state[0]) < TOLERANCE
