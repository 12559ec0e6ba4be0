"""Qwen3-Next in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from oracles.attention import attend
from oracles.delta import delta
from oracles.falcon_h1 import rotated
from oracles.model import Model
from oracles.moe import expert, mixture, route
from oracles.nn import ACTIVATIONS, conv, rms_norm, silu, softplus

Params = Mapping[str, np.ndarray]


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^-x), without overflow."""
    return np.exp(-np.logaddexp(0.0, -x))


class Oracle(Model):
    """A whole Qwen3-Next in float64, from canonical parameters.

    The state maps `layers.<i>.conv` [K-1, C] and `layers.<i>.delta` [H, K, V] of Gated DeltaNet
    layers, `layers.<i>.k` and `layers.<i>.v` [G, positions, D] of attention layers.
    """

    def zero_state(self) -> dict[str, np.ndarray]:
        """The state before the first token."""
        cfg, state = self.cfg, {}
        K, V, heads = (
            cfg.linear_key_head_dim,
            cfg.linear_value_head_dim,
            cfg.linear_num_value_heads,
        )
        channels = 2 * cfg.linear_num_key_heads * K + heads * V
        for i, kind in enumerate(cfg.layer_types):
            at = f"layers.{i}."
            if kind == "full_attention":
                for name in ("k", "v"):
                    state[at + name] = np.zeros((cfg.num_key_value_heads, 0, cfg.head_dim))
            else:
                state[at + "conv"] = np.zeros((cfg.linear_conv_kernel_dim - 1, channels))
                state[at + "delta"] = np.zeros((heads, K, V))
        return state

    def _norm(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return rms_norm(x, 1.0 + weight, self.cfg.rms_norm_eps)

    def _projected(self, p: Params, x: np.ndarray) -> tuple[np.ndarray, ...]:
        """q, k and v together, z, b and a."""
        both = p["in_proj_qkvz.weight"] @ x
        values = self.cfg.linear_num_value_heads * self.cfg.linear_value_head_dim
        b, a = np.split(p["in_proj_ba.weight"] @ x, 2)
        return both[:-values], both[-values:], b, a

    def _delta(self, at: str, x: np.ndarray, state: dict[str, np.ndarray]) -> np.ndarray:
        """Gated DeltaNet (arXiv:2412.06464, figure 1), its norm before its gate."""
        cfg, p = self.cfg, self.under(at + "linear_attn.")
        qkv, z, b, a = self._projected(p, x)
        rows, state[at + "conv"] = conv(qkv[None], p["conv1d.weight"], None, state[at + "conv"])
        heads, K = cfg.linear_num_key_heads, cfg.linear_key_head_dim
        q, k, v = np.split(ACTIVATIONS[cfg.hidden_act](rows[0]), [heads * K, 2 * heads * K])
        q, k = (
            np.array([one / math.sqrt(one @ one + 1e-6) for one in each.reshape(heads, K)])
            for each in (q, k)
        )
        v = v.reshape(cfg.linear_num_value_heads, -1)
        g = -np.exp(p["A_log"]) * softplus(a + p["dt_bias"])
        rates, before = (g[None, :, None], sigmoid(b)[None]), state[at + "delta"]
        y, state[at + "delta"] = delta(q[None] / math.sqrt(K), k[None], v[None], *rates, before)
        normed = [rms_norm(head, p["norm.weight"], cfg.rms_norm_eps) for head in y[0]]
        return p["out_proj.weight"] @ (np.concatenate(normed) * silu(z))

    def _attention(self, at: str, x: np.ndarray, state: dict[str, np.ndarray]) -> np.ndarray:
        cfg, p = self.cfg, self.under(at + "self_attn.")

        def heads(name: str, count: int) -> np.ndarray:
            return (p[f"{name}.weight"] @ x + p.get(f"{name}.bias", 0.0)).reshape(count, -1)

        def turned(each: np.ndarray) -> np.ndarray:
            width, position = cfg.rope.rotary, state[at + "k"].shape[1]
            turns = (position, np.array(cfg.rope.frequencies), cfg.rope.factor)
            return np.concatenate([rotated(each[:, :width], *turns), each[:, width:]], axis=1)

        both = heads("q_proj", cfg.num_attention_heads)
        q, gate = both[:, : cfg.head_dim], both[:, cfg.head_dim :]
        q = turned(np.array([self._norm(head, p["q_norm.weight"]) for head in q]))
        k = heads("k_proj", cfg.num_key_value_heads)
        k = turned(np.array([self._norm(head, p["k_norm.weight"]) for head in k]))
        v = heads("v_proj", cfg.num_key_value_heads)
        for name, new in (("k", k), ("v", v)):
            state[at + name] = np.concatenate([state[at + name], new[:, None]], axis=1)
        keys, values = (list(state[at + name].swapaxes(0, 1)) for name in ("k", "v"))
        y = attend(q, keys, values, cfg.head_dim**-0.5) * sigmoid(gate)
        return p["o_proj.weight"] @ y.reshape(-1) + p.get("o_proj.bias", 0.0)

    def _feed_forward(self, at: str, x: np.ndarray) -> np.ndarray:
        """One FFN, or the chosen experts and the shared one."""
        cfg, p = self.cfg, self.under(at + "mlp.")
        act = cfg.hidden_act

        def stacks(name: str) -> tuple[np.ndarray, ...]:
            up, down, gate = (p[f"{name}{each}_proj.weight"] for each in ("up", "down", "gate"))
            return up, down, gate

        if "gate.weight" not in p:
            up, down, gate = stacks("")
            return expert(x, up, down, gate, act)
        scores = p["gate.weight"] @ x
        chosen = route(scores, cfg.num_experts_per_tok, normalize=cfg.norm_topk_prob)
        up, down, gate = stacks("experts.")
        y = mixture(x, chosen, up, down, gate, act)
        up, down, gate = stacks("shared_expert.")
        return y + sigmoid(p["shared_expert_gate.weight"] @ x) * expert(x, up, down, gate, act)

    def step(self, token: int, state: Mapping[str, Any]) -> tuple[np.ndarray, dict[str, Any]]:
        """Logits [V] after `token`, and the state after it."""
        cfg, p, new = self.cfg, self.params, dict(state)
        x = p["embed_tokens.weight"][token]
        for i, kind in enumerate(cfg.layer_types):
            at = f"layers.{i}."
            mixer = self._attention if kind == "full_attention" else self._delta
            x = x + mixer(at, self._norm(x, p[at + "input_layernorm.weight"]), new)
            x = x + self._feed_forward(at, self._norm(x, p[at + "post_attention_layernorm.weight"]))
        head = "embed_tokens.weight" if cfg.tie_word_embeddings else "lm_head.weight"
        return p[head] @ self._norm(x, p["norm.weight"]), new
