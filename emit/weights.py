"""From a checkpoint's tensors to canonical parameters: one row a parameter, all errors together."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from emit import irpa
from emit.errors import EmitError
from emit.forms import Form, choose, depthwise_kernel, trailing_kernel
from emit.state import DTYPES, WORDS

SHOWN = 20  # problems of a checkpoint that are named
LONGEST = 200  # characters of a name for which the nearest is looked for
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


@dataclass(frozen=True)
class Param:
    """One canonical parameter of `shape`, and the `forms` that a checkpoint may hold it in.

    A `matrix` is stored in the recipe's weight type, everything else in float32. `offset` and
    `scale` say how to draw a random stand-in: offset + scale × standard normal. `experts` says that
    the first axis is one of experts, of which a token takes a few.
    """

    name: str
    shape: tuple[int, ...]
    forms: tuple[Form, ...]
    matrix: bool = False
    offset: float = 0.0
    scale: float = 0.02
    experts: bool = False

    def spec(self, weights: str) -> irpa.Tensor:
        """This parameter as stored under the weight type `weights`."""
        return irpa.Tensor(self.name, weights if self.matrix else "f32", self.shape)


@dataclass(frozen=True)
class WeightMap:
    """All parameters of a model, and the checkpoint tensors that are known and not used.

    `unused` are their names, or the beginnings of names where they end with a dot. `copies` maps
    tensors that a checkpoint may hold a second time to the parameter they must equal.
    """

    params: tuple[Param, ...]
    unused: frozenset[str] = field(default_factory=frozenset)
    copies: Mapping[str, str] = field(default_factory=dict)

    def specs(self, weights: str) -> list[irpa.Tensor]:
        """Storage specs in file order."""
        return [param.spec(weights) for param in self.params]


def vector(name: str, size: int, prefix: str, offset: float = 0.0, scale: float = 0.02) -> Param:
    """A float32 vector stored under `prefix + name`."""
    return Param(name, (size,), (Form((prefix + name,), (size,)),), offset=offset, scale=scale)


def matrix(name: str, shape: tuple[int, int], *sources: str) -> Param:
    """A projection [outputs, inputs] under one of the names `sources`.

    Random stand-ins are drawn with variance 1/inputs.
    """
    forms = tuple(Form((source,), shape) for source in sources)
    return Param(name, shape, forms, matrix=True, scale=shape[1] ** -0.5)


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
    return WeightMap((*rows, matrix("lm_head.weight", table, "lm_head.weight")), unused)


def resolve(weight_map: WeightMap, source: Source) -> dict[str, Form]:
    """Canonical name → the form that the checkpoint has, for every parameter.

    Raises EmitError listing, at once, every parameter with no tensor or more than one, every
    misshapen tensor and every tensor that nothing uses.
    """
    problems: dict[str, None] = {}
    chosen: dict[str, Form] = {}
    wanted = {name for param in weight_map.params for form in param.forms for name in form.names}
    used = _unused(weight_map, source) | wanted
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


def _unused(weight_map: WeightMap, source: Source) -> set[str]:
    """The checkpoint's tensors that are known and not used."""
    begin = tuple(name for name in weight_map.unused if name.endswith("."))
    known = weight_map.unused | set(weight_map.copies)
    return {name for name in source.tensors if name in known or (begin and name.startswith(begin))}


def checkpoint_type(weight_map: WeightMap, source: Source, chosen: Mapping[str, Form]) -> str:
    """The one dtype word of all matrices in the checkpoint, `f32` if they differ."""
    matrices = [name for p in weight_map.params if p.matrix for name in chosen[p.name].names]
    found = {source.tensors[name].dtype for name in matrices}
    word = found.pop() if len(found) == 1 else "f32"
    return word if word in ("bf16", "f16") else "f32"


def narrow(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`array` as `dtype`; EmitError if a finite value becomes infinite or a value is not finite."""
    if array.dtype not in WORDS or array.dtype.kind in "iu":
        raise EmitError(f"{name}: found dtype {array.dtype}, expected float32, bfloat16 or float16")
    wide = array.astype(np.float32)
    if not np.isfinite(wide).all():
        raise EmitError(f"{name}: holds NaN or infinity; the checkpoint is damaged")
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore"):
        out = wide.astype(dtype)
    if not np.isfinite(out.astype(np.float32)).all():
        largest = float(np.abs(wide).max())
        raise EmitError(f"{name}: {largest:g} does not fit in {dtype}; use weights=f32 or bf16")
    return out


def convert(weight_map: WeightMap, source: Source, weights: str, out: Path) -> dict[str, Any]:
    """Write `out`/params.irpa and `out`/params.json; returns what the latter holds.

    `weights` is `f32`, `bf16` or `f16`. One parameter at a time is in memory.
    """
    chosen = resolve(weight_map, source)
    _check_copies(weight_map, source, chosen)
    specs = weight_map.specs(weights)

    def arrays() -> Iterator[np.ndarray]:
        for param, spec in zip(weight_map.params, specs, strict=True):
            form = chosen[param.name]
            parts = [
                narrow(name, form.transform(source.read(name)), DTYPES[spec.dtype])
                for name in form.names
            ]
            yield np.stack(parts) if form.stacked else parts[0]

    irpa.write(out / "params.irpa", specs, arrays())
    report = {
        "weights": weights,
        "params": [describe(param, weights) for param in weight_map.params],
        "unused": sorted(_unused(weight_map, source)),
    }
    (out / "params.json").write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    return report


def _check_copies(weight_map: WeightMap, source: Source, chosen: Mapping[str, Form]) -> None:
    """EmitError for a second copy that differs: the config says that it is not used."""
    for name, param in weight_map.copies.items():
        if name not in source.tensors:
            continue
        (original,) = chosen[param].names
        if not np.array_equal(source.read(name), source.read(original)):
            raise EmitError(
                f"{source.dir}: {name} differs from {original}, but config.json ties them; "
                'set "tie_word_embeddings": false there if both are meant'
            )


def describe(param: Param, weights: str) -> dict[str, Any]:
    """The manifest's row for `param`."""
    return {
        "name": param.name,
        "dtype": param.spec(weights).dtype,
        "shape": list(param.shape),
        "offset": param.offset,
        "scale": param.scale,
    }
