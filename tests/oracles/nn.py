"""Norms, activations and the causal convolution in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

F64 = np.float64


def silu(x: np.ndarray) -> np.ndarray:
    """x * sigmoid(x), without overflow."""
    return x * np.exp(-np.logaddexp(0.0, -x))


def softplus(x: np.ndarray) -> np.ndarray:
    """log(1 + e^x), without overflow."""
    return np.logaddexp(0.0, x)


ACTIVATIONS: dict[str, Any] = {
    "silu": silu,
    "relu": lambda x: np.maximum(x, 0.0),
    "relu2": lambda x: np.maximum(x, 0.0) ** 2,
    "gelu": lambda x: x * 0.5 * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0))),
}


def conv(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, tail: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Causal depthwise convolution: y[t, c] = bias[c] + sum_k weight[k, c] x[t - (K-1) + k, c].

    x [T, C], weight [K, C], tail [K-1, C] (the inputs before x, oldest first) -> (y [T, C], tail).
    """
    window = [row.astype(F64) for row in tail]
    outputs = []
    for row in x.astype(F64):
        window.append(row)
        y = sum(w.astype(F64) * u for w, u in zip(weight, window, strict=True))
        outputs.append(y if bias is None else y + bias.astype(F64))
        window.pop(0)
    return np.array(outputs).reshape(x.shape), np.array(window).reshape(tail.shape)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x²) + eps) * weight for one vector (arXiv:1910.07467, eq. 4)."""
    return x / math.sqrt(np.mean(x * x) + eps) * weight


def group_rms_norm(x: np.ndarray, weight: np.ndarray, groups: int, eps: float) -> np.ndarray:
    """RMSNorm of each of `groups` equal parts of one vector by itself."""
    x, weight = x.astype(F64), weight.astype(F64)
    width = x.size // groups
    parts = [slice(g * width, (g + 1) * width) for g in range(groups)]
    return np.concatenate([rms_norm(x[s], weight[s], eps) for s in parts])
