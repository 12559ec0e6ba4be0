"""Convolutions by conv.c."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from emit import kernels
from emit.kernels import Values

ACTIVATIONS = {None: 0, "silu": 1, "swish": 1}  # as in conv.c
LANES = 16  # of the widest vectors


def conv(
    x: Values,
    lengths: Array,
    weight: Array,
    bias: Array | None,
    tail: Array,
    activation: str | None = None,
) -> tuple[Array, Array] | None:
    """`conv.step` or `conv.scan` by the kernel."""
    x = kernels.columns(x)
    if activation not in ACTIVATIONS or not kernels.all_f32(x.whole, weight, bias, tail):
        return None
    B, T, _ = x.whole.shape
    K, C = weight.shape
    per = LANES * kernels.per_tile(-(-C // LANES), max(1, kernels.MOST_TILES // B))
    y, new = kernels.call(
        "conv",
        [x.whole, lengths, weight, weight if bias is None else bias, tail],
        [((B, T, C), jnp.float32), (tail.shape, jnp.float32)],
        [T, C, K, *x.row, bias is not None, ACTIVATIONS[activation], per],
        B * -(-C // per),
    )
    return y, new
