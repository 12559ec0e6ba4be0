"""Multi-head attention with grouped keys, as a mixer: projections, positions and the KV region.

q, k, v = projections(x);  q, k = rope(norm(q)), rope(norm(k))
y = o_proj(attention(q, k, v))

(arXiv:1706.03762, section 3.2; see `ops.attention` and `ops.rope`.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from emit.blocks.block import Rows, State
from emit.errors import EmitError
from emit.forms import Form
from emit.ops import attention, nn, rope
from emit.state import StateSpec
from emit.weights import Param, matrix, vector


def places_for(context: int | None, positions: rope.Rope | None) -> int:
    """The context, of a model with `positions` or without.

    Raises EmitError without a context, and where positions do not reach that far.
    """
    if context is None:
        raise EmitError("attention needs a context: add -c and its tokens to the shape")
    limit = positions.limit if positions is not None else None
    if limit is not None and context > limit:
        raise EmitError(
            f"context {context}: this model's rope scaling changes with the length of the text "
            f"beyond {limit} tokens, which is not supported; build for a context up to that"
        )
    return context


@dataclass(frozen=True)
class Attention:
    """Sizes and variants of the mixer.

    `scale` multiplies the scores (head_dim^-1/2 where None), `key_multiplier` the projected keys.
    `rope` is None for a model without positions; `window` is how many tokens a query sees, itself
    among them. `bias` is that of q, k and v, `out_bias` that of the output. With `fused` the
    checkpoint has one projection `qkv_proj` of rows q, k, v. `qk_norm` takes the RMS norm of each
    head of q and k before the rotation, with a weight [head_dim] that all heads share (`shared`)
    or one for each head (`heads`); `norm_names` are those weights' names. With `gate` the output is
    multiplied by the sigmoid of a gate (arXiv:2505.06708, eq. 5): q_proj has twice the rows, those
    of each head's query followed by those of its gate.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float | None = None
    rope: rope.Rope | None = None
    window: int | None = None
    softcap: float | None = None
    bias: bool = False
    out_bias: bool = False
    fused: bool = False
    qk_norm: Literal["none", "shared", "heads"] = "none"
    norm_eps: float = 1e-6
    norm_offset: float = 0.0  # what the model adds to the norms' weights
    norm_names: tuple[str, str] = ("q_norm.weight", "k_norm.weight")
    key_multiplier: float = 1.0
    gate: bool = False

    @property
    def _widths(self) -> tuple[int, int, int]:
        keys = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim * (2 if self.gate else 1), keys, keys

    def params(self, name: str, source: str) -> list[Param]:
        """q_proj, k_proj and v_proj (or qkv_proj), o_proj, and the norms of q and k."""
        prefix, hidden = source.removesuffix(name), self.hidden_size
        sizes = dict(zip(("q_proj", "k_proj", "v_proj"), self._widths, strict=True))
        if self.fused:
            sizes = {"qkv_proj": sum(self._widths)}
        rows = [
            matrix(f"{name}{each}.weight", (size, hidden), f"{source}{each}.weight")
            for each, size in sizes.items()
        ]
        out = (hidden, self.num_heads * self.head_dim)
        rows.append(matrix(name + "o_proj.weight", out, source + "o_proj.weight"))
        if self.bias:
            rows += [vector(f"{name}{each}.bias", size, prefix) for each, size in sizes.items()]
        if self.out_bias:
            rows.append(vector(name + "o_proj.bias", hidden, prefix))
        if self.qk_norm != "none":
            heads = (self.num_heads, self.num_kv_heads)
            for each, count in zip(self.norm_names, heads, strict=True):
                shape = (count, self.head_dim) if self.qk_norm == "heads" else (self.head_dim,)
                offset = 1.0 - self.norm_offset
                forms = (Form((source + each,), shape),)
                rows.append(Param(name + each, shape, forms, offset=offset))
        return rows

    def state(self, context: int | None) -> list[StateSpec]:
        """Keys and values [1, G, C, D]; C is `context`, or the window where that is shorter.

        Raises EmitError without a context, and where positions do not reach that far.
        """
        context = places_for(context, self.rope)
        places = context if self.window is None else min(self.window, context)
        shape = (1, self.num_kv_heads, places, self.head_dim)
        return [StateSpec(each, shape, "f32", 0, "per_position") for each in ("k", "v")]

    def __call__(
        self, p: Mapping[str, Array], x: Array, rows: Rows, state: State
    ) -> tuple[Array, dict[str, Array]]:
        """x f32[B, T, hidden_size] -> (same, new state)."""
        B, T, _ = x.shape
        q, k, v = (part.reshape(B, T, -1, self.head_dim) for part in self._project(p, x))
        gate = None
        if self.gate:
            both = q.reshape(B, T, self.num_heads, 2, self.head_dim)
            q, gate = both[..., 0, :], both[..., 1, :]
        if self.key_multiplier != 1.0:
            k = k * self.key_multiplier
        if self.qk_norm != "none":
            q_weight, k_weight = (p[each] + self.norm_offset for each in self.norm_names)
            q = nn.rms_norm(q, q_weight, self.norm_eps)
            k = nn.rms_norm(k, k_weight, self.norm_eps)
        if self.rope is not None:
            cos, sin = rope.tables(self.rope, rows.positions, T)
            q, k = rope.rotate(q, cos, sin), rope.rotate(k, cos, sin)
        run = attention.step if T == 1 else attention.scan
        y, keys, values = run(
            q,
            k,
            v,
            rows.lengths,
            rows.positions,
            state["k"],
            state["v"],
            scale=self.head_dim**-0.5 if self.scale is None else self.scale,
            window=self.window,
            softcap=self.softcap,
        )
        if gate is not None:
            # Behind a barrier: fused into the product before it, vulkan computes it wrongly.
            y = jax.lax.optimization_barrier(y) * jax.nn.sigmoid(gate)
        y = nn.linear(y.reshape(B, T, -1), p["o_proj.weight"], p.get("o_proj.bias"))
        return y, {"k": keys, "v": values}

    def _project(self, p: Mapping[str, Array], x: Array) -> list[Array]:
        if self.fused:
            joined = nn.linear(x, p["qkv_proj.weight"], p.get("qkv_proj.bias"))
            q, k, _ = self._widths
            return jnp.split(joined, [q, q + k], axis=-1)
        return [
            nn.linear(x, p[f"{each}.weight"], p.get(f"{each}.bias"))
            for each in ("q_proj", "k_proj", "v_proj")
        ]
