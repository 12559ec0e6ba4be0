"""Nemotron-H (arXiv:2504.03624; Nemotron 3, arXiv:2512.20856), Hugging Face `nemotron_h`.

    x += mixer[i](rms(x))    mixer[i] one of Mamba2, attention, MLP and mixture of experts

The pattern says which layer is what: `M` Mamba2, `*` attention without positions, `-` a plain MLP
with squared ReLU, `E` experts of the same kind, routed by sigmoid scores with a correction bias,
in a latent space where the config has one, and a shared expert beside them.

The step size is clamped to (time_step_min, inf) in every step, as the library does in prefill and
forgets in its decode step. It does not read time_step_limit, which is (0, inf) in all published
configs; code that clamps by that alone, as mlx-lm, differs where a step size falls below
time_step_min.

Refused: another time_step_limit, attention_bias, a sliding window, layers given twice and not
alike, and any unknown key. mamba_proj_bias says nothing: the
projections have biases by use_bias, and a tensor too many or too few is refused. Multi-token
prediction layers (`mtp.`) are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from emit import config as config_reader
from emit.blocks.attention import Attention
from emit.blocks.backbone import Backbone, forward, mixers, state, weights
from emit.blocks.block import Block
from emit.blocks.mamba2 import Mamba2
from emit.blocks.mlp import Mlp
from emit.blocks.moe import Moe, Names
from emit.config import Count
from emit.errors import EmitError
from emit.ops import nn
from emit.ops.moe import Routing

__all__ = ["Config", "forward", "state", "weights"]

LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
KINDS = {"linear_attention": "mamba", "full_attention": "attention"}
KINDS |= {kind: kind for kind in LETTERS.values()}

# Keys that do not change the graph: initialisation, the reference's own scan chunk and kernels, the
# type of its residual stream and cache (here float32), how it overlaps work, what it returns, the
# number of shared experts (their one width is moe_shared_expert_intermediate_size), multi-token
# prediction, mamba_proj_bias (see above), expand (mamba_num_heads × mamba_head_dim counts) and the
# longest sequence it was trained on.
IGNORED = frozenset(
    """chunk_size mamba_chunk_size rescale_prenorm_residual residual_in_fp32 use_mamba_kernels
    mamba_ssm_cache_dtype time_step_max time_step_floor time_step_rank mamba_dt_max
    mamba_dt_init_floor attention_dropout hidden_dropout num_logits_to_keep
    output_router_logits moe_shared_expert_overlap n_shared_experts num_nextn_predict_layers
    mtp_layers_block_type mtp_layer_types mtp_hybrid_override_pattern keep_mtp_spec_in_bf16
    expand mamba_expand max_position_embeddings
    router_aux_loss_coef rope_theta partial_rotary_factor mamba_proj_bias""".split()
)
ALIASES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
    "attention_head_dim": "head_dim",
    "rms_norm_eps": "layer_norm_epsilon",
    "norm_eps": "layer_norm_epsilon",
    "num_local_experts": "n_routed_experts",
    "num_query_groups": "num_key_value_heads",
    "hidden_act": "mlp_hidden_act",
    "mamba_dt_limit": "time_step_limit",
    "layer_types": "layers_block_type",
}


@dataclass(frozen=True)
class Config:
    """What the graph depends on; names and defaults are those of the Hugging Face config.

    `layers_block_type` has one of `mamba`, `attention`, `mlp` and `moe` for each layer.
    """

    layers_block_type: tuple[str, ...]
    vocab_size: int = 131072
    hidden_size: int = 4096
    num_hidden_layers: Count = 0
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8
    head_dim: int = 128
    intermediate_size: int = 21504
    mlp_hidden_act: str = "relu2"
    mlp_bias: bool = False
    ssm_state_size: int = 128
    mamba_num_heads: int = 128
    mamba_head_dim: int = 64
    mamba_hidden_act: str = "silu"
    n_groups: int = 8
    conv_kernel: int = 4
    time_step_min: float = 0.001
    use_conv_bias: bool = True
    use_bias: bool = False
    n_routed_experts: int = 8
    moe_intermediate_size: int = 7688
    moe_shared_expert_intermediate_size: int = 7688
    moe_latent_size: int | None = None
    num_experts_per_tok: int = 2
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = False

    @classmethod
    def read(cls, raw: Mapping[str, object]) -> Config:
        """Read either dialect of config.json; EmitError lists every key that does not fit."""
        given = dict(raw)
        kinds = _kinds(given)
        given["layers_block_type"] = kinds
        given["num_hidden_layers"] = len(kinds)
        limit = [0.0, float("inf")]
        only = {"attention_bias": False, "sliding_window": None, "time_step_limit": limit}
        if "moe" not in kinds and not given.get("n_routed_experts", True):
            del given["n_routed_experts"]
        cfg = config_reader.read(cls, given, ignored=IGNORED, only=only, aliases=ALIASES)
        wrong = []
        for name, value, divisor, of in (
            ("mamba_num_heads", cfg.mamba_num_heads, cfg.n_groups, "n_groups"),
            ("num_attention_heads", cfg.num_attention_heads, cfg.kv_heads, "num_key_value_heads"),
            ("n_routed_experts", cfg.n_routed_experts, cfg.n_group, "n_group"),
        ):
            if value % divisor:
                wrong.append(f"{name} = {value}, expected a multiple of {of} = {divisor}")
        for name in ("mamba_hidden_act", "mlp_hidden_act"):
            if getattr(cfg, name) not in nn.ACTIVATIONS:
                known = ", ".join(sorted(nn.ACTIVATIONS))
                wrong.append(f"{name} = {getattr(cfg, name)!r}, expected one of {known}")
        eligible = cfg.n_routed_experts // cfg.n_group * cfg.topk_group
        if cfg.topk_group > cfg.n_group or cfg.num_experts_per_tok > eligible:
            wrong.append(
                f"num_experts_per_tok = {cfg.num_experts_per_tok}, expected at most {eligible}"
                f" (of topk_group = {cfg.topk_group} of n_group = {cfg.n_group} groups)"
            )
        if cfg.conv_kernel < 2:
            wrong.append(f"conv_kernel = {cfg.conv_kernel}, expected 2 or more")
        if not 0 < cfg.layer_norm_epsilon < float("inf"):
            wrong.append(f"layer_norm_epsilon = {cfg.layer_norm_epsilon:g} must be above 0")
        if not 0 <= cfg.time_step_min < float("inf"):
            wrong.append(f"time_step_min = {cfg.time_step_min:g}, expected 0 or more")
        if wrong:
            raise EmitError("config.json of nemotron_h: " + "; ".join(wrong))
        return cfg

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_key_value_heads or self.num_attention_heads

    def mixer(self, i: int) -> Block:
        """What layer `i` does."""
        return {
            "mamba": self._mamba,
            "attention": self._attention,
            "mlp": lambda: self._mlp(self.intermediate_size),
            "moe": self._moe,
        }[self.layers_block_type[i]]()

    def _mamba(self) -> Block:
        return Mamba2(
            self.hidden_size,
            self.mamba_num_heads,
            self.mamba_head_dim,
            self.n_groups,
            self.ssm_state_size,
            self.conv_kernel,
            self.mamba_hidden_act,
            self.layer_norm_epsilon,
            (self.time_step_min, float("inf")),
            self.use_bias,
            self.use_conv_bias,
        )

    def _attention(self) -> Block:
        return Attention(
            hidden_size=self.hidden_size,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
        )

    def _mlp(self, width: int) -> Mlp:
        return Mlp(self.hidden_size, width, self.mlp_hidden_act, gated=False, bias=self.mlp_bias)

    def _moe(self) -> Block:
        return Moe(
            hidden_size=self.hidden_size,
            intermediate_size=self.moe_intermediate_size,
            num_experts=self.n_routed_experts,
            activation=self.mlp_hidden_act,
            routing=Routing(
                top_k=self.num_experts_per_tok,
                score="sigmoid",
                normalize=self.norm_topk_prob,
                scale=self.routed_scaling_factor,
                groups=self.n_group,
                groups_kept=self.topk_group,
            ),
            gated=False,
            correction_bias=True,
            latent_size=self.moe_latent_size or 0,
            latent_bias=self.mlp_bias,
            shared=self._mlp(self.moe_shared_expert_intermediate_size),
            names=Names(stacked=("fc1", "fc2", "gate")),
        )

    @property
    def backbone(self) -> Backbone:
        """The whole model."""
        return mixers(
            self.vocab_size,
            self.hidden_size,
            self.layer_norm_epsilon,
            self.tie_word_embeddings,
            tuple(map(self.mixer, range(self.num_hidden_layers))),
            unused=frozenset({"mtp."}),
        )


def _kinds(given: dict[str, Any]) -> list[str]:
    """Takes the layers' kinds, in any dialect, out of a raw config. Raises EmitError."""
    names = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    ways = {name: given.pop(name, None) for name in names}
    number = given.pop("num_hidden_layers", None)
    found = {name: _words(name, value) for name, value in ways.items() if value is not None}
    if not found:
        raise EmitError(
            "config.json of nemotron_h: hybrid_override_pattern is missing, and so is"
            " layers_block_type"
        )
    where, kinds = next(iter(found.items()))
    for other, theirs in found.items():
        if theirs != kinds:
            raise EmitError(
                f"config.json of nemotron_h: {other} contradicts {where}: make them agree"
            )
    if number is not None and number != len(kinds):
        raise EmitError(
            f"config.json of nemotron_h: num_hidden_layers = {json.dumps(number)}, but {where}"
            f" has {len(kinds)} layers"
        )
    return kinds


def _words(where: str, found: Any) -> list[str]:
    """The layers' kinds of a pattern of letters or a list of words. Raises EmitError."""
    known = LETTERS if where == "hybrid_override_pattern" else KINDS
    if not found or not isinstance(found, (str, list)) or any(str(x) not in known for x in found):
        raise EmitError(
            f"config.json of nemotron_h: {where} = {json.dumps(found)[:200]}, expected one of"
            f" {', '.join(known)} for each layer"
        )
    return [known[x] for x in found]
