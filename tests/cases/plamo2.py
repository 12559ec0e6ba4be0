"""PLaMo 2: cases, and tensors under the names of a published checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cases.case import Case, Tensors, drawer

NO_REFERENCE = "transformers has no plamo2"

# Windows are shorter than what tests run, so that they bind; the oracle decides in every row.
CASES = (
    Case("plain", "plamo2", reference=NO_REFERENCE),
    Case(
        "window_of_1",
        "plamo2",
        {
            "attention_window_size": 1,
            "full_attention_idx": [1],
            "num_hidden_layers": 4,
            "rope_theta": 50000.0,
            "rope_local_theta": 500.0,
        },
        reference=NO_REFERENCE,
    ),
    Case(
        "step_3_untied",
        "plamo2",
        {
            "mamba_step": 3,
            "num_hidden_layers": 5,  # attention in layers 1 and 4
            "attention_window_size": 7,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-2,
            "rope_theta": 300.0,
        },
        dialect="hub",
        reference=NO_REFERENCE,
    ),
    Case(
        "step_8_last_layer",
        "plamo2",
        {"mamba_step": 8, "num_hidden_layers": 3, "num_key_value_heads": 4, "mamba_d_conv": 2},
        reference=NO_REFERENCE,
    ),
    Case(
        "no_mamba",
        "plamo2",
        {
            "mamba_enabled": False,
            "mamba_step": 1,
            "attention_window_size": 5,
            "full_attention_idx": [0, 2],
            "num_key_value_heads": 1,
        },
        reference=NO_REFERENCE,
    ),
    Case(
        "odd_sizes",
        "plamo2",
        {
            "vocab_size": 101,
            "hidden_size": 30,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "hidden_size_per_head": 6,
            "mamba_num_heads": 5,
            "mamba_d_state": 7,
            "mamba_d_conv": 5,
            "mamba_step": 4,
            "num_hidden_layers": 6,
            "intermediate_size": 46,
            "attention_window_size": 11,
            "tie_word_embeddings": False,
        },
        reference=NO_REFERENCE,
    ),
    Case(
        "wide_dt",
        "plamo2",
        {"hidden_size": 1104, "num_hidden_layers": 2, "num_attention_heads": 2},  # dt of 69 parts
        reference=NO_REFERENCE,
    ),
    Case(
        "bf16_sharded",
        "plamo2",
        {"full_attention_idx": [3], "attention_window_size": 9, "num_hidden_layers": 4},
        dialect="hub",
        dtype="bf16",
        shards=3,
        reference=NO_REFERENCE,
    ),
)

BASE = {
    "architectures": ["Plamo2ForCausalLM"],
    "attention_window_size": 12,
    "auto_map": {
        "AutoConfig": "modeling_plamo.Plamo2Config",
        "AutoModelForCausalLM": "modeling_plamo.Plamo2ForCausalLM",
    },
    "bos_token_id": 1,
    "eos_token_id": 2,
    "eval_attention_n_bit": None,
    "eval_mlp_n_bit": None,
    "fp8_accum_dtype": None,
    "full_attention_idx": [],
    "hidden_size": 40,
    "hidden_size_per_head": 8,
    "image_feature_size": None,
    "image_proj_type": "linear",
    "image_token_id": None,
    "intermediate_size": 52,
    "linear_type": "normal",
    "mamba_chunk_size": 256,
    "mamba_d_conv": 4,
    "mamba_d_state": 10,
    "mamba_enabled": True,
    "mamba_num_heads": 3,
    "mamba_step": 2,
    "max_position_embeddings": 10485760,
    "model_type": "plamo2",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "pad_token_id": 3,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "tokenizer_class": "Plamo2Tokenizer",
    "transformers_version": "4.44.2",
    "use_cache": True,
    "vocab_size": 97,
}


def is_mamba(config: Mapping[str, Any], i: int) -> bool:
    """Whether layer i has a Mamba mixer."""
    step, layers = config["mamba_step"], config["num_hidden_layers"]
    if layers <= step // 2:
        return config["mamba_enabled"] and i != layers - 1
    return config["mamba_enabled"] and i % step != step // 2


def tensors(config: Mapping[str, Any], rng: np.random.Generator) -> Tensors:
    """Well-scaled random weights: variance 1/fan_in, norms about what the offsets make 1."""
    normal = drawer(rng)
    hidden, vocab, wide = config["hidden_size"], config["vocab_size"], config["intermediate_size"]
    tied = config["tie_word_embeddings"]
    made: Tensors = {
        "model.embed_tokens.weight": normal(vocab, hidden, scale=0.1 if tied else 1.0),
        "model.norm.weight": normal(hidden, scale=0.1),
    }
    if not tied:
        made["lm_head.weight"] = normal(vocab, hidden, scale=hidden**-0.5)
    for i in range(config["num_hidden_layers"]):
        base = f"model.layers.layers.{i}."
        # About 1 with the offset: at 1/5 and less, a layer would hardly change the logits.
        for name, mean in (
            ("pre_mixer_norm", 0.0),
            ("post_mixer_norm", 0.8),
            ("pre_mlp_norm", 0.0),
            ("post_mlp_norm", 0.9),
        ):
            made[f"{base}{name}.weight"] = normal(hidden, scale=0.1, offset=mean)
        mixer = _mamba if is_mamba(config, i) else _attention
        made |= {f"{base}mixer.{name}": array for name, array in mixer(config, rng).items()}
        made[base + "mlp.gate_up_proj.weight"] = normal(2 * wide, hidden, scale=hidden**-0.5)
        made[base + "mlp.down_proj.weight"] = normal(hidden, wide, scale=wide**-0.5)
    return made


def _mamba(config: Mapping[str, Any], rng: np.random.Generator) -> Tensors:
    normal, hidden, heads = drawer(rng), config["hidden_size"], config["mamba_num_heads"]
    inner, maps = heads * config["hidden_size_per_head"], config["mamba_d_state"]
    rank, kernel = max(64, hidden // 16), config["mamba_d_conv"]
    return {
        "in_proj.weight": normal(2 * inner, hidden, scale=hidden**-0.5),
        "conv1d.weight": normal(inner, 1, kernel, scale=kernel**-0.5),
        "bcdt_proj.weight": normal(2 * maps + rank, inner, scale=inner**-0.5),
        "dt_proj.weight": normal(heads, rank, scale=rank**-0.5),
        "dt_bias": normal(heads, offset=-3.0),
        "A_log": np.log(rng.uniform(1.0, 9.0, heads)).astype(np.float32),
        "D": normal(heads, scale=0.1, offset=1.0),
        "B_norm_weight": normal(maps, scale=0.1, offset=1.0),
        "C_norm_weight": normal(maps, scale=0.1, offset=1.0),
        "dt_norm_weight": normal(rank, scale=0.1, offset=1.0),
        "out_proj.weight": normal(hidden, inner, scale=inner**-0.5),
    }


def _attention(config: Mapping[str, Any], rng: np.random.Generator) -> Tensors:
    normal, hidden, width = drawer(rng), config["hidden_size"], config["hidden_size_per_head"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    return {
        "qkv_proj.weight": normal((heads + 2 * groups) * width, hidden, scale=hidden**-0.5),
        "q_weight": normal(heads, width, scale=0.2, offset=1.5),
        "k_weight": normal(groups, width, scale=0.2, offset=1.5),
        "o_proj.weight": normal(hidden, heads * width, scale=(heads * width) ** -0.5),
    }


# What a published plamo2 config.json leaves out where the default is meant.
DEFAULTS = {
    "tie_word_embeddings": True,
    "eval_attention_n_bit": None,
    "eval_mlp_n_bit": None,
    "fp8_accum_dtype": None,
    "image_feature_size": None,
    "image_token_id": None,
    "mamba_d_conv": 4,
}


def hub(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with the window's second name, and null where there is no full attention."""
    full = config["full_attention_idx"] or None
    return {**config, "sliding_window": config["attention_window_size"], "full_attention_idx": full}
