"""Digest of the source files that a stage imports, so that a changed line makes a cache miss."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGES = ("artifacts", "emit", "recipes", "runtime")

# The import statements of a file, wherever they stand. A full parse takes ten times as long; a
# test holds the two against each other over every file of the project. An import that is only
# quoted in a docstring counts too, which is harmless: it may only widen the closure.
_IMPORT = re.compile(
    r"(?:^|[;:])[ \t]*"
    r"(?:import[ \t]+(?P<modules>[^\n;#]+)"
    r"|from[ \t]+(?P<base>[.\w]+)[ \t]+import[ \t]*(?P<names>\([^)]*\)|[^\n;#]+))",
    re.MULTILINE,
)
_DYNAMIC = re.compile(r"""\b(?:import_module|__import__)\(\s*["']([\w.]+)["']""")
_COMMENT = re.compile(r"#[^\n]*")
_CONTINUED = re.compile(r"\\\r?\n")


def source_digest(
    modules: Iterable[str], root: Path | None = None, packages: Iterable[str] = PACKAGES
) -> str:
    """sha256 hex over names and bytes of `modules` and all project modules they import.

    Imports inside functions count; modules whose name is made at run time (a family) do not, so
    the caller is to name them. Raises ValueError if a module of `modules` is not in the
    project.
    """
    digest = hashlib.sha256()
    for name, path in sorted(closure(modules, root, packages).items()):
        digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def closure(
    modules: Iterable[str], root: Path | None = None, packages: Iterable[str] = PACKAGES
) -> dict[str, Path]:
    """Module name -> file of `modules` and of every project module they import, transitively."""
    root = root or Path(__file__).resolve().parent.parent
    inside = tuple(packages)
    found: dict[str, Path] = {}
    waiting: list[str] = []
    for name in modules:
        if _file(name, root, inside) is None:
            raise ValueError(f"{name}: no such module in {', '.join(inside)} under {root}")
        waiting.append(name)
    while waiting:
        name = waiting.pop()
        path = _file(name, root, inside)
        if name in found or path is None:
            continue
        found[name] = path
        if "." in name:
            waiting.append(name.rpartition(".")[0])  # its package is imported first
        is_package = path.name == "__init__.py"
        waiting.extend(imported(path.read_text(encoding="utf-8"), name, is_package))
    return found


def _file(name: str, root: Path, packages: tuple[str, ...]) -> Path | None:
    parts = name.split(".")
    if parts[0] not in packages:
        return None
    place = root.joinpath(*parts)
    for path in (place.with_suffix(".py"), place / "__init__.py"):
        if path.is_file():
            return path
    return None


def imported(text: str, module: str, is_package: bool) -> Iterator[str]:
    """Absolute names that the source `text` of `module` may import.

    `from a import b` gives both `a` and `a.b`, as `b` may be a module.
    """
    for match in _IMPORT.finditer(_CONTINUED.sub(" ", text)):
        if match["modules"]:
            yield from _names(match["modules"])
            continue
        base = _absolute(match["base"], module, is_package)
        yield base
        for name in _names(match["names"]):
            yield f"{base}.{name}"
    yield from _DYNAMIC.findall(text)


def _names(text: str) -> Iterator[str]:
    for item in _COMMENT.sub("", text).strip("() \t").split(","):
        words = item.split()
        if words:
            yield words[0]


def _absolute(base: str, module: str, is_package: bool) -> str:
    name = base.lstrip(".")
    level = len(base) - len(name)
    if level == 0:
        return base
    parts = module.split(".")
    parts = parts[: len(parts) - (level - 1 if is_package else level)]
    return ".".join([*parts, name] if name else parts)
