"""What the readers of the methods share: the parts of a tensor, and codes with group scales."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, Protocol

import numpy as np

from emit.dequant.coded import KEY, Coded, fail
from emit.errors import EmitError
from emit.packed import Layout, Packed, pack4
from emit.weights import Source

FLOATS = ("f32", "bf16", "f16")
Stored = Literal["f32", "bf16", "f16"]

# Tensors beside a quantised weight that scale activations or a KV cache: not read.
ACTIVATIONS = """input_scale input_zero_point input_global_scale output_scale output_zero_point
    activation_scale k_scale v_scale""".split()


class Module(Protocol):
    """How a module is quantised."""

    def add(self, found: Found, module: str) -> None:
        """Enter its tensors in `found`, or what is wrong with them."""
        ...


@dataclass
class Found:
    """The quantised tensors of a checkpoint as they are found, and all that is wrong with them."""

    source: Source
    coded: dict[str, Coded] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def modules(self, suffix: str) -> Iterator[str]:
        """Names of the modules that have a tensor `.suffix`."""
        ending = "." + suffix
        for name in self.source.tensors:
            if name.endswith(ending):
                yield name.removesuffix(ending)

    def add(self, modules: Iterable[str], of: Callable[[str], Module | None]) -> None:
        """Each of `modules` that is quantised, as `of` says that it is."""
        for module in modules:
            weights = of(module)
            if weights is not None:
                weights.add(self, module)

    def shape(self, name: str, dtypes: Iterable[str], rank: int) -> tuple[int, ...] | None:
        """The shape of tensor `name`; None, and a problem, unless it has a dtype and the rank."""
        info = self.source.tensors.get(name)
        if info is None:
            self.problems.append(f"{name} is missing")
        elif info.dtype not in dtypes or len(info.shape) != rank:
            self.problems.append(
                f"{name} is {info.dtype}{list(info.shape)}, expected {' or '.join(dtypes)}"
                f" of {rank} dimensions"
            )
        else:
            return info.shape
        return None

    def fits(self, name: str, dtypes: Iterable[str], *shapes: tuple[int, ...]) -> bool:
        """Whether tensor `name` has a dtype and one of the shapes; else a problem."""
        info = self.source.tensors.get(name)
        if info is None:
            self.problems.append(f"{name} is missing")
        elif info.dtype not in dtypes or info.shape not in shapes:
            words = " or ".join(str(list(shape)) for shape in shapes)
            self.problems.append(
                f"{name} is {info.dtype}{list(info.shape)}, expected {' or '.join(dtypes)} {words}"
            )
        else:
            return True
        return False

    def beside(self, module: str) -> tuple[str, ...]:
        """The tensors of `module` that scale activations, and of the attention it is keys of."""
        owners = [module]
        if module.endswith(".k_proj"):
            owners.append(module.removesuffix(".k_proj"))
        names = (f"{owner}.{word}" for owner in owners for word in ACTIVATIONS)
        return tuple(name for name in names if name in self.source.tensors)

    def done(self) -> Mapping[str, Coded]:
        """The tensors found. Raises EmitError naming what is wrong."""
        fail(self.source, self.problems)
        return self.coded


@dataclass(frozen=True)
class Groups:
    """A matrix as codes u8[..., K] of a table, scales [..., G] and, if any, zeros u8[..., G].

    The scale of input k is number k // (K / G), or number `index[k]`.
    """

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None = None
    index: np.ndarray | None = None

    def widen(self, values: np.ndarray) -> np.ndarray:
        """f32[..., K]: (values[code] - zero) × scale."""
        wide = values[self.codes]
        scales = self.scales.astype(np.float32)
        if self.index is None:
            wide = wide.reshape(*scales.shape, -1) if wide.size else wide[..., None]
            place: Any = np.s_[..., None]
        else:
            place = np.s_[..., self.index]
        if self.zeros is not None:
            wide -= self.zeros.astype(np.float32)[place]
        with np.errstate(over="ignore", invalid="ignore"):
            wide *= scales[place]
        return wide.reshape(self.codes.shape)

    def packed(self, layout: Layout) -> Packed:
        """The same as a bundle stores it."""
        codes = pack4(self.codes) if layout.bits == 4 else np.ascontiguousarray(self.codes)
        zeros = None if self.zeros is None else np.ascontiguousarray(self.zeros)
        return Packed(layout, codes, np.ascontiguousarray(self.scales), zeros)


def grouped(
    shape: tuple[int, ...],
    parts: tuple[str, ...],
    split: Callable[..., Groups],
    layout: Layout,
    storable: bool = True,
    per: tuple[int, ...] = (),
) -> Coded:
    """The tensor whose parts `split` makes Groups of, stored as `layout` where that can be."""

    def widen(*arrays: np.ndarray) -> np.ndarray:
        return split(*arrays).widen(layout.values())

    def pack(*arrays: np.ndarray) -> Packed:
        return split(*arrays).packed(layout)

    inputs = shape[-1]
    if not storable or inputs == 0 or inputs * layout.bits % 8 or layout.group * layout.bits % 8:
        return Coded(shape, parts, widen, per=per)
    return Coded(shape, parts, widen, layout, pack, per)


def stored(bits: int) -> Literal[4, 8]:
    """Bits that a bundle stores a code of `bits` in."""
    return 4 if bits <= 4 else 8


def whole(given: Mapping[str, Any], key: str, default: int, *special: int) -> int:
    """The positive int of a quantization_config, or one of `special`. Raises EmitError."""
    value = given.get(key)
    value = default if value is None else value
    if type(value) is not int or not (0 < value < 2**31 or value in special):
        refuse(key, value, "a positive number")
    return value


def refuse(key: str, value: object, expected: str) -> NoReturn:
    """Raise EmitError for a value of quantization_config."""
    shown = json.dumps(value, default=str)[:200]
    raise EmitError(f"config.json: {KEY}: {key} = {shown}, expected {expected}")


def scale_word(source: Source, name: str) -> Stored:
    """The type that scales of tensor `name` are stored in, whose dtype is one of FLOATS."""
    word = source.tensors[name].dtype
    return "f16" if word == "f16" else "bf16" if word == "bf16" else "f32"


def nibbles(packed: np.ndarray) -> np.ndarray:
    """u8[..., 2 N] of bytes [..., N] that hold two codes each, the low half first."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def exponents(codes: np.ndarray) -> np.ndarray:
    """f32: 2 ^ (code - 127) of e8m0 codes, as such or as u8; NaN of code 255 (OCP MX 1.0, 5.4.1).

    https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
    """
    powers = np.ldexp(np.float32(1), np.minimum(np.arange(256) - 127, 127))
    powers[255] = np.nan
    return powers[codes.view(np.uint8)]


def tiles(codes: np.ndarray, scales: np.ndarray, sides: tuple[int, ...]) -> np.ndarray:
    """f32[..., O, I]: codes × the scale of their tile, of `sides` rows and columns.

    `scales` are [..., ceil(O / rows), ceil(I / columns)], or one number.
    """
    wide = codes.astype(np.float32)
    if wide.size == 0:
        return wide
    (outputs, inputs), (high, broad) = codes.shape[-2:], sides
    grid = (*codes.shape[:-2], -(-outputs // high), -(-inputs // broad))
    widths = np.full(grid[-1], broad)
    widths[-1] = inputs - (grid[-1] - 1) * broad
    per_row = np.repeat(scales.astype(np.float32).reshape(grid), widths, axis=-1)
    with np.errstate(over="ignore", invalid="ignore"):
        if high == 1:
            wide *= per_row
            return wide
        for row in range(grid[-2]):
            wide[..., row * high : (row + 1) * high, :] *= per_row[..., row : row + 1, :]
    return wide
