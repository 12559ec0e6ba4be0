"""Causal multi-head attention with grouped keys (arXiv:1706.03762 eq. 1; GQA, arXiv:2305.13245).

    s[t, c] = scale q[t] · k[c]            for c <= t, and t - c < window where there is a window
    y[t]    = sum_c softmax_c(s)[t, c] v[c]

With a soft cap (arXiv:2408.00118, section 2) s is softcap tanh(s / softcap) before the mask.

| tensor       | shape           | meaning                                                    |
|--------------|-----------------|------------------------------------------------------------|
| q            | [B, T, H, D]    | queries, rotated where the model has positions             |
| k, v         | [B, T, G, D]    | keys and values of G heads, each for H/G query heads       |
| lengths      | i32[B]          | how many of the T tokens are valid                         |
| positions    | i32[B]          | position of each row's first token                         |
| keys, values | [B, G, C, D]    | the state: those of earlier positions                      |

Everything is float32. Without a window position p lies at place p of the state, and C is the
longest context; with one the state is a ring of C <= window places and position p lies at p mod C.
The state is written in place: each row's valid tokens replace its places, and no other place
changes a bit. Identity update for padding: it is not written, and nothing attends to it. Tokens
whose place is outside the region are dropped.

Products read keys and values as they lie (contracted over D and over C), so no target transposes
or copies the state.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from emit.kernels import attention as kernels
from emit.kernels import on_cpu
from emit.ops import nn

MASKED = -1e30  # its exp is 0; an infinity would make NaN where a row has no key at all
SCORES = 2**25  # numbers that one product of a row's queries with its keys may have


def step(
    q: Array,
    k: Array,
    v: Array,
    lengths: Array,
    positions: Array,
    keys: Array,
    values: Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Array, Array, Array]:
    """One token a row (T = 1): -> (y [B, 1, H, D], keys, values)."""
    place = positions if window is None else jax.lax.rem(positions, keys.shape[2])
    keys = write_one(keys, k, place, lengths)
    values = write_one(values, v, place, lengths)
    # In a ring, place c holds the last position that is c mod C: any but those before the first.
    y = read(q, keys, values, lengths, positions, scale=scale, softcap=softcap)
    return y, keys, values


def scan(
    q: Array,
    k: Array,
    v: Array,
    lengths: Array,
    positions: Array,
    keys: Array,
    values: Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Array, Array, Array]:
    """T tokens a row after what the state holds: -> (y [B, T, H, D], keys, values).

    Without a window the tokens are written first and attend to the region. A ring may lose keys
    that the first tokens need, so they attend to the old ring and to themselves, and are written
    after that, the last C valid ones.
    """
    valid = (nn.iota(q.shape[1])[None, :] < lengths[:, None])[:, :, None, None]
    k, v = jnp.where(valid, k, 0.0), jnp.where(valid, v, 0.0)  # even infinite padding is nothing
    if window is None:
        keys = write(keys, k, positions, lengths)
        values = write(values, v, positions, lengths)
        y = read(q, keys, values, lengths, positions, scale=scale, softcap=softcap)
        return y, keys, values
    given = (q, k, v, keys, values, lengths, positions)
    y = read_ring(*given, scale=scale, window=window, softcap=softcap)
    return y, _write_ring(keys, k, positions, lengths), _write_ring(values, v, positions, lengths)


@on_cpu(kernels.read)
def read(
    q: Array,
    keys: Array,
    values: Array,
    lengths: Array,
    positions: Array,
    *,
    scale: float,
    softcap: float | None = None,
    width: int | None = None,
) -> Array:
    """Attention of tokens that are written already: token t sees the places up to positions + t.

    -> [B, T, H, D], or of the first `width` numbers of the values alone. Beyond `lengths` it is
    anything.
    """
    del lengths
    T, C = q.shape[1], keys.shape[2]
    c = jnp.arange(C, dtype=jnp.int32)[None, None, :]
    seen = c <= positions[:, None, None] + nn.iota(T)[None, :, None]
    return attend(q, [(keys, values, seen)], scale, softcap)[..., :width]


@on_cpu(kernels.read_ring)
def read_ring(
    q: Array,
    k: Array,
    v: Array,
    keys: Array,
    values: Array,
    lengths: Array,
    positions: Array,
    *,
    scale: float,
    window: int,
    softcap: float | None = None,
) -> Array:
    """Attention of T tokens to themselves and to a ring that they are not written to yet.

    -> [B, T, H, D], which beyond `lengths` is anything.
    """
    del lengths
    T, C = q.shape[1], keys.shape[2]
    c, first, t = (
        jnp.arange(C, dtype=jnp.int32)[None, None, :],
        positions[:, None, None],
        nn.iota(T),
    )
    held = _held(c, first - 1, C)
    old = (held >= 0) & (first + t[None, :, None] - held < window)
    own = (t[:, None] >= t[None, :]) & (t[:, None] - t[None, :] < window)
    parts = [(keys, values, old), (k.swapaxes(1, 2), v.swapaxes(1, 2), own[None])]
    return attend(q, parts, scale, softcap)


def _held(c: Array, last: Array, C: int) -> Array:
    """The position that place c of a ring holds after position `last` >= -1; below 0 if none."""
    return last - jax.lax.rem(last - c + C, C)


def attend(
    q: Array, parts: list[tuple[Array, Array, Array]], scale: float, softcap: float | None
) -> Array:
    """Softmax attention of q [B, T, H, D] over all `parts` -> [B, T, H, D].

    A part is (keys [B, G, C, D], values [B, G, C, D], seen bool[B or 1, T, C]). It is done in
    halves, quarters… of the tokens, so that scores stay within `SCORES` numbers: the compiler runs
    the blocks one after another and gives each the memory of the last. (Blocks of keys would need a
    running maximum; blocks of tokens change no sum.)
    """
    T, size = q.shape[1], q.shape[1]
    keys = sum(part[0].shape[2] for part in parts)
    while size > 1 and q.shape[2] * size * keys > SCORES:
        size = -(-size // 2)
    if size == T:
        return _attend(q, parts, scale, softcap)
    blocks = []
    for a in range(0, T, size):
        now = [(k, v, seen[:, a : a + size]) for k, v, seen in parts]
        blocks.append(_attend(q[:, a : a + size], now, scale, softcap))
    return jnp.concatenate(blocks, axis=1)


def _attend(
    q: Array, parts: list[tuple[Array, Array, Array]], scale: float, softcap: float | None
) -> Array:
    """Softmax attention over all `parts` (keys, values [B, G, C, D], seen [B or 1, T, C])."""
    B, T, H, D = q.shape
    G = parts[0][0].shape[1]
    rows = (q * scale).reshape(B, T, G, H // G, D).transpose(0, 2, 3, 1, 4)  # [B, G, R, T, D]
    rows = rows.reshape(B, G, H // G * T, D)
    scores = []
    for keys, _, seen in parts:
        s = _product(rows, keys, 3).reshape(B, G, H // G, T, keys.shape[2])
        if softcap is not None:
            s = nn.softcap(s, softcap)
        scores.append(jnp.where(seen[:, None, None], s, MASKED))
    largest = scores[0].max(-1, keepdims=True)
    for s in scores[1:]:
        largest = jnp.maximum(largest, s.max(-1, keepdims=True))
    y = total = jnp.zeros((), jnp.float32)
    for s, (_, values, _) in zip(scores, parts, strict=True):
        weights = jnp.exp(s - largest)
        total = total + weights.sum(-1, keepdims=True)
        y = y + _product(weights.reshape(B, G, H // G * T, values.shape[2]), values, 2)
    y = y.reshape(B, G, H // G, T, D) / total
    return y.transpose(0, 3, 1, 2, 4).reshape(B, T, H, D)


def _product(a: Array, b: Array, contracted: int) -> Array:
    """Batched product of a [B, G, M, K] with keys or values `b` as they lie, over its axis
    `contracted`: one kernel, as by `nn.matmul`.

    Nothing stands between b and the region it is a part of: behind a barrier the compiler would
    lose sight of memory that is updated in place.
    """
    batch = a.shape[:2]
    out = jax.lax.dot_general(
        a.reshape(-1, *a.shape[2:]),
        b.reshape(-1, *b.shape[2:]),
        (((2,), (contracted - 1,)), ((0,), (0,))),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return out.reshape(*batch, *out.shape[1:])


def write_one(region: Array, token: Array, at: Array, lengths: Array) -> Array:
    """`write` for T = 1: what all rows write is selected at once, and written row by row."""
    B, G, C, D = region.shape
    start = jnp.clip(at, 0, C - 1)
    index = C * nn.iota(B * G).reshape(B, G) + start[:, None]
    old = jnp.take(region.reshape(B * G * C, D), index, axis=0, mode="clip")
    written = (start == at) & (lengths > 0)
    new = jnp.where(written[:, None, None], token[:, 0], old)[:, :, None]
    zero = jnp.zeros((), jnp.int32)
    for b in range(B):
        to = (jnp.full((), b, jnp.int32), zero, start[b], zero)
        region = jax.lax.dynamic_update_slice(region, new[b : b + 1], to)
    return region


def write(region: Array, tokens: Array, at: Array, lengths: Array) -> Array:
    """Put the first lengths[b] rows of `tokens` [B, T, G, D] at places at[b]… of `region`.

    Places outside the region are dropped; at[b] may be negative. One slice of W = min(T, C) places
    a row is read, selected and written, so the compiled update is in place and never clamped: the
    slice starts inside, and the tokens are shifted within it.
    """
    B, T, G, D = tokens.shape
    C = region.shape[2]
    W = min(T, C)
    zero = jnp.zeros((), jnp.int32)
    padded = tokens
    if T > 1:
        padded = jnp.pad(tokens, ((0, 0), (W, W), (0, 0), (0, 0)))
    for b in range(B):
        row = jnp.full((), b, jnp.int32)
        start = jnp.clip(at[b], 0, C - W)
        first = jnp.clip(start - at[b], -W, T)  # the token that belongs at place `start`
        token = first + nn.iota(W)
        new = padded[b]
        if T > 1:
            new = jax.lax.dynamic_slice_in_dim(padded[b], first + W, W, axis=0)
        written = ((token >= 0) & (token < lengths[b]))[None, None, :, None]
        old = jax.lax.dynamic_slice(region, (row, zero, start, zero), (1, G, W, D))
        new = jnp.where(written, new.transpose(1, 0, 2)[None], old)
        region = jax.lax.dynamic_update_slice(region, new, (row, zero, start, zero))
    return region


def _write_ring(region: Array, tokens: Array, positions: Array, lengths: Array) -> Array:
    """Put the last min(lengths[b], C) valid rows of `tokens` at their places, position mod C.

    They are one run of places, and where it passes the end the rest is at the beginning.
    """
    B, T, _, _ = tokens.shape
    C = region.shape[2]
    if T > C:
        skipped = jnp.maximum(lengths - C, 0)
        tokens = jnp.stack(
            [jax.lax.dynamic_slice_in_dim(tokens[b], skipped[b], C, axis=0) for b in range(B)]
        )
        positions, lengths = positions + skipped, lengths - skipped
    start = jax.lax.rem(positions, C)
    region = write(region, tokens, start, lengths)
    return write(region, tokens, start - C, lengths) if T > 1 else region
