"""The model that ships with the project, built by the command that a user types."""

from __future__ import annotations

import functools
from pathlib import Path

import bundles


@functools.cache
def bundle(shape: str = "b8-p32") -> Path:
    """Its bundle for this CPU, with tokenizer; built once a process."""
    cwd = bundles.home() / "demo"
    words = ("build", "model=mamba2", "target=cpu", f"shape={shape}")
    return bundles.built(bundles.doit(words, cwd, bundles.cache()), cwd)
