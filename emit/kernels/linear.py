"""Projections by linear.c: how an output is cut into tiles."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from emit import kernels
from emit.ops.quantized import Quantized, Weight

NAMES = {"float32": "linear_f32", "bfloat16": "linear_bf16", "float16": "linear_f16"}
MOST_ROWS = 8  # as in linear.c: up to so many rows, the weights are read in the order they lie
MOST_TILES = 56  # fewer than 64: what a worker takes at once is then still a small part
TILE_BYTES = 32 << 10  # of weights: some microseconds
BLOCK = 64  # outputs of a block, BLOCK_O in linear.c (16 without AVX-512)


def outputs_per_tile(rows: int, outputs: int, row_bytes: int) -> int:
    """How many of `outputs` a tile computes."""
    if rows > MOST_ROWS:
        blocks = -(-outputs // BLOCK)
        return BLOCK * -(-blocks // MOST_TILES)
    tiles = min(MOST_TILES, max(1, outputs * row_bytes // TILE_BYTES))
    return 8 * -(-outputs // (8 * tiles))


def linear(x: Array, weight: Weight, bias: Array | None = None) -> Array | None:
    """`nn.linear` by the kernel."""
    if isinstance(weight, Quantized):
        return None
    name = NAMES.get(str(weight.dtype))
    if name is None or weight.ndim != 2 or x.ndim != 3:
        return None
    rows, (outputs, inputs) = x.shape[0] * x.shape[1], weight.shape
    per = outputs_per_tile(rows, outputs, inputs * weight.dtype.itemsize)
    (y,) = kernels.call(
        name,
        [x.reshape(rows, inputs), weight],
        [((rows, outputs), jnp.float32)],
        [rows, inputs, outputs, per],
        -(-outputs // per),
    )
    y = y.reshape(*x.shape[:2], outputs)
    return y if bias is None else y + bias
