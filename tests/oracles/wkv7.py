"""RWKV-7's recurrence in float64."""

from __future__ import annotations

import numpy as np

from oracles.nn import F64


def wkv7(
    r: np.ndarray,
    w: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    state: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """S[t] = S[t-1] (diag(w) + a b^T) + v k^T, y = S r for each head (arXiv:2503.14456, section 4).

    r, k, a and b [T, H, K], w [T, H, K] the decays themselves, v [T, H, V], state [H, V, K] ->
    (y [T, H, V], state).
    """
    r, w, k, v, a, b, S = (x.astype(F64) for x in (r, w, k, v, a, b, state))
    y = np.zeros_like(v)
    for t in range(r.shape[0]):
        for h in range(r.shape[1]):
            transition = np.diag(w[t, h]) + np.outer(a[t, h], b[t, h])
            S[h] = S[h] @ transition + np.outer(v[t, h], k[t, h])
            y[t, h] = S[h] @ r[t, h]
    return y, S
