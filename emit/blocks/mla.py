"""Multi-head latent attention, as a mixer (DeepSeek-V2, arXiv:2405.04434, section 2.1 and app. C).

    [l ; r] = kv_a_proj_with_mqa(x)          keys and values come from norm(l) and r
    [n ; p] = q_proj(x)  or  q_b_proj(norm(q_a_proj(x)))                  for each head
    y = o_proj(attention)

See `ops.mla`: the cache holds norm(l) and r, and kv_b_proj is absorbed into the queries and the
output, as two parameters `embed_q` and `unembed_out`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from jax import Array

from emit.blocks.attention import places_for
from emit.blocks.block import Rows, State
from emit.forms import Form
from emit.ops import mla, nn, rope
from emit.state import StateSpec
from emit.weights import Param, matrix, vector


def rows_of_heads(tensor: np.ndarray, heads: int, part: slice, transpose: bool) -> np.ndarray:
    """Rows `part` of each head's [outputs, inputs] of a projection that has them one below another,
    as a stack of matrices, turned where `transpose`."""
    each = tensor.reshape(heads, -1, tensor.shape[1])[:, part]
    return each.swapaxes(1, 2) if transpose else each


@dataclass(frozen=True)
class Mla:
    """Sizes and variants of the mixer.

    A head's key has `nope_dim` elements of its own and `rope_dim` that all heads share; only these
    are rotated, and where `rope` is None nothing is. With `q_rank` the queries are made of as many
    channels, with a norm between. `bias` is that of q_a_proj, kv_a_proj_with_mqa and o_proj;
    `scale` multiplies the scores ((nope_dim + rope_dim)^-1/2 where None); `eps` is that of both
    norms.
    """

    hidden_size: int
    num_heads: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    q_rank: int | None = None
    eps: float = 1e-6
    bias: bool = False
    rope: rope.Rope | None = None
    scale: float | None = None

    @property
    def head_dim(self) -> int:
        """Elements of a query."""
        return self.nope_dim + self.rope_dim

    def params(self, name: str, source: str) -> list[Param]:
        """q_proj (or q_a_proj, its norm, q_b_proj), kv_a_proj_with_mqa, its norm, the two halves
        of kv_b_proj and o_proj."""
        prefix, hidden = source.removesuffix(name), self.hidden_size
        queries, joint = self.num_heads * self.head_dim, self.kv_rank + self.rope_dim
        sizes = {"q_proj": (queries, hidden)}
        norms = {"kv_a_layernorm": self.kv_rank}
        if self.q_rank is not None:
            sizes = {"q_a_proj": (self.q_rank, hidden), "q_b_proj": (queries, self.q_rank)}
            norms = {"q_a_layernorm": self.q_rank, **norms}
        sizes["kv_a_proj_with_mqa"] = (joint, hidden)
        sizes["o_proj"] = (hidden, self.num_heads * self.value_dim)
        rows = [
            matrix(f"{name}{each}.weight", size, f"{source}{each}.weight")
            for each, size in sizes.items()
        ]
        rows += [
            vector(f"{name}{each}.weight", size, prefix, offset=1.0) for each, size in norms.items()
        ]
        rows += [
            self._half(name, source, "embed_q", slice(0, self.nope_dim), transpose=True),
            self._half(name, source, "unembed_out", slice(self.nope_dim, None)),
        ]
        if self.bias:
            rows += [
                vector(f"{name}{each}.bias", size[0], prefix)
                for each, size in sizes.items()
                if each not in ("q_proj", "q_b_proj")
            ]
        return rows

    def _half(
        self, name: str, source: str, which: str, part: slice, transpose: bool = False
    ) -> Param:
        """The keys' or the values' rows of kv_b_proj, a matrix [outputs, inputs] for each head.

        MLX has them apart, as here.
        """
        width = self.nope_dim + self.value_dim
        rows = len(range(*part.indices(width)))
        shape = (self.kv_rank, rows) if transpose else (rows, self.kv_rank)
        joint = Form(
            (source + "kv_b_proj.weight",),
            (self.num_heads * width, self.kv_rank),
            partial(rows_of_heads, heads=self.num_heads, part=part, transpose=transpose),
            rows=not transpose,
        )
        size = (self.num_heads, *shape)
        forms = (joint, Form((f"{source}{which}.weight",), size))
        scale = self.kv_rank**-0.5
        return Param(f"{name}{which}.weight", size, forms, matrix=True, scale=scale, use="kept")

    def state(self, context: int | None) -> list[StateSpec]:
        """The latents and shared keys [1, 1, C, R + P] of a `context` of C tokens.

        Raises EmitError without a context, and where positions do not reach that far.
        """
        shape = (1, 1, places_for(context, self.rope), self.kv_rank + self.rope_dim)
        return [StateSpec("latent", shape, "f32", 0, "per_position")]

    def __call__(
        self, p: Mapping[str, Array], x: Array, rows: Rows, state: State
    ) -> tuple[Array, dict[str, Array]]:
        """x f32[B, T, hidden_size] -> (same, new state)."""
        B, T, _ = x.shape
        q = self._queries(p, x).reshape(B, T, self.num_heads, self.head_dim)
        own, turned = q[..., : self.nope_dim], q[..., self.nope_dim :]
        joint = nn.linear(x, p["kv_a_proj_with_mqa.weight"], p.get("kv_a_proj_with_mqa.bias"))
        latent, shared = joint[..., : self.kv_rank], joint[..., self.kv_rank :]
        latent = nn.rms_norm(latent, p["kv_a_layernorm.weight"], self.eps)
        if self.rope is not None:
            cos, sin = rope.tables(self.rope, rows.positions, T)
            turned = rope.rotate(turned, cos, sin)
            shared = rope.rotate(shared[:, :, None], cos, sin)[:, :, 0]
        run = mla.step if T == 1 else mla.scan
        y, region = run(
            own,
            turned,
            latent,
            shared,
            p["embed_q.weight"],
            p["unembed_out.weight"],
            rows.lengths,
            rows.positions,
            state["latent"],
            scale=self.head_dim**-0.5 if self.scale is None else self.scale,
        )
        y = nn.linear(y.reshape(B, T, -1), p["o_proj.weight"], p.get("o_proj.bias"))
        return y, {"latent": region}

    def _queries(self, p: Mapping[str, Array], x: Array) -> Array:
        if self.q_rank is None:
            return nn.linear(x, p["q_proj.weight"])
        low = nn.linear(x, p["q_a_proj.weight"], p.get("q_a_proj.bias"))
        return nn.linear(
            nn.rms_norm(low, p["q_a_layernorm.weight"], self.eps), p["q_b_proj.weight"]
        )
