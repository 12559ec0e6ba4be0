"""One bundle for several targets: their modules over one params file, reference and tokenizer.

The targets are in order of their names, so that the order in which they were asked for changes
nothing. What the bundles must share is compared file by file and key by key.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from artifacts import sbom
from artifacts.bundle import replace_whole
from artifacts.disk import explained, hash_file, write_new
from artifacts.job import Job
from artifacts.locks import locked
from artifacts.stages import FLOATS
from runtime import manifest as manifest_file
from runtime.errors import UserError
from runtime.manifest import Alternative, BuildInfo, FileRef, Manifest

_SHARED = ("model", "shape", "functions", "state", "params", "numerics", "prefix_sharing")
_ADVICE = (
    "expected one params file for both; name a type that both have with weights=, such as"
    " weights=f32, or build two bundles"
)
_SHARED_FILES = ("params", "reference", "tokenizer")


def place(build: Path, model: str, targets: Sequence[str], shape: str) -> Path:
    """Where the bundle for these targets goes: build/MODEL/TARGET+TARGET/SHAPE."""
    return build / model / "+".join(sorted(targets)) / shape


def check_jobs(jobs: Sequence[Job]) -> None:
    """Raise UserError if it is plain before any work that the targets cannot share parameters."""
    first, kind = jobs[0], jobs[0].weights(None)
    for other in jobs[1:]:
        about = f"targets {first.target.name} and {other.target.name}: weights stored as"
        if (found := other.weights(None)) != kind:
            raise UserError(f"{about} {kind} and as {found}, {_ADVICE}")
        floats = [[w for w in FLOATS if w in job.target.weights] for job in (first, other)]
        if kind not in ("auto", *FLOATS) and floats[0] != floats[1]:
            raise UserError(f"{about} {kind} with scales of different types, {_ADVICE}")


def merge(bundles: Sequence[Path], build: Path) -> Path:
    """Make, or leave as it is if it is right, the bundle of all these; its directory.

    Raises UserError if they are not of one model, shape and storage of weights.
    """
    parts = sorted(((manifest_file.load(b), b) for b in bundles), key=lambda p: p[0].target.name)
    manifests = [manifest for manifest, _ in parts]
    for other in manifests[1:]:
        check_agree(manifests[0], other)
    made, document = _merged(manifests)
    sources = _sources(parts, made)
    names = [target.name for target in made.targets]
    directory = place(build, made.model.name, names, made.shape.name)
    with locked(build / ".lock", waiting_for=f"another build that writes into {build}"):
        if not _right(directory, made, sources):
            replace_whole(directory, partial(_write, made, sources, document))
    return directory


def check_agree(one: Manifest, two: Manifest) -> None:
    """Raise UserError unless two bundles can share their parameters."""
    about = f"{one.target.name} and {two.target.name}"
    stored = [m.numerics.quantization or m.numerics.weights for m in (one, two)]
    if stored[0] != stored[1] or [p.dtype for p in one.params] != [p.dtype for p in two.params]:
        raise UserError(
            f"targets {about}: weights stored as {stored[0]} and as {stored[1]}, {_ADVICE}"
        )
    for key in _SHARED:
        if getattr(one, key) != getattr(two, key):
            raise UserError(
                f"targets {about}: manifest.json: {key} differs, expected bundles of one model and"
                " shape; build them together: doit build model=… target=A,B"
            )
    for key in _SHARED_FILES:
        if getattr(one.files, key) != getattr(two.files, key):
            raise UserError(
                f"targets {about}: files.{key} differs, expected one for both; build them"
                " together: doit build model=… target=A,B"
            )


def _merged(manifests: Sequence[Manifest]) -> tuple[Manifest, bytes]:
    """The manifest of all, and the text of its sbom.cdx.json."""
    first = manifests[0]
    build = _builds(manifests)
    names = ", ".join(m.target.name for m in manifests)
    model = dataclasses.asdict(first.model)
    document = b"" if build is None else sbom.document(model, build, names, first.shape.name)
    modules = [dataclasses.replace(m.files.module, path=_file(m)) for m in manifests]
    files = dataclasses.replace(
        first.files,
        module=modules[0],
        alternatives=tuple(modules[1:]),
        sbom=sbom.reference(document) if document else None,
    )
    others = tuple(Alternative(m.target, m.proof) for m in manifests[1:])
    made = dataclasses.replace(first, files=files, build=build, alternatives=others)
    return made, document


def _file(manifest: Manifest) -> str:
    return f"model.{manifest.target.name}.vmfb"


def _builds(manifests: Sequence[Manifest]) -> BuildInfo | None:
    """What all were made by. Raises UserError if they were made by different versions."""
    builds = [m.build for m in manifests if m.build is not None]
    if len(builds) != len(manifests):
        return None
    found: dict[str, str] = {}
    for package in (package for build in builds for package in build.packages):
        if found.setdefault(package.name, package.version) != package.version:
            raise UserError(
                f"targets {', '.join(m.target.name for m in manifests)}: build.packages:"
                f" {package.name} {found[package.name]} and {package.version}, expected one version"
                " for all; build them together: doit build model=… target=A,B"
            )
    packages = tuple(sbom.packages(found))
    return dataclasses.replace(builds[0], packages=packages)


def _sources(parts: Sequence[tuple[Manifest, Path]], made: Manifest) -> dict[str, Path]:
    """Name in the merged bundle → a file of the single ones."""
    first, directory = parts[0]
    found = {ref.path: directory / ref.path for ref in _common(first)}
    for ref, (manifest, place) in zip(made.modules, parts, strict=True):
        found[ref.path] = place / manifest.files.module.path
    return found


def _common(manifest: Manifest) -> list[FileRef]:
    single = [ref for ref in (manifest.files.params, manifest.files.reference) if ref is not None]
    return [*single, *manifest.files.tokenizer]


def _right(directory: Path, made: Manifest, sources: dict[str, Path]) -> bool:
    """Whether the bundle is there, each file the one it was linked to, or equal to it."""
    try:
        path = directory / manifest_file.FILE_NAME
        if path.read_text(encoding="utf-8") != manifest_file.dumps(made):
            return False
        return all(_same(directory / ref.path, ref, sources) for ref in made.files.all())
    except (OSError, UnicodeDecodeError):
        return False


def _same(path: Path, ref: FileRef, sources: dict[str, Path]) -> bool:
    if ref.path in sources and path.samefile(sources[ref.path]):
        return True
    return hash_file(path) == (ref.sha256, ref.size)


def _write(made: Manifest, sources: dict[str, Path], document: bytes, out: Path) -> None:
    """The bundle in the new directory `out`, its manifest last."""
    with explained(out):
        out.mkdir(parents=True)
        for name, source in sources.items():
            _link(source, out / name)
        if document:
            write_new(out / sbom.FILE_NAME, document)
        write_new(out / manifest_file.FILE_NAME, manifest_file.dumps(made).encode())


def _link(source: Path, dest: Path) -> Any:
    """The same file under another name, or a copy where the disk has no links."""
    try:
        os.link(source, dest)
    except OSError:
        shutil.copyfile(source, dest)
