"""Matrices that the graph holds as codes (`emit.packed`), and the products that read them so.

| tensor  | shape                | dtype                                        |
|---------|----------------------|----------------------------------------------|
| codes   | [..., O, K bits / 8] | i8: a code, or two of four bits, the low first |
| scales  | [..., O, K / group]  | f32, bf16 or f16                             |
| offsets | [..., O, K / group]  | as the layout says, a zero as i8; or None    |

The number of a code is in float32, as `emit.packed` says. A product takes the inputs in two halves
where a byte holds two codes, the even ones and the odd ones: so nothing moves the codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from emit.packed import Layout

FEW = 8  # rows up to which a product is multiply and sum: one operation that reads the codes once


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
        wide = jnp.stack(self.halves(), axis=-1)
        return wide.reshape(self.shape).astype(dtype)

    def halves(self) -> list[Array]:
        """f32[..., O, K / n] for each of the n = 8 / bits codes of a byte."""
        layout, byte = self.layout, self.codes.astype(jnp.int32)
        grouped = (*self.scales.shape, layout.group * layout.bits // 8)
        codes = [byte & 15, (byte >> 4) & 15] if layout.bits == 4 else [byte & 255]
        if layout.table == "int":
            middle = 2 ** (layout.bits - 1)
            codes = [(code ^ middle) - middle for code in codes]
        return [self._number(code.reshape(grouped)).reshape(byte.shape) for code in codes]

    def _number(self, codes: Array) -> Array:
        """f32[..., G, n] of codes of the same shape."""
        layout = self.layout
        if layout.table in ("uint", "int"):
            values = codes.astype(jnp.float32)
        else:
            values = jnp.asarray(layout.values())[codes]
        scales = self.scales.astype(jnp.float32)[..., None]
        if self.offsets is None:
            return values * scales
        if layout.offset == "zero":
            zero = self.offsets.astype(jnp.int32) & 255
            return (values - zero.astype(jnp.float32)[..., None]) * scales
        return values * scales + self.offsets.astype(jnp.float32)[..., None]


Weight = Array | Quantized


def product(x: Array, weight: Quantized) -> Array:
    """`x @ weight.T`: x f32[M, K], weight [O, K] -> f32[M, O]."""
    halves = weight.halves()
    parts = [x[:, i :: len(halves)] for i in range(len(halves))]
    if x.shape[0] <= FEW:
        terms = (a[:, None] * w[None] for a, w in zip(parts, halves, strict=True))
        return jnp.sum(sum(terms, jnp.float32(0)), axis=-1)
    products = (
        jax.lax.dot_general(
            a,
            w,
            (((1,), (1,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        for a, w in zip(parts, halves, strict=True)
    )
    return sum(products, jnp.float32(0))
