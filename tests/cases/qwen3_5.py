"""Qwen3.5: cases of the text model, and tensors under the names of its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cases import qwen3_next
from cases.case import Case, Tensors, drawer

CASES = (
    # Delta rule, attention.
    Case("plain", "qwen3_5"),
    Case(
        "attention_first_biases_odd_sizes",
        "qwen3_5",
        {
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "num_hidden_layers": 3,
            "attention_bias": True,
            "hidden_size": 44,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 10,
            "intermediate_size": 28,
            "vocab_size": 101,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 5,
            "linear_conv_kernel_dim": 2,
            "hidden_act": "gelu",
            "rms_norm_eps": 1e-3,
            "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e6},
        },
        slow=True,
    ),
    Case("hub_tied", "qwen3_5", {"tie_word_embeddings": True}, dialect="hub", slow=True),
    Case("bf16_sharded", "qwen3_5", dialect="hub", dtype="bf16", shards=3, slow=True),
    Case("f16", "qwen3_5", {"num_key_value_heads": 1}, dtype="f16", slow=True),
)

WITHOUT = (
    *("decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "norm_topk_prob"),
    *("num_experts", "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef"),
    "shared_expert_intermediate_size",
)

# The keys that this family's library writes, of those that Qwen3-Next has.
BASE: dict[str, Any] = {
    **{key: value for key, value in qwen3_next.BASE.items() if key not in WITHOUT},
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
}

# What a published config.json may leave out where the default is meant.
DEFAULTS = {"attention_bias": False, "hidden_act": "silu"}


def hub(config: dict[str, Any]) -> dict[str, Any]:
    """Keys that published files have besides."""
    sections = {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    rope = {**config["rope_parameters"], **sections}
    more = {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1}
    return {**config, **more, "rope_parameters": rope, "full_attention_interval": 4}


def tensors(config: Mapping[str, Any], rng: np.random.Generator) -> Tensors:
    """Well-scaled random weights, drawn as Qwen3-Next's."""
    made, normal = qwen3_next.stem(config, rng), drawer(rng)
    hidden = config["hidden_size"]
    for i, kind in enumerate(config["layer_types"]):
        base = f"model.layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            made[f"{base}{norm}.weight"] = normal(hidden, scale=0.1)
        if kind == "full_attention":
            qwen3_next.attention(config, made, rng, base + "self_attn.")
        else:
            keys, values, heads = qwen3_next.delta(config, made, rng, base + "linear_attn.")
            sizes = {"qkv": 2 * keys + values, "z": values, "b": heads, "a": heads}
            for name, rows in sizes.items():
                qwen3_next.linear(made, rng, f"{base}linear_attn.in_proj_{name}", rows, hidden)
        qwen3_next.feed_forward(made, rng, base + "mlp.", config["intermediate_size"], hidden)
    return made
