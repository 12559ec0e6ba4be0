"""Falcon-H1 (Zuo et al., arXiv:2507.22448), Hugging Face `falcon_h1`.

    h = rms(x);  x += ssm_out · mamba2(ssm_in · h) + attn_out · attention(attn_in · h)
    x += mlp(rms(x))

Attention and Mamba2 read the same input in each layer. The multipliers (muP's, section 3.2) scale
the embeddings, the logits, both mixers' inputs and outputs, the keys, the five parts of the Mamba2
projection, and the MLP's gate and output; a checkpoint that has them in its weights says 1.

Refused: a subset of layers with attention, layers without an MLP, a sliding window, a partial
rotation, an activation that is not in `nn.ACTIVATIONS`, and any unknown key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jax import Array

from emit import config as config_reader
from emit import rope
from emit.blocks.attention import Attention
from emit.blocks.block import Rows, renamed, states, under
from emit.blocks.mamba2 import Mamba2
from emit.blocks.mlp import Mlp
from emit.errors import EmitError
from emit.forms import Divided
from emit.ops import nn
from emit.ops.rope import Rope
from emit.state import StateSpec
from emit.weights import Param, WeightMap, matrix, vector, with_head

# Training alone (attention_dropout, how dt is drawn), the reference's own scan chunk, how many
# logits it computes, what a tokenizer does (add_bos_token), ratios that no size is computed from,
# and the keys that `emit.rope` reads.
IGNORED = rope.KEYS | frozenset(
    """attention_dropout mamba_chunk_size num_logits_to_keep calc_logits_for_entire_prompt
    add_bos_token mlp_expansion_factor expansion_factor time_step_min time_step_max
    time_step_floor""".split()
)
ONLY = {"attn_layer_indices": None, "mamba_use_mlp": True, "sliding_window": None}
MULTIPLIERS = """lm_head_multiplier embedding_multiplier key_multiplier attention_in_multiplier
    attention_out_multiplier ssm_in_multiplier ssm_out_multiplier""".split()


@dataclass(frozen=True)
class Config:
    """What the graph depends on; names and defaults are those of the Hugging Face config."""

    vocab_size: int = 128000
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8  # null: as many as query heads; a number once read
    head_dim: int | None = None  # hidden_size / num_attention_heads; a number once read
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 8192
    mamba_d_ssm: int | None = 1024  # null: mamba_expand × hidden_size; a number once read
    mamba_n_heads: int = 128
    mamba_d_head: int | None = None  # "auto": mamba_d_ssm / mamba_n_heads; a number once read
    mamba_n_groups: int = 1
    mamba_d_state: int = 256
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    mamba_norm_before_gate: bool = True
    mamba_rms_norm: bool = False
    time_step_limit: tuple[float, float] = (0.0, float("inf"))
    projectors_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    lm_head_multiplier: float = 1.0
    embedding_multiplier: float = 1.0
    key_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    ssm_in_multiplier: float = 1.0
    ssm_out_multiplier: float = 1.0
    mlp_multipliers: tuple[float, float] | None = None
    ssm_multipliers: tuple[float, float, float, float, float] | None = None
    rope: Rope | None = None  # from the keys of `emit.rope`

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Config:
        """Read either dialect of config.json; EmitError lists every key that does not fit."""
        automatic = raw.get("mamba_d_head") == "auto"
        given = {k: v for k, v in raw.items() if k != "mamba_d_head" or not automatic}
        count = config_reader.layer_count(given.get("num_hidden_layers", cls.num_hidden_layers))
        if given.get("attn_layer_indices") == list(range(count)):
            del given["attn_layer_indices"]
        kinds = dict.fromkeys(("layer_types", "layers_block_type"), ["hybrid"] * count)
        cfg = config_reader.read(cls, given, ignored=IGNORED, only={**ONLY, **kinds})
        inner = cfg.mamba_d_ssm or cfg.mamba_expand * cfg.hidden_size
        cfg = replace(
            cfg,
            num_key_value_heads=cfg.num_key_value_heads or cfg.num_attention_heads,
            head_dim=cfg.head_dim or max(1, cfg.hidden_size // cfg.num_attention_heads),
            mamba_d_ssm=inner,
            mamba_d_head=cfg.mamba_d_head or max(1, inner // cfg.mamba_n_heads),
        )
        wrong = cfg._problems()
        if wrong:
            raise EmitError("config.json of falcon_h1: " + "; ".join(wrong))
        assert cfg.head_dim is not None
        found = rope.read(raw, cfg.head_dim, cfg.max_position_embeddings)
        if found.rotary != cfg.head_dim:
            raise EmitError("falcon_h1: a partial_rotary_factor below 1 is not supported")
        return replace(cfg, rope=found)

    def _problems(self) -> list[str]:
        """What does not fit together."""
        wrong, acts = [], sorted(nn.ACTIVATIONS)
        assert self.num_key_value_heads is not None and self.mamba_d_head is not None
        if self.num_attention_heads % self.num_key_value_heads:
            wrong.append(
                f"num_attention_heads = {self.num_attention_heads}, expected a multiple of "
                f"num_key_value_heads = {self.num_key_value_heads}"
            )
        if self.mamba_n_heads * self.mamba_d_head != self.mamba_d_ssm:
            wrong.append(
                f"mamba_n_heads × mamba_d_head = {self.mamba_n_heads * self.mamba_d_head}, "
                f"expected mamba_d_ssm (or mamba_expand × hidden_size) = {self.mamba_d_ssm}"
            )
        if self.mamba_n_heads % self.mamba_n_groups:
            wrong.append(f"mamba_n_heads = {self.mamba_n_heads}, expected a multiple of groups")
        if self.mamba_d_conv < 2:
            wrong.append(f"mamba_d_conv = {self.mamba_d_conv}, expected 2 or more")
        if self.hidden_act not in acts:
            wrong.append(f"hidden_act = {self.hidden_act!r}, expected one of {acts}")
        if not 0 < self.rms_norm_eps < float("inf"):
            wrong.append(f"rms_norm_eps = {self.rms_norm_eps:g} must be above 0")
        if not 0 <= self.time_step_limit[0] <= self.time_step_limit[1]:
            wrong.append(f"time_step_limit = {list(self.time_step_limit)} must be ascending, ≥ 0")
        for name in (*MULTIPLIERS, "mlp_multipliers", "ssm_multipliers"):
            value = getattr(self, name)
            if not all(map(math.isfinite, value if isinstance(value, tuple) else [value or 0.0])):
                wrong.append(f"{name} = {value} must be finite")
        return wrong

    @property
    def mixer(self) -> Mamba2:
        """The Mamba2 of each layer."""
        assert self.mamba_d_head is not None
        norm = "norm_first" if self.mamba_norm_before_gate else "gated"
        return Mamba2(
            self.hidden_size,
            self.mamba_n_heads,
            self.mamba_d_head,
            self.mamba_n_groups,
            self.mamba_d_state,
            self.mamba_d_conv,
            self.hidden_act,
            self.rms_norm_eps,
            self.time_step_limit,
            bias=self.mamba_proj_bias,
            out_bias=self.projectors_bias,
            conv_bias=self.mamba_conv_bias,
            norm=norm if self.mamba_rms_norm else "none",
            multipliers=self.ssm_multipliers,
        )

    @property
    def attention(self) -> Attention:
        """The attention of each layer."""
        assert self.num_key_value_heads is not None and self.head_dim is not None
        return Attention(
            self.hidden_size,
            self.num_attention_heads,
            self.num_key_value_heads,
            self.head_dim,
            rope=self.rope,
            bias=self.attention_bias,
            out_bias=self.attention_bias,
            key_multiplier=self.key_multiplier,
        )

    @property
    def mlp(self) -> Mlp:
        """The MLP of each layer."""
        return Mlp(
            self.hidden_size,
            self.intermediate_size,
            self.hidden_act,
            bias=self.mlp_bias,
            multipliers=self.mlp_multipliers,
        )


def weights(cfg: Config) -> WeightMap:
    """Canonical names are the checkpoint's without `model.`."""
    table = (cfg.vocab_size, cfg.hidden_size)
    blocks = {"mamba.": cfg.mixer, "self_attn.": cfg.attention, "feed_forward.": cfg.mlp}
    rows = [matrix("embed_tokens.weight", table, "model.embed_tokens.weight", use="table")]
    for i in range(cfg.num_hidden_layers):
        base = f"layers.{i}."
        for norm in ("input_layernorm.weight", "pre_ff_layernorm.weight"):
            rows.append(vector(base + norm, cfg.hidden_size, "model.", offset=1.0))
        for name, block in blocks.items():
            rows += block.params(base + name, f"model.{base}{name}")
    rows.append(vector("final_layernorm.weight", cfg.hidden_size, "model.", offset=1.0))
    found = with_head(rows, table, "embed_tokens.weight", cfg.tie_word_embeddings)
    return replace(found, params=tuple(_folded(cfg, row) for row in found.params))


def _folded(cfg: Config, row: Param) -> Param:
    """`row` with the form that MLX has: multiplied by what the model multiplies by.

    MLX's loader, too, tells such files by the convolution of the first layer.
    """
    word = row.name.removesuffix(".weight").rsplit(".", 1)[-1]
    factors = _multipliers(cfg).get(word) if row.matrix else None
    if factors is None or set(factors) == {1.0}:
        return row
    mixer, (form,) = cfg.mixer, row.forms
    sizes: tuple[int, ...] = row.shape[:1]
    if len(factors) > 1:
        sizes = (mixer.inner, mixer.inner, mixer.maps, mixer.maps, mixer.num_heads)
    mark = ("model.layers.0.mamba.conv1d.weight", (mixer.conv_dim, mixer.conv_kernel, 1))
    folded = replace(form, transform=Divided(factors, sizes), mark=mark)
    return replace(row, forms=(form, folded))


def _multipliers(cfg: Config) -> dict[str, tuple[float, ...]]:
    """Projection -> what MLX multiplies its rows by: all multipliers but those of k and v."""
    first, last = cfg.mlp_multipliers or (1.0, 1.0)
    parts = cfg.ssm_multipliers or (1.0,) * 5
    return {
        "embed_tokens": (cfg.embedding_multiplier,),
        "lm_head": (cfg.lm_head_multiplier,),
        "q_proj": (cfg.attention_in_multiplier,),
        "k_proj": (cfg.attention_in_multiplier,),
        "o_proj": (cfg.attention_out_multiplier,),
        "in_proj": tuple(cfg.ssm_in_multiplier * part for part in parts),
        "out_proj": (cfg.ssm_out_multiplier,),
        "gate_proj": (first,),
        "down_proj": (last,),
    }


def state(cfg: Config, context: int | None) -> list[StateSpec]:
    """Per layer the convolution tail and SSD state of Mamba2, and the keys and values."""
    return states([[cfg.mixer, cfg.attention]] * cfg.num_hidden_layers, context)


def forward(
    cfg: Config,
    params: Mapping[str, Array],
    tokens: Array,
    lengths: Array,
    positions: Array,
    state: Mapping[str, Array],
) -> tuple[Array, dict[str, Array]]:
    """Logits f32[B, V] of each row's last valid token, and the new state.

    tokens i32[B, T], the first lengths[b] (i32[B]) of a row valid; positions i32[B] is the position
    of each row's first token.
    """
    rows, new = Rows(lengths, positions), {}
    x = nn.embed(tokens, params["embed_tokens.weight"]) * cfg.embedding_multiplier
    for i in range(cfg.num_hidden_layers):
        at = f"layers.{i}."
        p, own = under(at, params), under(at, state)
        h = nn.rms_norm(x, p["input_layernorm.weight"], cfg.rms_norm_eps)
        recurrent, after = cfg.mixer(under("mamba.", p), h * cfg.ssm_in_multiplier, rows, own)
        new |= renamed(at, after)
        attended, after = cfg.attention(
            under("self_attn.", p), h * cfg.attention_in_multiplier, rows, own
        )
        new |= renamed(at, after)
        x = x + recurrent * cfg.ssm_out_multiplier + attended * cfg.attention_out_multiplier
        h = nn.rms_norm(x, p["pre_ff_layernorm.weight"], cfg.rms_norm_eps)
        x = x + cfg.mlp(under("feed_forward.", p), h, rows, {})[0]
    norm, tied = params["final_layernorm.weight"], cfg.tie_word_embeddings
    head = params["embed_tokens.weight" if tied else "lm_head.weight"]
    return nn.logits(x, lengths, norm, cfg.rms_norm_eps, head) * cfg.lm_head_multiplier, new
