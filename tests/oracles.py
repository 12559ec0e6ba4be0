"""Float64 NumPy references, written from the papers' recurrences one token at a time.

Nothing here shares code or an algorithm with `emit/ops`: no chunks, no batches, no masks. One
sequence, loops over tokens, so that each line can be read against its equation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x²) + eps) * weight for one vector (arXiv:1910.07467, eq. 4)."""
    return x / math.sqrt(np.mean(x * x) + eps) * weight


def gated_group_rms_norm(
    x: np.ndarray, gate: np.ndarray, weight: np.ndarray, groups: int, eps: float
) -> np.ndarray:
    """RMSNorm of x * silu(gate), each of `groups` equal parts of the vector by itself."""
    gated = x.astype(F64) * silu(gate.astype(F64))
    width = x.size // groups
    parts = [slice(g * width, (g + 1) * width) for g in range(groups)]
    return np.concatenate([rms_norm(gated[s], weight[s].astype(F64), eps) for s in parts])


class Mamba2:
    """A whole Mamba2 (arXiv:2405.21060, figure 6) in float64, from canonical parameters.

    `cfg` has the fields of the Hugging Face config as attributes. `state` maps `layers.<i>.conv`
    [K-1, C] and `layers.<i>.ssm` [H, P, N]; it is replaced, never written into.
    """

    def __init__(self, cfg: Any, params: Mapping[str, np.ndarray]) -> None:
        self.cfg = cfg
        self.params = {name: np.asarray(p).astype(F64) for name, p in params.items()}
        self.inner = cfg.num_heads * cfg.head_dim
        self.maps = cfg.n_groups * cfg.state_size

    def zero_state(self) -> dict[str, np.ndarray]:
        """The state before the first token."""
        cfg, state = self.cfg, {}
        for i in range(cfg.num_hidden_layers):
            state[f"layers.{i}.conv"] = np.zeros((cfg.conv_kernel - 1, self.inner + 2 * self.maps))
            state[f"layers.{i}.ssm"] = np.zeros((cfg.num_heads, cfg.head_dim, cfg.state_size))
        return state

    def _mixer(
        self, i: int, x: np.ndarray, tail: np.ndarray, hidden: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        cfg, inner, maps = self.cfg, self.inner, self.maps
        prefix = f"layers.{i}.mixer."
        p = {n[len(prefix) :]: a for n, a in self.params.items() if n.startswith(prefix)}
        projected = p["in_proj.weight"] @ x + p.get("in_proj.bias", 0.0)
        z, xbc, dt = np.split(projected, [inner, 2 * inner + 2 * maps])
        rows, tail = conv(xbc[None], p["conv1d.weight"], p.get("conv1d.bias"), tail)
        xs, B, C = np.split(ACTIVATIONS[cfg.hidden_act](rows[0]), [inner, inner + maps])
        dt = np.clip(softplus(dt + p["dt_bias"]), *cfg.time_step_limit)
        grouped = (1, cfg.n_groups, cfg.state_size)
        y, hidden = ssd(
            xs.reshape(1, cfg.num_heads, cfg.head_dim),
            dt[None],
            -np.exp(p["A_log"]),
            B.reshape(grouped),
            C.reshape(grouped),
            p["D"],
            hidden,
        )
        eps = cfg.layer_norm_epsilon
        y = gated_group_rms_norm(y.reshape(inner), z, p["norm.weight"], cfg.n_groups, eps)
        return p["out_proj.weight"] @ y + p.get("out_proj.bias", 0.0), tail, hidden

    def step(
        self, token: int, state: Mapping[str, np.ndarray]
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Logits [V] after `token`, and the state after it."""
        cfg, new = self.cfg, dict(state)
        x = self.params["embeddings.weight"][token]
        for i in range(cfg.num_hidden_layers):
            tail, hidden = f"layers.{i}.conv", f"layers.{i}.ssm"
            normed = rms_norm(x, self.params[f"layers.{i}.norm.weight"], cfg.layer_norm_epsilon)
            y, new[tail], new[hidden] = self._mixer(i, normed, new[tail], new[hidden])
            x = x + y
        x = rms_norm(x, self.params["norm_f.weight"], cfg.layer_norm_epsilon)
        head = "embeddings.weight" if cfg.tie_word_embeddings else "lm_head.weight"
        return self.params[head] @ x, new

    def run(
        self, tokens: Sequence[int] | np.ndarray, state: Mapping[str, np.ndarray] | None = None
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Logits [T, V] after each of `tokens`, and the state after the last."""
        now = self.zero_state() if state is None else dict(state)
        rows = []
        for token in tokens:
            logits, now = self.step(int(token), now)
            rows.append(logits)
        return np.array(rows), now

    def greedy(self, prompt: Sequence[int], new_tokens: int) -> tuple[list[int], list[float]]:
        """The most likely continuation of `prompt`, and the top-1/top-2 gap before each token."""
        rows, state = self.run(prompt)
        logits, tokens, gaps = rows[-1], [], []
        for _ in range(new_tokens):
            second, first = np.sort(logits)[-2:]
            tokens.append(int(np.argmax(logits)))
            gaps.append(float(first - second))
            logits, state = self.step(tokens[-1], state)
        return tokens, gaps
