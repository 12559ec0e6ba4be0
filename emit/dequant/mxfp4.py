"""`mxfp4`, as gpt-oss packs its experts: w = e2m1[q] × 2 ^ (s - 127), groups of 32 inputs.

https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf

| tensor     | dtype | shape                    |                                       |
|------------|-------|--------------------------|---------------------------------------|
| `X_blocks` | u8    | [..., O, inputs/32, 16]  | two codes a byte, the low half first  |
| `X_scales` | u8    | [..., O, inputs/32]      | e8m0; 255 reads as NaN                |

X reads as [..., O, inputs], outputs first as all experts of this package. transformers swaps the
last two axes after it, because its gpt-oss multiplies from the other side; nothing else differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from emit.dequant.coded import KEY, Coded, only
from emit.dequant.parts import Found, Groups, exponents, grouped, nibbles
from emit.packed import Layout
from emit.weights import Source

GROUP = 32
_FREE = frozenset("quant_method modules_to_not_convert dequantize".split())


def split(blocks: np.ndarray, scales: np.ndarray) -> Groups:
    """The two tensors as they are stored."""
    codes = nibbles(blocks)
    return Groups(codes.reshape(*codes.shape[:-2], -1), exponents(scales))


@dataclass(frozen=True)
class Mxfp4:
    """It has no settings."""

    def coded(self, source: Source) -> Mapping[str, Coded]:
        """All tensors that have `_blocks`."""
        found = Found(source)
        for name, info in source.tensors.items():
            if name.endswith("_scales") and f"{name[:-7]}_blocks" not in source.tensors:
                found.problems.append(f"{name} scales no {name[:-7]}_blocks")
            if not name.endswith("_blocks"):
                continue
            whole = name.removesuffix("_blocks")
            shape, scales = info.shape, f"{whole}_scales"
            if info.dtype != "u8" or len(shape) < 3 or shape[-1] != GROUP // 2:
                found.problems.append(
                    f"{name} is {info.dtype}{list(shape)}, expected u8[..., outputs, groups, 16]"
                )
            elif found.fits(scales, ("u8", "f8_e8m0"), shape[:-1]):
                size = (*shape[:-2], shape[-2] * GROUP)
                layout = Layout(4, GROUP, "e2m1", "f32")
                found.coded[whole] = grouped(size, (name, scales), split, layout, per=(1, 1))
        return found.done()


def read(config: Mapping[str, Any]) -> Mxfp4:
    """The scheme of `config`. Raises EmitError naming the key that is not supported."""
    only(config[KEY], _FREE, {})
    return Mxfp4()
