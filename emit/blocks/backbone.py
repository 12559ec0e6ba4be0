"""A model of one mixer a layer, as the Mamba families and Nemotron-H are.

x += mixer[i](rms(x))    for each layer i;    logits = head(rms(x))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jax import Array

from emit.blocks.block import Block, Rows, State, renamed, states, under
from emit.ops import nn
from emit.state import StateSpec
from emit.weights import WeightMap, matrix, vector, with_head

PREFIX = "backbone."


@dataclass(frozen=True)
class Backbone:
    """The layers' mixers and what stands around them.

    `embeddings` are the names the token table may have in a checkpoint, `tied` says that the head
    is that table; `unused` is that of the weight map.
    """

    vocab_size: int
    hidden_size: int
    eps: float
    tied: bool
    mixers: tuple[Block, ...]
    embeddings: tuple[str, ...] = (PREFIX + "embeddings.weight",)
    unused: frozenset[str] = frozenset()

    def weights(self) -> WeightMap:
        """Canonical names are the checkpoint's without `backbone.`."""
        table = (self.vocab_size, self.hidden_size)
        rows = [matrix("embeddings.weight", table, *self.embeddings)]
        for i, mixer in enumerate(self.mixers):
            base = f"layers.{i}."
            rows.append(vector(base + "norm.weight", self.hidden_size, PREFIX, offset=1.0))
            rows += mixer.params(base + "mixer.", f"{PREFIX}{base}mixer.")
        rows.append(vector("norm_f.weight", self.hidden_size, PREFIX, offset=1.0))
        return with_head(rows, table, "embeddings.weight", self.tied, self.unused)

    def state(self, context: int | None) -> list[StateSpec]:
        """The state of every layer's mixer."""
        return states([[mixer] for mixer in self.mixers], context)

    def forward(
        self, params: Mapping[str, Array], tokens: Array, rows: Rows, state: State
    ) -> tuple[Array, dict[str, Array]]:
        """tokens i32[B, T] -> (logits f32[B, V] of each row's last valid token, new state)."""
        new: dict[str, Array] = {}
        x = nn.embed(tokens, params["embeddings.weight"])
        for i, mixer in enumerate(self.mixers):
            at = f"layers.{i}."
            p = under(at, params)
            normed = nn.rms_norm(x, p["norm.weight"], self.eps)
            y, after = mixer(under("mixer.", p), normed, rows, under(at, state))
            new |= renamed(at, after)
            x = x + y
        head = params["embeddings.weight" if self.tied else "lm_head.weight"]
        return nn.logits(x, rows.lengths, params["norm_f.weight"], self.eps, head), new
