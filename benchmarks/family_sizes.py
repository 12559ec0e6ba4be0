"""Configs of 100-150 M parameters, one a family, for random checkpoints to measure."""

from __future__ import annotations

from typing import Any

BASE: dict[str, Any] = {
    "vocab_size": 32000,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

MIDDLE: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "hidden_size": 512,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        "intermediate_size": 1024,
        "max_position_embeddings": 4096,
    },
    "kimi_linear": {
        "hidden_size": 512,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "linear_num_heads": 8,
        "linear_head_dim": 64,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "intermediate_size": 1536,
        "model_max_length": 4096,
    },
    "recurrent_gemma": {
        "hidden_size": 768,
        "lru_width": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 96,
        "intermediate_size": 4608,
        "attention_window_size": 1024,
    },
    "rwkv7": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_heads": 12,
        "head_dim": 64,
        "intermediate_size": 3072,
        "value_dim": [768] * 12,
        "decay_low_rank_dim": 64,
        "a_low_rank_dim": 64,
        "v_low_rank_dim": 32,
        "gate_low_rank_dim": 128,
    },
}
