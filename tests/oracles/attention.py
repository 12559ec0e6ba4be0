"""Causal attention in float64, one token at a time over a growing list of keys."""

from __future__ import annotations

import math

import numpy as np

from oracles.nn import F64


def softmax(scores: np.ndarray) -> np.ndarray:
    """exp(s) over their sum."""
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def attend(
    q: np.ndarray,
    keys: list[np.ndarray],
    values: list[np.ndarray],
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> np.ndarray:
    """The output [H, D] of the last token: q [H, D], and keys and values [G, D] of all so far.

    arXiv:1706.03762, eq. 1, for each head; head h reads the keys of head h // (H / G). With a
    window only the last `window` tokens are seen, the token itself among them.
    """
    heads, groups = len(q), len(keys[0])
    keys, values = keys[-window:] if window else keys, values[-window:] if window else values
    y = np.zeros(q.shape)
    for h in range(heads):
        g = h // (heads // groups)
        scores = np.array([scale * float(q[h].astype(F64) @ k[g].astype(F64)) for k in keys])
        if softcap is not None:
            scores = softcap * np.array([math.tanh(s / softcap) for s in scores])
        for weight, v in zip(softmax(scores), values, strict=True):
            y[h] += weight * v[g].astype(F64)
    return y


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    past: tuple[np.ndarray, np.ndarray],
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> np.ndarray:
    """Outputs [T, H, D] of T tokens after `past`, the keys and values [P, G, D] before them."""
    keys, values, outputs = list(past[0]), list(past[1]), []
    for query, key, value in zip(q, k, v, strict=True):
        keys.append(key)
        values.append(value)
        outputs.append(attend(query, keys, values, scale, window, softcap))
    return np.array(outputs).reshape(q.shape)
