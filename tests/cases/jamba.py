"""Jamba: cases, and tensors under the names of a published checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cases.case import Case, Tensors, drawer

CASES = (
    # Mamba, attention, Mamba, Mamba; dense, experts, dense, experts.
    Case("plain", "jamba"),
    Case(
        "attention_first_multi_query",
        "jamba",
        {
            "attn_layer_offset": 0,
            "attn_layer_period": 3,
            "expert_layer_offset": 0,
            "num_key_value_heads": 1,
            "num_experts": 5,
            "num_experts_per_tok": 3,
        },
    ),
    Case(
        "attention_last_multi_head",
        "jamba",
        {
            "attn_layer_offset": 3,
            "num_key_value_heads": 4,
            "expert_layer_period": 1,
            "expert_layer_offset": 0,
            "num_experts_per_tok": 1,
            "mamba_dt_rank": 5,
        },
    ),
    Case(
        "only_attention_odd_sizes",
        "jamba",
        {
            "attn_layer_period": 1,
            "attn_layer_offset": 0,
            "num_hidden_layers": 2,
            "hidden_size": 44,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 10,
            "intermediate_size": 28,
            "vocab_size": 101,
            "num_experts": 7,
            "num_experts_per_tok": 7,
        },
    ),
    Case(
        "no_attention_biases",
        "jamba",
        {
            "attn_layer_period": 9,
            "attn_layer_offset": 8,
            "num_hidden_layers": 3,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "mamba_d_conv": 2,
            "mamba_d_state": 6,
            "mamba_expand": 3,
        },
        reference="its cache asks the first attention layer for its length, and there is none",
    ),
    Case(
        "one_expert_is_dense",
        "jamba",
        {
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "hidden_act": "gelu",
            "rms_norm_eps": 1e-3,
        },
    ),
    Case(
        "hub_tied_null_window",
        "jamba",
        {
            "tie_word_embeddings": True,
            "mamba_dt_rank": "auto",
            "hidden_size": 52,
            "sliding_window": None,
            "use_mamba_kernels": True,
            "num_logits_to_keep": 1,
            "calc_logits_for_entire_prompt": False,
            "mamba_inner_layernorms": True,
            "n_ctx": 512,
        },
        dialect="hub",
    ),
    Case("bf16_sharded", "jamba", dialect="hub", dtype="bf16", shards=3, slow=True),
    Case("f16", "jamba", {"num_experts": 6, "num_experts_per_tok": 2}, dtype="f16", slow=True),
)

BASE = {
    "architectures": ["JambaForCausalLM"],
    "attention_dropout": 0.0,
    "attn_layer_offset": 1,
    "attn_layer_period": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "hidden_act": "silu",
    "hidden_size": 36,
    "initializer_range": 0.02,
    "intermediate_size": 44,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_state": 10,
    "mamba_dt_rank": 3,
    "mamba_expand": 2,
    "mamba_proj_bias": False,
    "max_position_embeddings": 512,
    "model_type": "jamba",
    "num_attention_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
    "transformers_version": "5.24.0",
    "use_associative_scan": True,
    "use_cache": True,
    "use_mamba_kernels": True,
    "use_mambapy": False,
    "vocab_size": 97,
}

# What a published jamba config.json leaves out where the default is meant.
DEFAULTS = {
    "use_associative_scan": True,
    "use_mambapy": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "mamba_proj_bias": False,
    "rms_norm_eps": 1e-6,
}


def tensors(config: Mapping[str, Any], rng: np.random.Generator) -> Tensors:
    """Well-scaled random weights: variance 1/fan_in, A and dt spread as the library draws them."""
    normal = drawer(rng)
    hidden, vocab, tied = config["hidden_size"], config["vocab_size"], config["tie_word_embeddings"]
    made: Tensors = {
        "model.embed_tokens.weight": normal(vocab, hidden, scale=0.1 if tied else 1.0),
        "model.final_layernorm.weight": normal(hidden, scale=0.1, offset=1.0),
    }

    def linear(name: str, outputs: int, inputs: int) -> None:
        made[f"{name}.weight"] = normal(outputs, inputs, scale=inputs**-0.5)

    def feed_forward(name: str) -> None:
        linear(f"{name}gate_proj", config["intermediate_size"], hidden)
        linear(f"{name}up_proj", config["intermediate_size"], hidden)
        linear(f"{name}down_proj", hidden, config["intermediate_size"])

    if not tied:
        linear("lm_head", vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        base = f"model.layers.{i}."
        for norm in ("input_layernorm", "pre_ff_layernorm"):
            made[f"{base}{norm}.weight"] = normal(hidden, scale=0.1, offset=1.0)
        if i % config["attn_layer_period"] == config["attn_layer_offset"]:
            heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
            head = config.get("head_dim", hidden // heads)
            for which, count in zip("qkv", (heads, groups, groups), strict=True):
                linear(f"{base}self_attn.{which}_proj", count * head, hidden)
            linear(f"{base}self_attn.o_proj", hidden, heads * head)
        else:
            _mamba(config, made, rng, f"{base}mamba.")
        sparse = i % config["expert_layer_period"] == config["expert_layer_offset"]
        if sparse and config["num_experts"] > 1:
            linear(f"{base}feed_forward.router", config["num_experts"], hidden)
            for e in range(config["num_experts"]):
                feed_forward(f"{base}feed_forward.experts.{e}.")
        else:
            feed_forward(f"{base}feed_forward.")
    return made


def _mamba(config: Mapping[str, Any], made: Tensors, rng: np.random.Generator, base: str) -> None:
    normal = drawer(rng)
    hidden, N, kernel = config["hidden_size"], config["mamba_d_state"], config["mamba_d_conv"]
    inner, rank = config["mamba_expand"] * hidden, config["mamba_dt_rank"]
    rank = -(-hidden // 16) if rank == "auto" else rank
    made[base + "in_proj.weight"] = normal(2 * inner, hidden, scale=hidden**-0.5)
    made[base + "conv1d.weight"] = normal(inner, 1, kernel, scale=kernel**-0.5)
    made[base + "x_proj.weight"] = normal(rank + 2 * N, inner, scale=inner**-0.5)
    made[base + "dt_proj.weight"] = normal(inner, rank, scale=rank**-0.5)
    made[base + "dt_proj.bias"] = normal(inner, offset=-3.0)
    made[base + "A_log"] = np.log(rng.uniform(1.0, 9.0, (inner, N))).astype(np.float32)
    made[base + "D"] = normal(inner, scale=0.1, offset=1.0)
    made[base + "out_proj.weight"] = normal(hidden, inner, scale=inner**-0.5)
    for name, size in (("dt", rank), ("b", N), ("c", N)):
        made[f"{base}{name}_layernorm.weight"] = normal(size, scale=0.1, offset=1.0)
    if config["mamba_conv_bias"]:
        made[base + "conv1d.bias"] = normal(inner, scale=0.1)
    if config["mamba_proj_bias"]:
        made[base + "in_proj.bias"] = normal(2 * inner, scale=0.1)
        made[base + "out_proj.bias"] = normal(hidden, scale=0.1)
