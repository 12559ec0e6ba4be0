"""Mamba2 in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from oracles.model import Model
from oracles.nn import ACTIVATIONS, conv, group_rms_norm, rms_norm, silu, softplus
from oracles.ssd import ssd


class Oracle(Model):
    """A whole Mamba2 (arXiv:2405.21060, figure 6) in float64, from canonical parameters.

    `cfg` has the fields of the Hugging Face config as attributes. `state` maps `layers.<i>.conv`
    [K-1, C] and `layers.<i>.ssm` [H, P, N]; it is replaced, never written into.
    """

    def __init__(self, cfg: Any, params: Mapping[str, np.ndarray]) -> None:
        super().__init__(cfg, params)
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
        p = self.under(f"layers.{i}.mixer.")
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
        y = group_rms_norm(y.reshape(inner) * silu(z), p["norm.weight"], cfg.n_groups, eps)
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
