"""Mixture of experts in float64: one token, loops over experts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oracles.nn import ACTIVATIONS, F64


def softmax(x: np.ndarray) -> np.ndarray:
    """e^x over its sum, without overflow."""
    e = np.exp(x - x.max())
    return e / e.sum()


def best(values: Sequence[float], count: int, among: Sequence[int] | None = None) -> list[int]:
    """Positions of the `count` largest of `values` (`among` these), the lower one where two tie."""
    places = range(len(values)) if among is None else among
    return sorted(places, key=lambda i: (-values[i], i))[:count]


def route(
    logits: np.ndarray,
    top_k: int,
    score: str = "softmax",
    normalize: bool = False,
    scale: float = 1.0,
    groups: int = 1,
    groups_kept: int = 1,
    bias: np.ndarray | None = None,
) -> dict[int, float]:
    """Expert → weight for one token, from its router logits [E].

    `softmax`: arXiv:2101.03961, eq. 1; `chosen` (softmax over the chosen): arXiv:1701.06538, eq. 3
    and 5; `sigmoid` with a correction bias, groups and a scaling factor: arXiv:2412.19437, eq. 12
    to 16 and section 2.1.2.
    """
    logits = logits.astype(F64)
    if score == "softmax":
        scores = softmax(logits)
    else:
        scores = 1.0 / (1.0 + np.exp(-logits)) if score == "sigmoid" else logits
    choice = list(scores if bias is None else scores + bias)
    size = len(choice) // groups
    members = [range(g * size, (g + 1) * size) for g in range(groups)]
    if groups > 1:
        worth = [sum(choice[e] for e in best(choice, 2, each)) for each in members]
        members = [members[g] for g in best(worth, groups_kept)]
    chosen = best(choice, top_k, [e for each in members for e in each])
    if score == "chosen":
        weights = dict(zip(chosen, softmax(logits[chosen]), strict=True))
    else:
        weights = {e: float(scores[e]) for e in chosen}
    if normalize:
        total = sum(weights.values())
        weights = {e: w / total for e, w in weights.items()}
    return {e: w * scale for e, w in weights.items()}


def expert(
    x: np.ndarray, up: np.ndarray, down: np.ndarray, gate: np.ndarray | None, activation: str
) -> np.ndarray:
    """down(act(gate x) * (up x)), or down(act(up x)): x [D], up and gate [F, D], down [D, F]."""
    act = ACTIVATIONS[activation]
    hidden = up.astype(F64) @ x
    hidden = act(hidden) if gate is None else act(gate.astype(F64) @ x) * hidden
    return down.astype(F64) @ hidden


def mixture(
    x: np.ndarray,
    weights: dict[int, float],
    up: np.ndarray,
    down: np.ndarray,
    gate: np.ndarray | None,
    activation: str,
) -> np.ndarray:
    """The weighted sum of the chosen experts' outputs for one token; stacks are [E, ...]."""
    y = np.zeros(x.shape, F64)
    for e, w in weights.items():
        y = y + w * expert(x, up[e], down[e], None if gate is None else gate[e], activation)
    return y
