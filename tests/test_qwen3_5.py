"""Qwen3.5's configs, of a text model and of one with images, and the names of their tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
from driver import Driver

from emit.blocks.gated_delta import GatedDelta
from emit.blocks.mlp import Mlp
from emit.blocks.moe import Moe
from emit.checkpoint import read_config_file
from emit.entry import Model, interface
from emit.errors import EmitError
from emit.shape import Shape

FAMILIES = ("qwen3_5", "qwen3_5_moe")
ROWS = [case for case in cases.CASES if case.family in FAMILIES]
IMAGES = {"image_token_id": 5, "video_token_id": 6, "vision_config": {"depth": 2}}
TEXT = "model.language_model."


def with_images(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The config of a model whose text model has `config`."""
    kind = config["model_type"].removesuffix("_text")
    return {"model_type": kind, "text_config": config, **IMAGES, **changes}


@pytest.mark.parametrize("case", ROWS, ids=cases.ids)
def test_all_dialects_read_equal(case: cases.Case, tmp_path: Path) -> None:
    found = []
    for dialect in ("native", "hub"):
        path = tmp_path / f"{dialect}.json"
        written = cases.Case(case.name, case.family, case.config, dialect=dialect)
        cases.write_config(path, cases.full_config(case), written)
        found.append(Model.of(read_config_file(path)).cfg)
    assert found[0] == found[1] and found[0].rope.rotary % 2 == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_model_of_one_with_images_is_the_text_model(family: str, tmp_path: Path) -> None:
    case = next(case for case in ROWS if case.family == family)
    plain = Driver.load(cases.build(case, tmp_path / "plain"))
    tensors = {
        TEXT + name.removeprefix("model.") if name.startswith("model.") else name: array
        for name, array in cases.tensors(case).items()
    }
    tensors["model.visual.patch_embed.proj.weight"] = np.zeros((2, 3), np.float32)
    tensors["mtp.fc.weight"] = np.zeros((2, 3), np.float32)
    nested = tmp_path / "nested"
    nested.mkdir()
    cases.write_tensors(nested, tensors)
    config = with_images(cases.full_config(case), tie_word_embeddings=False)
    (nested / "config.json").write_text(json.dumps(config))
    both = Driver.load(nested)
    assert both.params.keys() == plain.params.keys()
    assert all(np.array_equal(both.params[name], plain.params[name]) for name in plain.params)
    assert both.model.state == plain.model.state
    assert both.model.family.forward is plain.model.family.forward


def test_the_ids_that_end_a_text_may_stand_in_the_text_config() -> None:
    case = ROWS[0]
    config = {**cases.full_config(case), "eos_token_id": [3, 4], "bos_token_id": 2}

    def ends(raw: dict[str, Any]) -> tuple[Any, Any]:
        found = interface(Model.of(raw), Shape.parse("b1-p8"), Model.of(raw).storage("f32"), ())
        return found["eos_token_ids"], found["bos_token_id"]

    assert ends(with_images(config)) == ([3, 4], 2)
    assert ends(with_images(config, eos_token_id=9)) == ([9], 2)


def test_blocks() -> None:
    dense, sparse = (Model.of(cases.family(family).BASE).cfg for family in FAMILIES)
    for cfg, kind in ((dense, Mlp), (sparse, Moe)):
        delta = cfg.mixer(0).block
        assert isinstance(delta, GatedDelta) and delta.split
        assert [type(cfg.feed_forward(i).block) for i in range(2)] == [kind] * 2
    assert sparse.feed_forward(0).block.routing.normalize


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("qwen3_5", {"num_experts": 4}, "num_experts = 4 is not supported (only 0)"),
        ("qwen3_5_moe", {"norm_topk_prob": False}, "norm_topk_prob = false is not supported"),
        ("qwen3_5_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2 is not supported"),
        ("qwen3_5_moe", {"mlp_only_layers": [1]}, "mlp_only_layers = [1] is not supported"),
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate = false is not supported"),
        ("qwen3_5", {"layer_types": ["full_attention"]}, "layer_types has 1 layers, expected"),
    ],
)
def test_what_is_refused(family: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(EmitError) as raised:
        Model.of({**cases.family(family).BASE, **changes})
    assert words in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tie_word_embeddings": True}, "tie_word_embeddings = true contradicts text_config's"),
        ({"text_config": 3}, "text_config is no object"),
        ({"audio_config": {}}, "audio_config = {} is not a known key"),
        ({"quantization_config": {"bits": 3}}, "quantization_config"),
    ],
)
def test_what_is_refused_beside_the_text_model(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(EmitError) as raised:
        Model.of(with_images(dict(cases.family("qwen3_5").BASE), **changes))
    assert words in str(raised.value) and "\n" not in str(raised.value)
