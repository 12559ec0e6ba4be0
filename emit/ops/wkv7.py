"""RWKV-7's generalised delta rule, arXiv:2503.14456 (section 4, "The Weighted Key Value State").

    S[t] = S[t-1] (diag(w[t]) + a[t] b[t]^T) + v[t] k[t]^T
    y[t] = S[t] r[t]

The model gives a = -kappa and b = kappa * (in-context learning rate), with kappa of length 1.

| tensor  | shape        | meaning                                                       |
|---------|--------------|---------------------------------------------------------------|
| r       | [B, T, H, K] | receptance (`step`: T = 1)                                    |
| log_w   | [B, T, H, K] | logarithm of the decay of each channel, -exp(-1/2) ≤ log_w ≤ 0 |
| k, v    | [B, T, H, K], [B, T, H, V] | what is added                                   |
| a, b    | [B, T, H, K] | what is removed, and where                                    |
| y       | [B, T, H, V] | output                                                        |
| state   | [B, H, V, K] | S                                                             |

Everything is float32. Identity update for padding: log_w = 0, k = 0 and a = 0, which leave S as it
is exactly.

`mixer` is all of a layer between its projections and low-rank functions and its gated output.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from emit.kernels import on_cpu
from emit.kernels import wkv7 as kernels
from emit.ops import nn, triangular
from emit.ops.norm import group_norm

SMALLEST = 1e-12  # a key of less length is not brought to length 1


@on_cpu(kernels.mixer)
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
) -> tuple[Array, Array]:
    """g (group_norm(S r) + (sum of r k r_k) v) of T tokens: -> (f32[B, T, H D], state).

    With kappa = k k_k of length 1 in each head and k = k (1 + (a - 1) k_a), the rule is that above
    of w, k, v, -kappa and kappa a. r, log_w, k, v, a and g are f32[B, T, H D]; k_k, k_a, r_k and
    the norm's weight and bias hold H D numbers; lengths i32[B] of the tokens are valid. `eps` is
    that of the norm, `chunk` that of `scan`.
    """
    B, T, _ = r.shape
    H, D = state.shape[1:3]

    def heads(each: Array) -> Array:
        return each.reshape(*each.shape[:-1], H, D)

    valid = (nn.iota(T)[None, :] < lengths[:, None])[..., None, None]
    kappa = _unit(heads(k * k_k))
    r, k, v, a = map(heads, (r, k * (1.0 + (a - 1.0) * k_a), v, a))
    decay, added, removed = (jnp.where(valid, each, 0.0) for each in (heads(log_w), k, kappa))
    inputs = (r, decay, added, v, -removed, removed * a, state)
    y, state = step(*inputs) if T == 1 else scan(*inputs, chunk)
    y = group_norm(y, weight, bias, eps)
    y = y + jnp.sum(r * k * r_k.reshape(H, D), axis=-1, keepdims=True) * v
    return y.reshape(B, T, H * D) * g, state


def _unit(x: Array) -> Array:
    """`x` of length 1 over the last axis, unless it is shorter than SMALLEST."""
    square = jnp.sum(x * x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.maximum(square, SMALLEST**2))


def step(
    r: Array, log_w: Array, k: Array, v: Array, a: Array, b: Array, state: Array
) -> tuple[Array, Array]:
    """One token: r [B, 1, H, K] -> (y [B, 1, H, V], state).

    S r is taken as S[t-1] (w r) + u (b r) + v (k r) with u = S[t-1] a, so that nothing reads the
    new state: it is then written straight to where the caller wants it.
    """
    r, w, k, v, a, b = (x[:, 0] for x in (r, jnp.exp(log_w), k, v, a, b))
    u = jnp.sum(state * a[:, :, None, :], axis=-1)  # [B, H, V]
    read = jnp.sum(state * (w * r)[:, :, None, :], axis=-1)
    dots = (jnp.sum(x * r, axis=-1, keepdims=True) for x in (b, k))  # [B, H, 1] each
    removed, added = dots
    y = read + u * removed + v * added
    new = state * w[:, :, None, :] + u[..., None] * b[:, :, None, :]
    return y[:, None], new + v[..., None] * k[:, :, None, :]


def scan(
    r: Array,
    log_w: Array,
    k: Array,
    v: Array,
    a: Array,
    b: Array,
    state: Array,
    chunk: int,
) -> tuple[Array, Array]:
    """T tokens in chunks of Q = `chunk`, a power of two: -> (y [B, T, H, V], state).

    T is padded up to a multiple of Q.
    With G[t] the product of the decays up to and with t, and u[t] = S[t-1] a[t], in one chunk

        S[t] = S[0] G[t] + sum over j <= t of (u[j] b[j]^T + v[j] k[j]^T) G[t] / G[j]

    1. Products of pairs of tokens, decays between them included: a and r with b and k. They are
       products of vectors scaled by G[t] / G[m] and G[m] / G[j], m the middle of the chunk, which
       a decay of at least exp(-exp(-1/2)) keeps in range for chunks of up to 64.
    2. u = (I - A)^-1 (a G S[0] + (a k) v), A the products of a and b, j < t: as X + W S[0]. The
       inverse is that of `ops.triangular`.
    3. The recurrence over chunk states, S' = S G + S (W^T b') + (X^T b' + v^T k'), with b' and k'
       decayed to the chunk's end.
    4. y = r G S[0] + (r b) u + (r k) v.
    """
    T, H, K = r.shape[1:]
    B, V = r.shape[0], v.shape[3]
    Q = min(chunk, 1 << (T - 1).bit_length())  # others fail to compile for rocm
    pad = -T % Q
    n = (T + pad) // Q  # chunks

    def chunks(x: Array) -> Array:  # [B, T, H, C] -> [B, n, H, Q, C]
        x = jnp.pad(x, [(0, 0), (0, pad), (0, 0), (0, 0)]) if pad else x
        return x.reshape(B, n, Q, H, x.shape[3]).transpose(0, 1, 3, 2, 4)

    r, log_w, k, v, a, b = (chunks(x) for x in (r, log_w, k, v, a, b))
    upto = jnp.cumsum(log_w, axis=3)
    before = upto - log_w
    middle, end = upto[..., (Q - 1) // 2, None, :], upto[..., -1:, :]

    left = jnp.concatenate([a * jnp.exp(before - middle), r * jnp.exp(upto - middle)], axis=3)  # 1.
    right = jnp.concatenate([b, k], axis=3) * jnp.tile(jnp.exp(middle - upto), (2, 1))
    pairs = nn.matmul(left, right.swapaxes(-1, -2))  # [B, n, H, 2Q, 2Q]
    i, j = nn.iota(Q)[:, None], nn.iota(Q)[None, :]
    ak = jnp.where(j < i, pairs[..., :Q, Q:], 0.0)
    inclusive = jnp.tile(j <= i, (1, 2))
    rbk = jnp.where(inclusive, pairs[..., Q:, :], 0.0)

    known = jnp.concatenate([a * jnp.exp(before), nn.matmul(ak, v)], axis=-1)  # 2.
    solved = nn.matmul(triangular.inverse(-pairs[..., :Q, :Q]), known)
    W, X = solved[..., :K], solved[..., K:]

    to_end = jnp.exp(end - upto)  # 3.
    late_b, late_k = b * to_end, k * to_end
    removed = nn.matmul(W.swapaxes(-1, -2), late_b)  # [B, n, H, K, K]
    values = jnp.concatenate([X, v], axis=3).swapaxes(-1, -2)
    added = nn.matmul(values, jnp.concatenate([late_b, late_k], axis=3))  # [B, n, H, V, K]
    kept = jnp.exp(end)
    entering = []
    for c in range(n):
        entering.append(state)
        state = state * kept[:, c] + nn.matmul(state, removed[:, c]) + added[:, c]

    starts = jnp.stack(entering, axis=1).swapaxes(-1, -2)  # 4. [B, n, H, K, V]
    carried = nn.matmul(jnp.concatenate([W, r * jnp.exp(upto)], axis=3), starts)
    u = X + carried[..., :Q, :]
    y = carried[..., Q:, :] + nn.matmul(rbk, jnp.concatenate([u, v], axis=3))
    return y.transpose(0, 1, 3, 2, 4).reshape(B, T + pad, H, V)[:, :T], state
