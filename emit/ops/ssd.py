"""Mamba2's state-space duality (SSD) recurrence, arXiv:2405.21060.

    h[t] = exp(dt[t] A) h[t-1] + dt[t] x[t] B[t]^T       (eq. 1 with scalar A per head, section 2.4)
    y[t] = h[t] C[t] + D x[t]

| tensor | shape           | meaning                                       |
|--------|-----------------|-----------------------------------------------|
| x      | [B, T, H, P]    | H heads of P channels (`step`: T = 1)         |
| dt     | [B, T, H]       | step size after softplus, clamp and mask, ≥ 0 |
| A      | [H]             | negative decay rates                          |
| Bm, Cm | [B, T, G, N]    | input and output maps, one for H/G heads      |
| D      | [H]             | skip                                          |
| state  | [B, H, P, N]    | h                                             |

Everything is float32. Identity update for padding: dt = 0, which leaves h as it is exactly.

`mix` is the whole of it, from the step sizes before their softplus to the gate.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from emit import kernels
from emit.kernels import Values, on_cpu
from emit.kernels import ssd as ssd_kernels
from emit.ops import nn

GRID = 256.0
FORGOTTEN = -104.0  # exp of it is 0 in float32, and so is that of anything less
MASKED = -1e30  # exp of it is exactly 0; an infinity would make NaN where it meets its own negative


@dataclass(frozen=True)
class Heads:
    """What each of H heads has of its own, f32[H] each, and the limits of all step sizes."""

    dt_bias: Array
    A_log: Array
    D: Array
    dt_limit: tuple[float, float] = (0.0, float("inf"))


@on_cpu(ssd_kernels.mix)
def mix(
    x: Values,
    dt: Values,
    Bm: Values,
    Cm: Values,
    heads: Heads,
    lengths: Array,
    state: Array,
    chunk: int,
    gate: Values | None = None,
) -> tuple[Array, Array]:
    """x [B, T, H P] -> (y [B, T, H P], state), a step where T is 1, else a scan in chunks.

    dt [B, T, H] is what clamp(softplus(dt + dt_bias)) is the step size of, A = -exp(A_log); Bm, Cm
    [B, T, G N]; state [B, H, P, N]. With a gate [B, T, H P] y is multiplied by silu(gate). Tokens
    from `lengths[b]` (i32[B]) on leave the state as it is. What are parts of projections may be
    columns of them.
    """
    x, dt, Bm, Cm = (kernels.array(each) for each in (x, dt, Bm, Cm))
    B, T, inner = x.shape
    _, H, P, N = state.shape
    dt = jnp.clip(jax.nn.softplus(dt + heads.dt_bias), *heads.dt_limit)
    valid = nn.iota(T)[None, :] < lengths[:, None]
    inputs = (
        x.reshape(B, T, H, P),
        jnp.where(valid[..., None], dt, 0.0),
        -jnp.exp(heads.A_log),
        Bm.reshape(B, T, -1, N),
        Cm.reshape(B, T, -1, N),
        heads.D,
        state,
    )
    y, new = step(*inputs) if T == 1 else scan(*inputs, chunk)
    if T == 1:  # as it was, whatever the token holds
        new = jnp.where((lengths > 0)[:, None, None, None], new, state)
    y = y.reshape(B, T, inner)
    return (y if gate is None else y * jax.nn.silu(kernels.array(gate))), new


def step(
    x: Array, dt: Array, A: Array, Bm: Array, Cm: Array, D: Array, state: Array
) -> tuple[Array, Array]:
    """One token: x [B, 1, H, P] -> (y [B, 1, H, P], state).

    h C is taken as decay (h[t-1] C) + dt x (B C), so that nothing reads the new state: it is then
    written straight to where the caller wants it, and not to a temporary and copied from there.
    """
    B, _, H, P = x.shape
    G, N = Bm.shape[2:]
    decay = jnp.exp(dt[:, 0] * A)
    inputs = dt[:, 0, :, None] * x[:, 0]
    grouped = state.reshape(B, G, H // G, P, N)
    update = inputs.reshape(B, G, H // G, P, 1) * Bm[:, 0, :, None, None, :]
    new = grouped * decay.reshape(B, G, H // G, 1, 1) + update
    read = jnp.sum(grouped * Cm[:, 0, :, None, None, :], axis=-1)
    dot = jnp.sum(Bm[:, 0] * Cm[:, 0], axis=-1)[:, :, None, None]
    y = read * decay.reshape(B, G, H // G, 1) + inputs.reshape(B, G, H // G, P) * dot
    return y.reshape(B, 1, H, P) + D[:, None] * x, new.reshape(B, H, P, N)


def scan(
    x: Array, dt: Array, A: Array, Bm: Array, Cm: Array, D: Array, state: Array, chunk: int
) -> tuple[Array, Array]:
    """T tokens in chunks of Q = `chunk` (T is padded up to a multiple): -> (y [B, T, H, P], state).

    1. Inside a chunk: y = (C B^T * L) (dt x), L[i, j] = exp(sum of dt A over j < t <= i), j <= i.
    2. Each chunk's own contribution to the state: sum_j exp(decay from j to its end) dt x B^T.
    3. The recurrence over chunk states.
    4. What the state before the chunk adds: y += exp(decay from its start) C h.

    The cumulative decay is a cumsum: as a product with a triangle of ones, fused into its
    consumers, the compiler has been seen to give wrong numbers. It is kept as a pair of
    sums, multiples of 1/GRID and what remains: differences of the first are exact and the second
    stays below Q / GRID, so a token that erases the state costs the decays after it no digits.
    """
    B, T, H, P = x.shape
    G, N = Bm.shape[2:]
    Q = min(chunk, T)
    pad = -T % Q
    skip = D[:, None] * x
    if pad:
        x, dt, Bm, Cm = (
            jnp.pad(a, [(0, 0), (0, pad)] + [(0, 0)] * (a.ndim - 2)) for a in (x, dt, Bm, Cm)
        )
    n = (T + pad) // Q  # chunks
    R = H // G  # heads of a group
    a = jnp.maximum(dt * A, FORGOTTEN).reshape(B, n, Q, H).transpose(0, 1, 3, 2)
    grid = jnp.floor(a * GRID) / GRID
    coarse, fine = jnp.cumsum(grid, axis=-1), jnp.cumsum(a - grid, axis=-1)
    cum = coarse + fine  # [B, n, H, Q]
    xdt = (x * dt[..., None]).reshape(B, n, Q, H, P).transpose(0, 1, 3, 2, 4)  # [B, n, H, Q, P]
    Bc = Bm.reshape(B, n, Q, G, N).transpose(0, 1, 3, 2, 4)  # [B, n, G, Q, N]
    Cc = Cm.reshape(B, n, Q, G, N).transpose(0, 1, 3, 2, 4)

    # 1. Behind a barrier: fused with what follows, vulkan computes it wrongly for Q below 16.
    scores = jax.lax.optimization_barrier(nn.matmul(Cc, Bc.swapaxes(-1, -2)))  # [B, n, G, Q, Q]
    causal = nn.iota(Q)[:, None] >= nn.iota(Q)[None, :]
    between = coarse[..., :, None] - coarse[..., None, :]
    between = between + (fine[..., :, None] - fine[..., None, :])
    decay = jnp.exp(jnp.where(causal, between, MASKED))
    weights = (scores[:, :, :, None] * decay.reshape(B, n, G, R, Q, Q)).reshape(B, n, H, Q, Q)
    y = nn.matmul(weights, xdt)  # [B, n, H, Q, P]

    to_end = jnp.exp((coarse[..., -1:] - coarse) + (fine[..., -1:] - fine))  # 2.
    weighted = (xdt * to_end[..., None]).reshape(B, n, G, R, Q, P)
    weighted = weighted.transpose(0, 1, 2, 3, 5, 4).reshape(B, n, G, R * P, Q)
    own = nn.matmul(weighted, Bc).reshape(B, n, H, P, N)

    total = jnp.exp(cum[..., -1])  # 3. [B, n, H]
    before = []
    for i in range(n):
        before.append(state)
        state = state * total[:, i, :, None, None] + own[:, i]

    entering = jnp.stack(before, axis=1).reshape(B, n, G, R * P, N)  # 4.
    carried = nn.matmul(Cc, entering.swapaxes(-1, -2)).reshape(B, n, G, Q, R, P)
    carried = carried.transpose(0, 1, 2, 4, 3, 5).reshape(B, n, H, Q, P)
    y = y + carried * jnp.exp(cum)[..., None]
    y = y.transpose(0, 1, 3, 2, 4).reshape(B, T + pad, H, P)[:, :T]
    return y + skip, state
