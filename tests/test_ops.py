"""The recurrences against float64: chunked equals stepwise, and padding changes nothing.

Float32 rounds each operation by 6e-8; sums here have at most a few hundred terms of like size, and
decays are exponentials of numbers known to 1e-8 or so. Measured errors are 1e-7 to 6e-7 of the
largest value; TOLERANCE leaves a factor of a few, and a wrong index or mask costs 1e-2 or more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles.nn
import oracles.ssd
import pytest
from driver import relative

from emit.ops import conv, nn, ssd

TOLERANCE = 2e-6
LENGTHS = (1, 2, 63, 64, 65, 200)
HUGE = 1e15  # what padding may hold: finite, and so are its products
H, P, G, N, C = 6, 5, 2, 7, 11  # all different: a swapped axis cannot pass

Arrays = dict[str, Any]
conv_step, conv_scan = jax.jit(conv.step), jax.jit(conv.scan)
ssd_step, ssd_scan = jax.jit(ssd.step), jax.jit(ssd.scan, static_argnums=7)


@pytest.fixture(autouse=True)
def strict_promotion() -> Any:
    with jax.numpy_dtype_promotion("strict"):
        yield


def f32(rng: np.random.Generator, *shape: int) -> Any:
    return rng.standard_normal(shape).astype(np.float32)


def same_bits(a: Any, b: Any) -> bool:
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


# --- convolution -----------------------------------------------------------------------------


def conv_inputs(steps: int, kernel: int, rows: int, seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    return {
        "x": f32(rng, rows, steps, C),
        "weight": f32(rng, kernel, C),
        "bias": f32(rng, C),
        "tail": f32(rng, rows, kernel - 1, C),
    }


@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize(("kernel", "biased"), [(2, True), (4, False), (5, True)])
def test_conv_scan_is_the_oracle_on_ragged_rows(steps: int, kernel: int, biased: bool) -> None:
    a = conv_inputs(steps, kernel, rows=3)
    lengths = np.array([steps, steps // 2, min(steps, 1)], np.int32)
    for b, length in enumerate(lengths):
        a["x"][b, length:] = HUGE
    bias = a["bias"] if biased else None
    y, tail = conv_scan(a["x"], lengths, a["weight"], bias, a["tail"])
    assert y.dtype == tail.dtype == jnp.float32
    for b, length in enumerate(lengths):
        want_y, want_tail = oracles.nn.conv(a["x"][b, :length], a["weight"], bias, a["tail"][b])
        if length:
            assert relative(y[b, :length], want_y) < TOLERANCE
        assert np.array_equal(tail[b], want_tail), "the tail is a copy of inputs"


@pytest.mark.parametrize("kernel", [2, 5])
def test_conv_step_folded_is_the_oracle(kernel: int) -> None:
    a = conv_inputs(9, kernel, rows=2)
    tail: Any = a["tail"]
    ones = np.ones(2, np.int32)
    rows = []
    for t in range(9):
        y, tail = conv_step(a["x"][:, t : t + 1], ones, a["weight"], a["bias"], tail)
        rows.append(y)
    got = np.concatenate(rows, axis=1)
    scanned, scanned_tail = conv_scan(a["x"], 9 * ones, a["weight"], a["bias"], a["tail"])
    assert relative(scanned, got) < TOLERANCE and same_bits(scanned_tail, tail)
    for b in range(2):
        want, want_tail = oracles.nn.conv(a["x"][b], a["weight"], a["bias"], a["tail"][b])
        assert relative(got[b], want) < TOLERANCE and np.array_equal(tail[b], want_tail)


@pytest.mark.parametrize("steps", [1, 7])
def test_conv_padding_changes_no_bit(steps: int) -> None:
    run = conv_step if steps == 1 else conv_scan
    a = conv_inputs(steps, 4, rows=4)
    lengths = np.minimum(np.array([0, steps, 3, 1], np.int32), steps)
    outcomes = []
    for padding in (0.0, HUGE, -3.0):
        x = a["x"].copy()
        for b, length in enumerate(lengths):
            x[b, length:] = padding
        y, tail = run(x, lengths, a["weight"], a["bias"], a["tail"])
        assert same_bits(tail[0], a["tail"][0]), "a row of length 0 keeps its tail"
        valid = [np.asarray(y)[b, :length] for b, length in enumerate(lengths)]
        outcomes.append((np.asarray(tail).tobytes(), [v.tobytes() for v in valid]))
    assert outcomes[0] == outcomes[1] == outcomes[2]


# --- SSD -------------------------------------------------------------------------------------


def ssd_inputs(steps: int, rows: int, groups: int = G, spike: float = 0.5, seed: int = 0) -> Arrays:
    """Random inputs; one dt in five is up to `spike`, the rest up to 0.05; a few are exactly 0."""
    rng = np.random.default_rng(seed)
    dt = rng.uniform(0.0, np.where(rng.random((rows, steps, H)) < 0.2, spike, 0.05))
    dt[rng.random((rows, steps, H)) < 0.05] = 0.0
    return {
        "x": f32(rng, rows, steps, H, P),
        "dt": dt.astype(np.float32),
        "A": -rng.uniform(1.0, 16.0, H).astype(np.float32),
        "Bm": f32(rng, rows, steps, groups, N),
        "Cm": f32(rng, rows, steps, groups, N),
        "D": f32(rng, H),
        "state": f32(rng, rows, H, P, N),
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
    return oracles.ssd.ssd(x, dt, a["A"], Bm, Cm, a["D"], a["state"][b])


def folded(a: Arrays) -> tuple[np.ndarray, Any]:
    """`step` over every token."""
    state: Any = a["state"]
    rows = []
    for t in range(a["x"].shape[1]):
        at = {name: a[name][:, t : t + 1] for name in ("x", "dt", "Bm", "Cm")}
        y, state = ssd_step(at["x"], at["dt"], a["A"], at["Bm"], at["Cm"], a["D"], state)
        rows.append(np.asarray(y))
    return np.concatenate(rows, axis=1), state


@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize("chunk", [16, pytest.param(32, marks=pytest.mark.slow), 64])
def test_ssd_scan_is_the_oracle_on_ragged_rows(steps: int, chunk: int) -> None:
    lengths = np.array([steps, steps // 2, min(steps, 1)], np.int32)
    a = padded(ssd_inputs(steps, rows=3, seed=steps), lengths, HUGE)
    y, state = ssd_scan(*a.values(), chunk)
    assert y.dtype == state.dtype == jnp.float32
    for b, length in enumerate(lengths):
        want_y, want_state = oracle_row(a, b, length)
        if length:
            assert relative(y[b, :length], want_y) < TOLERANCE
        assert relative(state[b], want_state) < TOLERANCE


def test_ssd_step_folded_is_the_oracle_and_the_scan() -> None:
    a = ssd_inputs(100, rows=2)
    y, state = folded(a)
    for b in range(2):
        want_y, want_state = oracle_row(a, b, 100)
        assert relative(y[b], want_y) < TOLERANCE and relative(state[b], want_state) < TOLERANCE
    scanned, scanned_state = ssd_scan(*a.values(), 64)
    assert relative(scanned, y) < TOLERANCE and relative(scanned_state, state) < TOLERANCE


@pytest.mark.parametrize("groups", [1, 3, 6])
def test_ssd_heads_read_their_own_group(groups: int) -> None:
    a = ssd_inputs(20, rows=1, groups=groups)
    want_y, want_state = oracle_row(a, 0, 20)
    for y, state in (folded(a), ssd_scan(*a.values(), 16)):
        assert relative(y[0], want_y) < TOLERANCE and relative(state[0], want_state) < TOLERANCE


@pytest.mark.parametrize("spike", [5.0, 50.0, 1e4])
def test_ssd_forgets_and_remembers_in_one_chunk(spike: float) -> None:
    """Tokens that erase the state (exp(-800) and less) beside tokens that keep it.

    Differences of one float32 running sum of dt A lose the small steps after a large one: 1e-5 at
    spike 5, 1e-2 at 1e4.
    """
    a = ssd_inputs(100, rows=2, spike=spike, seed=3)
    y, state = ssd_scan(*a.values(), 64)
    for b in range(2):
        want_y, want_state = oracle_row(a, b, 100)
        assert relative(y[b], want_y) < TOLERANCE
        for head in range(H):
            assert relative(state[b, head], want_state[head]) < 4 * TOLERANCE


@pytest.mark.parametrize("dt", [0.0, 1e-3, 0.1, 100.0])
def test_ssd_with_every_dt_at_a_limit(dt: float) -> None:
    a = ssd_inputs(70, rows=1)
    a["dt"][:] = dt
    want_y, want_state = oracle_row(a, 0, 70)
    for y, state in (folded(a), ssd_scan(*a.values(), 32)):
        assert relative(y[0], want_y) < TOLERANCE and relative(state[0], want_state) < TOLERANCE
        if dt == 0.0:
            assert same_bits(state, a["state"])


@pytest.mark.parametrize("steps", [1, 7, 70])
def test_ssd_padding_changes_no_bit(steps: int) -> None:
    run: Callable[..., Any] = ssd_step if steps == 1 else ssd_scan
    extra = () if steps == 1 else (32,)
    lengths = np.minimum(np.array([0, steps, 33, 1], np.int32), steps)
    a = ssd_inputs(steps, rows=4)
    outcomes = []
    for padding in (0.0, HUGE, -3.0):
        given = padded(a, lengths, padding)
        y, state = run(*given.values(), *extra)
        assert same_bits(state[0], a["state"][0]), "a row of length 0 keeps its state"
        valid = [np.asarray(y)[b, :length] for b, length in enumerate(lengths)]
        outcomes.append((np.asarray(state).tobytes(), [v.tobytes() for v in valid]))
    assert outcomes[0] == outcomes[1] == outcomes[2]


# --- norms and projections -------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_group_norm_is_the_oracle_per_group(groups: int) -> None:
    rng = np.random.default_rng(groups)
    x, weight = f32(rng, 2, 3, 24), f32(rng, 24)
    x *= np.repeat([0.01, 1.0, 30.0, 0.2], 6).astype(np.float32)  # groups of unequal size
    got = nn.group_rms_norm(x, weight, groups, 1e-3)
    for b in range(2):
        for t in range(3):
            want = oracles.nn.group_rms_norm(x[b, t], weight, groups, 1e-3)
            assert relative(got[b, t], want) < TOLERANCE


def test_rms_norm_is_the_oracle() -> None:
    rng = np.random.default_rng(0)
    x, weight = f32(rng, 1, 2, 13), f32(rng, 13)
    got = nn.rms_norm(x, weight, 0.1)
    for t in range(2):
        want = oracles.nn.rms_norm(x[0, t].astype(np.float64), weight.astype(np.float64), 0.1)
        assert relative(got[0, t], want) < TOLERANCE


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("rows", [1, 8, 9])
def test_linear_is_the_product_with_the_stored_weight(rows: int, dtype: Any) -> None:
    rng = np.random.default_rng(rows)
    x, bias = f32(rng, rows, 1, 40), f32(rng, 6)
    weight = jnp.asarray(f32(rng, 6, 40)).astype(dtype)
    stored = np.asarray(weight).astype(np.float64)
    got = nn.linear(x, weight, bias)
    assert got.dtype == jnp.float32
    assert relative(got, x.astype(np.float64) @ stored.T + bias) < TOLERANCE


@pytest.mark.parametrize("name", sorted(oracles.nn.ACTIVATIONS))
def test_activations_are_the_oracle(name: str) -> None:
    x: Any = np.linspace(-12, 12, 101).astype(np.float32)
    assert (
        relative(nn.ACTIVATIONS[name](x), oracles.nn.ACTIVATIONS[name](x.astype(float))) < TOLERANCE
    )


def test_embed_clamps_to_the_table_and_last_valid_picks_one_row() -> None:
    table = jnp.arange(12, dtype=jnp.bfloat16).reshape(4, 3)
    got = nn.embed(jnp.array([[0, 3, 4, 2**31 - 1]], jnp.int32), table)
    assert got.dtype == jnp.float32
    assert got.tolist() == [[[0, 1, 2], [9, 10, 11], [9, 10, 11], [9, 10, 11]]]
    x = jnp.arange(12, dtype=jnp.float32).reshape(2, 3, 2)
    picked = nn.last_valid(x, jnp.array([2, 0], jnp.int32))
    assert picked.tolist() == [[[2, 3]], [[6, 7]]]
