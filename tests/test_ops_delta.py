"""The gated delta rule against float64: `scan` equals `step` folded, and padding changes nothing.

Float32 rounds each operation by 6e-8; errors measured here are 1e-7 to 8e-7 of the largest value.
TOLERANCE leaves a factor of a few, and a wrong index or mask costs 1e-2 or more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from driver import relative
from oracles.delta import delta as oracle

from emit.ops import delta

TOLERANCE = 2e-6
LENGTHS = (1, 2, 63, 65, pytest.param(200, marks=pytest.mark.slow))
HUGE = 1e15  # what padding may hold: finite, and so are its products
H, G, K, V = 6, 2, 7, 5  # different: a swapped axis cannot pass
CHUNK = 32
CHUNKS = [pytest.param(16, marks=pytest.mark.slow), 32, 64]
CHANNELS = [1, K]  # decays of a head

Arrays = dict[str, Any]
step, scan = jax.jit(delta.step), jax.jit(delta.scan, static_argnums=6)


@pytest.fixture(autouse=True)
def strict_promotion() -> Any:
    with jax.numpy_dtype_promotion("strict"):
        yield


def inputs(
    steps: int, rows: int, channels: int, spike: float = 0.5, near: float = 1.0, seed: int = 0
) -> Arrays:
    """Random inputs; one g in five is down to -`spike`, the rest to -0.05; a few are exactly 0.

    `near` is how far keys are from one direction, in parts of its length.
    """
    rng = np.random.default_rng(seed)

    def f32(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    def unit(a: Any) -> Any:
        return a / np.sqrt(np.sum(a * a, axis=-1, keepdims=True, dtype=np.float32))

    shape = (rows, steps, H, channels)
    g = -rng.uniform(0.0, np.where(rng.random(shape) < 0.2, spike, 0.05))
    g[rng.random(shape) < 0.05] = 0.0
    keys = f32(rows, steps, G, K) * np.float32(near)
    return {
        "q": unit(f32(rows, steps, G, K)),
        "k": unit(keys if near == 1.0 else keys + unit(f32(rows, 1, G, K))),
        "v": f32(rows, steps, H, V),
        "g": g.astype(np.float32),
        "beta": rng.uniform(0.0, 1.0, shape[:3]).astype(np.float32),
        "state": f32(rows, H, K, V),
    }


def padded(a: Arrays, lengths: Sequence[int] | np.ndarray, padding: float) -> Arrays:
    """g = 0 and beta = 0 after each row's length, and `padding` in everything else there."""
    out = {name: array.copy() for name, array in a.items()}
    for b, length in enumerate(lengths):
        for name in ("q", "k", "v", "g", "beta"):
            out[name][b, length:] = 0.0 if name in ("g", "beta") else padding
    return out


def folded(a: Arrays) -> tuple[np.ndarray, Any]:
    """`step` over every token."""
    *tokens, state = a.values()
    rows = []
    for t in range(a["v"].shape[1]):
        y, state = step(*(each[:, t : t + 1] for each in tokens), state)
        rows.append(np.asarray(y))
    return np.concatenate(rows, axis=1), state


def agrees(y: Any, state: Any, a: Arrays, lengths: Sequence[int] | None = None) -> float:
    """The largest relative difference of any row from the oracle's."""
    worst = 0.0
    for b in range(len(state)):
        length = a["v"].shape[1] if lengths is None else lengths[b]
        q, k, v, g, beta, before = (each[b] for each in a.values())
        q, k, v, g, beta = (each[:length] for each in (q, k, v, g, beta))
        want_y, want_state = oracle(q, k, v, g, beta, before)
        if length:
            worst = max(worst, relative(y[b, :length], want_y))
        worst = max(worst, relative(state[b], want_state))
    return worst


def same_bits(a: Any, b: Any) -> bool:
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("channels", CHANNELS)
def test_scan_is_the_oracle_on_ragged_rows(steps: int, chunk: int, channels: int) -> None:
    lengths = [steps, steps // 2, 1]
    a = padded(inputs(steps, 3, channels, seed=steps), lengths, HUGE)
    y, state = scan(*a.values(), chunk)
    assert y.dtype == state.dtype == jnp.float32 and y.shape == a["v"].shape
    assert agrees(y, state, a, lengths) < TOLERANCE


@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize("channels", CHANNELS)
def test_step_folded_is_the_oracle_and_the_scan(steps: int, channels: int) -> None:
    a = inputs(steps, 3, channels, seed=steps)
    y, state = folded(a)
    assert agrees(y, state, a) < TOLERANCE
    scanned, scanned_state = scan(*a.values(), CHUNK)
    assert relative(scanned, y) < TOLERANCE and relative(scanned_state, state) < TOLERANCE


@pytest.mark.parametrize("channels", CHANNELS)
def test_one_decay_is_the_same_decay_in_every_channel(channels: int) -> None:
    a = inputs(65, 3, 1)
    given = {**a, "g": np.repeat(a["g"], channels, axis=-1)}
    y, state = scan(*given.values(), CHUNK)
    assert agrees(y, state, a) < TOLERANCE


@pytest.mark.parametrize("spike", [5.0, 50.0, 1e4])
@pytest.mark.parametrize("channels", CHANNELS)
def test_forgets_and_remembers_in_one_chunk(spike: float, channels: int) -> None:
    """Tokens that erase the state (exp(-800) and less) beside tokens that keep it."""
    a = inputs(65, 3, channels, spike=spike, seed=3)
    for y, state in (folded(a), scan(*a.values(), CHUNK)):
        assert agrees(y, state, a) < TOLERANCE


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("gate", [0.0, -1e-3, -20.0, -1e6])
@pytest.mark.parametrize("beta", [0.0, 1e-4, 1.0])
def test_every_gate_at_a_limit(gate: float, beta: float, channels: int) -> None:
    a = inputs(65, 3, channels)
    a["g"][:], a["beta"][:] = gate, beta
    for y, state in (folded(a), scan(*a.values(), CHUNK)):
        if gate < -10.0 and beta == 0.0:
            assert not np.asarray(state).any() and np.isfinite(y).all()
            continue
        assert agrees(y, state, a) < TOLERANCE
        if gate == beta == 0.0:
            assert same_bits(state, a["state"])


@pytest.mark.parametrize("near", [0.1, 1e-3, 0.0])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("channels", CHANNELS)
def test_nearly_parallel_keys(near: float, chunk: int, channels: int) -> None:
    """A power series of the inverse loses all digits here at a chunk of 64."""
    a = inputs(65, 3, channels, near=near)
    a["g"] *= np.float32(1e-2)
    a["beta"] = 1.0 - np.float32(1e-2) * a["beta"]
    y, state = scan(*a.values(), chunk)
    assert agrees(y, state, a) < 2 * TOLERANCE


@pytest.mark.parametrize("steps", [1, 7, 65])
@pytest.mark.parametrize("channels", CHANNELS)
def test_padding_changes_no_bit(steps: int, channels: int) -> None:
    run: Callable[..., Any] = step if steps == 1 else scan
    extra = () if steps == 1 else (CHUNK,)
    lengths = np.minimum(np.array([0, steps, 33], np.int32), steps)
    a = inputs(steps, 3, channels)
    outcomes = []
    for padding in (0.0, HUGE, -3.0):
        y, state = run(*padded(a, lengths, padding).values(), *extra)
        assert same_bits(state[0], a["state"][0]), "a row of length 0 keeps its state"
        valid = [np.asarray(y)[b, :length] for b, length in enumerate(lengths)]
        outcomes.append((np.asarray(state).tobytes(), [v.tobytes() for v in valid]))
    assert outcomes[0] == outcomes[1] == outcomes[2]


@pytest.mark.parametrize("cut", [1, 33])
@pytest.mark.parametrize("channels", CHANNELS)
def test_a_prompt_may_be_cut_anywhere(cut: int, channels: int) -> None:
    a = inputs(65, 3, channels)
    *tokens, state = a.values()
    whole, after = scan(*a.values(), CHUNK)
    first, state = scan(*(each[:, :cut] for each in tokens), state, CHUNK)
    second, state = scan(*(each[:, cut:] for each in tokens), state, CHUNK)
    assert relative(np.concatenate([first, second], axis=1), whole) < TOLERANCE
    assert relative(state, after) < TOLERANCE


@pytest.mark.parametrize("steps", [1, 65])
@pytest.mark.parametrize("channels", CHANNELS)
def test_a_row_is_the_row_alone(steps: int, channels: int) -> None:
    run: Callable[..., Any] = step if steps == 1 else scan
    extra = () if steps == 1 else (CHUNK,)
    a = inputs(steps, 3, channels)
    y, state = run(*a.values(), *extra)
    for b in range(3):
        alone, alone_state = run(*(each[b : b + 1] for each in a.values()), *extra)
        assert relative(y[b], alone[0]) < TOLERANCE
        assert relative(state[b], alone_state[0]) < TOLERANCE


def test_keys_of_length_one() -> None:
    x = np.array([[3.0, 4.0], [0.0, 0.0], [1e-3, 0.0]], np.float32)
    want = np.array([[0.6, 0.8], [0.0, 0.0], [1.0 / 2**0.5, 0.0]])
    assert relative(delta.l2_norm(jnp.asarray(x)), want) < TOLERANCE
