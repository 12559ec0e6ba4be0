"""From one row of logits to the probabilities a token is drawn with, and the draw itself.

The chain is temperature, top-k, top-p, min-p, each over what the one before it left:

- temperature T: p = softmax(logits / T).
- top-k: the k largest (ties: the lower id first); 0 means off.
- top-p: the shortest list of largest probabilities (ties: the lower id first) whose sum, of the
  probabilities renormalised after top-k, reaches p; always at least one; 1 means off.
- min-p: those with a probability of at least p times the largest; 0 means off.

The definitions of the filters are those of llama.cpp (llama-sampling.cpp); temperature comes first,
as in vLLM and transformers. The draw is by inverse CDF over the surviving ids in ascending order.

Accuracy. Few survivors have weights in f64. Many have weights exp(z), z = (logit - largest) / T, in
f32: three roundings make z, and numpy's exponential has an error of its own, so that a weight's
relative error is at most (3 + 2 |z|) * 2**-23 down to weights of 1e-37, below which digits are
lost. The probability of a set of tokens is off by at most that with the mean |z|, about 2e-6. A
top-p whose sum falls that close to p may end a token sooner or later than in exact arithmetic.
Temperatures beyond 1e-30 and 1e30 act as these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]
Places = NDArray[np.int64]
_FEW = 4096  # up to here one by one in f64
_BLOCK = 256  # ids that are summed together in a long row
_GRID = 64  # lines of the grid whose column maxima bound the k largest
_SAMPLE = 512  # entries that the edge of top-p is estimated from


class Params(Protocol):
    """What the chain reads of a request's parameters; the temperature is above 0."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...


@dataclass(frozen=True)
class Kept:
    """Weights of the survivors, 0 for what was dropped: `ids` None means of the whole row.

    `sums` f32 are those of blocks of `_BLOCK` weights; None when the weights are few.
    """

    weights: NDArray[np.floating]
    ids: NDArray[np.int64] | None = None
    sums: Row | None = None

    def draw(self, uniform: float) -> int:
        """The id at `uniform` in [0, 1) of the CDF."""
        if self.sums is None:
            cdf = np.cumsum(self.weights, dtype=np.float64)
            place = _place(cdf, uniform * cdf[-1])
        else:
            cdf = np.cumsum(self.sums, dtype=np.float64)
            target = uniform * cdf[-1]
            block = _place(cdf, target)
            start = block * _BLOCK
            inner = np.cumsum(self.weights[start : start + _BLOCK], dtype=np.float64)
            place = start + _place(inner, target - (cdf[block - 1] if block else 0.0))
        return place if self.ids is None else int(self.ids[place])


def _place(cdf: NDArray[np.float64], target: float) -> int:
    """The first place whose CDF is above `target`, never one of weight 0 even after rounding."""
    place = int(cdf.searchsorted(target, "right"))
    return place if place < cdf.size else int(cdf.searchsorted(cdf[-1]))


def filtered(row: Row, top: np.float32, params: Params) -> Kept:
    """What the chain leaves of one row f32[V], contiguous, without NaN; `top`, its largest entry,
    is finite."""
    with np.errstate(over="ignore", under="ignore"):
        scale = _Scale(top, params.temperature)
        if not 0 < params.top_k < row.size:
            return _chain(row, scale, params)
        ids = largest(row, params.top_k)
        kept = _chain(row[ids], scale, params)
        return Kept(kept.weights, ids if kept.ids is None else ids[kept.ids], kept.sums)


def largest(row: Row, count: int) -> NDArray[np.int64]:
    """Ids, ascending, of the `count` largest of one row f32[V], ties by the lower id."""
    if count >= row.size:
        return np.arange(row.size)
    if count <= 0:
        return np.empty(0, np.int64)
    columns = row.size // _GRID
    if count > columns // 2:
        edge = np.partition(row, row.size - count)[row.size - count]
    else:  # each column's largest is an entry, so `count` entries reach the count-th of these
        bounds = row[: columns * _GRID].reshape(_GRID, columns).max(axis=0)
        edge = np.partition(bounds, columns - count)[columns - count]
    ids = np.flatnonzero(row >= edge)
    if ids.size > count:
        values = row[ids]
        edge = np.partition(values, ids.size - count)[ids.size - count]
        keep = values > edge
        level = np.flatnonzero(values == edge)
        keep[level[: count - np.count_nonzero(keep)]] = True
        ids = ids[keep]
    return ids


class _Scale:
    """Weights exp((x - top) / T) of a row's entries, and the entry of a weight."""

    def __init__(self, top: np.float32, temperature: float) -> None:
        self.top = top
        self.temperature = min(max(temperature, 1e-30), 1e30)

    def few(self, values: Row) -> NDArray[np.float64]:
        """In f64."""
        return np.exp((values.astype(np.float64) - float(self.top)) / self.temperature)

    def many(self, row: Row) -> Row:
        """In f32, zeros appended up to whole blocks."""
        weights = np.empty(-(-row.size // _BLOCK) * _BLOCK, np.float32)
        weights[row.size :] = 0
        part = weights[: row.size]
        np.subtract(row, self.top, out=part)
        if self.temperature != 1:
            np.multiply(part, np.float32(1 / self.temperature), out=part)
        np.exp(part, out=part)
        return weights

    def entry(self, weight: float) -> np.float32:
        """The least f32 whose weight is at least `weight`, above 0 and at most 1."""
        exact = float(self.top) + self.temperature * math.log(weight)
        value = np.float32(exact)
        return value if float(value) >= exact else np.nextafter(value, np.float32(np.inf))


@dataclass(frozen=True)
class _Edge:
    """What is kept: all entries from `value` up, except those at the places `without`.

    `within` holds the places of all that are kept, and of others; None: anywhere.
    """

    value: np.float32
    without: Places | None = None
    within: Places | None = None


def _chain(row: Row, scale: _Scale, params: Params) -> Kept:
    """Temperature, top-p and min-p; the ids are places in `row`."""
    few = row.size <= _FEW
    edge = _Edge(np.float32(-np.inf))
    weights = None
    if params.top_p < 1 and few:
        ranked = np.sort(row)[::-1]
        cdf = np.cumsum(scale.few(ranked))
        edge = _edge(row, ranked, int(cdf.searchsorted(params.top_p * cdf[-1])))
    elif params.top_p < 1:
        weights = scale.many(row)
        edge = _nucleus(row, scale, weights, params.top_p)
    if params.min_p > 0 and (least := scale.entry(params.min_p)) > edge.value:
        edge = _Edge(least, within=edge.within)
    if edge.within is not None:
        ids = edge.within[row[edge.within] >= edge.value]
        if edge.without is not None:
            ids = np.setdiff1d(ids, edge.without, assume_unique=True)
        return Kept(scale.few(row[ids]), ids)
    if edge.value == -np.inf:
        if few:
            return Kept(scale.few(row))
        weights = scale.many(row) if weights is None else weights
        return Kept(weights, None, _sums(weights))
    mask = row >= edge.value
    if edge.without is not None:
        mask[edge.without] = False
    if few or np.count_nonzero(mask) <= _FEW:
        ids = np.flatnonzero(mask)
        return Kept(scale.few(row[ids]), ids)
    weights = scale.many(row) if weights is None else weights
    part = weights[: row.size]
    np.multiply(part, _ones(mask), out=part)
    return Kept(weights, None, _sums(weights))


def _edge(values: Row, ranked: Row, last: int, places: Places | None = None) -> _Edge:
    """The edge that keeps `ranked[: last + 1]`, which are `values` best first, of equal ones the
    first; `places` are those of the values in the row."""
    value = ranked[last]
    if last + 1 == ranked.size or ranked[last + 1] < value:
        return _Edge(value)
    level = np.flatnonzero(values == value)
    level = level[last + 1 - np.count_nonzero(values > value) :]
    return _Edge(value, level if places is None else places[level])


def _nucleus(row: Row, scale: _Scale, weights: Row, mass: float) -> _Edge:
    """The edge of the shortest best-first list of a long row that holds `mass` of its weights.

    Ranked by logit, not by weight: two logits may have one weight. Only entries between two bounds
    are ranked: the list has all from `high` up and none below `low`. If a guess of these turns out
    wrong, the entries of less weight than all but 1 - mass can hold together are left out instead.
    """
    total = float(_sums(weights).sum(dtype=np.float64))
    tail = (1 - mass) * total
    low, high = _guess(row, scale, tail)
    edge = _between(row, scale, weights, (low, high), mass * total)
    if edge is None:
        low = scale.entry(0.999 * tail / row.size)
        edge = _between(row, scale, weights, (low, None), mass * total)
    return edge or _Edge(low)


def _between(
    row: Row,
    scale: _Scale,
    weights: Row,
    bounds: tuple[np.float32, np.float32 | None],
    need: float,
) -> _Edge | None:
    """The edge at which the best-first list reaches `need`, if it lies between two entries."""
    low, high = bounds
    mask = row >= low
    if high is not None:
        above = row >= high
        mask ^= above
        need -= float(np.einsum("i,i->", weights[: row.size], _ones(above)))
    places = np.flatnonzero(mask)
    values = row[places]
    ranked = np.sort(values)[::-1]
    last = _reach(scale.few(ranked), need)
    if last == ranked.size or (high is not None and need <= 0):
        return None
    edge = _edge(values, ranked, last, places)
    return edge if high is not None else replace(edge, within=places)


def _guess(row: Row, scale: _Scale, tail: float) -> tuple[np.float32, np.float32 | None]:
    """Bounds on the edge below which the weights sum to `tail`, from a sample of the row; no upper
    one if few entries are above."""
    stride = row.size // _SAMPLE
    sample = np.sort(row[::stride])
    weights = scale.few(sample)
    sums = stride * np.cumsum(weights)
    noise = 4 * stride * np.sqrt(np.cumsum(np.square(weights)))
    at = int((sums + noise).searchsorted(tail))
    low = sample[min(at, sample.size - 1)] if at else np.float32(-np.inf)
    if (sample.size - at) * stride <= _FEW:
        return low, None
    beyond = sums - noise > tail
    at = int(beyond.argmax()) + 1
    few = not beyond[-1] or (sample.size - at) * stride <= _FEW
    return low, None if few else sample[at]


def _reach(weights: NDArray[np.float64], need: float) -> int:
    """The first place where the running sum reaches `need`; the size if none does."""
    whole = weights.size // _BLOCK * _BLOCK
    cdf = np.cumsum(_sums(weights[:whole]))
    block = int(cdf.searchsorted(need))
    if block:
        need -= cdf[block - 1]
    start = block * _BLOCK
    return start + int(np.cumsum(weights[start : start + _BLOCK]).searchsorted(need))


def _sums(weights: NDArray[np.floating]) -> NDArray[np.floating]:
    """Sums of whole blocks (einsum adds in vectors, in an order of its own but always the same)."""
    return np.einsum("ij->i", weights.reshape(-1, _BLOCK))


def _ones(mask: NDArray[np.bool_]) -> Row:
    """1 for true, 0 for false (twice as fast as a conversion from bool)."""
    return mask.view(np.int8).astype(np.float32)
