"""RWKV-7 (Peng et al., arXiv:2503.14456), Hugging Face `rwkv7` as flash-linear-attention writes it.

    x = ln(embedding)             before the first layer
    x += time_mix(ln(x))          S = S (diag(w) - kappa (a kappa)^T) + v k^T, read by r
    x += channel_mix(ln(x))       value(relu(key(x))²)

Both mix each token with the one before it, which is state beside S. The first layer's values come
back in all others, so the layers are not independent. The group norm's epsilon is that of the layer
norms times the size of a head. BlinkDL's own .pth files hold the same tensors under other names
(see `emit.pth_rwkv7`).

Refused: attention layers, values of another width than keys, an activation that is not `sqrelu`,
sizes of low-rank functions that are not given, and any unknown key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jax import Array

from emit import config as config_reader
from emit.blocks.block import Rows, renamed, states, under
from emit.blocks.rwkv7 import ChannelMix, TimeMix
from emit.errors import EmitError
from emit.ops import nn
from emit.ops.norm import layer_norm
from emit.state import StateSpec
from emit.weights import Param, WeightMap, matrix, vector, with_head

PREFIX = "model."

# Which of a library's equal implementations runs (attn_mode, fuse_*, *_impl, rwkv7_backend),
# training alone (use_l2warp) and the length trained for (the model has no positions).
IGNORED = frozenset(
    """attn_mode fuse_norm fuse_cross_entropy fuse_linear_cross_entropy use_l2warp kernel_impl
    model_kernel_impl rwkv7_backend max_position_embeddings""".split()
)
ONLY = {"attn": None, "hidden_act": "sqrelu"}
ALIASES = {"num_attention_heads": "num_heads"}
HEAD = 64  # where a config says neither how many heads nor how large
ROUNDED = 32  # a width that follows from hidden_ratio is a multiple of it


@dataclass(frozen=True)
class Config:
    """What the graph depends on; names and defaults are those of the Hugging Face config."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    decay_low_rank_dim: int
    gate_low_rank_dim: int
    a_low_rank_dim: int
    v_low_rank_dim: int
    head_dim: int | None = 64  # null: attention_hidden_size / num_heads; a number once read
    num_heads: int | None = None  # attention_hidden_size / head_dim; a number once read
    attention_hidden_size: int | None = None  # hidden_size; a number once read
    value_dim: tuple[int, ...] | None = None  # of each layer; not kept once read
    hidden_ratio: float | None = 4.0  # where intermediate_size is given, not kept once read
    intermediate_size: int | None = None  # hidden_ratio × hidden_size; a number once read
    norm_first: bool = True
    norm_bias: bool = True
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = False

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Config:
        """Read config.json of either library; EmitError lists every key that does not fit."""
        given = dict(raw)
        if isinstance(wide := given.get("value_dim"), int) and 0 < wide < 2**31:
            given["value_dim"] = [wide] * len(config_reader.alike(raw.get("num_hidden_layers")))
        cfg = config_reader.read(cls, given, ignored=IGNORED, only=ONLY, aliases=ALIASES)
        inner = cfg.attention_hidden_size or cfg.hidden_size
        head_dim = cfg.head_dim or (max(1, inner // cfg.num_heads) if cfg.num_heads else HEAD)
        heads = cfg.num_heads or max(1, inner // head_dim)
        wide, wrong = cfg.intermediate_size, []
        if wide is None:
            ratio = 4.0 if cfg.hidden_ratio is None else cfg.hidden_ratio
            if not 0 < ratio * cfg.hidden_size < 2**31 - ROUNDED:
                wrong.append(f"hidden_ratio = {ratio:g}, expected a width above 0")
                ratio = 0.0
            wide = -(-int(ratio * cfg.hidden_size) // ROUNDED) * ROUNDED
        if heads * head_dim != inner:
            wrong.append(f"num_heads × head_dim = {heads} × {head_dim}, expected {inner}")
        widths = cfg.value_dim or (inner,)
        if set(widths) != {inner} or (cfg.value_dim and len(widths) != cfg.num_hidden_layers):
            wrong.append(
                f"value_dim = {list(widths[:5])}, expected {inner} for each of"
                f" {cfg.num_hidden_layers} layers"
            )
        if not 0 < cfg.norm_eps < float("inf"):
            wrong.append(f"norm_eps = {cfg.norm_eps:g} must be above 0")
        if wrong:
            raise EmitError("config.json of rwkv7: " + "; ".join(wrong))
        sizes = {"attention_hidden_size": inner, "num_heads": heads, "head_dim": head_dim}
        return replace(cfg, **sizes, value_dim=None, hidden_ratio=None, intermediate_size=wide)

    def time_mix(self, i: int) -> TimeMix:
        """The time mixing of layer i."""
        assert self.num_heads is not None and self.head_dim is not None
        return TimeMix(
            self.hidden_size,
            self.num_heads,
            self.head_dim,
            self.decay_low_rank_dim,
            self.a_low_rank_dim,
            self.gate_low_rank_dim,
            self.v_low_rank_dim if i else None,
            self.head_dim * self.norm_eps,
        )

    @property
    def channel_mix(self) -> ChannelMix:
        """The channel mixing of every layer."""
        assert self.intermediate_size is not None
        return ChannelMix(self.hidden_size, self.intermediate_size)

    def norms(self, i: int) -> tuple[str, ...]:
        """Names of layer i's norms, in the order that they come."""
        first = ("pre_norm",) if self.norm_first and i == 0 else ()
        return (*first, "attn_norm", "ffn_norm")


def weights(cfg: Config) -> WeightMap:
    """Canonical names are the checkpoint's without `model.`."""
    table = (cfg.vocab_size, cfg.hidden_size)
    rows = [matrix("embeddings.weight", table, f"{PREFIX}embeddings.weight", use="table")]
    for i in range(cfg.num_hidden_layers):
        at = f"layers.{i}."
        for norm in cfg.norms(i):
            rows += _norm(cfg, at + norm)
        rows += cfg.time_mix(i).params(f"{at}attn.", f"{PREFIX}{at}attn.")
        rows += cfg.channel_mix.params(f"{at}ffn.", f"{PREFIX}{at}ffn.")
    rows += _norm(cfg, "norm")
    return with_head(rows, table, "embeddings.weight", cfg.tie_word_embeddings)


def _norm(cfg: Config, name: str) -> list[Param]:
    rows = [vector(f"{name}.weight", cfg.hidden_size, PREFIX, offset=1.0)]
    return rows + ([vector(f"{name}.bias", cfg.hidden_size, PREFIX)] if cfg.norm_bias else [])


def state(cfg: Config, context: int | None) -> list[StateSpec]:
    """Per layer S, and the last token as time mixing and as channel mixing saw it."""
    layers: list[Any] = [[cfg.time_mix(i), cfg.channel_mix] for i in range(cfg.num_hidden_layers)]
    return states(layers, context)


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
    of each row's first token, which a model without positions does not read.
    """
    rows, new = Rows(lengths, positions), {}

    def normed(x: Array, name: str) -> Array:
        return layer_norm(x, params[f"{name}.weight"], params.get(f"{name}.bias"), cfg.norm_eps)

    x, v_first = nn.embed(tokens, params["embeddings.weight"]), None
    for i in range(cfg.num_hidden_layers):
        at = f"layers.{i}."
        p, s = under(at, params), under(at, state)
        if "pre_norm" in cfg.norms(i):
            x = normed(x, f"{at}pre_norm")
        mix = cfg.time_mix(i)
        y, v_first, after = mix(under("attn.", p), normed(x, f"{at}attn_norm"), rows, s, v_first)
        x = x + y
        y, last = cfg.channel_mix(under("ffn.", p), normed(x, f"{at}ffn_norm"), rows, s)
        x = x + y
        new |= renamed(at, {**after, **last})
    head = params["embeddings.weight" if cfg.tie_word_embeddings else "lm_head.weight"]
    return nn.linear(normed(nn.last_valid(x, lengths), "norm"), head)[:, 0], new
