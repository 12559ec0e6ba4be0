"""RWKV-7's recurrence and its token shift against float64; `scan` equals `step` folded.

Float32 rounds each operation by 6e-8; errors measured here are 1e-7 to 6e-7 of the largest value,
1e-6 in states of 200 single steps. TOLERANCE leaves a factor of a few, and a wrong index or mask
costs 1e-2 or more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from driver import relative
from oracles.wkv7 import wkv7 as oracle

from emit.ops import shift, wkv7

TOLERANCE = 3e-6
LENGTHS = (1, 2, 63, 65, 200)
STRONGEST = math.exp(-0.5)  # the most that a token decays, as a logarithm
HUGE = 1e15  # what padding may hold: finite, and so are its products
H, K, V = 3, 10, 7  # different: a swapped axis cannot pass
TOKENS = ("r", "log_w", "k", "v", "a", "b")

Arrays = dict[str, Any]
step, scan = jax.jit(wkv7.step), jax.jit(wkv7.scan, static_argnums=7)


@pytest.fixture(autouse=True)
def strict_promotion() -> Any:
    with jax.numpy_dtype_promotion("strict"):
        yield


def inputs(
    steps: int,
    rows: int,
    decay: tuple[float, float] = (0.0, STRONGEST),
    rate: tuple[float, float] = (0.0, 1.0),
    parallel: float = 0.0,
    seed: int = 0,
) -> Arrays:
    """Random inputs: logarithms of decays and learning rates between limits.

    `parallel` is how much of each removal key is one vector for all tokens.
    """
    rng = np.random.default_rng(seed)

    def f32(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    kappa = (1 - parallel) * f32(rows, steps, H, K) + parallel * f32(rows, 1, H, K)
    kappa /= np.linalg.norm(kappa, axis=-1, keepdims=True)
    return {
        "r": f32(rows, steps, H, K),
        "log_w": -rng.uniform(*decay, (rows, steps, H, K)).astype(np.float32),
        "k": f32(rows, steps, H, K),
        "v": f32(rows, steps, H, V),
        "a": -kappa,
        "b": kappa * rng.uniform(*rate, (rows, steps, H, K)).astype(np.float32),
        "state": f32(rows, H, V, K),
    }


def padded(a: Arrays, lengths: np.ndarray, padding: float) -> Arrays:
    """The identity update after each row's length, and `padding` in everything else there."""
    out = {name: array.copy() for name, array in a.items()}
    for b, length in enumerate(lengths):
        for name in ("r", "v", "b"):
            out[name][b, length:] = padding
        for name in ("log_w", "k", "a"):
            out[name][b, length:] = 0.0
    return out


def oracle_row(a: Arrays, b: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    row = {name: a[name][b, :length].astype(np.float64) for name in TOKENS}
    row["log_w"] = np.exp(row["log_w"])
    return oracle(*[*row.values(), a["state"][b]])


def folded(a: Arrays) -> tuple[np.ndarray, Any]:
    """`step` over every token."""
    state: Any = a["state"]
    rows = []
    for t in range(a["r"].shape[1]):
        y, state = step(*(a[name][:, t : t + 1] for name in TOKENS), state)
        rows.append(np.asarray(y))
    return np.concatenate(rows, axis=1), state


def same_bits(a: Any, b: Any) -> bool:
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize(
    ("steps", "chunk"), [*((n, 32) for n in LENGTHS), (65, 16), (100, 64), (65, 4), (6, 1)]
)
def test_scan_is_the_oracle_on_ragged_rows(steps: int, chunk: int) -> None:
    lengths = np.array([steps, steps // 2, min(steps, 1)], np.int32)
    a = padded(inputs(steps, rows=3, seed=steps), lengths, HUGE)
    y, state = scan(*a.values(), chunk)
    assert y.dtype == state.dtype == jnp.float32 and y.shape == a["v"].shape
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
    scanned, scanned_state = scan(*a.values(), 32)
    assert relative(scanned, y) < TOLERANCE and relative(scanned_state, state) < TOLERANCE


@pytest.mark.parametrize("chunk", [16, 32, 64])
@pytest.mark.parametrize("parallel", [0.0, 0.99, 1.0])
@pytest.mark.parametrize("rate", [(0.0, 1e-3), (0.999, 1.0)])
@pytest.mark.parametrize("decay", [(0.0, 0.0), (0.0, 1e-3), (0.6, STRONGEST)])
def test_at_the_limits_of_gates_and_keys(
    decay: tuple[float, float], rate: tuple[float, float], parallel: float, chunk: int
) -> None:
    """Keys all but parallel that replace all of a value: where a series for the inverse is lost."""
    a = inputs(130, 1, decay, rate, parallel, seed=chunk)
    y, state = scan(*a.values(), chunk)
    want_y, want_state = oracle_row(a, 0, 130)
    assert relative(y[0], want_y) < TOLERANCE
    for h in range(H):
        assert relative(state[0, h], want_state[h]) < TOLERANCE


@pytest.mark.parametrize("steps", [1, 7, 70])
def test_padding_changes_no_bit(steps: int) -> None:
    run: Callable[..., Any] = step if steps == 1 else scan
    extra = () if steps == 1 else (16,)
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
    extra = () if steps == 1 else (16,)
    a = inputs(steps, rows=3)
    y, state = run(*a.values(), *extra)
    for b in range(3):
        alone, alone_state = run(*(v[b : b + 1] for v in a.values()), *extra)
        assert relative(y[b], alone[0]) < TOLERANCE
        assert relative(state[b], alone_state[0]) < TOLERANCE


# --- token shift -----------------------------------------------------------------------------


def test_shift_gives_each_token_the_one_before_and_keeps_the_last_valid() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 5, 3)).astype(np.float32)
    previous = rng.standard_normal((4, 3)).astype(np.float32)
    lengths = np.array([5, 0, 1, 3], np.int32)
    before, new = jax.jit(shift.scan)(x, lengths, previous)
    assert np.array_equal(before[:, 0], previous) and np.array_equal(before[:, 1:], x[:, :-1])
    assert np.array_equal(new, [x[0, 4], previous[1], x[2, 0], x[3, 2]])
    state: Any = previous
    for t in range(5):
        valid = (t < lengths).astype(np.int32)
        stepped, state = jax.jit(shift.step)(x[:, t : t + 1], valid, state)
        rows = lengths > t
        assert np.array_equal(stepped[rows, 0], np.asarray(before)[rows, t])
    assert np.array_equal(state, new)
