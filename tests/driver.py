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

from emit import expect
from emit.checkpoint import open_checkpoint
from emit.convert import convert
from emit.dequant import dequantized
from emit.entry import Model

State = dict[str, Any]
Tokens = Sequence[int] | np.ndarray
CONTEXT = 160  # of a KV cache, where a model has one


@dataclass(frozen=True)
class Driver:
    """A model with its parameters, and its forward pass compiled once per shape."""

    model: Model
    params: Mapping[str, Any]

    @classmethod
    def load(cls, checkpoint: Path, kind: str = "f32", context: int = CONTEXT) -> Driver:
        """Through the whole path of a build: read, check, convert, and map the archive."""
        opened = open_checkpoint(checkpoint)
        model = Model.of(opened.config, context)
        with tempfile.TemporaryDirectory() as out:
            source = dequantized(opened, opened.config)
            convert(model.weight_map, source, model.storage(kind), Path(out))
            params = expect.load_params(model, model.storage(kind), Path(out) / "params.irpa")
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

    def held(self, state: State, position: int) -> dict[str, np.ndarray]:
        """The first row of a state in which `position` tokens are, as the oracle holds it.

        A KV cache as the keys or values [G, position, D] of all of them; those that a ring of
        fewer places has forgotten are zero.
        """
        found = row(state, 0)
        for spec in self.model.state:
            if spec.kind == "per_position":
                region, places = found[spec.name], spec.shape[2]
                every = np.arange(position)
                kept = (every >= position - places)[:, None]
                found[spec.name] = np.where(kept, region[:, every % places], 0)
        return found

    def agree(self, state: State, want: Mapping[str, np.ndarray], position: int) -> float:
        """The largest relative difference of `state` from the oracle's after `position` tokens."""
        got, worst = self.held(state, position), 0.0
        assert got.keys() == want.keys()
        for spec in self.model.state:
            one, other = got[spec.name], want[spec.name]
            if spec.kind == "per_position":
                places = spec.shape[2]
                one, other = one[:, -places:], other[:, -places:]
            worst = max(worst, relative(one, other))
        return worst

    def call(
        self, tokens: np.ndarray, lengths: Sequence[int], state: State, position: Any = 0
    ) -> tuple[np.ndarray, State]:
        """One pass of tokens [B, T], `lengths[b]` of them valid -> (logits [B, V], state).

        `position` is that of the first token, of all rows or of each.
        """
        rows = len(lengths)
        logits, state = self.forward(
            self.params,
            np.asarray(tokens, np.int32),
            np.asarray(lengths, np.int32),
            np.broadcast_to(np.asarray(position, np.int32), rows),
            state,
        )
        return np.asarray(logits), state

    def prefill(
        self,
        tokens: Tokens,
        chunk: int,
        state: State | None = None,
        cuts: Any = None,
        position: int = 0,
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
            logits, state = self.call(padded, [size], state, position + at)
            at += size
        return logits[0], state

    def greedy(
        self,
        prompt: Sequence[int],
        new_tokens: int,
        chunk: int,
        forced: Sequence[int] | None = None,
    ) -> tuple[list[int], np.ndarray]:
        """Chunked prefill, then single steps -> (tokens, logits [new_tokens, V] before each).

        Each step reads the token chosen before it, or that of `forced`.
        """
        logits, state = self.prefill(prompt, chunk)
        rows, tokens = [logits], [int(np.argmax(logits))]
        for i in range(new_tokens - 1):
            step = np.array([[tokens[-1] if forced is None else forced[i]]])
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
