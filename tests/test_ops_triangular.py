"""The inverse of unit lower triangular matrices: where it is known, and where it is worst."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from emit.ops import triangular

HUGE = 1e15  # what may stand on and above the diagonal


@pytest.mark.parametrize("size", [1, 2, 4, 16, 32, 64])
def test_the_inverse_is_exact_where_it_can_be(size: int) -> None:
    """Of 1 everywhere below: then (I + A)^-1 has -1 below its diagonal and 0 elsewhere."""
    A = np.where(np.tri(size, k=-1), 1, np.full((2, size, size), HUGE)).astype(np.float32)
    want = np.eye(size) - np.eye(size, k=-1)
    assert np.array_equal(jax.jit(triangular.inverse)(A), np.broadcast_to(want, A.shape))


@pytest.mark.parametrize("size", [16, 64])
def test_nearly_parallel_keys(size: int) -> None:
    """Products of keys that are all but one: a series for the inverse has no digit left."""
    rng = np.random.default_rng(size)
    keys = rng.standard_normal(24) + 1e-3 * rng.standard_normal((size, 24))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    A = np.tril(keys @ keys.T, k=-1)
    want = np.linalg.inv(np.eye(size) + A)
    got = jax.jit(triangular.inverse)(A.astype(np.float32))
    assert np.abs(got - want).max() / np.abs(want).max() < 2e-6
