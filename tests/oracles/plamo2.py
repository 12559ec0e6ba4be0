"""PLaMo 2 in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from oracles.model import Model
from oracles.nn import F64, conv, rms_norm, silu, softplus
from oracles.ssd import ssd

# What the model adds to its norms' weights, which are stored about zero.
OFFSETS = {
    "pre_mixer_norm": 1.0,
    "post_mixer_norm": 1.0 / 5.0,
    "pre_mlp_norm": 1.0,
    "post_mlp_norm": 1.0 / 5.0**1.5,
    "norm": 1.0,
}


def rotated(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    """RoPE of one head's vector in the half-split form (arXiv:2104.09864, eq. 34)."""
    half, out = x.size // 2, np.zeros_like(x)
    for i in range(half):
        angle = position * theta ** (-2.0 * i / x.size)
        c, s = math.cos(angle), math.sin(angle)
        out[i] = x[i] * c - x[half + i] * s
        out[half + i] = x[half + i] * c + x[i] * s
    return out


class Oracle(Model):
    """A whole PLaMo 2 in float64, from canonical parameters, one head at a time.

    `cfg` has the fields of the Hugging Face config as attributes. The state maps `layers.<i>.conv`
    [K-1, C] and `layers.<i>.ssm` [H, P, N] of Mamba layers, `layers.<i>.k` and `layers.<i>.v`
    [G, positions, D] of attention layers; it is replaced, never written into.
    """

    def is_mamba(self, i: int) -> bool:
        """Layers alternate; the attention layer of each `mamba_step` is its middle one."""
        layers, step = self.cfg.num_hidden_layers, self.cfg.mamba_step
        if not self.cfg.mamba_enabled:
            return False
        if layers <= step // 2:
            return i != layers - 1
        return i % step != step // 2

    def zero_state(self) -> dict[str, np.ndarray]:
        """The state before the first token."""
        cfg, state = self.cfg, {}
        heads, width = cfg.mamba_num_heads, cfg.hidden_size_per_head
        for i in range(cfg.num_hidden_layers):
            if self.is_mamba(i):
                state[f"layers.{i}.conv"] = np.zeros((cfg.mamba_d_conv - 1, heads * width))
                state[f"layers.{i}.ssm"] = np.zeros((heads, width, cfg.mamba_d_state))
            else:
                for name in ("k", "v"):
                    state[f"layers.{i}.{name}"] = np.zeros((cfg.num_key_value_heads, 0, width))
        return state

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        weight = self.params[f"{name}.weight"] + OFFSETS[name.rpartition(".")[2]]
        return rms_norm(x, weight, self.cfg.rms_norm_eps)

    def _mamba(self, i: int, x: np.ndarray, state: dict[str, np.ndarray]) -> np.ndarray:
        """Each head's part of in_proj is its gate, then its input; B, C and dt come from the
        convolution's output, each through a norm."""
        cfg, p = self.cfg, self.under(f"layers.{i}.mixer.")
        heads, width, maps = cfg.mamba_num_heads, cfg.hidden_size_per_head, cfg.mamba_d_state
        projected = (p["in_proj.weight"] @ x).reshape(heads, 2, width)
        z, u = projected[:, 0], projected[:, 1]
        rows, state[f"layers.{i}.conv"] = conv(
            u.reshape(1, -1), p["conv1d.weight"], None, state[f"layers.{i}.conv"]
        )
        u = silu(rows[0])
        B, C, dt = np.split(p["bcdt_proj.weight"] @ u, [maps, 2 * maps])
        B = rms_norm(B, p["B_norm_weight"], cfg.rms_norm_eps)
        C = rms_norm(C, p["C_norm_weight"], cfg.rms_norm_eps)
        dt = p["dt_proj.weight"] @ rms_norm(dt, p["dt_norm_weight"], cfg.rms_norm_eps)
        y, state[f"layers.{i}.ssm"] = ssd(
            u.reshape(1, heads, width),
            softplus(dt + p["dt_bias"])[None],
            -np.exp(p["A_log"]),
            B[None, None],
            C[None, None],
            p["D"],
            state[f"layers.{i}.ssm"],
        )
        return p["out_proj.weight"] @ (y[0] * silu(z)).reshape(-1)

    def _attention(self, i: int, x: np.ndarray, state: dict[str, np.ndarray]) -> np.ndarray:
        """Query head h reads key head h // (H / G), the last `attention_window_size` positions
        and its own."""
        cfg, p = self.cfg, self.under(f"layers.{i}.mixer.")
        heads, groups, width = (
            cfg.num_attention_heads,
            cfg.num_key_value_heads,
            cfg.hidden_size_per_head,
        )
        full = i in cfg.full_attention_idx
        theta = cfg.rope_theta if full else cfg.rope_local_theta
        qkv = (p["qkv_proj.weight"] @ x).reshape(heads + 2 * groups, width)
        q, k, v = np.split(qkv, [heads, heads + groups])
        position = state[f"layers.{i}.k"].shape[1]
        k = np.array(
            [
                rotated(rms_norm(k[g], p["k_weight"][g], 1e-6), position, theta)
                for g in range(groups)
            ]
        )
        keys = np.concatenate([state[f"layers.{i}.k"], k[:, None]], axis=1)
        values = np.concatenate([state[f"layers.{i}.v"], v[:, None]], axis=1)
        first = 0 if full else max(0, position - cfg.attention_window_size)
        y = np.zeros((heads, width), F64)
        for h in range(heads):
            g = h // (heads // groups)
            query = rotated(rms_norm(q[h], p["q_weight"][h], 1e-6), position, theta)
            scores = keys[g, first:] @ query / math.sqrt(width)
            weights = np.exp(scores - scores.max())
            y[h] = weights / weights.sum() @ values[g, first:]
        state[f"layers.{i}.k"], state[f"layers.{i}.v"] = keys, values
        return p["o_proj.weight"] @ y.reshape(-1)

    def step(
        self, token: int, state: Mapping[str, np.ndarray]
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Logits [V] after `token`, and the state after it."""
        cfg, new = self.cfg, dict(state)
        x = self.params["embed_tokens.weight"][token]
        for i in range(cfg.num_hidden_layers):
            base = f"layers.{i}."
            mixer = self._mamba if self.is_mamba(i) else self._attention
            y = mixer(i, self._norm(base + "pre_mixer_norm", x), new)
            x = x + self._norm(base + "post_mixer_norm", y)
            h, p = self._norm(base + "pre_mlp_norm", x), self.under(base + "mlp.")
            y = p["down_proj.weight"] @ (
                silu(p["gate_proj.weight"] @ h) * (p["up_proj.weight"] @ h)
            )
            x = x + self._norm(base + "post_mlp_norm", y)
        head = "embed_tokens.weight" if cfg.tie_word_embeddings else "lm_head.weight"
        return self.params[head] @ self._norm("norm", x), new
