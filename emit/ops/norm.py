"""Norms that take the mean off, float32: over a vector, and over each head of one.

| tensor       | shape                                       |
|--------------|---------------------------------------------|
| x            | [..., K], of `group_norm` [..., G, N]       |
| weight, bias | [K], of `group_norm` [G * N]; bias may lack |
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def layer_norm(x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
    """`(x - mean(x)) / sqrt(var(x) + eps) * weight + bias` (arXiv:1607.06450, eq. 4)."""
    y = _standard(x, eps) * weight
    return y if bias is None else y + bias


def group_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """The same over each of G groups, which get back the shape of `x` (arXiv:1803.08494, eq. 7)."""
    return _standard(x, eps) * weight.reshape(x.shape[-2:]) + bias.reshape(x.shape[-2:])


def _standard(x: Array, eps: float) -> Array:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
