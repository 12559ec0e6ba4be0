"""Falcon-H1: cases, and tensors under the names of a published checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cases.case import Case, Tensors, drawer

FOLDED = {
    **dict.fromkeys(
        """attention_in_multiplier attention_out_multiplier embedding_multiplier key_multiplier
        lm_head_multiplier ssm_in_multiplier ssm_out_multiplier""".split(),
        1.0,
    ),
    "mlp_multipliers": [1.0, 1.0],
    "ssm_multipliers": [1.0, 1.0, 1.0, 1.0, 1.0],
}


def scaling(**parameters: Any) -> dict[str, Any]:
    """A config's rope_parameters."""
    return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}


CASES = (
    Case("gated_norm", "falcon_h1"),
    Case(
        "gate_alone_tied",
        "falcon_h1",
        {
            "mamba_rms_norm": False,
            "mamba_n_groups": 1,
            "tie_word_embeddings": True,
            "hidden_act": "gelu",
            "embedding_multiplier": 2.0,
        },
        dialect="hub",
    ),
    Case(
        "norm_before_gate_all_biases",
        "falcon_h1",
        {
            "mamba_norm_before_gate": True,
            "mamba_n_groups": 3,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "rms_norm_eps": 1e-3,
        },
    ),
    Case(
        "folded_multipliers_expand",
        "falcon_h1",
        {
            **FOLDED,
            "mamba_d_ssm": None,
            "mamba_expand": 3,
            "mamba_d_head": "auto",
            "mamba_n_heads": 5,
            "mamba_n_groups": 1,
            "mamba_conv_bias": False,
            "mamba_d_conv": 3,
            "num_key_value_heads": None,
            "projectors_bias": True,
        },
    ),
    Case(
        "one_key_head_llama3",
        "falcon_h1",
        {
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "mamba_d_conv": 2,
            "mamba_n_groups": 6,
            **scaling(
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            ),
        },
    ),
    Case(
        "yarn",
        "falcon_h1",
        {
            "mamba_proj_bias": True,
            **scaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=64),
        },
        slow=True,
    ),
    Case(
        "linear",
        "falcon_h1",
        {"mamba_rms_norm": False, **scaling(rope_type="linear", factor=2.0)},
        dialect="hub",
        slow=True,
    ),
    Case("dynamic", "falcon_h1", scaling(rope_type="dynamic", factor=4.0), slow=True),
    Case("bf16_sharded", "falcon_h1", dialect="hub", dtype="bf16", shards=3, slow=True),
    Case("f16", "falcon_h1", {"mamba_n_groups": 3}, dtype="f16", slow=True),
    Case(
        "limits_bind",
        "falcon_h1",
        {"time_step_limit": [0.05, 0.3]},
        reference="it clamps dt in prefill and not in its decode step",
        slow=True,
    ),
)

BASE = {
    "architectures": ["FalconH1ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_in_multiplier": 1.1,
    "attention_out_multiplier": 0.9,
    "bos_token_id": 1,
    "embedding_multiplier": 1.4,
    "eos_token_id": 2,
    "head_dim": 12,
    "hidden_act": "silu",
    "hidden_size": 40,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "key_multiplier": 0.7,
    "lm_head_multiplier": 0.8,
    "mamba_chunk_size": 8,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 8,
    "mamba_d_ssm": 48,
    "mamba_d_state": 10,
    "mamba_expand": 2,
    "mamba_n_groups": 2,
    "mamba_n_heads": 6,
    "mamba_norm_before_gate": False,
    "mamba_proj_bias": False,
    "mamba_rms_norm": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "mlp_multipliers": [0.8, 1.2],
    "model_type": "falcon_h1",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_logits_to_keep": 1,
    "pad_token_id": 0,
    "projectors_bias": False,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 100000000000.0, "rope_type": "default"},
    "ssm_in_multiplier": 1.3,
    "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
    "ssm_out_multiplier": 0.6,
    "tie_word_embeddings": False,
    "time_step_limit": [0.0, float("inf")],
    "transformers_version": "5.24.0",
    "use_cache": True,
    "vocab_size": 97,
}


def tensors(config: Mapping[str, Any], rng: np.random.Generator) -> Tensors:
    """Well-scaled random weights: variance 1/fan_in, A and dt spread as the library draws them."""

    def normal(shape: tuple[int, ...], scale: float, offset: float = 0.0) -> np.ndarray:
        return drawer(rng)(*shape, scale=scale, offset=offset)

    hidden, heads, vocab = config["hidden_size"], config["mamba_n_heads"], config["vocab_size"]
    tied = config["tie_word_embeddings"]
    made: Tensors = {
        "model.embed_tokens.weight": normal((vocab, hidden), 0.1 if tied else 1.0),
        "model.final_layernorm.weight": normal((hidden,), 0.1, 1.0),
    }
    if not tied:
        made["lm_head.weight"] = normal((vocab, hidden), hidden**-0.5)
    inner = config["mamba_d_ssm"] or config["mamba_expand"] * hidden
    channels = inner + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
    for i in range(config["num_hidden_layers"]):
        base = f"model.layers.{i}."
        mamba = base + "mamba."
        for norm in ("input_layernorm", "pre_ff_layernorm"):
            made[f"{base}{norm}.weight"] = normal((hidden,), 0.1, 1.0)
        made[mamba + "dt_bias"] = normal((heads,), 1.0, -3.0)
        made[mamba + "A_log"] = np.log(rng.uniform(1.0, 9.0, heads)).astype(np.float32)
        made[mamba + "D"] = normal((heads,), 0.1, 1.0)
        kernel = config["mamba_d_conv"]
        made[mamba + "conv1d.weight"] = normal((channels, 1, kernel), kernel**-0.5)
        if config["mamba_conv_bias"]:
            made[mamba + "conv1d.bias"] = normal((channels,), 0.1)
        if config["mamba_rms_norm"]:
            made[mamba + "norm.weight"] = normal((inner,), 0.1, 1.0)
        for name, shape, biased in _projections(config, inner, channels + inner + heads):
            made[f"{base}{name}.weight"] = normal(shape, shape[1] ** -0.5)
            if biased:
                made[f"{base}{name}.bias"] = normal((shape[0],), 0.1)
    return made


def _projections(
    config: Mapping[str, Any], inner: int, width: int
) -> list[tuple[str, tuple[int, int], bool]]:
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = (config["num_key_value_heads"] or config["num_attention_heads"]) * config["head_dim"]
    attention, mlp = config["attention_bias"], config["mlp_bias"]
    return [
        ("mamba.in_proj", (width, hidden), config["mamba_proj_bias"]),
        ("mamba.out_proj", (hidden, inner), config["projectors_bias"]),
        ("self_attn.q_proj", (queries, hidden), attention),
        ("self_attn.k_proj", (keys, hidden), attention),
        ("self_attn.v_proj", (keys, hidden), attention),
        ("self_attn.o_proj", (hidden, queries), attention),
        ("feed_forward.gate_proj", (wide, hidden), mlp),
        ("feed_forward.up_proj", (wide, hidden), mlp),
        ("feed_forward.down_proj", (hidden, wide), mlp),
    ]


# What a published falcon_h1 config.json leaves out where the default is meant.
DEFAULTS = {
    "attention_bias": False,
    "hidden_act": "silu",
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "mlp_bias": False,
    "projectors_bias": False,
    "rms_norm_eps": 1e-5,
    "time_step_limit": [0.0, float("inf")],
}


def hub(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with the keys of published files: RoPE in the older form, and what they add."""
    out = {**config, "attn_layer_indices": None, "mamba_use_mlp": True, "mlp_expansion_factor": 8}
    parameters = dict(out.pop("rope_parameters"))
    out["rope_theta"] = parameters.pop("rope_theta")
    out["rope_scaling"] = None if parameters["rope_type"] == "default" else parameters
    return out
