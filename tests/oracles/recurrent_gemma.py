"""RecurrentGemma in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from oracles.attention import attend
from oracles.model import Model
from oracles.nn import ACTIVATIONS, conv, rms_norm
from oracles.rglru import gate, rglru

ROOT = math.sqrt(2.0 / math.pi)
ACTS = {
    **ACTIVATIONS,
    "gelu_pytorch_tanh": lambda x: 0.5 * x * (1.0 + np.tanh(ROOT * (x + 0.044715 * x**3))),
}


def bfloat16(x: float) -> float:
    """The nearest number of 8 significant bits, ties to even."""
    fraction, exponent = math.frexp(x)
    return math.ldexp(round(fraction * 256.0), exponent - 8)


class Oracle(Model):
    """A whole RecurrentGemma (arXiv:2402.19427, section 2) in float64, from canonical parameters.

    `cfg` has the fields of the Hugging Face config as attributes, and `rope`. The state maps
    `layers.<i>.conv` [K-1, W] and `layers.<i>.lru` [W] of recurrent layers, `layers.<i>.k` and
    `layers.<i>.v` [G, positions, D] of attention layers; it is replaced, never written into.
    """

    def attends(self, i: int) -> bool:
        """Whether layer i is attention."""
        kinds = self.cfg.block_types
        return kinds[i % len(kinds)] == "attention"

    def position(self, state: Mapping[str, np.ndarray]) -> int:
        """How many tokens are in `state`; without attention, 0 if none is and else 1."""
        for i in range(self.cfg.num_hidden_layers):
            if self.attends(i):
                return state[f"layers.{i}.k"].shape[1]
        return int(any(array.any() for array in state.values()))

    def zero_state(self) -> dict[str, np.ndarray]:
        """The state before the first token."""
        cfg, state = self.cfg, {}
        for i in range(cfg.num_hidden_layers):
            if self.attends(i):
                for name in ("k", "v"):
                    state[f"layers.{i}.{name}"] = np.zeros(
                        (cfg.num_key_value_heads, 0, cfg.head_dim)
                    )
            else:
                state[f"layers.{i}.conv"] = np.zeros((cfg.conv1d_width - 1, cfg.lru_width))
                state[f"layers.{i}.lru"] = np.zeros(cfg.lru_width)
        return state

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        return rms_norm(x, 1.0 + self.params[f"{name}.weight"], self.cfg.rms_norm_eps)

    def _recurrent(
        self, i: int, x: np.ndarray, position: int, state: dict[str, np.ndarray]
    ) -> np.ndarray:
        """A gated branch, and one of a convolution and the RG-LRU (figure 2c)."""
        p, at = self.under(f"layers.{i}.temporal_block."), f"layers.{i}."
        branch = ACTS[self.cfg.hidden_activation](p["linear_y.weight"] @ x + p["linear_y.bias"])
        u = p["linear_x.weight"] @ x + p["linear_x.bias"]
        rows, state[at + "conv"] = conv(
            u[None], p["conv_1d.weight"], p["conv_1d.bias"], state[at + "conv"]
        )
        r, g = (
            gate(rows[0], p[f"rg_lru.{name}_gate_weight"], p[f"rg_lru.{name}_gate_bias"])
            for name in ("recurrent", "input")
        )
        y, state[at + "lru"] = rglru(
            rows, r[None], g[None], p["rg_lru.rate"], state[at + "lru"], position
        )
        return p["linear_out.weight"] @ (branch * y[0]) + p["linear_out.bias"]

    def _rotated(self, x: np.ndarray, position: int) -> np.ndarray:
        """RoPE (arXiv:2104.09864, eq. 34) of the first part of each head [H, D], in halves."""
        out, half = x.copy(), len(self.cfg.rope.frequencies)
        for i, frequency in enumerate(self.cfg.rope.frequencies):
            c, s = math.cos(position * frequency), math.sin(position * frequency)
            out[:, i] = x[:, i] * c - x[:, half + i] * s
            out[:, half + i] = x[:, half + i] * c + x[:, i] * s
        return out

    def _attention(
        self, i: int, x: np.ndarray, position: int, state: dict[str, np.ndarray]
    ) -> np.ndarray:
        """Grouped-query attention over the last `attention_window_size` tokens."""
        cfg, p = self.cfg, self.under(f"layers.{i}.temporal_block.")
        q, k, v = (
            (p[f"{n}_proj.weight"] @ x + p.get(f"{n}_proj.bias", 0.0)).reshape(-1, cfg.head_dim)
            for n in "qkv"
        )
        q, k = self._rotated(q, position), self._rotated(k, position)
        for name, new in (("k", k), ("v", v)):
            region = f"layers.{i}.{name}"
            state[region] = np.concatenate([state[region], new[:, None]], axis=1)
        keys, values = (list(state[f"layers.{i}.{n}"].swapaxes(0, 1)) for n in ("k", "v"))
        y = attend(q, keys, values, cfg.head_dim**-0.5, cfg.attention_window_size)
        return p["o_proj.weight"] @ y.reshape(-1) + p["o_proj.bias"]

    def _mlp(self, i: int, x: np.ndarray) -> np.ndarray:
        p = self.under(f"layers.{i}.mlp_block.")
        up, wide = (
            p[f"{name}_proj.weight"] @ x + p[f"{name}_proj.bias"] for name in ("up", "gate")
        )
        hidden = ACTS[self.cfg.hidden_activation](wide) * up
        return p["down_proj.weight"] @ hidden + p["down_proj.bias"]

    def step(
        self, token: int, state: Mapping[str, np.ndarray]
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Logits [V] after `token`, and the state after it."""
        cfg, p, new, position = self.cfg, self.params, dict(state), self.position(state)
        x = p["embed_tokens.weight"][token] * bfloat16(math.sqrt(cfg.hidden_size))
        for i in range(cfg.num_hidden_layers):
            mixer = self._attention if self.attends(i) else self._recurrent
            x = x + mixer(i, self._norm(f"layers.{i}.temporal_pre_norm", x), position, new)
            x = x + self._mlp(i, self._norm(f"layers.{i}.channel_pre_norm", x))
        head = "embed_tokens.weight" if cfg.tie_word_embeddings else "lm_head.weight"
        logits = p[head] @ self._norm("final_norm", x)
        return cfg.logits_soft_cap * np.tanh(logits / cfg.logits_soft_cap), new
