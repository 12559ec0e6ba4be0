"""The gated delta rule of Gated DeltaNet and of Kimi Delta Attention.

    S[t] = (I - beta[t] k[t] k[t]^T) Diag(exp(g[t])) S[t-1] + beta[t] k[t] v[t]^T
    y[t] = S[t]^T q[t]

(arXiv:2412.06464, eq. 10, transposed, with alpha = exp(g) one number a head; arXiv:2510.26692,
eq. 1, with one a channel of the key.)

| tensor | shape           | meaning                                                        |
|--------|-----------------|----------------------------------------------------------------|
| q, k   | [B, T, G, K]    | queries (scaled) and keys, each for H/G neighbouring heads     |
| v, y   | [B, T, H, V]    | values and outputs of H heads (`step`: T = 1)                  |
| g      | [B, T, H, 1 or K] | log of the decay, ≤ 0: of a head, or of each of its channels |
| beta   | [B, T, H]       | how much of a key's old value is replaced, from 0 to 1         |
| state  | [B, H, K, V]    | S                                                              |

Everything is float32. Keys are of length 1 or less (see `l2_norm`): the rule is stable for those.
Identity update for padding: g = 0 and beta = 0, which leaves S as it is exactly.

`mixer` is all of a layer between its convolution and its output projection.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from emit.kernels import delta as kernels
from emit.kernels import on_cpu
from emit.ops import nn, triangular

L2_EPS = 1e-6
GRID = 256.0
FORGOTTEN = -104.0  # exp of it is 0 in float32, and so is that of anything less
MASKED = -1e30  # exp of it is exactly 0; an infinity would make NaN where it meets its own negative


def l2_norm(x: Array) -> Array:
    """`x / sqrt(sum(x²) + 1e-6)` over the last axis, float32; models trained with this epsilon."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2_EPS)


@on_cpu(kernels.mixer)
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
) -> tuple[Array, Array]:
    """rms(delta(l2(q) / sqrt(K), l2(k), v, g, beta)) gate(z): -> (f32[B, T, H V], state).

    qkv f32[B, T, 2 G K + H V] is q, then k, then v; z f32[B, T, H V]. The norm is that of each head
    of V numbers, all with the weight f32[V] and `eps`. `chunk` is that of `scan`.
    """
    B, T, _ = qkv.shape
    H, K, V = state.shape[1:]
    keys = (qkv.shape[2] - H * V) // 2
    q, k, v = jnp.split(qkv, [keys, 2 * keys], axis=-1)
    q, k = (l2_norm(each.reshape(B, T, -1, K)) for each in (q, k))
    inputs = (q * K**-0.5, k, v.reshape(B, T, H, V), g, beta, state)
    y, state = step(*inputs) if T == 1 else scan(*inputs, chunk)
    activation = jax.nn.silu if gate == "silu" else jax.nn.sigmoid
    y = nn.rms_norm(y, weight, eps) * activation(z.reshape(y.shape))
    return y.reshape(B, T, H * V), state


def step(q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array) -> tuple[Array, Array]:
    """One token: -> (y [B, 1, H, V], state).

    With u = beta (v - S'^T k), where S' is the decayed state, S = S' + k u^T and y = S'^T q +
    (q k) u: nothing reads the new state, which is then written straight to where the caller wants
    it, and not to a temporary and copied from there.
    """
    q, k = (_per_head(a, v.shape[2])[:, 0] for a in (q, k))  # [B, H, K]
    decay = jnp.exp(g[:, 0])  # [B, H, 1 or K]
    read = nn.matmul(jnp.stack([k * decay, q * decay], axis=2), state)  # [B, H, 2, V]
    u = beta[:, 0, :, None] * (v[:, 0] - read[:, :, 0])
    y = read[:, :, 1] + jnp.sum(q * k, axis=-1, keepdims=True) * u
    return y[:, None], state * decay[..., None] + k[..., None] * u[:, :, None]


def scan(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, chunk: int
) -> tuple[Array, Array]:
    """T tokens in chunks of Q = `chunk`, a power of two (T is padded up to a multiple).

    The WY form (arXiv:2412.06464, section 3.3; arXiv:2510.26692, section 3.2). With D[i, j] the
    decay from after token j up to token i of a chunk, by channels c, and S the state before it:

    1. M[i, j] = sum_c k[i] D[i, j] k[j], j < i;  N[i, j] = sum_c q[i] D[i, j] k[j], j <= i.
    2. R = (I + Diag(beta) M)^-1, by `triangular.inverse`.
    3. u = R beta (v - (k D[., start])^T S): what each token writes to its key.
    4. y = (q D[., start])^T S + N u;  S <- D[end, start] S + (k D[end, .])^T u.

    3. and 4. go from chunk to chunk. Cumulative decays are kept as a pair of sums, multiples of
    1/GRID and what remains: differences of the first are exact and the second stays below Q / GRID,
    so a token that erases the state costs the decays after it no digits. No exponent is above 0.
    """
    B, T, H, _ = v.shape
    Q = min(chunk, max(16, 1 << (T - 1).bit_length()))
    pad = -T % Q
    if pad:
        q, k, v, g, beta = (
            jnp.pad(a, [(0, 0), (0, pad)] + [(0, 0)] * (a.ndim - 2)) for a in (q, k, v, g, beta)
        )
    n = (T + pad) // Q  # chunks

    def chunked(a: Array) -> Array:  # [B, n, heads, Q, ...]
        return jnp.moveaxis(a.reshape(B, n, Q, *a.shape[2:]), 3, 2)

    q, k, v, g, beta = map(chunked, (q, k, v, g, beta[..., None]))
    g = jnp.maximum(g, FORGOTTEN)
    grid = jnp.floor(g * GRID) / GRID
    cum = jnp.cumsum(grid, axis=3), jnp.cumsum(g - grid, axis=3)
    if g.shape[-1] == 1:
        M, N = _pairs_of_heads(q, k, cum)
        q, k = _per_head(q, H), _per_head(k, H)
    else:
        q, k = _per_head(q, H), _per_head(k, H)
        M, N = _pairs_of_channels(q, k, cum)
    R = triangular.inverse(beta * M)
    start = jnp.exp(cum[0] + cum[1])  # D[., start]
    end = jnp.exp((cum[0][..., -1:, :] - cum[0]) + (cum[1][..., -1:, :] - cum[1]))  # D[end, .]
    readers = jnp.concatenate([k * start, q * start], axis=3)  # [B, n, H, 2Q, K]
    spread = jnp.concatenate([N, (k * end).swapaxes(-1, -2)], axis=3)  # [B, n, H, Q + K, Q]
    ys = []
    for i in range(n):
        read = nn.matmul(readers[:, i], state)  # [B, H, 2Q, V]
        u = nn.matmul(R[:, i], beta[:, i] * (v[:, i] - read[:, :, :Q]))  # 3.
        added = nn.matmul(spread[:, i], u)  # 4.
        ys.append(read[:, :, Q:] + added[:, :, :Q])
        state = state * start[:, i, :, -1, :, None] + added[:, :, Q:]
    y = jnp.stack(ys, axis=1).transpose(0, 1, 3, 2, 4).reshape(B, T + pad, H, -1)
    return y[:, :T], state


Sums = tuple[Array, Array]


def _exp(coarse: Array, fine: Array, where: Array) -> Array:
    """exp(coarse + fine) where `where`, else 0."""
    return jnp.exp(jnp.where(where, coarse + fine, MASKED))


def _lower(size: int, diagonal: bool) -> Array:
    """bool[size, size]: j < i, or j <= i."""
    i, j = nn.iota(size)[:, None], nn.iota(size)[None, :]
    return i >= j if diagonal else i > j


def _pairs_of_heads(q: Array, k: Array, cum: Sums) -> tuple[Array, Array]:
    """M and N [B, n, H, Q, Q] for one decay a head: q, k [B, n, G, Q, K], cum [B, n, H, Q, 1]."""
    H, Q = cum[0].shape[2:4]
    scores = nn.matmul(jnp.concatenate([k, q], axis=3), k.swapaxes(-1, -2))
    scores = _per_head(scores, H)  # [B, n, H, 2Q, Q]
    coarse, fine = cum
    columns = coarse.swapaxes(-1, -2), fine.swapaxes(-1, -2)
    decay = _exp(coarse - columns[0], fine - columns[1], _lower(Q, diagonal=True))
    M = jnp.where(_lower(Q, diagonal=False), scores[..., :Q, :] * decay, 0.0)
    return M, scores[..., Q:, :] * decay


def _pairs_of_channels(q: Array, k: Array, cum: Sums) -> tuple[Array, Array]:
    """M and N [B, n, H, Q, Q] for one decay a channel: q, k and cum [B, n, H, Q, K].

    Tokens i and j fall into the two halves of a block of 2, 4, ... Q tokens for exactly one of
    these sizes. There the decay from j to i is that from j up to the first token of the second
    half times that from there to i, each at most 1, so a product of matrices does the sum.
    """
    Q = k.shape[-2]
    at, scales, masks = np.arange(Q), [], []
    size = 1
    while size < Q:
        second = np.where(at // size % 2 == 1, 1.0, -1.0).astype(np.float32)[:, None]
        middle = _middles(cum[0], size), _middles(cum[1], size)
        since = (cum[0] - middle[0]) + (cum[1] - middle[1])
        scales.append(jnp.exp(since * second))
        masks.append(triangular.halves(Q, size))
        size *= 2
    scale = jnp.stack(scales, axis=3)  # [B, n, H, levels, Q, K]
    keys = k[:, :, :, None] * scale
    rows = jnp.concatenate([keys, q[:, :, :, None] * scale], axis=-2)
    pairs = nn.matmul(rows, keys.swapaxes(-1, -2))  # [B, n, H, levels, 2Q, Q]
    pairs = jnp.sum(pairs * np.tile(np.stack(masks), (1, 2, 1)), axis=3)
    own = jnp.sum(q * k, axis=-1, keepdims=True)
    return pairs[..., :Q, :], pairs[..., Q:, :] + own * np.eye(Q, dtype=np.float32)


def _middles(a: Array, size: int) -> Array:
    """For each of Q tokens of a [..., Q, K], the first of the second half of its 2 `size`."""
    *outer, Q, K = a.shape
    middles = a.reshape(*outer, Q // (2 * size), 2 * size, K)[..., size : size + 1, :]
    return jnp.broadcast_to(middles, (*outer, Q // (2 * size), 2 * size, K)).reshape(a.shape)


def _per_head(a: Array, heads: int) -> Array:
    """[B, n, G, ...] with each of G repeated for its heads -> [B, n, heads, ...]."""
    B, n, G = a.shape[:3]
    if heads == G:
        return a
    spread = jnp.broadcast_to(a[:, :, :, None], (B, n, G, heads // G, *a.shape[3:]))
    return spread.reshape(B, n, heads, *a.shape[3:])
