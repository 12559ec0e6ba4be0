"""What all whole-model oracles share: runs of tokens and greedy generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from oracles.nn import F64

State = Mapping[str, np.ndarray]


class Model:
    """A model in float64 from canonical parameters, one token at a time.

    `cfg` is the family's Config. A state maps the family's state names to arrays of one sequence
    without the slot axis; it is replaced, never written into. A KV region holds the keys or values
    of all positions so far, however many.
    """

    def __init__(self, cfg: Any, params: Mapping[str, np.ndarray]) -> None:
        self.cfg = cfg
        self.params = {name: np.asarray(p).astype(F64) for name, p in params.items()}

    def under(self, prefix: str) -> dict[str, np.ndarray]:
        """The parameters whose name starts with `prefix`, without it."""
        return {n[len(prefix) :]: a for n, a in self.params.items() if n.startswith(prefix)}

    def zero_state(self) -> dict[str, np.ndarray]:
        """The state before the first token."""
        raise NotImplementedError

    def step(self, token: int, state: State) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Logits [V] after `token`, and the state after it."""
        raise NotImplementedError

    def run(
        self, tokens: Sequence[int] | np.ndarray, state: State | None = None
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Logits [T, V] after each of `tokens`, and the state after the last."""
        now = self.zero_state() if state is None else dict(state)
        rows = []
        for token in tokens:
            logits, now = self.step(int(token), now)
            rows.append(logits)
        return np.array(rows), now

    def greedy(self, prompt: Sequence[int], new_tokens: int) -> tuple[list[int], list[float]]:
        """The most likely continuation of `prompt`, and the top-1/top-2 gap before each token."""
        rows, state = self.run(prompt)
        logits, tokens, gaps = rows[-1], [], []
        for _ in range(new_tokens):
            second, first = np.sort(logits)[-2:]
            tokens.append(int(np.argmax(logits)))
            gaps.append(float(first - second))
            logits, state = self.step(tokens[-1], state)
        return tokens, gaps
