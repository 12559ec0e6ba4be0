"""Mamba2: cases, and tensors under the names of a published checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cases.case import Case, Tensors, drawer

CASES = (
    Case("plain", "mamba2", slow=True),
    Case(
        "groups2_biases",
        "mamba2",
        {"n_groups": 2, "use_bias": True, "use_conv_bias": True, "layer_norm_epsilon": 1e-3},
    ),
    Case(
        "groups4_tied_no_conv_bias",
        "mamba2",
        {
            "n_groups": 4,
            "num_heads": 8,
            "head_dim": 12,
            "hidden_size": 48,
            "use_conv_bias": False,
            "conv_kernel": 2,
            "tie_word_embeddings": True,
        },
        dialect="hub",
    ),
    Case(
        "odd_sizes",
        "mamba2",
        {
            "vocab_size": 101,
            "hidden_size": 30,
            "num_heads": 3,
            "head_dim": 20,
            "state_size": 7,
            "n_groups": 3,
            "conv_kernel": 5,
            "num_hidden_layers": 3,
            "hidden_act": "gelu",
        },
    ),
    Case("one_head_bias", "mamba2", {"num_heads": 1, "head_dim": 64, "use_bias": True}, slow=True),
    Case(
        "bf16_sharded", "mamba2", {"n_groups": 2}, dialect="hub", dtype="bf16", shards=3, slow=True
    ),
    Case("f16", "mamba2", {"conv_kernel": 5, "tie_word_embeddings": True}, dtype="f16", slow=True),
    Case(
        "first_published_names",
        "mamba2",
        {"n_groups": 1},
        dialect="hub",
        rename={"backbone.embeddings.weight": "backbone.embedding.weight"},
        reference="it does not know the old key and draws the table at random",
        slow=True,
    ),
    Case(
        "limits_bind",
        "mamba2",
        {"time_step_limit": [0.05, 0.3], "n_groups": 2},
        reference="it clamps dt in prefill and not in its decode step",
    ),
    Case(
        "expand_one_and_a_half",
        "mamba2",
        {"expand": 1.5, "num_heads": 6, "head_dim": 8, "n_groups": 2},
        reference="its config class takes only integers for expand",
    ),
)

BASE = {
    "architectures": ["Mamba2ForCausalLM"],
    "bos_token_id": 1,
    "chunk_size": 8,
    "conv_kernel": 4,
    "eos_token_id": 2,
    "expand": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.1,
    "layer_norm_epsilon": 1e-5,
    "model_type": "mamba2",
    "n_groups": 1,
    "num_heads": 4,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "rescale_prenorm_residual": False,
    "residual_in_fp32": True,
    "state_size": 12,
    "tie_word_embeddings": False,
    "time_step_floor": 1e-4,
    "time_step_limit": [0.0, float("inf")],
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "time_step_rank": 4,
    "transformers_version": "5.24.0",
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "vocab_size": 97,
}


def tensors(config: Mapping[str, Any], rng: np.random.Generator) -> Tensors:
    """Well-scaled random weights: variance 1/fan_in, A and dt spread as the library draws them."""

    def normal(shape: tuple[int, ...], scale: float, offset: float = 0.0) -> np.ndarray:
        return drawer(rng)(*shape, scale=scale, offset=offset)

    hidden, heads, vocab = config["hidden_size"], config["num_heads"], config["vocab_size"]
    inner, kernel = heads * config["head_dim"], config["conv_kernel"]
    channels = inner + 2 * config["n_groups"] * config["state_size"]
    tied = config["tie_word_embeddings"]
    made: Tensors = {
        "backbone.embeddings.weight": normal((vocab, hidden), 0.1 if tied else 1.0),
        "backbone.norm_f.weight": normal((hidden,), 0.1, 1.0),
    }
    if not tied:
        made["lm_head.weight"] = normal((vocab, hidden), hidden**-0.5)
    for i in range(config["num_hidden_layers"]):
        base, mixer = f"backbone.layers.{i}.", f"backbone.layers.{i}.mixer."
        width = inner + channels + heads
        made[base + "norm.weight"] = normal((hidden,), 0.1, 1.0)
        made[mixer + "in_proj.weight"] = normal((width, hidden), hidden**-0.5)
        made[mixer + "conv1d.weight"] = normal((channels, 1, kernel), kernel**-0.5)
        made[mixer + "dt_bias"] = normal((heads,), 1.0, -3.0)
        made[mixer + "A_log"] = np.log(rng.uniform(1.0, 9.0, heads)).astype(np.float32)
        made[mixer + "D"] = normal((heads,), 0.1, 1.0)
        made[mixer + "norm.weight"] = normal((inner,), 0.1, 1.0)
        made[mixer + "out_proj.weight"] = normal((hidden, inner), inner**-0.5)
        if config["use_conv_bias"]:
            made[mixer + "conv1d.bias"] = normal((channels,), 0.1)
        if config["use_bias"]:
            made[mixer + "in_proj.bias"] = normal((width,), 0.1)
            made[mixer + "out_proj.bias"] = normal((hidden,), 0.1)
    return made


# What a published mamba2 config.json leaves out where the default is meant.
DEFAULTS = {
    "tie_word_embeddings": False,
    "use_conv_bias": True,
    "use_bias": False,
    "layer_norm_epsilon": 1e-5,
    "hidden_act": "silu",
    "expand": 2,
}


def hub(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with the keys of older published files."""
    return {**config, "intermediate_size": config["num_heads"] * config["head_dim"]}
