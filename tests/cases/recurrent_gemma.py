"""RecurrentGemma: cases, and tensors under the names of a published checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cases.case import Case, Tensors, drawer

CASES = (
    Case("plain", "recurrent_gemma"),
    Case(
        "wide_recurrence",
        "recurrent_gemma",
        {
            "lru_width": 56,
            "conv1d_width": 3,
            "num_key_value_heads": 4,
            "attention_window_size": 9,
        },
        reference="its convolution state of a text of one token has hidden_size channels",
    ),
    # A window below the chunk.
    Case(
        "attention_first_short_window",
        "recurrent_gemma",
        {
            "block_types": ["attention", "recurrent"],
            "num_hidden_layers": 4,
            "attention_window_size": 5,
            "num_key_value_heads": 2,
            "lru_width": 40,
        },
    ),
    Case(
        "attention_alone",
        "recurrent_gemma",
        {
            "block_types": ["attention"],
            "num_hidden_layers": 4,
            "attention_window_size": 64,
            "attention_bias": True,
            "head_dim": 14,
            "num_key_value_heads": None,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 500.0,
                "partial_rotary_factor": 1.0,
            },
        },
    ),
    Case(
        "window_of_one",
        "recurrent_gemma",
        {"block_types": ["recurrent", "attention"], "attention_window_size": 1},
        reference="its cache of the last W - 1 keys keeps all of them where W is 1",
    ),
    Case(
        "only_recurrent",
        "recurrent_gemma",
        {"block_types": ["recurrent"], "num_hidden_layers": 2, "conv1d_width": 5},
        reference="its cache asks the first attention layer for its length, and there is none",
    ),
    Case(
        "untied_small_cap",
        "recurrent_gemma",
        {
            "block_types": ["recurrent", "attention"],
            "num_hidden_layers": 2,
            "conv1d_width": 2,
            "tie_word_embeddings": False,
            "logits_soft_cap": 3.0,
            "rms_norm_eps": 1e-3,
            "hidden_activation": "silu",
            "intermediate_size": 71,
            "hidden_size": 48,
            "vocab_size": 101,
        },
    ),
    Case("hub", "recurrent_gemma", {"hidden_size": 56, "lru_width": 56}, dialect="hub"),
    Case(
        "hub_other_pattern",
        "recurrent_gemma",
        {
            "block_types": ["attention", "attention", "recurrent"],
            "num_hidden_layers": 5,
            "attention_window_size": 20,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.25,
            },
            "head_dim": 12,
        },
        dialect="hub",
        reference="it does not read _block_types",
    ),
    Case("bf16_sharded", "recurrent_gemma", dialect="hub", dtype="bf16", shards=3, slow=True),
    Case("f16", "recurrent_gemma", {"num_hidden_layers": 4}, dtype="f16", slow=True),
)

BASE = {
    "architectures": ["RecurrentGemmaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_window_size": 12,
    "block_types": ["recurrent", "recurrent", "attention"],
    "bos_token_id": 1,
    "conv1d_width": 4,
    "eos_token_id": 2,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 40,
    "intermediate_size": 90,
    "logits_soft_cap": 30.0,
    "lru_width": None,
    "model_type": "recurrent_gemma",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
    "tie_word_embeddings": True,
    "transformers_version": "5.24.0",
    "use_cache": True,
    "vocab_size": 97,
    "w_init_variance_scale": 0.01,
}

# What a published config.json leaves out where the default is meant.
DEFAULTS = {"tie_word_embeddings": True, "attention_bias": False, "lru_width": None}


def hub(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with the keys of published files."""
    out = {**config, "_block_types": config["block_types"], "embeddings_scale_by_sqrt_dim": True}
    rope = dict(config["rope_parameters"])
    out |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor")}
    return {k: v for k, v in out.items() if k not in ("block_types", "rope_parameters")}


def tensors(config: Mapping[str, Any], rng: np.random.Generator) -> Tensors:
    """Well-scaled random weights: variance 1/fan_in, decays spread as the library draws them.

    Tied embeddings are small, else the factor on them makes a model repeat its last token.
    """
    normal = drawer(rng)
    hidden, vocab, tied = config["hidden_size"], config["vocab_size"], config["tie_word_embeddings"]
    heads, width = config["num_attention_heads"], config["lru_width"] or hidden
    groups = config["num_key_value_heads"] or heads
    head, half = config.get("head_dim", hidden // heads), config["intermediate_size"] // 2
    made: Tensors = {
        "model.embed_tokens.weight": normal(vocab, hidden, scale=0.03 if tied else 0.1),
        "model.final_norm.weight": normal(hidden, scale=0.2, offset=3.0 if tied else 0.0),
    }

    def linear(name: str, outputs: int, inputs: int, bias: bool = True) -> None:
        made[f"{name}.weight"] = normal(outputs, inputs, scale=inputs**-0.5)
        if bias:
            made[f"{name}.bias"] = normal(outputs, scale=0.1)

    def recurrent(base: str) -> None:
        linear(base + "linear_x", width, hidden)
        linear(base + "linear_y", width, hidden)
        linear(base + "linear_out", hidden, width)
        kernel = config["conv1d_width"]
        made[base + "conv_1d.weight"] = normal(width, 1, kernel, scale=kernel**-0.5)
        made[base + "conv_1d.bias"] = normal(width, scale=0.1)
        block = width // heads
        for gate in ("rg_lru.input_gate", "rg_lru.recurrent_gate"):
            made[f"{base}{gate}_weight"] = normal(heads, block, block, scale=block**-0.5)
            made[f"{base}{gate}_bias"] = normal(heads, block, scale=0.1)
        squares = rng.uniform(0.9**2, 0.999**2, width)
        made[base + "rg_lru.recurrent_param"] = np.log(squares**-0.5 - 1.0).astype(np.float32)

    if not tied:
        linear("lm_head", vocab, hidden, bias=False)
    kinds = config["block_types"]
    for i in range(config["num_hidden_layers"]):
        base = f"model.layers.{i}."
        for norm in ("temporal_pre_norm", "channel_pre_norm"):
            made[f"{base}{norm}.weight"] = normal(hidden, scale=0.2)
        if kinds[i % len(kinds)] == "recurrent":
            recurrent(base + "temporal_block.")
        else:
            for which, count in zip("qkv", (heads, groups, groups), strict=True):
                name = f"{base}temporal_block.{which}_proj"
                linear(name, count * head, hidden, config["attention_bias"])
            linear(f"{base}temporal_block.o_proj", hidden, heads * head)
        linear(f"{base}mlp_block.gate_proj", half, hidden)
        linear(f"{base}mlp_block.up_proj", half, hidden)
        linear(f"{base}mlp_block.down_proj", hidden, half)
    return made
