"""Mamba's selective state space recurrence, arXiv:2312.00752 (eq. 2a and 2b).

    h[t] = exp(dt[t] A) h[t-1] + dt[t] B[t] x[t]
    y[t] = C[t] h[t] + D x[t]

Every channel has a state of its own; A is diagonal. A is discretised by eq. 4, B as dt B (the first
order of eq. 4): so do the authors' code and all published models.

| tensor | shape        | meaning                                |
|--------|--------------|----------------------------------------|
| x      | [B, T, I]    | I channels (`step`: T = 1)             |
| dt     | [B, T, I]    | step size after softplus and mask, ≥ 0 |
| A      | [I, N]       | negative decay rates                   |
| Bm, Cm | [B, T, N]    | input and output maps, of all channels |
| D      | [I]          | skip                                   |
| state  | [B, I, N]    | h                                      |

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
from emit.kernels import selective_scan as scan_kernels
from emit.ops import nn


@dataclass(frozen=True)
class Channels:
    """What each of I channels has of its own: dt_bias and D f32[I], A_log f32[I, N]."""

    dt_bias: Array
    A_log: Array
    D: Array


@on_cpu(scan_kernels.mix)
def mix(
    x: Values,
    dt: Values,
    Bm: Values,
    Cm: Values,
    channels: Channels,
    lengths: Array,
    state: Array,
    chunk: int,
    gate: Values | None = None,
) -> tuple[Array, Array]:
    """x [B, T, I] -> (y [B, T, I], state), a step where T is 1, else a scan in chunks.

    dt [B, T, I] is what softplus(dt + dt_bias) is the step size of, A = -exp(A_log). With a gate
    [B, T, I] y is multiplied by silu(gate). Tokens from `lengths[b]` (i32[B]) on leave the state as
    it is. What are parts of projections may be columns of them.
    """
    x, dt, Bm, Cm = (kernels.array(each) for each in (x, dt, Bm, Cm))
    T = x.shape[1]
    valid = nn.iota(T)[None, :] < lengths[:, None]
    dt = jnp.where(valid[..., None], jax.nn.softplus(dt + channels.dt_bias), 0.0)
    inputs = (x, dt, -jnp.exp(channels.A_log), Bm, Cm, channels.D, state)
    y, new = step(*inputs) if T == 1 else scan(*inputs, chunk)
    if T == 1:  # as it was, whatever the token holds
        new = jnp.where((lengths > 0)[:, None, None], new, state)
    return (y if gate is None else y * jax.nn.silu(kernels.array(gate))), new


def step(
    x: Array, dt: Array, A: Array, Bm: Array, Cm: Array, D: Array, state: Array
) -> tuple[Array, Array]:
    """One token: x [B, 1, I] -> (y [B, 1, I], state).

    C h is taken as C (decay h[t-1]) + dt x (B C), so that nothing reads the new state: it is then
    written straight to where the caller wants it, and not to a temporary and copied from there.
    """
    decay = jnp.exp(dt[:, 0, :, None] * A)
    inputs = dt[:, 0] * x[:, 0]
    new = state * decay + inputs[:, :, None] * Bm[:, 0, None, :]
    read = jnp.sum(state * decay * Cm[:, 0, None, :], axis=-1)
    dot = jnp.sum(Bm[:, 0] * Cm[:, 0], axis=-1)[:, None]
    return (read + inputs * dot)[:, None] + D * x, new


def scan(
    x: Array, dt: Array, A: Array, Bm: Array, Cm: Array, D: Array, state: Array, chunk: int
) -> tuple[Array, Array]:
    """T tokens in chunks of Q = `chunk` (T is padded up to a multiple): -> (y [B, T, I], state).

    1. Inside a chunk the Q tokens are written out one after another: an update of h and its
       product with C each.
    2. A loop over the chunks carries h.

    Decays differ in every channel and state, so no product form saves work as in SSD: whatever
    looks at pairs of tokens, or at all of them side by side, computes two exponentials and more
    for each of the T I N elements, and writes them out. One after another each is computed once,
    from numbers ≤ 0.
    """
    T = x.shape[1]
    Q = min(chunk, T)
    pad = -T % Q
    skip = D * x
    tokens = (dt, dt * x, Bm, Cm)
    if pad:
        tokens = tuple(jnp.pad(a, [(0, 0), (0, pad), (0, 0)]) for a in tokens)

    def token(h: Array, now: tuple[Array, ...]) -> tuple[Array, Array]:
        dt, inputs, b, c = now
        h = h * jnp.exp(dt[:, :, None] * A) + inputs[:, :, None] * b[:, None, :]
        return h, jnp.sum(h * c[:, None, :], axis=-1)

    state, y = jax.lax.scan(token, state, tuple(a.swapaxes(0, 1) for a in tokens), unroll=Q)
    return y.swapaxes(0, 1)[:, :T] + skip, state
