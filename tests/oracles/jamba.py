"""Jamba in float64."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from oracles.attention import attend
from oracles.model import Model
from oracles.moe import expert, mixture, route
from oracles.nn import ACTIVATIONS, conv, rms_norm, silu, softplus


class Oracle(Model):
    """A whole Jamba (arXiv:2403.19887, section 2) in float64, from canonical parameters.

    `cfg` has the fields of the Hugging Face config as attributes. The state maps `layers.<i>.conv`
    [K-1, C] and `layers.<i>.ssm` [C, N] of Mamba layers, `layers.<i>.k` and `layers.<i>.v`
    [G, positions, D] of attention layers; it is replaced, never written into.
    """

    def attends(self, i: int) -> bool:
        """Whether layer i is attention."""
        return i % self.cfg.attn_layer_period == self.cfg.attn_layer_offset

    def is_sparse(self, i: int) -> bool:
        """Whether layer i's FFN is a mixture of experts; one expert is a plain FFN."""
        cfg = self.cfg
        return cfg.num_experts > 1 and i % cfg.expert_layer_period == cfg.expert_layer_offset

    def zero_state(self) -> dict[str, np.ndarray]:
        """The state before the first token."""
        cfg, state = self.cfg, {}
        inner = cfg.mamba_expand * cfg.hidden_size
        for i in range(cfg.num_hidden_layers):
            if self.attends(i):
                for name in ("k", "v"):
                    state[f"layers.{i}.{name}"] = np.zeros(
                        (cfg.num_key_value_heads, 0, cfg.head_dim)
                    )
            else:
                state[f"layers.{i}.conv"] = np.zeros((cfg.mamba_d_conv - 1, inner))
                state[f"layers.{i}.ssm"] = np.zeros((inner, cfg.mamba_d_state))
        return state

    def _mamba(self, i: int, x: np.ndarray, state: dict[str, np.ndarray]) -> np.ndarray:
        """Mamba (arXiv:2312.00752, algorithm 2), with RMS norms of dt, B and C before dt_proj."""
        cfg, p = self.cfg, self.under(f"layers.{i}.mamba.")
        N, eps = cfg.mamba_d_state, cfg.rms_norm_eps
        u, z = np.split(p["in_proj.weight"] @ x + p.get("in_proj.bias", 0.0), 2)
        rows, state[f"layers.{i}.conv"] = conv(
            u[None], p["conv1d.weight"], p.get("conv1d.bias"), state[f"layers.{i}.conv"]
        )
        u = ACTIVATIONS[cfg.hidden_act](rows[0])
        maps = p["x_proj.weight"] @ u
        rank = maps.size - 2 * N
        dt = rms_norm(maps[:rank], p["dt_layernorm.weight"], eps)
        B = rms_norm(maps[rank : rank + N], p["b_layernorm.weight"], eps)
        C = rms_norm(maps[rank + N :], p["c_layernorm.weight"], eps)
        dt = softplus(p["dt_proj.weight"] @ dt + p["dt_proj.bias"])
        A, h = -np.exp(p["A_log"]), state[f"layers.{i}.ssm"]
        h = np.exp(dt[:, None] * A) * h + (dt * u)[:, None] * B[None, :]
        state[f"layers.{i}.ssm"] = h
        y = (h @ C + p["D"] * u) * silu(z)
        return p["out_proj.weight"] @ y + p.get("out_proj.bias", 0.0)

    def _attention(self, i: int, x: np.ndarray, state: dict[str, np.ndarray]) -> np.ndarray:
        """Grouped-query attention without positions (arXiv:2403.19887, section 2)."""
        cfg, p = self.cfg, self.under(f"layers.{i}.self_attn.")
        head = cfg.head_dim
        q = (p["q_proj.weight"] @ x).reshape(cfg.num_attention_heads, head)
        for name in ("k", "v"):
            new = (p[f"{name}_proj.weight"] @ x).reshape(-1, 1, head)
            region = f"layers.{i}.{name}"
            state[region] = np.concatenate([state[region], new], axis=1)
        keys, values = (list(state[f"layers.{i}.{n}"].swapaxes(0, 1)) for n in ("k", "v"))
        return p["o_proj.weight"] @ attend(q, keys, values, head**-0.5).reshape(-1)

    def _feed_forward(self, i: int, x: np.ndarray) -> np.ndarray:
        """One FFN, or the chosen experts with the softmax over all of them as weights."""
        cfg, p = self.cfg, self.under(f"layers.{i}.feed_forward.")
        act = cfg.hidden_act
        if not self.is_sparse(i):
            up, down, gate = (p[f"{name}_proj.weight"] for name in ("up", "down", "gate"))
            return expert(x, up, down, gate, act)
        up, down, gate = (p[f"experts.{name}_proj.weight"] for name in ("up", "down", "gate"))
        return mixture(
            x, route(p["router.weight"] @ x, cfg.num_experts_per_tok), up, down, gate, act
        )

    def step(
        self, token: int, state: Mapping[str, np.ndarray]
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Logits [V] after `token`, and the state after it."""
        cfg, p, new = self.cfg, self.params, dict(state)
        eps, x = cfg.rms_norm_eps, p["embed_tokens.weight"][token]
        for i in range(cfg.num_hidden_layers):
            mixer = self._attention if self.attends(i) else self._mamba
            normed = rms_norm(x, p[f"layers.{i}.input_layernorm.weight"], eps)
            x = x + mixer(i, normed, new)
            normed = rms_norm(x, p[f"layers.{i}.pre_ff_layernorm.weight"], eps)
            x = x + self._feed_forward(i, normed)
        x = rms_norm(x, p["final_layernorm.weight"], eps)
        head = "embed_tokens.weight" if cfg.tie_word_embeddings else "lm_head.weight"
        return p[head] @ x, new
