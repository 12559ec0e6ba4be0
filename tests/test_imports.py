"""Who must never import whom, read from the source of every file."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("artifacts", "emit", "recipes", "runtime")
EVERYWHERE = ("torch", "transformers", "tests", "benchmarks", "dodo")
# Longest matching prefix of the file's module first: what it must not import.
BANS: dict[str, tuple[str, ...]] = {
    "runtime": ("emit", "artifacts", "recipes", "jax", "iree.compiler", "yaml", "doit"),
    "artifacts": ("emit", "recipes", "jax", "doit", "runtime"),
    "emit": ("artifacts", "runtime", "recipes", "iree", "doit"),
    "recipes": ("artifacts", "emit", "runtime", "jax", "iree", "doit"),
    "emit.ops": ("emit.families", "emit.blocks", "emit.config", "emit.checkpoint", "emit.weights"),
    "emit.blocks": ("emit.families", "emit.config", "emit.checkpoint", "emit.entry"),
    "runtime.scheduler": ("iree",),
    "runtime.slots": ("iree",),
    "runtime.sampling": ("iree",),
}
ALLOWED = {
    "artifacts": (
        *("runtime.manifest", "runtime.errors", "runtime.vmfb"),
        *("runtime.blobs", "runtime.oci", "runtime.pack", "runtime.place", "runtime.s3"),
        *("runtime.progress", "runtime.reference", "runtime.results", "runtime.web"),
    ),
    "emit": ("runtime.errors", "runtime.progress", "runtime.uncollected"),
    "recipes": ("runtime.errors", "runtime.flags"),
}


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, absolute name) of every import, wherever it stands, and of literal dynamic ones."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            called = getattr(node.func, "attr", getattr(node.func, "id", None))
            target = node.args[0]
            if called in ("import_module", "__import__") and isinstance(target, ast.Constant):
                yield node.lineno, str(target.value)


def violations(root: Path) -> list[str]:
    """One line for each import under `root` that breaks a rule."""
    found = []
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            if path.is_relative_to(root / "recipes" / "models"):
                continue  # a script beside data, such as the one that trained a checkpoint
            is_package = path.name == "__init__.py"
            parts = path.relative_to(root).with_suffix("").parts
            module = ".".join(parts[:-1] if is_package else parts)
            tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
            for line, name in imports(tree, module, is_package):
                if why := refused(module, name):
                    found.append(f"{path.relative_to(root)}:{line}: {module} imports {name}: {why}")
    return found


def refused(module: str, name: str) -> str | None:
    if any(within(name, banned) for banned in EVERYWHERE):
        return "only tests may"
    if any(within(name, allowed) for allowed in ALLOWED.get(module.split(".")[0], ())):
        return None
    for prefix, banned in BANS.items():
        if within(module, prefix):
            for ban in banned:
                if within(name, ban):
                    return f"{prefix} must not import {ban}"
    family = "emit.families."
    if module.startswith(family) and within(name, "emit.families") and not within(name, module):
        return "a family must not import another"
    return None


def test_no_module_imports_what_it_must_not() -> None:
    assert violations(ROOT) == []


PLANTED = [
    ("runtime/session.py", "import emit.ops", 1),
    ("runtime/session.py", "def f():\n    from artifacts.store import Store", 1),
    ("runtime/session.py", "from iree import compiler", 1),
    ("runtime/session.py", "import iree.compiler.tools as t", 1),
    ("runtime/session.py", "import iree.runtime, yaml", 1),
    ("runtime/session.py", "import importlib\nimportlib.import_module('jax.numpy')", 1),
    ("runtime/session.py", "try:\n    import torch\nexcept ImportError:\n    pass", 1),
    ("runtime/session.py", "import iree.runtime, numpy, emitter", 0),
    ("runtime/sampling.py", "import iree.runtime", 1),
    ("runtime/sampling.py", "import numpy", 0),
    ("artifacts/compile.py", "from runtime import manifest, errors, web", 0),
    ("artifacts/compile.py", "from runtime.errors import UserError", 0),
    ("artifacts/compile.py", "from runtime import session", 1),
    ("artifacts/compile.py", "import runtime", 1),
    ("artifacts/compile.py", "import jax\nimport doit\nimport recipes.schema", 3),
    ("artifacts/compile.py", "import iree.compiler", 0),
    ("emit/entry.py", "from ..runtime import x", 1),
    ("emit/entry.py", "from runtime.text import Detokenizer", 1),
    ("emit/entry.py", "import jax, ml_dtypes", 0),
    ("emit/entry.py", "from iree.compiler import ir", 1),
    ("recipes/schema.py", "import yaml\nfrom runtime.errors import UserError", 0),
    ("recipes/schema.py", "from runtime.manifest import load", 1),
    ("recipes/schema.py", "import jax.numpy", 1),
    ("emit/ops/ssd.py", "from emit.ops import conv", 0),
    ("emit/ops/ssd.py", "from emit import config", 1),
    ("emit/ops/ssd.py", "from .. import weights", 1),
    ("emit/ops/ssd.py", "from ..families.mamba2 import Config", 1),
    ("emit/ops/__init__.py", "from ..checkpoint import Checkpoint", 1),
    ("emit/families/mamba2.py", "from emit.families.rwkv7 import Config", 1),
    ("emit/families/mamba2.py", "from . import rwkv7", 1),
    ("emit/families/mamba2.py", "from emit.ops import ssd\nfrom emit.config import Reader", 0),
]


@pytest.mark.parametrize(("file", "text", "count"), PLANTED)
def test_planted_import_is_found(tmp_path: Path, file: str, text: str, count: int) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert len(violations(tmp_path)) == count


def test_cache_modules_load_nothing_heavy() -> None:
    code = (
        "import sys; import artifacts.actions, artifacts.gc, artifacts.sources, artifacts.tools;"
        "artifacts.tools.versions(['numpy']); artifacts.sources.source_digest(['artifacts.gc']);"
        "print([m for m in ('numpy', 'jax', 'yaml', 'iree', 'doit', 'importlib.metadata')"
        " if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
