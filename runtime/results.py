"""What was measured on a device, in files of their own that `doit report` reads."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.errors import UserError
from runtime.manifest import Manifest


def file_name(kind: str, manifest: Manifest, target: str) -> str:
    """`bench-mamba2-cpu-b4-p32+256-bf16.json`."""
    words = (manifest.model.name, target, manifest.shape.name)
    name = "-".join((kind, *words, manifest.numerics.quantization or manifest.numerics.weights))
    return re.sub(r"[^\w.+-]", "_", name)[:200] + ".json"


def save(
    directory: Path, kind: str, manifest: Manifest, target: str, found: Mapping[str, Any]
) -> Path:
    """Write `found` (JSON) about a bundle under `directory`; a file of the same name goes.

    `target` is the one of the bundle's that ran. The bundle's digest and words are added. Raises
    UserError if nothing can be written there.
    """
    content = {
        "kind": kind,
        "bundle": manifest.digest,
        "model": manifest.model.name,
        "target": target,
        "shape": manifest.shape.name,
        "weights": manifest.numerics.quantization or manifest.numerics.weights,
        **found,
    }
    path = directory / file_name(kind, manifest, target)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error}); choose another --save") from error
    return path
