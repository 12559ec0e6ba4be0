"""The Mamba mixer (Gu and Dao, "Mamba", arXiv:2312.00752, figure 3 and algorithm 2).

x, z = in_proj(x)
dt, B, C = x_proj(act(conv(x)))
y = out_proj(selective_scan(act(conv(x)), softplus(dt_proj(dt)), B, C) * silu(z))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax import Array

from emit import kernels
from emit.blocks.block import Rows, State
from emit.forms import Form
from emit.kernels import Values, split
from emit.ops import conv, nn, selective_scan
from emit.state import StateSpec
from emit.weights import Param, kernel, matrix, vector

SCAN_CHUNK = 16
NORMED = ("dt_layernorm", "b_layernorm", "c_layernorm")


@dataclass(frozen=True)
class Mamba1:
    """Sizes and variants of the mixer.

    `inner` channels, each with a state of `state_size`; dt is projected from `dt_rank`
    channels. `norms` says whether dt, B and C pass an RMS norm after their projection (arXiv:
    2410.05355, section 2.2; arXiv:2403.19887, section 6.4): one with `learned` weights, one
    without (`plain`), or no norm (`none`). `bias` is that of in_proj and out_proj; dt_proj always
    has one.
    """

    hidden_size: int
    inner: int
    state_size: int
    dt_rank: int
    conv_kernel: int
    activation: str
    eps: float = 1e-6
    bias: bool = False
    conv_bias: bool = True
    norms: Literal["learned", "plain", "none"] = "none"

    def params(self, name: str, source: str) -> list[Param]:
        """in_proj, conv1d, x_proj, dt_proj, A_log, D, norms and out_proj, as checkpoints say."""
        inner, maps = self.inner, self.state_size
        prefix = source.removesuffix(name)
        widths = {
            "in_proj": (2 * inner, self.hidden_size),
            "x_proj": (self.dt_rank + 2 * maps, inner),
            "dt_proj": (inner, self.dt_rank),
            "out_proj": (self.hidden_size, inner),
        }
        rows = [
            matrix(
                f"{name}{each}.weight",
                shape,
                f"{source}{each}.weight",
                use="kept" if each == "dt_proj" else "product",
            )
            for each, shape in widths.items()
        ]
        rows += [
            kernel(name + "conv1d.weight", self.conv_kernel, inner, source + "conv1d.weight"),
            vector(name + "dt_proj.bias", inner, prefix, offset=-3.0, scale=1.0),
            Param(
                name + "A_log",
                (inner, maps),
                (Form((source + "A_log",), (inner, maps)),),
                offset=1.0,
                scale=0.7,
            ),
            vector(name + "D", inner, prefix, offset=1.0),
        ]
        if self.conv_bias:
            rows.append(vector(name + "conv1d.bias", inner, prefix))
        if self.bias:
            rows.append(vector(name + "in_proj.bias", 2 * inner, prefix))
            rows.append(vector(name + "out_proj.bias", self.hidden_size, prefix))
        if self.norms == "learned":
            rows += [
                vector(f"{name}{each}.weight", size, prefix, offset=1.0)
                for each, size in zip(NORMED, (self.dt_rank, maps, maps), strict=True)
            ]
        return rows

    def state(self, context: int | None) -> list[StateSpec]:
        """The convolution tail [1, K-1, I] and the state of every channel [1, I, N]."""
        del context
        tail = (1, self.conv_kernel - 1, self.inner)
        hidden = (1, self.inner, self.state_size)
        return [
            StateSpec("conv", tail, "f32", 0, "fixed"),
            StateSpec("ssm", hidden, "f32", 0, "fixed"),
        ]

    def __call__(
        self, p: Mapping[str, Array], x: Array, rows: Rows, state: State
    ) -> tuple[Array, dict[str, Array]]:
        """x f32[B, T, hidden_size] -> (same, new state)."""
        T, maps = x.shape[1], self.state_size
        xz = nn.linear(x, p["in_proj.weight"], p.get("in_proj.bias"))
        xs, z = split(xz, [self.inner, self.inner])
        run_conv = conv.step if T == 1 else conv.scan
        xs, tail = run_conv(
            xs,
            rows.lengths,
            p["conv1d.weight"],
            p.get("conv1d.bias"),
            state["conv"],
            self.activation,
        )
        parts = split(nn.linear(xs, p["x_proj.weight"]), [self.dt_rank, maps, maps])
        dt, Bm, Cm = (self._normed(p, n, part) for n, part in zip(NORMED, parts, strict=True))
        dt = nn.linear(kernels.array(dt), p["dt_proj.weight"])
        channels = selective_scan.Channels(p["dt_proj.bias"], p["A_log"], p["D"])
        y, hidden = selective_scan.mix(
            xs, dt, Bm, Cm, channels, rows.lengths, state["ssm"], SCAN_CHUNK, z
        )
        y = nn.linear(y, p["out_proj.weight"], p.get("out_proj.bias"))
        return y, {"conv": tail, "ssm": hidden}

    def _normed(self, p: Mapping[str, Array], name: str, x: Values) -> Values:
        if self.norms == "none":
            return x
        learned = self.norms == "learned"
        return nn.rms_norm(x, p[f"{name}.weight"] if learned else jnp.float32(1.0), self.eps)
