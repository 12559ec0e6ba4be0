"""Mamba's recurrence in float64."""

from __future__ import annotations

import math

import numpy as np

from oracles.nn import F64


def selective_scan(
    x: np.ndarray,
    dt: np.ndarray,
    A: np.ndarray,
    B: np.ndarray,
    C: np.ndarray,
    D: np.ndarray,
    state: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """h[t] = exp(dt A) h[t-1] + dt B x, y = C h + D x for each channel (arXiv:2312.00752, eq. 2).

    x and dt [T, I], A [I, N], B and C [T, N], D [I], state [I, N] -> (y like x, state).
    """
    x, dt, A, B, C, D, h = (a.astype(F64) for a in (x, dt, A, B, C, D, state))
    y = np.zeros_like(x)
    for t in range(x.shape[0]):
        for i in range(x.shape[1]):
            decay = np.array([math.exp(dt[t, i] * rate) for rate in A[i]])
            h[i] = decay * h[i] + dt[t, i] * B[t] * x[t, i]
            y[t, i] = C[t] @ h[i] + D[i] * x[t, i]
    return y, h
