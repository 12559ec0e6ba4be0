"""Matrices that the graph holds as codes (`emit.packed`), and the products that read them so.

| tensor  | shape                | dtype                                        |
|---------|----------------------|----------------------------------------------|
| codes   | [..., O, K bits / 8] | i8: a code, or two of four bits, the low first |
| scales  | [..., O, K / group]  | f32, bf16 or f16                             |
| offsets | [..., O, K / group]  | as the layout says, a zero as i8; or None    |

The number of a code is in float32, as `emit.packed` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from emit.packed import Layout

FEW = 8  # rows, as of a decode


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scales", "offsets"],
    meta_fields=["layout"],
)
@dataclass(frozen=True)
class Quantized:
    """A matrix, or a stack of them, as codes."""

    codes: Array
    scales: Array
    offsets: Array | None
    layout: Layout

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the numbers."""
        return (*self.codes.shape[:-1], self.codes.shape[-1] * 8 // self.layout.bits)

    @property
    def ndim(self) -> int:
        """2, or more of a stack."""
        return self.codes.ndim

    def at(self, index: Array) -> Quantized:
        """One matrix of a stack; `index` i32[]."""
        return jax.tree.map(
            lambda array: jax.lax.dynamic_index_in_dim(array, index, axis=0, keepdims=False), self
        )

    def rows(self, index: Array) -> Array:
        """Rows of a matrix [O, K] by i32[...], none of it out of range: f32[..., K]."""
        found = jax.tree.map(lambda array: jnp.take(array, index, axis=0, mode="clip"), self)
        return found.astype(jnp.float32)

    def astype(self, dtype: jnp.dtype) -> Array:
        """[..., O, K]: the numbers, `dtype`."""
        return self.numbers().reshape(self.shape).astype(dtype)

    def numbers(self) -> Array:
        """f32[..., O, G, B, n]: the numbers of G groups of B bytes of n codes.

        One element is one expression of a byte and its scale: nothing is moved or put together.
        """
        layout, codes = self.layout, self.codes.astype(jnp.int32)
        count = 8 // layout.bits
        codes = codes.reshape(*self.scales.shape, layout.group // count, 1)
        if count > 1:
            codes = codes >> jnp.asarray(np.arange(count, dtype=np.int32) * layout.bits)
        codes = codes & (2**layout.bits - 1)
        if layout.table == "int":
            middle = 2 ** (layout.bits - 1)
            codes = (codes ^ middle) - middle
        if layout.table in ("uint", "int"):
            values = codes.astype(jnp.float32)
        else:
            values = jnp.take(jnp.asarray(layout.values()), codes, mode="clip")
        scales = self.scales.astype(jnp.float32)[..., None, None]
        if self.offsets is None:
            return values * scales
        if layout.offset == "zero":
            zero = (self.offsets.astype(jnp.int32) & 255).astype(jnp.float32)
            return (values - zero[..., None, None]) * scales
        return values * scales + self.offsets.astype(jnp.float32)[..., None, None]


Weight = Array | Quantized


def product(x: Array, weight: Quantized) -> Array:
    """`x @ weight.T`: x f32[M, K], weight [O, K] -> f32[M, O].

    Few rows are multiplied and summed, one by one and groups first: compiled, each is one operation
    that reads the codes. (All in one sum wants more shared memory on vulkan than there is, and all
    rows at once are unrolled there for minutes.) For many rows the numbers of this one matrix are
    written out before the product.
    """
    if x.shape[0] > FEW:
        return jax.lax.dot_general(
            x,
            weight.astype(jnp.float32),
            (((1,), (1,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
    numbers = weight.numbers()
    rows = x.reshape(-1, *numbers.shape[1:])
    sums = [jnp.sum(jnp.sum(row * numbers, axis=(-2, -1)), axis=-1) for row in rows]
    return jnp.stack(sums)
