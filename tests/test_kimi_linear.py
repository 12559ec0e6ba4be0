"""Kimi Linear's config in every dialect, what it refuses, and what only this model does."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import cases
import jax
import numpy as np
import oracles.mla
import pytest
from driver import Driver, relative
from oracles.nn import F64

from emit.blocks.block import Rows
from emit.blocks.mla import Mla
from emit.checkpoint import open_checkpoint, read_config_file
from emit.entry import Model
from emit.errors import EmitError
from emit.ops import rope
from emit.weights import resolve
from recipes.resolve import resolve_model

ROWS = [case for case in cases.CASES if case.family == "kimi_linear"]
BASE = cases.family("kimi_linear").BASE
KDA, LATENT = "linear_attention", "full_attention"


def raw(**changes: Any) -> dict[str, Any]:
    """The base config with some keys changed; None takes one away."""
    return {key: value for key, value in {**BASE, **changes}.items() if value is not None}


def read(**changes: Any) -> Any:
    return Model.of(raw(**changes)).cfg


def nested(kda: Any = (1, 2, 3), full: Any = (4,), **changes: Any) -> dict[str, Any]:
    """linear_attn_config as published files have it, and none of the library's keys for it."""
    inner = {"kda_layers": list(kda), "full_attn_layers": list(full), "num_heads": 3}
    inner |= {"head_dim": 14, "short_conv_kernel_size": 4, **changes}
    mine = dict.fromkeys(("layer_types", "mlp_layer_types", "linear_num_heads"))
    mine |= dict.fromkeys(("linear_head_dim", "linear_conv_kernel_dim"))
    return {**mine, "linear_attn_config": inner}


# --- config ----------------------------------------------------------------------------------


def dialects(case: cases.Case) -> list[str]:
    """Published files can only say that the first layers are dense."""
    words = cases.full_config(case)["mlp_layer_types"]
    return ["native", "hub"] if words == sorted(words) else ["native"]


@pytest.mark.parametrize("case", ROWS, ids=cases.ids)
def test_both_dialects_read_equal(case: cases.Case, tmp_path: Path) -> None:
    found = []
    for dialect in dialects(case):
        path = tmp_path / f"{dialect}.json"
        written = cases.Case(case.name, case.family, case.config, dialect=dialect)
        cases.write_config(path, cases.full_config(case), written)
        found.append(Model.of(read_config_file(path)).cfg)
    assert all(cfg == found[0] for cfg in found)
    config = cases.full_config(case)
    assert list(found[0].layer_types) == config["layer_types"]
    assert list(found[0].mlp_layer_types) == config["mlp_layer_types"]


def test_most_rows_are_in_both_dialects() -> None:
    assert sum(len(dialects(case)) == 2 for case in ROWS) > len(ROWS) / 2


@pytest.mark.parametrize(
    "words",
    [
        nested(),
        nested(kda=[3, 1, 2]),
        {**nested(), "rope_scaling": {"type": "yarn", "factor": 4.0}, "head_dim": 72},
        {**nested(), "first_k_dense_replace": 1, "moe_layer_freq": 1, "use_grouped_topk": True},
        {**nested(), "layer_types": [KDA] * 3 + [LATENT], "linear_head_dim": 14},
        {"num_experts": None, "num_local_experts": 6, "num_key_value_heads": 1},
        {
            "num_experts_per_token": None, "num_experts_per_tok": 2,
            "num_shared_experts": None, "n_shared_experts": 1,
            "num_expert_group": None, "n_group": 1,
            "moe_renormalize": None, "norm_topk_prob": True,
            "model_max_length": None, "max_position_embeddings": 4096,
        },
    ],
)  # fmt: skip
def test_the_same_model_in_other_words(words: dict[str, Any]) -> None:
    assert read(**words) == read()


def test_layers_without_a_word_are_the_library_s() -> None:
    """A config written by hand may have neither: every fourth layer attends, but for the first."""
    kinds = read(layer_types=None, mlp_layer_types=None, num_hidden_layers=9)
    assert [i for i, kind in enumerate(kinds.layer_types) if kind == LATENT] == [4, 8]
    assert kinds.mlp_layer_types == ("dense", *["sparse"] * 8)
    cfg = read(layer_types=None, mlp_layer_types=None, first_k_dense_replace=3, moe_layer_freq=2)
    assert cfg.mlp_layer_types == ("dense", "dense", "dense", "dense")
    cfg = read(mlp_layer_types=None, first_k_dense_replace=0, moe_layer_freq=3)
    assert cfg.mlp_layer_types == ("sparse", "dense", "dense", "sparse")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mla_use_nope": False}, "mla_use_nope = false is not supported"),
        (
            {"moe_router_activation_func": "softmax"},
            'moe_router_activation_func = "softmax" is not',
        ),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers = 1 is not supported"),
        ({"gate_lower_bound": -5.0}, "gate_lower_bound = -5.0 is not a known key"),
        (
            nested(gate_lower_bound=-5.0),
            "linear_attn_config.gate_lower_bound = -5.0 is not a known",
        ),
        ({"linear_attn_config": [1]}, "linear_attn_config = [1], expected an object"),
        (
            {"linear_attn_config": {"head_dim": 8}},
            "linear_attn_config.head_dim contradicts linear_h",
        ),
        ({**nested(), "layer_types": [KDA] * 4}, "layer_types contradicts linear_attn_config"),
        (
            nested(kda=[0, 1, 2], full=[3]),
            "expected each of the numbers 1 to num_hidden_layers = 4",
        ),
        (nested(kda=[1, 2], full=[4]), "expected each of the numbers 1 to num_hidden_layers = 4"),
        (
            {"linear_attn_config": {"kda_layers": [1, 2, 3, 4]}, "layer_types": None},
            "kda_layers and full_attn_layers, expected both or none",
        ),
        (nested(kda=[1, 2, 3, 4]), "expected each of the numbers 1 to num_hidden_layers = 4"),
        (nested(kda=[1, 2, "3"]), "expected each of the numbers 1 to num_hidden_layers = 4"),
        ({"layer_types": [KDA] * 3}, "expected linear_attention or full_attention for each of"),
        ({"layer_types": [KDA] * 3 + ["mamba"]}, "expected linear_attention or full_attention"),
        (
            {"mlp_layer_types": ["moe"] * 4},
            "expected dense or sparse for each of num_hidden_layers",
        ),
        ({"num_expert_group": 4}, "num_experts = 6, expected a multiple of num_expert_group = 4"),
        ({"num_experts_per_token": 7}, "num_experts_per_token = 7, expected at most 6"),
        (
            {"num_expert_group": 3, "topk_group": 1, "num_experts_per_token": 3},
            "num_experts_per_token = 3, expected at most 2 (of topk_group = 1 of num_expert_group",
        ),
        (
            {"topk_group": 2},
            "expected at most 12 (of topk_group = 2 of num_expert_group = 1 groups)",
        ),
        (
            {"num_expert_group": 2, "use_grouped_topk": False},
            "use_grouped_topk = false contradicts",
        ),
        ({"num_experts": 6, "num_local_experts": 8}, "num_local_experts = 8 contradicts 6"),
        ({"hidden_act": "situ"}, "hidden_act = 'situ', expected one of gelu"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim = 1, expected 2 or more"),
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers = 2147483647, expected 1000 at most"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps = 0 must be above 0"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(EmitError) as raised:
        read(**changes)
    line = str(raised.value)
    assert words in line and "\n" not in line and line.startswith("config.json of kimi_linear: ")


def test_what_is_kept_of_a_text() -> None:
    found = Model.of(raw(), 20).state
    kept = {spec.name: spec.shape for spec in found if spec.kind == "per_position"}
    assert kept == {"layers.3.latent": (1, 1, 20, 26)}
    fixed = [f"layers.{i}.{name}" for i in range(3) for name in ("conv", "delta")]
    assert [spec.name for spec in found if spec.kind == "fixed"] == fixed
    with pytest.raises(EmitError, match="attention needs a context"):
        _ = Model.of(raw()).family.state(read(), None)


@pytest.mark.parametrize("name", ["base", "instruct"])
def test_published_sizes(name: str) -> None:
    """Those of the published files, in elements; and the bytes that each position is kept in."""
    recipe = resolve_model(f"kimi-linear-48b-a3b-{name}")
    model = Model.of(dict(recipe.config or {}), 1024)
    params = model.weight_map.params
    assert sum(math.prod(p.shape) for p in params) == 49_122_681_728
    part = model.cfg.num_experts_per_token / model.cfg.num_experts
    active = sum(math.prod(p.shape) * (part if p.experts else 1.0) for p in params)
    assert active / 1e9 == pytest.approx(3.48, abs=0.01)
    kept = [spec.size for spec in model.state if spec.kind == "per_position"]
    assert kept == [1024 * 576] * 7


# --- tensors ---------------------------------------------------------------------------------


def test_no_shared_expert_is_written_as_empty_tensors(tmp_path: Path) -> None:
    """As the library does."""
    assert Model.of({**raw(), "model_max_length": 64}).context == 64
    weight_map = Model.of({**raw(), "num_shared_experts": 0}).weight_map
    assert "model.layers.2.block_sparse_moe.shared_experts." in weight_map.unused
    assert not [p.name for p in weight_map.params if "shared_experts" in p.name]
    assert not Model.of(raw()).weight_map.unused


def test_the_first_layer_has_two_names_and_not_both(tmp_path: Path) -> None:
    case = cases.find("kimi_linear/plain")
    published, library = tmp_path / "hub", tmp_path / "library"
    cases.build(replace(case, rename={}), published)
    cases.build(case, library)
    found = []
    for directory in (published, library):
        opened = open_checkpoint(directory)
        chosen = resolve(Model.of(opened.config, 8).weight_map, opened)
        found.append(chosen["layers.0.mlp.up_proj.weight"].names)
    names = [f"model.layers.0.{name}.up_proj.weight" for name in ("mlp", "block_sparse_moe")]
    assert found == [(name,) for name in names]
    tensors = cases.tensors(case)
    cases.write_tensors(published, tensors | {names[1]: tensors[names[0]]})
    opened = open_checkpoint(published)
    with pytest.raises(EmitError, match="is there under two names"):
        resolve(Model.of(opened.config, 8).weight_map, opened)


def test_a_tied_head_is_the_embeddings_and_a_contradicting_one_is_refused(tmp_path: Path) -> None:
    case = cases.find("kimi_linear/hub_tied_every_expert")
    driver = Driver.load(cases.build(case, tmp_path))
    assert "lm_head.weight" not in driver.params
    tensors = cases.tensors(case)
    table = tensors["model.embed_tokens.weight"]
    cases.write_tensors(tmp_path, {**tensors, "lm_head.weight": table})
    Driver.load(tmp_path)
    cases.write_tensors(tmp_path, {**tensors, "lm_head.weight": table + 1})
    with pytest.raises(EmitError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        Driver.load(tmp_path)


def test_kv_b_proj_is_cut_into_keys_and_values_of_each_head(tmp_path: Path) -> None:
    case = cases.find("kimi_linear/plain")
    driver = Driver.load(cases.build(case, tmp_path))
    whole = cases.tensors(case)["model.layers.3.self_attn.kv_b_proj.weight"]
    heads = whole.reshape(4, 10 + 12, 20)
    embed, unembed = (
        np.asarray(driver.params[f"layers.3.self_attn.{name}.weight"])
        for name in ("embed_q", "unembed_out")
    )
    for h in range(4):
        assert (embed[h] == heads[h, :10].T).all() and (unembed[h] == heads[h, 10:]).all()


def test_the_latent_norm_has_its_own_epsilon(tmp_path: Path) -> None:
    """With small latents an epsilon of 1e-2 would show; the layers' own norms have that one."""
    case = cases.find("kimi_linear/latent_first_and_adjacent")
    driver = Driver.load(cases.build(case, tmp_path))
    params = {
        name: np.asarray(p) * (0.01 if "kv_a_proj_with_mqa" in name else 1.0)
        for name, p in driver.params.items()
    }
    tokens = np.random.default_rng(0).integers(0, 97, 21)
    want = oracles.oracle("kimi_linear", driver.model.cfg, params).run(tokens)[0][-1]
    small = {name: p.astype(np.float32) for name, p in params.items()}
    assert relative(Driver(driver.model, small).prefill(tokens, 24)[0], want) < 1e-5
    assert driver.model.cfg.rms_norm_eps == 1e-2
    wrong = replace(driver.model.cfg.mixer(0), eps=1e-2)
    p = {name[19:]: p for name, p in small.items() if name.startswith("layers.0.self_attn.")}
    x = np.random.default_rng(1).standard_normal((1, 1, 44)).astype(np.float32)
    state = {"latent": np.zeros(wrong.state(4)[0].shape, np.float32)}
    rows = Rows(np.ones(1, np.int32), np.zeros(1, np.int32))  # pyright: ignore[reportArgumentType]
    right = driver.model.cfg.mixer(0)(p, x, rows, state)[0]
    assert relative(wrong(p, x, rows, state)[0], right) > 0.1


@pytest.mark.parametrize(
    "changes",
    [
        {"num_expert_group": 1, "topk_group": 1},
        {"topk_group": 1},
        {"moe_renormalize": False},
        {"routed_scaling_factor": 1.0},
    ],
)
def test_routing_by_other_rules_would_show(changes: dict[str, Any], tmp_path: Path) -> None:
    """In the row that the graph and the library agree on."""
    case = cases.find("kimi_linear/hub_grouped_low_rank_queries")
    driver = Driver.load(cases.build(case, tmp_path))
    params = {name: np.asarray(p) for name, p in driver.params.items()}
    tokens = np.random.default_rng(0).integers(0, 97, 12)
    right, wrong = (
        oracles.oracle("kimi_linear", cfg, params).run(tokens)[0]
        for cfg in (driver.model.cfg, replace(driver.model.cfg, **changes))
    )
    assert relative(wrong, right) > 1e-2


# --- the latent block's variants that this family does not have --------------------------------


def block_oracle(
    block: Mla, p: Mapping[str, np.ndarray], x: np.ndarray, positions: np.ndarray
) -> np.ndarray:
    """Outputs of tokens x [T, D] at `positions`, rotated by halves in float64."""
    frequencies = np.array(block.rope.frequencies if block.rope else ())

    def turn(row: np.ndarray, at: int) -> np.ndarray:
        if not block.rope:
            return row
        a, half = at * frequencies, len(frequencies)
        first, second = row[..., :half], row[..., half:]
        sin, cos = np.sin(a), np.cos(a)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def norm(row: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return row / np.sqrt(np.mean(row * row) + block.eps) * weight

    known, outputs = [], []
    for token, at in zip(x, positions, strict=True):
        low = norm(p["q_a_proj.weight"] @ token, p["q_a_layernorm.weight"])
        q = (p["q_b_proj.weight"] @ low).reshape(block.num_heads, -1)
        joint = p["kv_a_proj_with_mqa.weight"] @ token
        latent = norm(joint[: block.kv_rank], p["kv_a_layernorm.weight"])
        known.append(np.append(latent, turn(joint[block.kv_rank :], at)))
        q = np.concatenate([q[:, : block.nope_dim], turn(q[:, block.nope_dim :], at)], axis=1)
        scale = block.scale or block.head_dim**-0.5
        y = oracles.mla.attend(
            q, np.array(known), p["embed_q.weight"], p["unembed_out.weight"], scale
        )
        outputs.append(p["o_proj.weight"] @ y.reshape(-1))
    return np.array(outputs)


@pytest.mark.parametrize("turned", [True, False])
def test_latent_attention_with_and_without_positions(turned: bool) -> None:
    """DeepSeek's form: low-rank queries, rotated shared keys, and a scale of its own."""
    rng = np.random.default_rng(0)
    found = rope.Rope(tuple(rope.default(100.0, 6))) if turned else None
    block = Mla(30, 3, 20, 10, 6, 7, q_rank=13, eps=1e-3, rope=found, scale=0.4)
    p = {}
    for param in block.params("m.", "m."):
        drawn = param.offset + param.scale * rng.standard_normal(param.shape)
        p[param.name.removeprefix("m.")] = drawn.astype(np.float32)
    (spec,) = block.state(32)
    x = rng.standard_normal((1, 24, 30)).astype(np.float32)
    wide = {name: array.astype(F64) for name, array in p.items()}
    want = block_oracle(block, wide, x[0].astype(F64), np.arange(24))
    state = {"latent": np.zeros(spec.batched(1), np.float32)}
    outputs, at = [], 0
    for size in (13, 1, 1, 9):
        numbers = (np.array([size], np.int32), np.array([at], np.int32))
        y, state = jax.jit(
            lambda p, x, lengths, positions, state: block(p, x, Rows(lengths, positions), state)
        )(p, x[:, at : at + size], *numbers, state)
        outputs.append(np.asarray(y)[0])
        at += size
    assert relative(np.concatenate(outputs), want) < 2e-6
    if turned:  # and positions matter
        still = block_oracle(replace(block, rope=None), wide, x[0].astype(F64), np.arange(24))
        assert relative(still, want) > 1e-2


def test_rope_scaling_that_changes_with_the_length_is_refused_beyond_it() -> None:
    block = Mla(30, 3, 20, 10, 6, 7, rope=rope.Rope((1.0, 0.1, 0.01), limit=64))
    assert block.state(64)[0].shape == (1, 1, 64, 26)
    with pytest.raises(EmitError, match="context 65: this model's rope scaling changes"):
        block.state(65)


def test_the_handed_hub_config_is_the_handed_checkpoint() -> None:
    directory = cases.HANDED / "kimi_linear"
    native = json.loads((directory / "checkpoint" / "config.json").read_text())
    del native["linear_attn_config"]  # a natively written config has none
    assert Model.of(native).cfg == Model.of(read_config_file(directory / "config.hub.json")).cfg
