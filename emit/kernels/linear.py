"""Projections by linear.c and linear_quantized.c: which of their functions, and in what tiles."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array

from emit import kernels
from emit.ops.quantized import Quantized, Weight

FLOATS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
MOST_ROWS = 8  # as in product.h: up to so many rows, the weights are read in the order they lie
# Workers take eight tiles at a time where there are eight for each, else one. Two to four share
# these numbers evenly; of 48, four would get 16, 16, 8 and 8.
TILES = (96, 16, 8, 4, 2, 1)
TILE_BYTES = 96 << 10  # of weights: beside them, what a tile begins with is little
UNITS = (8, 64)  # of outputs, that a tile has a number of: for few and many rows, as in product.h
ROWS = 192  # of a tile, at most, as in product.h
CODES = 32  # a group of quantised inputs is a multiple of it


@dataclass(frozen=True)
class Operand:
    """A matrix, or a stack of them, as the kernels take it.

    `kind` is the end of their names, `bytes` those of a row's weights.
    """

    kind: str
    arrays: tuple[Array, ...]
    sizes: tuple[int, ...]
    bytes: int


def operand(weight: Weight) -> Operand | None:
    """`weight` for the kernels, None where they do not take it."""
    if isinstance(weight, Quantized):
        return _codes(weight)
    word = FLOATS.get(str(weight.dtype))
    if word is None:
        return None
    return Operand(word, (weight,), (), weight.shape[-1] * weight.dtype.itemsize)


def _codes(weight: Quantized) -> Operand | None:
    layout = weight.layout
    if layout.group % CODES or (layout.bits == 8 and layout.table not in ("uint", "int")):
        return None
    signed = layout.bits == 8 and layout.table == "int"
    if signed and layout.offset != "none":
        return None
    word = "int" if signed else layout.offset
    offsets = weight.scales if weight.offsets is None else weight.offsets  # or any array
    table = jnp.asarray(np.resize(layout.values(), 16))
    arrays = (weight.codes, weight.scales, offsets, table)
    kind = f"q{layout.bits}_{layout.scale}_{word}"
    return Operand(kind, arrays, (layout.group,), weight.codes.shape[-1])


def tile_count(rows: int, outputs: int, row_bytes: int, most: int = TILES[0]) -> int:
    """Into how many tiles, of `most`, the outputs of each part of the rows are cut.

    Each has work for some microseconds.
    """
    if rows <= MOST_ROWS:
        most = min(most, outputs * row_bytes // TILE_BYTES)
    most = min(most, -(-outputs // UNITS[rows > MOST_ROWS]))
    return next((tiles for tiles in TILES if tiles <= most), 1)


def parts_of_rows(rows: int) -> int:
    """Into how many parts rows are cut, each with tiles of its own; as in product.h."""
    return -(-rows // ROWS)


def linear(x: Array, weight: Weight, bias: Array | None = None) -> Array | None:
    """`nn.linear` by a kernel."""
    found = operand(weight) if weight.ndim == 2 and x.ndim == 3 else None
    if found is None:
        return None
    rows, (outputs, inputs) = x.shape[0] * x.shape[1], weight.shape
    tiles = tile_count(rows, outputs, found.bytes)
    (y,) = kernels.call(
        f"linear_{found.kind}",
        [x.reshape(rows, inputs), *found.arrays],
        [((rows, outputs), jnp.float32)],
        [rows, inputs, outputs, tiles, *found.sizes],
        tiles * parts_of_rows(rows),
    )
    y = y.reshape(*x.shape[:2], outputs)
    return y if bias is None else y + bias


def experts(x: Array, stack: Weight, index: Array) -> Array | None:
    """Products with chosen matrices of a stack: x f32[X, M, K], [E, O, K], i32[N] -> [N, M, O].

    `x` is shared by N / X neighbours. None where no kernel takes it. `index` must be in range.
    """
    found = operand(stack)
    if found is None:
        return None
    (count, rows, inputs), outputs, pairs = x.shape, stack.shape[1], index.shape[0]
    tiles = tile_count(rows, outputs, found.bytes, TILES[0] // pairs)
    (y,) = kernels.call(
        f"experts_{found.kind}",
        [x, *found.arrays, index],
        [((pairs, rows, outputs), jnp.float32)],
        [rows, inputs, outputs, tiles, *found.sizes, pairs // count],
        pairs * tiles * parts_of_rows(rows),
    )
    return y
