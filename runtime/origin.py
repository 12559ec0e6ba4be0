"""What a bundle was made from and by, as its manifest says it: enough to make the bundle again."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from runtime import flags

MANIFEST = "manifest.json"
# Files of a bundle that its manifest cannot list, because they are made of it. They are carried as
# they are: what checks them does not trust them.
UNLISTED = ("model.sig",)
MAX_PACKAGES = 1000
MAX_PATH = 1000  # characters


@dataclass(frozen=True)
class FileRef:
    """A file of the bundle: relative POSIX path inside it, sha256 (64 hex digits), bytes."""

    path: str
    sha256: str
    size: int

    def __post_init__(self) -> None:
        pure = PurePosixPath(self.path)
        plain = pure.parts and str(pure) == self.path and self.path != MANIFEST
        plain = plain and self.path.isprintable() and not set(self.path) & set("\\:")
        plain = plain and len(self.path) <= MAX_PATH
        plain = plain and all(len(part.encode()) <= 255 for part in pure.parts)
        if not plain or pure.is_absolute() or ".." in pure.parts:
            raise ValueError(f"path {self.path[:80]!r}, expected a relative path inside the bundle")
        if not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise ValueError(f"sha256 {self.sha256!r}, expected 64 lower-case hex digits")
        if self.size < 0:
            raise ValueError(f"size {self.size}, expected 0 or more")


@dataclass(frozen=True)
class Package:
    """A package that took part in the build, and its version."""

    name: str
    version: str

    def __post_init__(self) -> None:
        for word in (self.name, self.version):
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+!-]{0,99}", word):
                raise ValueError(f"{word!r}, expected the name or the version of a package")


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

    def __post_init__(self) -> None:
        if len(self.packages) > MAX_PACKAGES:
            raise ValueError(f"{len(self.packages)} packages, expected {MAX_PACKAGES} at most")


@dataclass(frozen=True)
class RecipeInfo:
    """The target's recipe: `flags` without the CPU's, `safe_flags` tried after a failed proof,
    `weights` the types that it stores, `runs_here` and `kernels` as in the YAML."""

    flags: tuple[str, ...]
    safe_flags: tuple[tuple[str, ...], ...]
    weights: tuple[str, ...]
    runs_here: str
    kernels: bool

    def __post_init__(self) -> None:
        for words in (self.flags, *self.safe_flags):
            for flag in words:
                flags.check(flag)
