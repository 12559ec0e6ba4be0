"""MLX's checkpoints, quantised or not, are the model that they were made of.

Names and shapes are those that mlx-lm's own `sanitize` writes; the numbers of quantised ones those
that mlx.core.dequantize gives.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import mlx_made
import numpy as np
import pytest
import references
import safetensors.numpy
from bundles import check_tokens
from driver import Driver, relative
from mlx_made import HANDED, MADE, Made

from emit.checkpoint import open_checkpoint
from emit.dequant import scheme
from emit.dequant.coded import Dequantized
from emit.entry import Model
from emit.errors import EmitError
from emit.weights import resolve

CHUNK = 8
SETTINGS = {"group_size": 32, "bits": 4}
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def each(name: str) -> Any:
    """One quantisation of each family in a default run, and each once."""
    at = HANDED.index(name)
    return pytest.param(name, marks=() if at % 4 == at // 4 else pytest.mark.thorough)


@pytest.mark.parametrize("name", [each(name) for name in HANDED])
def test_handed_checkpoints_generate_the_reference(name: str) -> None:
    """transformers' tokens, from the numbers that the codes stand for."""
    made, rows = references.recorded(f"mlx/{name.replace('/', '-')}")
    directory = cases.HANDED / name
    assert references.digest(directory) == made, "run tests/mlx_made.py again"
    assert any(tensor.endswith(".scales") for tensor in open_checkpoint(directory).tensors)
    driver = Driver.load(directory)
    for row in rows:
        tokens, logits = driver.greedy(row.prompt, references.NEW_TOKENS, CHUNK, row.tokens)
        check_tokens(tokens, logits, row)


def test_all_four_quantisations_of_four_families_are_there() -> None:
    assert len(HANDED) == 16 and len({name.split("/")[0] for name in HANDED}) == 4


@pytest.mark.oracle
@pytest.mark.thorough
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", HANDED)
def test_the_recorded_reference_is_what_the_library_gives(name: str, tmp_path: Path) -> None:
    _, rows = references.recorded(f"mlx/{name.replace('/', '-')}")
    checkpoint = mlx_made.hugging_face(cases.HANDED / name, tmp_path / "checkpoint")
    texts = [row.prompt for row in rows]
    again = references.by_library(checkpoint, texts, references.NEW_TOKENS)
    for row, now in zip(rows, again, strict=True):
        check_tokens(now.tokens, np.array([now.first_logits]), row)


def params(directory: Path) -> dict[str, np.ndarray]:
    """Canonical parameters of a checkpoint."""
    return {name: np.asarray(value) for name, value in Driver.load(directory).params.items()}


@pytest.mark.oracle
@pytest.mark.parametrize("row", MADE, ids=lambda row: row.id)
def test_what_is_not_quantised_is_as_it_was(row: Made, tmp_path: Path) -> None:
    plain, made = mlx_made.write(row, tmp_path)
    wanted, found = params(plain), params(made)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        if row.folded:
            np.testing.assert_allclose(found[name], array, rtol=2e-7, atol=1e-12)
        elif "norm" in name and row.case.family.startswith("qwen"):
            # 1 + w is what is stored there, and what the model multiplies by.
            np.testing.assert_array_equal(1 + found[name], 1 + array)
        else:
            np.testing.assert_array_equal(found[name], array)


@pytest.mark.oracle
@pytest.mark.parametrize("settings", [SETTINGS, {"mode": "nvfp4"}], ids=["affine", "nvfp4"])
@pytest.mark.parametrize("row", MADE, ids=lambda row: row.id)
def test_what_is_quantised_is_what_the_library_dequantises(
    row: Made, settings: dict[str, Any], tmp_path: Path
) -> None:
    """To the bit; and its logits are those of mlx-lm, where that computes the family's function."""
    _, made = mlx_made.write(row, tmp_path, **{"group_size": None, "bits": None} | settings)
    plain = tmp_path / "dequantised"
    mlx_made.dequantised(made, plain)
    driver, wanted = Driver.load(made), params(plain)
    assert driver.params.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(np.asarray(driver.params[name]), array)
    opened = open_checkpoint(made)
    found = scheme(opened.config)
    assert found is not None
    coded = found.coded(opened)
    assert len(coded) > 4 and all(tensor.layout is not None for tensor in coded.values())
    if row.wrong is None:
        ours, _ = driver.prefill(TEXT, CHUNK)
        assert relative(ours, logits(made)) < 2e-5


def logits(directory: Path) -> np.ndarray:
    """mlx-lm's, f32[V] after TEXT."""
    import mlx.core
    from mlx_lm import utils

    mx: Any = mlx.core
    model, _ = utils.load_model(directory)
    return np.array(model(mx.array([TEXT]))[0, -1].astype(mx.float32))


@pytest.mark.oracle
@pytest.mark.parametrize("row", MADE, ids=lambda row: row.id)
def test_codes_are_carried(row: Made, tmp_path: Path) -> None:
    """All quantised matrices can stay as they are, but for folded multipliers' rounding."""
    _, made = mlx_made.write(row, tmp_path, **SETTINGS)
    opened = open_checkpoint(made)
    found, model = scheme(opened.config), Model.of(opened.config, 64)
    assert found is not None
    coded = found.coded(opened)
    source = Dequantized.of(opened, coded)
    carried = 0
    for form in resolve(model.weight_map, source).values():
        for name in form.names:
            if name not in coded:
                continue
            tensor = coded[name]
            assert tensor.layout is not None and tensor.pack is not None
            layout = form.stored(tensor.layout)
            assert layout is not None, name
            packed = form.carry(tensor.pack(*(opened.read(part) for part in tensor.parts)))
            wide = form.transform(source.read(name))
            packed.check(name, wide.shape)
            assert packed.layout == layout
            scale = np.abs(wide).max()
            np.testing.assert_allclose(
                packed.widen(), wide, rtol=0, atol=scale * 4e-7 if row.folded else 0
            )
            carried += 1
    assert carried >= len(coded) - (1 if row.case.config.get("tie_word_embeddings") else 0)


def test_layouts_do_not_mix(tmp_path: Path) -> None:
    """A tensor in both layouts' names is refused, and so is a kernel that is in neither's shape."""
    source = cases.HANDED / "kimi_linear" / "mlx_nvfp4_g16_b4"
    tensors = safetensors.numpy.load_file(source / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())

    def refused(change: dict[str, np.ndarray]) -> str:
        safetensors.numpy.save_file(tensors | change, tmp_path / "model.safetensors")
        with pytest.raises(EmitError) as caught:
            Driver.load(tmp_path)
        return str(caught.value)

    kernel = "model.layers.0.self_attn.q_conv.conv.weight"
    other = kernel.replace("_conv.conv", "_conv1d")
    turned = np.ascontiguousarray(tensors[kernel].swapaxes(1, 2))
    assert "is there under two names" in refused({other: turned})
    line = refused({kernel: np.ascontiguousarray(tensors[kernel][:, :, 0])})
    assert f"{kernel} has shape [64, 4], expected [64, 1, 4] or [64, 4, 1]" in line
    joint = "model.layers.3.self_attn.kv_b_proj.weight"
    assert "is there under two names" in refused({joint: np.zeros((128, 32), np.float32)})
