"""The form of a block: a mixer or an FFN, described by a frozen dataclass of sizes.

A block knows neither families nor configs: a family says which blocks a layer has, in which order,
and under which names their parameters stand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from jax import Array

from emit.ops import nn
from emit.state import StateSpec
from emit.weights import Param

State = Mapping[str, Array]


@dataclass(frozen=True)
class Rows:
    """What a pass is about: B rows of T tokens.

    `lengths` i32[B] says how many tokens of a row are valid (the first ones), `positions` i32[B]
    the absolute position of a row's first token.
    """

    lengths: Array
    positions: Array

    def valid(self, steps: int) -> Array:
        """bool[B, steps]: which tokens are not padding."""
        return nn.iota(steps)[None, :] < self.lengths[:, None]


class Block(Protocol):
    """A mixer or an FFN: x f32[B, T, D] -> y f32[B, T, D]."""

    def params(self, name: str, source: str) -> list[Param]:
        """Its parameters: canonical names begin with `name`, checkpoint names with `source`."""
        ...

    def state(self, context: int | None) -> list[StateSpec]:
        """Its state, named without a prefix; KV regions hold `context` tokens."""
        ...

    def __call__(
        self, p: Mapping[str, Array], x: Array, rows: Rows, state: State
    ) -> tuple[Array, dict[str, Array]]:
        """The output, and the new state by the names of `state`.

        `p` holds its parameters without their prefix, `state` is named as in `state(context)`.
        """
        ...


def states(layers: Sequence[Sequence[Block]], context: int | None) -> list[StateSpec]:
    """The state of each layer's blocks as the model names it, `layers.<i>.` first."""
    return [
        replace(spec, name=f"layers.{i}.{spec.name}")
        for i, blocks in enumerate(layers)
        for block in blocks
        for spec in block.state(context)
    ]


def under(prefix: str, values: Mapping[str, Array]) -> dict[str, Array]:
    """The values whose name starts with `prefix`, without it."""
    return {name[len(prefix) :]: v for name, v in values.items() if name.startswith(prefix)}


def renamed(prefix: str, values: Mapping[str, Array]) -> dict[str, Array]:
    """The values with `prefix` before their names."""
    return {prefix + name: value for name, value in values.items()}
