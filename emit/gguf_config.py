"""The config.json of the model in a GGUF file, made of what the file itself says.

Keys are those of `gguf.constants.Keys`, written by the set_gguf_parameters of llama.cpp's
conversion/. What a file never says, such as time_step_min of nemotron_h, has the default of the
published config. A key of the architecture that nothing here reads is refused: it may change what
the model computes. Which layer is of which kind, and whether there are biases, the tensors say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from emit.config import MOST_LAYERS
from emit.dequant import ggml
from emit.dequant.coded import KEY
from emit.gguf_file import PLAIN, Gguf
from emit.gguf_metadata import ARCHITECTURE, Metadata


def config_of(file: Gguf) -> dict[str, Any]:
    """config.json of the model in `file`. Raises EmitError naming the key that does not fit."""
    found = Metadata(file)
    if found.arch not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise found.bad(f"{ARCHITECTURE} = {found.arch!a} is not supported, expected {known}")
    layers = found.size("block_count")
    if layers > MOST_LAYERS:
        raise found.bad(f"{found.arch}.block_count = {layers}, expected {MOST_LAYERS} at most")
    layers -= found.size("nextn_predict_layers", 0)
    config: dict[str, Any] = {
        "vocab_size": found.rows("token_embd.weight"),
        "hidden_size": found.size("embedding_length"),
        "num_hidden_layers": layers,
        "tie_word_embeddings": "output.weight" not in found.shapes,
        "bos_token_id": found.all.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _ends(found.all),
    }
    config |= ARCHITECTURES[found.arch](found, layers, config["hidden_size"])
    found.finish()
    if any(tensor.dtype not in PLAIN for tensor in file.tensors.values()):
        config[KEY] = {"quant_method": ggml.METHOD}
    return {key: value for key, value in config.items() if value is not None}


def _ends(metadata: Mapping[str, Any]) -> list[int] | int | None:
    """Tokens that end a text, or a turn of a chat."""
    keys = (f"tokenizer.ggml.{each}_token_id" for each in ("eos", "eot", "eom"))
    ids = [i for key in keys if type(i := metadata.get(key)) is int]
    ids = list(dict.fromkeys(ids))
    return ids if len(ids) > 1 else (ids[0] if ids else None)


def _ratio(found: Metadata, key: str, of: int, by: str) -> int:
    if of % (number := found.size(by)):
        raise found.bad(f"{found.arch}.{key} = {of}, expected a multiple of {by} = {number}")
    return of // number


def _mamba(found: Metadata, layers: int, hidden: int) -> dict[str, Any]:
    plain = found.flag("ssm.dt_b_c_rms", False)
    return {
        "model_type": "falcon_mamba" if plain else "mamba",
        "state_size": found.size("ssm.state_size"),
        "conv_kernel": found.size("ssm.conv_kernel"),
        "intermediate_size": found.size("ssm.inner_size"),
        "time_step_rank": found.size("ssm.time_step_rank"),
        "layer_norm_epsilon": found.epsilon(),
        "use_bias": found.has("ssm_in.bias"),
        "use_conv_bias": found.has("ssm_conv1d.bias"),
    }


def _mamba2(found: Metadata, layers: int, hidden: int) -> dict[str, Any]:
    inner = found.size("ssm.inner_size")
    return {
        "model_type": "mamba2",
        "state_size": found.size("ssm.state_size"),
        "conv_kernel": found.size("ssm.conv_kernel"),
        "num_heads": found.size("ssm.time_step_rank"),
        "head_dim": _ratio(found, "ssm.inner_size", inner, "ssm.time_step_rank"),
        "n_groups": found.size("ssm.group_count"),
        "intermediate_size": inner,
        "expand": inner / hidden,
        "layer_norm_epsilon": found.epsilon(),
        "use_bias": found.has("ssm_in.bias"),
        "use_conv_bias": found.has("ssm_conv1d.bias"),
    }


def _every(found: Metadata, kinds: list[bool], what: str) -> tuple[int, int]:
    """(period, offset) of the layers that `kinds` marks, offset first."""
    layers = len(kinds)
    offset = kinds.index(True) if True in kinds else layers
    for period in range(offset + 1, layers + 2):
        if kinds == [i % period == offset for i in range(layers)]:
            return period, offset
    raise found.bad(f"the layers with {what} do not recur: {kinds[:40]}")


def _jamba(found: Metadata, layers: int, hidden: int) -> dict[str, Any]:
    attends = _every(found, found.layers_with("attn_output.weight", layers), "attention")
    sparse = found.layers_with("ffn_gate_inp.weight", layers)
    inner = found.size("ssm.inner_size")
    if inner % hidden:
        raise found.bad(f"jamba.ssm.inner_size = {inner}, expected a multiple of {hidden}")
    experts = _every(found, sparse, "experts")
    count, used = found.size("expert_count", 1), found.size("expert_used_count", 1)
    return {
        "model_type": "jamba",
        "intermediate_size": found.size("feed_forward_length"),
        "rms_norm_eps": found.epsilon(),
        "num_attention_heads": found.size("attention.head_count"),
        "num_key_value_heads": found.size("attention.head_count_kv", 0)
        or found.size("attention.head_count"),
        "head_dim": found.rows("attn_q.weight") // found.size("attention.head_count") or None,
        "attn_layer_period": attends[0],
        "attn_layer_offset": attends[1],
        "num_experts": count if any(sparse) else 1,
        "num_experts_per_tok": used if any(sparse) else 1,
        "expert_layer_period": experts[0],
        "expert_layer_offset": experts[1],
        "mamba_d_state": found.size("ssm.state_size"),
        "mamba_d_conv": found.size("ssm.conv_kernel"),
        "mamba_expand": inner // hidden,
        "mamba_dt_rank": found.size("ssm.time_step_rank"),
        "mamba_conv_bias": found.has("ssm_conv1d.bias") or not found.has("ssm_in.weight"),
        "mamba_proj_bias": found.has("ssm_in.bias"),
    }


def _head(found: Metadata) -> int:
    size = found.size("attention.key_length")
    if found.size("attention.value_length", size) != size:
        raise found.bad(f"{found.arch}.attention.value_length differs from key_length = {size}")
    return size


def _rope(found: Metadata, head: int) -> dict[str, Any]:
    """rope_parameters, and the length that they are for."""
    kind = found.keys.get("rope.scaling.type", "none")
    found.read.add("rope.scaling.type")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": found.number("rope.freq_base")}
    rotary = found.size("rope.dimension_count", head)
    if rotary != head:
        rope["partial_rotary_factor"] = rotary / head
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": found.number("rope.scaling.factor")}
    elif kind != "none":
        raise found.bad(f"{found.arch}.rope.scaling.type = {kind!a}, expected none, linear or yarn")
    if kind == "yarn":
        key = "rope.scaling.original_context_length"
        rope["original_max_position_embeddings"] = found.size(key)
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if f"rope.scaling.{theirs}" in found.keys:
                rope[ours] = found.number(f"rope.scaling.{theirs}")
    longest = found.size("context_length", 2**20)
    return {"rope_parameters": rope, "max_position_embeddings": longest}


def _falcon_h1(found: Metadata, layers: int, hidden: int) -> dict[str, Any]:
    inner, head = found.size("ssm.inner_size"), _head(found)
    # Multipliers are in the weights, those of the embeddings and the logits too. A norm comes after
    # the gate, the one order that llama.cpp has.
    return {
        "model_type": "falcon_h1",
        "intermediate_size": found.size("feed_forward_length"),
        "num_attention_heads": found.size("attention.head_count"),
        "num_key_value_heads": found.size("attention.head_count_kv"),
        "head_dim": head,
        "rms_norm_eps": found.epsilon(),
        "mamba_d_ssm": inner,
        "mamba_n_heads": found.size("ssm.time_step_rank"),
        "mamba_d_head": _ratio(found, "ssm.inner_size", inner, "ssm.time_step_rank"),
        "mamba_n_groups": found.size("ssm.group_count"),
        "mamba_d_state": found.size("ssm.state_size"),
        "mamba_d_conv": found.size("ssm.conv_kernel"),
        "mamba_conv_bias": found.has("ssm_conv1d.bias"),
        "mamba_proj_bias": found.has("ssm_in.bias"),
        "projectors_bias": found.has("ssm_out.bias"),
        "attention_bias": found.has("attn_output.bias"),
        "mlp_bias": found.has("ffn_up.bias"),
        "mamba_rms_norm": found.has("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        **_rope(found, head),
    }


def _nemotron_h(found: Metadata, layers: int, hidden: int) -> dict[str, Any]:
    inner = found.size("ssm.inner_size")
    letters = {"ssm_in": "M", "attn_output": "*", "ffn_gate_inp": "E", "ffn_up": "-"}
    has = {letter: found.layers_with(f"{each}.weight", layers) for each, letter in letters.items()}
    pattern = "".join(
        next((letter for letter in has if has[letter][i]), "?") for i in range(layers)
    )
    if "?" in pattern:
        raise found.bad(f"blk.{pattern.index('?')} holds none of {', '.join(letters)}; {pattern}")
    config = {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": pattern,
        "num_attention_heads": found.size("attention.head_count"),
        "num_key_value_heads": found.size("attention.head_count_kv", 0)
        or found.size("attention.head_count"),
        "head_dim": _head(found),
        "intermediate_size": found.rows("ffn_up.weight") or None,
        "layer_norm_epsilon": found.epsilon(),
        "ssm_state_size": found.size("ssm.state_size"),
        "conv_kernel": found.size("ssm.conv_kernel"),
        "mamba_num_heads": found.size("ssm.time_step_rank"),
        "mamba_head_dim": _ratio(found, "ssm.inner_size", inner, "ssm.time_step_rank"),
        "n_groups": found.size("ssm.group_count"),
        "use_bias": found.has("ssm_in.bias"),
        "use_conv_bias": found.has("ssm_conv1d.bias") or "M" not in pattern,
        "mlp_bias": found.has("ffn_up.bias") or found.has("ffn_up_shexp.bias"),
    }
    keys = {"expert_weights_norm", "expert_weights_scale", "expert_count", "moe_latent_size"}
    found.read |= keys | {"expert_group_used_count"}
    if "E" in pattern:
        config |= {
            "n_routed_experts": found.size("expert_count"),
            "num_experts_per_tok": found.size("expert_used_count"),
            "moe_intermediate_size": found.size("expert_feed_forward_length"),
            "moe_shared_expert_intermediate_size": found.size("expert_shared_feed_forward_length"),
            "n_group": found.size("expert_group_count", 1),
            "topk_group": _kept(found),
            "norm_topk_prob": found.flag("expert_weights_norm", False),
            "routed_scaling_factor": found.number("expert_weights_scale", 1.0) or 1.0,
            "moe_latent_size": found.size("moe_latent_size", 0) or None,
        }
    return config


def _qwen(found: Metadata, layers: int, hidden: int) -> dict[str, Any]:
    families = {"qwen3next": "qwen3_next", "qwen35": "qwen3_5_text"}
    inner, head = found.size("ssm.inner_size"), _head(found)
    sparse = found.layers_with("ffn_gate_inp.weight", layers)
    attends = found.layers_with("attn_output.weight", layers)
    config = {
        "model_type": families.get(found.arch, "qwen3_5_moe_text"),
        "layer_types": ["full_attention" if a else "linear_attention" for a in attends],
        "num_attention_heads": found.size("attention.head_count"),
        "num_key_value_heads": found.size("attention.head_count_kv"),
        "head_dim": head,
        "rms_norm_eps": found.epsilon(),
        "attention_bias": found.has("attn_output.bias"),
        "linear_conv_kernel_dim": found.size("ssm.conv_kernel"),
        "linear_key_head_dim": found.size("ssm.state_size"),
        "linear_num_key_heads": found.size("ssm.group_count"),
        "linear_num_value_heads": found.size("ssm.time_step_rank"),
        "linear_value_head_dim": _ratio(found, "ssm.inner_size", inner, "ssm.time_step_rank"),
        "intermediate_size": found.size("feed_forward_length", 0) or None,
        "num_experts": 0,
        **_rope(found, head),
    }
    found.read |= {"expert_count"}
    if any(sparse):
        config |= {
            "num_experts": found.size("expert_count"),
            "num_experts_per_tok": found.size("expert_used_count"),
            "moe_intermediate_size": found.size("expert_feed_forward_length"),
            "shared_expert_intermediate_size": found.rows("ffn_up_shexp.weight"),
            "mlp_only_layers": [i for i, each in enumerate(sparse) if not each],
        }
    return config


def _kept(found: Metadata) -> int:
    """How many groups of experts are eligible; a file may say so and not into how many they are."""
    kept = found.size("expert_group_used_count", 1)
    return kept if found.size("expert_group_count", 1) > 1 else 1


def _kimi_linear(found: Metadata, layers: int, hidden: int) -> dict[str, Any]:
    gate = found.size("expert_gating_func", 2)
    if gate != 2:
        raise found.bad(f"kimi-linear.expert_gating_func = {gate}, expected 2 (sigmoid)")
    found.size("attention.key_length", 1)
    found.size("attention.value_length", 1)
    found.number("rope.freq_base", 0.0)
    latent = found.layers_with("attn_kv_a_mqa.weight", layers)
    sparse = found.layers_with("ffn_gate_inp.weight", layers)
    rope, wide = found.size("rope.dimension_count"), found.size("attention.key_length_mla")
    head = found.size("kda.head_dim")
    return {
        "model_type": "kimi_linear",
        "layer_types": ["full_attention" if each else "linear_attention" for each in latent],
        "mlp_layer_types": ["sparse" if each else "dense" for each in sparse],
        "num_attention_heads": found.size("attention.head_count"),
        "rms_norm_eps": found.epsilon(),
        "intermediate_size": found.size("feed_forward_length"),
        "linear_head_dim": head,
        "linear_num_heads": found.rows("ssm_f_b.weight") // head
        or found.size("attention.head_count"),
        "linear_conv_kernel_dim": found.size("ssm.conv_kernel"),
        "kv_lora_rank": found.size("attention.kv_lora_rank"),
        "q_lora_rank": found.size("attention.q_lora_rank", 0) or None,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": wide - rope,
        "v_head_dim": found.size("attention.value_length_mla"),
        "attention_bias": found.has("attn_output.bias"),
        "num_experts": found.size("expert_count"),
        "num_experts_per_token": found.size("expert_used_count"),
        "num_shared_experts": found.size("expert_shared_count", 0)
        if found.has("ffn_up_shexp.weight")
        else 0,
        "moe_intermediate_size": found.size("expert_feed_forward_length"),
        "num_expert_group": found.size("expert_group_count", 1),
        "topk_group": _kept(found),
        "moe_renormalize": found.flag("expert_weights_norm", True),
        "routed_scaling_factor": found.number("expert_weights_scale", 1.0) or 1.0,
    }


def _rwkv7(found: Metadata, layers: int, hidden: int) -> dict[str, Any]:
    head = found.size("wkv.head_size")
    return {
        "model_type": "rwkv7",
        "head_dim": head,
        "attention_hidden_size": found.rows("time_mix_key.weight") or hidden,
        "intermediate_size": found.size("feed_forward_length"),
        "decay_low_rank_dim": found.size("attention.decay_lora_rank"),
        "a_low_rank_dim": found.size("attention.iclr_lora_rank"),
        "v_low_rank_dim": found.size("attention.value_residual_mix_lora_rank"),
        "gate_low_rank_dim": found.size("attention.gate_lora_rank"),
        "norm_eps": found.number("attention.layer_norm_epsilon"),
        "norm_first": "token_embd_norm.weight" in found.shapes,
        "norm_bias": found.has("attn_norm.bias"),
    }


def _plamo2(found: Metadata, layers: int, hidden: int) -> dict[str, Any]:
    attends = found.layers_with("attn_output.weight", layers)
    inner, head = found.size("ssm.inner_size"), _head(found)
    heads = found.size("ssm.time_step_rank")
    if heads * head != inner:
        raise found.bad(f"plamo2.ssm.inner_size = {inner}, expected {heads} heads of {head}")
    rope = _rope(found, head)["rope_parameters"]
    if rope.keys() != {"rope_type", "rope_theta"}:
        raise found.bad("plamo2 with scaled or partial rotation is not supported")
    return {
        "model_type": "plamo2",
        "rms_norm_eps": found.epsilon(),
        "num_attention_heads": found.size("attention.head_count", found.rows("attn_q_norm.weight")),
        "num_key_value_heads": found.size(
            "attention.head_count_kv", found.rows("attn_k_norm.weight")
        ),
        "hidden_size_per_head": head,
        "rope_theta": rope["rope_theta"],
        "mamba_d_state": found.size("ssm.state_size"),
        "mamba_d_conv": found.size("ssm.conv_kernel"),
        "mamba_num_heads": heads,
        "intermediate_size": found.size("feed_forward_length"),
        **_steps(found, attends),
    }


def _steps(found: Metadata, attends: list[bool]) -> dict[str, Any]:
    """The step that deals attention to the layers `attends`."""
    layers = len(attends)
    if all(attends):
        return {"mamba_enabled": False}
    for step in range(2, 2 * layers + 1):
        middle = [i % step == step // 2 for i in range(layers)]
        if layers <= step // 2:
            middle = [i == layers - 1 for i in range(layers)]
        if attends == middle:
            return {"mamba_step": step}
    raise found.bad(f"the layers with attention do not recur: {attends[:40]}")


ARCHITECTURES: dict[str, Callable[[Metadata, int, int], dict[str, Any]]] = {
    "mamba": _mamba,
    "mamba2": _mamba2,
    "jamba": _jamba,
    "falcon-h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "qwen3next": _qwen,
    "qwen35": _qwen,
    "qwen35moe": _qwen,
    "kimi-linear": _kimi_linear,
    "rwkv7": _rwkv7,
    "plamo2": _plamo2,
}
