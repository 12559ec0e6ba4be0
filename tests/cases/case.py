"""What a case is: one tiny random checkpoint, by what differs from its family's base config."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]
Draw = Callable[..., np.ndarray]


@dataclass(frozen=True, eq=False)
class Case:
    """One checkpoint.

    `dialect` is that of config.json: `native` as transformers 5 writes it, `hub` as older files
    have it (torch_dtype, plain Infinity, keys at their default left out). `rename` maps tensor
    names to other spellings. `reference` is why transformers cannot be compared with, or None. A
    `slow` row has a graph like another's: its file is read in any run, its numbers in a slow one.
    """

    name: str
    family: str
    config: Mapping[str, Any] = field(default_factory=dict)
    dialect: str = "native"
    dtype: str = "f32"
    shards: int = 1
    rename: Mapping[str, str] = field(default_factory=dict)
    reference: str | None = None
    slow: bool = False

    @property
    def id(self) -> str:
        """`family/name`."""
        return f"{self.family}/{self.name}"

    @property
    def seed(self) -> int:
        """Of the name, so that a new row changes no other."""
        return zlib.crc32(self.id.encode())


def drawer(rng: np.random.Generator) -> Draw:
    """`normal(*shape, scale=1.0, offset=0.0)`: float32 values drawn from `rng`."""

    def normal(*shape: int, scale: float = 1.0, offset: float = 0.0) -> np.ndarray:
        return (offset + scale * rng.standard_normal(shape)).astype(np.float32)

    return normal
