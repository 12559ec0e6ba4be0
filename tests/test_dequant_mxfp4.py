"""MXFP4 as gpt-oss packs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantised
from quantised import Parts

from emit.dequant import mxfp4
from emit.packed import TABLES

SETTINGS = {"quant_method": "mxfp4", "modules_to_not_convert": [quantised.KEPT]}


def drawn(*shape: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Blocks, scales and, code by code, what they stand for."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // 32, 16)).astype(np.uint8)
    scales = rng.integers(100, 140, blocks.shape[:-1]).astype(np.uint8)
    mean = np.zeros(shape, np.float32)
    for at in np.ndindex(shape):
        group, place = divmod(at[-1], 32)
        byte = int(blocks[(*at[:-1], group, place // 2)])
        code = byte >> 4 if place % 2 else byte & 15
        mean[at] = TABLES["e2m1"][code] * 2.0 ** (int(scales[(*at[:-1], group)]) - 127)
    return blocks, scales, mean


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """Matrices packed as experts are."""
    directory = quantised.plain(tmp_path / "checkpoint")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = SETTINGS
    (directory / "config.json").write_text(json.dumps(config))
    stored, means = quantised.tensors(directory), {}
    for module in quantised.MODULES:
        name = f"{module}.weight"
        shape = stored.pop(name).shape
        stored[f"{name}_blocks"], stored[f"{name}_scales"], means[name] = drawn(*shape)
    quantised.save(directory, stored)
    return directory, means


def test_reads_the_codes(checkpoint: tuple[Path, dict[str, np.ndarray]]) -> None:
    directory, means = checkpoint
    quantised.check(directory, means, packs=True)
    quantised.converts(directory, means)


def test_reads_stacks_of_experts() -> None:
    blocks, scales, mean = drawn(3, 5, 64)
    values = np.asarray(TABLES["e2m1"], np.float32)
    np.testing.assert_array_equal(mxfp4.split(blocks, scales).widen(values), mean)


def test_parts_must_go_together(checkpoint: tuple[Path, dict[str, np.ndarray]]) -> None:
    directory, _ = checkpoint
    good = quantised.tensors(directory)
    name = f"{quantised.MODULES[0]}.weight"
    blocks, scales = f"{name}_blocks", f"{name}_scales"
    for change, line in (
        ({scales: None}, f"{scales} is missing"),
        ({scales: good[scales][:, :1]}, f"{scales} is u8"),
        ({blocks: None}, f"{scales} scales no {blocks}"),
        ({blocks: good[blocks][..., :8]}, "expected u8[..., outputs, groups, 16]"),
        ({blocks: good[blocks].view(np.int8)}, f"{blocks} is i8"),
        ({blocks: np.zeros(16, np.uint8)}, f"{blocks} is u8[16]"),
    ):
        assert line in quantised.damaged(directory, change)
    quantised.setting(directory, colour=1)
    assert "colour = 1 is not supported" in quantised.refused(directory)


def test_a_scale_that_is_no_number(
    checkpoint: tuple[Path, dict[str, np.ndarray]], capsys: Any
) -> None:
    from emit.__main__ import main

    directory, _ = checkpoint
    stored: Parts = quantised.tensors(directory)
    stored[f"{quantised.MODULES[0]}.weight_scales"][0, 0] = 255
    quantised.save(directory, stored)
    out = str(directory.parent / "out")
    assert main(["convert", str(directory), "--weights", "f32", "--out", out]) == 1
    assert "holds NaN" in capsys.readouterr().err


@pytest.mark.oracle
def test_reads_as_the_library_does() -> None:
    """transformers swaps the last two axes after it."""
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales, mean = drawn(3, 48, 96)
    scales[0, 0] = 0, 1, 254
    theirs = convert_moe_packed_tensors(
        torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32
    )
    found = mxfp4.split(blocks, scales).widen(np.asarray(TABLES["e2m1"], np.float32))
    np.testing.assert_array_equal(found, theirs.numpy().transpose(0, 2, 1))
    np.testing.assert_array_equal(found[1:], mean[1:])
