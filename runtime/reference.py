"""reference.json: what the oracle computed, for a device to be compared with (schema 1)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime import strict

SCHEMA = 1


@dataclass(frozen=True)
class Oracle:
    """Which implementation computed the reference."""

    name: str
    version: str


@dataclass(frozen=True)
class Prompt:
    """Greedy continuation of a prompt.

    `top_logits` holds, for each generated token, the largest logits as (id, logit), best first;
    `min_gap` is the smallest distance between the best two.
    """

    tokens: tuple[int, ...]
    generated: tuple[int, ...]
    top_logits: tuple[tuple[tuple[int, float], ...], ...]
    min_gap: float

    def __post_init__(self) -> None:
        if not self.tokens or not self.generated or len(self.generated) != len(self.top_logits):
            raise ValueError("tokens and generated, expected some, with one top_logits for each")
        if any(len(top) < 2 for top in self.top_logits):
            raise ValueError("top_logits, expected at least the best two of each token")


@dataclass(frozen=True)
class OutputSummary:
    """Summary of one output tensor of an entry (see runtime.probe)."""

    name: str
    samples: tuple[tuple[int, float], ...]
    projections: tuple[float, ...]
    norm: float
    scale: float


@dataclass(frozen=True)
class Sensitivity:
    """How far outputs moved, as a relative error, when small parameters moved by 2^-22."""

    logits: float
    state: float


@dataclass(frozen=True)
class Entries:
    """Outputs of every entry on inputs made from `seed`."""

    seed: int
    functions: dict[str, tuple[OutputSummary, ...]]
    sensitivity: dict[str, Sensitivity] | None = None

    def plain(self) -> dict[str, Any]:
        """As JSON objects."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Perplexity:
    """Rows of token ids, and the mean of -log p in nats that the source of the weights, before they
    were quantised, gives their tokens but the first of each."""

    rows: tuple[tuple[int, ...], ...]
    source_loss: float

    def __post_init__(self) -> None:
        if not self.rows or any(len(row) < 2 for row in self.rows):
            raise ValueError("rows, expected some, of at least two tokens each")


@dataclass(frozen=True)
class Reference:
    """The file."""

    schema: int
    oracle: Oracle
    prompts: tuple[Prompt, ...]
    entries: Entries | None
    perplexity: Perplexity | None = None

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise ValueError(f"schema {self.schema}, expected {SCHEMA}")


def load(path: Path, rebuild: str) -> Reference:
    """Read a reference.json. Raises UserError that ends with the command `rebuild`."""
    return strict.read(Reference, path, f"rebuild: {rebuild}")
