"""RecurrentGemma (Griffin, arXiv:2402.19427; arXiv:2404.07839), Hugging Face `recurrent_gemma`.

    x += temporal_block(rms(x))    RG-LRU or attention over a window, by `block_types` in turns
    x += mlp_block(rms(x))         a gated MLP of half of `intermediate_size`

Embeddings are multiplied by sqrt(hidden_size) as bfloat16 rounds it, norms by 1 + weight, logits
are soft-capped.

Settled as in the library, where its predecessors differ: `attention_window_size` keys, the token's
own among them (the vendor's code attends to one more); half of a head is rotated where a config
does not say how much. Not as in the library: `_block_types`, the key of published files, is read
(the library takes its default for it); the recurrence starts from nothing at position 0, and all
state of a slot from zeros (the library's outlives a text of one token); the convolution's tail has
`lru_width` channels (there `hidden_size`, at first); a prompt may come in any parts.

Refused: scaled RoPE, kinds of blocks other than `recurrent` and `attention`, any unknown key.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes

from emit import config as config_reader
from emit import rope
from emit.blocks.attention import Attention
from emit.blocks.backbone import Backbone, Branch, forward, state, weights
from emit.blocks.block import Block
from emit.blocks.mlp import Mlp
from emit.blocks.rglru import Recurrent
from emit.errors import EmitError
from emit.ops import nn
from emit.ops.rope import Rope

__all__ = ["Config", "forward", "state", "weights"]

KINDS = ("recurrent", "attention")
ROTATED = 0.5  # of a head, where a config does not say
# Training alone, the length that positions are made for, and what `rope.read` reads.
IGNORED = rope.KEYS | frozenset(
    """attention_dropout w_init_variance_scale final_w_init_variance_scale
    max_position_embeddings""".split()
)
ONLY = {"embeddings_scale_by_sqrt_dim": True}
ALIASES = {"_block_types": "block_types", "sliding_window": "attention_window_size"}


@dataclass(frozen=True)
class Config:
    """What the graph depends on; names and defaults are those of the Hugging Face config."""

    vocab_size: int = 256000
    hidden_size: int = 2560
    intermediate_size: int = 7680  # of which each MLP has half
    num_hidden_layers: int = 26
    num_attention_heads: int = 10  # and blocks of the gates' matrices
    num_key_value_heads: int | None = None  # null: as many as query heads; a number once read
    head_dim: int | None = None  # hidden_size / num_attention_heads; a number once read
    lru_width: int | None = None  # hidden_size; a number once read
    attention_window_size: int = 2048
    conv1d_width: int = 4
    logits_soft_cap: float = 30.0
    rms_norm_eps: float = 1e-6
    hidden_activation: str = "gelu_pytorch_tanh"
    attention_bias: bool = False
    block_types: tuple[str, ...] = ("recurrent", "recurrent", "attention")
    tie_word_embeddings: bool = True
    rope: Rope | None = None  # from the keys of `emit.rope`

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Config:
        """Read either dialect of config.json; EmitError lists every key that does not fit."""
        cfg = config_reader.read(cls, raw, ignored=IGNORED, only=ONLY, aliases=ALIASES)
        cfg = replace(
            cfg,
            num_key_value_heads=cfg.num_key_value_heads or cfg.num_attention_heads,
            head_dim=cfg.head_dim or max(1, cfg.hidden_size // cfg.num_attention_heads),
            lru_width=cfg.lru_width or cfg.hidden_size,
        )
        if wrong := cfg._problems():
            raise EmitError("config.json of recurrent_gemma: " + "; ".join(wrong))
        assert cfg.head_dim is not None
        return replace(cfg, rope=_rope(raw, cfg.head_dim))

    def _problems(self) -> list[str]:
        """What does not fit together."""
        wrong, acts = [], sorted(nn.ACTIVATIONS)
        assert self.num_key_value_heads is not None and self.lru_width is not None
        if self.num_attention_heads % self.num_key_value_heads:
            wrong.append(
                f"num_attention_heads = {self.num_attention_heads}, expected a multiple of"
                f" num_key_value_heads = {self.num_key_value_heads}"
            )
        if self.lru_width % self.num_attention_heads:
            wrong.append(
                f"lru_width = {self.lru_width}, expected a multiple of"
                f" num_attention_heads = {self.num_attention_heads}"
            )
        if self.intermediate_size < 2:
            wrong.append(f"intermediate_size = {self.intermediate_size}, expected 2 or more")
        if not self.block_types or any(kind not in KINDS for kind in self.block_types):
            found = json.dumps(self.block_types)
            wrong.append(f"block_types = {found}, expected a list of {' and '.join(KINDS)}")
        if self.hidden_activation not in acts:
            wrong.append(f"hidden_activation = {self.hidden_activation!r}, expected one of {acts}")
        if self.conv1d_width < 2:
            wrong.append(f"conv1d_width = {self.conv1d_width}, expected 2 or more")
        for name in ("rms_norm_eps", "logits_soft_cap"):
            if not 0 < getattr(self, name) < float("inf"):
                wrong.append(f"{name} = {getattr(self, name):g} must be above 0")
        return wrong

    def temporal_block(self, i: int) -> Block:
        """The mixer of layer i."""
        assert self.num_key_value_heads and self.head_dim and self.lru_width
        if self.block_types[i % len(self.block_types)] == "attention":
            return Attention(
                self.hidden_size,
                self.num_attention_heads,
                self.num_key_value_heads,
                self.head_dim,
                rope=self.rope,
                window=self.attention_window_size,
                bias=self.attention_bias,
                out_bias=True,
            )
        return Recurrent(
            self.hidden_size,
            self.lru_width,
            self.num_attention_heads,
            self.conv1d_width,
            self.hidden_activation,
        )

    @property
    def backbone(self) -> Backbone:
        """The whole model."""
        half = self.intermediate_size // 2
        mlp = Branch(
            "channel_pre_norm",
            "mlp_block",
            Mlp(self.hidden_size, half, self.hidden_activation, bias=True),
        )
        return Backbone(
            self.vocab_size,
            self.hidden_size,
            self.rms_norm_eps,
            self.tie_word_embeddings,
            tuple(
                (Branch("temporal_pre_norm", "temporal_block", self.temporal_block(i)), mlp)
                for i in range(self.num_hidden_layers)
            ),
            last="final_norm",
            norm_offset=1.0,
            scale=float(ml_dtypes.bfloat16(math.sqrt(self.hidden_size))),
            softcap=self.logits_soft_cap,
        )


def _rope(raw: Mapping[str, Any], head_dim: int) -> Rope:
    """Frequencies of the part of a head that is rotated: half, unless `raw` says otherwise."""
    nested = raw.get("rope_parameters") or {}
    given = dict(raw)
    if isinstance(nested, Mapping) and nested.get("partial_rotary_factor") is None:
        given.setdefault("partial_rotary_factor", ROTATED)
    for where in ("rope_parameters", "rope_scaling"):
        found = raw.get(where) or {}
        kind = found.get("rope_type", found.get("type")) if isinstance(found, Mapping) else None
        if kind not in (None, "default"):
            raise EmitError(
                f"config.json of recurrent_gemma: rope_type = {json.dumps(kind)} is not supported"
                ' (only "default")'
            )
    return rope.read(given, head_dim, longest=1)
