"""`fp8` as Hugging Face writes it: e4m3 codes and one scale for each block of a matrix, or for it.

w = code × scale (DeepSeek-V3, arXiv:2412.19437, section 3.3.2). The scales of `X` are in
`X_scale_inv`, f32 or, where `scale_fmt` is ue8m0, exponents. AutoFP8 writes the same as `X_scale`,
one for all or for each row. A stack of experts is [E, O, I], its scales [E, …]. With `expert_dtype`
fp4, i8 tensors hold two e2m1 codes a byte and have a scale for each 32 inputs of a row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from emit.dequant.coded import KEY, Coded, only
from emit.dequant.parts import FLOATS, Found, Groups, exponents, grouped, nibbles, tiles
from emit.errors import EmitError
from emit.packed import Layout
from emit.weights import Source

SCALE, SCALES = "_scale_inv", "_scale"
CODES, HALVES = "f8_e4m3", "i8"
GROUP = 32  # inputs, of fp4

_FREE = frozenset(
    """quant_method activation_scheme weight_block_size modules_to_not_convert ignored_layers
    modules_to_convert dequantize kv_cache_scheme""".split()
)
_ONLY = {
    "fmt": ("e4m3", "float8_e4m3fn"),
    "scale_fmt": ("float", "ue8m0"),
    "expert_dtype": ("fp8", "fp4"),
}


@dataclass(frozen=True)
class Fp8:
    """w = code × scale, one scale for each `block` of rows and columns, or for the whole matrix."""

    block: tuple[int, int] | None
    exponents: bool = False
    halves: bool = False

    def grids(self, shape: tuple[int, ...], by_row: bool = False) -> tuple[tuple[int, ...], ...]:
        """The shapes that the scales of [..., O, I] may have; none for less than a matrix."""
        if len(shape) < 2:
            return ()
        stack, matrix = shape[:-2], shape[-2:]
        if by_row:
            return (), (1,), (*stack, matrix[0]), (*stack, matrix[0], 1)
        if self.block is None:
            return (*stack, 1, 1), stack, (*stack, 1)
        return ((*stack, *(-(-n // side) for n, side in zip(matrix, self.block, strict=True))),)

    def widen(self, codes: np.ndarray, scales: np.ndarray, *_: np.ndarray) -> np.ndarray:
        """codes f8[..., O, I], scales of `grids` -> f32[..., O, I]."""
        factors = exponents(scales) if scales.dtype.itemsize == 1 else scales
        if self.block is not None:
            return tiles(codes, factors, self.block)
        return tiles(codes, np.broadcast_to(_last(factors, codes), codes.shape[:-1]), (1, 2**31))

    def by_row(self, codes: np.ndarray, scales: np.ndarray, *_: np.ndarray) -> np.ndarray:
        """codes f8[O, I] and one scale, or one a row -> f32[O, I]."""
        each = scales.size > 1
        factors = scales.reshape(codes.shape[:-1]) if each else scales.reshape(())
        return tiles(codes, np.broadcast_to(factors, codes.shape[:-1]), (1, 2**31))

    def split(self, codes: np.ndarray, scales: np.ndarray, *_: np.ndarray) -> Groups:
        """codes i8[..., I / 2], scales [..., I / 32]."""
        factors = exponents(scales) if scales.dtype.itemsize == 1 else scales.astype(np.float32)
        return Groups(nibbles(codes.view(np.uint8)), factors)

    def coded(self, source: Source) -> Mapping[str, Coded]:
        """All e4m3 tensors, and those of fp4, each with its scales beside it."""
        found = Found(source)
        for name, info in source.tensors.items():
            if name.endswith((".weight" + SCALE, ".weight" + SCALES)):
                codes = source.tensors.get(name.removesuffix("_inv").removesuffix(SCALES))
                if codes is None or codes.dtype not in (CODES, HALVES):
                    found.problems.append(f"{name} scales no {CODES} tensor")
            elif info.dtype == CODES or (self.halves and info.dtype == HALVES):
                found.coded[name] = self._tensor(found, name)
        return found.done()

    def _tensor(self, found: Found, name: str) -> Coded:
        info = found.source.tensors[name]
        inverse = name + SCALE in found.source.tensors or name + SCALES not in found.source.tensors
        scales = name + (SCALE if inverse else SCALES)
        activation = f"{name}_activation_scale"
        parts = (name, scales, *found.beside(name.removesuffix(".weight")))
        parts += (activation,) if activation in found.source.tensors else ()
        if info.dtype == CODES or len(info.shape) < 2:
            self._check(found, name, scales, self.grids(info.shape, not inverse))
            widen = self.widen if inverse else self.by_row
            return Coded(info.shape, parts, widen, per=self._per(found, parts, inverse))
        inputs = info.shape[-1] * 2
        grids = ((*info.shape[:-1], inputs // GROUP),) if inputs % GROUP == 0 else ()
        self._check(found, name, scales, grids)
        size = (*info.shape[:-1], inputs)
        per = (1, 1, *(0 for _ in parts[2:]))
        return grouped(size, parts, self.split, Layout(4, GROUP, "e2m1", "f32"), per=per)

    def _per(self, found: Found, parts: tuple[str, ...], inverse: bool) -> tuple[int, ...]:
        """Of a tensor of e4m3 codes: its scales are those of blocks, of all rows or of each."""
        codes, scales = (found.source.tensors.get(part) for part in parts[:2])
        if codes is None or scales is None or not codes.shape:
            return ()
        blocks = inverse and self.block is not None and len(codes.shape) == 2
        shared = math.prod(scales.shape) == 1
        each = self.block[0] if blocks and self.block else 0 if shared else 1
        return (1, each, *(0 for _ in parts[2:]))

    def _check(
        self, found: Found, name: str, scales: str, grids: tuple[tuple[int, ...], ...]
    ) -> None:
        """A problem unless the scales are there, and are a grid of the codes."""
        info, codes = found.source.tensors.get(scales), found.source.tensors[name]
        words = (*FLOATS, "f8_e8m0", "u8") if self.exponents else FLOATS
        if info is None:
            found.problems.append(f"{name} is {codes.dtype} and {scales} is missing")
        elif info.shape not in grids:
            shown = " or ".join(str(list(shape)) for shape in grids) or "those of a matrix"
            found.problems.append(f"{scales} has shape {list(info.shape)}, expected {shown}")
        elif info.dtype not in words:
            found.problems.append(f"{scales} is {info.dtype}, expected {' or '.join(words)}")


def _last(factors: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """One scale for each matrix of the stack, as [..., 1]."""
    return factors.reshape(*codes.shape[:-2], 1)


def read(config: Mapping[str, Any]) -> Fp8:
    """The scheme of `config`. Raises EmitError naming the key that is not supported."""
    given = config[KEY]
    only(given, _FREE, _ONLY)
    exponential = given.get("scale_fmt") == "ue8m0"
    halves = given.get("expert_dtype") == "fp4"
    block = given.get("weight_block_size", [128, 128])
    if block is None:
        return Fp8(None, exponential, halves)
    sizes = isinstance(block, list) and len(block) == 2
    if not sizes or not all(type(size) is int and 0 < size < 2**31 for size in block):
        raise EmitError(
            f"config.json: {KEY}: weight_block_size = {json.dumps(block)}, expected two sizes"
        )
    return Fp8((block[0], block[1]), exponential, halves)
