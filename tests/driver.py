"""Runs a family's graph under JAX as the runtime runs the compiled one: chunks, then steps."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from emit import expect, weights
from emit.checkpoint import open_checkpoint
from emit.entry import Model

State = dict[str, Any]
Tokens = Sequence[int] | np.ndarray


@dataclass(frozen=True)
class Driver:
    """A model with its parameters, and its forward pass compiled once per shape."""

    model: Model
    params: Mapping[str, Any]

    @classmethod
    def load(cls, checkpoint: Path, kind: str = "f32") -> Driver:
        """Through the whole path of a build: read, check, convert, and map the archive."""
        opened = open_checkpoint(checkpoint)
        model = Model.of(opened.config)
        with tempfile.TemporaryDirectory() as out:
            weights.convert(model.weight_map, opened, kind, Path(out))
            params = expect.load_params(model, kind, Path(out) / "params.irpa")
            return cls(model, {name: jnp.array(p, copy=True) for name, p in params.items()})

    @cached_property
    def forward(self) -> Any:
        """(params, tokens, lengths, positions, state) -> (logits, state), jitted."""
        return jax.jit(
            lambda params, tokens, lengths, positions, state: self.model.family.forward(
                self.model.cfg, params, tokens, lengths, positions, state
            )
        )

    def zero_state(self, rows: int = 1) -> State:
        """State of `rows` sequences before their first token."""
        return {spec.name: jnp.zeros(spec.batched(rows), jnp.float32) for spec in self.model.state}

    def random_state(self, rows: int, seed: int) -> State:
        """Non-zero state, different in every row."""
        rng = np.random.default_rng(seed)
        return {
            spec.name: jnp.asarray(rng.standard_normal(spec.batched(rows)), jnp.float32)
            for spec in self.model.state
        }

    def call(
        self, tokens: np.ndarray, lengths: Sequence[int], state: State, position: int = 0
    ) -> tuple[np.ndarray, State]:
        """One pass of tokens [B, T], `lengths[b]` of them valid -> (logits [B, V], state)."""
        rows = len(lengths)
        logits, state = self.forward(
            self.params,
            np.asarray(tokens, np.int32),
            np.asarray(lengths, np.int32),
            np.full(rows, position, np.int32),
            state,
        )
        return np.asarray(logits), state

    def prefill(
        self, tokens: Tokens, chunk: int, state: State | None = None, cuts: Any = None
    ) -> tuple[np.ndarray, State]:
        """`tokens` of one sequence in padded chunks -> (logits [V] after the last, state).

        `cuts` are lengths ≤ `chunk` that add up to all tokens; without them every chunk is full but
        the last.
        """
        state = self.zero_state() if state is None else state
        cuts = cuts or [min(chunk, len(tokens) - at) for at in range(0, len(tokens), chunk)]
        assert sum(cuts) == len(tokens) and max(cuts) <= chunk
        logits, at = np.zeros((1, 0)), 0
        for size in cuts:
            padded = np.zeros((1, chunk), np.int32)
            padded[0, :size] = tokens[at : at + size]
            logits, state = self.call(padded, [size], state, at)
            at += size
        return logits[0], state

    def greedy(
        self, prompt: Sequence[int], new_tokens: int, chunk: int
    ) -> tuple[list[int], np.ndarray]:
        """Chunked prefill, then single steps -> (tokens, logits [new_tokens, V] before each)."""
        logits, state = self.prefill(prompt, chunk)
        rows, tokens = [logits], [int(np.argmax(logits))]
        for i in range(new_tokens - 1):
            step = np.array([[tokens[-1]]])
            row, state = self.call(step, [1], state, len(prompt) + i)
            rows.append(row[0])
            tokens.append(int(np.argmax(row[0])))
        return tokens, np.array(rows)


def relative(got: Any, want: Any) -> float:
    """Largest absolute difference over the largest absolute value wanted."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, (got.shape, want.shape)
    assert np.isfinite(got).all()
    return float(np.abs(got - want).max() / np.abs(want).max())


def row(state: Mapping[str, Any], index: int) -> dict[str, np.ndarray]:
    """One sequence of a batched state whose slot axis is the first."""
    return {name: np.asarray(array)[index] for name, array in state.items()}
