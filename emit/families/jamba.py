"""Jamba (AI21, arXiv:2403.19887 and arXiv:2408.12570), Hugging Face `jamba`.

    x += mixer(rms(x))     Mamba with norms of dt, B and C, or attention without positions
    x += ffn(rms(x))       one gated FFN, or the best of `num_experts` of them

Layer i attends if i mod attn_layer_period is attn_layer_offset and has experts if i mod
expert_layer_period is expert_layer_offset, unless there is only one. An expert's weight is its part
of the softmax over all experts, not normalised over the chosen.

Refused: a sliding window, Mamba without its inner norms, an activation that is not in
`nn.ACTIVATIONS`, and any unknown key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from emit import config as config_reader
from emit.blocks.attention import Attention
from emit.blocks.backbone import Backbone, Branch, forward, state, weights
from emit.blocks.block import Block
from emit.blocks.mamba1 import Mamba1
from emit.blocks.mlp import Mlp
from emit.blocks.moe import Moe, Names
from emit.config import Count
from emit.errors import EmitError
from emit.ops import nn
from emit.ops.moe import Routing

__all__ = ["Config", "forward", "state", "weights"]

# Training alone (attention_dropout, router_*), which of the library's equal implementations runs
# (use_*), how many logits it computes, the length trained for (the model has no positions).
IGNORED = frozenset(
    """attention_dropout output_router_logits router_aux_loss_coef use_mamba_kernels use_mambapy
    use_associative_scan num_logits_to_keep calc_logits_for_entire_prompt max_position_embeddings
    n_ctx""".split()
)
ONLY = {"sliding_window": None, "mamba_inner_layernorms": True}


@dataclass(frozen=True)
class Config:
    """What the graph depends on; names and defaults are those of the Hugging Face config."""

    vocab_size: int = 65536
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8  # null: as many as query heads; a number once read
    head_dim: int | None = None  # hidden_size / num_attention_heads; a number once read
    attn_layer_period: int = 8
    attn_layer_offset: Count = 4
    num_experts: int = 16
    num_experts_per_tok: int = 2
    expert_layer_period: int = 2
    expert_layer_offset: Count = 1
    mamba_d_state: int = 16
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_dt_rank: int = 0  # "auto": a 16th of hidden_size, rounded up; a number once read
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Config:
        """Read either dialect of config.json; EmitError lists every key that does not fit."""
        automatic = raw.get("mamba_dt_rank") == "auto"
        derived = ("layers_block_type", "layer_types", *(["mamba_dt_rank"] if automatic else []))
        given = {k: v for k, v in raw.items() if k not in derived}
        aliases = {"num_local_experts": "num_experts"}
        cfg = config_reader.read(cls, given, ignored=IGNORED, only=ONLY, aliases=aliases)
        cfg = replace(
            cfg,
            num_key_value_heads=cfg.num_key_value_heads or cfg.num_attention_heads,
            head_dim=cfg.head_dim or max(1, cfg.hidden_size // cfg.num_attention_heads),
            mamba_dt_rank=cfg.mamba_dt_rank or -(-cfg.hidden_size // 16),
        )
        wrong = cfg._problems(raw.get("head_dim") is None)
        if not wrong:
            wrong = [
                f"{key} does not follow from attn_layer_period and attn_layer_offset"
                for key in derived[:2]
                if key in raw and raw[key] not in (None, *cfg._layer_types())
            ]
        if wrong:
            raise EmitError("config.json of jamba: " + "; ".join(wrong))
        return cfg

    def _problems(self, derived: bool) -> list[str]:
        """What does not fit together; `derived` says that head_dim is not in the file."""
        wrong, acts = [], sorted(nn.ACTIVATIONS)
        assert self.num_key_value_heads is not None
        if derived and self.hidden_size % self.num_attention_heads:
            wrong.append(f"hidden_size = {self.hidden_size}, expected a multiple of the heads")
        if self.num_attention_heads % self.num_key_value_heads:
            wrong.append(
                f"num_attention_heads = {self.num_attention_heads}, expected a multiple of"
                f" num_key_value_heads = {self.num_key_value_heads}"
            )
        if self.num_experts_per_tok > self.num_experts > 1:
            wrong.append(
                f"num_experts_per_tok = {self.num_experts_per_tok}, expected at most"
                f" num_experts = {self.num_experts}"
            )
        for kind in ("attn", "expert"):
            offset, period = (getattr(self, f"{kind}_layer_{x}") for x in ("offset", "period"))
            if offset >= period:
                wrong.append(f"{kind}_layer_offset = {offset}, expected less than {period}")
        if self.hidden_act not in acts:
            wrong.append(f"hidden_act = {self.hidden_act!r}, expected one of {acts}")
        if self.mamba_d_conv < 2:
            wrong.append(f"mamba_d_conv = {self.mamba_d_conv}, expected 2 or more")
        if not 0 < self.rms_norm_eps < float("inf"):
            wrong.append(f"rms_norm_eps = {self.rms_norm_eps:g} must be above 0")
        return wrong

    def _attends(self, i: int) -> bool:
        return i % self.attn_layer_period == self.attn_layer_offset

    def _layer_types(self) -> list[list[str]]:
        """What libraries derive from the periods, in either choice of words."""
        words = (("mamba", "attention"), ("linear_attention", "full_attention"))
        layers = range(self.num_hidden_layers)
        return [[names[self._attends(i)] for i in layers] for names in words]

    def mixer(self, i: int) -> tuple[str, Block]:
        """The name and the block of layer i's mixer."""
        if self._attends(i):
            assert self.num_key_value_heads is not None and self.head_dim is not None
            heads = (self.num_attention_heads, self.num_key_value_heads)
            return "self_attn", Attention(self.hidden_size, *heads, self.head_dim)
        return "mamba", Mamba1(
            hidden_size=self.hidden_size,
            inner=self.mamba_expand * self.hidden_size,
            state_size=self.mamba_d_state,
            dt_rank=self.mamba_dt_rank,
            conv_kernel=self.mamba_d_conv,
            activation=self.hidden_act,
            bias=self.mamba_proj_bias,
            conv_bias=self.mamba_conv_bias,
            norms="learned",
            eps=self.rms_norm_eps,
        )

    def feed_forward(self, i: int) -> Block:
        """The FFN of layer i."""
        sizes = (self.hidden_size, self.intermediate_size)
        if self.num_experts == 1 or i % self.expert_layer_period != self.expert_layer_offset:
            return Mlp(*sizes, self.hidden_act)
        routing = Routing(self.num_experts_per_tok)
        return Moe(*sizes, self.num_experts, self.hidden_act, routing, names=Names(router="router"))

    @property
    def backbone(self) -> Backbone:
        """The whole model."""
        layers = tuple(
            (
                Branch("input_layernorm", *self.mixer(i)),
                Branch("pre_ff_layernorm", "feed_forward", self.feed_forward(i)),
            )
            for i in range(self.num_hidden_layers)
        )
        sizes = (self.vocab_size, self.hidden_size, self.rms_norm_eps)
        return Backbone(*sizes, self.tie_word_embeddings, layers, last="final_layernorm")
