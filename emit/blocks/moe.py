"""Mixture of experts as a feed-forward network: router, routed experts, shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array

from emit.blocks.block import Rows, State, under
from emit.blocks.mlp import Mlp
from emit.forms import Form, first_half, second_half
from emit.ops import moe, nn
from emit.ops.moe import Routing
from emit.state import StateSpec
from emit.weights import Param, experts, matrix


@dataclass(frozen=True)
class Names:
    """What a family's checkpoints call the parts, and so do canonical names.

    Expert e's projections are `<experts>.<e>.<up, down or gate>.weight` there, and one stack
    `<experts>.<up, down or gate>.weight` here. `bias` is the router's correction bias, `biases`
    other names of it. `stacked` are the words of MLX's stacks `switch_mlp.<word>.weight`: up, down
    and gate.
    """

    router: str = "gate"
    bias: str = "gate.e_score_correction_bias"
    biases: tuple[str, ...] = ()
    experts: str = "experts"
    up: str = "up_proj"
    down: str = "down_proj"
    gate: str = "gate_proj"
    stacked: tuple[str, str, str] = ("up_proj", "down_proj", "gate_proj")
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"
    latent_in: str = "fc1_latent_proj"
    latent_out: str = "fc2_latent_proj"


@dataclass(frozen=True)
class Moe:
    """`y = out(sum of the chosen experts on in(x)) + shared(x)`.

    (DeepSeekMoE, arXiv:2401.06066, eq. 9, without its residual.) The routed experts work on
    `latent_size` channels between two projections if that is not 0; `shared` is an FFN that every
    token takes, scaled by sigmoid of one more projection if `shared_gate`. The router's weight is
    kept in float32 whatever the weight type: narrowed, it would choose other experts.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    activation: str
    routing: Routing
    gated: bool = True
    correction_bias: bool = False
    latent_size: int = 0
    latent_bias: bool = False
    shared: Mlp | None = None
    shared_gate: bool = False
    names: Names = field(default_factory=Names)

    def params(self, name: str, source: str) -> list[Param]:
        """Router, stacked experts, and what there is of latent projections and shared expert."""
        say = self.names
        router = (self.num_experts, self.hidden_size)
        rows = [_float32(name, source, f"{say.router}.weight", router)]
        if self.correction_bias:
            rows.append(_float32(name, source, say.bias, router[:1], *say.biases))
        up = (self.intermediate_size, self.latent_size or self.hidden_size)
        sizes = {say.up: up, say.down: (up[1], up[0])} | ({say.gate: up} if self.gated else {})
        for which, size in sizes.items():
            each = [f"{source}{say.experts}.{e}.{which}.weight" for e in range(self.num_experts)]
            rows.append(
                experts(
                    f"{name}{say.experts}.{which}.weight", size, each, *self._stacks(source, which)
                )
            )
        projections = {}
        if self.latent_size:
            projections[say.latent_in] = (self.latent_size, self.hidden_size)
            projections[say.latent_out] = (self.hidden_size, self.latent_size)
        if self.shared_gate:
            projections[say.shared_gate] = (1, self.hidden_size)
        for which, size in projections.items():
            use = "kept" if which == say.shared_gate else "product"
            rows.append(matrix(f"{name}{which}.weight", size, f"{source}{which}.weight", use=use))
            if self.latent_bias and which != say.shared_gate:
                rows.append(_float32(name, source, f"{which}.bias", size[:1]))
        if self.shared is not None:
            rows += self.shared.params(f"{name}{say.shared}.", f"{source}{say.shared}.")
        return rows

    def _stacks(self, source: str, which: str) -> list[Form]:
        """The experts' projections `which` as stacks: MLX's, and those of transformers' modules.

        The latter have the rows of `gate` and `up` in one tensor.
        """
        say, E = self.names, self.num_experts
        up = (self.intermediate_size, self.latent_size or self.hidden_size)
        words = dict(zip((say.up, say.down, say.gate), say.stacked, strict=True))
        size = (up[1], up[0]) if which == say.down else up
        forms = [Form((f"{source}switch_mlp.{words[which]}.weight",), (E, *size))]
        joint = f"{source}{say.experts}."
        if which == say.down:
            return [*forms, Form((joint + "down_proj",), (E, *size))]
        if not self.gated:
            return [*forms, Form((joint + "up_proj",), (E, *size))]
        half = first_half if which == say.gate else second_half
        both = (E, 2 * size[0], size[1])
        return [*forms, Form((joint + "gate_up_proj",), both, half, rows=True)]

    def state(self, context: int | None) -> list[StateSpec]:
        """None."""
        del context
        return []

    def __call__(
        self, p: Mapping[str, Array], x: Array, rows: Rows, state: State
    ) -> tuple[Array, dict[str, Array]]:
        """x f32[B, T, hidden_size] -> (same, no state)."""
        del state
        say, valid = self.names, rows.valid(x.shape[1])
        x = jnp.where(valid[..., None], x, 0.0)
        logits = nn.linear(x, p[f"{say.router}.weight"])
        bias = p[say.bias] if self.correction_bias else None
        index, weight = moe.route(logits, self.routing, bias)
        up, down, gate = (
            p.get(f"{say.experts}.{which}.weight") for which in (say.up, say.down, say.gate)
        )
        assert up is not None and down is not None
        stacks = moe.Experts(up, down, gate)
        run = moe.step if x.shape[1] == 1 else moe.scan
        inner = self._project(p, say.latent_in, x) if self.latent_size else x
        y = run(inner, valid, index, weight, stacks, nn.ACTIVATIONS[self.activation])
        if self.latent_size:
            y = self._project(p, say.latent_out, y)
        if self.shared is not None:
            own, _ = self.shared(under(f"{say.shared}.", p), x, rows, {})
            if self.shared_gate:
                own = own * jax.nn.sigmoid(self._project(p, say.shared_gate, x))
            y = y + own
        return y, {}

    @staticmethod
    def _project(p: Mapping[str, Array], which: str, x: Array) -> Array:
        return nn.linear(x, p[f"{which}.weight"], p.get(f"{which}.bias"))


def _float32(name: str, source: str, which: str, shape: tuple[int, ...], *also: str) -> Param:
    """A parameter that is stored in float32 whatever the weight type; `also` are other names."""
    scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.02
    forms = tuple(Form((source + word,), shape) for word in (which, *also))
    return Param(name + which, shape, forms, scale=scale)
