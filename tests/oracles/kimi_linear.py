"""Kimi Linear in float64."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from oracles import mla, moe
from oracles.delta import delta
from oracles.model import Model
from oracles.nn import ACTIVATIONS, conv, rms_norm, softplus


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^-x), without overflow."""
    return np.exp(-np.logaddexp(0.0, -x))


def unit(x: np.ndarray) -> np.ndarray:
    """Each row at length 1, but for the 1e-6 that the model adds under the root."""
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)


class Oracle(Model):
    """A whole Kimi Linear (arXiv:2510.26692) from canonical parameters.

    State: `layers.<i>.conv` [K-1, 3 H D] (q, k, v) and `layers.<i>.delta` [H, D, D] of delta
    attention, `layers.<i>.latent` [1, n, R + P] of latent attention: what is kept of the n tokens
    so far.
    """

    def zero_state(self) -> dict[str, np.ndarray]:
        """The state before the first token."""
        cfg, state = self.cfg, {}
        heads, size = cfg.linear_num_heads, cfg.linear_head_dim
        for i, kind in enumerate(cfg.layer_types):
            if kind == "full_attention":
                width = cfg.kv_lora_rank + cfg.qk_rope_head_dim
                state[f"layers.{i}.latent"] = np.zeros((1, 0, width))
            else:
                tail = (cfg.linear_conv_kernel_dim - 1, 3 * heads * size)
                state[f"layers.{i}.conv"] = np.zeros(tail)
                state[f"layers.{i}.delta"] = np.zeros((heads, size, size))
        return state

    def _delta(self, i: int, x: np.ndarray, state: dict[str, np.ndarray]) -> np.ndarray:
        """Kimi Delta Attention (section 4.1), its three convolutions as one of joined channels."""
        cfg, p = self.cfg, self.under(f"layers.{i}.self_attn.")
        heads, size, at = cfg.linear_num_heads, cfg.linear_head_dim, f"layers.{i}."
        projected = np.concatenate([p[f"{part}_proj.weight"] @ x for part in "qkv"])
        kernel = np.concatenate([p[f"{part}_conv1d.weight"] for part in "qkv"], axis=1)
        rows, state[at + "conv"] = conv(projected[None], kernel, None, state[at + "conv"])
        q, k, v = ACTIVATIONS[cfg.hidden_act](rows[0]).reshape(3, heads, size)
        low = p["f_b_proj.weight"] @ (p["f_a_proj.weight"] @ x) + p["dt_bias"]
        g = -np.exp(p["A_log"])[:, None] * softplus(low).reshape(heads, size)
        beta = sigmoid(p["b_proj.weight"] @ x)
        y, state[at + "delta"] = delta(
            unit(q)[None] / np.sqrt(size),
            unit(k)[None],
            v[None],
            g[None],
            beta[None],
            state[at + "delta"],
        )
        y = np.array([rms_norm(head, p["o_norm.weight"], cfg.rms_norm_eps) for head in y[0]])
        gate = sigmoid(p["g_b_proj.weight"] @ (p["g_a_proj.weight"] @ x))
        return p["o_proj.weight"] @ (y.reshape(-1) * gate)

    def _latent(self, i: int, x: np.ndarray, state: dict[str, np.ndarray]) -> np.ndarray:
        """Latent attention without positions (section 4.3); its norms' epsilon is fixed."""
        cfg, p = self.cfg, self.under(f"layers.{i}.self_attn.")
        if cfg.q_lora_rank is None:
            q = p["q_proj.weight"] @ x
        else:
            low = p["q_a_proj.weight"] @ x + p.get("q_a_proj.bias", 0.0)
            q = p["q_b_proj.weight"] @ rms_norm(low, p["q_a_layernorm.weight"], 1e-6)
        joint = p["kv_a_proj_with_mqa.weight"] @ x + p.get("kv_a_proj_with_mqa.bias", 0.0)
        latent, shared = joint[: cfg.kv_lora_rank], joint[cfg.kv_lora_rank :]
        latent = rms_norm(latent, p["kv_a_layernorm.weight"], 1e-6)
        known = state[f"layers.{i}.latent"]
        known = np.append(known, np.append(latent, shared)[None, None], axis=1)
        state[f"layers.{i}.latent"] = known
        y = mla.attend(
            q.reshape(cfg.num_attention_heads, -1),
            known[0],
            p["embed_q.weight"],
            p["unembed_out.weight"],
            (cfg.qk_nope_head_dim + cfg.qk_rope_head_dim) ** -0.5,
        )
        return p["o_proj.weight"] @ y.reshape(-1) + p.get("o_proj.bias", 0.0)

    def _feed_forward(self, i: int, x: np.ndarray) -> np.ndarray:
        cfg, act = self.cfg, self.cfg.hidden_act
        if cfg.mlp_layer_types[i] == "dense":
            return self._mlp(f"layers.{i}.mlp.", x)
        at = f"layers.{i}.block_sparse_moe."
        p = self.under(at)
        chosen = moe.route(
            p["gate.weight"] @ x,
            cfg.num_experts_per_token,
            "sigmoid",
            cfg.moe_renormalize,
            cfg.routed_scaling_factor,
            cfg.num_expert_group,
            cfg.topk_group,
            p["gate.e_score_correction_bias"],
        )
        gate, down, up = (p[f"experts.w{n}.weight"] for n in (1, 2, 3))
        y = moe.mixture(x, chosen, up, down, gate, act)
        return y + self._mlp(at + "shared_experts.", x) if cfg.num_shared_experts else y

    def _mlp(self, at: str, x: np.ndarray) -> np.ndarray:
        up, down, gate = (self.params[f"{at}{name}_proj.weight"] for name in ("up", "down", "gate"))
        return moe.expert(x, up, down, gate, self.cfg.hidden_act)

    def step(
        self, token: int, state: Mapping[str, np.ndarray]
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Logits [V] after `token`, and the state after it."""
        cfg, p, new = self.cfg, self.params, dict(state)
        eps, x = cfg.rms_norm_eps, p["embed_tokens.weight"][token]
        for i, kind in enumerate(cfg.layer_types):
            mixer = self._latent if kind == "full_attention" else self._delta
            x = x + mixer(i, rms_norm(x, p[f"layers.{i}.input_layernorm.weight"], eps), new)
            normed = rms_norm(x, p[f"layers.{i}.post_attention_layernorm.weight"], eps)
            x = x + self._feed_forward(i, normed)
        x = rms_norm(x, p["norm.weight"], eps)
        head = "embed_tokens.weight" if cfg.tie_word_embeddings else "lm_head.weight"
        return p[head] @ x, new
