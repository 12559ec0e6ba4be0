"""`quantization`, as MLX writes it (mlx.core.quantize, mlx.core.dequantize).

| mode   | number of code q                         | bits                | inputs in a group |
|--------|------------------------------------------|---------------------|-------------------|
| affine | q × scale + bias, each operation rounded | 1, 2, 3, 4, 5, 6, 8 | 32, 64, 128       |
| mxfp4  | e2m1[q] × 2 ^ (scale - 127)              | 4                   | 32                |
| mxfp8  | e4m3[q] × 2 ^ (scale - 127)              | 8                   | 32                |
| nvfp4  | e2m1[q] × e4m3[scale]                    | 4                   | 16                |

of `X.weight` u32[..., O, I bits / 32], a stream of codes, the lowest bit first; `X.scales` [..., O,
I / group], u8 but in affine; and of affine alone `X.biases`, typed and shaped as the scales. With a
`global_scale` G, f32 one a matrix, a scale of nvfp4 is multiplied by G / 2688.

The object `quantization` of config.json has the settings of all modules and, under their names,
those of single ones, whole or `false`. A module without `X.scales` is not quantised.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import ml_dtypes
import numpy as np

from emit.dequant.bits import stream
from emit.dequant.coded import KEY, Coded
from emit.dequant.parts import FLOATS, Found, exponents, scale_word, stored
from emit.errors import EmitError
from emit.packed import Layout, Packed, pack4
from emit.weights import Source

NAME = "quantization"
WORD = 32  # bits
LARGEST = np.float32(448 * 6)  # of a scale, times that of a code: what nvfp4's G is divided by
SETTINGS = ("group_size", "bits", "mode")


@dataclass(frozen=True)
class Mode:
    """What a mode allows; the first ones are its defaults."""

    groups: tuple[int, ...]
    bits: tuple[int, ...]
    scales: tuple[str, ...] = ("u8",)


MODES = {
    "affine": Mode((64, 32, 128), (4, 1, 2, 3, 5, 6, 8), FLOATS),
    "mxfp4": Mode((32,), (4,)),
    "mxfp8": Mode((32,), (8,)),
    "nvfp4": Mode((16,), (4,)),
}


@dataclass(frozen=True)
class Setting:
    """How a module is quantised."""

    group: int
    bits: int
    mode: str
    matrix_scale: bool = False

    def layout(self, scale: Literal["f32", "bf16", "f16"]) -> Layout | None:
        """How a bundle stores the codes whose scales are `scale` here; None where it cannot."""
        if self.mode == "affine":
            return Layout(stored(self.bits), self.group, "uint", scale, "bias")
        if self.mode == "mxfp8":
            return None
        # The powers of two and e4m3's numbers are numbers of bf16; with G they are not.
        return Layout(4, self.group, "e2m1", "f32" if self.matrix_scale else "bf16")

    def factors(self, scales: np.ndarray, *rest: np.ndarray) -> np.ndarray:
        """f32[..., O, I / group]: the scales."""
        if self.mode == "affine":
            return scales.astype(np.float32)
        if self.mode != "nvfp4":
            return exponents(scales)
        found = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        if not self.matrix_scale:
            return found
        return found * (rest[0].reshape(*scales.shape[:-2], 1, 1) / LARGEST)

    def widen(self, words: np.ndarray, scales: np.ndarray, *rest: np.ndarray) -> np.ndarray:
        """f32[..., O, I] of the tensors as they are stored, in the order above."""
        codes = stream(words, self.bits, scales.shape[-1] * self.group)
        layout = self.layout("f32")
        if layout is None:
            wide = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        else:
            wide = layout.values()[codes]
        grouped = wide.reshape(*scales.shape, self.group)
        with np.errstate(over="ignore", invalid="ignore"):
            grouped *= self.factors(scales, *rest)[..., None]
            if self.mode == "affine":
                grouped += rest[0].astype(np.float32)[..., None]
        return grouped.reshape(codes.shape)

    def pack(
        self, words: np.ndarray, scales: np.ndarray, *rest: np.ndarray, layout: Layout
    ) -> Packed:
        """The same codes as a bundle stores them."""
        codes = stream(words, self.bits, scales.shape[-1] * self.group)
        codes = pack4(codes) if layout.bits == 4 else np.ascontiguousarray(codes)
        if self.mode == "affine":
            return Packed(layout, codes, scales, rest[0])
        kind = np.float32 if self.matrix_scale else ml_dtypes.bfloat16
        return Packed(layout, codes, self.factors(scales, *rest).astype(kind))


@dataclass(frozen=True)
class Mlx:
    """The settings of all modules, and of single ones; None of those that are not quantised."""

    default: Setting
    modules: Mapping[str, Setting | None]

    def coded(self, source: Source) -> Mapping[str, Coded]:
        """All modules that have `.scales`."""
        found, scaled = Found(source), set()
        for module in found.modules("scales"):
            setting = self.modules.get(module, self.default)
            scaled.add(f"{module}.weight")
            if setting is None:
                found.problems.append(
                    f"{module}.scales is there, but config.json: {NAME} says false of {module}"
                )
            else:
                self._module(found, module, setting)
        for name, info in source.tensors.items():
            module = name.removesuffix(".weight")
            said = name.endswith(".weight") and self.modules.get(module) is not None
            if name not in scaled and (said or info.dtype == "u32"):
                found.problems.append(f"{name} is {info.dtype} and {module}.scales is missing")
        return found.done()

    def _module(self, found: Found, module: str, setting: Setting) -> None:
        """Add the module's weight, or what is wrong with its tensors."""
        tensors = found.source.tensors
        name, scales = f"{module}.weight", f"{module}.scales"
        rank = max(len(tensors[scales].shape), 2)
        shape = found.shape(scales, MODES[setting.mode].scales, rank)
        if shape is None:
            return
        inputs = shape[-1] * setting.group
        parts = [name, scales]
        good = found.fits(name, ("u32",), (*shape[:-1], inputs * setting.bits // WORD))
        if setting.mode == "affine":
            parts.append(f"{module}.biases")
            good &= found.fits(parts[-1], (tensors[scales].dtype,), shape)
        if setting.matrix_scale:
            parts.append(f"{module}.global_scale")
            good &= found.fits(parts[-1], ("f32",), shape[:-2])
        if not good:
            said = f"{setting.mode}, {setting.bits} bits, groups of {setting.group}"
            found.problems[-1] += f" ({said}, by config.json: {NAME})"
            return
        layout = setting.layout(scale_word(found.source, scales))
        pack = None if layout is None else partial(setting.pack, layout=layout)
        size = (*shape[:-1], inputs)
        per = [1] * len(parts)
        if setting.matrix_scale and len(size) == 2:
            per[-1] = 0
        found.coded[name] = Coded(size, tuple(parts), setting.widen, layout, pack, tuple(per))


def read(config: Mapping[str, Any]) -> Mlx:
    """The scheme of `config`. Raises EmitError naming the key that is not supported."""
    given = config[NAME]
    if not isinstance(given, Mapping):
        raise _refused(NAME, given, "an object")
    if config.get(KEY) not in (None, given):
        raise EmitError(
            f"config.json: {KEY} and {NAME} differ; expected the same, as MLX writes them"
        )
    default = _setting({key: given[key] for key in SETTINGS if key in given}, NAME)
    modules: dict[str, Setting | None] = {}
    for module, said in given.items():
        if module in SETTINGS:
            continue
        where = f"{NAME}: {module[:200]}"
        if isinstance(said, Mapping):
            modules[module] = _setting(said, where)
        elif isinstance(said, bool):
            modules[module] = default if said else None
        else:
            raise _refused(where, said, "an object or false")
    return Mlx(default, modules)


def _setting(said: Mapping[str, Any], where: str) -> Setting:
    """The settings of an object; those that it lacks are the mode's defaults, as MLX has them."""
    known = (*SETTINGS, "global_scale", "quantize_input")
    for key, value in said.items():
        if key not in known:
            raise _refused(f"{where}: {key}", value, f"one of {', '.join(known)}")
    word = said.get("mode", "affine")
    mode = MODES.get(word) if isinstance(word, str) else None
    if mode is None:
        raise _refused(f"{where}: mode", word, f"one of {', '.join(MODES)}")
    sizes = []
    for key, allowed in (("group_size", mode.groups), ("bits", mode.bits)):
        value = said.get(key)
        value = allowed[0] if value is None else value
        if type(value) is not int or value not in allowed:
            words = " or ".join(str(size) for size in sorted(allowed))
            raise _refused(f"{where}: {key}", value, f"{words} with mode {word}")
        sizes.append(value)
    whole = said.get("global_scale", False)
    if not isinstance(whole, bool) or (whole and word != "nvfp4"):
        raise _refused(f"{where}: global_scale", whole, "false, or true with mode nvfp4")
    return Setting(sizes[0], sizes[1], word, whole)


def _refused(where: str, value: object, expected: str) -> EmitError:
    shown = json.dumps(value, default=str)[:200]
    return EmitError(f"config.json: {where} = {shown}, expected {expected}")
