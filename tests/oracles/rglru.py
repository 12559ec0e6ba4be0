"""Griffin's RG-LRU in float64, one token at a time (arXiv:2402.19427, eq. 1 to 4)."""

from __future__ import annotations

import math

import numpy as np

from oracles.nn import F64


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^-x), without overflow."""
    return np.exp(-np.logaddexp(0.0, -x))


def gate(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """sigmoid(W x + b) of one token x [W]; weight [H, O, I] are the blocks of W."""
    heads, outputs, inputs = weight.shape
    y = np.zeros(heads * outputs)
    for h in range(heads):
        rows = slice(h * outputs, (h + 1) * outputs)
        y[rows] = weight[h].astype(F64) @ x[h * inputs : (h + 1) * inputs].astype(F64)
    return sigmoid(y + bias.astype(F64))


def rglru(
    x: np.ndarray,
    r: np.ndarray,
    i: np.ndarray,
    rate: np.ndarray,
    state: np.ndarray,
    position: int,
) -> tuple[np.ndarray, np.ndarray]:
    """x, r, i [T, W] of one sequence from `position`, state [W] -> (y [T, W], state).

    `rate` [W] is softplus of the parameter.
    """
    h, outputs = state.astype(F64), []
    for t in range(len(x)):
        log_a = -8.0 * r[t].astype(F64) * rate.astype(F64)
        inputs = i[t].astype(F64) * x[t].astype(F64)
        if position + t == 0:
            h = inputs
        else:
            kept = np.array([math.sqrt(-math.expm1(2.0 * value)) for value in log_a])
            h = np.exp(log_a) * h + kept * inputs
        outputs.append(h)
    return np.array(outputs).reshape(x.shape), h
