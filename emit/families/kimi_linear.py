"""Kimi Linear (Moonshot AI, arXiv:2510.26692), Hugging Face `kimi_linear`.

    x += mixer(rms(x))     Kimi Delta Attention, or latent attention (MLA) without positions
    x += ffn(rms(x))       a gated FFN, or experts routed by sigmoid scores with a correction bias

Settled: both norms inside the latent attention have an epsilon of 1e-6, whatever the config says.
tie_word_embeddings is followed (the library ignores it, and always has a head of its own). A first
layer's dense FFN is called `mlp` by published checkpoints and `block_sparse_moe` by the library.

Refused: latent attention with rotated keys (mla_use_nope false: the library has none), a router
that is not sigmoid, prediction layers, and any unknown key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from emit import config as config_reader
from emit.blocks.backbone import Backbone, Branch, forward, state, weights
from emit.blocks.block import Block
from emit.blocks.kda import Kda
from emit.blocks.mla import Mla
from emit.blocks.mlp import Mlp
from emit.blocks.moe import Moe, Names
from emit.config import Count
from emit.errors import EmitError
from emit.ops import nn
from emit.ops.moe import Routing

__all__ = ["Config", "forward", "state", "weights"]

LATENT_EPS = 1e-6
MIXERS = ("linear_attention", "full_attention")
FEED_FORWARDS = ("dense", "sparse")
NAMES = Names(up="w3", down="w2", gate="w1", biases=("e_score_correction_bias",))

# Keys that do not change the graph: positions (there are none), training, what the library
# returns, sizes that mean nothing here (head_dim; num_key_value_heads: latent attention has no
# groups) or follow from others (qk_head_dim).
IGNORED = frozenset(
    """num_key_value_heads rope_theta rope_scaling rope_parameters attention_dropout
    output_router_logits router_aux_loss_coef model_max_length pretraining_tp head_dim
    qk_head_dim""".split()
)
ONLY = {
    "mla_use_nope": True,
    "moe_router_activation_func": "sigmoid",
    "num_nextn_predict_layers": 0,
}
ALIASES = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
# linear_attn_config of published files, and what the library calls the same.
LINEAR = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


@dataclass(frozen=True)
class Config:
    """What the graph depends on; names and defaults are those of the Hugging Face config.

    `layer_types` and `mlp_layer_types` have a word of MIXERS and of FEED_FORWARDS for each layer;
    where a config has none, other keys say the same.
    """

    vocab_size: int = 163840
    hidden_size: int = 2304
    intermediate_size: int = 9216
    moe_intermediate_size: int = 1024
    num_hidden_layers: int = 27
    num_attention_heads: int = 32
    layer_types: tuple[str, ...] | None = None
    mlp_layer_types: tuple[str, ...] | None = None
    first_k_dense_replace: Count = 1
    moe_layer_freq: int = 1
    linear_head_dim: int = 128
    linear_num_heads: int = 32
    linear_conv_kernel_dim: int = 4
    kv_lora_rank: int = 512
    q_lora_rank: int | None = None
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    attention_bias: bool = False
    num_experts: int = 256
    num_experts_per_token: int = 8
    num_shared_experts: Count = 1
    num_expert_group: int = 1
    topk_group: int = 1
    use_grouped_topk: bool = True
    moe_renormalize: bool = True
    routed_scaling_factor: float = 2.446
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Config:
        """Read either dialect of config.json; EmitError lists every key that does not fit."""
        given, listed = _spread(raw)
        cfg = config_reader.read(cls, given, ignored=IGNORED, only=ONLY, aliases=ALIASES)
        problems, every = [], range(cfg.num_hidden_layers)
        kinds = cfg.layer_types or listed
        if kinds is None:
            kinds = tuple(MIXERS[i > 0 and i % 4 == 0] for i in every)
        elif listed is not None and kinds != listed:
            problems.append("layer_types contradicts linear_attn_config")
        dense = cfg.mlp_layer_types or tuple(
            FEED_FORWARDS[i >= cfg.first_k_dense_replace and i % cfg.moe_layer_freq == 0]
            for i in every
        )
        cfg = replace(cfg, layer_types=kinds, mlp_layer_types=dense)
        problems += cfg._problems()
        if problems:
            raise EmitError("config.json of kimi_linear: " + "; ".join(problems))
        # What other fields say, in one way whatever the dialect.
        return replace(
            cfg,
            first_k_dense_replace=0,
            moe_layer_freq=1,
            use_grouped_topk=True,
        )

    def _problems(self) -> list[str]:
        """What does not fit together."""
        wrong = []
        for name, words in (("layer_types", MIXERS), ("mlp_layer_types", FEED_FORWARDS)):
            found = getattr(self, name)
            if len(found) != self.num_hidden_layers or any(word not in words for word in found):
                wrong.append(
                    f"{name} = {json.dumps(found)}, expected {' or '.join(words)} for each of"
                    f" num_hidden_layers = {self.num_hidden_layers}"
                )
        if self.num_experts % self.num_expert_group:
            wrong.append(
                f"num_experts = {self.num_experts}, expected a multiple of num_expert_group ="
                f" {self.num_expert_group}"
            )
        eligible = self.num_experts // self.num_expert_group * self.topk_group
        if self.topk_group > self.num_expert_group or self.num_experts_per_token > eligible:
            wrong.append(
                f"num_experts_per_token = {self.num_experts_per_token}, expected at most {eligible}"
                f" (of topk_group = {self.topk_group} of num_expert_group ="
                f" {self.num_expert_group} groups)"
            )
        if self.num_expert_group > 1 and not self.use_grouped_topk:
            wrong.append("use_grouped_topk = false contradicts num_expert_group above 1")
        if self.hidden_act not in nn.ACTIVATIONS:
            known = ", ".join(sorted(nn.ACTIVATIONS))
            wrong.append(f"hidden_act = {self.hidden_act!r}, expected one of {known}")
        if self.linear_conv_kernel_dim < 2:
            wrong.append(
                f"linear_conv_kernel_dim = {self.linear_conv_kernel_dim}, expected 2 or more"
            )
        if not 0 < self.rms_norm_eps < float("inf"):
            wrong.append(f"rms_norm_eps = {self.rms_norm_eps:g} must be above 0")
        return wrong

    def mixer(self, i: int) -> Block:
        """What layer `i` does first."""
        assert self.layer_types is not None
        if self.layer_types[i] == "linear_attention":
            return Kda(
                self.hidden_size,
                self.linear_num_heads,
                self.linear_head_dim,
                self.linear_conv_kernel_dim,
                self.hidden_act,
                self.rms_norm_eps,
            )
        return Mla(
            hidden_size=self.hidden_size,
            num_heads=self.num_attention_heads,
            kv_rank=self.kv_lora_rank,
            nope_dim=self.qk_nope_head_dim,
            rope_dim=self.qk_rope_head_dim,
            value_dim=self.v_head_dim,
            q_rank=self.q_lora_rank,
            eps=LATENT_EPS,
            bias=self.attention_bias,
        )

    def feed_forward(self, i: int) -> Branch:
        """What layer `i` does then."""
        assert self.mlp_layer_types is not None
        norm, sparse, hidden = "post_attention_layernorm", "block_sparse_moe", self.hidden_size
        if self.mlp_layer_types[i] == "dense":
            block = Mlp(hidden, self.intermediate_size, self.hidden_act)
            return Branch(norm, "mlp", block, also=(sparse,))
        routing = Routing(
            top_k=self.num_experts_per_token,
            score="sigmoid",
            normalize=self.moe_renormalize,
            scale=self.routed_scaling_factor,
            groups=self.num_expert_group,
            groups_kept=self.topk_group,
        )
        width = self.moe_intermediate_size * self.num_shared_experts
        block = Moe(
            hidden_size=hidden,
            intermediate_size=self.moe_intermediate_size,
            num_experts=self.num_experts,
            activation=self.hidden_act,
            routing=routing,
            correction_bias=True,
            shared=Mlp(hidden, width, self.hidden_act) if width else None,
            names=NAMES,
        )
        return Branch(norm, sparse, block, also=("mlp",))

    @property
    def backbone(self) -> Backbone:
        """The whole model."""
        return Backbone(
            self.vocab_size,
            self.hidden_size,
            self.rms_norm_eps,
            self.tie_word_embeddings,
            tuple(
                (Branch("input_layernorm", "self_attn", self.mixer(i)), self.feed_forward(i))
                for i in range(self.num_hidden_layers)
            ),
            # The library writes those of no shared expert, empty.
            unused=frozenset()
            if self.num_shared_experts
            else frozenset(
                f"model.layers.{i}.block_sparse_moe.shared_experts."
                for i in range(self.num_hidden_layers)
            ),
        )


def _spread(raw: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...] | None]:
    """A raw config with linear_attn_config's sizes beside its other keys, and the kinds of layers
    that it lists, which are numbered from 1. Raises EmitError."""
    given = dict(raw)
    nested = given.pop("linear_attn_config", None)
    if nested is None:
        return given, None
    wrong = _nested_problems(nested, given)
    if wrong:
        raise EmitError("config.json of kimi_linear: " + "; ".join(wrong))
    given |= {LINEAR[key]: value for key, value in nested.items() if key in LINEAR}
    if "kda_layers" not in nested or "full_attn_layers" not in nested:
        return given, None
    numbered = dict.fromkeys(nested["kda_layers"], MIXERS[0])
    numbered |= dict.fromkeys(nested["full_attn_layers"], MIXERS[1])
    return given, tuple(kind for _, kind in sorted(numbered.items()))


def _nested_problems(nested: Any, given: Mapping[str, Any]) -> list[str]:
    """What is wrong with linear_attn_config, or contradicts the other keys."""
    if not isinstance(nested, dict):
        return [f"linear_attn_config = {json.dumps(nested)}, expected an object"]
    wrong = []
    for key, value in nested.items():
        if key not in LINEAR and key not in ("kda_layers", "full_attn_layers"):
            wrong.append(f"linear_attn_config.{key} = {json.dumps(value)} is not a known key")
        elif key in LINEAR and given.get(LINEAR[key], value) != value:
            wrong.append(f"linear_attn_config.{key} contradicts {LINEAR[key]}")
    lists = [nested.get(key, []) for key in ("kda_layers", "full_attn_layers")]
    if not all(isinstance(each, list) for each in lists):
        return [*wrong, "linear_attn_config.kda_layers and full_attn_layers, expected lists"]
    if len(nested.keys() & {"kda_layers", "full_attn_layers"}) == 1:
        wrong.append("linear_attn_config: kda_layers and full_attn_layers, expected both or none")
    layers = [layer for each in lists for layer in each]
    count = given.get("num_hidden_layers", Config.num_hidden_layers)
    if "kda_layers" in nested and "full_attn_layers" in nested:
        if any(isinstance(layer, bool) or not isinstance(layer, int) for layer in layers) or (
            sorted(layers) != list(range(1, len(layers) + 1)) or len(layers) != count
        ):
            wrong.append(
                "linear_attn_config: kda_layers and full_attn_layers, expected each of the numbers"
                f" 1 to num_hidden_layers = {json.dumps(count)} in one of them"
            )
    return wrong
