"""PLaMo 2's config, sizes and checkpoint layout; its numbers are in the tests of all families."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import yaml
from driver import Driver

from emit.errors import EmitError
from emit.families import plamo2

RECIPES = Path(__file__).parent.parent / "recipes" / "models"


def read(**changed: Any) -> plamo2.Config:
    base = {**cases.family("plamo2").BASE, **changed}
    return plamo2.Config.read({k: v for k, v in base.items() if v is not ...})


@pytest.mark.parametrize(
    ("name", "parameters", "layers"),
    [
        # The published files hold this many parameters: 1.29 × 10⁹, and 19,056,520,928 bytes of
        # bfloat16 in four files with headers of 50,912.
        ("plamo-2-1b", 1_291_441_920, 16),
        ("plamo-2-8b", 9_528_235_008, 32),
        ("plamo-2-translate", 9_528_235_008, 32),
    ],
)
def test_recipes_have_the_published_sizes(name: str, parameters: int, layers: int) -> None:
    config = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())["config"]
    cfg = plamo2.Config.read({**config, "model_type": "plamo2"})
    assert sum(math.prod(p.shape) for p in plamo2.weights(cfg).params) == parameters
    specs = plamo2.state(cfg, 4096)
    assert [s.shape[2] for s in specs if s.kind == "per_position"] == [2049] * layers


def test_which_layers_attend() -> None:
    def attention(layers: int, step: int, enabled: bool = True) -> list[int]:
        cfg = read(num_hidden_layers=layers, mamba_step=step, mamba_enabled=enabled)
        return [i for i in range(layers) if not cfg.is_mamba(i)]

    assert attention(4, 2) == [1, 3]
    assert attention(7, 3) == [1, 4]
    assert attention(7, 4) == [2, 6]
    assert attention(3, 8) == [2]  # too few layers for one of its own: the last
    assert attention(5, 8) == [4]
    assert attention(3, 1, enabled=False) == [0, 1, 2]


def test_windows_and_bases_by_layer() -> None:
    cfg = read(num_hidden_layers=4, full_attention_idx=[3], rope_theta=1e6, rope_local_theta=500)
    windowed, full = cfg.mixer(1), cfg.mixer(3)
    assert windowed.state(50)[0].shape == (1, 2, 13, 8)  # 12 keys before a token, and its own
    assert windowed.state(9)[0].shape == (1, 2, 9, 8)
    assert full.state(50)[0].shape == (1, 2, 50, 8)
    assert windowed.rope.frequencies[1] == pytest.approx(500 ** (-1 / 4))  # pyright: ignore
    assert full.rope.frequencies[1] == pytest.approx(1e6 ** (-1 / 4))  # pyright: ignore
    with pytest.raises(EmitError, match="needs a context"):
        plamo2.state(cfg, None)


@pytest.mark.parametrize(
    ("changed", "bases"),
    [
        ({}, (1e4, 1e4)),
        ({"rope_theta": 300}, (300, 300)),
        ({"rope_local_theta": 300}, (1e4, 300)),
        ({"rope_theta": None, "rope_local_theta": None}, (1e4, 1e4)),
        ({"rope_parameters": {"rope_theta": 300, "rope_type": "default"}}, (300, 300)),
        ({"rope_parameters": {"rope_theta": 300}, "rope_local_theta": 5.0}, (300, 5)),
        ({"rope_parameters": None, "rope_theta": 300}, (300, 300)),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 7e4, "rope_type": "default"},
                    "sliding_attention": {"rope_theta": 600, "rope_type": "default"},
                }
            },
            (7e4, 600),
        ),
    ],
)
def test_bases_in_every_dialect(changed: dict[str, Any], bases: tuple[float, float]) -> None:
    cfg = read(**changed)
    assert (cfg.rope_theta, cfg.rope_local_theta) == bases


@pytest.mark.parametrize("full", [None, [], ...])
def test_no_full_attention_may_be_said_in_three_ways(full: Any) -> None:
    assert read(full_attention_idx=full).full_attention_idx == ()


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"mamba_step": 1}, "mamba_step = 1, expected 2 or more, or mamba_enabled = false"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4, expected a multiple of"),
        ({"hidden_size_per_head": 7}, "hidden_size_per_head = 7, expected an even number"),
        ({"mamba_d_conv": 1}, "mamba_d_conv = 1, expected 2 or more"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps = 0 must be above 0"),
        ({"rope_theta": 0}, "rope_theta = 0 must be above 0"),
        ({"rope_local_theta": -1.0}, "rope_local_theta = -1 must be above 0"),
        ({"full_attention_idx": [1, 3]}, "full_attention_idx holds 3, expected layers below 3"),
        ({"full_attention_idx": [-1]}, r"full_attention_idx = \[-1\] is not of type"),
        ({"full_attention_idx": 1}, "full_attention_idx = 1 is not of type"),
        ({"sliding_window": 7}, r"sliding_window = 7 is not supported \(only 12\)"),
        ({"linear_type": "fp8"}, r'linear_type = "fp8" is not supported \(only "normal"\)'),
        ({"eval_mlp_n_bit": 4}, r"eval_mlp_n_bit = 4 is not supported \(only null\)"),
        ({"image_token_id": 9}, r"image_token_id = 9 is not supported \(only null\)"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling = .* is not supported"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2}},
            "rope_parameters = .*only rope_type",
        ),
        (
            {"rope_theta": 5, "rope_parameters": {"rope_theta": 6}},
            "rope_theta = 5 contradicts 6 in rope_parameters",
        ),
        ({"mamba_expand": 2}, "mamba_expand = 2 is not a known key"),
    ],
)
def test_what_is_not_supported_is_named(changed: dict[str, Any], line: str) -> None:
    with pytest.raises(EmitError, match=f"^config.json of plamo2: .*{line}"):
        read(**changed)


def test_a_second_copy_of_tied_embeddings_may_be_there(tmp_path: Path) -> None:
    """Published files with tied embeddings may hold lm_head.weight besides."""
    case = next(c for c in cases.CASES if c.id == "plamo2/plain")
    tensors = cases.tensors(case)
    table = tensors["model.embed_tokens.weight"]
    for name, head, good in (("same", table, True), ("other", table + 1, False)):
        checkpoint = cases.build(case, tmp_path / name)
        cases.write_tensors(checkpoint, {**tensors, "lm_head.weight": head})
        if good:
            params = Driver.load(checkpoint).params
            assert "lm_head.weight" not in params
            up = tensors["model.layers.layers.0.mlp.gate_up_proj.weight"][52:]
            assert np.array_equal(np.asarray(params["layers.0.mlp.up_proj.weight"]), up)
        else:
            with pytest.raises(EmitError, match=r"lm_head\.weight differs from model"):
                Driver.load(checkpoint)
