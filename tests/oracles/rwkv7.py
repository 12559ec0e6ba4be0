"""RWKV-7 in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from oracles.model import Model
from oracles.wkv7 import wkv7


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^-x), without overflow."""
    return np.exp(-np.logaddexp(0.0, -x))


def layer_norm(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray | float, eps: float
) -> np.ndarray:
    """(x - mean) / sqrt(variance + eps) * weight + bias for one vector (arXiv:1607.06450)."""
    return (x - x.mean()) / math.sqrt(x.var() + eps) * weight + bias


class Oracle(Model):
    """A whole RWKV-7 (arXiv:2503.14456, section 4) in float64, from canonical parameters.

    `cfg` has the fields of the Hugging Face config as attributes. `state` maps
    `layers.<i>.attn_shift` and `layers.<i>.ffn_shift` [D] and `layers.<i>.wkv` [H, N, N]; it is
    replaced, never written into.
    """

    def zero_state(self) -> dict[str, np.ndarray]:
        """The state before the first token."""
        cfg, state = self.cfg, {}
        for i in range(cfg.num_hidden_layers):
            state[f"layers.{i}.attn_shift"] = np.zeros(cfg.hidden_size)
            state[f"layers.{i}.wkv"] = np.zeros((cfg.num_heads, cfg.head_dim, cfg.head_dim))
            state[f"layers.{i}.ffn_shift"] = np.zeros(cfg.hidden_size)
        return state

    def normed(self, name: str, x: np.ndarray) -> np.ndarray:
        """The layer norm called `name`."""
        bias = self.params.get(f"{name}.bias", 0.0)
        return layer_norm(x, self.params[f"{name}.weight"], bias, self.cfg.norm_eps)

    def step(
        self, token: int, state: Mapping[str, np.ndarray]
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Logits [V] after `token`, and the state after it."""
        cfg, new = self.cfg, dict(state)
        x = self.params["embeddings.weight"][token]
        v_first = None
        for i in range(cfg.num_hidden_layers):
            at = f"layers.{i}."
            if i == 0 and cfg.norm_first:
                x = self.normed(f"{at}pre_norm", x)
            now = self.normed(f"{at}attn_norm", x)
            y, v_first, new[f"{at}wkv"] = self.time_mix(
                self.under(f"{at}attn."), now, state[f"{at}attn_shift"], state[f"{at}wkv"], v_first
            )
            new[f"{at}attn_shift"], x = now, x + y
            now = self.normed(f"{at}ffn_norm", x)
            p = self.under(f"{at}ffn.")
            mixed = now + (state[f"{at}ffn_shift"] - now) * p["x_k"]
            x = x + p["value.weight"] @ np.maximum(p["key.weight"] @ mixed, 0.0) ** 2
            new[f"{at}ffn_shift"] = now
        head = "embeddings.weight" if cfg.tie_word_embeddings else "lm_head.weight"
        return self.params[head] @ self.normed("norm", x), new

    def time_mix(
        self,
        p: Mapping[str, np.ndarray],
        x: np.ndarray,
        previous: np.ndarray,
        S: np.ndarray,
        v_first: np.ndarray | None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """One layer's time mixing of one token: (y [D], v_first [H N], S)."""
        heads, size = self.cfg.num_heads, self.cfg.head_dim
        xr, xw, xk, xv, xa, xg = (x + (previous - x) * p[f"x_{each}"] for each in "rwkvag")
        r, k, v = p["r_proj.weight"] @ xr, p["k_proj.weight"] @ xk, p["v_proj.weight"] @ xv

        def lora(name: str, x: np.ndarray, act=lambda x: x) -> np.ndarray:
            down, up = (p[f"{name}_lora.lora.{layer}.weight"] for layer in (0, 2))
            return up @ act(down @ x) + p.get(f"{name}_lora.lora.2.bias", 0.0)

        w = np.exp(-math.exp(-0.5) * sigmoid(lora("w", xw, np.tanh)))
        a, g = sigmoid(lora("a", xa)), lora("g", xg, sigmoid)
        if v_first is None:
            v_first = v
        else:
            v = v + (v_first - v) * sigmoid(lora("v", xv))
        kappa = (k * p["k_k"]).reshape(heads, size)
        kappa = kappa / np.maximum(np.linalg.norm(kappa, axis=1, keepdims=True), 1e-12)
        k = k * (1.0 + (a - 1.0) * p["k_a"])
        r, w, k, v_, a = (each.reshape(heads, size) for each in (r, w, k, v, a))
        y, S = wkv7(r[None], w[None], k[None], v_[None], -kappa[None], (kappa * a)[None], S)
        out = []
        for h in range(heads):
            part = slice(h * size, (h + 1) * size)
            weight, bias = p["g_norm.weight"][part], p["g_norm.bias"][part]
            normed = layer_norm(y[0, h], weight, bias, size * self.cfg.norm_eps)
            out.append(normed + (r[h] * k[h] * p["r_k"][h]).sum() * v_[h])
        return p["o_proj.weight"] @ (np.concatenate(out) * g), v_first, S
