"""Mamba: cases, and tensors under the names of a published checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cases.case import Case, Tensors, drawer

CASES = (
    Case(
        "biases_untied",
        "mamba",
        {"use_bias": True, "layer_norm_epsilon": 1e-2, "tie_word_embeddings": False},
    ),
    Case("plain", "mamba", slow=True),
    Case(
        "untied_odd_sizes",
        "mamba",
        {
            "vocab_size": 101,
            "hidden_size": 30,
            "intermediate_size": 60,
            "state_size": 7,
            "conv_kernel": 3,
            "num_hidden_layers": 3,
            "time_step_rank": 5,
            "hidden_act": "gelu",
            "tie_word_embeddings": False,
            "use_conv_bias": False,
        },
    ),
    Case(
        "published_keys",
        "mamba",
        {
            "d_inner": 64,
            "d_model": 32,
            "fused_add_norm": True,
            "n_layer": 2,
            "pad_vocab_size_multiple": 8,
            "rms_norm": True,
            "ssm_cfg": {},
        },
        dialect="hub",
    ),
    Case(
        "first_published_names",
        "mamba",
        dialect="hub",
        rename={"backbone.embeddings.weight": "backbone.embedding.weight"},
        reference="transformers 5.24.0 does not find the old key and draws random embeddings",
        slow=True,
    ),
    Case(
        "expand_one_kernel_2",
        "mamba",
        {
            "expand": 1,
            "intermediate_size": 32,
            "conv_kernel": 2,
            "state_size": 24,
            "tie_word_embeddings": False,
            "time_step_rank": "auto",
        },
        dialect="hub",
    ),
    Case(
        "given_size_overrides_expand",
        "mamba",
        {
            "expand": 16,
            "intermediate_size": 40,
            "tie_word_embeddings": False,
            "time_step_rank": 1,
        },
        slow=True,
    ),
    Case(
        "one_layer_one_state",
        "mamba",
        {"num_hidden_layers": 1, "state_size": 1, "tie_word_embeddings": False},
    ),
    Case("bf16_sharded", "mamba", dialect="hub", dtype="bf16", shards=3, slow=True),
    Case("f16", "mamba", {"conv_kernel": 3}, dtype="f16", slow=True),
    Case(
        "expand_one_and_a_half",
        "mamba",
        {"expand": 1.5, "intermediate_size": 48},
        reference="its config class takes only integers for expand",
        slow=True,
    ),
)

BASE = {
    "architectures": ["MambaForCausalLM"],
    "bos_token_id": 1,
    "conv_kernel": 4,
    "eos_token_id": 2,
    "expand": 2,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.1,
    "intermediate_size": 64,
    "layer_norm_epsilon": 1e-5,
    "model_type": "mamba",
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "rescale_prenorm_residual": False,
    "residual_in_fp32": True,
    "state_size": 12,
    "tie_word_embeddings": True,
    "time_step_floor": 1e-4,
    "time_step_init_scheme": "random",
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "time_step_rank": 3,
    "time_step_scale": 1.0,
    "transformers_version": "5.24.0",
    "use_associative_scan": True,
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "use_mambapy": False,
    "vocab_size": 97,
}


def tensors(config: Mapping[str, Any], rng: np.random.Generator) -> Tensors:
    """Well-scaled random weights: variance 1/fan_in, A and dt spread as the library draws them."""
    normal = drawer(rng)
    hidden, inner, maps = (config[k] for k in ("hidden_size", "intermediate_size", "state_size"))
    vocab, kernel, rank = (config[k] for k in ("vocab_size", "conv_kernel", "time_step_rank"))
    rank = -(-hidden // 16) if rank == "auto" else rank
    tied = config["tie_word_embeddings"]
    made: Tensors = {
        "backbone.embeddings.weight": normal(vocab, hidden, scale=0.1 if tied else 1.0),
        "backbone.norm_f.weight": normal(hidden, scale=0.1, offset=1.0),
    }
    if not tied:
        made["lm_head.weight"] = normal(vocab, hidden, scale=hidden**-0.5)
    for i in range(config["num_hidden_layers"]):
        base, mixer = f"backbone.layers.{i}.", f"backbone.layers.{i}.mixer."
        made[base + "norm.weight"] = normal(hidden, scale=0.1, offset=1.0)
        made[mixer + "in_proj.weight"] = normal(2 * inner, hidden, scale=hidden**-0.5)
        made[mixer + "conv1d.weight"] = normal(inner, 1, kernel, scale=kernel**-0.5)
        made[mixer + "x_proj.weight"] = normal(rank + 2 * maps, inner, scale=inner**-0.5)
        made[mixer + "dt_proj.weight"] = normal(inner, rank, scale=rank**-0.5)
        made[mixer + "dt_proj.bias"] = normal(inner, scale=1.0, offset=-3.0)
        rates = rng.uniform(0.5, maps + 0.5, (inner, maps))
        made[mixer + "A_log"] = np.log(rates).astype(np.float32)
        made[mixer + "D"] = normal(inner, scale=0.1, offset=1.0)
        made[mixer + "out_proj.weight"] = normal(hidden, inner, scale=inner**-0.5)
        if config["use_conv_bias"]:
            made[mixer + "conv1d.bias"] = normal(inner, scale=0.1)
        if config["use_bias"]:
            made[mixer + "in_proj.bias"] = normal(2 * inner, scale=0.1)
            made[mixer + "out_proj.bias"] = normal(hidden, scale=0.1)
    return made


# What a published mamba config.json leaves out where the default is meant.
DEFAULTS = {
    "tie_word_embeddings": True,
    "use_associative_scan": True,
    "use_mambapy": False,
    "use_conv_bias": True,
    "use_bias": False,
    "layer_norm_epsilon": 1e-5,
    "hidden_act": "silu",
    "expand": 2,
    "intermediate_size": 64,
    "time_step_rank": "auto",
}
