"""The delta rule's mixer by delta.c: a tile is some heads."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import Array

from emit import kernels

MOST_KEYS = 512  # DELTA_KEYS in delta.c


def mixer(
    qkv: Array,
    z: Array,
    g: Array,
    beta: Array,
    weight: Array,
    state: Array,
    *,
    eps: float,
    gate: Literal["silu", "sigmoid"],
    chunk: int,
) -> tuple[Array, Array] | None:
    """`delta.mixer` by the kernel, token after token: there are no chunks."""
    del chunk
    B, T, width = qkv.shape
    H, K, V = state.shape[1:]
    if K > MOST_KEYS:
        return None
    per = kernels.per_tile(B * H)
    bits = int(np.float32(eps).view(np.uint32))
    groups = (width - H * V) // (2 * K)
    sizes = [B, T, groups, H, K, V, g.shape[-1], int(gate == "silu"), bits, per]
    y, new = kernels.call(
        "delta",
        [qkv, z, jnp.exp(g), beta, weight, state],
        [((B, T, H * V), jnp.float32), (state.shape, jnp.float32)],
        sizes,
        -(-B * H // per),
    )
    return y, new
