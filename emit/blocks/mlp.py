"""Dense feed-forward networks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jax import Array

from emit.blocks.block import Rows, State
from emit.ops import nn
from emit.state import StateSpec
from emit.weights import Param, matrix, vector


@dataclass(frozen=True)
class Mlp:
    """`down(act(gate(x)) * up(x))`, or `down(act(up(x)))` where not `gated`.

    (Shazeer, "GLU Variants", arXiv:2002.05202, eq. 6.) `multipliers` scale the argument of the
    activation and the output.
    """

    hidden_size: int
    intermediate_size: int
    activation: str
    gated: bool = True
    bias: bool = False
    multipliers: tuple[float, float] | None = None

    def params(self, name: str, source: str) -> list[Param]:
        """gate_proj (if gated), up_proj and down_proj."""
        prefix = source.removesuffix(name)
        wide = ["gate_proj", "up_proj"] if self.gated else ["up_proj"]
        sizes = dict.fromkeys(wide, (self.intermediate_size, self.hidden_size))
        sizes["down_proj"] = (self.hidden_size, self.intermediate_size)
        rows = [
            matrix(f"{name}{each}.weight", size, f"{source}{each}.weight")
            for each, size in sizes.items()
        ]
        if self.bias:
            rows += [vector(f"{name}{each}.bias", size[0], prefix) for each, size in sizes.items()]
        return rows

    def state(self, context: int | None) -> list[StateSpec]:
        """None."""
        del context
        return []

    def __call__(
        self, p: Mapping[str, Array], x: Array, rows: Rows, state: State
    ) -> tuple[Array, dict[str, Array]]:
        """x f32[B, T, hidden_size] -> (same, no state)."""
        del rows, state
        act = nn.ACTIVATIONS[self.activation]
        first, last = self.multipliers or (1.0, 1.0)

        def project(which: str, x: Array) -> Array:
            return nn.linear(x, p[f"{which}.weight"], p.get(f"{which}.bias"))

        if self.gated:
            hidden = act(_scaled(project("gate_proj", x), first)) * project("up_proj", x)
        else:
            hidden = act(_scaled(project("up_proj", x), first))
        return _scaled(project("down_proj", hidden), last), {}


def _scaled(x: Array, by: float) -> Array:
    return x if by == 1.0 else x * by
