"""A model of residual branches, as most families are.

x = embed(tokens) scale;  x += block(rms(x)) for each branch of each layer;  logits = head(rms(x))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from jax import Array

from emit.blocks.block import Block, Rows, State, renamed, states, under
from emit.ops import nn
from emit.state import StateSpec
from emit.weights import Param, WeightMap, matrix, vector, with_head


@dataclass(frozen=True)
class Branch:
    """`x += block(rms(x))`: the names, in its layer, of its norm and of its block.

    `also` are other names that the block may have in a checkpoint.
    """

    norm: str
    name: str
    block: Block
    also: tuple[str, ...] = ()

    def params(self, layer: str, prefix: str) -> list[Param]:
        """The block's parameters, each with the names that a checkpoint may have for it."""
        at = layer + self.name + "."
        rows = self.block.params(at, prefix + at)
        for name in self.also:
            others = self.block.params(at, f"{prefix}{layer}{name}.")
            rows = [
                replace(row, forms=row.forms + other.forms)
                for row, other in zip(rows, others, strict=True)
            ]
        return rows


@dataclass(frozen=True)
class Backbone:
    """The layers' branches and what stands around them.

    Canonical names are the checkpoint's without `prefix`. `table` and `last` are the names of the
    embeddings and of the last norm, `also` other names of the embeddings in a checkpoint, prefix
    and all. `norm_offset` is what the model adds to the weights of its norms, `scale` what it
    multiplies embeddings by; with `softcap` the logits are softcap tanh(logits / softcap). `tied`
    says that the head is the embeddings; `unused` is that of the weight map.
    """

    vocab_size: int
    hidden_size: int
    eps: float
    tied: bool
    layers: tuple[tuple[Branch, ...], ...]
    prefix: str = "model."
    table: str = "embed_tokens"
    last: str = "norm"
    also: tuple[str, ...] = ()
    norm_offset: float = 0.0
    scale: float = 1.0
    softcap: float | None = None
    unused: frozenset[str] = frozenset()

    def weights(self) -> WeightMap:
        """The token table, each layer's norms and blocks, the last norm and the head."""
        size = (self.vocab_size, self.hidden_size)
        table = self.table + ".weight"
        rows = [matrix(table, size, self.prefix + table, *self.also, use="table")]
        for i, branches in enumerate(self.layers):
            for branch in branches:
                rows.append(self._norm(f"layers.{i}.{branch.norm}"))
                rows += branch.params(f"layers.{i}.", self.prefix)
        rows.append(self._norm(self.last))
        return with_head(rows, size, table, self.tied, self.unused)

    def _norm(self, name: str) -> Param:
        offset = 1.0 - self.norm_offset
        return vector(name + ".weight", self.hidden_size, self.prefix, offset=offset)

    def state(self, context: int | None) -> list[StateSpec]:
        """The state of every layer's blocks."""
        return states([[branch.block for branch in each] for each in self.layers], context)

    def forward(
        self, params: Mapping[str, Array], tokens: Array, rows: Rows, state: State
    ) -> tuple[Array, dict[str, Array]]:
        """tokens i32[B, T] -> (logits f32[B, V] of each row's last valid token, new state)."""
        new: dict[str, Array] = {}
        x = nn.embed(tokens, params[self.table + ".weight"])
        if self.scale != 1.0:
            x = x * self.scale
        for i, branches in enumerate(self.layers):
            at = f"layers.{i}."
            p, own = under(at, params), under(at, state)
            for branch in branches:
                normed = nn.rms_norm(x, self._weight(p, branch.norm), self.eps)
                y, after = branch.block(under(branch.name + ".", p), normed, rows, own)
                new |= renamed(at, after)
                x = x + y
        head = params[f"{self.table if self.tied else 'lm_head'}.weight"]
        y = nn.logits(x, rows.lengths, self._weight(params, self.last), self.eps, head)
        return y if self.softcap is None else nn.softcap(y, self.softcap), new

    def _weight(self, p: Mapping[str, Array], name: str) -> Array:
        weight = p[name + ".weight"]
        return weight if self.norm_offset == 0.0 else weight + self.norm_offset


def mixers(
    vocab_size: int,
    hidden_size: int,
    eps: float,
    tied: bool,
    blocks: Sequence[Block],
    also: tuple[str, ...] = (),
    unused: frozenset[str] = frozenset(),
) -> Backbone:
    """A model of one mixer a layer, named as the Mamba families name it."""
    layers = tuple((Branch("norm", "mixer", block),) for block in blocks)
    names = ("backbone.", "embeddings", "norm_f")
    return Backbone(vocab_size, hidden_size, eps, tied, layers, *names, also=also, unused=unused)


class Modelled(Protocol):
    """A family's config that says its whole model."""

    @property
    def backbone(self) -> Backbone: ...


def weights(cfg: Modelled) -> WeightMap:
    """All parameters of the model with the config `cfg`, and which tensors it leaves out."""
    return cfg.backbone.weights()


def state(cfg: Modelled, context: int | None) -> list[StateSpec]:
    """All its state, layer by layer; KV regions hold `context` tokens."""
    return cfg.backbone.state(context)


def forward(
    cfg: Modelled,
    params: Mapping[str, Array],
    tokens: Array,
    lengths: Array,
    positions: Array,
    state: Mapping[str, Array],
) -> tuple[Array, dict[str, Array]]:
    """Logits f32[B, V] of each row's last valid token, and the new state.

    tokens i32[B, T], the first lengths[b] (i32[B]) of a row valid; positions i32[B] is the position
    of each row's first token, by which attention finds its place in the KV cache.
    """
    return cfg.backbone.forward(params, tokens, Rows(lengths, positions), state)
