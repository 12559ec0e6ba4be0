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


def file_name(kind: str, manifest: Manifest, whole: Manifest | None = None) -> str:
    """`bench-mamba2-cpu-b4-p32+256-bf16.json`; `A+B.A` of a bundle for two targets."""
    target = manifest.target.name
    if whole is not None and whole.alternatives:
        target = f"{'+'.join(each.name for each in whole.targets)}.{target}"
    words = (manifest.model.name, target, manifest.shape.name)
    name = "-".join((kind, *words, manifest.numerics.quantization or manifest.numerics.weights))
    return re.sub(r"[^\w.+-]", "_", name)[:200] + ".json"


def save(
    directory: Path,
    kind: str,
    manifest: Manifest,
    found: Mapping[str, Any],
    whole: Manifest | None = None,
) -> Path:
    """Write `found` (JSON) about a bundle under `directory`; a file of the same name goes.

    Its digest and its words are added; `whole` is the bundle's manifest where `manifest` is that
    for one of its targets. Raises UserError if nothing can be written there.
    """
    content = {
        "kind": kind,
        "bundle": (whole or manifest).digest,
        "model": manifest.model.name,
        "target": manifest.target.name,
        "shape": manifest.shape.name,
        "weights": manifest.numerics.quantization or manifest.numerics.weights,
        **found,
    }
    path = directory / file_name(kind, manifest, whole)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error}); choose another --save") from error
    return path
