"""The Mamba2 mixer (Dao and Gu, "Transformers are SSMs", arXiv:2405.21060, figure 6).

z, xBC, dt = in_proj(x)
y = out_proj(norm(ssd(act(conv(xBC)), softplus(dt + dt_bias)) * silu(z)))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jax import Array

from emit.blocks.block import Rows, State
from emit.kernels import split
from emit.ops import conv, nn, norm, ssd
from emit.state import StateSpec
from emit.weights import Param, kernel, matrix, vector

SCAN_CHUNK = 64


@dataclass(frozen=True)
class Mamba2:
    """Sizes and variants of the mixer.

    `dt_limit` clamps the step size after softplus. `norm` says what follows the recurrence: the
    RMS norm of the gated output (`gated`), the gate after the norm (`norm_first`), or the gate
    alone (`none`); it is taken over each of `n_groups` parts. `multipliers` scale the parts z, x,
    B, C and dt of the projection. `bias` is that of both projections, unless `out_bias` says
    otherwise of the second.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    n_groups: int
    state_size: int
    conv_kernel: int
    activation: str
    eps: float
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    bias: bool = False
    conv_bias: bool = True
    norm: Literal["gated", "norm_first", "none"] = "gated"
    multipliers: tuple[float, float, float, float, float] | None = None
    out_bias: bool | None = None

    @property
    def inner(self) -> int:
        """Channels of x, z and y."""
        return self.num_heads * self.head_dim

    @property
    def maps(self) -> int:
        """Channels of B, and of C."""
        return self.n_groups * self.state_size

    @property
    def conv_dim(self) -> int:
        """Channels that pass through the convolution: x, B and C."""
        return self.inner + 2 * self.maps

    def params(self, name: str, source: str) -> list[Param]:
        """in_proj, conv1d, dt_bias, A_log, D, norm and out_proj, named as checkpoints have them."""
        width = self.inner + self.conv_dim + self.num_heads
        prefix = source.removesuffix(name)
        rows = [
            matrix(name + "in_proj.weight", (width, self.hidden_size), source + "in_proj.weight"),
            kernel(
                name + "conv1d.weight", self.conv_kernel, self.conv_dim, source + "conv1d.weight"
            ),
            vector(name + "dt_bias", self.num_heads, prefix, offset=-3.0, scale=1.0),
            vector(name + "A_log", self.num_heads, prefix, offset=1.0, scale=0.7),
            vector(name + "D", self.num_heads, prefix, offset=1.0),
            matrix(
                name + "out_proj.weight", (self.hidden_size, self.inner), source + "out_proj.weight"
            ),
        ]
        if self.norm != "none":
            rows.insert(5, vector(name + "norm.weight", self.inner, prefix, offset=1.0))
        if self.conv_bias:
            rows.append(vector(name + "conv1d.bias", self.conv_dim, prefix))
        if self.bias:
            rows.append(vector(name + "in_proj.bias", width, prefix))
        if self.bias if self.out_bias is None else self.out_bias:
            rows.append(vector(name + "out_proj.bias", self.hidden_size, prefix))
        return rows

    def state(self, context: int | None) -> list[StateSpec]:
        """The convolution tail [1, K-1, C] and the SSD state [1, H, P, N]."""
        del context
        tail = (1, self.conv_kernel - 1, self.conv_dim)
        hidden = (1, self.num_heads, self.head_dim, self.state_size)
        return [
            StateSpec("conv", tail, "f32", 0, "fixed"),
            StateSpec("ssm", hidden, "f32", 0, "fixed"),
        ]

    def __call__(
        self, p: Mapping[str, Array], x: Array, rows: Rows, state: State
    ) -> tuple[Array, dict[str, Array]]:
        """x f32[B, T, hidden_size] -> (same, new state)."""
        T = x.shape[1]
        inner, maps = self.inner, self.maps
        projected = nn.linear(x, p["in_proj.weight"], p.get("in_proj.bias"))
        if self.multipliers is not None:
            parts = (inner, inner, maps, maps, self.num_heads)
            projected = projected * np.repeat(np.asarray(self.multipliers, np.float32), parts)
        z, xbc, dt = split(projected, [inner, self.conv_dim, self.num_heads])
        run_conv = conv.step if T == 1 else conv.scan
        xbc, tail = run_conv(
            xbc,
            rows.lengths,
            p["conv1d.weight"],
            p.get("conv1d.bias"),
            state["conv"],
            self.activation,
        )
        xs, Bm, Cm = split(xbc, [inner, maps, maps])
        heads = ssd.Heads(p["dt_bias"], p["A_log"], p["D"], self.dt_limit)
        gate = z if self.norm == "none" else None
        y, hidden = ssd.mix(xs, dt, Bm, Cm, heads, rows.lengths, state["ssm"], SCAN_CHUNK, gate)
        if self.norm != "none":
            order = "gate_first" if self.norm == "gated" else "norm_first"
            y = norm.gated(y, z, p["norm.weight"], self.n_groups, self.eps, order)
        y = nn.linear(y, p["out_proj.weight"], p.get("out_proj.bias"))
        return y, {"conv": tail, "ssm": hidden}
