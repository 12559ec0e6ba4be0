"""Mamba2's recurrence in float64."""

from __future__ import annotations

import math

import numpy as np

from oracles.nn import F64


def ssd(
    x: np.ndarray,
    dt: np.ndarray,
    A: np.ndarray,
    B: np.ndarray,
    C: np.ndarray,
    D: np.ndarray,
    state: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """h[t] = exp(dt A) h[t-1] + dt x B^T, y = h C + D x for each head (arXiv:2405.21060, eq. 1).

    x [T, H, P], dt [T, H], A and D [H], B and C [T, G, N], state [H, P, N] -> (y like x, state).
    Head h reads group h // (H / G).
    """
    x, dt, A, B, C, D, h = (a.astype(F64) for a in (x, dt, A, B, C, D, state))
    heads_per_group = x.shape[1] // B.shape[1]
    y = np.zeros_like(x)
    for t in range(x.shape[0]):
        for head in range(x.shape[1]):
            g = head // heads_per_group
            decay = math.exp(dt[t, head] * A[head])
            h[head] = decay * h[head] + dt[t, head] * np.outer(x[t, head], B[t, g])
            y[t, head] = h[head] @ C[t, g] + D[head] * x[t, head]
    return y, h
