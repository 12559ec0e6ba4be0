"""Mamba2's recurrence by ssd.c."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from emit import kernels
from emit.kernels import Values

if TYPE_CHECKING:
    from emit.ops.ssd import Heads

CHUNK = 64  # as in ssd.c
STATE_ROWS = 16


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
) -> tuple[Array, Array] | None:
    """`ssd.mix` by the kernels, which have chunks of their own."""
    del chunk
    x, dt, Bm, Cm = (kernels.columns(each) for each in (x, dt, Bm, Cm))
    z = x if gate is None else kernels.columns(gate)
    own = [heads.dt_bias, heads.A_log, heads.D]
    if not kernels.all_f32(*(each.whole for each in (x, dt, Bm, Cm, z)), *own, state):
        return None
    rows, T, _ = x.whole.shape
    H, P, N = state.shape[1:]
    G = Bm.width // N
    parts = [x, dt, Bm, Cm, z]
    limits = [kernels.bits(limit) for limit in heads.dt_limit]
    places = [number for part in parts for number in part.row]
    sizes = [rows, T, H, P, G, N, *places, *limits, gate is not None]
    operands = [*(part.whole for part in parts), *own, lengths, state]
    results = [((rows, T, H * P), jnp.float32), (state.shape, jnp.float32)]
    if T == 1:
        units = rows * H * -(-P // STATE_ROWS)
        name = "ssd_step"
    else:
        operands.append(_scores(Bm, Cm, lengths, G, N))
        units, name = rows * H, "ssd_scan"
    per = kernels.per_tile(units)
    y, new = kernels.call(name, operands, results, [*sizes, per], -(-units // per))
    return y, new


def _scores(Bm: kernels.Columns, Cm: kernels.Columns, lengths: Array, G: int, N: int) -> Array:
    """C B^T of every chunk."""
    rows, T, _ = Bm.whole.shape
    tiles = rows * -(-T // CHUNK) * G
    (scores,) = kernels.call(
        "ssd_scores",
        [Bm.whole, Cm.whole, lengths],
        [((tiles, CHUNK, CHUNK), jnp.float32)],
        [T, G, N, *Bm.row, *Cm.row],
        tiles,
    )
    return scores
