"""RWKV-7's mixer by wkv7.c: a tile is some heads."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from emit import kernels

DEEPEST = 256  # channels of a head: WKV_DEPTH in wkv7.c


def mixer(
    r: Array,
    log_w: Array,
    k: Array,
    v: Array,
    a: Array,
    g: Array,
    k_k: Array,
    k_a: Array,
    r_k: Array,
    weight: Array,
    bias: Array,
    lengths: Array,
    state: Array,
    *,
    eps: float,
    chunk: int,
) -> tuple[Array, Array] | None:
    """`wkv7.mixer` by the kernel, token after token: there are no chunks."""
    del chunk
    (B, T, _), (_, H, V, K) = r.shape, state.shape
    if V != K or K > DEEPEST:
        return None
    per = kernels.per_tile(B * H)
    bits = int(np.float32(eps).view(np.uint32))
    y, new = kernels.call(
        "wkv7",
        [r, jnp.exp(log_w), k, v, a, g, k_k, k_a, r_k, weight, bias, lengths, state],
        [(r.shape, jnp.float32), (state.shape, jnp.float32)],
        [B, T, H, K, bits, per],
        -(-B * H // per),
    )
    return y, new
