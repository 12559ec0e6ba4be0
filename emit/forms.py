"""How checkpoints hold a parameter: the forms that it may have there, and what is done with each.

One parameter may stand in published files as a tensor, as one of several names, as E tensors that
a model stacks, or as a part of a larger one. Names say which form a checkpoint has; shapes are then
checked, and tell apart forms of the same names. Nothing is guessed from values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from emit.packed import Layout, Packed

Transform = Callable[[np.ndarray], np.ndarray]


class Shaped(Protocol):
    """What is known of a tensor: its shape."""

    @property
    def shape(self) -> tuple[int, ...]: ...


def copy(tensor: np.ndarray) -> np.ndarray:
    """The tensor as it is."""
    return tensor


def depthwise_kernel(tensor: np.ndarray) -> np.ndarray:
    """A depthwise `Conv1d` weight [C, 1, K] as [K, C], so that channels are contiguous."""
    return tensor[:, 0, :].T


def trailing_kernel(tensor: np.ndarray) -> np.ndarray:
    """The same of MLX's weight [C, K, 1]."""
    return tensor[:, :, 0].T


def minus_one(tensor: np.ndarray) -> np.ndarray:
    """f32: the weights w of a norm that multiplies by 1 + w, of a tensor that holds 1 + w."""
    return tensor.astype(np.float32) - np.float32(1)


def flat(tensor: np.ndarray) -> np.ndarray:
    """All numbers along one axis."""
    return tensor.reshape(-1)


def first_half(tensor: np.ndarray) -> np.ndarray:
    """The upper half of the rows of [..., 2 O, I]."""
    return tensor[..., : tensor.shape[-2] // 2, :]


def second_half(tensor: np.ndarray) -> np.ndarray:
    """The lower half of the rows of [..., 2 O, I]."""
    return tensor[..., tensor.shape[-2] // 2 :, :]


@dataclass(frozen=True)
class Divided:
    """A matrix without the factors that were multiplied into it, one each for `sizes` of its rows.

    Of codes it is their scales that are divided; the numbers are then those of the division to
    float32's rounding. A factor of 0 divides nothing, for the model multiplies by it again.
    """

    factors: tuple[float, ...]
    sizes: tuple[int, ...]

    @property
    def by(self) -> np.ndarray:
        """f32[rows, 1]."""
        factors = np.asarray([factor or 1.0 for factor in self.factors], np.float32)
        return np.repeat(factors, self.sizes)[:, None]

    def __call__(self, tensor: np.ndarray) -> np.ndarray:
        """f32[..., O, I]."""
        return tensor.astype(np.float32) / self.by

    def cut(self, begin: int, end: int) -> Divided:
        """The same for rows `begin` to `end` alone."""
        ends = np.clip(np.cumsum([0, *self.sizes]), begin, end)
        return Divided(self.factors, tuple(np.diff(ends).tolist()))


@dataclass(frozen=True)
class Form:
    """One way to hold a parameter: the tensors `names`, each of `shape`.

    `transform` makes the parameter of the one tensor; with `stacked` the parameter is the stack of
    all of them, each transformed by itself, along a new first axis. `rows` says that the transform
    only moves whole rows of [..., O, I], so that codes and their scales can be moved alike. `mark`
    is a tensor and its shape: where it is there, the form comes before others of the same names.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    transform: Transform = copy
    stacked: bool = False
    rows: bool = False
    mark: tuple[str, tuple[int, ...]] | None = None

    def meant(self, tensors: Mapping[str, Shaped]) -> bool:
        """Whether the mark, if there is one, is in `tensors`."""
        if self.mark is None:
            return True
        found = tensors.get(self.mark[0])
        return found is not None and found.shape == self.mark[1]

    def fits(self, tensors: Mapping[str, Shaped]) -> bool:
        """Whether all its tensors are there, in their shape."""
        return all(name in tensors and tensors[name].shape == self.shape for name in self.names)

    @property
    def cuttable(self) -> bool:
        """Whether a part along the first axis is made of that part of the tensor alone."""
        if isinstance(self.transform, Divided):
            return len(self.shape) == 2
        stack = len(self.shape) > 2 and self.transform in (first_half, second_half)
        return self.transform is copy or stack

    def cut(self, begin: int, end: int) -> Form:
        """The form for places `begin` to `end` along the first axis, of one that is cuttable."""
        if isinstance(self.transform, Divided):
            return replace(self, transform=self.transform.cut(begin, end))
        return self

    def stored(self, layout: Layout) -> Layout | None:
        """How a matrix of `layout` is stored after the transform; None where it cannot be."""
        if isinstance(self.transform, Divided):
            return replace(layout, scale="f32")
        return layout if self.rows or self.transform is copy else None

    def carry(self, packed: Packed) -> Packed:
        """The transform of codes, where `stored` gives a layout."""
        arrays = (packed.codes, packed.scales, packed.offsets)
        if isinstance(self.transform, Divided):
            layout, by = replace(packed.layout, scale="f32"), self.transform
            offsets = packed.offsets
            if layout.offset == "bias" and offsets is not None:
                offsets = by(offsets)
            return Packed(layout, packed.codes, by(packed.scales), offsets)
        codes, scales, offsets = (a if a is None else self.transform(a) for a in arrays)
        assert codes is not None and scales is not None
        return replace(packed, codes=codes, scales=scales, offsets=offsets)


def choose(forms: Sequence[Form], tensors: Mapping[str, Shaped]) -> tuple[Form | None, list[str]]:
    """The form that `tensors` have, or None and all that is wrong.

    Of forms with the same names it is the first whose shape is there, those whose mark is there
    before those that have none. Forms of different names must not be there together.
    """
    there = [form for form in forms if any(name in tensors for name in form.names)]
    if not there:
        return None, _missing(forms)
    kinds = list(dict.fromkeys(form.names for form in there))
    if len(kinds) > 1:
        shown = " / ".join(next(name for name in names if name in tensors) for names in kinds)
        return None, [f"{shown} is there under two names"]
    if absent := [name for name in kinds[0] if name not in tensors]:
        return None, [f"{name} is missing" for name in sorted(absent)]
    meant = [form for form in there if form.meant(tensors)] or there
    meant.sort(key=lambda form: form.mark is None)
    fitting = [form for form in meant if form.fits(tensors)]
    if fitting:
        return fitting[0], []
    wanted = list(dict.fromkeys(form.shape for form in meant))
    shown = " or ".join(str(list(shape)) for shape in wanted)
    return None, [
        f"{name} has shape {list(tensors[name].shape)}, expected {shown}"
        for name in kinds[0]
        if tensors[name].shape not in wanted
    ]


def _missing(forms: Sequence[Form]) -> list[str]:
    """What to say of a parameter that is there in none of its `forms`."""
    if forms[0].stacked:
        return [f"{name} is missing" for name in sorted(forms[0].names)]
    names = dict.fromkeys(form.names[0] for form in forms if len(form.names) == 1)
    return [f"{' / '.join(names)} is missing"]
