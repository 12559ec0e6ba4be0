"""`compressed-tensors`, as llm-compressor writes it (github.com/vllm-project/compressed-tensors).

The config has groups of modules, each with a format and `weights` arguments:

| format                | tensors of a module                    | w                       |
|-----------------------|----------------------------------------|-------------------------|
| int-quantized         | weight i8, weight_scale                | (q - z) × s             |
| float-quantized       | weight e4m3, weight_scale              | q × s                   |
| naive-quantized       | as one of these two                    |                         |
| pack-quantized        | weight_packed i32, weight_scale        | (q - z) × s             |
| nvfp4-pack-quantized  | weight_packed u8, weight_scale e4m3, g | e2m1[q] × (s / g)       |
| mxfp4-pack-quantized  | weight_packed u8, weight_scale u8      | e2m1[q] × 2 ^ (s - 127) |
| mxfp8-quantized       | weight e4m3, weight_scale u8           | q × 2 ^ (s - 127)       |

with `weight_zero_point` where not symmetric, g `weight_global_scale`, and `weight_shape` where
packed. A packed code is q + 2 ^ (bits - 1) in a bit stream along the inputs; zeros of groups or
channels are packed down the outputs. Scales are one for all, a row, a group of inputs or a block.
Older files in the order of activations hold `weight_g_idx`, the group of each input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from emit.dequant import bits as unpack
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
    stored,
    tiles,
    whole,
)
from emit.packed import Layout
from emit.weights import Source

E4M3, E8M0 = ("f8_e4m3",), ("u8", "f8_e8m0")
NAIVE = ("int-quantized", "float-quantized", "naive-quantized")
FORMATS = (
    *NAIVE,
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
)
TABLES = ("embed_tokens", "embeddings", "embedding", "wte")  # what embedding modules are called

# KV caches and activations are not quantised here; the rest is for the reader, or calibration.
_FREE = frozenset(
    """quant_method config_groups format ignore kv_cache_scheme global_compression_ratio version
    run_compressed""".split()
)
_ONLY: dict[str, tuple[Any, ...]] = {
    "quantization_status": ("compressed", "frozen"),
    "sparsity_config": ({}, {"format": "dense"}),
    "transform_config": ({}, {"config_groups": {}}),
    "moe_sparsity_config": ({},),
}
_GROUP = frozenset("targets weights format input_activations output_activations".split())
_WEIGHTS = frozenset(
    """num_bits type symmetric strategy group_size block_structure observer observer_kwargs
    scale_dtype zp_dtype""".split()
)


@dataclass(frozen=True)
class Weights:
    """The format of some modules. `size` are the inputs of a group or the sides of a block."""

    format: str
    bits: int
    kind: str
    strategy: str
    size: tuple[int, ...]
    symmetric: bool

    def grid(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The shapes that the scales of a matrix [O, I] may have; none if it cannot have any."""
        outputs, inputs = shape
        if self.strategy == "tensor":
            return (1,), ()
        if self.strategy == "channel":
            return ((outputs, 1),)
        if self.strategy == "block":
            return (tuple(-(-n // side) for n, side in zip(shape, self.size, strict=True)),)
        return () if inputs % self.size[0] else ((outputs, inputs // self.size[0]),)

    def add(self, found: Found, module: str) -> None:
        """The weight of a module, if it is quantised; or what is wrong with it."""
        packed = "pack" in self.format
        name = f"{module}.weight_packed" if packed else f"{module}.weight"
        beside = found.beside(module)
        if name not in found.source.tensors or (not packed and self.plain(found, module)):
            return
        if self.format == "pack-quantized":
            coded = self.packed(found, module, beside)
        elif packed:
            coded = self.float4(found, module, beside)
        else:
            coded = self.naive(found, module, beside)
        if coded is not None:
            found.coded[f"{module}.weight"] = coded

    def plain(self, found: Found, module: str) -> bool:
        """Whether the weight that could be quantised is an ordinary one, without scales."""
        scaled = f"{module}.weight_scale" in found.source.tensors
        return not scaled and found.source.tensors[f"{module}.weight"].dtype in FLOATS

    def naive(self, found: Found, module: str, beside: tuple[str, ...]) -> Coded | None:
        """One code an element: i8 or e4m3."""
        codes, scales = f"{module}.weight", f"{module}.weight_scale"
        shape = found.shape(codes, ("i8",) if self.kind == "int" else E4M3, 2)
        if shape is None or not self.scaled(found, scales, shape):
            return None
        if self.kind == "float":
            return Coded(shape, (codes, scales, *beside), self.widen8)
        zeros = () if self.symmetric else (f"{module}.weight_zero_point",)
        for name in zeros:
            if not found.fits(name, ("i8",), *self.grid(shape)):
                return None
        group = self.size[0] if self.strategy == "group" else max(shape[1], 1)

        def split(values: np.ndarray, factors: np.ndarray, *rest: np.ndarray) -> Groups:
            grid = (shape[0], shape[1] // group)
            per_group = np.broadcast_to(factors.reshape(factors.shape or (1,)), grid)
            if self.symmetric:
                return Groups(values.view(np.uint8), per_group)
            zero = np.broadcast_to(rest[0].reshape(rest[0].shape or (1,)), grid)
            return Groups(values.view(np.uint8) ^ 128, per_group, zero.astype(np.uint8) ^ 128)

        if self.strategy == "block":
            return Coded(shape, (codes, scales, *zeros, *beside), self.blocks8)
        layout = Layout(
            8,
            group,
            "int" if self.symmetric else "uint",
            scale_word(found.source, scales),
            "none" if self.symmetric else "zero",
        )
        return grouped(shape, (codes, scales, *zeros, *beside), split, layout)

    def scaled(self, found: Found, scales: str, shape: tuple[int, ...]) -> bool:
        """Whether the scales of a matrix are as they should be; else a problem."""
        if not self.grid(shape):
            found.problems.append(f"{scales} has groups of {self.size[0]} of {shape[1]} inputs")
            return False
        dtypes = E8M0 if self.format.startswith("mx") else FLOATS
        return found.fits(scales, dtypes, *self.grid(shape))

    def widen8(self, codes: np.ndarray, scales: np.ndarray, *_: np.ndarray) -> np.ndarray:
        """f32[O, I] of e4m3 codes."""
        factors = exponents(scales) if self.format.startswith("mx") else scales
        sides = {"tensor": codes.shape, "channel": (1, codes.shape[1]), "block": self.size}
        return tiles(codes, factors, sides.get(self.strategy, (1, self.size[0])))

    def blocks8(self, codes: np.ndarray, scales: np.ndarray, *zeros: np.ndarray) -> np.ndarray:
        """f32[O, I] of i8 codes in blocks of rows and columns."""
        wide = codes.astype(np.float32)
        if not self.symmetric:
            wide -= tiles(np.ones(codes.shape, np.int8), zeros[0], self.size)
        return tiles(wide, scales, self.size)

    def packed(self, found: Found, module: str, beside: tuple[str, ...]) -> Coded | None:
        """Integers of 1 to 8 bits in a stream."""
        codes, scales, said, zeros = (
            f"{module}.{word}"
            for word in ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
        )
        words = found.shape(codes, ("i32",), 2)
        if words is None or not found.fits(said, ("i32", "i64"), (2,)):
            return None
        outputs, inputs = (int(n) for n in found.source.read(said))
        shape = (outputs, inputs)
        if outputs != words[0] or inputs < 1 or unpack.length(inputs, self.bits) != words[1]:
            found.problems.append(f"{codes} has shape {list(words)}, which is not {list(shape)}")
            return None
        if not self.scaled(found, scales, shape):
            return None
        groups, zero_words = 1, unpack.length(outputs, self.bits)
        group = self.size[0] if self.strategy == "group" else inputs
        groups = inputs // group
        if not self.symmetric and not found.fits(zeros, ("i32",), (zero_words, groups)):
            return None
        order = self.order(found, module, inputs, groups)
        if order is None:
            return None
        half, wanted = 2 ** (self.bits - 1), stored(self.bits)

        def split(values: np.ndarray, factors: np.ndarray, *rest: np.ndarray) -> Groups:
            numbers = unpack.stream(values, self.bits, inputs)
            factors = np.broadcast_to(factors.reshape(factors.shape or (1,)), (outputs, groups))
            index = rest[-1] if order and order[1] else None
            if self.symmetric:
                numbers = (numbers - np.uint8(half)) & np.uint8(2**wanted - 1)
                return Groups(numbers, factors, None, index)
            zero = unpack.columns(rest[0], self.bits, outputs).T
            return Groups(numbers, factors, zero, index)

        layout = Layout(
            wanted,
            group,
            "int" if self.symmetric else "uint",
            scale_word(found.source, scales),
            "none" if self.symmetric else "zero",
        )
        parts = (codes, scales, *(() if self.symmetric else (zeros,)), said, *beside)
        parts += (order[0],) if order else ()
        return grouped(shape, parts, split, layout, not (order and order[1]))

    def order(
        self, found: Found, module: str, inputs: int, groups: int
    ) -> tuple[str, bool] | tuple[()] | None:
        """(`weight_g_idx`, whether it is not in runs); () without it, None where it is wrong."""
        name = f"{module}.weight_g_idx"
        if name not in found.source.tensors:
            return ()
        if not found.fits(name, ("i32", "i64"), (inputs,)):
            return None
        index = found.source.read(name)
        if (index == -1).all():  # never set
            return name, False
        if index.min() < 0 or index.max() >= groups:
            found.problems.append(f"{name} holds a number that is none of {groups} groups")
            return None
        return name, not np.array_equal(index, np.arange(inputs) // (inputs // groups))

    def float4(self, found: Found, module: str, beside: tuple[str, ...]) -> Coded | None:
        """E2M1 codes, two to a byte."""
        codes, scales, whole_scale = (
            f"{module}.{word}" for word in ("weight_packed", "weight_scale", "weight_global_scale")
        )
        bytes_ = found.shape(codes, ("u8",), 2)
        if bytes_ is None:
            return None
        shape, nv = (bytes_[0], bytes_[1] * 2), self.format.startswith("nv")
        if not self.grid(shape):
            found.problems.append(f"{codes} has {shape[1]} inputs, in groups of {self.size[0]}")
            return None
        fits = [found.fits(scales, E4M3 if nv else E8M0, *self.grid(shape))]
        fits += [found.fits(whole_scale, ("f32",), (1,), ())] if nv else []
        if not all(fits):
            return None

        def split(values: np.ndarray, factors: np.ndarray, *rest: np.ndarray) -> Groups:
            if not nv:
                return Groups(nibbles(values), exponents(factors))
            with np.errstate(all="ignore"):
                return Groups(nibbles(values), factors.astype(np.float32) / rest[0].reshape(()))

        parts = (codes, scales, *((whole_scale,) if nv else ()), *beside)
        return grouped(shape, parts, split, Layout(4, self.size[0], "e2m1", "f32"))


@dataclass(frozen=True)
class CompressedTensors:
    """What the modules are that targets mean, by name, pattern or class; and which are not."""

    targets: names.Names
    ignored: names.Names

    def of(self, module: str) -> Weights | None:
        """The format of a module: by its name, else by a pattern, else by its class."""
        kind = "Embedding" if module.rpartition(".")[2] in TABLES else "Linear"
        if self.ignored.get(module) or kind in self.ignored.exact:
            return None
        return self.targets.get(module, self.targets.exact.get(kind))

    def coded(self, source: Source) -> Mapping[str, Coded]:
        """All modules of the groups that hold codes."""
        found = Found(source)
        both = [*found.modules("weight_packed"), *found.modules("weight")]
        found.add(dict.fromkeys(both), self.of)
        return found.done()


def read(config: Mapping[str, Any]) -> CompressedTensors:
    """The scheme of `config`. Raises EmitError naming the key that is not supported."""
    given = config[KEY]
    only(given, _FREE, _ONLY)
    groups = given.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        refuse("config_groups", groups, "an object of groups")
    ordered: dict[str, Weights | None] = {}
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            refuse(f"config_groups.{name}", group, "an object, not the name of a preset")
        only(group, _GROUP, {})
        weights = _weights(group, given.get("format"))
        ordered |= dict.fromkeys(_words(group, "targets"), weights)
    ignored = names.Names.of(dict.fromkeys(_words(given, "ignore"), True), names.marked)
    targets = names.Names.of(dict(sorted(ordered.items())), names.marked)
    return CompressedTensors(targets, ignored)


def _weights(group: Mapping[str, Any], otherwise: object) -> Weights | None:
    """The arguments of one group; None where its weights are not quantised."""
    given = group.get("weights")
    if given is None:
        return None
    if not isinstance(given, Mapping):
        refuse("weights", given, "an object")
    orders = ("weight", "static", "group", "dynamic", False, True)
    ordering = {"actorder": orders, "dynamic": (False,)}
    only(given, _WEIGHTS, ordering)
    name = group.get("format") or otherwise
    if name not in FORMATS:
        refuse("format", name, f"one of {', '.join(FORMATS)}")
    kind, symmetric = given.get("type", "int"), given.get("symmetric", True)
    if kind not in ("int", "float") or type(symmetric) is not bool:
        refuse("weights", given, 'type "int" or "float", and symmetric true or false')
    size = whole(given, "group_size", -1, -1)
    strategy = given.get("strategy")
    if strategy is None:
        said = "tensor" if given.get("group_size") is None else "channel"
        strategy = "group" if size > 0 else said
    block = given.get("block_structure")
    sizes: tuple[int, ...] = (size,)
    if strategy == "block":
        sizes = _block(block)
    elif strategy in ("group", "tensor_group"):
        size = whole(given, "group_size", -1)
    elif strategy not in ("tensor", "channel"):
        refuse("strategy", strategy, "tensor, channel, group, tensor_group or block")
    bits = whole(given, "num_bits", 8)
    weights = Weights(name, bits, kind, strategy, sizes, symmetric)
    _check(weights)
    return weights


def _check(weights: Weights) -> None:
    """EmitError unless the format has such weights."""
    name = weights.format
    if name in NAIVE:
        kinds = {"int-quantized": ("int",), "float-quantized": ("float",)}
        good = weights.kind in kinds.get(name, ("int", "float")) and (
            weights.bits <= 8 if weights.kind == "int" else weights.bits == 8
        )
        good &= weights.strategy != "tensor_group" and (weights.symmetric or weights.kind == "int")
    elif name == "pack-quantized":
        good = weights.kind == "int" and weights.bits <= 8
        allowed = ("tensor", "channel", "group") if weights.symmetric else ("channel", "group")
        good &= weights.strategy in allowed
    else:
        strategy = "tensor_group" if name.startswith("nv") else "group"
        bits = 8 if name == "mxfp8-quantized" else 4
        good = weights.kind == "float" and weights.bits == bits and weights.symmetric
        good &= weights.strategy == strategy
    if not good:
        said = f"{weights.kind}{weights.bits}, {weights.strategy}, symmetric: {weights.symmetric}"
        refuse("weights", said, f"what {name} can hold")


def _block(block: object) -> tuple[int, int]:
    """The two sides; older files have them as "128x128"."""
    if isinstance(block, str) and len(block) < 20 and all(n.isdigit() for n in block.split("x")):
        block = [int(n) for n in block.split("x")]
    if isinstance(block, list) and len(block) == 2:
        if all(type(n) is int and n > 0 for n in block):
            return block[0], block[1]
    return refuse("block_structure", block, "two sizes")


def _words(given: Mapping[str, Any], key: str) -> list[str]:
    words = given.get(key) or []
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        refuse(key, words, "a list of names")
    return words
