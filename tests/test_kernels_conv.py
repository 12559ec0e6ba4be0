"""conv.c against float64, at every CPU level and at sizes that divide nothing."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import kernels
import numpy as np
import pytest

from emit.kernels import split
from emit.ops import conv

# rows, tokens, channels, taps
SIZES = ((1, 1, 1, 2), (2, 1, 50, 4), (3, 1, 300, 3), (1, 5, 16, 4), (2, 9, 70, 4), (2, 11, 37, 9))


def oracle(
    x: np.ndarray, lengths: np.ndarray, weight: np.ndarray, bias: Any, tail: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Sums over the window and the new tail, without activation, in float64."""
    taps, steps = weight.shape[0], x.shape[1]
    window = np.concatenate([tail, x], axis=1).astype(np.float64)
    y = sum(window[:, k : k + steps] * weight[k] for k in range(taps)) + bias
    return y, np.stack([row[n : n + taps - 1] for row, n in zip(window, lengths, strict=True)])


@pytest.mark.parametrize("level", kernels.levels())
def test_convolutions_are_those_of_float64(level: str) -> None:
    """Every length of the rows, with and without bias and activation; x inside wider rows."""
    random = np.random.default_rng(5)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    for number, (rows, steps, channels, taps) in enumerate(SIZES):
        whole = normal(rows, steps, channels + 12)
        x = split(jnp.asarray(whole), [5, channels, 7])[1]
        lengths = random.integers(0, steps + 1, rows)
        weight, tail = normal(taps, channels), normal(rows, taps - 1, channels)
        bias = normal(channels) if number % 2 else None
        run, act = conv.step if steps == 1 else conv.scan, "silu" if number % 3 else None
        want, new_tail = oracle(
            np.asarray(x.array), lengths, weight, 0 if bias is None else bias, tail
        )
        if act:
            want = want / (1 + np.exp(-want))
        given = (
            *(x, jnp.asarray(lengths, jnp.int32), jnp.asarray(weight)),
            *(None if bias is None else jnp.asarray(bias), jnp.asarray(tail), act),
        )
        with kernels.used(level) as called:
            y, new = run(*given)
        assert called == ["conv"]
        np.testing.assert_allclose(y, want, 2e-6, 2e-6)
        np.testing.assert_array_equal(new, new_tail.astype(np.float32))
        if level == kernels.FIRST:
            by_jax = run(*given)
            np.testing.assert_allclose(y, by_jax[0], 2e-6, 2e-6)
            np.testing.assert_array_equal(new, by_jax[1])


def test_other_activations_are_not_the_kernel_s() -> None:
    x, tail = jnp.ones((1, 1, 8)), jnp.ones((1, 3, 8))
    with kernels.used("x86-64-v3") as called:
        y, _ = conv.step(x, jnp.ones(1, jnp.int32), -jnp.ones((4, 8)), None, tail, "relu")
    assert called == [] and not np.asarray(y).any()
