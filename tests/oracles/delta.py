"""The gated delta rule in float64."""

from __future__ import annotations

import numpy as np

from oracles.nn import F64


def delta(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    beta: np.ndarray,
    state: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """S[t] = (I - beta k k^T) Diag(exp(g)) S[t-1] + beta k v^T, y = S^T q for each head.

    (arXiv:2412.06464, eq. 10; arXiv:2510.26692, eq. 1.) q and k [T, G, K], v [T, H, V],
    g [T, H, 1 or K], beta [T, H], state [H, K, V] -> (y like v, state). Head h reads the query and
    the key h // (H / G).
    """
    q, k, v, g, beta, S = (a.astype(F64) for a in (q, k, v, g, beta, state))
    shared = v.shape[1] // k.shape[1]
    y = np.zeros_like(v)
    for t in range(v.shape[0]):
        for h in range(v.shape[1]):
            key, rate = k[t, h // shared], beta[t, h]
            decayed = np.exp(g[t, h])[:, None] * S[h]
            erased = decayed - rate * np.outer(key, key @ decayed)
            S[h] = erased + rate * np.outer(key, v[t, h])
            y[t, h] = S[h].T @ q[t, h // shared]
    return y, S
