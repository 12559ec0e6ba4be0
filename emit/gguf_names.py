"""The tensors of a GGUF file by the names of published checkpoints, and how to undo each change.

GGUF names are those of the package `gguf` (constants.TENSOR_NAMES), what is done to each tensor
stands in llama.cpp's conversion/ (its modify_tensors). A family is a function from the config.json
that was made of the file to rows; a row whose tensors are not there is left out, and so a tensor
that the family needs is missed, and one that no row takes is refused, by the family's weight map.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from emit.errors import EmitError
from emit.gguf_undo import (
    Copy,
    Grouped,
    Kernel,
    Latent,
    Less,
    Negated,
    Part,
    Plane,
    Reshaped,
    Then,
    Tiled,
    Undo,
    Unpermuted,
)

Config = Mapping[str, Any]
COPY = Copy()
BOTH = (".weight", ".bias")
UNUSED = ""


@dataclass(frozen=True)
class Row:
    """A checkpoint tensor: its name, the GGUF tensors that it is made of, and how.

    With the name UNUSED the model has no use for it.
    """

    name: str
    parts: tuple[str, ...]
    undo: Undo = field(default=COPY)


MAX_ROWS = 1 << 19  # the largest models have some 140,000

Rows = Iterator[Row]


def rows(config: Config) -> list[Row]:
    """All tensors that a file of the model `config` may hold. EmitError for more than MAX_ROWS."""
    found = list(itertools.islice(FAMILIES[config["model_type"]](config), MAX_ROWS + 1))
    if len(found) > MAX_ROWS:
        raise EmitError(
            f"layers and experts that make more than {MAX_ROWS} matrices, expected a model that"
            " exists; download or convert the file again"
        )
    return found


def _one(name: str, part: str, undo: Undo = COPY) -> Row:
    return Row(name, (part,), undo)


def _top(prefix: str, table: str = "embed_tokens", last: str = "norm", undo: Undo = COPY) -> Rows:
    yield _one(f"{prefix}{table}.weight", "token_embd.weight")
    yield _one(f"{prefix}{last}.weight", "output_norm.weight", undo)
    yield _one("lm_head.weight", "output.weight")


def _named(layer: str, block: str, names: Mapping[str, str], undo: Undo = COPY) -> Rows:
    """Weights and biases: GGUF name in the block -> name in the layer."""
    for part, name in names.items():
        for kind in BOTH:
            yield _one(f"{layer}{name}{kind}", f"{block}{part}{kind}", undo)


def _layers(config: Config, prefix: str) -> Iterator[tuple[str, str]]:
    for i in range(config["num_hidden_layers"]):
        yield f"{prefix}layers.{i}.", f"blk.{i}."


def _mamba(layer: str, block: str, heads: bool) -> Rows:
    """A Mamba mixer, or with `heads` Mamba2's."""
    yield from _named(layer, block, {"ssm_in": "in_proj", "ssm_out": "out_proj"})
    yield _one(f"{layer}conv1d.weight", f"{block}ssm_conv1d.weight", Kernel())
    yield _one(f"{layer}conv1d.bias", f"{block}ssm_conv1d.bias")
    yield _one(f"{layer}A_log", f"{block}ssm_a", Negated((-1,) if heads else None))
    yield _one(f"{layer}D", f"{block}ssm_d", Reshaped((-1,)))
    if heads:
        yield _one(f"{layer}dt_bias", f"{block}ssm_dt.bias")
        yield _one(f"{layer}norm.weight", f"{block}ssm_norm.weight", Reshaped((-1,)))
        return
    yield from _named(layer, block, {"ssm_dt": "dt_proj"})
    yield _one(f"{layer}x_proj.weight", f"{block}ssm_x.weight")
    for each in ("dt", "b", "c"):
        yield _one(f"{layer}{each}_layernorm.weight", f"{block}ssm_{each}_norm.weight")


def _attention(layer: str, block: str, config: Config, permuted: bool = False) -> Rows:
    """q, k, v (or one matrix of the three) and o; `permuted` as Llama's conversion leaves them."""
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    at = 0
    for each, count in (("q", heads), ("k", keys), ("v", keys)):
        turned = permuted and each != "v"
        for kind in BOTH:
            whole: Undo = Unpermuted(count, size) if turned else COPY
            of_three: Undo = Part(at, at + count * size)
            if turned:
                of_three = Unpermuted(count, size, at)
            if kind == ".weight":
                yield _one(f"{layer}{each}_proj{kind}", f"{block}attn_qkv{kind}", of_three)
            yield _one(f"{layer}{each}_proj{kind}", f"{block}attn_{each}{kind}", whole)
        at += count * size
    yield from _named(layer, block, {"attn_output": "o_proj"})


def _experts(layer: str, block: str, config: Config, count: int, names: Mapping[str, str]) -> Rows:
    """Stacks, one matrix after the other; gate and up may be one below the other in one stack."""
    wide = config.get("moe_intermediate_size") or config.get("intermediate_size", 0)
    for e in range(count):
        for part, name in names.items():
            target = f"{layer}{e}.{name}.weight"
            yield _one(target, f"{block}ffn_{part}_exps.weight", Part(expert=e))
            if part != "down":
                at = 0 if part == "gate" else wide
                both = Part(at, at + wide, e)
                yield _one(target, f"{block}ffn_gate_up_exps.weight", both)


GATED = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
MLP = {f"ffn_{part}": name for part, name in GATED.items()}
SHARED = {f"ffn_{part}_shexp": name for part, name in GATED.items()}


def _mixers(config: Config, heads: bool) -> Rows:
    yield from _top("backbone.", "embeddings", "norm_f")
    for layer, block in _layers(config, "backbone."):
        yield _one(f"{layer}norm.weight", f"{block}attn_norm.weight")
        yield from _mamba(f"{layer}mixer.", block, heads)


def _jamba(config: Config) -> Rows:
    yield from _top("model.", last="final_layernorm")
    for layer, block in _layers(config, "model."):
        yield _one(f"{layer}input_layernorm.weight", f"{block}attn_norm.weight")
        yield _one(f"{layer}pre_ff_layernorm.weight", f"{block}ffn_norm.weight")
        yield from _mamba(f"{layer}mamba.", block, heads=False)
        yield from _attention(f"{layer}self_attn.", block, config)
        yield from _named(f"{layer}feed_forward.", block, MLP)
        yield _one(f"{layer}feed_forward.router.weight", f"{block}ffn_gate_inp.weight")
        at = f"{layer}feed_forward.experts."
        yield from _experts(at, block, config, config["num_experts"], GATED)


def _falcon_h1(config: Config) -> Rows:
    yield from _top("model.", last="final_layernorm")
    for layer, block in _layers(config, "model."):
        yield _one(f"{layer}input_layernorm.weight", f"{block}attn_norm.weight")
        for part in ("ffn_norm", "ffn_norm.weight"):  # the conversion's own, and a regular one
            yield _one(f"{layer}pre_ff_layernorm.weight", block + part)
        yield from _mamba(f"{layer}mamba.", block, heads=True)
        yield from _attention(f"{layer}self_attn.", block, config)
        yield from _named(f"{layer}feed_forward.", block, MLP)


def _nemotron_h(config: Config) -> Rows:
    yield from _top("backbone.", "embeddings", "norm_f")
    for layer, block in _layers(config, "backbone."):
        mixer = f"{layer}mixer."
        yield _one(f"{layer}norm.weight", f"{block}attn_norm.weight")
        yield from _mamba(mixer, block, heads=True)
        yield from _attention(mixer, block, config, permuted=True)
        yield from _named(mixer, block, {"ffn_up": "up_proj", "ffn_down": "down_proj"})
        yield _one(f"{mixer}gate.weight", f"{block}ffn_gate_inp.weight")
        yield _one(f"{mixer}gate.e_score_correction_bias", f"{block}exp_probs_b.bias")
        plain = {k: v for k, v in GATED.items() if k != "gate"}
        count = config.get("n_routed_experts", 0)
        yield from _experts(f"{mixer}experts.", block, config, count, plain)
        yield from _named(f"{mixer}shared_experts.", block, SHARED)
        latent = {"ffn_latent_down": "fc1_latent_proj", "ffn_latent_up": "fc2_latent_proj"}
        yield from _named(mixer, block, latent)


def _qwen(config: Config) -> Rows:
    """Qwen3-Next, and Qwen3.5, whose projections are apart and value heads in another order."""
    plus: Undo = Less(1.0)
    yield from _top("model.", undo=plus)
    for layer, block in _layers(config, "model."):
        yield _one(f"{layer}input_layernorm.weight", f"{block}attn_norm.weight", plus)
        yield _one(
            f"{layer}post_attention_layernorm.weight", f"{block}post_attention_norm.weight", plus
        )
        attention = f"{layer}self_attn."
        names = {f"attn_{each}": f"{each}_proj" for each in "qkv"}
        yield from _named(attention, block, {**names, "attn_output": "o_proj"})
        for each in "qk":
            yield _one(f"{attention}{each}_norm.weight", f"{block}attn_{each}_norm.weight", plus)
        yield from _delta(f"{layer}linear_attn.", block, config)
        mlp = f"{layer}mlp."
        yield from _named(mlp, block, MLP)
        yield _one(f"{mlp}gate.weight", f"{block}ffn_gate_inp.weight")
        count = config.get("num_experts", 0)
        yield from _experts(f"{mlp}experts.", block, config, count, GATED)
        yield from _named(f"{mlp}shared_expert.", block, SHARED)
        gate = Reshaped((1, -1))
        yield _one(f"{mlp}shared_expert_gate.weight", f"{block}ffn_gate_inp_shexp.weight", gate)


def _delta(layer: str, block: str, config: Config) -> Rows:
    groups, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    keys, size = config["linear_key_head_dim"], config["linear_value_head_dim"]
    shared, kernel = heads // groups, f"{block}ssm_conv1d.weight"
    joint, gate, qk = f"{block}attn_qkv.weight", f"{block}attn_gate.weight", 2 * groups * keys
    yield _one(f"{layer}norm.weight", f"{block}ssm_norm.weight")
    if config["model_type"] == "qwen3_next":
        sizes = (keys, keys, shared * size, shared * size)
        yield Row(f"{layer}in_proj_qkvz.weight", (joint, gate), Grouped(groups, sizes))
        yield _one(f"{layer}in_proj_qkvz.weight", f"{block}ssm_in.weight")  # of older files
        yield _one(f"{layer}in_proj_ba.weight", f"{block}ssm_ba.weight")
        yield _one(f"{layer}conv1d.weight", kernel, Kernel())
        yield _one(f"{layer}A_log", f"{block}ssm_a", Negated())
        yield _one(f"{layer}dt_bias", f"{block}ssm_dt.bias")
        yield _one(f"{layer}out_proj.weight", f"{block}ssm_out.weight")
        return
    each, rows, tail = Tiled(groups, shared, 1), Tiled(groups, shared, size), (groups, shared, size)
    yield _one(f"{layer}in_proj_qkv.weight", joint, Tiled(*tail, first=qk))
    yield _one(f"{layer}in_proj_z.weight", gate, rows)
    yield _one(f"{layer}in_proj_b.weight", f"{block}ssm_beta.weight", each)
    yield _one(f"{layer}in_proj_a.weight", f"{block}ssm_alpha.weight", each)
    yield _one(f"{layer}conv1d.weight", kernel, Then(Kernel(), Tiled(*tail, first=qk)))
    yield _one(f"{layer}A_log", f"{block}ssm_a", Then(Negated(), each))
    yield _one(f"{layer}dt_bias", f"{block}ssm_dt.bias", each)
    yield _one(f"{layer}out_proj.weight", f"{block}ssm_out.weight", Tiled(*tail, inputs=True))


def _kimi_linear(config: Config) -> Rows:
    yield from _top("model.")
    heads = (1, 1, -1, 1)
    for layer, block in _layers(config, "model."):
        mixer, sparse = f"{layer}self_attn.", f"{layer}block_sparse_moe."
        yield _one(f"{layer}input_layernorm.weight", f"{block}attn_norm.weight")
        yield _one(f"{layer}post_attention_layernorm.weight", f"{block}ffn_norm.weight")
        names = {f"attn_{each}": f"{each}_proj" for each in "qkv"}
        names |= {f"ssm_{g}_{x}": f"{g}_{x}_proj" for g in "fg" for x in "ab"}
        names |= {"attn_output": "o_proj", "ssm_beta": "b_proj", "ssm_norm": "o_norm"}
        names |= {"attn_q_a": "q_a_proj", "attn_q_b": "q_b_proj", "attn_kv_b": "kv_b_proj"}
        names |= {"attn_q_a_norm": "q_a_layernorm", "attn_kv_a_norm": "kv_a_layernorm"}
        names |= {"attn_kv_a_mqa": "kv_a_proj_with_mqa"}
        yield from _named(mixer, block, names)
        halves = (f"{block}attn_k_b.weight", f"{block}attn_v_b.weight")
        yield Row(f"{mixer}kv_b_proj.weight", halves, Latent())
        inner = config["linear_num_heads"] * config["linear_head_dim"]
        for i, each in enumerate("qkv"):
            own = Part(i * inner, (i + 1) * inner)
            yield _one(f"{mixer}{each}_proj.weight", f"{block}attn_qkv.weight", own)
            kernel = f"{block}ssm_conv1d_{each}.weight"
            yield _one(f"{mixer}{each}_conv1d.weight", kernel, Kernel())
        yield _one(f"{mixer}A_log", f"{block}ssm_a", Negated(heads))
        yield _one(f"{mixer}dt_bias", f"{block}ssm_dt.bias")
        yield from _named(f"{layer}mlp.", block, MLP)
        yield _one(f"{sparse}gate.weight", f"{block}ffn_gate_inp.weight")
        yield _one(f"{sparse}gate.e_score_correction_bias", f"{block}exp_probs_b.bias")
        words = {"gate": "w1", "down": "w2", "up": "w3"}
        yield from _experts(f"{sparse}experts.", block, config, config["num_experts"], words)
        yield from _named(f"{sparse}shared_experts.", block, SHARED)


def _rwkv7(config: Config) -> Rows:
    hidden, head = config["hidden_size"], config["head_dim"]
    yield from _top("model.", "embeddings")
    yield _one("model.norm.bias", "output_norm.bias")
    yield from _named("model.layers.0.", "", {"token_embd_norm": "pre_norm"})
    for layer, block in _layers(config, "model."):
        yield from _named(layer, block, {"attn_norm": "attn_norm", "attn_norm_2": "ffn_norm"})
        attn = f"{layer}attn."
        for i, each in enumerate("rwkvag"):
            plane = Plane(i, (1, 1, hidden))
            yield _one(f"{attn}x_{each}", f"{block}time_mix_lerp_fused.weight", plane)
        for each in "wavg":
            lora = f"{attn}{each}_lora.lora."
            # The first layer has no value residual: what the file has for it is another's copy.
            none = each == "v" and block == "blk.0."
            for part, name in (("1", "0.weight"), ("2", "2.weight"), ("0", "2.bias")):
                yield _one(UNUSED if none else lora + name, f"{block}time_mix_{each}{part}.weight")
        for each in ("k_k", "k_a"):
            yield _one(f"{attn}{each}", f"{block}time_mix_{each}.weight", Reshaped((-1,)))
        yield _one(f"{attn}r_k", f"{block}time_mix_r_k.weight", Reshaped((-1, head)))
        names = {"receptance": "r_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
        names["ln"] = "g_norm"
        yield from _named(attn, block, {f"time_mix_{k}": v for k, v in names.items()})
        yield _one(f"{layer}ffn.x_k", f"{block}channel_mix_lerp_k.weight", Reshaped((-1,)))
        names = {"channel_mix_key": "key", "channel_mix_value": "value"}
        yield from _named(f"{layer}ffn.", block, names)


def _plamo2(config: Config) -> Rows:
    yield from _top("model.", undo=Less(1.0))
    norms = {
        "attn_norm": ("pre_mixer_norm", 1.0),
        "post_attention_norm": ("post_mixer_norm", 1.0 / 5.0),
        "ffn_norm": ("pre_mlp_norm", 1.0),
        "post_ffw_norm": ("post_mlp_norm", 5.0**-1.5),
    }
    for layer, block in _layers(config, "model.layers."):
        mixer = f"{layer}mixer."
        for part, (name, by) in norms.items():
            for kind in ("", ".weight"):  # llama.cpp's own names have no suffix where it varies
                yield _one(f"{layer}{name}.weight", block + part + kind, Less(by))
        names = {"ssm_in": "in_proj", "ssm_out": "out_proj", "ssm_x": "bcdt_proj"}
        names |= {"attn_qkv": "qkv_proj", "attn_output": "o_proj"}
        yield from _named(mixer, block, names)
        yield _one(f"{mixer}dt_proj.weight", f"{block}ssm_dt.weight")
        yield _one(f"{mixer}dt_bias", f"{block}ssm_dt.bias")
        yield _one(f"{mixer}conv1d.weight", f"{block}ssm_conv1d.weight", Kernel())
        yield _one(f"{mixer}A_log", f"{block}ssm_a", Negated((-1,)))
        yield _one(f"{mixer}D", f"{block}ssm_d", Reshaped((-1,)))
        for each, name in (("dt", "dt"), ("b", "B"), ("c", "C")):
            for kind in ("", ".weight"):
                yield _one(f"{mixer}{name}_norm_weight", f"{block}ssm_{each}_norm{kind}")
        for each in "qk":
            yield _one(f"{mixer}{each}_weight", f"{block}attn_{each}_norm.weight")
        names = {"ffn_up": "gate_up_proj", "ffn_down": "down_proj"}
        yield from _named(f"{layer}mlp.", block, names)


FAMILIES: dict[str, Callable[[Config], Rows]] = {
    "mamba": partial(_mixers, heads=False),
    "falcon_mamba": partial(_mixers, heads=False),
    "mamba2": partial(_mixers, heads=True),
    "jamba": _jamba,
    "falcon_h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
    "qwen3_next": _qwen,
    "qwen3_5_text": _qwen,
    "qwen3_5_moe_text": _qwen,
    "kimi_linear": _kimi_linear,
    "rwkv7": _rwkv7,
    "plamo2": _plamo2,
}
