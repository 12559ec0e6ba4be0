"""Falcon Mamba: cases; its tensors are Mamba's, since the norms of dt, B and C have no weights."""

from __future__ import annotations

from cases import mamba
from cases.case import Case

CASES = (
    Case(
        "eps_matters",
        "falcon_mamba",
        {"mixer_rms_eps": 0.3, "layer_norm_epsilon": 1e-2, "use_bias": True},
    ),
    Case("plain", "falcon_mamba", slow=True),
    Case(
        "odd_sizes",
        "falcon_mamba",
        {
            "vocab_size": 101,
            "hidden_size": 30,
            "intermediate_size": 60,
            "state_size": 7,
            "conv_kernel": 3,
            "num_hidden_layers": 3,
            "time_step_rank": 5,
            "hidden_act": "gelu",
            "use_conv_bias": False,
        },
    ),
    # The published 7B says expand 16 beside an intermediate_size of twice hidden_size.
    Case(
        "published_expand",
        "falcon_mamba",
        {"expand": 16, "intermediate_size": 64, "use_falcon_mambapy": False},
        dialect="hub",
    ),
    Case(
        "tied_expand_one",
        "falcon_mamba",
        {
            "tie_word_embeddings": True,
            "expand": 1,
            "intermediate_size": 32,
            "conv_kernel": 2,
            "time_step_rank": "auto",
        },
        dialect="hub",
    ),
    Case("one_layer", "falcon_mamba", {"num_hidden_layers": 1, "mixer_rms_eps": 0.1}, slow=True),
    Case("bf16_sharded", "falcon_mamba", dialect="hub", dtype="bf16", shards=3, slow=True),
    Case("f16", "falcon_mamba", {"conv_kernel": 3}, dtype="f16", slow=True),
)

BASE = {
    **mamba.BASE,
    "architectures": ["FalconMambaForCausalLM"],
    "mixer_rms_eps": 1e-6,
    "model_type": "falcon_mamba",
    "tie_word_embeddings": False,
}

# What a published falcon_mamba config.json leaves out where the default is meant.
DEFAULTS = {
    "mixer_rms_eps": 1e-6,
    "tie_word_embeddings": True,
    "use_associative_scan": True,
    "use_mambapy": False,
    "use_conv_bias": True,
    "use_bias": False,
    "layer_norm_epsilon": 1e-5,
    "hidden_act": "silu",
}

tensors = mamba.tensors
