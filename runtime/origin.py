"""What a bundle was made from and by, as its manifest says it: enough to make the bundle again."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

MANIFEST = "manifest.json"
# Files of a bundle that its manifest cannot list, because they are made of it. They are carried as
# they are: what checks them does not trust them.
UNLISTED = ("model.sig",)


@dataclass(frozen=True)
class FileRef:
    """A file of the bundle: relative POSIX path inside it, sha256 (64 hex digits), bytes."""

    path: str
    sha256: str
    size: int

    def __post_init__(self) -> None:
        pure = PurePosixPath(self.path)
        plain = pure.parts and str(pure) == self.path and self.path != MANIFEST
        if not plain or pure.is_absolute() or ".." in pure.parts or set(self.path) & set("\\\0:"):
            raise ValueError(f"path {self.path!r}, expected a relative path inside the bundle")
        if not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise ValueError(f"sha256 {self.sha256!r}, expected 64 lower-case hex digits")
        if self.size < 0:
            raise ValueError(f"size {self.size}, expected 0 or more")


@dataclass(frozen=True)
class Package:
    """A package that took part in the build, and its version."""

    name: str
    version: str


@dataclass(frozen=True)
class BuildInfo:
    """What the bundle was made from: the checkpoint's files, the type of its weights, packages.

    `own_weights`: that type is the checkpoint's own, and what it has in floats stays so. `files`
    are those of the checkpoint that were used (none where the recipe's config was enough).
    """

    weights: str
    own_weights: bool
    files: tuple[FileRef, ...]
    packages: tuple[Package, ...]


@dataclass(frozen=True)
class RecipeInfo:
    """The target's recipe: `flags` without the CPU's, `safe_flags` tried after a failed proof,
    `weights` the types that it stores, `runs_here` and `kernels` as in the YAML."""

    flags: tuple[str, ...]
    safe_flags: tuple[tuple[str, ...], ...]
    weights: tuple[str, ...]
    runs_here: str
    kernels: bool
