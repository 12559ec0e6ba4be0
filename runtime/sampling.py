"""Sampling of one row of logits on the host, seeded per request.

Bias and penalties (runtime.penalties) change the logits, temperature and filters (runtime.filters)
make probabilities of them, and the token is drawn with exactly one uniform number, so the
generator's position is the count of tokens drawn. One row, history and seed always give one token:
no step depends on threads, on the other rows or on where the row lies in memory.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.dry import Breakers
from runtime.errors import UserError
from runtime.filters import Row, filtered, largest
from runtime.penalties import Penalties

_MOST_BIASES = 1024


@dataclass(frozen=True)
class SamplingParams:
    """How one request picks its tokens. Raises UserError that names the field.

    `repetition_penalty` is 1 when off, the other penalties and `dry_multiplier` 0: see
    runtime.penalties and runtime.dry. `dry_penalty_last_n` -1 means the whole history, 0 turns DRY
    off; without `dry_breakers` nothing ends a repetition. `logit_bias` holds (token id, bias from
    -100 to 100), every id once.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_breakers: Breakers | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0, "a finite number, 0 (greedy) or more")
        _whole("top-k", self.top_k, 0, "0 (off) or more")
        _number("top-p", self.top_p, 0, "a number from 0 to 1", 1)
        _number("min-p", self.min_p, 0, "a number from 0 to 1", 1)
        if self.seed is not None:
            _whole("seed", self.seed, 0, "an integer from 0 to 2**64 - 1", 2**64 - 1)
        _number(
            "repetition-penalty", self.repetition_penalty, 1e-6, "a number from 1e-6 to 1e6", 1e6
        )
        for name in ("frequency", "presence"):
            value = getattr(self, f"{name}_penalty")
            _number(f"{name}-penalty", value, -2, "a number from -2 to 2", 2)
        _number("dry-multiplier", self.dry_multiplier, 0, "a number from 0 (off) to 1e6", 1e6)
        _number("dry-base", self.dry_base, 1, "a number from 1 to 1e6", 1e6)
        _whole("dry-allowed-length", self.dry_allowed_length, 0, "an integer of 0 or more")
        _whole("dry-penalty-last-n", self.dry_penalty_last_n, -1, "-1 (all), 0 (off) or more")
        self._check_bias()

    @property
    def greedy(self) -> bool:
        """Whether every token is the argmax of the logits, bias and penalties included."""
        return self.temperature == 0

    @property
    def penalises(self) -> bool:
        """Whether the repetition, frequency or presence penalty is on."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)

    @property
    def dries(self) -> bool:
        """Whether DRY is on."""
        return self.dry_multiplier > 0 and self.dry_penalty_last_n != 0

    @property
    def adjusts(self) -> bool:
        """Whether the logits are changed before the temperature."""
        return self.penalises or self.dries or bool(self.logit_bias)

    @property
    def needs_logits(self) -> bool:
        """False only when the argmax of the raw logits is the answer."""
        return not self.greedy or self.adjusts

    def check_vocab(self, vocab_size: int) -> None:
        """Raise UserError if a token id is outside a vocabulary."""
        for token, _ in self.logit_bias:
            if token >= vocab_size:
                raise UserError(
                    f"logit-bias: found token id {token}, expected 0 to {vocab_size - 1}"
                )

    def _check_bias(self) -> None:
        if len(self.logit_bias) > _MOST_BIASES:
            raise UserError(
                f"logit-bias: found {len(self.logit_bias)} entries, expected at most {_MOST_BIASES}"
            )
        for token, bias in self.logit_bias:
            _whole("logit-bias", token, 0, "token ids of 0 or more")
            _number(f"logit-bias of token id {token}", bias, -100, "a number from -100 to 100", 100)
        if len({token for token, _ in self.logit_bias}) != len(self.logit_bias):
            raise UserError("logit-bias: found a token id twice, expected each id once")


def _number(name: str, value: Any, least: float, expected: str, most: float = math.inf) -> None:
    """Raise UserError unless `value` is a finite number of `least` to `most`."""
    try:
        good = isinstance(value, Real) and not isinstance(value, bool)
        good = good and math.isfinite(value) and least <= float(value) <= most
    except OverflowError:  # an integer beyond f64
        good = False
    if not good:
        raise UserError(f"{name}: found {_shown(value)}, expected {expected}")


def _whole(name: str, value: Any, least: int, expected: str, most: float = 2**63 - 1) -> None:
    """Raise UserError unless `value` is an integer of `least` to `most`."""
    good = isinstance(value, Integral) and not isinstance(value, bool)
    if not (good and least <= int(value) <= most):
        raise UserError(f"{name}: found {_shown(value)}, expected {expected}")


def _shown(value: Any) -> str:
    if isinstance(value, int) and abs(value) >= 10**40:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value) if not isinstance(value, Real) else str(value)
    return text if len(text) <= 40 else text[:40] + "…"


class Sampler:
    """One request's choices: its random stream (PCG64) and its history for the penalties.

    `prompt` and `generated` are the token ids so far; `draws` uniform numbers were already used,
    so that a request can go on where it was. Without a seed one is drawn from the system.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int] = (),
        generated: Sequence[int] = (),
        draws: int = 0,
    ) -> None:
        self.params = params
        self.seed = secrets.randbits(63) if params.seed is None else int(params.seed)
        self.draws = draws
        bits = np.random.PCG64(self.seed)
        bits.advance(draws)
        self._rng = np.random.Generator(bits)
        self._penalties = Penalties(params, prompt, generated) if params.adjusts else None

    def sample(self, logits: NDArray[np.floating]) -> int:
        """Pick the next token id from raw logits f32[V], and record it.

        Raises UserError on NaN or +inf.
        """
        row, top = checked(logits)
        if self._penalties is not None:
            row = self._penalties.apply(row)
            top = row.max()
        if self.params.greedy:
            token = int(np.argmax(row))
        else:
            token = filtered(row, top, self.params).draw(self._rng.random())
            self.draws += 1
        self.record(token)
        return token

    def record(self, token: int) -> None:
        """Append a token that was chosen elsewhere to the history; no uniform is used."""
        if self._penalties is not None:
            self._penalties.record(token)


@dataclass(frozen=True)
class Logprobs:
    """Of one token: natural log of its probability, its rank (1 is the best; ties: the lower id
    first), and the best ids with theirs, best first."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def logprobs(logits: NDArray[np.floating], token: int, count: int) -> Logprobs:
    """Log-softmax in f64 of one raw row f32[V] (no bias, penalty or temperature) at `token` and at
    the `count` largest; entries at -inf are left out of these. Raises UserError on NaN or +inf."""
    row, top = checked(logits)
    total = float(top) + math.log(np.exp(row.astype(np.float64) - float(top)).sum())
    better = np.count_nonzero(row > row[token]) + np.count_nonzero(row[:token] == row[token])
    best = tuple((i, x - total) for i, x in top_logits(row, count))
    return Logprobs(float(row[token]) - total, int(better) + 1, best)


def top_logits(logits: NDArray[np.floating], count: int) -> list[tuple[int, float]]:
    """The `count` largest raw logits of one row f32[V] as (id, logit), best first, ties by lower
    id; entries at -inf are left out. Raises UserError on NaN or +inf."""
    row, _ = checked(logits)
    ids = largest(row, count)
    ids = ids[np.argsort(-row[ids], kind="stable")]
    return [(int(i), float(row[i])) for i in ids if np.isfinite(row[i])]


def checked(logits: NDArray[np.floating]) -> tuple[Row, np.float32]:
    """The row as f32[V], contiguous, and its largest entry, if a token can be picked from it.

    Raises UserError if not.
    """
    row = np.ascontiguousarray(logits, np.float32)
    top = row.max() if logits.ndim == 1 and row.size else np.float32(np.nan)
    if not math.isfinite(top):  # max() of a row with a NaN is NaN
        bad = np.flatnonzero(np.isnan(row) | np.isposinf(row))
        where = f"{row.flat[bad[0]]} at token id {bad[0]}" if bad.size else "no finite value"
        raise UserError(
            f"logits: found {where}, expected finite numbers; the module is wrong on this device:"
            " run scanwright verify on the bundle"
        )
    return row, top


def candidates(
    logits: NDArray[np.floating], params: SamplingParams
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Surviving ids, ascending, and their probabilities f64 (sum 1, none is 0 or NaN), bias and
    penalties left out.

    `logits` is one raw row f32[V]; `params.temperature` must be above 0. Raises UserError on NaN
    or +inf.
    """
    kept = filtered(*checked(logits), params)
    places = np.flatnonzero(kept.weights)
    weights = kept.weights[places].astype(np.float64)
    return places if kept.ids is None else kept.ids[places], weights / weights.sum()
