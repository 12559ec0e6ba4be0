"""Handed checkpoints against mlx-lm, a second opinion that shares no code."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import cases
import mlx_reference
import pytest
import references
import safetensors.numpy

pytestmark = pytest.mark.oracle


def every_token(name: str, model: Any) -> None:
    """All recorded tokens, gaps and first logits of the checkpoint called `name`."""
    rows = references.recorded(name)[1]
    assert len(rows) == 5
    for row in rows:
        mlx_reference.check(model, row)


def test_rwkv7(tmp_path: Path) -> None:
    """Heads of 64: the library fixes the epsilon of its group norm at 64e-5."""
    every_token("rwkv7/handed", mlx_reference.load(checkpoint("rwkv7/handed", tmp_path)))


def test_recurrent_gemma(tmp_path: Path) -> None:
    """Prompts beyond the window of 16; the library's block norms have 1e-5 whatever is said."""
    name = "recurrent_gemma/handed"
    model = mlx_reference.load(checkpoint(name, tmp_path), rope_theta=1e4)
    row = references.recorded(name)[1][0]
    with pytest.raises(AssertionError, match=r"off by|gap"):
        mlx_reference.check(model, row)
    for layer in model.layers:
        layer.temporal_pre_norm.eps = layer.channel_pre_norm.eps = 1e-6
    every_token(name, model)


def test_kimi_linear(tmp_path: Path) -> None:
    """The library knows a first layer's FFN by its published name only, and its latent norm has
    the layers' epsilon of 1e-5, which moves these logits by 1e-6."""
    name = "kimi_linear/handed"
    written, renamed = checkpoint(name, tmp_path), tmp_path / "renamed"
    renamed.mkdir()
    shutil.copy(written / "config.json", renamed)
    tensors = safetensors.numpy.load_file(written / "model.safetensors")
    cases.write_tensors(
        renamed, {key.replace(".0.block_sparse_moe.", ".0.mlp."): t for key, t in tensors.items()}
    )
    model = mlx_reference.load(renamed, rope_theta=1e4)
    model.layers[3].self_attn.kv_a_layernorm.eps = 1e-6
    every_token(name, model)


def checkpoint(name: str, directory: Path) -> Path:
    """Where the checkpoint called `name` is."""
    return references.write_checkpoint(name, directory)
