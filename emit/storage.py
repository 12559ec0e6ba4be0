"""How each parameter of a model is stored under a weight type: in floats, or as codes.

The types `int8` and `int4` quantise the matrices that most bytes are in; what decides much and
weighs little stays as the checkpoint has it (`Param.use`). Codes that a quantised checkpoint holds
are kept as they are where a bundle has their layout (`emit.packed`), so that nothing is rounded
twice. All of it follows from headers alone.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from emit.dequant.coded import Coded, Dequantized
from emit.errors import EmitError
from emit.forms import Form
from emit.irpa import Tensor
from emit.packed import Layout
from emit.weights import Param, Source, WeightMap

INTEGERS: dict[str, int] = {"int8": 8, "int4": 4}
FLOATS = ("f32", "bf16", "f16")
TYPES = (*FLOATS, *INTEGERS)
KEPT = "bf16"  # what is not quantised, where no checkpoint says what it is
How = str | Layout  # a dtype word, or codes


@dataclass(frozen=True)
class Storage:
    """The weight type, and how every matrix is stored; everything else is float32."""

    weights: str
    how: Mapping[str, How]

    def of(self, param: Param) -> How:
        """A dtype word or a layout."""
        return self.how[param.name] if param.matrix else "f32"

    def tensors(self, param: Param) -> list[Tensor]:
        """What the archive holds of `param`: itself, or its codes, scales and offsets."""
        how = self.of(param)
        if isinstance(how, str):
            return [Tensor(param.name, how, param.shape)]
        *outer, inputs = param.shape
        groups = (*outer, inputs // how.group)
        rows = [
            Tensor(f"{param.name}.codes", "i8", (*outer, inputs * how.bits // 8)),
            Tensor(f"{param.name}.scales", how.scale, groups),
        ]
        if how.offset != "none":
            word = "i8" if how.offset == "zero" else how.scale
            rows.append(Tensor(f"{param.name}.offsets", word, groups))
        return rows

    def specs(self, weight_map: WeightMap) -> list[Tensor]:
        """All of the archive, in file order."""
        return [tensor for param in weight_map.params for tensor in self.tensors(param)]

    def describe(self, weight_map: WeightMap) -> list[dict[str, Any]]:
        """The manifest's rows: name, dtype, shape, and the law of a random stand-in."""
        return [row for param in weight_map.params for row in self._described(param)]

    def _described(self, param: Param) -> list[dict[str, Any]]:
        how = self.of(param)
        laws = [(param.offset, param.scale)] if isinstance(how, str) else _laws(param, how)
        return [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "offset": offset,
                "scale": scale,
            }
            for tensor, (offset, scale) in zip(self.tensors(param), laws, strict=True)
        ]

    @property
    def quantization(self) -> str | None:
        """The layout of most matrices with the bits of the type; None for a float type."""
        found = [how for how in self.how.values() if isinstance(how, Layout)]
        found = [how for how in found if how.bits == INTEGERS[self.weights]] or found
        if not found:
            return None
        layout = max(dict.fromkeys(found), key=found.count)
        affine = "" if layout.offset == "none" else f"-{layout.offset}"
        return f"{layout.table}{layout.bits}-g{layout.group}{affine}-{layout.scale}"

    def to_json(self) -> str:
        """Canonical text."""
        how = {k: v if isinstance(v, str) else dataclasses.asdict(v) for k, v in self.how.items()}
        content = {"weights": self.weights, "how": how}
        return json.dumps(content, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Storage:
        """Of what `to_json` wrote."""
        content = json.loads(text)
        how = {k: v if isinstance(v, str) else Layout(**v) for k, v in content["how"].items()}
        return cls(content["weights"], how)


def _laws(param: Param, layout: Layout) -> list[tuple[float, float]]:
    """(offset, scale) of random codes, scales and offsets that stand for N(0, param.scale²).

    Bytes of codes are drawn with a standard deviation of 64, so that every code is there.
    """
    spread = {4: 4.6, 8: 64.0}[layout.bits]
    if layout.table not in ("uint", "int"):
        spread = 2.5 if layout.table == "e2m1" else 0.5
    unit = param.scale / spread
    middle = 2.0 ** (layout.bits - 1) if layout.table == "uint" else 0.0
    rows = [(0.0, 64.0), (unit, unit / 16)]
    if layout.offset == "bias":
        rows.append((-middle * unit, unit / 16))
    elif layout.offset == "zero":
        rows.append((middle, 0.5))
    return rows


def default(weights: str, use: str, inputs: int, scale: Any = "bf16") -> Layout:
    """The layout that a matrix of so many inputs is quantised to.

    int8 counts from the middle, a group of 64 inputs a scale (of 32, or all, where that does not
    divide them); int4 is scale × code + bias. A table of embeddings is int8 under int4 too.
    """
    group = next((size for size in (64, 32) if inputs % size == 0), inputs)
    if weights == "int4" and use != "table" and group <= 64 and inputs % 32 == 0:
        return Layout(4, group, "uint", scale, "bias")
    return Layout(8, group, "int", scale)


def plan(
    weight_map: WeightMap,
    weights: str,
    source: Source | None = None,
    chosen: Mapping[str, Form] | None = None,
    words: Sequence[str] = FLOATS,
    own: bool = False,
) -> Storage:
    """How the parameters are stored: of the checkpoint `source`, each in its `chosen` form, or of
    the shapes alone. `words` are the float types that the target stores; f32 takes the place of
    others. With `own`, nothing is rounded that the checkpoint has in floats. Raises EmitError for a
    weight type that is none.
    """
    if weights in FLOATS:
        return Storage(weights, {p.name: weights for p in weight_map.params if p.matrix})
    if weights not in INTEGERS:
        raise EmitError(f"weights = {weights}: expected one of {', '.join(TYPES)}")
    how: dict[str, How] = {}
    for param in weight_map.params:
        if not param.matrix:
            continue
        carried, floats, stays = None, KEPT, False
        if source is not None and chosen is not None:
            form = chosen[param.name]
            carried, floats = carriable(form, source), own_word(form, source)
            stays = own and not any(coded_parts(form, source))
        if carried is not None:
            kept = carried.scale if carried.scale in words else "f32"
            how[param.name] = dataclasses.replace(carried, scale=kept)
        elif param.use == "kept" or stays:
            how[param.name] = floats if floats in words else "f32"
        else:
            scale = "bf16" if "bf16" in words else "f32"
            how[param.name] = default(weights, param.use, param.shape[-1], scale)
    return Storage(weights, how)


def carriable(form: Form, source: Source) -> Layout | None:
    """How the codes of a quantised parameter are stored as they are; None where they cannot be."""
    layouts = {coded.layout if coded else None for coded in coded_parts(form, source)}
    layout = layouts.pop() if len(layouts) == 1 else None
    return None if layout is None else form.stored(layout)


def coded_parts(form: Form, source: Source) -> list[Coded | None]:
    """The quantised tensors that `form` is made of; None for one that is not quantised."""
    coded = source.coded if isinstance(source, Dequantized) else {}
    return [coded.get(name) for name in form.names]


def own_word(form: Form, source: Source) -> str:
    """The float type of the form's tensors, f32 where they differ or are quantised."""
    found = {source.tensors[name].dtype for name in form.names}
    word = found.pop() if len(found) == 1 else "f32"
    return word if word in FLOATS else "f32"


def own_type(weight_map: WeightMap, source: Source, chosen: Mapping[str, Form]) -> str:
    """The weight type that the checkpoint itself has: that of the floats all matrices share, int4
    or int8 where most of the numbers are codes that a bundle can hold, else f32.
    """
    numbers = dict.fromkeys(TYPES, 0)
    matrices = [param for param in weight_map.params if param.matrix]
    for param in matrices:
        form = chosen[param.name]
        layout = carriable(form, source)
        word = own_word(form, source) if layout is None else f"int{layout.bits}"
        numbers[word] += param.size
    found = [word for word, count in numbers.items() if count]
    if len(found) == 1:
        return found[0]
    codes = sum(numbers[word] for word in INTEGERS)
    most = max(INTEGERS, key=lambda word: numbers[word])
    return most if 2 * codes > sum(numbers.values()) else "f32"
