"""The handed RWKV-7 and RecurrentGemma against mlx-lm, a second opinion that shares no code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx_reference
import pytest
import references

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


def checkpoint(name: str, directory: Path) -> Path:
    """Where the checkpoint called `name` is."""
    return references.write_checkpoint(name, directory)
