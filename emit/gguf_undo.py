"""What llama.cpp's conversion does to tensors, undone: back to the published shapes and values.

An `Undo` says what shape comes of the shapes of its tensors, and makes the values. One with `rows`
moves whole rows only (it leaves the last axis alone and changes no number), so it works on rows of
quantised blocks too. `Negated` is not exact: A = -exp(A_log) has been rounded once, and so has
log(-A) here; exp of it differs from A by less than 1e-6 of it where A is between 1e-3 and 1e3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Shape = tuple[int, ...]


class Misfit(ValueError):
    """A tensor that cannot have been made by the conversion; says which shape it should have."""


class Undo(Protocol):
    """The inverse of one step of the conversion."""

    @property
    def rows(self) -> bool: ...

    def shape(self, *shapes: Shape) -> Shape:
        """The checkpoint tensor's shape. Raises Misfit."""
        ...

    def __call__(self, *arrays: np.ndarray) -> np.ndarray: ...


@dataclass(frozen=True)
class Copy:
    """The tensor as it is."""

    rows = True

    def shape(self, *shapes: Shape) -> Shape:
        """The same."""
        return shapes[0]

    def __call__(self, *arrays: np.ndarray) -> np.ndarray:
        """The same."""
        return arrays[0]


@dataclass(frozen=True)
class Reshaped:
    """The tensor in the shape `to`, one size of which may be -1: as many as are left."""

    to: Shape
    rows = False

    def shape(self, *shapes: Shape) -> Shape:
        """`to`, with its -1 filled in."""
        count, known = math.prod(shapes[0]), math.prod(n for n in self.to if n > 0)
        if count != known and (-1 not in self.to or not known or count % known):
            raise Misfit(f"expected {known} numbers, or a multiple")
        return tuple(count // known if n < 0 else n for n in self.to)

    def __call__(self, *arrays: np.ndarray) -> np.ndarray:
        """Reshaped."""
        return arrays[0].reshape(self.to)


@dataclass(frozen=True)
class Kernel:
    """A depthwise convolution's weight [C, K] or [1, C, 1, K] as [C, 1, K]."""

    rows = False

    def shape(self, *shapes: Shape) -> Shape:
        """[C, 1, K]."""
        return (math.prod(shapes[0][:-1]), 1, shapes[0][-1])

    def __call__(self, *arrays: np.ndarray) -> np.ndarray:
        """Reshaped."""
        return arrays[0].reshape(self.shape(arrays[0].shape))


@dataclass(frozen=True)
class Negated:
    """A < 0 as A_log, in the shape `to` (None: the same): see above."""

    to: Shape | None = None
    rows = False

    def shape(self, *shapes: Shape) -> Shape:
        """`to`, with its -1 filled in."""
        return shapes[0] if self.to is None else Reshaped(self.to).shape(*shapes)

    def __call__(self, *arrays: np.ndarray) -> np.ndarray:
        """log(-A); NaN, which conversion refuses, for A above 0."""
        with np.errstate(all="ignore"):
            # Wide, so that how a processor rounds it is not seen in float32.
            logs = np.log(-arrays[0].astype(np.longdouble))
        return logs.astype(np.float32).reshape(self.shape(logs.shape))


@dataclass(frozen=True)
class Less:
    """The tensor without the number that was added to it: norms that multiply by w + `by`."""

    by: float
    rows = False

    def shape(self, *shapes: Shape) -> Shape:
        """The same."""
        return shapes[0]

    def __call__(self, *arrays: np.ndarray) -> np.ndarray:
        """w; the model adds the number again, which gives the file's own to one rounding."""
        return arrays[0].astype(np.float32) - np.float32(self.by)


@dataclass(frozen=True)
class Part:
    """Rows `first` to `last` of a matrix; of the matrix number `expert` where it is a stack."""

    first: int = 0
    last: int | None = None
    expert: int | None = None
    rows = True

    def shape(self, *shapes: Shape) -> Shape:
        """[last - first, inputs]."""
        found = shapes[0] if self.expert is None else shapes[0][1:]
        if len(found) != 2 or (self.last or 0) > found[0]:
            raise Misfit(f"expected matrices of {self.last or 'some'} rows or more")
        count = (found[0] if self.last is None else self.last) - self.first
        if self.expert is not None and self.expert >= shapes[0][0]:
            raise Misfit(f"expected more than {self.expert} matrices")
        return (count, found[1])

    def __call__(self, *arrays: np.ndarray) -> np.ndarray:
        """A view."""
        found = arrays[0] if self.expert is None else arrays[0][self.expert]
        return found[self.first : self.last]


@dataclass(frozen=True)
class Plane:
    """Number `index` of a stack [N, …, D], in the shape `to` = (…, D)."""

    index: int
    to: Shape
    rows = False

    def shape(self, *shapes: Shape) -> Shape:
        """`to`."""
        if shapes[0][0] <= self.index or math.prod(shapes[0][1:]) != math.prod(self.to):
            raise Misfit(f"expected more than {self.index} of shape {list(self.to)}")
        return self.to

    def __call__(self, *arrays: np.ndarray) -> np.ndarray:
        """Reshaped."""
        return arrays[0][self.index].reshape(self.to)


@dataclass(frozen=True)
class Unpermuted:
    """Rows of q or k in the published order: of each head the even ones, then the odd ones.

    The conversion of Llama-like models puts the two halves of a head in turns. Of the rows, only
    those from `first` on, as many as `heads` × `size`.
    """

    heads: int
    size: int
    first: int = 0
    rows = True

    def shape(self, *shapes: Shape) -> Shape:
        """[heads × size, inputs]."""
        if len(shapes[0]) != 2 or shapes[0][0] < self.first + self.heads * self.size:
            raise Misfit(f"expected {self.heads} heads of {self.size} rows")
        if self.size % 2:
            raise Misfit(f"heads of {self.size} rows, expected an even number")
        return (self.heads * self.size, shapes[0][1])

    def __call__(self, *arrays: np.ndarray) -> np.ndarray:
        """Rows in another order."""
        own = arrays[0][self.first : self.first + self.heads * self.size]
        each = own.reshape(self.heads, self.size // 2, 2, -1)
        return each.swapaxes(1, 2).reshape(own.shape)


@dataclass(frozen=True)
class Grouped:
    """Rows sorted by kind (q, k, v | z), as one group's rows of each kind after the other's.

    `sizes` are the rows of each kind in one group, however they are dealt to the tensors.
    """

    groups: int
    sizes: tuple[int, ...]
    rows = True

    def shape(self, *shapes: Shape) -> Shape:
        """[groups × sum(sizes), inputs]."""
        count = self.groups * sum(self.sizes)
        if {len(s) for s in shapes} != {2} or len({s[1] for s in shapes}) != 1:
            raise Misfit("expected matrices of equal width")
        if sum(s[0] for s in shapes) != count:
            raise Misfit(f"expected {count} rows together")
        return (count, shapes[0][1])

    def __call__(self, *arrays: np.ndarray) -> np.ndarray:
        """Rows in another order."""
        joined = np.concatenate(arrays)
        ends = np.cumsum([self.groups * size for size in self.sizes])[:-1]
        kinds = [
            part.reshape(self.groups, size, -1)
            for part, size in zip(np.split(joined, ends), self.sizes, strict=True)
        ]
        return np.concatenate(kinds, axis=1).reshape(joined.shape)


@dataclass(frozen=True)
class Tiled:
    """Value heads in the published order: those of a key head side by side, not one in `shared`.

    The rows of `first` on (or, with `inputs`, the columns) are those of key_heads × `shared` heads
    of `size`; what comes before them stays.
    """

    key_heads: int
    shared: int
    size: int
    first: int = 0
    inputs: bool = False

    @property
    def rows(self) -> bool:
        """Not with `inputs`."""
        return not self.inputs

    def shape(self, *shapes: Shape) -> Shape:
        """The same."""
        wanted = self.first + self.key_heads * self.shared * self.size
        if shapes[0][-1 if self.inputs else 0] != wanted:
            raise Misfit(f"expected {wanted} {'columns' if self.inputs else 'rows'}")
        return shapes[0]

    def __call__(self, *arrays: np.ndarray) -> np.ndarray:
        """Rows or columns in another order."""
        index = np.arange(self.key_heads * self.shared * self.size)
        index = index.reshape(self.shared, self.key_heads, self.size).swapaxes(0, 1).reshape(-1)
        order = np.concatenate([np.arange(self.first), self.first + index])
        return np.take(arrays[0], order, axis=-1 if self.inputs else 0)


@dataclass(frozen=True)
class Latent:
    """kv_b_proj [H (N + V), R] of its halves: keys [H, R, N], turned, and values [H, V, R]."""

    rows = False

    def shape(self, *shapes: Shape) -> Shape:
        """[H (N + V), R]."""
        keys, values = shapes
        fits = len(keys) == len(values) == 3 and keys[0] == values[0] and keys[1] == values[2]
        if not fits:
            raise Misfit("expected [heads, rank, N] and [heads, V, rank]")
        return (keys[0] * (keys[2] + values[1]), keys[1])

    def __call__(self, *arrays: np.ndarray) -> np.ndarray:
        """The rows of each head, keys first."""
        joined = np.concatenate([arrays[0].swapaxes(1, 2), arrays[1]], axis=1)
        return joined.reshape(-1, joined.shape[-1])


@dataclass(frozen=True)
class Then:
    """One undo after another, both of one tensor."""

    first: Undo
    second: Undo

    @property
    def rows(self) -> bool:
        """If both are."""
        return self.first.rows and self.second.rows

    def shape(self, *shapes: Shape) -> Shape:
        """That of the second."""
        return self.second.shape(self.first.shape(*shapes))

    def __call__(self, *arrays: np.ndarray) -> np.ndarray:
        """Both."""
        return self.second(self.first(*arrays))
