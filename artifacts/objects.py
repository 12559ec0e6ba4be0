"""The objects of the C kernels that modules for CPUs are linked with, one a CPU level."""

from __future__ import annotations

import hashlib
from pathlib import Path

from artifacts import process
from artifacts.actions import Action
from artifacts.cpu import Cpu
from artifacts.pace import Paced
from artifacts.process import ROOT
from artifacts.records import Blob
from artifacts.sources import source_digest
from artifacts.stages import Stages
from artifacts.tools import versions

FOLDER = ROOT / "emit" / "kernels"
SUFFIXES = (".c", ".h", ".inc")
# The widest level first, with the /proc/cpuinfo names of what its code uses.
AVX512 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "fma", "f16c"})
LEVELS: dict[str, tuple[str, frozenset[str]]] = {
    "x86-64-v4-vnni": ("x86_64", AVX512 | {"avx512_vnni"}),
    "x86-64-v4": ("x86_64", AVX512),
    "x86-64-v3": ("x86_64", frozenset({"avx2", "bmi1", "bmi2", "fma", "f16c", "movbe", "abm"})),
    "aarch64": ("aarch64", frozenset()),
}


def level(cpu: Cpu) -> str | None:
    """The widest level of kernels that every CPU like `cpu` runs; None if there is none."""
    has = {feature.removeprefix("+") for feature in cpu.required}
    architecture = cpu.triple.partition("-")[0]
    for name, (family, needed) in LEVELS.items():
        if family == architecture and needed <= has:
            return name
    return None


def objects(stages: Stages, name: str) -> Blob:
    """The object of all kernels for the level `name`."""
    digest = hashlib.sha256()
    sources = sorted(path for path in FOLDER.iterdir() if path.suffix in SUFFIXES)
    for path in sources:
        digest.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    fields = {
        "level": name,
        "sources": digest.hexdigest(),
        "source": source_digest(["emit.kernels.objects"]),
        "tools": versions(["ziglang"]),
    }

    def produce(scratch: Path) -> dict[str, Path]:
        out = scratch / "out"
        size = sum(path.stat().st_size for path in sources)
        arguments: list[str | Path] = ["objects", "--level", name, "--out", out]
        with Paced(stages.store.root, f"kernels {name}", size, "kernels") as paced:
            stages.log.add(process.run_module("emit", arguments, scratch, tick=paced.tick))
        return {"kernels.o": out / "kernels.o"}

    action = Action("objects", fields, stages.job.about)
    with stages.log.stage("objects"):
        result = stages.run_action(action, produce)
        stages.log.result("objects", result)
    return result.outputs["kernels.o"]
