"""Nemotron-H in float64."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from oracles import mamba2, moe
from oracles.attention import attend
from oracles.model import Model
from oracles.nn import ACTIVATIONS, rms_norm


class Oracle(Model):
    """A whole Nemotron-H (arXiv:2504.03624) from canonical parameters.

    State: `layers.<i>.conv` and `.ssm` of Mamba2 layers, `layers.<i>.k` and `.v` [G, n, D] of
    attention layers, keys and values of the n tokens so far.
    """

    def zero_state(self) -> dict[str, np.ndarray]:
        """The state before the first token."""
        cfg, state = self.cfg, {}
        for i, kind in enumerate(cfg.layers_block_type):
            if kind == "mamba":
                found = mamba2.zero_state(cfg.mixer(i))
            elif kind == "attention":
                found = dict.fromkeys("kv", np.zeros((cfg.kv_heads, 0, cfg.head_dim)))
            else:
                found = {}
            state |= {f"layers.{i}.{name}": array for name, array in found.items()}
        return state

    def _attention(
        self, p: Mapping[str, np.ndarray], x: np.ndarray, state: Mapping[str, np.ndarray]
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        cfg = self.cfg
        q, k, v = ((p[f"{name}_proj.weight"] @ x).reshape(-1, 1, cfg.head_dim) for name in "qkv")
        keys, values = np.append(state["k"], k, axis=1), np.append(state["v"], v, axis=1)
        past = [list(each.swapaxes(0, 1)) for each in (keys, values)]
        y = attend(q[:, 0], *past, scale=cfg.head_dim**-0.5)
        return p["o_proj.weight"] @ y.reshape(-1), {"k": keys, "v": values}

    def _mlp(self, p: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
        hidden = p["up_proj.weight"] @ x + p.get("up_proj.bias", 0.0)
        hidden = ACTIVATIONS[self.cfg.mlp_hidden_act](hidden)
        return p["down_proj.weight"] @ hidden + p.get("down_proj.bias", 0.0)

    def _moe(self, p: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
        cfg = self.cfg
        chosen = moe.route(
            p["gate.weight"] @ x,
            cfg.num_experts_per_tok,
            "sigmoid",
            cfg.norm_topk_prob,
            cfg.routed_scaling_factor,
            cfg.n_group,
            cfg.topk_group,
            p["gate.e_score_correction_bias"],
        )
        inner = x
        if cfg.moe_latent_size:
            inner = p["fc1_latent_proj.weight"] @ x + p.get("fc1_latent_proj.bias", 0.0)
        up, down = p["experts.up_proj.weight"], p["experts.down_proj.weight"]
        y = moe.mixture(inner, chosen, up, down, None, cfg.mlp_hidden_act)
        if cfg.moe_latent_size:
            y = p["fc2_latent_proj.weight"] @ y + p.get("fc2_latent_proj.bias", 0.0)
        shared = {n.removeprefix("shared_experts."): a for n, a in p.items() if n[:7] == "shared_"}
        return y + self._mlp(shared, x)

    def step(
        self, token: int, state: Mapping[str, np.ndarray]
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Logits [V] after `token`, and the state after it."""
        cfg, new = self.cfg, dict(state)
        x = self.params["embeddings.weight"][token]
        for i, kind in enumerate(cfg.layers_block_type):
            at = f"layers.{i}."
            p, after = self.under(at + "mixer."), {}
            given = {n.removeprefix(at): a for n, a in state.items() if n.startswith(at)}
            normed = rms_norm(x, self.params[at + "norm.weight"], cfg.layer_norm_epsilon)
            if kind == "mamba":
                y, after = mamba2.mixer(cfg.mixer(i), p, normed, given)
            elif kind == "attention":
                y, after = self._attention(p, normed, given)
            else:
                y = self._mlp(p, normed) if kind == "mlp" else self._moe(p, normed)
            new |= {at + name: array for name, array in after.items()}
            x = x + y
        x = rms_norm(x, self.params["norm_f.weight"], cfg.layer_norm_epsilon)
        head = "embeddings.weight" if cfg.tie_word_embeddings else "lm_head.weight"
        return self.params[head] @ x, new
