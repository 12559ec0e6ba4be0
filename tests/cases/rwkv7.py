"""RWKV-7: cases, and tensors under the names of a published checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cases.case import Case, Tensors, drawer

NO_REFERENCE = "transformers has no rwkv7"

CASES = (
    Case("plain", "rwkv7", {"value_dim": [40, 40, 40]}, reference=NO_REFERENCE),
    # No layer takes values from another.
    Case(
        "one_layer",
        "rwkv7",
        {"num_hidden_layers": 1, "hidden_size": 64, "head_dim": 64, "num_heads": 1},
        reference=NO_REFERENCE,
    ),
    Case(
        "heads_wider_than_the_model",
        "rwkv7",
        {
            "hidden_size": 28,
            "attention_hidden_size": 48,
            "num_heads": 3,
            "head_dim": 16,
            "value_dim": [48, 48, 48],
        },
        reference=NO_REFERENCE,
    ),
    Case(
        "no_biases",
        "rwkv7",
        {"norm_bias": False, "norm_eps": 1e-2, "num_hidden_layers": 2},
        reference=NO_REFERENCE,
    ),
    Case(
        "hub_width_from_the_ratio",
        "rwkv7",
        {"hidden_ratio": 1.5, "intermediate_size": None, "num_heads": None},
        dialect="hub",
        reference=NO_REFERENCE,
    ),
    Case(
        "tied_no_first_norm",
        "rwkv7",
        {
            "tie_word_embeddings": True,
            "norm_first": False,  # a norm makes the last token's own row the largest
            "head_dim": 20,
            "num_heads": 2,
            "num_hidden_layers": 2,
        },
        reference=NO_REFERENCE,
    ),
    Case(
        "bf16_sharded",
        "rwkv7",
        dialect="hub",
        dtype="bf16",
        shards=3,
        reference=NO_REFERENCE,
        slow=True,
    ),
    Case("f16", "rwkv7", {"v_low_rank_dim": 9}, dtype="f16", reference=NO_REFERENCE, slow=True),
)

BASE = {
    "a_low_rank_dim": 7,
    "architectures": ["RWKV7ForCausalLM"],
    "attn": None,
    "attn_mode": "chunk",
    "bos_token_id": 1,
    "decay_low_rank_dim": 6,
    "eos_token_id": 2,
    "fuse_cross_entropy": True,
    "fuse_norm": True,
    "gate_low_rank_dim": 11,
    "head_dim": 8,
    "hidden_act": "sqrelu",
    "hidden_ratio": 4.0,
    "hidden_size": 40,
    "initializer_range": 0.006,
    "intermediate_size": 52,
    "max_position_embeddings": 2048,
    "model_type": "rwkv7",
    "norm_bias": True,
    "norm_eps": 1e-5,
    "norm_first": True,
    "num_heads": 5,
    "num_hidden_layers": 3,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "v_low_rank_dim": 5,
    "vocab_size": 97,
}

# What a published rwkv7 config.json leaves out where the default is meant.
DEFAULTS = {
    "attn": None,
    "norm_bias": True,
    "norm_eps": 1e-5,
    "norm_first": True,
    "num_heads": None,
    "tie_word_embeddings": False,
}


def tensors(config: Mapping[str, Any], rng: np.random.Generator) -> Tensors:
    """Well-scaled random weights: variance 1/fan_in, mixtures and decays all over their ranges."""
    normal = drawer(rng)
    D, vocab, tied = config["hidden_size"], config["vocab_size"], config["tie_word_embeddings"]
    made: Tensors = {"model.embeddings.weight": normal(vocab, D, scale=0.1 if tied else 1.0)}

    def norm(name: str) -> None:
        made[f"{name}.weight"] = normal(D, scale=0.1, offset=1.0)
        if config["norm_bias"]:
            made[f"{name}.bias"] = normal(D, scale=0.1)

    def linear(name: str, outputs: int, inputs: int) -> None:
        made[f"{name}.weight"] = normal(outputs, inputs, scale=inputs**-0.5)

    wide = config["intermediate_size"]
    if wide is None:
        wide = -(-int(config["hidden_ratio"] * D) // 32) * 32
    for i in range(config["num_hidden_layers"]):
        base = f"model.layers.{i}."
        if i == 0 and config["norm_first"]:
            norm(f"{base}pre_norm")
        norm(f"{base}attn_norm")
        norm(f"{base}ffn_norm")
        _time_mix(config, made, rng, f"{base}attn.", first=i == 0)
        made[f"{base}ffn.x_k"] = rng.uniform(0, 1, D).astype(np.float32)
        linear(f"{base}ffn.key", wide, D)
        linear(f"{base}ffn.value", D, wide)
    norm("model.norm")
    if not tied:
        linear("lm_head", vocab, D)
    return made


def _time_mix(
    config: Mapping[str, Any], made: Tensors, rng: np.random.Generator, base: str, first: bool
) -> None:
    normal = drawer(rng)
    D, size = config["hidden_size"], config["head_dim"]
    A = config.get("attention_hidden_size") or D
    for each in "rwkvag":
        made[f"{base}x_{each}"] = rng.uniform(0, 1, (1, 1, D)).astype(np.float32)
    made[f"{base}k_k"] = normal(A, scale=0.2, offset=0.8)
    made[f"{base}k_a"] = normal(A, scale=0.2, offset=1.0)
    made[f"{base}r_k"] = normal(A // size, size, scale=0.3)
    for each, (outputs, inputs) in {"r": (A, D), "k": (A, D), "v": (A, D), "o": (D, A)}.items():
        made[f"{base}{each}_proj.weight"] = normal(outputs, inputs, scale=inputs**-0.5)
    ranks = {"w": "decay", "a": "a", "g": "gate"} | ({} if first else {"v": "v"})
    for each, name in ranks.items():
        rank, lora = config[f"{name}_low_rank_dim"], f"{base}{each}_lora.lora."
        made[f"{lora}0.weight"] = normal(rank, D, scale=D**-0.5)
        made[f"{lora}2.weight"] = normal(A, rank, scale=rank**-0.5)
        if each != "g":
            made[f"{lora}2.bias"] = normal(A, scale=2.0 if each == "w" else 1.0, offset=-1.0)
    made[f"{base}g_norm.weight"] = normal(A, scale=0.1, offset=1.0)
    made[f"{base}g_norm.bias"] = normal(A, scale=0.1)
