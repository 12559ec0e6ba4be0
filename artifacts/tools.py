"""Versions of installed packages, read from their metadata: none of them is imported."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from runtime.errors import UserError


def versions(names: Iterable[str]) -> dict[str, str]:
    """Package name -> installed version, for cache keys and manifests.

    The metadata directories are searched directly, which costs about a millisecond;
    importlib.metadata, thirty times slower to import, is asked only about what is not found so.
    Raises UserError that lists the packages that are not installed.
    """
    wanted = {_normal(name): name for name in names}
    found: dict[str, str] = {}
    for place in sys.path:
        missing = wanted.keys() - found.keys()
        if not missing:
            break
        for name, version in _scan(Path(place or "."), missing):
            found.setdefault(name, version)
    for name in sorted(wanted.keys() - found.keys()):
        version = _ask(wanted[name])
        if version is not None:
            found[name] = version
    absent = sorted(wanted[name] for name in wanted.keys() - found.keys())
    if absent:
        raise UserError(
            f"{', '.join(absent)}: not installed, needed to build; "
            "install them with `pip install 'scanwright[build]'`"
        )
    return {wanted[name]: found[name] for name in sorted(found)}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _scan(directory: Path, wanted: set[str]) -> Iterable[tuple[str, str]]:
    try:
        entries = sorted(path.name for path in directory.iterdir())
    except OSError:  # sys.path may name zip files and places that do not exist
        return
    for entry in entries:
        if not entry.endswith(".dist-info"):
            continue
        name = _normal(entry.removesuffix(".dist-info").rpartition("-")[0])
        if name in wanted:
            version = _version_line(directory / entry / "METADATA")
            if version:
                yield name, version


def _version_line(metadata: Path) -> str | None:
    try:
        with metadata.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if not line.strip():
                    return None
                key, _, value = line.partition(":")
                if key.lower() == "version":
                    return value.strip()
    except OSError:
        return None
    return None


def _ask(name: str) -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
