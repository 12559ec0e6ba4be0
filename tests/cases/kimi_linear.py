"""Kimi Linear: cases, and tensors under the names of a published checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from cases.case import Case, Tensors, drawer

WORDS = {
    "K": "linear_attention",
    "M": "full_attention",
    "d": "dense",
    "s": "sparse",
}


def pattern(letters: str) -> dict[str, Any]:
    """Mixers and FFNs, as `Kd Ms`: delta attention and a dense FFN, then latent attention…"""
    pairs = letters.split()
    return {
        "num_hidden_layers": len(pairs),
        "layer_types": [WORDS[pair[0]] for pair in pairs],
        "mlp_layer_types": [WORDS[pair[1]] for pair in pairs],
    }


# The dense FFN's name as the library writes it.
LIBRARY = {
    f"model.layers.0.mlp.{which}_proj.weight": (
        f"model.layers.0.block_sparse_moe.{which}_proj.weight"
    )
    for which in ("gate", "up", "down")
}

CASES = (
    Case("plain", "kimi_linear", rename=LIBRARY),
    Case(
        "hub_grouped_low_rank_queries",
        "kimi_linear",
        {
            **pattern("Kd Ms Ks"),
            "num_experts": 12,
            "num_expert_group": 4,
            "topk_group": 2,
            "num_experts_per_token": 3,
            "q_lora_rank": 18,
            "num_shared_experts": 2,
        },
        dialect="hub",
    ),
    Case(
        "latent_first_and_adjacent",
        "kimi_linear",
        {
            **pattern("Ms Md Ks Ms"),
            "attention_bias": True,
            "q_lora_rank": 11,
            "moe_renormalize": False,
            "routed_scaling_factor": 0.7,
            "rms_norm_eps": 1e-2,
            "linear_conv_kernel_dim": 2,
        },
    ),
    Case(
        "no_latent_all_sparse",
        "kimi_linear",
        {
            **pattern("Ks Ks"),
            "linear_num_heads": 5,
            "linear_head_dim": 6,
            "linear_conv_kernel_dim": 3,
            "num_experts_per_token": 1,
        },
        reference="its cache asks the first attention layer for its length, and there is none",
    ),
    Case(
        "latent_only_all_dense",
        "kimi_linear",
        {
            **pattern("Md Md"),
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "qk_nope_head_dim": 7,
            "qk_rope_head_dim": 2,
            "v_head_dim": 13,
            "kv_lora_rank": 9,
            "attention_bias": True,
        },
    ),
    Case(
        "hub_tied_every_expert",
        "kimi_linear",
        {
            **pattern("Kd Ks Ms"),
            "tie_word_embeddings": True,
            "num_experts": 4,
            "num_experts_per_token": 4,
            "moe_intermediate_size": 17,
            "hidden_act": "gelu",
            "vocab_size": 113,
        },
        dialect="hub",
        reference="it has a head of its own where the config ties it",
    ),
    Case("hub_bf16_sharded", "kimi_linear", dialect="hub", dtype="bf16", shards=3, slow=True),
    Case("f16", "kimi_linear", {"num_experts": 9}, dtype="f16", slow=True),
)

BASE: dict[str, Any] = {
    **pattern("Kd Ks Ks Ms"),
    "architectures": ["KimiLinearForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 6,
    "hidden_act": "silu",
    "hidden_size": 44,
    "initializer_range": 0.02,
    "intermediate_size": 52,
    "kv_lora_rank": 20,
    "linear_conv_kernel_dim": 4,
    "linear_head_dim": 14,
    "linear_num_heads": 3,
    "model_max_length": 4096,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 28,
    "moe_renormalize": True,
    "num_attention_heads": 4,
    "num_expert_group": 1,
    "num_experts": 6,
    "num_experts_per_token": 2,
    "num_key_value_heads": 4,
    "num_shared_experts": 1,
    "output_router_logits": False,
    "pad_token_id": 0,
    "pretraining_tp": 1,
    "q_lora_rank": None,
    "qk_head_dim": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "transformers_version": "5.24.0",
    "use_cache": True,
    "v_head_dim": 12,
    "vocab_size": 97,
}

# What a published config.json leaves out.
DEFAULTS = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "output_router_logits": False,
    "pretraining_tp": 1,
}


def hub(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of published files: layers numbered from 1, the sizes of delta attention nested."""
    out = dict(config)
    kinds, feed_forwards = out.pop("layer_types"), out.pop("mlp_layer_types")
    dense = sum(kind == "dense" for kind in feed_forwards)
    if feed_forwards != ["dense"] * dense + ["sparse"] * (len(kinds) - dense):
        out["mlp_layer_types"] = feed_forwards  # which other keys cannot say
    out["linear_attn_config"] = {
        "full_attn_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "full_attention"],
        "kda_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "linear_attention"],
        "head_dim": out.pop("linear_head_dim"),
        "num_heads": out.pop("linear_num_heads"),
        "short_conv_kernel_size": out.pop("linear_conv_kernel_dim"),
    }
    return out | {
        "first_k_dense_replace": dense,
        "moe_layer_freq": 1,
        "mla_use_nope": True,
        "moe_router_activation_func": "sigmoid",
        "num_nextn_predict_layers": 0,
        "rope_theta": 10000.0,
        "use_grouped_topk": True,
    }


def tensors(config: Mapping[str, Any], rng: np.random.Generator) -> Tensors:
    """Well-scaled random weights: variance 1/fan_in, A and dt spread as the library draws them."""
    normal, hidden, vocab = drawer(rng), config["hidden_size"], config["vocab_size"]
    tied = config["tie_word_embeddings"]
    made: Tensors = {
        "model.embed_tokens.weight": normal(vocab, hidden, scale=0.1 if tied else 1.0),
        "model.norm.weight": normal(hidden, scale=0.1, offset=1.0),
    }

    def linear(name: str, outputs: int, inputs: int, bias: bool = False) -> None:
        made[name + ".weight"] = normal(outputs, inputs, scale=inputs**-0.5)
        if bias:
            made[name + ".bias"] = normal(outputs, scale=0.1)

    if not tied:
        linear("lm_head", vocab, hidden)
    kinds = zip(config["layer_types"], config["mlp_layer_types"], strict=True)
    for i, (mixer, feed_forward) in enumerate(kinds):
        base = f"model.layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            made[f"{base}{norm}.weight"] = normal(hidden, scale=0.1, offset=1.0)
        draw = _delta if mixer == "linear_attention" else _latent
        draw(config, base + "self_attn.", made, normal, linear, rng)
        if feed_forward == "dense":
            _mlp(base + "mlp.", hidden, config["intermediate_size"], linear)
        else:
            _experts(config, base + "block_sparse_moe.", made, normal, linear)
    return made


def _delta(config: Any, at: str, made: Tensors, normal: Any, linear: Any, rng: Any) -> None:
    hidden, heads, size = (
        config[k] for k in ("hidden_size", "linear_num_heads", "linear_head_dim")
    )
    inner, kernel = heads * size, config["linear_conv_kernel_dim"]
    for part in "qkv":
        linear(f"{at}{part}_proj", inner, hidden)
        made[f"{at}{part}_conv1d.weight"] = normal(inner, 1, kernel, scale=kernel**-0.5)
    for gate in "fg":
        linear(f"{at}{gate}_a_proj", size, hidden)
        linear(f"{at}{gate}_b_proj", inner, size)
    linear(at + "b_proj", heads, hidden)
    linear(at + "o_proj", hidden, inner)
    made[at + "o_norm.weight"] = normal(size, scale=0.1, offset=1.0)
    decays = np.log(rng.uniform(1.0, 16.0, (1, 1, heads, 1)))
    made[at + "A_log"] = decays.astype(np.float32)
    dt = np.exp(rng.uniform(math.log(1e-3), math.log(1e-1), inner))
    made[at + "dt_bias"] = (dt + np.log(-np.expm1(-dt))).astype(np.float32)


def _latent(config: Any, at: str, made: Tensors, normal: Any, linear: Any, rng: Any) -> None:
    hidden, heads, rank = (
        config[k] for k in ("hidden_size", "num_attention_heads", "kv_lora_rank")
    )
    nope, rope, value = (config[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    bias, low = config["attention_bias"], config["q_lora_rank"]
    if low is None:
        linear(at + "q_proj", heads * (nope + rope), hidden)
    else:
        linear(at + "q_a_proj", low, hidden, bias)
        made[at + "q_a_layernorm.weight"] = normal(low, scale=0.1, offset=1.0)
        linear(at + "q_b_proj", heads * (nope + rope), low)
    linear(at + "kv_a_proj_with_mqa", rank + rope, hidden, bias)
    made[at + "kv_a_layernorm.weight"] = normal(rank, scale=0.1, offset=1.0)
    linear(at + "kv_b_proj", heads * (nope + value), rank)
    linear(at + "o_proj", hidden, heads * value, bias)


def _mlp(at: str, hidden: int, width: int, linear: Any) -> None:
    linear(at + "gate_proj", width, hidden)
    linear(at + "up_proj", width, hidden)
    linear(at + "down_proj", hidden, width)


def _experts(config: Any, at: str, made: Tensors, normal: Any, linear: Any) -> None:
    hidden, width = config["hidden_size"], config["moe_intermediate_size"]
    linear(at + "gate", config["num_experts"], hidden)
    bias = normal(config["num_experts"], scale=0.3)
    made[at + "gate.e_score_correction_bias"] = bias
    for e in range(config["num_experts"]):
        for which, sizes in (("w1", (width, hidden)), ("w2", (hidden, width))):
            linear(f"{at}experts.{e}.{which}", *sizes)
        linear(f"{at}experts.{e}.w3", width, hidden)
    if config["num_shared_experts"]:
        _mlp(at + "shared_experts.", hidden, width * config["num_shared_experts"], linear)
