"""Causal depthwise convolution with a tail of the last K-1 inputs as state.

    y[t, c] = act(bias[c] + sum_k weight[k, c] * u[t - (K-1) + k, c])     (arXiv:2405.21060, fig. 6)

| tensor | shape         | dtype |
|--------|---------------|-------|
| x      | [B, T, C] (`step`: [B, 1, C]) | f32 |
| weight | [K, C]        | f32   |
| bias   | [C] or None   | f32   |
| tail   | [B, K-1, C]   | f32   |
| y      | as x          | f32   |

x may be columns of a wider array. act is named as in `nn.ACTIVATIONS`; None is no activation.

Identity update for padding: the new tail is the last K-1 *valid* inputs, so a row of length 0 keeps
its tail; outputs at padded positions are meaningless.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from emit import kernels
from emit.kernels import Values, on_cpu
from emit.kernels import conv as conv_kernels
from emit.ops import nn


@on_cpu(conv_kernels.conv)
def step(
    x: Values,
    lengths: Array,
    weight: Array,
    bias: Array | None,
    tail: Array,
    activation: str | None = None,
) -> tuple[Array, Array]:
    """One token for each row; rows with `lengths` 0 (i32[B]) keep their tail. Returns (y, tail)."""
    window = jnp.concatenate([tail, kernels.array(x)], axis=1)
    y = jnp.sum(window * weight, axis=1, keepdims=True)
    new_tail = jnp.where((lengths > 0)[:, None, None], window[:, 1:], tail)
    return _activated(y, bias, activation), new_tail


@on_cpu(conv_kernels.conv)
def scan(
    x: Values,
    lengths: Array,
    weight: Array,
    bias: Array | None,
    tail: Array,
    activation: str | None = None,
) -> tuple[Array, Array]:
    """T tokens for each row, the first `lengths[b]` (i32[B]) of them valid. Returns (y, tail)."""
    x = kernels.array(x)
    steps, kernel = x.shape[1], weight.shape[0]
    window = jnp.concatenate([tail, x], axis=1)
    y = window[:, :steps] * weight[0]
    for k in range(1, kernel):
        y = y + window[:, k : k + steps] * weight[k]
    new_tail = jnp.stack(
        [
            jax.lax.dynamic_slice_in_dim(window[b], lengths[b], kernel - 1, axis=0)
            for b in range(x.shape[0])
        ]
    )
    return _activated(y, bias, activation), new_tail


def _activated(y: Array, bias: Array | None, activation: str | None) -> Array:
    y = y if bias is None else y + bias
    return y if activation is None else nn.ACTIVATIONS[activation](y)
