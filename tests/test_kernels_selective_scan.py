"""selective_scan.c against float64, at every CPU level and at sizes that divide nothing."""

from __future__ import annotations

import jax.numpy as jnp
import kernels
import numpy as np
import pytest
from oracles.selective_scan import selective_scan as oracle

from emit.kernels import split
from emit.ops import selective_scan

# rows, tokens, channels, maps
SIZES = ((1, 1, 1, 1), (3, 1, 52, 16), (2, 1, 17, 35), (1, 7, 33, 16), (3, 9, 5, 37), (2, 6, 32, 4))


def check(level: str, sizes: tuple[int, int, int, int], seed: int) -> None:
    """Kernel, JAX form and float64 agree, whatever the lengths of the rows."""
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    rows, steps, inner, maps = sizes
    parts = split(
        jnp.asarray(normal(rows, steps, 3 * inner + 2 * maps + 3)),
        [inner, maps, 3, inner, maps, inner],
    )
    x, Bm, _, dt, Cm, z = parts
    own = (normal(inner), normal(inner, maps), normal(inner))
    channels = selective_scan.Channels(*(jnp.asarray(each) for each in own))
    state = normal(rows, inner, maps)
    lengths = random.integers(0, steps + 1, rows)
    lengths[0] = steps
    gate = z if seed % 2 else None
    given = (x, dt, Bm, Cm, channels, jnp.asarray(lengths, jnp.int32), jnp.asarray(state), 4, gate)
    with kernels.used(level) as called:
        y, new = (np.asarray(each) for each in selective_scan.mix(*given))
    assert called == ["selective_scan"]
    assert np.isfinite(y).all()
    by_jax = np.asarray(selective_scan.mix(*given)[0]) if level == kernels.FIRST else y
    raw = np.asarray(dt.array, np.float64) + own[0]
    width = np.log1p(np.exp(-np.abs(raw))) + np.maximum(raw, 0)
    opened = np.asarray(z.array, np.float64)
    for b, n in enumerate(lengths):
        want, after = oracle(
            np.asarray(x.array)[b, :n],
            width[b, :n],
            -np.exp(own[1].astype(np.float64)),
            np.asarray(Bm.array)[b, :n],
            np.asarray(Cm.array)[b, :n],
            own[2],
            state[b],
        )
        if gate is not None:
            want = want * (opened / (1 + np.exp(-opened)))[b, :n]
        np.testing.assert_allclose(y[b, :n], want, 1e-5, 1e-5)
        np.testing.assert_allclose(new[b], after, 1e-5, 3e-6)
        np.testing.assert_allclose(y[b, :n], by_jax[b, :n], 1e-5, 1e-5)
        if n == 0:
            np.testing.assert_array_equal(new[b], state[b])
            assert steps > 1 or np.abs(y[b] - by_jax[b]).max() < 1e-4


@pytest.mark.parametrize("level", kernels.levels())
def test_scans_are_those_of_float64(level: str) -> None:
    for seed, sizes in enumerate(SIZES):
        check(level, sizes, seed)
