"""Nemotron-H's config: layers in every dialect, and what is refused by name."""

from __future__ import annotations

from typing import Any

import cases
import pytest

from emit.entry import Model
from emit.errors import EmitError

ROW = cases.find("nemotron_h/all_kinds")
KINDS = ("mamba", "attention", "mlp", "moe", "mamba")


def raw(**changes: Any) -> dict[str, Any]:
    """The row's config with some keys changed; None takes one away."""
    found = {**cases.full_config(ROW), **changes}
    return {key: value for key, value in found.items() if value is not None}


def refused(**changes: Any) -> str:
    with pytest.raises(EmitError) as caught:
        Model.of(raw(**changes))
    line = str(caught.value)
    assert "\n" not in line and line.startswith("config.json of nemotron_h: ")
    return line


@pytest.mark.parametrize(
    "words",
    [
        {"layers_block_type": ["linear_attention", "full_attention", "mlp", "moe", "mamba"]},
        {"layers_block_type": list(KINDS)},
        {"layers_block_type": None, "layer_types": list(KINDS)},
        {"layers_block_type": None, "hybrid_override_pattern": "M*-EM"},
        {"layers_block_type": None, "hybrid_override_pattern": list("M*-EM")},
        {"hybrid_override_pattern": "M*-EM", "num_hidden_layers": 5},
    ],
)
def test_layers_are_read_in_every_dialect(words: dict[str, Any]) -> None:
    cfg = Model.of(raw(**words)).cfg
    assert cfg.layers_block_type == KINDS and cfg.num_hidden_layers == 5
    assert cfg == Model.of(raw()).cfg


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"layers_block_type": None}, "hybrid_override_pattern is missing"),
        (
            {"layers_block_type": None, "hybrid_override_pattern": "M+M"},
            'hybrid_override_pattern = "M+M"',
        ),
        ({"layers_block_type": []}, "layers_block_type = []"),
        ({"num_hidden_layers": 7}, "num_hidden_layers = 7, but layers_block_type has 5 layers"),
        ({"sliding_window": 64}, "sliding_window = 64 is not supported"),
        ({"attention_bias": True}, "attention_bias = true is not supported"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok = 7, expected at most 6"),
        ({"n_group": 4}, "n_routed_experts = 6, expected a multiple of n_group = 4"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4, expected a multiple of"),
        ({"n_groups": 3}, "mamba_num_heads = 4, expected a multiple of n_groups = 3"),
        ({"mlp_hidden_act": "tanh"}, "mlp_hidden_act = 'tanh', expected one of gelu"),
        ({"rms_norm_eps": 0.5}, "rms_norm_eps = 0.5 contradicts 1e-05"),
        ({"moe_router": "hash"}, 'moe_router = "hash" is not a known key'),
        ({"layer_types": ["mamba"] * 5}, "layer_types contradicts layers_block_type"),
        ({"hybrid_override_pattern": "MMMMM"}, "hybrid_override_pattern contradicts layers_block"),
        ({"time_step_limit": [0.05, 0.1]}, "time_step_limit = [0.05, 0.1] is not supported"),
        ({"mamba_dt_limit": [0.0, 1.0]}, "time_step_limit = [0.0, 1.0]"),
        ({"num_query_groups": 1}, "num_query_groups = 1 contradicts 2"),
        ({"time_step_min": -1.0}, "time_step_min = -1, expected 0 or more"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], line: str) -> None:
    assert line in refused(**changes)


def test_a_model_without_experts_may_say_so() -> None:
    words: dict[str, Any] = {"layers_block_type": None, "hybrid_override_pattern": "M*-"}
    for none in (None, 0):
        found = Model.of(raw(**words, num_hidden_layers=3, n_routed_experts=none))
        assert found.cfg.layers_block_type == ("mamba", "attention", "mlp")
    with pytest.raises(EmitError, match="n_routed_experts"):
        Model.of(raw(n_routed_experts=0))


def test_projections_have_biases_by_use_bias_alone() -> None:
    for use, said in ((True, False), (False, True)):
        found = Model.of(raw(use_bias=use, mamba_proj_bias=said)).weight_map
        names = [param.name for param in found.params]
        assert ("layers.0.mixer.in_proj.bias" in names) is use


def test_prediction_layers_are_left_out_and_others_are_not() -> None:
    weight_map = Model.of(raw()).weight_map
    assert weight_map.unused == {"mtp."}


def test_a_cache_for_each_attention_layer_and_none_for_others() -> None:
    found = Model.of(raw(), 20).state
    names = [spec.name for spec in found if spec.kind == "per_position"]
    assert names == ["layers.1.k", "layers.1.v"]
    assert {spec.shape for spec in found if spec.kind == "per_position"} == {(1, 2, 20, 12)}
    assert [s.name for s in found if s.kind == "fixed"] == [
        f"layers.{i}.{name}" for i in (0, 4) for name in ("conv", "ssm")
    ]
