"""Mamba in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from oracles.model import Model
from oracles.nn import ACTIVATIONS, conv, rms_norm, silu, softplus
from oracles.selective_scan import selective_scan


def mixer(
    cfg: Any, p: Mapping[str, np.ndarray], x: np.ndarray, tail: np.ndarray, hidden: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The mixer of one layer on one token (arXiv:2312.00752, figure 3): (y, new tail, new state).

    `cfg` has intermediate_size, state_size, time_step_rank and hidden_act; `p` the layer's
    parameters. dt, B and C pass an RMS norm where `p` holds its weight ("dt_layernorm.weight" …)
    or cfg says `mixer_rms_eps`, then of eps `mixer_rms_eps`.
    """
    inner, rank, maps = cfg.intermediate_size, cfg.time_step_rank, cfg.state_size
    projected = p["in_proj.weight"] @ x + p.get("in_proj.bias", 0.0)
    u, z = projected[:inner], projected[inner:]
    rows, tail = conv(u[None], p["conv1d.weight"], p.get("conv1d.bias"), tail)
    u = ACTIVATIONS[cfg.hidden_act](rows[0])
    selected = p["x_proj.weight"] @ u
    dt, B, C = selected[:rank], selected[rank : rank + maps], selected[rank + maps :]
    eps = getattr(cfg, "mixer_rms_eps", None)
    if eps is not None:
        dt = rms_norm(dt, p.get("dt_layernorm.weight", np.ones(rank)), eps)
        B = rms_norm(B, p.get("b_layernorm.weight", np.ones(maps)), eps)
        C = rms_norm(C, p.get("c_layernorm.weight", np.ones(maps)), eps)
    dt = softplus(p["dt_proj.weight"] @ dt + p["dt_proj.bias"])
    A = -np.exp(p["A_log"])
    y, hidden = selective_scan(u[None], dt[None], A, B[None], C[None], p["D"], hidden)
    return p["out_proj.weight"] @ (y[0] * silu(z)) + p.get("out_proj.bias", 0.0), tail, hidden


class Oracle(Model):
    """A whole Mamba (arXiv:2312.00752, section 3.4) in float64, from canonical parameters.

    `cfg` has the fields of the Hugging Face config as attributes. `state` maps `layers.<i>.conv`
    [K-1, I] and `layers.<i>.ssm` [I, N]; it is replaced, never written into.
    """

    def zero_state(self) -> dict[str, np.ndarray]:
        """The state before the first token."""
        cfg, state = self.cfg, {}
        for i in range(cfg.num_hidden_layers):
            state[f"layers.{i}.conv"] = np.zeros((cfg.conv_kernel - 1, cfg.intermediate_size))
            state[f"layers.{i}.ssm"] = np.zeros((cfg.intermediate_size, cfg.state_size))
        return state

    def step(
        self, token: int, state: Mapping[str, np.ndarray]
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Logits [V] after `token`, and the state after it."""
        cfg, new = self.cfg, dict(state)
        x = self.params["embeddings.weight"][token]
        for i in range(cfg.num_hidden_layers):
            tail, hidden = f"layers.{i}.conv", f"layers.{i}.ssm"
            normed = rms_norm(x, self.params[f"layers.{i}.norm.weight"], cfg.layer_norm_epsilon)
            p = self.under(f"layers.{i}.mixer.")
            y, new[tail], new[hidden] = mixer(cfg, p, normed, new[tail], new[hidden])
            x = x + y
        x = rms_norm(x, self.params["norm_f.weight"], cfg.layer_norm_epsilon)
        head = "embeddings.weight" if cfg.tie_word_embeddings else "lm_head.weight"
        return self.params[head] @ x, new
