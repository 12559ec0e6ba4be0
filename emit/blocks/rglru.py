"""Griffin's recurrent block (De et al., arXiv:2402.19427, section 2.3 and figure 2c).

    y = linear_out(act(linear_y(x)) * rglru(conv(linear_x(x))))

See `ops.rglru` for the recurrence and its gates, whose matrices have `num_heads` blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jax import Array

from emit.blocks.block import Rows, State
from emit.forms import Form
from emit.ops import conv, nn, rglru
from emit.state import StateSpec
from emit.weights import Param, kernel, matrix, vector

SCAN_CHUNK = 32


def transposed(tensor: np.ndarray) -> np.ndarray:
    """Blocks [H, inputs, outputs] as [H, outputs, inputs], as all projections are."""
    return tensor.swapaxes(1, 2)


def softplus(tensor: np.ndarray) -> np.ndarray:
    """log(1 + e^x), float32: not all targets have it where it is small."""
    return np.logaddexp(0.0, tensor.astype(np.float64)).astype(np.float32)


def joined(tensor: np.ndarray) -> np.ndarray:
    """Rows [H, W / H] as one vector."""
    return tensor.reshape(-1)


@dataclass(frozen=True)
class Recurrent:
    """Sizes of the block: `width` channels pass through the recurrence."""

    hidden_size: int
    width: int
    num_heads: int
    conv_kernel: int
    activation: str

    def params(self, name: str, source: str) -> list[Param]:
        """linear_x, linear_y, conv_1d, rg_lru and linear_out, named as checkpoints have them."""
        prefix, hidden, width = source.removesuffix(name), self.hidden_size, self.width
        rows = []
        for each, shape in (
            ("linear_x", (width, hidden)),
            ("linear_y", (width, hidden)),
            ("linear_out", (hidden, width)),
        ):
            rows.append(matrix(f"{name}{each}.weight", shape, f"{source}{each}.weight"))
            rows.append(vector(f"{name}{each}.bias", shape[0], prefix))
        rows += [
            kernel(name + "conv_1d.weight", self.conv_kernel, width, source + "conv_1d.weight"),
            vector(name + "conv_1d.bias", width, prefix),
            Param(
                name + "rg_lru.rate",
                (width,),
                (Form((source + "rg_lru.recurrent_param",), (width,), softplus),),
                offset=0.05,
                scale=0.007,
            ),
        ]
        each = width // self.num_heads
        blocks, biases = (self.num_heads, each, each), (self.num_heads, each)
        for gate in ("rg_lru.input_gate", "rg_lru.recurrent_gate"):
            forms = (Form((f"{source}{gate}_weight",), blocks, transposed),)
            weight, scale = f"{name}{gate}_weight", each**-0.5
            rows.append(Param(weight, blocks, forms, matrix=True, scale=scale, use="kept"))
            forms = (Form((f"{source}{gate}_bias",), biases, joined),)
            rows.append(Param(f"{name}{gate}_bias", (width,), forms))
        return rows

    def state(self, context: int | None) -> list[StateSpec]:
        """The convolution tail [1, K-1, W] and the recurrence's state [1, W]."""
        del context
        tail = (1, self.conv_kernel - 1, self.width)
        return [
            StateSpec("conv", tail, "f32", 0, "fixed"),
            StateSpec("lru", (1, self.width), "f32", 0, "fixed"),
        ]

    def __call__(
        self, p: Mapping[str, Array], x: Array, rows: Rows, state: State
    ) -> tuple[Array, dict[str, Array]]:
        """x f32[B, T, hidden_size] -> (same, new state)."""
        T = x.shape[1]
        branch = nn.linear(x, p["linear_y.weight"], p["linear_y.bias"])
        branch = nn.ACTIVATIONS[self.activation](branch)
        x = nn.linear(x, p["linear_x.weight"], p["linear_x.bias"])
        run_conv = conv.step if T == 1 else conv.scan
        x, tail = run_conv(x, rows.lengths, p["conv_1d.weight"], p["conv_1d.bias"], state["conv"])
        y, hidden = rglru.mixer(
            x,
            branch,
            p["rg_lru.recurrent_gate_weight"],
            p["rg_lru.recurrent_gate_bias"],
            p["rg_lru.input_gate_weight"],
            p["rg_lru.input_gate_bias"],
            p["rg_lru.rate"],
            rows.lengths,
            rows.positions,
            state["lru"],
            chunk=SCAN_CHUNK,
        )
        y = nn.linear(y, p["linear_out.weight"], p["linear_out.bias"])
        return y, {"conv": tail, "lru": hidden}
