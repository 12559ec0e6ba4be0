"""The perplexity of a quantised bundle's source: the same checkpoint before it was rounded."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from artifacts import process
from artifacts.actions import Action
from artifacts.process import ROOT
from artifacts.records import Blob
from artifacts.sources import source_digest
from artifacts.tools import versions

if TYPE_CHECKING:
    from artifacts.stages import Stages

LENGTH = 64  # tokens of a row, where the context has room for them; as in runtime.perplexity
MOST_BYTES = 8 << 30  # of the checkpoint's files: its numbers are written out, and read 63 times
TEXT = ROOT / "runtime" / "perplexity.txt"


def source_perplexity(stages: Stages) -> Blob | None:
    """`perplexity.json`, that part of reference.json; None for a bundle of float weights, for a
    context of one token, and where the source would take more than MOST_BYTES to be read.

    It depends on the checkpoint alone, so shapes, targets and integer types share it.
    """
    checkpoint = stages.checkpoint
    if stages.storage is None or checkpoint is None:
        return None
    length = min(LENGTH, stages.interface["context"] or LENGTH)
    if length < 2 or sum(checkpoint.files[n][1] for n in stages.weight_files()) > MOST_BYTES:
        return None
    fields = {
        "files": stages.weight_files(),
        "tokenizer": {name: sha256 for name, (_, sha256) in stages.tokenizer.items()},
        "text": hashlib.sha256(TEXT.read_bytes()).hexdigest(),
        "length": length,
        "source": stages.sources("emit.__main__", "emit.perplexity"),
        "rows": source_digest(["runtime.perplexity"]),
        "tools": versions(["jax", "jaxlib", "numpy", "ml-dtypes", "tokenizers", *stages.readers()]),
    }

    def produce(scratch: Path) -> dict[str, Path]:
        rows, out, given = scratch / "rows.json", scratch / "out", scratch / "tokenizer"
        given.mkdir()
        for name, (path, _) in stages.tokenizer.items():
            stages.store.link(stages.store.put_file(path), given / name)
        arguments = [given, "--vocab", str(stages.interface["vocab_size"])]
        arguments += ["--length", str(length), "--out", rows]
        stages.log.add(process.run_module("runtime.perplexity", arguments, scratch))
        arguments = ["perplexity", checkpoint.place, "--rows", rows, "--out", out]
        stages.log.add(process.run_module("emit", arguments, scratch, progress=True))
        return {"perplexity": out / "perplexity.json"}

    with stages.log.stage("perplexity"):
        result = stages.run_action(Action("perplexity", fields, stages.job.about), produce)
        stages.log.result("perplexity", result)
    return result.outputs["perplexity"]


def part(stages: Stages, blob: Blob | None) -> dict[str, object]:
    """What reference.json holds of it."""
    if blob is None:
        return {}
    return {"perplexity": json.loads(stages.store.path(blob).read_text(encoding="utf-8"))}
