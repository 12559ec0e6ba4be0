"""Qwen3-Next: cases, and tensors under the names of a published checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cases.case import Case, Tensors, drawer

CASES = (
    # Delta rule, attention; experts in both.
    Case("plain", "qwen3_next"),
    Case(
        "dense_where_the_schedule_says",
        "qwen3_next",
        {
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "num_hidden_layers": 3,
            "decoder_sparse_step": 2,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_conv_kernel_dim": 2,
            "num_key_value_heads": 1,
            "norm_topk_prob": False,
        },
    ),
    Case(
        "listed_dense_layers_biases",
        "qwen3_next",
        {
            "mlp_only_layers": [0],
            "attention_bias": True,
            "num_key_value_heads": 4,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 5,
            "hidden_act": "gelu",
            "rms_norm_eps": 1e-3,
        }
        | {"rope_parameters": {"partial_rotary_factor": 1.0, "rope_theta": 1e6}},
    ),
    Case(
        "no_experts_odd_sizes",
        "qwen3_next",
        {
            "num_experts": 0,
            "hidden_size": 44,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 10,
            "intermediate_size": 28,
            "vocab_size": 101,
            "linear_key_head_dim": 9,
            "linear_value_head_dim": 11,
            "linear_conv_kernel_dim": 3,
        }
        | {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e4}},
    ),
    Case(
        "hub_tied_every_third",
        "qwen3_next",
        {
            "tie_word_embeddings": True,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "num_experts_per_tok": 6,
            "use_sliding_window": False,
        },
        dialect="hub",
    ),
    Case(
        "yarn",
        "qwen3_next",
        {
            "rope_parameters": {
                "partial_rotary_factor": 0.5,
                "rope_theta": 1e4,
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        slow=True,
    ),
    Case(
        "only_delta",
        "qwen3_next",
        {"layer_types": ["linear_attention", "linear_attention"]},
        reference="its cache asks the first attention layer for its length, and there is none",
        slow=True,
    ),
    Case("bf16_sharded", "qwen3_next", dialect="hub", dtype="bf16", shards=3, slow=True),
    Case("f16", "qwen3_next", {"num_experts": 7, "num_experts_per_tok": 3}, dtype="f16", slow=True),
)

BASE: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "decoder_sparse_step": 1,
    "eos_token_id": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 36,
    "initializer_range": 0.02,
    "intermediate_size": 52,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_value_head_dim": 10,
    "max_position_embeddings": 512,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000.0,
        "rope_type": "default",
    },
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 26,
    "tie_word_embeddings": False,
    "transformers_version": "5.24.0",
    "use_cache": True,
    "vocab_size": 97,
}

# What a published qwen3_next config.json may leave out where the default is meant.
DEFAULTS = {"attention_bias": False, "hidden_act": "silu", "mlp_only_layers": []}


def hub(config: dict[str, Any]) -> dict[str, Any]:
    """Rotation and layers as published files have them."""
    out = dict(config)
    rope = out.pop("rope_parameters")
    out |= {name: rope[name] for name in ("rope_theta", "partial_rotary_factor")}
    if rope.get("rope_type", "default") != "default":
        out["rope_scaling"] = {name: value for name, value in rope.items() if name not in out}
    kinds = out["layer_types"]
    every = kinds.index("full_attention") + 1 if "full_attention" in kinds else 0
    regular = [("linear", "full")[(i + 1) % every == 0] for i in range(len(kinds))] if every else []
    if kinds == [f"{each}_attention" for each in regular]:
        out["full_attention_interval"] = every
        del out["layer_types"]
    return out


def tensors(config: Mapping[str, Any], rng: np.random.Generator) -> Tensors:
    """Well-scaled random weights: variance 1/fan_in, A as the library draws it, norms around 1."""
    made, normal = stem(config, rng), drawer(rng)
    hidden = config["hidden_size"]
    for i, kind in enumerate(config["layer_types"]):
        base = f"model.layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            made[f"{base}{norm}.weight"] = normal(hidden, scale=0.1)
        if kind == "full_attention":
            attention(config, made, rng, base + "self_attn.")
        else:
            keys, values, heads = delta(config, made, rng, base + "linear_attn.")
            for name, rows in (("qkvz", 2 * keys + 2 * values), ("ba", 2 * heads)):
                linear(made, rng, f"{base}linear_attn.in_proj_{name}", rows, hidden)
        dense = i in config["mlp_only_layers"] or (i + 1) % config["decoder_sparse_step"]
        if dense or not config["num_experts"]:
            feed_forward(made, rng, base + "mlp.", config["intermediate_size"], hidden)
        else:
            mixture(config, made, rng, base + "mlp.")
    return made


def linear(made: Tensors, rng: np.random.Generator, name: str, outputs: int, inputs: int) -> None:
    """A projection's weight."""
    made[f"{name}.weight"] = drawer(rng)(outputs, inputs, scale=inputs**-0.5)


def stem(config: Mapping[str, Any], rng: np.random.Generator, prefix: str = "model.") -> Tensors:
    """The embeddings, the last norm and the head."""
    hidden, vocab, tied = config["hidden_size"], config["vocab_size"], config["tie_word_embeddings"]
    made = {
        f"{prefix}embed_tokens.weight": drawer(rng)(vocab, hidden, scale=0.1 if tied else 1.0),
        f"{prefix}norm.weight": drawer(rng)(hidden, scale=0.1),
    }
    if not tied:
        linear(made, rng, "lm_head", vocab, hidden)
    return made


def attention(
    config: Mapping[str, Any], made: Tensors, rng: np.random.Generator, base: str
) -> None:
    """Attention with its gate in q_proj."""
    normal, hidden, size = drawer(rng), config["hidden_size"], config["head_dim"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    sizes = {"q": 2 * heads * size, "k": groups * size, "v": groups * size}
    for which, rows in sizes.items():
        linear(made, rng, f"{base}{which}_proj", rows, hidden)
    linear(made, rng, f"{base}o_proj", hidden, heads * size)
    if config["attention_bias"]:
        for which, rows in {**sizes, "o": hidden}.items():
            made[f"{base}{which}_proj.bias"] = normal(rows, scale=0.1)
    for which in "qk":
        made[f"{base}{which}_norm.weight"] = normal(size, scale=0.1)


def delta(
    config: Mapping[str, Any], made: Tensors, rng: np.random.Generator, base: str
) -> tuple[int, int, int]:
    """Gated DeltaNet without its input projections: the widths of keys and values, and heads."""
    normal, hidden = drawer(rng), config["hidden_size"]
    heads, kernel = config["linear_num_value_heads"], config["linear_conv_kernel_dim"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    channels = 2 * keys + values
    made[base + "conv1d.weight"] = normal(channels, 1, kernel, scale=kernel**-0.5)
    made[base + "dt_bias"] = normal(heads, offset=-2.0)
    made[base + "A_log"] = np.log(rng.uniform(0.01, 16.0, heads)).astype(np.float32)
    made[base + "norm.weight"] = normal(config["linear_value_head_dim"], scale=0.1, offset=1.0)
    linear(made, rng, base + "out_proj", hidden, values)
    return keys, values, heads


def feed_forward(
    made: Tensors, rng: np.random.Generator, base: str, width: int, hidden: int
) -> None:
    """A gated FFN."""
    linear(made, rng, base + "gate_proj", width, hidden)
    linear(made, rng, base + "up_proj", width, hidden)
    linear(made, rng, base + "down_proj", hidden, width)


def mixture(config: Mapping[str, Any], made: Tensors, rng: np.random.Generator, base: str) -> None:
    """Router, experts one by one, and the shared expert with its gate."""
    hidden = config["hidden_size"]
    linear(made, rng, base + "gate", config["num_experts"], hidden)
    for e in range(config["num_experts"]):
        feed_forward(made, rng, f"{base}experts.{e}.", config["moe_intermediate_size"], hidden)
    width = config["shared_expert_intermediate_size"]
    feed_forward(made, rng, base + "shared_expert.", width, hidden)
    linear(made, rng, base + "shared_expert_gate", 1, hidden)
