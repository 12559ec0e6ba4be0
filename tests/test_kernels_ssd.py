"""ssd.c against float64, at every CPU level and at sizes that divide nothing."""

from __future__ import annotations

import jax.numpy as jnp
import kernels
import numpy as np
import pytest
from oracles.ssd import ssd as oracle

from emit.kernels import split
from emit.ops import ssd

# rows, heads, head size, groups, state size
STEPS = ((1, 1, 1, 1, 1), (2, 6, 20, 3, 36), (3, 4, 64, 1, 128), (1, 3, 17, 3, 130))
# and tokens
SCANS = (
    (1, 3, 20, 1, 36, 2),
    (2, 4, 65, 2, 130, 70),
    (1, 2, 64, 1, 128, 64),
    (2, 2, 8, 2, 16, 129),
)
LIMIT = (0.05, 3.0)


def normal(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.standard_normal(shape).astype(np.float32)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def check(level: str, sizes: tuple[int, ...], steps: int, seed: int, erased: bool = False) -> None:
    """Kernel, JAX form and float64 agree, whatever the lengths of the rows.

    `erased`: some tokens erase the state, by decays of e^-100 and less.
    """
    random = np.random.default_rng(seed)
    rows, heads, size, groups, maps = sizes
    inner = heads * size
    parts = split(
        jnp.asarray(normal(random, rows, steps, 2 * inner + 2 * groups * maps + heads + 3)),
        [inner, inner, groups * maps, groups * maps, heads, 3],
    )
    z, x, Bm, Cm, dt, _ = parts
    own = ssd.Heads(
        jnp.asarray(normal(random, heads)),
        jnp.asarray(normal(random, heads) + (4 if erased else 0)),
        jnp.asarray(normal(random, heads)),
        LIMIT,
    )
    state = normal(random, rows, heads, size, maps)
    lengths = random.integers(0, steps + 1, rows)
    lengths[0] = steps
    gate = z if seed % 2 else None
    given = (x, dt, Bm, Cm, own, jnp.asarray(lengths, jnp.int32), jnp.asarray(state), 16, gate)
    with kernels.used(level) as called:
        y, new = (np.asarray(each) for each in ssd.mix(*given))
    assert called == (["ssd_step"] if steps == 1 else ["ssd_scores", "ssd_scan"])
    assert np.isfinite(y).all()
    by_jax = np.asarray(ssd.mix(*given)[0]) if level == kernels.FIRST else y
    raw = np.asarray(dt.array, np.float64) + np.asarray(own.dt_bias)
    width = np.clip(np.log1p(np.exp(-np.abs(raw))) + np.maximum(raw, 0), *LIMIT)
    for b, n in enumerate(lengths):
        want, after = oracle(
            np.asarray(x.array)[b, :n].reshape(n, heads, size),
            width[b, :n],
            -np.exp(np.asarray(own.A_log, np.float64)),
            np.asarray(Bm.array)[b, :n].reshape(n, groups, maps),
            np.asarray(Cm.array)[b, :n].reshape(n, groups, maps),
            np.asarray(own.D),
            state[b],
        )
        want = want.reshape(n, inner)
        if gate is not None:
            want = want * silu(np.asarray(z.array, np.float64)[b, :n])
        scale = np.sqrt(maps)
        np.testing.assert_allclose(y[b, :n], want, 1e-5, 4e-6 * scale)
        np.testing.assert_allclose(new[b], after, 1e-5, 4e-6 * scale)
        np.testing.assert_allclose(y[b, :n], by_jax[b, :n], 1e-5, 1e-5 * scale)
        if n == 0:
            np.testing.assert_array_equal(new[b], state[b])


@pytest.mark.parametrize("level", kernels.levels())
def test_steps_are_those_of_float64(level: str) -> None:
    for seed, sizes in enumerate(STEPS):
        check(level, sizes, 1, seed)


@pytest.mark.parametrize("level", kernels.levels())
def test_scans_are_those_of_float64(level: str) -> None:
    for seed, (*sizes, steps) in enumerate(SCANS):
        check(level, tuple(sizes), steps, seed)


def test_a_token_that_erases_the_state_costs_no_digits() -> None:
    check("x86-64-v3", (1, 2, 8, 1, 16), 100, 3, erased=True)
