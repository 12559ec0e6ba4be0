"""Nemotron-H: cases, and tensors under the names of a published checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cases.case import Case, Tensors, drawer

KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def pattern(letters: str) -> dict[str, Any]:
    """The layers as transformers 5 writes them."""
    return {"layers_block_type": [KINDS[letter] for letter in letters]}


CASES = (
    Case("all_kinds", "nemotron_h", {**pattern("M*-EM"), "n_groups": 2, "time_step_min": 1e-4}),
    Case(
        "attention_first_and_adjacent",
        "nemotron_h",
        {
            **pattern("**M-*"),
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 10,
            "mlp_bias": True,
            "use_bias": True,
            "mamba_proj_bias": True,
            "layer_norm_epsilon": 1e-3,
        },
        dialect="hub",
    ),
    Case(
        "attention_last_one_key_head",
        "nemotron_h",
        {
            **pattern("MM*"),
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "n_groups": 4,
            "mamba_num_heads": 8,
            "mamba_head_dim": 6,
            "use_conv_bias": False,
            "conv_kernel": 2,
        },
    ),
    Case(
        "no_attention",
        "nemotron_h",
        {**pattern("M-M"), "mlp_hidden_act": "silu", "ssm_state_size": 7, "conv_kernel": 3},
        reference="its cache cannot do without an attention layer",
    ),
    Case(
        "attention_only_full_heads",
        "nemotron_h",
        {**pattern("*-*"), "num_key_value_heads": 4, "time_step_min": 0.0},
        slow=True,
    ),
    Case(
        "grouped_routing",
        "nemotron_h",
        {
            **pattern("ME*E"),
            "n_routed_experts": 12,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.5,
        },
    ),
    Case(
        "latent_experts",
        "nemotron_h",
        {
            **pattern("EM*E"),
            "moe_latent_size": 20,
            "n_routed_experts": 9,
            "num_experts_per_tok": 4,
            "moe_shared_expert_intermediate_size": 26,
            "routed_scaling_factor": 5.0,
            "n_shared_experts": 2,
        },
        dialect="hub",
    ),
    Case(
        "one_expert_a_token_biases",
        "nemotron_h",
        {
            **pattern("*EM"),
            "num_experts_per_tok": 1,
            "n_routed_experts": 5,
            "mlp_bias": True,
            "moe_latent_size": 12,
        },
        slow=True,
    ),
    Case(
        "bf16_sharded",
        "nemotron_h",
        {**pattern("M*ME"), "n_groups": 2},
        dialect="hub",
        dtype="bf16",
        shards=3,
        slow=True,
    ),
    Case(
        "f16", "nemotron_h", {**pattern("M*-E"), "num_key_value_heads": 4}, dtype="f16", slow=True
    ),
    Case(
        "tied",
        "nemotron_h",
        {**pattern("M*-"), "tie_word_embeddings": True},
        reference="it ignores tie_word_embeddings",
    ),
    Case(
        "limit_binds",
        "nemotron_h",
        {**pattern("M*M"), "time_step_min": 0.05},
        reference="it clamps dt in prefill and not in its decode step",
    ),
)

BASE: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "chunk_size": 8,
    "conv_kernel": 4,
    "eos_token_id": 2,
    "expand": 2,
    "head_dim": 12,
    "hidden_dropout": 0.0,
    "hidden_size": 40,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "layer_norm_epsilon": 1e-5,
    "layers_block_type": ["linear_attention", "mlp"],
    "mamba_head_dim": 14,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 4,
    "mamba_proj_bias": False,
    "mamba_ssm_cache_dtype": "float32",
    "max_position_embeddings": 4096,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "moe_intermediate_size": 24,
    "moe_latent_size": None,
    "moe_shared_expert_intermediate_size": 28,
    "moe_shared_expert_overlap": True,
    "n_group": 1,
    "n_groups": 1,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 2,
    "num_logits_to_keep": 1,
    "num_nextn_predict_layers": 0,
    "output_router_logits": False,
    "pad_token_id": 0,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "routed_scaling_factor": 1.0,
    "sliding_window": None,
    "ssm_state_size": 12,
    "tie_word_embeddings": False,
    "time_step_floor": 1e-4,
    "time_step_limit": [0.0, float("inf")],
    "time_step_max": 0.1,
    "time_step_min": 1e-4,
    "topk_group": 1,
    "transformers_version": "5.24.0",
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
    "vocab_size": 101,
}

# What a published config.json leaves out where the default is meant.
DEFAULTS = {
    "tie_word_embeddings": False,
    "moe_latent_size": None,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "use_conv_bias": True,
}


def hub(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with the keys of published files."""
    out = dict(config)
    kinds = out.pop("layers_block_type")
    letters = {word: letter for letter, word in KINDS.items()}
    out["hybrid_override_pattern"] = "".join(letters[kind] for kind in kinds)
    out["num_hidden_layers"] = len(kinds)
    out["attention_head_dim"] = out["head_dim"]
    out["rms_norm_eps"] = out["layer_norm_epsilon"]
    return out


def tensors(config: Mapping[str, Any], rng: np.random.Generator) -> Tensors:
    """Well-scaled random weights: variance 1/fan_in, A and dt spread as the library draws them."""
    normal, hidden, vocab = drawer(rng), config["hidden_size"], config["vocab_size"]
    tied = config["tie_word_embeddings"]
    made: Tensors = {
        "backbone.embeddings.weight": normal(vocab, hidden, scale=0.1 if tied else 1.0),
        "backbone.norm_f.weight": normal(hidden, scale=0.1, offset=1.0),
    }

    def linear(name: str, outputs: int, inputs: int, bias: bool = False) -> None:
        made[name + ".weight"] = normal(outputs, inputs, scale=inputs**-0.5)
        if bias:
            made[name + ".bias"] = normal(outputs, scale=0.1)

    if not tied:
        linear("lm_head", vocab, hidden)
    draw = {"linear_attention": _mamba, "full_attention": _attention, "mlp": _mlp, "moe": _moe}
    for i, kind in enumerate(config["layers_block_type"]):
        base = f"backbone.layers.{i}."
        made[base + "norm.weight"] = normal(hidden, scale=0.1, offset=1.0)
        draw[kind](config, base + "mixer.", made, normal, linear, rng)
    return made


def _mamba(config: Any, at: str, made: Tensors, normal: Any, linear: Any, rng: Any) -> None:
    hidden, heads, bias = config["hidden_size"], config["mamba_num_heads"], config["use_bias"]
    inner, kernel = heads * config["mamba_head_dim"], config["conv_kernel"]
    channels = inner + 2 * config["n_groups"] * config["ssm_state_size"]
    linear(at + "in_proj", inner + channels + heads, hidden, bias)
    made[at + "conv1d.weight"] = normal(channels, 1, kernel, scale=kernel**-0.5)
    if config["use_conv_bias"]:
        made[at + "conv1d.bias"] = normal(channels, scale=0.1)
    made[at + "dt_bias"] = normal(heads, offset=-3.0)
    made[at + "A_log"] = np.log(rng.uniform(1.0, 9.0, heads)).astype(np.float32)
    made[at + "D"] = normal(heads, scale=0.1, offset=1.0)
    made[at + "norm.weight"] = normal(inner, scale=0.1, offset=1.0)
    linear(at + "out_proj", hidden, inner, bias)


def _attention(config: Any, at: str, made: Tensors, normal: Any, linear: Any, rng: Any) -> None:
    hidden, size = config["hidden_size"], config["head_dim"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    for name, count in (("q_proj", heads), ("k_proj", kv), ("v_proj", kv)):
        linear(at + name, count * size, hidden)
    linear(at + "o_proj", hidden, heads * size)


def _mlp(config: Any, at: str, made: Tensors, normal: Any, linear: Any, rng: Any) -> None:
    _ffn(config, at, linear, config["intermediate_size"])


def _ffn(config: Any, at: str, linear: Any, width: int) -> None:
    linear(at + "up_proj", width, config["hidden_size"], config["mlp_bias"])
    linear(at + "down_proj", config["hidden_size"], width, config["mlp_bias"])


def _moe(config: Any, at: str, made: Tensors, normal: Any, linear: Any, rng: Any) -> None:
    hidden, count = config["hidden_size"], config["n_routed_experts"]
    latent, width = config["moe_latent_size"], config["moe_intermediate_size"]
    linear(at + "gate", count, hidden)
    made[at + "gate.e_score_correction_bias"] = normal(count, scale=0.3)
    for e in range(count):
        linear(f"{at}experts.{e}.up_proj", width, latent or hidden)
        linear(f"{at}experts.{e}.down_proj", latent or hidden, width)
    if latent:
        linear(at + "fc1_latent_proj", latent, hidden, config["mlp_bias"])
        linear(at + "fc2_latent_proj", hidden, latent, config["mlp_bias"])
    _ffn(config, at + "shared_experts.", linear, config["moe_shared_expert_intermediate_size"])
