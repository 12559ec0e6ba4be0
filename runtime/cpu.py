"""Whether this processor has the features a module was compiled for, before any code is loaded."""

from __future__ import annotations

from pathlib import Path

from runtime.errors import UserError
from runtime.manifest import Manifest


def host_flags(cpuinfo: str) -> set[str] | None:
    """The first processor's feature words in the text of /proc/cpuinfo; None if it lists none."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):  # x86, Arm
            return set(value.split())
    return None


def check(manifest: Manifest, cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """Raise UserError if a module for a CPU needs features this one lacks.

    `target.features` are "+" and the word of /proc/cpuinfo. Systems without that file are not
    checked.
    """
    if manifest.target.device != "local" or not cpuinfo.exists():
        return
    flags = host_flags(cpuinfo.read_text(errors="replace"))
    if flags is None:
        return
    wanted = {feature.removeprefix("+") for feature in manifest.target.features}
    if lacks := sorted(wanted - flags):
        raise UserError(
            f"manifest.json: target.features: this CPU lacks {', '.join(lacks)}, which the module"
            f" for target {manifest.target.name} uses; build one for this machine:"
            f" doit build model={manifest.model.name} target=cpu"
        )
