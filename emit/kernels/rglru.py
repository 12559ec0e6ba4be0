"""RG-LRU's mixer by rglru.c, its gates by the kernel of chosen matrices: all of them, in order."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from emit import kernels
from emit.kernels import linear

UNIT = 64  # channels that a tile has a multiple of


def heads(x: Array, weight: Array) -> Array | None:
    """Each head by its own matrix: x f32[B, T, H, K], weight [H, O, K] -> f32[B, T, H, O]."""
    B, T, H, K = x.shape
    each = x.reshape(B * T, H, K).swapaxes(0, 1)
    y = linear.experts(each, weight, jnp.asarray(np.arange(H, dtype=np.int32)))
    return None if y is None else y.swapaxes(0, 1).reshape(B, T, H, -1)


def mixer(
    x: Array,
    branch: Array,
    r_weight: Array,
    r_bias: Array,
    i_weight: Array,
    i_bias: Array,
    rate: Array,
    lengths: Array,
    positions: Array,
    state: Array,
    *,
    chunk: int,
) -> tuple[Array, Array] | None:
    """`rglru.mixer` by the kernels."""
    del chunk
    B, T, W = x.shape
    blocks = x.reshape(B, T, r_weight.shape[0], -1)
    r, i = heads(blocks, r_weight), heads(blocks, i_weight)
    if r is None or i is None:
        return None
    per = UNIT * kernels.per_tile(-(-W // UNIT))
    y, new = kernels.call(
        "rglru",
        [x, branch, r, r_bias, i, i_bias, rate, lengths, positions, state],
        [(x.shape, jnp.float32), (state.shape, jnp.float32)],
        [B, T, W, per],
        -(-W // per),
    )
    return y, new
