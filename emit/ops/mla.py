"""Multi-head latent attention, absorbed (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    k[c, h] = [up_k[h] l[c] ; r[c]],   v[c, h] = up_v[h] l[c]                    (eq. 9 to 11)
    y[t, h] = sum_c softmax_c(scale q[t, h] · k[c, h]) v[c, h]    for c <= t     (eq. 17 and 18)

Of a token only its latent l and the part r of the keys that all heads share are kept. Keys and
values are never made: with q = [n ; p],

    q · k[c] = (up_k^T n) · l[c] + p · r[c],     y = up_v (sum_c softmax_c l[c])

which is attention of H queries over one head of keys [l ; r], whose values are the same rows: those
of `ops.attention`, whose region, padding and order of writing hold here too. The product with the
values takes r along and drops it, so that the region is read as it lies.

| tensor    | shape              | meaning                                            |
|-----------|--------------------|----------------------------------------------------|
| n         | [B, T, H, N]       | queries of the part of the keys that each head has |
| p         | [B, T, H, P]       | queries of the shared part, rotated if r is        |
| latent    | [B, T, R]          | l, after its norm                                  |
| shared    | [B, T, P]          | r, rotated where the model has positions           |
| up_k      | [H, R, N]          | f32, bf16 or f16, widened inside the product       |
| up_v      | [H, V, R]          | as up_k                                            |
| lengths, positions | i32[B]    | as in `ops.attention`                              |
| region    | [B, 1, C, R + P]   | the state: [l ; r] of earlier positions            |
| y         | [B, T, H, V]       |                                                    |

All but the weights is float32. Identity update for padding: it is not written, and nothing attends
to it. Tokens whose place is outside the region are dropped.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from emit.kernels import on_cpu
from emit.kernels.rglru import heads
from emit.ops import attention


def step(
    n: Array,
    p: Array,
    latent: Array,
    shared: Array,
    up_k: Array,
    up_v: Array,
    lengths: Array,
    positions: Array,
    region: Array,
    *,
    scale: float,
) -> tuple[Array, Array]:
    """One token a row (T = 1): -> (y [B, 1, H, V], region)."""
    row = jnp.concatenate([latent, shared], axis=-1)[:, :, None]
    region = attention.write_one(region, row, positions, lengths)
    return _read(n, p, up_k, up_v, region, lengths, positions, scale), region


def scan(
    n: Array,
    p: Array,
    latent: Array,
    shared: Array,
    up_k: Array,
    up_v: Array,
    lengths: Array,
    positions: Array,
    region: Array,
    *,
    scale: float,
) -> tuple[Array, Array]:
    """T tokens a row, written and then attending to the region: -> (y [B, T, H, V], region)."""
    row = jnp.concatenate([latent, shared], axis=-1)[:, :, None]
    region = attention.write(region, row, positions, lengths)
    return _read(n, p, up_k, up_v, region, lengths, positions, scale), region


def _read(
    n: Array,
    p: Array,
    up_k: Array,
    up_v: Array,
    region: Array,
    lengths: Array,
    positions: Array,
    scale: float,
) -> Array:
    """Attention to the region, between the two absorbed products."""
    q = jnp.concatenate([_heads(n, up_k), p], axis=-1)
    rank = up_v.shape[2]
    y = attention.read(q, region, region, lengths, positions, scale=scale, width=rank)
    return _heads(y, up_v)


@on_cpu(heads)
def _heads(x: Array, weight: Array) -> Array:
    """Each head by its own matrix: x [B, T, H, K], weight [H, O, K] -> f32[B, T, H, O]."""
    B, T, H, K = x.shape
    y = jax.lax.dot_general(
        x.transpose(2, 0, 1, 3).reshape(H, B * T, K),
        weight.astype(jnp.float32),
        (((2,), (2,)), ((0,), (0,))),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return y.reshape(H, B, T, weight.shape[1]).transpose(1, 2, 0, 3)
