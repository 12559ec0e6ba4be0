"""The real-gated linear recurrent unit (RG-LRU) of Griffin, arXiv:2402.19427 (eq. 1 to 4).

    r[t], i[t] = sigmoid(W_a x[t] + b_a), sigmoid(W_x x[t] + b_x)      (`gate`; eq. 1 and 2)
    log a[t]   = -c r[t] rate,    rate = softplus(L), c = 8            (eq. 3, appendix A)
    h[t]       = a[t] h[t-1] + sqrt(1 - a[t]²) i[t] x[t]               (eq. 4)
    y[t]       = h[t]

At position 0 nothing is remembered and the input is not scaled: h = i x, whatever the state holds.
W_a and W_x are block-diagonal.

A long memory has a near 1, where 1 - a² would have no digit left and every rounding of a be
repeated as often as the memory is long. So it is d = a - 1 that is computed, as expm1(log a):

    1 - a[t]² = -d[t] (2 + d[t]),    h[t] = h[t-1] + (d[t] h[t-1] + …)

| tensor        | shape           | meaning                                               |
|---------------|-----------------|-------------------------------------------------------|
| x             | [B, T, W]       | W channels (`step`: T = 1)                            |
| r, i          | [B, T, W]       | recurrence gate and input gate, in (0, 1)             |
| rate          | [W]             | softplus of the parameter L, above 0                  |
| lengths       | i32[B]          | how many of the T tokens are valid                    |
| positions     | i32[B]          | position of each row's first token                    |
| state         | [B, W]          | h                                                     |

Everything is float32, weights of the gates f32, bf16 or f16. Identity update for padding: d = 0 and
an input of -0, which leave h as it is to the bit, its zeros' signs among them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from emit.kernels import on_cpu
from emit.kernels import rglru as kernels
from emit.ops import nn

C = 8.0
NOTHING = -0.0  # adding it changes no number; adding 0 turns -0 to 0


@on_cpu(kernels.mixer)
def mixer(
    x: Array,
    branch: Array,
    r_weight: Array,
    r_bias: Array,
    i_weight: Array,
    i_bias: Array,
    rate: Array,
    lengths: Array,
    positions: Array,
    state: Array,
    *,
    chunk: int,
) -> tuple[Array, Array]:
    """branch * rglru(x) with its gates: x and branch f32[B, T, W] -> (same, state).

    The weights and biases are those of `gate`, `chunk` is that of `scan`.
    """
    gates = gate(x, r_weight, r_bias), gate(x, i_weight, i_bias)
    inputs = (x, *gates, rate, lengths, positions, state)
    y, state = step(*inputs) if x.shape[1] == 1 else scan(*inputs, chunk)
    return branch * y, state


def gate(x: Array, weight: Array, bias: Array) -> Array:
    """sigmoid of a block-diagonal projection: x [B, T, W] -> [B, T, W].

    weight [H, O, I] holds the H = W / I blocks (O = I), bias [W].
    """
    B, T, W = x.shape
    H, _, width = weight.shape
    blocks = x.reshape(B * T, H, width).swapaxes(0, 1)
    y = nn.matmul(blocks, weight.astype(jnp.float32).swapaxes(1, 2))
    return jax.nn.sigmoid(y.swapaxes(0, 1).reshape(B, T, W) + bias)


def step(
    x: Array,
    r: Array,
    i: Array,
    rate: Array,
    lengths: Array,
    positions: Array,
    state: Array,
) -> tuple[Array, Array]:
    """One token a row: x [B, 1, W] -> (y [B, 1, W], state). Rows of length 0 keep their state."""
    d, inputs = _discretised(x, r, i, rate, lengths, positions)
    h = _entering(state, lengths, positions)
    h = h + (d[:, 0] * h + inputs[:, 0])
    return h[:, None], h


def scan(
    x: Array,
    r: Array,
    i: Array,
    rate: Array,
    lengths: Array,
    positions: Array,
    state: Array,
    chunk: int,
) -> tuple[Array, Array]:
    """T tokens in chunks of Q = `chunk` (T is padded up to a multiple): -> (y [B, T, W], state).

    1. Inside a chunk the Q tokens are written out one after another, a product and a sum each.
    2. A loop over the chunks carries h.

    The arithmetic is that of `step` folded, so a prompt cut anywhere gives the same digits. An
    associative scan does more of it, log T times over all tokens, and every level of it is kernels
    of its own: of 256 tokens of 2560 channels it makes 104 kernels and takes 3 times as long on a
    CPU. Products of pairs of tokens (as in SSD) take 20 times as long, for every channel has decays
    of its own.
    """
    T = x.shape[1]
    Q = min(chunk, T)
    d, inputs = _discretised(x, r, i, rate, lengths, positions)
    if pad := -T % Q:
        widths = ((0, 0), (0, pad), (0, 0))
        d = jnp.pad(d, widths)
        inputs = jnp.pad(inputs, widths, constant_values=NOTHING)

    def token(h: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        d, inputs = now
        h = h + (d * h + inputs)
        return h, h

    start = _entering(state, lengths, positions)
    tokens = (d.swapaxes(0, 1), inputs.swapaxes(0, 1))
    state, y = jax.lax.scan(token, start, tokens, unroll=Q)
    return y.swapaxes(0, 1)[:, :T], state


def _discretised(
    x: Array, r: Array, i: Array, rate: Array, lengths: Array, positions: Array
) -> tuple[Array, Array]:
    """d and the scaled inputs [B, T, W], with padding as nothing and position 0 unscaled."""
    t = nn.iota(x.shape[1])[None, :]
    valid = (t < lengths[:, None])[..., None]
    first = (positions[:, None] + t == 0)[..., None]
    d = _expm1(-C * r * rate)
    scale = jnp.where(first, 1.0, jnp.sqrt(-d * (2.0 + d)))
    return jnp.where(valid, d, 0.0), jnp.where(valid, scale * (i * x), NOTHING)


def _expm1(x: Array) -> Array:
    """exp(x) - 1 for x <= 0. Above -1/2 by its series to x^8 (not all targets' own has it)."""
    near = jnp.maximum(x, -0.5)
    series = jnp.ones_like(near)
    for n in range(8, 1, -1):
        series = 1.0 + near / n * series
    return jnp.where(x > -0.5, near * series, jnp.exp(x) - 1.0)


def _entering(state: Array, lengths: Array, positions: Array) -> Array:
    """The state before a row's first token: of a row that starts at position 0, zero."""
    fresh = (positions == 0) & (lengths > 0)
    return jnp.where(fresh[:, None], 0.0, state)
