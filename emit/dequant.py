"""Quantised checkpoints, read as the numbers they stand for.

What a checkpoint is quantised by stands in its config, `quantization_config`; nothing is guessed
from its tensors. Supported: `fp8` as Hugging Face writes it, e4m3 weights with one scale for each
block of the matrix (DeepSeek-V3, arXiv:2412.19437, section 3.3.2), or one for all of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from emit.errors import EmitError
from emit.weights import Source, TensorInfo

KEY = "quantization_config"
SCALE = "_scale_inv"  # of `X.weight`, in `X.weight_scale_inv`
CODES = "f8_e4m3"

# Of an fp8 config: what says nothing about the stored numbers.
_RUNNING = frozenset(
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


@dataclass(frozen=True)
class _Info:
    """What a tensor stands for."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Dequantized:
    """A checkpoint whose quantised matrices read as float32; `tensors` are all but their scales."""

    source: Source
    scheme: Fp8
    tensors: Mapping[str, TensorInfo]

    @property
    def dir(self) -> Path:
        """The checkpoint's directory."""
        return self.source.dir

    def read(self, name: str) -> np.ndarray:
        """Tensor `name`; a quantised one as float32."""
        tensor = self.source.read(name)
        if self.tensors[name] is self.source.tensors[name]:
            return tensor
        return self.scheme.widen(tensor, self.source.read(name + SCALE))


def _meant(source: Source, by: Fp8) -> dict[str, TensorInfo]:
    """The tensors without scales. EmitError where codes and scales do not go together."""
    found: dict[str, TensorInfo] = {}
    problems: list[str] = []
    for name, info in source.tensors.items():
        if name.endswith(".weight" + SCALE):
            codes = source.tensors.get(name.removesuffix(SCALE))
            if codes is None or codes.dtype != CODES:
                problems.append(f"{name} scales no {CODES} tensor")
        elif info.dtype == CODES:
            scales, expected = source.tensors.get(name + SCALE), by.grids(info.shape)
            if scales is None:
                problems.append(f"{name} is {CODES} and {name}{SCALE} is missing")
            elif scales.shape not in expected:
                shown = " or ".join(str(list(shape)) for shape in expected) or "a matrix"
                problems.append(f"{name}{SCALE} has shape {list(scales.shape)}, expected {shown}")
            found[name] = _Info("f32", info.shape)
        else:
            found[name] = info
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise EmitError(f"{source.dir}: {'; '.join(problems[:5])}{more}")
    return found


def scheme(config: Mapping[str, Any]) -> Fp8 | None:
    """What `config` says the checkpoint is quantised by, None for nothing.

    Raises EmitError naming the method or the key that is not supported.
    """
    given = config.get(KEY)
    if given is None:
        return None
    method = given.get("quant_method") if isinstance(given, Mapping) else None
    if method != "fp8":
        raise EmitError(
            f"config.json: {KEY} = {json.dumps(given)[:200]} is not supported; expected the"
            ' quant_method "fp8", or a checkpoint that is not quantised'
        )
    for key, value in given.items():
        if key in _RUNNING or value is None:
            continue
        if value not in _ONLY.get(key, ()):
            raise EmitError(f"config.json: {KEY}: {key} = {json.dumps(value)} is not supported")
    block = given.get("weight_block_size", [128, 128])
    if block is None:
        return Fp8(None)
    sizes = isinstance(block, list) and len(block) == 2
    if not sizes or not all(type(size) is int and size > 0 for size in block):
        raise EmitError(
            f"config.json: {KEY}: weight_block_size = {json.dumps(block)}, expected two sizes"
        )
    return Fp8((block[0], block[1]))


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` as of the same model not quantised; a method that is not known stays in it.

    Raises EmitError where a known method is used in a way that is not supported.
    """
    given = config.get(KEY)
    if isinstance(given, Mapping) and given.get("quant_method") != "fp8":
        return dict(config)
    scheme(config)
    return {key: value for key, value in config.items() if key != KEY}


def dequantized(source: Source, config: Mapping[str, Any]) -> Source:
    """The checkpoint `source` with every tensor as the numbers it stands for."""
    found = scheme(config)
    return source if found is None else Dequantized(source, found, _meant(source, found))
