"""Falcon-H1's config in both dialects, what it refuses, and the published sizes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import cases
import pytest

from emit.checkpoint import read_config_file
from emit.entry import Model
from emit.errors import EmitError
from emit.families import falcon_h1
from recipes.resolve import resolve_model

ROWS = [case for case in cases.CASES if case.family == "falcon_h1"]
BASE = cases.family("falcon_h1").BASE
# Parameters in millions, as the paper's table 1 and the model cards have them.
SIZES = {
    "tiny-90m": 91.1,
    "0.5b": 521,
    "1.5b": 1555,
    "1.5b-deep": 1555,
    "3b": 3149,
    "7b": 7586,
    "34b": 33642,
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
    wanted = cases.full_config(case)
    for name in falcon_h1.MULTIPLIERS:
        assert getattr(found[0], name) == wanted[name]


def test_the_handed_checkpoint_and_its_hub_config_read_equal() -> None:
    directory = cases.HANDED / "falcon_h1"
    native = read_config_file(directory / "checkpoint" / "config.json")
    hub = read_config_file(directory / "config.hub.json")
    assert Model.of(native).cfg == Model.of(hub).cfg


def test_sizes_that_follow_from_others() -> None:
    cfg = read(
        mamba_d_ssm=None, mamba_expand=3, mamba_d_head="auto", mamba_n_heads=5, mamba_n_groups=1
    )
    assert (cfg.mamba_d_ssm, cfg.mamba_d_head) == (120, 24)
    assert read(num_key_value_heads=None).num_key_value_heads == 4
    bare = {k: v for k, v in BASE.items() if k not in ("head_dim", "mamba_d_head")}
    assert Model.of(bare).cfg.head_dim == 10 and Model.of(bare).cfg.mamba_d_head == 8


def test_what_a_library_derives_is_accepted() -> None:
    layers = BASE["num_hidden_layers"]
    every = {"layer_types": ["hybrid"] * layers, "attn_layer_indices": list(range(layers))}
    assert read(**every, time_step_floor=1e-4) == read()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mamba_use_mlp": False}, "mamba_use_mlp = false is not supported"),
        ({"attn_layer_indices": [0, 2]}, "attn_layer_indices = [0, 2] is not supported"),
        ({"sliding_window": 128}, "sliding_window = 128 is not supported"),
        ({"layer_types": ["attention"] * 3}, "layer_types = "),
        ({"expert_num": 4}, "expert_num = 4 is not a known key"),
        ({"key_multiplier": None}, "key_multiplier = null is not of type float"),
        ({"key_multiplier": float("inf")}, "key_multiplier = inf must be finite"),
        ({"ssm_multipliers": [1.0, 1.0]}, "ssm_multipliers = [1.0, 1.0] is not of type"),
        ({"mlp_multipliers": [1.0, float("inf")]}, "mlp_multipliers = (1.0, inf) must be finite"),
        ({"mamba_n_heads": 5}, "mamba_n_heads × mamba_d_head = 40, expected mamba_d_ssm"),
        ({"mamba_n_groups": 4}, "mamba_n_heads = 6, expected a multiple of groups"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4, expected a multiple of"),
        ({"hidden_act": "mish"}, "hidden_act = 'mish', expected one of"),
        ({"partial_rotary_factor": 0.5}, "a partial_rotary_factor below 1 is not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, 'rope_type = "longrope" is not supported'),
        ({"rope": {"rope_theta": 1.0}}, "rope = "),
        ({"time_step_limit": [0.3, 0.1]}, "time_step_limit = [0.3, 0.1] must be ascending"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps = 0 must be above 0"),
        ({"mamba_d_conv": 1}, "mamba_d_conv = 1, expected 2 or more"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(EmitError) as caught:
        read(**changes)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert "falcon_h1" in str(caught.value)


def test_a_context_that_the_positions_do_not_reach_is_refused() -> None:
    scaled = {**BASE, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}
    assert len(Model.of(scaled, 8192).state) == 4 * BASE["num_hidden_layers"]
    with pytest.raises(EmitError, match="beyond 8192 tokens, which is not supported"):
        assert Model.of(scaled, 8193).state
    assert Model.of(dict(BASE), 10**6).state


@pytest.mark.parametrize("name", SIZES)
def test_published_sizes(name: str) -> None:
    config = resolve_model(f"falcon-h1-{name}").config
    assert config is not None
    model = Model.of(config, 4096)
    millions = sum(math.prod(p.shape) for p in model.weight_map.params) / 1e6
    assert millions == pytest.approx(SIZES[name], rel=1e-3)
    regions = [s for s in model.state if s.kind == "per_position"]
    assert len(regions) == 2 * model.cfg.num_hidden_layers
    # The multipliers follow the widths alike in all sizes (muP), folded into the weights or not.
    assert model.cfg.lm_head_multiplier * model.cfg.hidden_size == pytest.approx(40)
    if name != "tiny-90m":
        wide = model.cfg.hidden_size * model.cfg.intermediate_size
        assert model.cfg.mlp_multipliers[1] * wide == pytest.approx(1228800)
        assert model.cfg.ssm_in_multiplier * model.cfg.hidden_size == pytest.approx(1280)
        heads = model.cfg.num_attention_heads * model.cfg.head_dim
        out = model.cfg.attention_out_multiplier * model.cfg.hidden_size * heads
        assert out == pytest.approx(491520)
