"""linear.c against float64, at every CPU level and at sizes that divide nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import kernels
import ml_dtypes
import numpy as np
import pytest

from emit import kernels as used_kernels
from emit.kernels import linear
from emit.kernels.linear import FLOATS, TILES, tile_count
from emit.kernels.splice import _numbers, splice
from emit.ops import nn

DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 64)
SIZES = ((1, 1), (3, 5), (16, 16), (77, 130), (128, 64), (129, 257), (768, 200))


def product(x: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x w^T in float64, and the sum of magnitudes that bounds its rounding."""
    wide, w = x.astype(np.float64), weight.astype(np.float64)
    return wide @ w.T, np.abs(wide) @ np.abs(w).T


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("level", kernels.levels())
def test_linear_is_the_float64_product(level: str, kind: str) -> None:
    """Every output is written, and is within K roundings of the float64 product's magnitudes.

    float32 sums of up to 768 products are off by less than 1e-6 of the sum of magnitudes: each
    of some 50 additions in a lane rounds by 6e-8 at most.
    """
    random = np.random.default_rng(7)
    cases = [(m, *SIZES[i % len(SIZES)]) for i, m in enumerate(ROWS)]
    cases += [
        (1, 768, 200),
        (8, 129, 257),
        (9, 129, 257),
        (64, 77, 130),
        (300, 40, 70),
        (515, 17, 9),
    ]
    for rows, inputs, outputs in cases:
        x = random.standard_normal((rows, inputs)).astype(np.float32)
        weight = (random.standard_normal((outputs, inputs)) * 3).astype(DTYPES[kind])
        tiles = tile_count(rows, outputs, weight[0].nbytes << 10)
        y = np.full((rows, outputs), np.nan, np.float32)
        sizes = (rows, inputs, outputs, tiles)
        got = kernels.run(
            level, f"linear_{kind}", [x, weight, y], sizes, tiles * linear.parts_of_rows(rows)
        )
        want, magnitude = product(x, weight)
        np.testing.assert_array_less(np.abs(got[2] - want), 1e-6 * magnitude + 1e-30)
        np.testing.assert_array_equal(got[0], x)
        assert got[1].tobytes() == weight.tobytes()


@pytest.mark.parametrize("rows", [1, 5, 8, 20])
def test_a_row_of_a_batch_is_the_row_alone(rows: int) -> None:
    """To the bit, wherever it stands among as many others."""
    random = np.random.default_rng(3)
    x = random.standard_normal((rows, 200)).astype(np.float32)
    weight = random.standard_normal((70, 200)).astype(np.float32)
    y = np.zeros((rows, 70), np.float32)
    level = "x86-64-v3"
    whole = kernels.run(level, "linear_f32", [x, weight, y], (rows, 200, 70, 1), 1)[2]
    turned = kernels.run(level, "linear_f32", [x[::-1], weight, y], (rows, 200, 70, 1), 1)[2]
    np.testing.assert_array_equal(whole, turned[::-1])


@pytest.mark.parametrize("rows", [1, 8, 9, 256])
@pytest.mark.parametrize("outputs", [1, 16, 100, 768, 3352, 50288, 256000])
def test_every_tile_has_work(rows: int, outputs: int) -> None:
    tiles, unit = tile_count(rows, outputs, 1536), 8 if rows < 9 else 64
    assert tiles in TILES and tiles <= max(1, -(-outputs // unit))
    assert rows > 8 or tiles == 1 or outputs * 1536 / tiles >= 32 << 10


def test_the_op_calls_the_kernel_only_where_kernels_are_used() -> None:
    x, w = jnp.ones((2, 1, 32)), jnp.ones((48, 32), jnp.bfloat16)

    def text(on: bool) -> str:
        def product(x: jax.Array, w: jax.Array) -> jax.Array:
            with used_kernels.used(on):
                return nn.linear(x, w)

        return jax.jit(product).lower(x, w).as_text()

    assert "scanwright.linear_bf16" in text(True)
    assert "custom_call" not in text(False)
    assert {f"linear_{word}" for word in FLOATS.values()} <= set(kernels.names())


def test_sizes_that_are_all_the_same_are_all_there() -> None:
    """Text has one number for such."""
    assert _numbers("dense<64> : tensor<4xi64>") == (64, 64, 64, 64)
    assert _numbers("dense<[1, -2, 3]> : tensor<3xi64>") == (1, -2, 3)

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        (y,) = used_kernels.call("linear_f32", [x, w], [((64, 64), jnp.float32)], [64] * 4, 2)
        return y

    text = jax.jit(product).lower(jnp.ones((64, 64)), jnp.ones((64, 64))).as_text()
    assert "dense<64> : tensor<4xi64>" in text
    assert splice(text, "entry").count("arith.constant 64 : index") == 4
