"""What one build is asked to do. The recipes' dataclasses fit these protocols as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from artifacts.cpu import Cpu


class Model(Protocol):
    """Of `recipes.schema.ModelRecipe`: `source` is what the manifest says, `location` what to fetch
    (`hf:org/name` or `dir:PATH`), `config` the architecture config if the recipe has one."""

    @property
    def name(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def location(self) -> str: ...
    @property
    def revision(self) -> str | None: ...
    @property
    def lock(self) -> Path: ...
    @property
    def config(self) -> Mapping[str, Any] | None: ...
    @property
    def license(self) -> str | None: ...


class Target(Protocol):
    """Of `recipes.schema.TargetRecipe`, where the fields are explained."""

    @property
    def name(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def uri(self) -> str: ...
    @property
    def flags(self) -> tuple[str, ...]: ...
    @property
    def safe_flags(self) -> tuple[tuple[str, ...], ...]: ...
    @property
    def weights(self) -> tuple[str, ...]: ...
    @property
    def runs_here(self) -> str: ...
    @property
    def cpu(self) -> str | None: ...
    @property
    def triple(self) -> str | None: ...
    @property
    def kernels(self) -> bool: ...


class Shape(Protocol):
    """Of `recipes.shape.Shape`: slots, prefill chunk sizes and context, in tokens."""

    @property
    def name(self) -> str: ...
    @property
    def slots(self) -> int: ...
    @property
    def chunks(self) -> tuple[int, ...]: ...
    @property
    def context(self) -> int | None: ...


@dataclass(frozen=True)
class Job:
    """One (model, target, shape) triple and how to build it.

    `weights` turns the checkpoint's own type word (None if it is not known) into the type to build.
    `params` False makes a weight-free bundle; `proof` False skips the comparison with JAX.
    With `kernels`, what has a C kernel is compiled to a call of it. `cpu` is what the target's CPU
    is where that is known already, as of a bundle that is made again.
    """

    model: Model
    target: Target
    shape: Shape
    weights: Callable[[str | None], str]
    params: bool
    proof: bool
    kernels: bool
    cpu: Cpu | None = None

    @property
    def about(self) -> dict[str, str]:
        """The words that name this build."""
        return {"model": self.model.name, "target": self.target.name, "shape": self.shape.name}

    def bundle(self, root: Path) -> Path:
        """Where the bundle goes under the build directory `root`."""
        return root / self.model.name / self.target.name / self.shape.name
