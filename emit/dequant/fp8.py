"""`fp8` as Hugging Face writes it: e4m3 codes and one scale for each block of a matrix, or for it.

w = code * scale (DeepSeek-V3, arXiv:2412.19437, section 3.3.2).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from emit.dequant.coded import KEY, Coded, fail, only
from emit.errors import EmitError
from emit.weights import Source

SCALE = "_scale_inv"  # of `X.weight`, in `X.weight_scale_inv`
CODES = "f8_e4m3"

_FREE = frozenset(
    """quant_method activation_scheme weight_block_size modules_to_not_convert ignored_layers
    modules_to_convert dequantize""".split()
)
_ONLY = {"fmt": ("e4m3", "float8_e4m3fn"), "scale_fmt": ("float",), "expert_dtype": ("fp8",)}


@dataclass(frozen=True)
class Fp8:
    """w = code * scale, one scale for each `block` of rows and columns, or for the whole matrix."""

    block: tuple[int, int] | None

    def grids(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The shapes that the scales of a matrix may have; none for anything but a matrix."""
        if len(shape) != 2:
            return ()
        if self.block is None:
            return (), (1,)
        return (tuple(-(-n // block) for n, block in zip(shape, self.block, strict=True)),)

    def widen(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """codes f8[O, I], scales [ceil(O / rows), ceil(I / columns)] or one -> f32[O, I]."""
        wide = scales.astype(np.float32).reshape(self.grids(codes.shape)[0])
        for axis, block in enumerate(self.block or ()):
            wide = np.repeat(wide, block, axis=axis).take(range(codes.shape[axis]), axis=axis)
        return codes.astype(np.float32) * wide

    def coded(self, source: Source) -> Mapping[str, Coded]:
        """All e4m3 tensors, each with its scales beside it."""
        found: dict[str, Coded] = {}
        problems: list[str] = []
        for name, info in source.tensors.items():
            if name.endswith(".weight" + SCALE):
                codes = source.tensors.get(name.removesuffix(SCALE))
                if codes is None or codes.dtype != CODES:
                    problems.append(f"{name} scales no {CODES} tensor")
            elif info.dtype == CODES:
                scales, expected = source.tensors.get(name + SCALE), self.grids(info.shape)
                if scales is None:
                    problems.append(f"{name} is {CODES} and {name}{SCALE} is missing")
                elif scales.shape not in expected:
                    shown = " or ".join(str(list(shape)) for shape in expected) or "a matrix"
                    problems.append(
                        f"{name}{SCALE} has shape {list(scales.shape)}, expected {shown}"
                    )
                found[name] = Coded(info.shape, (name, name + SCALE), self.widen)
        fail(source, problems)
        return found


def read(config: Mapping[str, Any]) -> Fp8:
    """The scheme of `config`. Raises EmitError naming the key that is not supported."""
    given = config[KEY]
    only(given, _FREE, _ONLY)
    block = given.get("weight_block_size", [128, 128])
    if block is None:
        return Fp8(None)
    sizes = isinstance(block, list) and len(block) == 2
    if not sizes or not all(type(size) is int and size > 0 for size in block):
        raise EmitError(
            f"config.json: {KEY}: weight_block_size = {json.dumps(block)}, expected two sizes"
        )
    return Fp8((block[0], block[1]))
