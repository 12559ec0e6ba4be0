"""NVIDIA ModelOpt's Hugging Face export (github.com/NVIDIA/Model-Optimizer, unified_export_hf).

| quant_algo                         | weight      | weight_scale       | w                 |
|------------------------------------|-------------|--------------------|-------------------|
| FP8                                | e4m3 [O, I] | f32, one           | q × s             |
| FP8_PER_CHANNEL_PER_TOKEN          | e4m3 [O, I] | f32 [O]            | q × s             |
| FP8_PB_WO                          | e4m3 [O, I] | f32 [O/128, I/128] | q × s             |
| MXFP8                              | e4m3 [O, I] | u8 [O, I/32]       | q × 2 ^ (s - 127) |
| NVFP4, W4A16_NVFP4, W4A8_NVFP4_FP8 | u8 [O, I/2] | e4m3 [O, I/16]     | e2m1[q] × (s × g) |
| W4A8_MXFP4_FP8                     | u8 [O, I/2] | u8 [O, I/32]       | e2m1[q] × 2 ^ …   |
| W8A16, W8A8_SQ_PER_CHANNEL         | i8 [O, I]   | f32 [O]            | q × s             |

g is `weight_scale_2`, f32, one. The settings stand in `quantization_config`, or as the library
first writes them in hf_quant_config.json. MIXED_PRECISION lists modules by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from emit.dequant import names
from emit.dequant.coded import KEY, Coded, only
from emit.dequant.parts import (
    FLOATS,
    Found,
    Groups,
    exponents,
    grouped,
    nibbles,
    refuse,
    scale_word,
    tiles,
    whole,
)
from emit.packed import Layout
from emit.weights import Source

BESIDE = "hf_quant_config.json"
E4M3, E8M0 = ("f8_e4m3",), ("u8", "f8_e8m0")
NVFP4 = ("NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8")
INT8 = ("W8A16", "W8A8_SQ_PER_CHANNEL")
GROUPS = dict.fromkeys(NVFP4, 16) | {"MXFP8": 32, "W4A8_MXFP4_FP8": 32}
BLOCK = 128
ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", *GROUPS, *INT8)
MIXED = "MIXED_PRECISION"

_FREE = frozenset(
    """quant_method quant_algo config_groups ignore kv_cache_scheme producer quantized_layers
    quantization""".split()
)
_INNER = frozenset(
    "quant_algo kv_cache_quant_algo group_size exclude_modules quantized_layers".split()
)
_LAYER = frozenset("quant_algo group_size".split())
_ONLY: dict[str, tuple[Any, ...]] = {"has_zero_point": (False,), "pre_quant_scale": (False,)}


@dataclass(frozen=True)
class Weights:
    """The algorithm of some modules, and the inputs of a group where it has groups."""

    algorithm: str
    group: int

    def add(self, found: Found, module: str) -> None:
        """The weight of a module, if it has scales; or what is wrong with it."""
        codes, scales = f"{module}.weight", f"{module}.weight_scale"
        dtype = "u8" if "FP4" in self.algorithm else "i8" if self.algorithm in INT8 else "f8_e4m3"
        shape = found.shape(codes, (dtype,), 2)
        if shape is None:
            return
        shape = (shape[0], shape[1] * 2) if dtype == "u8" else shape
        if self.group and shape[1] % self.group:
            found.problems.append(f"{codes} has {shape[1]} inputs, in groups of {self.group}")
            return
        global_, beside = f"{module}.weight_scale_2", found.beside(module)
        fits = found.fits(scales, self.dtypes(), *self.grids(shape))
        if self.algorithm in NVFP4:
            fits &= found.fits(global_, ("f32",), (), (1,))
            beside = (global_, *beside)
        if not fits:
            return
        parts = (codes, scales, *beside)
        if dtype == "f8_e4m3":
            coded = Coded(shape, parts, self.widen8)
        elif dtype == "i8":
            layout = Layout(8, max(shape[1], 1), "int", scale_word(found.source, scales))
            coded = grouped(shape, parts, self.split8, layout)
        else:
            coded = grouped(shape, parts, self.split4, Layout(4, self.group, "e2m1", "f32"))
        found.coded[codes] = coded

    def dtypes(self) -> tuple[str, ...]:
        """What the scales are."""
        if "MX" in self.algorithm:
            return E8M0
        return E4M3 if self.algorithm in NVFP4 else FLOATS

    def grids(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The shapes that the scales of [O, I] may have."""
        outputs, inputs = shape
        if self.group:
            return ((outputs, inputs // self.group),)
        if self.algorithm == "FP8":
            return (), (1,)
        if self.algorithm == "FP8_PB_WO":
            rows, columns = -(-outputs // BLOCK), -(-inputs // BLOCK)
            return (rows, columns), (rows, 1, columns, 1)
        return (outputs,), (outputs, 1)

    def widen8(self, codes: np.ndarray, scales: np.ndarray, *_: np.ndarray) -> np.ndarray:
        """f32 [O, I] of e4m3 codes."""
        if self.algorithm == "MXFP8":
            return tiles(codes, exponents(scales), (1, self.group))
        sides = {"FP8": codes.shape, "FP8_PB_WO": (BLOCK, BLOCK)}
        return tiles(codes, scales, sides.get(self.algorithm, (1, codes.shape[1])))

    def split8(self, codes: np.ndarray, scales: np.ndarray, *_: np.ndarray) -> Groups:
        """Rows of i8 codes."""
        return Groups(codes.view(np.uint8), scales.reshape(-1, 1))

    def split4(self, codes: np.ndarray, scales: np.ndarray, *more: np.ndarray) -> Groups:
        """E2M1 codes, two to a byte."""
        if self.algorithm not in NVFP4:
            return Groups(nibbles(codes), exponents(scales))
        with np.errstate(all="ignore"):
            return Groups(nibbles(codes), scales.astype(np.float32) * more[0].reshape(()))


@dataclass(frozen=True)
class ModelOpt:
    """What all modules are, or else those of names; `excluded` ones are left alone."""

    every: Weights | None
    layers: names.Names
    excluded: names.Names

    def of(self, module: str) -> Weights | None:
        """How a module is quantised, None for not."""
        return None if self.excluded.get(module) else self.layers.get(module, self.every)

    def coded(self, source: Source) -> Mapping[str, Coded]:
        """All modules with scales."""
        found = Found(source)
        found.add(found.modules("weight_scale"), self.of)
        return found.done()


def read(config: Mapping[str, Any]) -> ModelOpt:
    """The scheme of `config`. Raises EmitError naming the key that is not supported."""
    given = config[KEY]
    only(given, _FREE, {})
    inner = given.get("quantization", {})
    if not isinstance(inner, Mapping):
        refuse("quantization", inner, "an object")
    only(inner, _INNER, _ONLY)
    algorithm = inner.get("quant_algo", given.get("quant_algo"))
    excluded = inner.get("exclude_modules") or given.get("ignore") or []
    if not isinstance(excluded, list) or not all(isinstance(word, str) for word in excluded):
        refuse("exclude_modules", excluded, "a list of names")
    left = names.Names.of(dict.fromkeys(excluded, True), names.wildcard)
    if algorithm != MIXED:
        size = inner.get("group_size") or _group_size(given)
        every = _weights({"quant_algo": algorithm, "group_size": size})
        return ModelOpt(every, names.Names.of({}, names.wildcard), left)
    layers = inner.get("quantized_layers", given.get("quantized_layers"))
    if not isinstance(layers, Mapping) or not all(isinstance(v, Mapping) for v in layers.values()):
        refuse("quantized_layers", layers, "an object of module names")
    said = {word: _weights(settings) for word, settings in layers.items()}
    return ModelOpt(None, names.Names.of(said, names.wildcard), left)


def _group_size(given: Mapping[str, Any]) -> object:
    """The one group size of the `weights` of `config_groups`, None for none."""
    groups = given.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        refuse("config_groups", groups, "an object")
    sizes: list[object] = []
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            refuse(f"config_groups.{name}", group, "an object with weights")
        only(group, frozenset("weights input_activations targets lora_rank".split()), _ONLY)
        sizes.append(weights.get("group_size"))
    if any(size != sizes[0] for size in sizes):
        refuse("config_groups", sizes, "one group size")
    return sizes[0] if sizes else None


def _weights(given: Mapping[str, Any]) -> Weights:
    only(given, _LAYER, _ONLY)
    word = given.get("quant_algo")
    algorithm = word.upper() if isinstance(word, str) else word
    if algorithm not in ALGORITHMS:
        refuse("quant_algo", word, f"one of {', '.join((*ALGORITHMS, MIXED))}")
    size = whole(given, "group_size", GROUPS.get(algorithm, 0) or 1)
    return Weights(algorithm, size if algorithm in GROUPS else 0)
