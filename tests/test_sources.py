"""Source digests and tool versions: they change exactly when what they stand for does."""

from __future__ import annotations

import ast
import importlib.metadata
import sys
from pathlib import Path

import pytest
from test_imports import PACKAGES, ROOT, imports

from artifacts.sources import closure, imported, source_digest
from artifacts.tools import versions
from runtime.errors import UserError

PROJECT_FILES = sorted(p for name in PACKAGES for p in (ROOT / name).rglob("*.py"))


def plant(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


TREE = {
    "emit/__init__.py": "",
    "emit/a.py": "import json\nfrom emit import b\nfrom . import c as see\n",
    "emit/b.py": "def f():\n    from emit.deep.d import (  # why\n        x,  # one\n  y,\n )\n",
    "emit/c.py": "import os; import emit.e\nif True: from .deep \\\n  import g\n",
    "emit/deep/__init__.py": "from .h import z\n",
    "emit/deep/d.py": "x = y = 1\nfrom ..i import w\n",
    "emit/deep/g.py": "",
    "emit/deep/h.py": "import emit.a\nz = 1\n",
    "emit/e.py": "import other.f\n",
    "emit/i.py": "",
    "emit/unused.py": "",
    "other/f.py": "import emit.unused\n",
}
REACHED = {
    "emit", "emit.a", "emit.b", "emit.c", "emit.deep", "emit.deep.d", "emit.deep.g",
    "emit.deep.h", "emit.e", "emit.i",
}  # fmt: skip


def test_closure_follows_every_form_of_import(tmp_path: Path) -> None:
    plant(tmp_path, TREE)
    assert set(closure(["emit.a"], tmp_path)) == REACHED


def test_digest_changes_with_reached_files_only(tmp_path: Path) -> None:
    plant(tmp_path, TREE)
    first = source_digest(["emit.a"], tmp_path)
    assert source_digest(["emit.a"], tmp_path) == first
    assert source_digest(["emit.a", "emit.c"], tmp_path) == first
    for name in TREE:
        path = tmp_path / name
        text = path.read_text()
        path.write_text(text + "# changed\n")
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        assert (source_digest(["emit.a"], tmp_path) != first) == (module in REACHED), name
        path.write_text(text)
    (tmp_path / "emit/i.py").rename(tmp_path / "emit/j.py")
    assert source_digest(["emit.a"], tmp_path) != first


def test_unknown_module_is_refused(tmp_path: Path) -> None:
    plant(tmp_path, TREE)
    for name in ("emit.nothing", "json", "other.f"):
        with pytest.raises(ValueError, match=name):
            source_digest([name], tmp_path)


@pytest.mark.parametrize("path", PROJECT_FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_scanner_finds_what_the_parser_finds(path: Path) -> None:
    is_package = path.name == "__init__.py"
    parts = path.relative_to(ROOT).with_suffix("").parts
    module = ".".join(parts[:-1] if is_package else parts)
    text = path.read_text(encoding="utf-8")
    parsed = {name for _, name in imports(ast.parse(text), module, is_package)}
    assert parsed - set(imported(text, module, is_package)) == set()


def test_versions_are_those_of_the_metadata() -> None:
    names = ["numpy", "Huggingface_Hub", "iree-base-compiler", "pytest"]
    assert versions(names) == {name: importlib.metadata.version(name) for name in names}


def test_versions_of_a_package_found_only_by_importlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path, {"oldstyle.egg-info/PKG-INFO": "Metadata-Version: 1.0\nVersion: 4.5\n"})
    plant(tmp_path, {"new_style-9.dist-info/METADATA": "Name: new-style\nVersion: 9+local\n\nx"})
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "none"), *sys.path])
    assert versions(["oldstyle", "new.style"]) == {"oldstyle": "4.5", "new.style": "9+local"}


def test_missing_packages_are_all_named() -> None:
    with pytest.raises(UserError, match=r"nix-gibt-es, nor-this: not installed.*pip install"):
        versions(["pytest", "nor-this", "nix-gibt-es"])
