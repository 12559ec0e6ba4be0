"""What one build is asked to do: plain data, filled from the recipes by whoever starts it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Target:
    """A target recipe's fields that the stages read; see `recipes.schema.TargetRecipe`."""

    name: str
    device: str
    uri: str
    flags: tuple[str, ...]
    safe_flags: tuple[tuple[str, ...], ...]
    runs_here: str
    cpu: str | None
    triple: str | None


@dataclass(frozen=True)
class Job:
    """One (model, target, shape) triple and how to build it.

    `source` is what the manifest says, `location` what to fetch (`hf:org/name` or `dir:PATH`),
    `config` the recipe's architecture config if it has one. `weights` turns the checkpoint's own
    type word (or None if it is not known) into the type to build. `params` False makes a
    weight-free bundle; `proof` False skips the comparison with JAX.
    """

    model: str
    source: str
    location: str
    revision: str | None
    lock: Path
    config: Mapping[str, Any] | None
    weights: Callable[[str | None], str]
    shape: str
    slots: int
    chunks: tuple[int, ...]
    context: int | None
    target: Target
    params: bool
    proof: bool

    @property
    def about(self) -> dict[str, str]:
        """The words that name this build."""
        return {"model": self.model, "target": self.target.name, "shape": self.shape}

    def bundle(self, root: Path) -> Path:
        """Where the bundle goes under the build directory `root`."""
        return root / self.model / self.target.name / self.shape
