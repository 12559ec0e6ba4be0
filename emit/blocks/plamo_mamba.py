"""The Mamba mixer of PLaMo 2 (arXiv:2509.04897): Mamba2's recurrence, Mamba's projections.

    [z_h | x_h] for each head h = in_proj(x)
    x = silu(conv(x))
    B, C, dt = bcdt_proj(x), each through an RMS norm of its own
    y = out_proj(ssd(x, softplus(dt_proj(dt) + dt_bias), -exp(A_log), B, C, D) * silu(z))

Unlike in Mamba2 (arXiv:2405.21060, figure 6) B, C and dt are projected from the convolved input
(as in Mamba, arXiv:2312.00752, algorithm 2), all heads share one B and C, no bias is learned
besides dt_bias, the step size has no limits, and no norm stands before out_proj.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jax import Array

from emit.blocks.block import Rows, State
from emit.blocks.mamba2 import SCAN_CHUNK
from emit.kernels import split
from emit.ops import conv, nn, ssd
from emit.state import StateSpec
from emit.weights import Param, kernel, matrix, vector


@dataclass(frozen=True)
class PlamoMamba:
    """Sizes of the mixer; `dt_rank` is the width that dt is projected from."""

    hidden_size: int
    num_heads: int
    head_dim: int
    state_size: int
    conv_kernel: int
    dt_rank: int
    eps: float

    @property
    def inner(self) -> int:
        """Channels of x, z and y."""
        return self.num_heads * self.head_dim

    def params(self, name: str, source: str) -> list[Param]:
        """in_proj, conv1d, bcdt_proj, dt_proj, dt_bias, A_log, D, three norms and out_proj."""
        prefix = source.removesuffix(name)

        def projection(which: str, outputs: int, inputs: int) -> Param:
            use = "kept" if which == "dt_proj" else "product"
            shape = (outputs, inputs)
            return matrix(f"{name}{which}.weight", shape, f"{source}{which}.weight", use=use)

        return [
            projection("in_proj", 2 * self.inner, self.hidden_size),
            kernel(name + "conv1d.weight", self.conv_kernel, self.inner, source + "conv1d.weight"),
            projection("bcdt_proj", 2 * self.state_size + self.dt_rank, self.inner),
            projection("dt_proj", self.num_heads, self.dt_rank),
            vector(name + "dt_bias", self.num_heads, prefix, offset=-3.0, scale=1.0),
            vector(name + "A_log", self.num_heads, prefix, offset=1.0, scale=0.7),
            vector(name + "D", self.num_heads, prefix, offset=1.0),
            vector(name + "B_norm_weight", self.state_size, prefix, offset=1.0),
            vector(name + "C_norm_weight", self.state_size, prefix, offset=1.0),
            vector(name + "dt_norm_weight", self.dt_rank, prefix, offset=1.0),
            projection("out_proj", self.hidden_size, self.inner),
        ]

    def state(self, context: int | None) -> list[StateSpec]:
        """The convolution tail [1, K-1, C] and the SSD state [1, H, P, N]."""
        del context
        tail = (1, self.conv_kernel - 1, self.inner)
        hidden = (1, self.num_heads, self.head_dim, self.state_size)
        return [
            StateSpec("conv", tail, "f32", 0, "fixed"),
            StateSpec("ssm", hidden, "f32", 0, "fixed"),
        ]

    def __call__(
        self, p: Mapping[str, Array], x: Array, rows: Rows, state: State
    ) -> tuple[Array, dict[str, Array]]:
        """x f32[B, T, hidden_size] -> (same, new state)."""
        B, T, _ = x.shape
        zx = nn.linear(x, p["in_proj.weight"]).reshape(B, T, self.num_heads, 2, self.head_dim)
        z, xs = (zx[..., i, :].reshape(B, T, self.inner) for i in range(2))
        run_conv = conv.step if T == 1 else conv.scan
        xs, tail = run_conv(
            xs, rows.lengths, p["conv1d.weight"], None, state["conv"], activation="silu"
        )
        bcdt = nn.linear(xs, p["bcdt_proj.weight"])
        Bm, Cm, dt = split(bcdt, [self.state_size, self.state_size, self.dt_rank])
        dt = nn.linear(nn.rms_norm(dt, p["dt_norm_weight"], self.eps), p["dt_proj.weight"])
        y, hidden = ssd.mix(
            xs,
            dt,
            nn.rms_norm(Bm, p["B_norm_weight"], self.eps),
            nn.rms_norm(Cm, p["C_norm_weight"], self.eps),
            ssd.Heads(p["dt_bias"], p["A_log"], p["D"]),
            rows.lengths,
            state["ssm"],
            SCAN_CHUNK,
            gate=z,
        )
        return nn.linear(y, p["out_proj.weight"]), {"conv": tail, "ssm": hidden}
