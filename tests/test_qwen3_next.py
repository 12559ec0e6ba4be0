"""Qwen3-Next's config in both dialects, its layers, what it refuses, and what a mistake would cost.

That it is right is for the references (test_references.py, test_exact.py); here each thing that is
easily got wrong is got wrong, and the handed checkpoint's logits show it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import references
from driver import Driver, relative

from emit.blocks import gated_delta
from emit.blocks.attention import Attention
from emit.blocks.gated_delta import GatedDelta
from emit.checkpoint import open_checkpoint, read_config_file
from emit.entry import Model
from emit.errors import EmitError
from emit.ops import delta, rope
from recipes.resolve import resolve_model

ROWS = [case for case in cases.CASES if case.family == "qwen3_next"]
BASE = cases.family("qwen3_next").BASE
HANDED = cases.HANDED / "qwen3_next" / "checkpoint"


def read(**changes: Any) -> Any:
    return Model.of({**BASE, **changes}).cfg


def without(*names: str, **changes: Any) -> Any:
    return Model.of({k: v for k, v in {**BASE, **changes}.items() if k not in names}).cfg


@pytest.mark.parametrize("case", ROWS, ids=cases.ids)
def test_both_dialects_read_equal(case: cases.Case, tmp_path: Path) -> None:
    found = []
    for dialect in ("native", "hub"):
        path = tmp_path / f"{dialect}.json"
        written = cases.Case(case.name, case.family, case.config, dialect=dialect)
        cases.write_config(path, cases.full_config(case), written)
        found.append(Model.of(read_config_file(path)).cfg)
    assert found[0] == found[1]


def test_each_fourth_layer_attends_where_nothing_else_is_said() -> None:
    kinds = without("layer_types", num_hidden_layers=9).layer_types
    assert [i for i, kind in enumerate(kinds) if kind == "full_attention"] == [3, 7]
    kinds = without("layer_types", num_hidden_layers=5, full_attention_interval=2).layer_types
    assert [i for i, kind in enumerate(kinds) if kind == "full_attention"] == [1, 3]
    listed = read(full_attention_interval=1)  # the library reads it for want of a list only
    assert listed.layer_types == tuple(BASE["layer_types"])


def test_layers_with_experts() -> None:
    def sparse(**changes: Any) -> list[int]:
        cfg = without("layer_types", num_hidden_layers=6, **changes)
        names = [param.name for param in Model.of({**BASE}).family.weights(cfg).params]
        return [i for i in range(6) if f"layers.{i}.mlp.gate.weight" in names]

    assert sparse() == [0, 1, 2, 3, 4, 5]
    assert sparse(decoder_sparse_step=3) == [2, 5]
    assert sparse(decoder_sparse_step=2, mlp_only_layers=[1, 2]) == [3, 5]
    assert sparse(num_experts=0) == []


def test_a_quarter_of_a_head_is_rotated_where_nothing_else_is_said() -> None:
    assert without("rope_parameters").rope.rotary == 4
    assert without("rope_parameters", rope_theta=1e7).rope.frequencies[1] == 1e7**-0.5
    assert read(rope_parameters={"rope_theta": 1e4}).rope.rotary == 4
    half = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
    assert read(rope_parameters=half).rope.rotary == 8


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_sliding_window": True}, "use_sliding_window = true is not supported"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads = 3, expected a multiple of"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4, expected a multiple of"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok = 7, expected at most num_experts = 6"),
        ({"num_hidden_layers": 3}, "layer_types has 2 layers, expected num_hidden_layers = 3"),
        ({"layer_types": ["full_attention", "mamba"]}, 'layer_types has "mamba", expected one of'),
        ({"hidden_act": "mish"}, "hidden_act = 'mish', expected one of"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim = 1, expected 2 or more"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps = 0 must be above 0"),
        ({"text_prefix": "x."}, "text_prefix is not a known key"),
        ({"num_experts": 2**31 - 1}, "num_experts = 2147483647, expected 16384 at most"),
        ({"head_dim": 2**31 - 2}, "head_dim = 2147483646, expected 65536 at most"),
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers = 2147483647, expected 1000 at most"),
        ({"mamba_d_conv": 4}, "mamba_d_conv = 4 is not a known key"),
        ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval = 0"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(EmitError) as raised:
        read(**changes)
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_the_heads_of_multi_token_prediction_are_known_and_not_used(tmp_path: Path) -> None:
    directory = cases.build(ROWS[0], tmp_path)
    tensors = {**cases.tensors(ROWS[0]), "mtp.fc.weight": np.zeros((2, 2), np.float32)}
    cases.write_tensors(directory, tensors)
    Driver.load(directory)
    tensors["model.mtp.weight"] = tensors["mtp.fc.weight"]
    cases.write_tensors(directory, tensors)
    with pytest.raises(EmitError, match=r"model\.mtp\.weight is not a tensor of this family"):
        Driver.load(directory)


@pytest.mark.parametrize("name", ["80b-a3b-instruct", "80b-a3b-thinking"])
def test_published_sizes(name: str) -> None:
    """Billions of parameters, all and those that a token uses (model card)."""
    recipe = resolve_model(f"qwen3-next-{name}")
    model = Model.of({**(recipe.config or {}), "model_type": "qwen3_next"}, 128)
    part = model.cfg.num_experts_per_tok / model.cfg.num_experts
    counts = [(math.prod(p.shape), p.experts) for p in model.weight_map.params]
    assert sum(n for n, _ in counts) / 1e9 == pytest.approx(79.67, abs=0.02)
    assert sum(n * part if stack else n for n, stack in counts) / 1e9 == pytest.approx(3.9, abs=0.1)


# --- mistakes ----------------------------------------------------------------------------------


def unsorted(patch: pytest.MonkeyPatch) -> None:
    """The rows of q, k, v and z taken to be in that order, as they are not."""
    patch.setattr(gated_delta, "grouped_by_kind", lambda tensor, groups, sizes: tensor)


def plain_norms(patch: pytest.MonkeyPatch) -> None:
    """The norms of q and k without the 1 that is added to their weights."""
    of = Attention.__call__
    patch.setattr(
        Attention, "__call__", lambda self, *a: of(dataclasses.replace(self, norm_offset=0.0), *a)
    )


def whole_rotation(patch: pytest.MonkeyPatch) -> None:
    """Frequencies spread over the whole head."""
    patch.setattr(rope, "default", lambda theta, width: theta ** (-np.arange(0, 8) / 8.0))


def unscaled(patch: pytest.MonkeyPatch) -> None:
    """Queries and keys as they come, not of length one."""
    patch.setattr(delta, "l2_norm", lambda x: x)


def same_heads(patch: pytest.MonkeyPatch) -> None:
    """Value heads dealt to key heads in turn, not in runs."""
    of = delta._per_head

    def dealt(a: Any, heads: int) -> Any:
        y = of(a, heads)
        shared = heads // a.shape[2]
        return y.reshape(*y.shape[:2], -1, shared, *y.shape[3:]).swapaxes(2, 3).reshape(y.shape)

    patch.setattr(delta, "_per_head", dealt)


MISTAKES = [unsorted, plain_norms, whole_rotation, unscaled, same_heads]


def first_logits() -> float:
    """The relative difference of the handed checkpoint's logits from the library's."""
    row = references.recorded("qwen3_next/handed")[1][2]
    driver = Driver.load(HANDED)
    logits, _ = driver.prefill(row.prompt, 16)
    return relative(logits, row.first_logits)


def test_the_logits_are_the_librarys() -> None:
    assert first_logits() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda each: each.__name__)
def test_a_mistake_is_seen(
    mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    assert first_logits() > 1e-3


def test_the_layers_blocks() -> None:
    cfg = Model.of(open_checkpoint(HANDED).config, 64).cfg
    mixers = [cfg.mixer(i).block for i in range(4)]
    assert [type(block) for block in mixers] == [GatedDelta] * 3 + [Attention]
    assert mixers[3].gate and mixers[3].norm_offset == 1.0 and mixers[3].qk_norm == "shared"
