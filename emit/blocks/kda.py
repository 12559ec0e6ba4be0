"""Kimi Delta Attention, as a mixer (Kimi Linear, arXiv:2510.26692, section 4.1).

    q, k, v = act(conv(q_proj(x))), act(conv(k_proj(x))), act(conv(v_proj(x)))
    g = -exp(A_log) softplus(f_b_proj(f_a_proj(x)) + dt_bias),   beta = sigmoid(b_proj(x))
    y = o_proj(rms(delta(l2(q) K^-1/2, l2(k), v, g, beta)) sigmoid(g_b_proj(g_a_proj(x))))

with g one number for each channel of a head's key (see `ops.delta`), and the norm over each head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from emit.blocks.block import Rows, State
from emit.forms import Form, flat
from emit.ops import conv, delta, nn
from emit.state import StateSpec
from emit.weights import Param, kernel, matrix, vector

SCAN_CHUNK = 32  # 64 is a quarter more work on a CPU, 16 a fifth less in two fifths more kernels
PARTS = ("q", "k", "v")


@dataclass(frozen=True)
class Kda:
    """Sizes of the mixer: H heads, whose keys and values have `head_dim` channels each.

    Gates and decays pass through `head_dim` channels; `eps` is that of the norm.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    conv_kernel: int
    activation: str
    eps: float

    @property
    def inner(self) -> int:
        """Channels of q, of k and of v."""
        return self.num_heads * self.head_dim

    def params(self, name: str, source: str) -> list[Param]:
        """The projections, convolutions, A_log, dt_bias and o_norm, as checkpoints say."""
        hidden, inner, low = self.hidden_size, self.inner, self.head_dim
        prefix = source.removesuffix(name)
        sizes = {f"{part}_proj": (inner, hidden) for part in PARTS}
        sizes |= {"b_proj": (self.num_heads, hidden), "o_proj": (hidden, inner)}
        for gate in "fg":
            sizes |= {f"{gate}_a_proj": (low, hidden), f"{gate}_b_proj": (inner, low)}
        rows = [
            matrix(
                f"{name}{each}.weight",
                size,
                f"{source}{each}.weight",
                use="kept" if each[0] in "bfg" else "product",
            )
            for each, size in sizes.items()
        ]
        rows += [
            kernel(
                f"{name}{part}_conv1d.weight",
                self.conv_kernel,
                inner,
                f"{source}{part}_conv1d.weight",
                f"{source}{part}_conv.conv.weight",
            )
            for part in PARTS
        ]
        heads = (1, 1, self.num_heads, 1)
        rows += [
            Param(
                name + "A_log",
                (self.num_heads,),
                (Form((source + "A_log",), heads, flat),),
                offset=1.0,
                scale=0.7,
            ),
            vector(name + "dt_bias", inner, prefix, offset=-3.0, scale=1.0),
            vector(name + "o_norm.weight", low, prefix, offset=1.0),
        ]
        return rows

    def state(self, context: int | None) -> list[StateSpec]:
        """The convolutions' tail [1, K-1, 3 H D], q then k then v, and S [1, H, D, D]."""
        del context
        tail = (1, self.conv_kernel - 1, len(PARTS) * self.inner)
        hidden = (1, self.num_heads, self.head_dim, self.head_dim)
        return [
            StateSpec("conv", tail, "f32", 0, "fixed"),
            StateSpec("delta", hidden, "f32", 0, "fixed"),
        ]

    def __call__(
        self, p: Mapping[str, Array], x: Array, rows: Rows, state: State
    ) -> tuple[Array, dict[str, Array]]:
        """x f32[B, T, hidden_size] -> (same, new state)."""
        B, T, _ = x.shape
        heads = (B, T, self.num_heads, self.head_dim)
        joined = jnp.concatenate(
            [nn.linear(x, p[f"{part}_proj.weight"]) for part in PARTS], axis=-1
        )
        kernel = jnp.concatenate([p[f"{part}_conv1d.weight"] for part in PARTS], axis=-1)
        run_conv = conv.step if T == 1 else conv.scan
        joined, tail = run_conv(joined, rows.lengths, kernel, None, state["conv"])
        valid = rows.valid(T)[..., None]
        y, hidden = delta.mixer(
            nn.ACTIVATIONS[self.activation](joined),
            self._low_rank(p, x, "g"),
            jnp.where(valid[..., None], self._decay(p, x).reshape(heads), 0.0),
            jnp.where(valid, jax.nn.sigmoid(nn.linear(x, p["b_proj.weight"])), 0.0),
            p["o_norm.weight"],
            state["delta"],
            eps=self.eps,
            gate="sigmoid",
            chunk=SCAN_CHUNK,
        )
        return nn.linear(y, p["o_proj.weight"]), {"conv": tail, "delta": hidden}

    def _decay(self, p: Mapping[str, Array], x: Array) -> Array:
        """The log of each channel's decay, f32[B, T, H D], at most 0."""
        rate = jnp.repeat(jnp.exp(p["A_log"]), self.head_dim)
        return -rate * jax.nn.softplus(self._low_rank(p, x, "f") + p["dt_bias"])

    @staticmethod
    def _low_rank(p: Mapping[str, Array], x: Array, gate: str) -> Array:
        return nn.linear(nn.linear(x, p[f"{gate}_a_proj.weight"]), p[f"{gate}_b_proj.weight"])
