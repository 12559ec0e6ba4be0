"""RWKV-7's two blocks (Peng et al., "RWKV-7 Goose", arXiv:2503.14456, section 4 and figure 1).

Both look at each token x beside the one before it, x': lerp(m) is x + (x' - x) m, with an m of its
own for each use.

Time mixing, with k, v and r projections of such mixtures and two-layer ("LoRA") functions of
others for the decay w, the learning rate a, the value residual and the gate g:

    kappa = k k_k of length 1 in each head;    k = k (1 + (a - 1) k_a)
    v = v + (v_first - v) sigmoid(lora_v)    in all layers but the first, whose v is v_first
    S = S (diag(w) - kappa (a kappa)^T) + v k^T
    y = o_proj(g (group_norm(S r) + (sum of r k r_k) v))

Channel mixing: y = value(relu(key(lerp(x_k)))²).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from emit.blocks.block import Rows, State
from emit.forms import Form, flat
from emit.ops import nn, shift, wkv7
from emit.state import StateSpec
from emit.weights import Param, matrix, vector

SCAN_CHUNK = 32
DECAY = -math.exp(-0.5)  # what the logarithm of a decay is at least


@dataclass(frozen=True)
class TimeMix:
    """Sizes of a layer. `v_rank` is None in the first one, `group_eps` the group norm's epsilon."""

    hidden_size: int
    num_heads: int
    head_dim: int
    decay_rank: int
    a_rank: int
    gate_rank: int
    v_rank: int | None
    group_eps: float

    @property
    def inner(self) -> int:
        """Channels of r, k, v and y."""
        return self.num_heads * self.head_dim

    def params(self, name: str, source: str) -> list[Param]:
        """Mixtures x_*, projections, low-rank functions and the group norm."""
        D, A, prefix = self.hidden_size, self.inner, source.removesuffix(name)
        mixed = [f"x_{each}" for each in "rwkvag"]
        rows = [
            Param(name + x, (D,), (Form((source + x,), (1, 1, D), flat),), offset=0.5, scale=0.2)
            for x in mixed
        ]
        heads = (self.num_heads, self.head_dim)
        for each in ("k_k", "k_a"):
            rows.append(self._by_head(name, source, each, offset=1.0, scale=0.1))
        rows.append(Param(f"{name}r_k", heads, (Form((f"{source}r_k",), heads),), scale=0.1))
        for each, shape in (("r", (A, D)), ("k", (A, D)), ("v", (A, D)), ("o", (D, A))):
            rows.append(matrix(f"{name}{each}_proj.weight", shape, f"{source}{each}_proj.weight"))
        ranks = {"w": self.decay_rank, "a": self.a_rank, "g": self.gate_rank}
        if self.v_rank is not None:
            ranks["v"] = self.v_rank
        for each, rank in ranks.items():
            lora = f"{each}_lora.lora."
            for layer, shape in (("0.weight", (rank, D)), ("2.weight", (A, rank))):
                rows.append(matrix(name + lora + layer, shape, source + lora + layer, use="kept"))
            if each != "g":
                rows.append(vector(f"{name}{lora}2.bias", A, prefix, offset=-1.0, scale=1.0))
        rows.append(self._by_head(name, source, "g_norm.weight", offset=1.0))
        rows.append(self._by_head(name, source, "g_norm.bias"))
        return rows

    def _by_head(
        self, name: str, source: str, which: str, offset: float = 0.0, scale: float = 0.02
    ) -> Param:
        """A vector, which MLX holds as [heads, channels of a head]."""
        names, size = (source + which,), (self.inner,)
        forms = (Form(names, size), Form(names, (self.num_heads, self.head_dim), flat))
        return Param(name + which, size, forms, offset=offset, scale=scale)

    def state(self, context: int | None) -> list[StateSpec]:
        """The last token, and S of every head."""
        del context
        S = (1, self.num_heads, self.head_dim, self.head_dim)
        return [
            StateSpec("attn_shift", (1, self.hidden_size), "f32", 0, "fixed"),
            StateSpec("wkv", S, "f32", 0, "fixed"),
        ]

    def __call__(
        self, p: Mapping[str, Array], x: Array, rows: Rows, state: State, v_first: Array | None
    ) -> tuple[Array, Array, dict[str, Array]]:
        """x f32[B, T, hidden_size] -> (same, v_first f32[B, T, inner], new state).

        `v_first` is None for the first layer alone, which gives it.
        """
        T = x.shape[1]
        before, last = (shift.step if T == 1 else shift.scan)(x, rows.lengths, state["attn_shift"])
        to = before - x
        xr, xw, xk, xv, xa, xg = (x + to * p[f"x_{each}"] for each in "rwkvag")
        r, k, v = (
            nn.linear(of, p[f"{each}_proj.weight"])
            for of, each in ((xr, "r"), (xk, "k"), (xv, "v"))
        )
        log_w = DECAY * jax.nn.sigmoid(_lora(p, "w", xw, jnp.tanh))
        a = jax.nn.sigmoid(_lora(p, "a", xa))
        g = _lora(p, "g", xg, jax.nn.sigmoid)
        if v_first is None:
            v_first = v
        else:
            v = v + (v_first - v) * jax.nn.sigmoid(_lora(p, "v", xv))

        y, S = wkv7.mixer(
            r,
            log_w,
            k,
            v,
            a,
            g,
            p["k_k"],
            p["k_a"],
            p["r_k"],
            p["g_norm.weight"],
            p["g_norm.bias"],
            rows.lengths,
            state["wkv"],
            eps=self.group_eps,
            chunk=SCAN_CHUNK,
        )
        y = nn.linear(y, p["o_proj.weight"])
        return y, v_first, {"attn_shift": last, "wkv": S}


def _lora(
    p: Mapping[str, Array], name: str, x: Array, act: Callable[[Array], Array] = lambda x: x
) -> Array:
    hidden = act(nn.linear(x, p[f"{name}_lora.lora.0.weight"]))
    return nn.linear(hidden, p[f"{name}_lora.lora.2.weight"], p.get(f"{name}_lora.lora.2.bias"))


@dataclass(frozen=True)
class ChannelMix:
    """The feed-forward network."""

    hidden_size: int
    intermediate_size: int

    def params(self, name: str, source: str) -> list[Param]:
        """x_k, key and value."""
        D, wide, prefix = self.hidden_size, self.intermediate_size, source.removesuffix(name)
        return [
            vector(f"{name}x_k", D, prefix, offset=0.5, scale=0.2),
            matrix(f"{name}key.weight", (wide, D), f"{source}key.weight"),
            matrix(f"{name}value.weight", (D, wide), f"{source}value.weight"),
        ]

    def state(self, context: int | None) -> list[StateSpec]:
        """The last token."""
        del context
        return [StateSpec("ffn_shift", (1, self.hidden_size), "f32", 0, "fixed")]

    def __call__(
        self, p: Mapping[str, Array], x: Array, rows: Rows, state: State
    ) -> tuple[Array, dict[str, Array]]:
        """x f32[B, T, hidden_size] -> (same, new state)."""
        run = shift.step if x.shape[1] == 1 else shift.scan
        before, last = run(x, rows.lengths, state["ffn_shift"])
        hidden = nn.linear(x + (before - x) * p["x_k"], p["key.weight"])
        return nn.linear(jnp.square(jax.nn.relu(hidden)), p["value.weight"]), {"ffn_shift": last}
