"""What a failed compile leaves: its input, its command and the first error, to run it once more.

`<cache>/failed/<digest>/` holds model.mlir, the kernels' object if there is one, compiler.log,
error.txt and reproduce.sh, which runs the same command there. The last few are kept.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

KEPT = 8
SCRIPT = "reproduce.sh"


def keep(
    root: Path,
    work: Path,
    inputs: Sequence[str],
    command: Sequence[str],
    said: str,
    first: str,
    environment: Mapping[str, str],
) -> Path:
    """Keep the files `inputs` of `work` and the rest under `root`; returns the directory.

    command: as it ran in `work`; environment: all the variables it is to have.
    said, first: all that it wrote, and the first error. OSError if nothing can be written.
    """
    digest = hashlib.sha256(shlex.join(command).encode())
    for name in inputs:
        digest.update((work / name).read_bytes())
    place = root / digest.hexdigest()[:12]
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name in inputs:
        shutil.copyfile(work / name, place / name)
    (place / "compiler.log").write_text(said, encoding="utf-8")
    (place / "error.txt").write_text(first + "\n", encoding="utf-8")
    (place / SCRIPT).write_text(script(command, environment), encoding="utf-8")
    os.utime(place)
    _forget(root)
    return place


def script(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """A shell script that runs `command` where it lies itself, with nothing but `environment`."""
    words = [f"{name}={value}" for name, value in sorted(environment.items())]
    lines = ["#!/bin/sh", 'cd "$(dirname "$0")" || exit']
    return "\n".join([*lines, f"exec {shlex.join(['env', '-i', *words, *command])}\n"])


def reproduce(place: Path) -> str:
    """The one line that runs it again, from anywhere."""
    return shlex.join(["sh", str(place.absolute() / SCRIPT)])


def _forget(root: Path) -> None:
    """Remove all but the last `KEPT`."""
    places = sorted(root.iterdir(), key=lambda path: path.lstat().st_mtime_ns, reverse=True)
    for place in places[KEPT:]:
        shutil.rmtree(place, ignore_errors=True)
