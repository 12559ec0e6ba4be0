"""Sampling of one row of logits on the host, seeded per request.

The chain is temperature, top-k, top-p, min-p, each over what the one before it left:

- temperature T: p = softmax(logits / T); 0 means greedy, the argmax.
- top-k: the k largest (ties: the lower id first); 0 means off.
- top-p: the shortest list of largest probabilities (ties: the lower id first) whose sum, of the
  probabilities renormalised after top-k, reaches p; always at least one; 1 means off.
- min-p: those with a probability of at least p times the largest; 0 means off.

The definitions of the filters are those of llama.cpp (llama-sampling.cpp); temperature comes first,
as in vLLM and transformers. The token is drawn by inverse CDF over the surviving ids in ascending
order, with exactly one uniform number a token, so the generator's position is the token count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.errors import UserError

Row = NDArray[np.floating]


@dataclass(frozen=True)
class SamplingParams:
    """How one request picks its tokens. Raises UserError that names the field."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(
                f"temperature: found {self.temperature}, expected a finite number, 0 (greedy) or"
                " more"
            )
        if self.top_k < 0:
            raise UserError(f"top-k: found {self.top_k}, expected 0 (off) or more")
        for name, value in (("top-p", self.top_p), ("min-p", self.min_p)):
            if not 0 <= value <= 1:
                raise UserError(f"{name}: found {value}, expected a number from 0 to 1")
        if self.seed is not None and self.seed < 0:
            raise UserError(f"seed: found {self.seed}, expected an integer of 0 or more")

    @property
    def greedy(self) -> bool:
        """Whether every token is the argmax, so that no logits are needed."""
        return self.temperature == 0


class Sampler:
    """One request's random stream (PCG64; an unseeded request draws its seed from the system)."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._rng = np.random.Generator(np.random.PCG64(params.seed))

    def sample(self, logits: Row) -> int:
        """Pick the next token id from raw logits f32[V]. Raises UserError on NaN or +inf."""
        if self.params.greedy:
            return int(np.argmax(checked(logits)))
        ids, probs = candidates(logits, self.params)
        cdf = np.cumsum(probs)
        place = int(np.searchsorted(cdf, self._rng.random() * cdf[-1], side="right"))
        return int(ids[min(place, len(ids) - 1)])


def candidates(
    logits: Row, params: SamplingParams
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Surviving ids, ascending, and their probabilities f64 (sum 1, none is 0 or NaN).

    `logits` is one raw row f32[V]; `params.temperature` must be above 0. Raises UserError on NaN
    or +inf.
    """
    row = checked(logits)
    if 0 < params.top_k < row.size:
        ids = np.sort(largest(row, params.top_k))
    else:
        ids = np.arange(row.size)
    scaled = row[ids].astype(np.float64)
    with np.errstate(over="ignore", under="ignore"):
        weights = np.exp((scaled - scaled.max()) / params.temperature)
    keep = np.flatnonzero(weights)
    if params.top_p < 1:
        keep = keep[_nucleus(weights[keep], scaled[keep], params.top_p)]
    if params.min_p > 0:
        keep = keep[weights[keep] >= params.min_p]
    return ids[keep], weights[keep] / weights[keep].sum()


def largest(values: Row, count: int) -> NDArray[np.int64]:
    """Indices of the `count` largest values, best first, ties by the lower index."""
    if count >= values.size:
        return np.argsort(-values, kind="stable")
    edge = np.partition(values, values.size - count)[values.size - count]
    above = np.flatnonzero(values > edge)
    level = np.flatnonzero(values == edge)[: count - above.size]
    found = np.sort(np.concatenate([above, level]))
    return found[np.argsort(-values[found], kind="stable")]


def top_logits(logits: Row, count: int) -> list[tuple[int, float]]:
    """The `count` largest raw logits of one row f32[V] as (id, logit), best first, ties by lower
    id; entries at -inf are left out. Raises UserError on NaN or +inf."""
    row = checked(logits)
    return [(int(i), float(row[i])) for i in largest(row, count) if np.isfinite(row[i])]


def checked(logits: Row) -> Row:
    """The same row, if it is one a token can be picked from. Raises UserError otherwise."""
    top = logits.max() if logits.ndim == 1 and logits.size else math.nan
    if not np.isfinite(top):  # max() of a row with a NaN is NaN
        bad = np.flatnonzero(np.isnan(logits) | np.isposinf(logits))
        where = f"{logits.flat[bad[0]]} at token id {bad[0]}" if bad.size else "no finite value"
        raise UserError(
            f"logits: found {where}, expected finite numbers; the module is wrong on this device:"
            " run scanwright verify on the bundle"
        )
    return logits


def _nucleus(weights: Row, row: Row, mass: float) -> NDArray[np.int64]:
    """Indices, ascending, of the shortest best-first list that holds `mass` of the weights' sum.

    Ranked by logit, not by weight: two logits may underflow to one weight.
    """
    need = mass * weights.sum()
    count = min(256, weights.size)
    while True:
        best = largest(row, count)
        reached = np.cumsum(weights[best])
        if reached[-1] >= need or count == weights.size:
            keep = int(np.searchsorted(reached, need, side="left")) + 1
            return np.sort(best[:keep])
        count = min(count * 16, weights.size)
