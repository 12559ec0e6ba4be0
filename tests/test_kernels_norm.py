"""norm.c against float64, at every CPU level and at sizes that divide nothing."""

from __future__ import annotations

import jax.numpy as jnp
import kernels
import numpy as np
import pytest

from emit.kernels import split
from emit.ops import nn, norm

EPS = 1e-3  # large, so that leaving it out is seen


def oracle(x: np.ndarray, weight: np.ndarray, groups: int) -> np.ndarray:
    """RMS norm of each part in float64."""
    wide = x.astype(np.float64).reshape(*x.shape[:-1], groups, -1)
    scale = 1 / np.sqrt((wide * wide).mean(-1, keepdims=True) + EPS)
    return (wide * scale).reshape(x.shape) * weight


def silu(x: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide / (1 + np.exp(-wide))


@pytest.mark.parametrize("level", kernels.levels())
def test_norms_are_those_of_float64(level: str) -> None:
    """Plain, of groups, before and after the gate; x and the gate inside wider rows."""
    random = np.random.default_rng(5)
    for rows, steps, width, groups in ((1, 1, 1, 1), (2, 3, 40, 5), (1, 7, 333, 3), (3, 1, 256, 2)):
        wide = random.standard_normal((rows, steps, 2 * width + 3)).astype(np.float32) * 5
        weight = random.standard_normal(width).astype(np.float32)
        z, _, x = split(jnp.asarray(wide), [width, 3, width])
        of_x, of_z = np.asarray(x.array), np.asarray(z.array)
        w = jnp.asarray(weight)
        with kernels.used(level) as called:
            plain = nn.rms_norm(x, w, EPS)
            grouped = nn.group_rms_norm(x, w, groups, EPS)
            before = norm.gated(x.array, z, w, groups, EPS, "gate_first")
            after = norm.gated(x.array, z, w, groups, EPS, "norm_first")
            bare = nn.rms_norm(x, jnp.float32(1.0), EPS)
        assert called == ["rms_norm"] * 5
        np.testing.assert_allclose(plain, oracle(of_x, weight, 1), 3e-6, 3e-6)
        np.testing.assert_allclose(grouped, oracle(of_x, weight, groups), 3e-6, 3e-6)
        np.testing.assert_allclose(bare, oracle(of_x, np.ones(width), 1), 3e-6, 3e-6)
        np.testing.assert_allclose(before, oracle(of_x * silu(of_z), weight, groups), 3e-6, 3e-6)
        np.testing.assert_allclose(after, oracle(of_x, weight, groups) * silu(of_z), 3e-6, 3e-6)


def test_the_jax_forms_are_the_same() -> None:
    """What other targets compile, on columns and at the same numbers."""
    wide = jnp.asarray(np.random.default_rng(1).standard_normal((2, 3, 90)), jnp.float32)
    z, x = split(wide, [45, 45])
    w = jnp.arange(45, dtype=jnp.float32)
    for order in ("gate_first", "norm_first"):
        y = norm.gated(x.array, z, w, 3, EPS, order)
        with kernels.used("x86-64-v3"):
            np.testing.assert_allclose(norm.gated(x.array, z, w, 3, EPS, order), y, 2e-6, 2e-6)
