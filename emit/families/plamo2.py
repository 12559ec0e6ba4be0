"""PLaMo 2 (Preferred Networks, "PLaMo 2 Technical Report", arXiv:2509.04897), `plamo2`.

    x += post_mixer_norm(mixer(pre_mixer_norm(x)))      mixer: Mamba or attention by layer
    x += post_mlp_norm(mlp(pre_mlp_norm(x)))

Each of these norms multiplies by weight + offset: 1, 1/5, 1 and 5^-1.5, and 1 in the last one. The
checkpoint holds the weights without it.

Settled, because the vendor's ports and vLLM or llama.cpp, all run on published weights, agree: the
offsets; z before x in each head's part of in_proj; B, C, dt in that order, each with its norm; dt
from softplus without limits (mlx-lm clamps it to [0.001, 100]); q, k, v in one projection, q and k
with an RMS norm without weight and then a factor for each head and channel; RoPE over all of a head
in its half-split form; H/G neighbouring query heads for each key head (a port of the 1B model,
which has one key head, repeats them in turns); softmax of q k / sqrt(D); which layers attend.

By the vendor's code alone: a window of `attention_window_size` keys before a token, and its own
(vLLM counts the token's own among them, mlx-lm and llama.cpp attend to everything); the RoPE base
`rope_theta` in layers of `full_attention_idx` and `rope_local_theta` in all others, both 10000 if a
config lacks them; the eps 1e-6 of q's and k's norms, whatever `rms_norm_eps` says.

Not settled: the base in windowed layers of a config with `rope_theta` alone. Here it is that one,
as in vLLM and llama.cpp, which know no other key; of the vendor's two loaders one takes 10000.

Refused: images, FP8 and n-bit evaluation, `mamba_step` 1, scaled RoPE, any unknown key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax import Array

from emit import config as config_reader
from emit.blocks.attention import Attention
from emit.blocks.block import Block, Rows, renamed, states, under
from emit.blocks.mlp import Mlp
from emit.blocks.plamo_mamba import PlamoMamba
from emit.config import Count
from emit.errors import EmitError
from emit.forms import Form, first_half, second_half
from emit.ops import nn, rope
from emit.ops.rope import Rope
from emit.state import StateSpec
from emit.weights import Param, WeightMap, matrix, vector, with_head

THETA = 1e4
OFFSETS = {
    "pre_mixer_norm": 1.0,
    "post_mixer_norm": 1.0 / 5.0,
    "pre_mlp_norm": 1.0,
    "post_mlp_norm": 5.0**-1.5,
}
# The length that positions are made for (RoPE has no end) and the reference's own scan chunk.
IGNORED = frozenset("max_position_embeddings mamba_chunk_size".split())
ONLY = {
    "eval_attention_n_bit": None,
    "eval_mlp_n_bit": None,
    "fp8_accum_dtype": None,
    "image_feature_size": None,
    "image_proj_type": "linear",
    "image_token_id": None,
    "linear_type": "normal",
    "rope_scaling": None,
}


@dataclass(frozen=True)
class Config:
    """What the graph depends on; names and defaults are those of the Hugging Face config."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    num_hidden_layers: int = 32
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    num_attention_heads: int = 32
    num_key_value_heads: int = 4
    hidden_size_per_head: int = 128
    attention_window_size: int = 2048
    full_attention_idx: tuple[Count, ...] | None = None  # a tuple once read
    rope_theta: float | None = None  # a number once read
    rope_local_theta: float | None = None  # a number once read
    mamba_d_state: int = 64
    mamba_d_conv: int = 4
    mamba_num_heads: int = 64
    mamba_step: int = 2
    mamba_enabled: bool = True
    intermediate_size: int = 13312

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Config:
        """Read config.json; EmitError lists every key that does not fit."""
        window = raw.get("attention_window_size", cls.attention_window_size)
        same = None if raw.get("sliding_window") is None else window  # the vendor's copy for vLLM
        only = {**ONLY, "sliding_window": same}
        cfg = config_reader.read(cls, _flat(raw), ignored=IGNORED, only=only)
        cfg = replace(cfg, full_attention_idx=cfg.full_attention_idx or ())
        wrong = cfg._problems()
        if wrong:
            raise EmitError("config.json of plamo2: " + "; ".join(wrong))
        theta = cfg.rope_theta or THETA
        return replace(cfg, rope_theta=theta, rope_local_theta=cfg.rope_local_theta or theta)

    def _problems(self) -> list[str]:
        wrong, layers = [], range(self.num_hidden_layers)
        if self.num_attention_heads % self.num_key_value_heads:
            wrong.append(
                f"num_attention_heads = {self.num_attention_heads}, expected a multiple of"
                f" num_key_value_heads = {self.num_key_value_heads}"
            )
        if self.hidden_size_per_head % 2:
            wrong.append(
                f"hidden_size_per_head = {self.hidden_size_per_head}, expected an even number"
            )
        if self.mamba_d_conv < 2:
            wrong.append(f"mamba_d_conv = {self.mamba_d_conv}, expected 2 or more")
        if self.mamba_enabled and self.mamba_step < 2:
            wrong.append(
                f"mamba_step = {self.mamba_step}, expected 2 or more, or mamba_enabled = false"
            )
        if not 0 < self.rms_norm_eps < float("inf"):
            wrong.append(f"rms_norm_eps = {self.rms_norm_eps:g} must be above 0")
        full = self.full_attention_idx or ()
        if outside := sorted(set(full) - set(layers)):
            wrong.append(
                f"full_attention_idx holds {outside[0]}, expected layers below {len(layers)}"
            )
        for name in ("rope_theta", "rope_local_theta"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                wrong.append(f"{name} = {value:g} must be above 0")
        return wrong

    def is_mamba(self, i: int) -> bool:
        """Whether layer i is Mamba: of each `mamba_step` layers the middle one attends."""
        if not self.mamba_enabled:
            return False
        if self.num_hidden_layers <= self.mamba_step // 2:
            return i != self.num_hidden_layers - 1
        return i % self.mamba_step != self.mamba_step // 2

    def mixer(self, i: int) -> Block:
        """The mixer of layer i."""
        if self.is_mamba(i):
            return PlamoMamba(
                self.hidden_size,
                self.mamba_num_heads,
                self.hidden_size_per_head,
                self.mamba_d_state,
                self.mamba_d_conv,
                max(64, self.hidden_size // 16),
                self.rms_norm_eps,
            )
        full = i in (self.full_attention_idx or ())
        theta = (self.rope_theta if full else self.rope_local_theta) or THETA
        return Attention(
            self.hidden_size,
            self.num_attention_heads,
            self.num_key_value_heads,
            self.hidden_size_per_head,
            rope=Rope(tuple(rope.default(theta, self.hidden_size_per_head))),
            window=None if full else self.attention_window_size + 1,
            fused=True,
            qk_norm="heads",
            norm_eps=1e-6,
            norm_names=("q_weight", "k_weight"),
        )

    @property
    def mlp(self) -> Mlp:
        """The FFN of every layer."""
        return Mlp(self.hidden_size, self.intermediate_size, "silu")


def _flat(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`raw` with the bases of transformers 5's `rope_parameters` under their older names."""
    out = dict(raw)
    given = out.pop("rope_parameters", None) or {}
    parts = {
        "rope_theta": given.get("full_attention", given),
        "rope_local_theta": given.get("sliding_attention") or {},
    }
    for name, part in parts.items():
        rest = {k: v for k, v in part.items() if k not in ("rope_theta", "sliding_attention")}
        if rest.pop("rope_type", "default") != "default" or rest:
            raise EmitError(
                f"config.json of plamo2: rope_parameters = {json.dumps(given)} is not supported"
                " (only rope_type default, and rope_theta)"
            )
        value = part.get("rope_theta")
        if value is not None and out.setdefault(name, value) != value:
            raise EmitError(
                f"config.json of plamo2: {name} = {json.dumps(out[name])} contradicts"
                f" {json.dumps(value)} in rope_parameters"
            )
    return out


def weights(cfg: Config) -> WeightMap:
    """Canonical names are the checkpoint's without `model.`, and with one `layers.` of two."""
    table, top = (cfg.vocab_size, cfg.hidden_size), "model.layers."
    rows = [matrix("embed_tokens.weight", table, "model.embed_tokens.weight", use="table")]
    for i in range(cfg.num_hidden_layers):
        base = f"layers.{i}."
        rows += [vector(f"{base}{name}.weight", cfg.hidden_size, top) for name in OFFSETS]
        rows += cfg.mixer(i).params(base + "mixer.", f"{top}{base}mixer.")
        rows += _mlp_weights(cfg, base + "mlp.", f"{top}{base}mlp.")
    rows.append(vector("norm.weight", cfg.hidden_size, "model."))
    return with_head(rows, table, "embed_tokens.weight", cfg.tie_word_embeddings)


def _mlp_weights(cfg: Config, name: str, source: str) -> list[Param]:
    """The checkpoint's gate_up_proj holds the rows of gate_proj, then those of up_proj."""
    wide, hidden = cfg.intermediate_size, cfg.hidden_size
    halves = {"gate_proj": first_half, "up_proj": second_half}
    rows = {param.name: param for param in cfg.mlp.params(name, source)}
    for each, half in halves.items():
        rows[f"{name}{each}.weight"] = replace(
            rows[f"{name}{each}.weight"],
            forms=(Form((source + "gate_up_proj.weight",), (2 * wide, hidden), half, rows=True),),
        )
    return list(rows.values())


def state(cfg: Config, context: int | None) -> list[StateSpec]:
    """Per Mamba layer the convolution tail and SSD state, per attention layer keys and values."""
    return states([[cfg.mixer(i)] for i in range(cfg.num_hidden_layers)], context)


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

    def norm(p: Mapping[str, Array], name: str, x: Array) -> Array:
        return nn.rms_norm(x, p[f"{name}.weight"] + np.float32(OFFSETS[name]), cfg.rms_norm_eps)

    x = nn.embed(tokens, params["embed_tokens.weight"])
    for i in range(cfg.num_hidden_layers):
        at = f"layers.{i}."
        p = under(at, params)
        y, after = cfg.mixer(i)(
            under("mixer.", p), norm(p, "pre_mixer_norm", x), rows, under(at, state)
        )
        new |= renamed(at, after)
        x = x + norm(p, "post_mixer_norm", y)
        y, _ = cfg.mlp(under("mlp.", p), norm(p, "pre_mlp_norm", x), rows, {})
        x = x + norm(p, "post_mlp_norm", y)
    head = params["embed_tokens.weight" if cfg.tie_word_embeddings else "lm_head.weight"]
    return nn.logits(x, lengths, params["norm.weight"] + 1.0, cfg.rms_norm_eps, head), new
