"""Jamba's config in both dialects, what it refuses, and the published sizes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import cases
import pytest

from emit.checkpoint import read_config_file
from emit.entry import Model
from emit.errors import EmitError
from recipes.resolve import resolve_model

ROWS = [case for case in cases.CASES if case.family == "jamba"]
BASE = cases.family("jamba").BASE
# Parameters in billions, all and those that a token uses (arXiv:2408.12570, table 1; model cards).
SIZES = {
    "v0.1": (51.6, 12.1),
    "1.5-mini": (51.6, 12.1),
    "1.5-large": (398.6, 94.1),
    "1.7-large": (398.6, 94.1),
    "reasoning-3b": (3.0, 3.0),
}


def read(**changes: Any) -> Any:
    return Model.of({**BASE, **changes}).cfg


@pytest.mark.parametrize("case", ROWS, ids=cases.ids)
def test_both_dialects_read_equal(case: cases.Case, tmp_path: Path) -> None:
    found = []
    for dialect in ("native", "hub"):
        path = tmp_path / f"{dialect}.json"
        written = cases.Case(case.name, case.family, case.config, dialect=dialect)
        cases.write_config(path, cases.full_config(case), written)
        found.append(Model.of(read_config_file(path)).cfg)
    assert found[0] == found[1]


def test_the_handed_checkpoint_and_its_hub_config_read_equal() -> None:
    directory = cases.HANDED / "jamba"
    native = read_config_file(directory / "checkpoint" / "config.json")
    assert Model.of(native).cfg == Model.of(read_config_file(directory / "config.hub.json")).cfg


def test_sizes_that_follow_from_others() -> None:
    assert read(mamba_dt_rank="auto", hidden_size=68).mamba_dt_rank == 5
    assert read(num_key_value_heads=None).num_key_value_heads == 4
    assert read().head_dim == 9 and read(head_dim=6, hidden_size=38).head_dim == 6


def test_what_a_library_derives_is_accepted() -> None:
    kinds = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
    words = ["mamba", "attention", "mamba", "mamba"]
    assert read(layer_types=kinds, layers_block_type=words, num_local_experts=4) == read()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sliding_window": 128}, "sliding_window = 128 is not supported"),
        ({"mamba_inner_layernorms": False}, "mamba_inner_layernorms = false is not supported"),
        ({"rope_theta": 1e4}, "rope_theta = 10000.0 is not a known key"),
        ({"mamba_dt_rank": "all"}, 'mamba_dt_rank = "all" is not of type int'),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok = 5, expected at most num_experts = 4"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4, expected a multiple of"),
        ({"hidden_size": 38}, "hidden_size = 38, expected a multiple of the heads"),
        ({"hidden_act": "mish"}, "hidden_act = 'mish', expected one of"),
        ({"attn_layer_offset": 4}, "attn_layer_offset = 4, expected less than 4"),
        ({"expert_layer_offset": 2}, "expert_layer_offset = 2, expected less than 2"),
        ({"layer_types": ["mamba"] * 4}, "layer_types does not follow from attn_layer_period"),
        ({"num_local_experts": 5}, "contradicts"),
        ({"mamba_d_conv": 1}, "mamba_d_conv = 1, expected 2 or more"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps = 0 must be above 0"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(EmitError) as raised:
        read(**changes)
    assert words in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("name", SIZES)
def test_published_sizes(name: str) -> None:
    recipe = resolve_model(f"jamba-{name}")
    model = Model.of({**(recipe.config or {}), "model_type": "jamba"}, 128)
    params = model.weight_map.params
    part = model.cfg.num_experts_per_tok / model.cfg.num_experts
    active = sum(math.prod(p.shape) * (part if p.experts else 1.0) for p in params)
    found = (sum(math.prod(p.shape) for p in params) / 1e9, active / 1e9)
    assert found == pytest.approx(SIZES[name], abs=0.06)
