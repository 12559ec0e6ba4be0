"""RMS norms by norm.c."""

from __future__ import annotations

import math
from typing import Literal

import jax.numpy as jnp
from jax import Array

from emit import kernels
from emit.kernels import Values

NONE, BEFORE, AFTER = 0, 1, 2  # as in norm.c


def rms_norm(x: Values, weight: Array, eps: float) -> Array | None:
    """`nn.rms_norm` by the kernel."""
    return _norm(x, None, weight, 1, eps, NONE)


def group_rms_norm(x: Values, weight: Array, groups: int, eps: float) -> Array | None:
    """`nn.group_rms_norm` by the kernel."""
    return _norm(x, None, weight, groups, eps, NONE)


def gated(
    x: Array,
    gate: Values,
    weight: Array,
    groups: int,
    eps: float,
    order: Literal["gate_first", "norm_first"],
) -> Array | None:
    """`norm.gated` by the kernel."""
    return _norm(x, gate, weight, groups, eps, BEFORE if order == "gate_first" else AFTER)


def _norm(
    x: Values, gate: Values | None, weight: Array, groups: int, eps: float, how: int
) -> Array | None:
    x = kernels.columns(x)
    z = x if gate is None else kernels.columns(gate)
    if not kernels.all_f32(x.whole, z.whole, weight) or weight.shape not in ((), (x.width,)):
        return None
    shape = (*x.whole.shape[:-1], x.width)
    rows = math.prod(shape[:-1])
    per = kernels.per_tile(rows * groups)
    weighted = weight.ndim == 1
    (y,) = kernels.call(
        "rms_norm",
        [x.whole, z.whole, weight],
        [(shape, jnp.float32)],
        [rows, groups, x.width // groups, *x.row, *z.row, kernels.bits(eps), how, weighted, per],
        -(-rows * groups // per),
    )
    return y if weighted else y * weight
