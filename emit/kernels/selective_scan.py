"""Mamba's recurrence by selective_scan.c."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from emit import kernels
from emit.kernels import Values

if TYPE_CHECKING:
    from emit.ops.selective_scan import Channels

LANES = 16  # of the widest vectors


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
) -> tuple[Array, Array] | None:
    """`selective_scan.mix` by the kernel, token after token: there are no chunks."""
    del chunk
    x, dt, Bm, Cm = (kernels.columns(each) for each in (x, dt, Bm, Cm))
    z = x if gate is None else kernels.columns(gate)
    parts, own = [x, dt, Bm, Cm, z], [channels.dt_bias, channels.A_log, channels.D]
    if not kernels.all_f32(*(part.whole for part in parts), *own, state):
        return None
    rows, T, _ = x.whole.shape
    _, inner, maps = state.shape
    places = [number for part in parts for number in part.row]
    per = LANES * kernels.per_tile(-(-inner // LANES), max(1, kernels.MOST_TILES // rows))
    y, new = kernels.call(
        "selective_scan",
        [*(part.whole for part in parts), *own, lengths, state],
        [((rows, T, inner), jnp.float32), (state.shape, jnp.float32)],
        [T, inner, maps, *places, gate is not None, per],
        rows * -(-inner // per),
    )
    return y, new
