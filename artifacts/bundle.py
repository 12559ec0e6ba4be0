"""Puts a bundle together: files linked from the cache, and a manifest that names every byte."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from artifacts import buildlog, sbom
from artifacts.disk import explained, hash_file, sync, write_new
from artifacts.fetch import TOKENIZER_FILES
from artifacts.locks import locked
from artifacts.proof import Compiled, compile_and_prove, tolerance
from artifacts.records import Blob
from artifacts.stages import Miss, Stages
from artifacts.tools import versions
from runtime import manifest as manifest_file
from runtime.errors import UserError
from runtime.manifest import UNLISTED, BuildInfo, FileRef, Manifest

PACKAGES = (
    "iree-base-compiler", "iree-base-runtime", "jax", "jaxlib", "ml-dtypes", "numpy", "scanwright",
)  # fmt: skip


def build(stages: Stages, root: Path) -> Path:
    """Make, or leave as it is if it is right, the bundle of the stages' job under `root`."""
    with stages.store.using():
        compiled = compiled_module(stages)
        directory = stages.job.bundle(root)
        if stages.dry:
            if _wrong(stages, compiled, directory) is not None:
                raise Miss(None)
            return directory
        with explained(root):
            root.mkdir(parents=True, exist_ok=True)
        # In the build directory, not in the cache: another build may use another cache.
        with locked(root / ".lock", waiting_for=f"another build that writes into {root}"):
            wrong = _wrong(stages, compiled, directory)
            if wrong is not None:
                if wrong:
                    print(f"{wrong}, writing the bundle again", file=sys.stderr, flush=True)
                elif told := _other(stages, directory):
                    print(told, file=sys.stderr, flush=True)
                replace_whole(directory, partial(_write, stages, compiled))
            stages.log.append_to(directory)
    return directory


def compiled_module(stages: Stages) -> Compiled:
    """The stages' module, compiled and proven on a bundle as it would be built."""
    return compile_and_prove(stages, partial(_write, stages))


def _files(stages: Stages, compiled: Compiled) -> dict[str, Blob]:
    """File name in the bundle → blob."""
    files = {"model.vmfb": compiled.module}
    if stages.convert is not None:
        files["params.irpa"] = stages.convert.outputs["params"]
    if stages.expect is not None:
        files["reference.json"] = stages.expect.outputs["reference.json"]
    for name, (path, _) in stages.tokenizer.items():
        files[name] = stages.store.put_file(path)
    job = stages.job
    made = sbom.document(_model(stages), _build(stages), job.target.name, job.shape.name)
    ref = sbom.reference(made)
    blob = Blob(ref.sha256, ref.size)
    files[sbom.FILE_NAME] = blob if stages.store.verify(blob) else stages.store.put_bytes(made)
    return files


def _build(stages: Stages) -> BuildInfo:
    """What the bundle is made from and by."""
    checkpoint = stages.checkpoint
    used = checkpoint.files if checkpoint else {}
    more = ["ziglang"] if stages.job.kernels else []
    more += ["gguf", "tokenizers"] if checkpoint and checkpoint.gguf else []
    return BuildInfo(
        weights=stages.weights,
        own_weights=stages.job.weights(None) == "auto",
        files=tuple(FileRef(name, *digest) for name, digest in sorted(used.items())),
        packages=tuple(sbom.packages(versions([*PACKAGES, *more]))),
    )


def _model(stages: Stages) -> dict[str, Any]:
    """The manifest's `model`."""
    model, interface = stages.job.model, stages.interface
    return {
        "name": model.name,
        "family": interface["family"],
        "source": model.source,
        "revision": stages.checkpoint.revision if stages.checkpoint else model.revision,
        "license": model.license,
        "config_sha256": stages.config_sha256,
        "vocab_size": interface["vocab_size"],
        "eos_token_ids": interface["eos_token_ids"],
        "bos_token_id": interface["bos_token_id"],
    }


def _target(stages: Stages, compiled: Compiled) -> dict[str, Any]:
    """The manifest's `target`."""
    target = stages.job.target
    return {
        "name": target.name,
        "device": target.device,
        "uri": target.uri,
        "cpu": compiled.cpu.name if compiled.cpu else None,
        "features": list(compiled.cpu.required) if compiled.cpu else [],
        "compiler": compiled.compiler,
        "bytecode_version": compiled.bytecode,
        "flags": list(compiled.flags),
        "kernels": compiled.kernels,
        "recipe": {
            "flags": list(target.flags),
            "safe_flags": [list(flags) for flags in target.safe_flags],
            "weights": list(target.weights),
            "runs_here": target.runs_here,
            "kernels": target.kernels,
        },
    }


def _manifest(stages: Stages, compiled: Compiled, files: dict[str, Blob]) -> Manifest:
    job, interface = stages.job, stages.interface

    def ref(name: str) -> dict[str, Any] | None:
        blob = files.get(name)
        return blob and {"path": name, "sha256": blob.sha256, "size": blob.size}

    content = {
        "schema": manifest_file.SCHEMA,
        "model": _model(stages),
        "target": _target(stages, compiled),
        "shape": {
            "name": job.shape.name,
            "slots": job.shape.slots,
            "chunks": list(job.shape.chunks),
            "context": interface["context"],
        },
        "files": {
            "module": ref("model.vmfb"),
            "params": ref("params.irpa"),
            "reference": ref("reference.json"),
            "tokenizer": [ref(name) for name in TOKENIZER_FILES if name in files],
            "sbom": ref(sbom.FILE_NAME),
            "alternatives": [],
        },
        "functions": interface["functions"],
        "state": interface["state"],
        "params": interface["params"],
        "numerics": interface["numerics"],
        "prefix_sharing": False,
        "proof": {
            "status": compiled.status,
            "reason": compiled.reason,
            "flags": compiled.label,
            "tolerance": tolerance(stages),
        },
        "build": dataclasses.asdict(_build(stages)),
        "alternatives": [],
    }
    return manifest_file.loads(json.dumps(content))


def _write(stages: Stages, compiled: Compiled, out: Path, *, proving: bool = False) -> None:
    """A whole bundle in the new directory `out`, its manifest last.

    For the proof of a weight-free module it gets the made-up parameters it is run with.
    """
    files = _files(stages, compiled)
    if proving and stages.params is not None:
        files["params.irpa"] = stages.params.outputs["params"]
    with explained(out):
        out.mkdir(parents=True)
    for name, blob in files.items():
        stages.store.link(blob, out / name)
    text = manifest_file.dumps(_manifest(stages, compiled, files))
    with explained(out):
        write_new(out / manifest_file.FILE_NAME, text.encode())


def _wrong(stages: Stages, compiled: Compiled, directory: Path) -> str | None:
    """None if the bundle is there and every file of it is the one in the cache, or equal to it.

    Else the damage in words, or "" if no bundle is there or it is one of other inputs.
    """
    files = _files(stages, compiled)
    text = manifest_file.dumps(_manifest(stages, compiled, files))
    path = directory / manifest_file.FILE_NAME
    try:
        found = path.read_text(encoding="utf-8")
        if found != text:
            return "" if _reads(found) else f"{path}: is damaged"
        for name, blob in files.items():
            path = directory / name
            if not _same(stages, blob, path):
                return f"{path}: does not match its sha256"
    except FileNotFoundError:
        return f"{path}: is missing" if directory.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        return f"{path}: cannot be read ({error})"
    return None


def _other(stages: Stages, directory: Path) -> str | None:
    """What to say where the bundle in `directory` is of another model, or has weights to lose."""
    try:
        found = manifest_file.load(directory)
    except UserError:
        return None
    if found.model.config_sha256 != stages.config_sha256:
        return f"{directory}: replaced the bundle of another model ({found.model.family})"
    if found.files.params is not None and not stages.job.params:
        return f"{directory}: replaced a bundle with weights by one without (params=none)"
    return None


def _reads(text: str) -> bool:
    try:
        manifest_file.loads(text)
    except UserError:
        return False
    return True


def _same(stages: Stages, blob: Blob, path: Path) -> bool:
    if path.samefile(stages.store.path(blob)):
        return True
    return path.stat().st_size == blob.size and hash_file(path)[0] == blob.sha256


def replace_whole(directory: Path, write: Callable[[Path], None]) -> None:
    """Put the bundle that `write` makes in a new directory in the place of `directory`; a process
    that has the old one open keeps it.

    At no time is there a bundle that opens and is wrong: the new one is complete before it gets its
    name, and between the two renames there is none. Leftovers of killed builds are swept. The build
    log goes on, and a signature stays where the new manifest is the one that was signed.
    """
    with explained(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
        for left in directory.parent.glob(f".{directory.name}-*"):
            _discard(left)
    new = directory.with_name(f".{directory.name}-new")
    old = directory.with_name(f".{directory.name}-old")
    try:
        write(new)
    except BaseException:
        if new.exists():
            _discard(new)
        raise
    with explained(directory):
        if directory.exists():
            for name in (buildlog.FILE_NAME, *(UNLISTED if _alike(new, directory) else ())):
                if (directory / name).is_file():
                    shutil.copy2(directory / name, new / name)
            directory.rename(old)
        new.rename(directory)
        sync(directory.parent)
        if old.exists():
            _discard(old)


def _alike(one: Path, two: Path) -> bool:
    """Whether two bundles have one manifest, and so the same bytes, or should."""
    path = two / manifest_file.FILE_NAME
    return path.is_file() and path.read_bytes() == (one / manifest_file.FILE_NAME).read_bytes()


def _discard(directory: Path) -> None:
    """Remove a bundle, its manifest first, so that what a kill leaves of it does not open."""
    (directory / manifest_file.FILE_NAME).unlink(missing_ok=True)
    shutil.rmtree(directory)
