"""What a quantised checkpoint holds: tensors of codes, and how to read them as numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from emit.errors import EmitError
from emit.packed import Layout, Packed
from emit.weights import Source, TensorInfo

KEY = "quantization_config"


@dataclass(frozen=True)
class Coded:
    """A tensor that stands in a checkpoint as other tensors: codes, scales …

    `parts` are their names and `widen` makes of the arrays, in that order, float32 [`shape`].
    Where a bundle can store the codes as they are, `layout` says how and `pack` makes that of the
    same arrays; it then stands for the very numbers of `widen`.

    `per` says of each part for how many places along the tensor's first axis one place along its
    own stands; 0 is a part that all of them share. A tensor without it is read whole.
    """

    shape: tuple[int, ...]
    parts: tuple[str, ...]
    widen: Callable[..., np.ndarray]
    layout: Layout | None = None
    pack: Callable[..., Packed] | None = None
    per: tuple[int, ...] = ()

    @property
    def dtype(self) -> str:
        """The type it reads as."""
        return "f32"

    @property
    def step(self) -> int:
        """What the places that `cut` begins at are multiples of; 0 if it cannot be cut."""
        return math.lcm(*(count for count in self.per if count)) if self.per else 0

    def cut(self, arrays: Sequence[np.ndarray], begin: int, end: int) -> list[np.ndarray]:
        """The parts of places `begin` to `end` along the first axis."""
        return [
            array[begin // per : -(-end // per)] if per else array
            for array, per in zip(arrays, self.per, strict=True)
        ]


class Scheme(Protocol):
    """A way of quantising, with the settings of one checkpoint."""

    def coded(self, source: Source) -> Mapping[str, Coded]:
        """The quantised tensors of `source`, by the name they have unquantised.

        Raises EmitError where parts are missing, or do not go together.
        """
        ...


@dataclass(frozen=True)
class Dequantized:
    """A checkpoint whose quantised tensors read as float32; their parts are not seen."""

    source: Source
    coded: Mapping[str, Coded]
    tensors: Mapping[str, TensorInfo]

    @classmethod
    def of(cls, source: Source, coded: Mapping[str, Coded]) -> Dequantized:
        """`source` with the tensors `coded` in place of their parts."""
        parts = {part for tensor in coded.values() for part in tensor.parts}
        kept = {name: info for name, info in source.tensors.items() if name not in parts}
        if twice := sorted(kept.keys() & coded.keys()):
            raise EmitError(f"{source.dir}: {twice[0]} is there both quantised and as it is")
        return cls(source, coded, dict(sorted({**kept, **coded}.items())))

    @property
    def dir(self) -> Path:
        """The checkpoint's directory."""
        return self.source.dir

    def read(self, name: str) -> np.ndarray:
        """Tensor `name`; a quantised one as float32."""
        tensor = self.coded.get(name)
        if tensor is None:
            return self.source.read(name)
        return tensor.widen(*(self.source.read(part) for part in tensor.parts))

    def release(self) -> None:
        """Give back the memory of what was read."""
        self.source.release()


def fail(source: Source, problems: list[str]) -> None:
    """EmitError naming the first of `problems`, if there are any."""
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise EmitError(f"{source.dir}: {'; '.join(problems[:5])}{more}")


def only(
    given: Mapping[str, Any], free: Iterable[str], allowed: Mapping[str, tuple[Any, ...]]
) -> None:
    """EmitError for a key of a quantization_config that is neither `free` nor one of its `allowed`.

    `free` are keys that say nothing about the stored numbers, or that the caller reads.
    """
    known = frozenset(free)
    for key, value in given.items():
        if key in known or value is None:
            continue
        if value not in allowed.get(key, ()):
            raise EmitError(f"config.json: {KEY}: {key} = {json.dumps(value)} is not supported")
