"""Falcon-H1 in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from oracles import mamba2
from oracles.attention import attend
from oracles.model import Model
from oracles.nn import ACTIVATIONS, rms_norm


def rotated(x: np.ndarray, position: int, frequencies: np.ndarray, factor: float) -> np.ndarray:
    """x [heads, D] turned by RoPE (arXiv:2104.09864, eq. 34), the pairs being (i, i + D/2)."""
    pairs = x[:, : len(frequencies)] + 1j * x[:, len(frequencies) :]
    turned = pairs * np.exp(1j * position * frequencies) * factor
    return np.concatenate([turned.real, turned.imag], axis=1)


class Oracle(Model):
    """A whole Falcon-H1 (arXiv:2507.22448) in float64, from canonical parameters.

    The state maps `layers.<i>.conv` [K-1, C], `layers.<i>.ssm` [H, P, N], `layers.<i>.k` and
    `layers.<i>.v` [G, positions, D].
    """

    def zero_state(self) -> dict[str, np.ndarray]:
        """The state before the first token."""
        cfg, state = self.cfg, {}
        for i in range(cfg.num_hidden_layers):
            for name, array in mamba2.zero_state(cfg.mixer).items():
                state[f"layers.{i}.{name}"] = array
            for name in ("k", "v"):
                state[f"layers.{i}.{name}"] = np.zeros((cfg.num_key_value_heads, 0, cfg.head_dim))
        return state

    def _attention(
        self, p: Mapping[str, np.ndarray], x: np.ndarray, state: Mapping[str, np.ndarray]
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        cfg = self.cfg

        def heads(name: str, count: int) -> np.ndarray:
            y = p[f"{name}.weight"] @ x + p.get(f"{name}.bias", 0.0)
            return y.reshape(count, cfg.head_dim)

        position = state["k"].shape[1]
        turn = (position, np.array(cfg.rope.frequencies), cfg.rope.factor)
        groups = cfg.num_key_value_heads
        k = rotated(heads("k_proj", groups) * cfg.key_multiplier, *turn)
        keys = np.concatenate([state["k"], k[:, None]], axis=1)
        values = np.concatenate([state["v"], heads("v_proj", groups)[:, None]], axis=1)
        q = rotated(heads("q_proj", cfg.num_attention_heads), *turn)
        past = (list(keys.swapaxes(0, 1)), list(values.swapaxes(0, 1)))
        y = attend(q, *past, cfg.head_dim**-0.5).reshape(-1)
        y = p["o_proj.weight"] @ y + p.get("o_proj.bias", 0.0)
        return y, {"k": keys, "v": values}

    def _mlp(self, p: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
        on_gate, on_down = self.cfg.mlp_multipliers or (1.0, 1.0)
        gate = p["gate_proj.weight"] @ x + p.get("gate_proj.bias", 0.0)
        up = p["up_proj.weight"] @ x + p.get("up_proj.bias", 0.0)
        y = up * ACTIVATIONS[self.cfg.hidden_act](gate * on_gate)
        return (p["down_proj.weight"] @ y + p.get("down_proj.bias", 0.0)) * on_down

    def step(self, token: int, state: Mapping[str, Any]) -> tuple[np.ndarray, dict[str, Any]]:
        """Logits [V] after `token`, and the state after it."""
        cfg, new = self.cfg, dict(state)
        x = self.params["embed_tokens.weight"][token] * cfg.embedding_multiplier
        for i in range(cfg.num_hidden_layers):
            at = f"layers.{i}."
            h = rms_norm(x, self.params[at + "input_layernorm.weight"], cfg.rms_norm_eps)
            own = {name: new[at + name] for name in ("conv", "ssm", "k", "v")}
            m, mixed = mamba2.mixer(
                cfg.mixer, self.under(at + "mamba."), h * cfg.ssm_in_multiplier, own
            )
            a, held = self._attention(
                self.under(at + "self_attn."), h * cfg.attention_in_multiplier, own
            )
            new |= {at + name: array for name, array in (mixed | held).items()}
            x = x + m * cfg.ssm_out_multiplier + a * cfg.attention_out_multiplier
            h = rms_norm(x, self.params[at + "pre_ff_layernorm.weight"], cfg.rms_norm_eps)
            x = x + self._mlp(self.under(at + "feed_forward."), h)
        x = rms_norm(x, self.params["final_layernorm.weight"], cfg.rms_norm_eps)
        head = "embed_tokens.weight" if cfg.tie_word_embeddings else "lm_head.weight"
        return self.params[head] @ x * cfg.lm_head_multiplier, new
