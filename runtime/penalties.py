"""Changes of one request's logits that do not depend on the temperature: bias and penalties.

In this order, as in llama.cpp's default chain, on every token t:

- bias: l += logit_bias[t]
- repetition (CTRL, arXiv 1909.05858, as transformers has it), if t is in prompt + generated:
  l /= r if l > 0 else l *= r
- frequency and presence (OpenAI's formula), with c the count of t in generated:
  l -= frequency * c + presence * [c > 0]
- DRY (runtime.dry) over prompt + generated

Only the tokens concerned are computed, in f64, and rounded to f32 once at the end. A finite logit
stays finite; one at -inf stays there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from runtime.dry import Breakers, Dry

if TYPE_CHECKING:
    from runtime.sampling import SamplingParams

_LARGEST = float(np.finfo(np.float32).max)


class Penalties:
    """What the bias, the penalties and DRY of one request do to its next row of logits."""

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int] = (), generated: Sequence[int] = ()
    ) -> None:
        self._params = params
        bias = dict(params.logit_bias)
        self._dry = None
        if params.dries:
            breakers = params.dry_breakers or Breakers()
            self._dry = Dry(
                params.dry_multiplier,
                params.dry_base,
                params.dry_allowed_length,
                params.dry_penalty_last_n,
                breakers,
                [*prompt, *generated],
            )
        self._tracks = self._dry is not None or params.penalises
        known = [*bias, *prompt] if self._tracks else [*bias]
        self._place = {token: i for i, token in enumerate(dict.fromkeys(known))}
        size = len(self._place)
        self._ids = np.fromiter(self._place, np.int64, size)
        self._bias = np.zeros(size)
        self._bias[: len(bias)] = list(bias.values())
        self._seen = np.zeros(size, np.bool_)  # in prompt + generated
        self._counts = np.zeros(size)  # in generated
        if self._tracks:
            self._seen[[self._place[token] for token in dict.fromkeys(prompt)]] = True
            for token in generated:
                self._count(token)

    def record(self, token: int) -> None:
        """Append a generated token to the history."""
        if self._dry is not None:
            self._dry.record(token)
        if self._tracks:
            self._count(token)

    def apply(self, row: NDArray[np.float32]) -> NDArray[np.float32]:
        """A changed copy of the raw logits f32[V] of the next token."""
        size, params = len(self._place), self._params
        ids = self._ids[:size]
        raw = row.take(ids).astype(np.float64)
        values = raw + self._bias[:size]
        if params.repetition_penalty != 1:
            seen = self._seen[:size]
            positive = seen & (values > 0)
            factor = params.repetition_penalty
            with np.errstate(over="ignore"):
                np.multiply(values, factor, out=values, where=seen & ~positive)
                np.divide(values, factor, out=values, where=positive)
        if params.frequency_penalty or params.presence_penalty:
            counts = self._counts[:size]
            values -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        if self._dry is not None:
            tokens, amounts = self._dry.penalties()
            values[[self._place[token] for token in tokens.tolist()]] -= amounts
        np.maximum(values, -_LARGEST, out=values)
        np.minimum(values, _LARGEST, out=values)
        values[raw == -np.inf] = -np.inf
        changed = row.copy()
        changed[ids] = values
        return changed

    def _count(self, token: int) -> None:
        place = self._place.setdefault(token, len(self._place))
        if place == self._ids.size:
            self._grow()
        self._ids[place] = token
        self._seen[place] = True
        self._counts[place] += 1

    def _grow(self) -> None:
        more = max(64, self._ids.size)
        self._ids = np.append(self._ids, np.zeros(more, np.int64))
        self._bias = np.append(self._bias, np.zeros(more))
        self._seen = np.append(self._seen, np.zeros(more, np.bool_))
        self._counts = np.append(self._counts, np.zeros(more))
