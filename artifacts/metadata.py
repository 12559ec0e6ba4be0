"""What the stages know without weights: a GGUF file's metadata, and the tokenizer's files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifacts import process
from artifacts.actions import Action, Result
from artifacts.fetch import TOKENIZER_FILES, TOKENIZERS, Checkpoint
from artifacts.sources import source_digest
from artifacts.tools import versions

if TYPE_CHECKING:
    from artifacts.stages import Stages


def of_gguf(stages: Stages, checkpoint: Checkpoint) -> Result:
    """`config.json` of the GGUF file, and its tokenizer's files unless others lie beside it.

    What had to be left out is told, a line each, whether it is made now or cached.
    """
    alone = not any(name in checkpoint.files for name in TOKENIZERS)
    fields: dict[str, Any] = {"files": stages.weight_files(), "tokenizer": alone}
    fields |= {"source": source_digest(["emit.gguf_config", "emit.gguf_tokenizer"])}
    fields |= {"tools": versions(["tokenizers"])} if alone else {}
    notes: list[str] = []

    def produce(scratch: Path) -> dict[str, Path]:
        out = scratch / "out"
        arguments = ["gguf", checkpoint.place, *([] if alone else ["--config-only"])]
        stages.log.add(process.run_module("emit", [*arguments, "--out", out], scratch))
        notes.extend(json.loads((out / "notes.json").read_text(encoding="utf-8")))
        return {path.name: path for path in sorted(out.iterdir())}

    action = Action("gguf-metadata", fields, stages.job.about)
    result = stages.run_action(action, produce, lambda: notes)
    stages.log.result("gguf-metadata", result)
    for note in [] if stages.dry else result.meta:
        print(f"warning: {note}", file=sys.stderr, flush=True)
    return result


def tokenizer(stages: Stages) -> dict[str, tuple[Path, str]]:
    """The tokenizer's files by name: where each is, and its sha256.

    Those of the checkpoint, or beside a GGUF file; else what the file itself says.
    """
    checkpoint = stages.checkpoint
    if checkpoint is None:
        return {}
    found: dict[str, tuple[Path, str]] = {}
    if checkpoint.gguf is not None:
        for name, blob in stages.gguf.outputs.items():
            found[name] = (stages.store.path(blob), blob.sha256)
    for name, (sha256, _) in checkpoint.files.items():
        found[name] = (checkpoint.dir / name, sha256)
    return {name: found[name] for name in TOKENIZER_FILES if name in found}
