"""From a checkpoint's tensors to canonical parameters: one row a parameter, all errors together."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from emit.errors import EmitError
from emit.forms import Form, choose, depthwise_kernel, trailing_kernel

SHOWN = 20  # problems of a checkpoint that are named
LONGEST = 200  # characters of a name for which the nearest is looked for
Use = Literal["product", "table", "kept"]
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # of a layer, an expert …


class TensorInfo(Protocol):
    """What is known of a checkpoint tensor before it is read; `dtype` is a word as `f32`."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class Source(Protocol):
    """A checkpoint: its directory, named tensors and a way to read one of them."""

    @property
    def dir(self) -> Path: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str) -> np.ndarray: ...

    def release(self) -> None:
        """Give back the memory of what was read; arrays stay good, and are read again if used."""
        ...


@dataclass(frozen=True)
class Param:
    """One canonical parameter of `shape`, and the `forms` that a checkpoint may hold it in.

    A `matrix` is stored in the recipe's weight type, everything else in float32. Of the types that
    are codes, `use` says more: a `table` of embeddings, or the head, has at least eight bits, and
    what is `kept` is not quantised, unless the checkpoint has it so. `offset` and `scale` say how
    to draw a random stand-in: offset + scale × standard normal. `experts` says that the first axis
    is one of experts, of which a token takes a few.
    """

    name: str
    shape: tuple[int, ...]
    forms: tuple[Form, ...]
    matrix: bool = False
    offset: float = 0.0
    scale: float = 0.02
    experts: bool = False
    use: Use = "product"

    @property
    def size(self) -> int:
        """Its numbers."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class WeightMap:
    """All parameters of a model, and the checkpoint tensors that are known and not used.

    `unused` are their names, or the beginnings of names where they end with a dot. `copies` maps
    tensors that a checkpoint may hold a second time to the parameter they must equal.
    """

    params: tuple[Param, ...]
    unused: frozenset[str] = field(default_factory=frozenset)
    copies: Mapping[str, str] = field(default_factory=dict)


def vector(name: str, size: int, prefix: str, offset: float = 0.0, scale: float = 0.02) -> Param:
    """A float32 vector stored under `prefix + name`."""
    return Param(name, (size,), (Form((prefix + name,), (size,)),), offset=offset, scale=scale)


def matrix(name: str, shape: tuple[int, int], *sources: str, use: Use = "product") -> Param:
    """A projection [outputs, inputs], or a table [tokens, size], under one of the names `sources`.

    Random stand-ins are drawn with variance 1/inputs.
    """
    forms = tuple(Form((source,), shape) for source in sources)
    return Param(name, shape, forms, matrix=True, scale=shape[1] ** -0.5, use=use)


def kernel(name: str, width: int, channels: int, *sources: str) -> Param:
    """The kernel [width, channels] of a depthwise convolution, under one of the names `sources`.

    It is [channels, 1, width] in checkpoints, and [channels, width, 1] in those of MLX.
    """
    forms = []
    for source in sources:
        forms.append(Form((source,), (channels, 1, width), depthwise_kernel))
        forms.append(Form((source,), (channels, width, 1), trailing_kernel))
    return Param(name, (width, channels), tuple(forms), scale=width**-0.5)


def experts(name: str, shape: tuple[int, int], sources: Sequence[str], *stacks: Form) -> Param:
    """The stack [E, outputs, inputs] of E projections.

    A checkpoint holds them one by one, as `sources`, or in one of the forms `stacks`.
    """
    forms = (Form(tuple(sources), shape, stacked=True), *stacks)
    size = (len(sources), *shape)
    return Param(name, size, forms, matrix=True, scale=shape[1] ** -0.5, experts=True)


def with_head(
    rows: Sequence[Param],
    table: tuple[int, int],
    embeddings: str,
    tied: bool,
    unused: frozenset[str] = frozenset(),
) -> WeightMap:
    """The map of a model whose last product is `lm_head.weight` [V, D] or, tied, its embeddings."""
    if tied:
        return WeightMap(tuple(rows), unused, {"lm_head.weight": embeddings})
    return WeightMap(
        (*rows, matrix("lm_head.weight", table, "lm_head.weight", use="table")), unused
    )


def resolve(weight_map: WeightMap, source: Source) -> dict[str, Form]:
    """Canonical name → the form that the checkpoint has, for every parameter.

    Raises EmitError listing, at once, every parameter with no tensor or more than one, every
    misshapen tensor and every tensor that nothing uses.
    """
    problems: dict[str, None] = {}
    chosen: dict[str, Form] = {}
    wanted = {name for param in weight_map.params for form in param.forms for name in form.names}
    used = known_unused(weight_map, source) | wanted
    for param in weight_map.params:
        form, wrong = choose(param.forms, source.tensors)
        problems |= dict.fromkeys(wrong)
        if form is not None:
            chosen[param.name] = form
    unknown = sorted(set(source.tensors) - used)
    if count := len(problems) + len(unknown):
        lines = list(problems)[:SHOWN]
        lines += _strangers(unknown[: SHOWN - len(lines)], wanted)
        more = f"; and {count - SHOWN} more" if count > SHOWN else ""
        raise EmitError(
            f"{source.dir}: {count} tensors do not fit config.json: {'; '.join(lines)}{more}"
        )
    return chosen


def _strangers(names: Sequence[str], wanted: set[str]) -> list[str]:
    """What to say of names that are not `wanted`: which one of these is near."""
    forms = list({NUMBER.sub("#", name) for name in wanted}) if names else []
    lines = []
    for name in names:
        hint, numbers = "", iter(NUMBER.findall(name))
        own = NUMBER.sub("#", name)[:LONGEST]
        for close in difflib.get_close_matches(own, forms, n=1, cutoff=0.8):
            like = re.sub("#", lambda _, numbers=numbers: next(numbers, "0"), close)
            hint = f" (like {like})" if like != name else ""
        lines.append(f"{name} is not a tensor of this family{hint}")
    return lines


def known_unused(weight_map: WeightMap, source: Source) -> set[str]:
    """The checkpoint's tensors that are known and not used."""
    begin = tuple(name for name in weight_map.unused if name.endswith("."))
    known = weight_map.unused | set(weight_map.copies)
    return {name for name in source.tensors if name in known or (begin and name.startswith(begin))}
