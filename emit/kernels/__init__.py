"""Kernels of our own, in C, for what the compiler does worse on CPUs.

An op stays a JAX function. `on_cpu(kernel)` above it names a function of the same arguments that
calls the kernel, or returns None where the kernel does not take them; it is asked only inside
`used()`, so the op itself is what other targets compile and what the oracle computes:

    @on_cpu(linear_kernel)
    def linear(x, weight): ...

A kernel is a C function of this folder, `scanwright_<name>(operands …, results …, sizes …, tile)`:
bare pointers, then `size_t`, the last of them the number of the tile to compute. See `splice` for
how a call gets into a module, and `objects` for how the C sources are compiled.

Parts of a projection are passed on as `Columns`, which a kernel reads where they lie: a slice of
more than one row would be copied first.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax import Array

PREFIX = "scanwright."
MOST_TILES = 16  # so few are taken one at a time, or eight by each of two workers
P = ParamSpec("P")
R = TypeVar("R")
_USED: ContextVar[bool] = ContextVar("kernels used", default=False)


@dataclass(frozen=True)
class Columns:
    """`width` columns of the last axis of `whole`, from column `start` on."""

    whole: Array
    start: int
    width: int

    @property
    def array(self) -> Array:
        """They alone."""
        return self.whole[..., self.start : self.start + self.width]

    @property
    def row(self) -> tuple[int, int]:
        """What a kernel needs to find them: the width of all rows, and their first column."""
        return self.whole.shape[-1], self.start


Values = Array | Columns


def split(x: Array, widths: Sequence[int]) -> list[Columns]:
    """The columns of `x` in parts of these widths, one after another."""
    starts = [sum(widths[:i]) for i in range(len(widths))]
    return [Columns(x, start, width) for start, width in zip(starts, widths, strict=True)]


def array(x: Values) -> Array:
    """As an array."""
    return x.array if isinstance(x, Columns) else x


def columns(x: Values) -> Columns:
    """As columns."""
    return x if isinstance(x, Columns) else Columns(x, 0, x.shape[-1])


def bits(x: float) -> int:
    """A float32 as a size: its bits."""
    return int(np.float32(x).view(np.uint32))


def all_f32(*arrays: Array | None) -> bool:
    """Whether all that is given is float32, which most kernels want."""
    return all(each is None or each.dtype == jax.numpy.float32 for each in arrays)


def per_tile(units: int, most: int = MOST_TILES) -> int:
    """How many of `units` equal parts of some work a tile has: at most `most` tiles there are."""
    return -(-units // most)


@contextlib.contextmanager
def used(on: bool = True) -> Iterator[None]:
    """Within it, ops that have a kernel are traced as calls of it."""
    token = _USED.set(on)
    try:
        yield
    finally:
        _USED.reset(token)


def on_cpu(
    kernel: Callable[P, R | None],
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Where kernels are used, `kernel` in the place of the op below, unless it returns None."""

    def decorate(op: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(op)
        def chosen(*args: P.args, **kwargs: P.kwargs) -> R:
            result = kernel(*args, **kwargs) if _USED.get() else None
            return op(*args, **kwargs) if result is None else result

        return chosen

    return decorate


def call(
    name: str,
    operands: Sequence[Array],
    results: Sequence[tuple[tuple[int, ...], Any]],
    sizes: Sequence[int],
    tiles: int,
) -> list[Array]:
    """`tiles` calls of `scanwright_<name>`, in any order; `results` are their shapes and dtypes."""
    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]
    made = jax.ffi.ffi_call(PREFIX + name, structs)(
        *operands, sizes=np.asarray(sizes, np.int64), tiles=np.int64(tiles)
    )
    return list(made)
