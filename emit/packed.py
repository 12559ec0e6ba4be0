"""Quantised matrices as a bundle stores them: codes, and a scale for each group of inputs.

| tensor          | dtype          | shape                 |                                      |
|-----------------|----------------|-----------------------|--------------------------------------|
| codes           | u8             | [..., O, K bits / 8]  | of 4 bits, the low half comes first  |
| scales          | f32, bf16, f16 | [..., O, K / group]   |                                      |
| offsets, if any | as `offset`    | [..., O, K / group]   |                                      |

The number of code q is, in float32 with each operation rounded, one of

    table[q] * scale        table[q] * scale + bias        (table[q] - zero) * scale

and `table` is one of TABLES. These are the forms of MLX (affine, mxfp4, nvfp4), GPTQ, AWQ, NF4 and
of compressed-tensors, so that their codes need not be rounded a second time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from emit.errors import EmitError
from emit.state import DTYPES

Table = Literal["uint", "int", "e2m1", "nf4", "fp4"]

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Quantiles of the normal distribution (QLoRA, arXiv:2305.14314, appendix E).
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# bitsandbytes' own four-bit float: sign, and a magnitude that its tree of comparisons finds.
_FP4 = (0.0, 0.0052083333, 0.6666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)
TABLES: dict[str, tuple[float, ...]] = {
    "e2m1": (*_E2M1, *(-x for x in _E2M1)),
    "nf4": _NF4,
    "fp4": (*_FP4, *(-x for x in _FP4)),
}


@dataclass(frozen=True)
class Layout:
    """How the codes of a matrix are to be read. `uint` counts from 0; `int` is two's complement.

    A `bias` has the type of the scales, a `zero` is a u8.
    """

    bits: Literal[4, 8]
    group: int
    table: Table
    scale: Literal["f32", "bf16", "f16"]
    offset: Literal["none", "bias", "zero"] = "none"

    def values(self) -> np.ndarray:
        """f32[2 ^ bits]: the number of each code."""
        if self.table in TABLES:
            return np.asarray(TABLES[self.table], np.float32)
        codes = np.arange(2**self.bits)
        if self.table == "int":
            codes = np.where(codes < 2 ** (self.bits - 1), codes, codes - 2**self.bits)
        return codes.astype(np.float32)


@dataclass(frozen=True)
class Packed:
    """One quantised matrix, or a stack of them; `offsets` as the layout says, or None."""

    layout: Layout
    codes: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray | None = None

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """EmitError unless this can be the matrix `name` of `shape`."""
        layout, groups = self.layout, (*shape[:-1], shape[-1] // max(self.layout.group, 1))
        expected = [("codes", self.codes, "u8", (*shape[:-1], shape[-1] * layout.bits // 8))]
        expected += [("scales", self.scales, layout.scale, groups)]
        if layout.offset != "none" and self.offsets is not None:
            kind = "u8" if layout.offset == "zero" else layout.scale
            expected += [("offsets", self.offsets, kind, groups)]
        wrong = [
            f"{what}: found {array.dtype}{list(array.shape)}, expected {word}{list(wanted)}"
            for what, array, word, wanted in expected
            if array.dtype != DTYPES[word] or array.shape != wanted
        ]
        if shape[-1] % layout.group or (self.offsets is None) != (layout.offset == "none"):
            wrong.append(f"groups of {layout.group} of {shape[-1]}, offset {layout.offset}")
        if wrong:
            raise EmitError(f"{name}: {'; '.join(wrong)}")

    def widen(self) -> np.ndarray:
        """f32[..., O, K]: the numbers."""
        codes = self.codes
        if self.layout.bits == 4:
            codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
        grouped = (*self.scales.shape, self.layout.group)
        values = self.layout.values()[codes].reshape(grouped)
        scales = self.scales.astype(np.float32)[..., None]
        if self.offsets is None:
            wide = values * scales
        elif self.layout.offset == "zero":
            wide = (values - self.offsets.astype(np.float32)[..., None]) * scales
        else:
            wide = values * scales + self.offsets.astype(np.float32)[..., None]
        return wide.reshape(codes.shape)


def pack4(codes: np.ndarray) -> np.ndarray:
    """Codes below 16, u8[..., K], two to a byte: u8[..., K / 2]."""
    pairs = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
    return (pairs[..., 0] | pairs[..., 1] << 4).astype(np.uint8)
