"""Attention to a region of keys and values by attention.c, and how its work is cut into tiles."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from emit import kernels

DEEPEST = 640  # numbers of a key: ATT_DEPTH in attention.c
FEW = 8  # queries of a block of a decode: ATT_FEW
PART = 256  # places that are worth a tile of their own


def parts(units: int, places: int) -> int:
    """Into how many parts the places of a step's `units` blocks are cut, each part a tile."""
    return max(1, min(kernels.MOST_TILES // units, places // PART))


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
) -> Array | None:
    """`attention.read` by the kernels: one, or two where few heads would leave cores idle."""
    (B, T, H, D), (_, G, C, _) = q.shape, keys.shape
    W = D if width is None else width
    if D > DEEPEST or keys.dtype != jnp.float32:
        return None
    floats = [int(np.float32(x).view(np.uint32)) for x in (scale, softcap or 0.0)]
    operands, sizes = [q, keys, values, positions], [H, G, C, D, W, *floats]
    result = ((B, T, H, W), jnp.float32)
    if T > 1:
        operands, sizes = [q, keys, values, lengths, positions], [B, T, *sizes, kernels.MOST_TILES]
        (y,) = kernels.call("attention_scan", operands, [result], sizes, kernels.MOST_TILES)
        return y
    units = B * G * -(-H // G // FEW)
    splits = parts(units, C)
    tiles = min(kernels.MOST_TILES, units * splits)
    if splits == 1:
        (y,) = kernels.call("attention_step", operands, [result], [units, *sizes, tiles], tiles)
        return y
    made = [((B * H, splits, size), jnp.float32) for size in (W, 2)]
    sizes = [units * splits, *sizes, splits, tiles]
    y, stats = kernels.call("attention_part", operands, made, sizes, tiles)
    per = kernels.per_tile(B * H)
    sizes, tiles = [B * H, splits, W, per], -(-B * H // per)
    (y,) = kernels.call("attention_join", [y, stats], [((B * H, W), jnp.float32)], sizes, tiles)
    return y.reshape(B, T, H, W)


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
) -> Array | None:
    """`attention.read_ring` by the kernel."""
    (B, T, H, D), (_, G, C, _) = q.shape, keys.shape
    if D > DEEPEST or keys.dtype != jnp.float32:
        return None
    floats = [int(np.float32(x).view(np.uint32)) for x in (scale, softcap or 0.0)]
    operands = [q, k, v, keys, values, lengths, positions]
    sizes = [B, T, H, G, C, D, window, *floats, kernels.MOST_TILES]
    (y,) = kernels.call(
        "attention_ring", operands, [(q.shape, jnp.float32)], sizes, kernels.MOST_TILES
    )
    return y
