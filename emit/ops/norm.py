"""Norms that take the mean off, and the RMS norm of gated outputs, float32.

| tensor       | shape                                       |
|--------------|---------------------------------------------|
| x, gate      | [..., K], of `group_norm` [..., G, N]       |
| weight, bias | [K], of `group_norm` [G * N]; bias may lack |
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from emit import kernels
from emit.kernels import Values, on_cpu
from emit.kernels import norm as norm_kernels
from emit.ops import nn


def layer_norm(x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
    """`(x - mean(x)) / sqrt(var(x) + eps) * weight + bias` (arXiv:1607.06450, eq. 4)."""
    y = _standard(x, eps) * weight
    return y if bias is None else y + bias


def group_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """The same over each of G groups, which get back the shape of `x` (arXiv:1803.08494, eq. 7)."""
    return _standard(x, eps) * weight.reshape(x.shape[-2:]) + bias.reshape(x.shape[-2:])


@on_cpu(norm_kernels.gated)
def gated(
    x: Array,
    gate: Values,
    weight: Array,
    groups: int,
    eps: float,
    order: Literal["gate_first", "norm_first"],
) -> Array:
    """`norm(x silu(gate)) weight` or `norm(x) weight silu(gate)`, of `nn.group_rms_norm`.

    (arXiv:2405.21060, figure 6, and the authors' code, which has both orders.)
    """
    opened = jax.nn.silu(kernels.array(gate))
    if order == "gate_first":
        return nn.group_rms_norm(x * opened, weight, groups, eps)
    return nn.group_rms_norm(x, weight, groups, eps) * opened


def _standard(x: Array, eps: float) -> Array:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
