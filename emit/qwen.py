"""What Qwen3-Next and Qwen3.5 have in common: the config, the layers and their blocks.

    x += mixer(rms(x))     Gated DeltaNet, or attention with an output gate
    x += ffn(rms(x))       one gated FFN, or the best of `num_experts` and a shared one with a gate

All norms but the delta rule's own multiply by 1 + w.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from emit import config as config_reader
from emit import rope
from emit.blocks.attention import Attention
from emit.blocks.backbone import Backbone, Branch
from emit.blocks.block import Block
from emit.blocks.gated_delta import GatedDelta
from emit.blocks.mlp import Mlp
from emit.blocks.moe import Moe, Names
from emit.config import Count
from emit.errors import EmitError
from emit.forms import minus_one
from emit.ops import nn
from emit.ops.moe import Routing
from emit.ops.rope import Rope
from emit.weights import WeightMap

KINDS = ("linear_attention", "full_attention")
# Training alone, the window's sizes (no layer has one, see ONLY), the type of the library's state
# (here float32), how multi-token prediction is made, and the keys of `emit.rope`.
IGNORED = rope.KEYS | frozenset(
    """attention_dropout output_router_logits router_aux_loss_coef sliding_window max_window_layers
    mamba_ssm_dtype mtp_num_hidden_layers mtp_use_dedicated_embeddings""".split()
)
ONLY = {"use_sliding_window": False, "attn_output_gate": True}
# Of a config with images: what is beside `text_config` and says nothing about the text model.
BESIDE = frozenset(
    """text_config vision_config image_token_id video_token_id vision_start_token_id
    vision_end_token_id tie_word_embeddings model_type""".split()
)
NAMES = Names(router="gate", shared="shared_expert")
# The norms of 1 + w, by the ends of their names.
NORMS = tuple(
    f".{name}.weight"
    for name in ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm")
)
BEYOND = {"mtp.", "model.visual.", "language_model.mtp.", "vision_tower."}


@dataclass(frozen=True)
class Config:
    """What the graph depends on; names are those of the Hugging Face config, defaults Qwen3-Next's.

    `layer_types` has one of KINDS for each layer; where a config lacks it, each
    `full_attention_interval`-th layer attends. SPLIT says how a checkpoint names the projections
    of the delta rule (see `blocks.gated_delta`), FIXED what the family has no choice of.
    """

    SPLIT: ClassVar[bool] = False
    FIXED: ClassVar[Mapping[str, Any]] = {}

    layer_types: tuple[str, ...] = ()
    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 48
    num_attention_heads: int = 16
    num_key_value_heads: int = 2
    head_dim: int = 256
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[Count, ...] | None = ()
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    num_experts_per_tok: int = 10
    num_experts: Count = 512
    norm_topk_prob: bool = True
    rope: Rope | None = None  # from the keys of `emit.rope`
    text_prefix: str = "model."  # what the checkpoint's names of the text model begin with

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Self:
        """Read either dialect of config.json; EmitError lists every key that does not fit."""
        family = raw.get("model_type")
        given = dict(raw)
        if given.pop("text_prefix", None) is not None:
            raise EmitError(f"config.json of {family}: text_prefix is not a known key")
        interval = given.pop("full_attention_interval", 4)
        if given.get("layer_types") is None:
            layers = given.get("num_hidden_layers", cls.num_hidden_layers)
            given["layer_types"] = _every(family, interval, layers)
        cfg = config_reader.read(cls, given, ignored=IGNORED, only=ONLY)
        wrong = cfg._problems()
        if wrong:
            raise EmitError(f"config.json of {family}: " + "; ".join(wrong))
        found = rope.read(_quarter(raw), cfg.head_dim, cfg.max_position_embeddings, 10000.0)
        return replace(cfg, rope=found)

    def _problems(self) -> list[str]:
        """What does not fit together."""
        wrong, acts = [], sorted(nn.ACTIVATIONS)
        for name, value in self.FIXED.items():
            if getattr(self, name) != value:
                found = json.dumps(getattr(self, name))
                wrong.append(f"{name} = {found} is not supported (only {json.dumps(value)})")
        if len(self.layer_types) != self.num_hidden_layers:
            wrong.append(
                f"layer_types has {len(self.layer_types)} layers, expected num_hidden_layers = "
                f"{self.num_hidden_layers}"
            )
        if odd := sorted(set(self.layer_types) - set(KINDS)):
            wrong.append(f"layer_types has {json.dumps(odd[0])}, expected one of {list(KINDS)}")
        for name, of in (
            ("num_attention_heads", "num_key_value_heads"),
            ("linear_num_value_heads", "linear_num_key_heads"),
        ):
            if getattr(self, name) % getattr(self, of):
                wrong.append(
                    f"{name} = {getattr(self, name)}, expected a multiple of {of} = "
                    f"{getattr(self, of)}"
                )
        if self.num_experts and self.num_experts_per_tok > self.num_experts:
            wrong.append(
                f"num_experts_per_tok = {self.num_experts_per_tok}, expected at most num_experts ="
                f" {self.num_experts}"
            )
        if self.hidden_act not in acts:
            wrong.append(f"hidden_act = {self.hidden_act!r}, expected one of {acts}")
        if self.linear_conv_kernel_dim < 2:
            wrong.append(
                f"linear_conv_kernel_dim = {self.linear_conv_kernel_dim}, expected 2 or more"
            )
        if not 0 < self.rms_norm_eps < float("inf"):
            wrong.append(f"rms_norm_eps = {self.rms_norm_eps:g} must be above 0")
        return wrong

    def mixer(self, i: int) -> Branch:
        """What comes first in layer i."""
        norm, eps = "input_layernorm", self.rms_norm_eps
        if self.layer_types[i] == "linear_attention":
            delta = GatedDelta(
                self.hidden_size,
                self.linear_num_key_heads,
                self.linear_num_value_heads,
                self.linear_key_head_dim,
                self.linear_value_head_dim,
                self.linear_conv_kernel_dim,
                self.hidden_act,
                eps,
                split=self.SPLIT,
            )
            return Branch(norm, "linear_attn", delta)
        attention = Attention(
            self.hidden_size,
            self.num_attention_heads,
            self.num_key_value_heads,
            self.head_dim,
            rope=self.rope,
            bias=self.attention_bias,
            out_bias=self.attention_bias,
            qk_norm="shared",
            norm_eps=eps,
            norm_offset=1.0,
            gate=True,
        )
        return Branch(norm, "self_attn", attention)

    def feed_forward(self, i: int) -> Branch:
        """What comes second in layer i."""
        dense = i in (self.mlp_only_layers or ()) or (i + 1) % self.decoder_sparse_step
        act, sizes = self.hidden_act, (self.hidden_size, self.moe_intermediate_size)
        block: Block = Mlp(self.hidden_size, self.intermediate_size, act)
        if self.num_experts and not dense:
            block = Moe(
                *sizes,
                self.num_experts,
                act,
                Routing(self.num_experts_per_tok, normalize=self.norm_topk_prob),
                shared=Mlp(self.hidden_size, self.shared_expert_intermediate_size, act),
                shared_gate=True,
                names=NAMES,
            )
        return Branch("post_attention_layernorm", "mlp", block)

    @property
    def backbone(self) -> Backbone:
        """The whole model."""
        layers = range(self.num_hidden_layers)
        return Backbone(
            self.vocab_size,
            self.hidden_size,
            self.rms_norm_eps,
            self.tie_word_embeddings,
            tuple((self.mixer(i), self.feed_forward(i)) for i in layers),
            prefix=self.text_prefix,
            norm_offset=1.0,
            unused=frozenset(BEYOND if self.SPLIT else {"mtp."}),
        )

    @property
    def mark(self) -> tuple[str, tuple[int, ...]] | None:
        """A tensor, and the shape that only MLX gives it: the first convolution, or stack."""
        for i in range(self.num_hidden_layers):
            block, at = self.mixer(i).block, f"{self.text_prefix}layers.{i}."
            if isinstance(block, GatedDelta):
                shape = (block.conv_dim, self.linear_conv_kernel_dim, 1)
                return f"{at}linear_attn.conv1d.weight", shape
        for i in range(self.num_hidden_layers):
            if not self.SPLIT and isinstance(self.feed_forward(i).block, Moe):
                shape = (self.num_experts, self.moe_intermediate_size, self.hidden_size)
                return f"{self.text_prefix}layers.{i}.mlp.switch_mlp.up_proj.weight", shape
        return None


@dataclass(frozen=True)
class Dense(Config):
    """Qwen3.5: the projections of the delta rule apart, and no experts."""

    SPLIT: ClassVar[bool] = True
    FIXED: ClassVar[Mapping[str, Any]] = {"num_experts": 0}

    vocab_size: int = 248320
    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_hidden_layers: int = 32
    num_key_value_heads: int = 4
    num_experts: Count = 0

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Self:
        """Also the config of a model with images, whose text model is in `text_config`."""
        return super().read(_text(raw)) if "text_config" not in raw else cls._nested(raw)

    @classmethod
    def _nested(cls, raw: Mapping[str, Any]) -> Self:
        inner = raw["text_config"]
        if not isinstance(inner, Mapping):
            raise EmitError(f"config.json of {raw.get('model_type')}: text_config is no object")
        config_reader.read(_Beside, raw, ignored=BESIDE)
        given = {"tie_word_embeddings": raw.get("tie_word_embeddings", False), **inner}
        if given["tie_word_embeddings"] != raw.get("tie_word_embeddings", False):
            raise EmitError(
                f"config.json of {raw.get('model_type')}: tie_word_embeddings = "
                f"{json.dumps(raw.get('tie_word_embeddings', False))} contradicts text_config's "
                f"{json.dumps(given['tie_word_embeddings'])}"
            )
        return replace(super().read(_text(given)), text_prefix="model.language_model.")


@dataclass(frozen=True)
class Sparse(Dense):
    """Qwen3.5 with experts in each layer, always weighted to a sum of 1."""

    FIXED: ClassVar[Mapping[str, Any]] = {
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": (),
    }

    hidden_size: int = 2048
    num_hidden_layers: int = 40
    num_key_value_heads: int = 2
    num_experts_per_tok: int = 8
    num_experts: int = 256


@dataclass(frozen=True)
class _Beside:
    """No key is used of those beside `text_config`."""


def weights(cfg: Config) -> WeightMap:
    """Canonical names are the checkpoint's without `model.`, or `model.language_model.`.

    MLX holds 1 + w of the norms, and calls Qwen3.5's tensors otherwise.
    """
    found, mark = cfg.backbone.weights(), cfg.mark
    rows = []
    for row in found.params:
        forms = row.forms
        if cfg.SPLIT:
            forms += tuple(
                replace(form, names=tuple(_renamed(cfg, name) for name in form.names))
                for form in forms
            )
        if mark is not None and (row.name == "norm.weight" or row.name.endswith(NORMS)):
            held = (mark[0] if not cfg.SPLIT else _renamed(cfg, mark[0]), mark[1])
            forms += (replace(forms[-1], transform=minus_one, mark=held),)
        rows.append(replace(row, forms=forms))
    return replace(found, params=tuple(rows))


def _renamed(cfg: Config, name: str) -> str:
    """What MLX calls a tensor of Qwen3.5."""
    if name.startswith(cfg.text_prefix):
        return "language_model.model." + name.removeprefix(cfg.text_prefix)
    return "language_model." + name


def _text(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`raw` without how rotation is dealt to time, height and width: a text has equal ones."""
    out = dict(raw)
    for where in ("rope_parameters", "rope_scaling"):
        if isinstance(out.get(where), Mapping):
            sections = ("mrope_section", "mrope_interleaved")
            out[where] = {k: v for k, v in out[where].items() if k not in sections}
    return out


def _every(family: Any, interval: Any, layers: Any) -> list[str]:
    """The kinds of so many layers, whatever these are; EmitError for an interval below 1."""
    if not isinstance(interval, int) or interval < 1:
        raise EmitError(
            f"config.json of {family}: full_attention_interval = {json.dumps(interval)}, "
            "expected 1 or more"
        )
    return [KINDS[(i + 1) % interval == 0] for i in range(config_reader.layer_count(layers))]


def _quarter(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A config that says how much of a head is rotated: a quarter if `raw` does not say."""
    nested = (raw.get("rope_parameters"), raw.get("rope_scaling"), raw)
    said = [each for each in nested if isinstance(each, Mapping)]
    if any(each.get("partial_rotary_factor") is not None for each in said):
        return dict(raw)
    return {**raw, "partial_rotary_factor": 0.25}
