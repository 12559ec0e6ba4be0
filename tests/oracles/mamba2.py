"""Mamba2 in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from oracles.model import Model
from oracles.nn import ACTIVATIONS, conv, group_rms_norm, rms_norm, silu, softplus
from oracles.ssd import ssd


def zero_state(m: Any) -> dict[str, np.ndarray]:
    """A mixer's state before the first token; `m` as for `mixer`."""
    inner = m.num_heads * m.head_dim
    return {
        "conv": np.zeros((m.conv_kernel - 1, inner + 2 * m.n_groups * m.state_size)),
        "ssm": np.zeros((m.num_heads, m.head_dim, m.state_size)),
    }


def mixer(
    m: Any, p: Mapping[str, np.ndarray], x: np.ndarray, state: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """One token through a Mamba2 mixer (arXiv:2405.21060, figure 6): x [D] -> (y [D], state).

    `m` has its sizes and variants as attributes; p its parameters by their checkpoint names.
    """
    inner, maps = m.num_heads * m.head_dim, m.n_groups * m.state_size
    projected = p["in_proj.weight"] @ x + p.get("in_proj.bias", 0.0)
    z, xs, B, C, dt = np.split(projected, np.cumsum([inner, inner, maps, maps]))
    if m.multipliers is not None:
        z, xs, B, C, dt = (
            part * by for part, by in zip((z, xs, B, C, dt), m.multipliers, strict=True)
        )
    xbc = np.concatenate([xs, B, C])
    rows, tail = conv(xbc[None], p["conv1d.weight"], p.get("conv1d.bias"), state["conv"])
    xs, B, C = np.split(ACTIVATIONS[m.activation](rows[0]), [inner, inner + maps])
    dt = np.clip(softplus(dt + p["dt_bias"]), *m.dt_limit)
    grouped = (1, m.n_groups, m.state_size)
    y, hidden = ssd(
        xs.reshape(1, m.num_heads, m.head_dim),
        dt[None],
        -np.exp(p["A_log"]),
        B.reshape(grouped),
        C.reshape(grouped),
        p["D"],
        state["ssm"],
    )
    y = y.reshape(inner)
    if m.norm == "gated":
        y = group_rms_norm(y * silu(z), p["norm.weight"], m.n_groups, m.eps)
    elif m.norm == "norm_first":
        y = group_rms_norm(y, p["norm.weight"], m.n_groups, m.eps) * silu(z)
    else:
        y = y * silu(z)
    y = p["out_proj.weight"] @ y + p.get("out_proj.bias", 0.0)
    return y, {"conv": tail, "ssm": hidden}


class Oracle(Model):
    """A whole Mamba2 in float64, from canonical parameters.

    `state` maps `layers.<i>.conv` [K-1, C] and `layers.<i>.ssm` [H, P, N].
    """

    def zero_state(self) -> dict[str, np.ndarray]:
        """The state before the first token."""
        each = zero_state(self.cfg.mixer)
        count = self.cfg.num_hidden_layers
        return {f"layers.{i}.{name}": array for i in range(count) for name, array in each.items()}

    def step(
        self, token: int, state: Mapping[str, np.ndarray]
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Logits [V] after `token`, and the state after it."""
        cfg, new = self.cfg, dict(state)
        x = self.params["embeddings.weight"][token]
        for i in range(cfg.num_hidden_layers):
            at = f"layers.{i}."
            given = {name: new[at + name] for name in ("conv", "ssm")}
            normed = rms_norm(x, self.params[at + "norm.weight"], cfg.layer_norm_epsilon)
            y, after = mixer(cfg.mixer, self.under(at + "mixer."), normed, given)
            new |= {at + name: array for name, array in after.items()}
            x = x + y
        x = rms_norm(x, self.params["norm_f.weight"], cfg.layer_norm_epsilon)
        head = "embeddings.weight" if cfg.tie_word_embeddings else "lm_head.weight"
        return self.params[head] @ x, new
