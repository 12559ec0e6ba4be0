"""Multi-head latent attention in float64, with keys and values made for every token."""

from __future__ import annotations

import numpy as np

from oracles.attention import softmax
from oracles.nn import F64


def attend(
    q: np.ndarray, past: np.ndarray, up_k: np.ndarray, up_v: np.ndarray, scale: float
) -> np.ndarray:
    """The output [H, V] of the last token (arXiv:2405.04434, eq. 9 to 11, 17 and 18).

    q [H, N + P]; past [n, R + P], the latents and shared keys of all tokens so far; up_k [H, R, N]
    and up_v [H, V, R].
    """
    rank = up_v.shape[2]
    q, past, up_k, up_v = (a.astype(F64) for a in (q, past, up_k, up_v))
    y = np.zeros(up_v.shape[:2])
    for h in range(len(q)):
        keys = [np.append(up_k[h].T @ row[:rank], row[rank:]) for row in past]
        values = [up_v[h] @ row[:rank] for row in past]
        weights = softmax(np.array([scale * float(q[h] @ key) for key in keys]))
        y[h] = sum(w * v for w, v in zip(weights, values, strict=True))
    return y


def attention(
    q: np.ndarray,
    rows: np.ndarray,
    past: np.ndarray,
    up_k: np.ndarray,
    up_v: np.ndarray,
    scale: float,
) -> np.ndarray:
    """Outputs [T, H, V] of T tokens of `rows` [T, R + P] after `past` [n, R + P]."""
    known = np.concatenate([past, rows])
    first = len(past)
    outputs = [
        attend(query, known[: first + t + 1], up_k, up_v, scale) for t, query in enumerate(q)
    ]
    return np.array(outputs).reshape(*q.shape[:2], up_v.shape[1])
