"""doit reproduce: make a bundle again from its manifest alone, and compare every file.

The manifest names the checkpoint's files with their digests, the commit, the type of the weights,
the target's recipe, the CPU and the versions of the packages. It does not say where a checkpoint
directory lies on this machine: a recipe of the model's name does, or the word model=.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artifacts import bundle as bundles
from artifacts import merge
from artifacts.buildlog import BuildLog
from artifacts.cpu import Cpu
from artifacts.disk import explained, hash_file
from artifacts.fetch import CONFIG
from artifacts.job import Job, Model
from artifacts.lockfile import Lock, is_commit
from artifacts.stages import Stages
from artifacts.store import Store, default_root
from artifacts.tools import versions
from runtime import manifest as manifest_file
from runtime.errors import UserError
from runtime.manifest import BuildInfo, Manifest, RecipeInfo, TargetInfo

_HUB_SOURCE = re.compile(r"hf:[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_URIS = ("local-task", "local-sync", "cuda", "vulkan", "metal", "hip")
_CPU_FLAGS = {
    "--iree-llvmcpu-target-triple": "triple",
    "--iree-llvmcpu-target-cpu": "name",
    "--iree-llvmcpu-target-cpu-features": "features",
}
_NAME = re.compile(r"(?!\.)[^/\\\0-\x1f]{1,200}")


@dataclass(frozen=True)
class PinnedModel:
    """A model as a manifest has it; see artifacts.job.Model."""

    name: str
    source: str
    location: str
    revision: str | None
    lock: Path
    config: Mapping[str, Any] | None
    license: str | None


@dataclass(frozen=True)
class PinnedTarget:
    """A target as a manifest has it; see artifacts.job.Target."""

    name: str
    device: str
    uri: str
    flags: tuple[str, ...]
    safe_flags: tuple[tuple[str, ...], ...]
    weights: tuple[str, ...]
    runs_here: str
    cpu: str | None
    triple: str | None
    kernels: bool


@dataclass(frozen=True)
class Compared:
    """One file: whether it came out the same, and what to say of it."""

    name: str
    same: bool
    detail: str

    def __str__(self) -> str:
        return f"{'same   ' if self.same else 'DIFFERS'} {self.name:<28} {self.detail}"


def reproduce(bundle: Path, find_model: Callable[[str], Model]) -> Iterator[Compared]:
    """Build what `bundle`'s manifest says in a cache of its own, then a line for each file.

    `find_model` gives the model of a name where the manifest does not say where the files are.
    Raises UserError: other versions than the bundle's are installed, the model's files are not
    those it was made from, or the build fails.
    """
    manifest = checked(bundle)
    store = Store(default_root())
    with store.using(), store.scratch() as root:
        yield from compare(bundle, manifest, _again(manifest, find_model, root))


def checked(bundle: Path) -> Manifest:
    """The manifest of a bundle that may be made again here. Raises UserError."""
    manifest = manifest_file.load(bundle)
    if manifest.build is None or any(t.recipe is None for t in manifest.targets):
        raise UserError(
            f"{bundle}/manifest.json: build: null, or target.recipe is: the bundle was made by"
            " hand, expected one of doit build"
        )
    check_words(bundle, manifest)
    check_versions(bundle, manifest.build)
    return manifest


def check_words(bundle: Path, manifest: Manifest) -> None:
    """Raise UserError for words that would name a place outside, or another kind of place."""
    info = manifest.model
    names = (info.name, manifest.shape.name, *(target.name for target in manifest.targets))
    for name in names:
        if not _NAME.fullmatch(name):
            raise UserError(f"{bundle}/manifest.json: found the name {name[:80]!a} of a model,"
                            " target or shape, expected a plain file name")  # fmt: skip
    for target in manifest.targets:
        if target.uri not in _URIS:
            raise UserError(
                f"{bundle}/manifest.json: {target.name}: found the uri {target.uri[:80]!a},"
                f" expected one of {', '.join(_URIS)}"
            )
    if info.source.startswith("hf:") and not (
        _HUB_SOURCE.fullmatch(info.source) and (info.revision is None or is_commit(info.revision))
    ):
        raise UserError(f"{bundle}/manifest.json: model.source {info.source[:80]!a}: expected"
                        " hf:org/name, and a commit as model.revision")  # fmt: skip


def check_versions(bundle: Path, build: BuildInfo) -> None:
    """Raise UserError unless the packages that made the bundle are installed in its versions."""
    found = versions(package.name for package in build.packages)
    wrong = [p for p in build.packages if found[p.name] != p.version]
    if wrong:
        first = wrong[0]
        words = " ".join(f"{p.name}=={p.version}" for p in wrong)
        raise UserError(
            f"{bundle}/manifest.json: build.packages: {first.name} {first.version}, found"
            f" {found[first.name]} here, expected the versions it was made by: pip install {words}"
        )


def _again(manifest: Manifest, find_model: Callable[[str], Model], root: Path) -> Path:
    """Build the bundle under `root`; the bundle's directory."""
    assert manifest.build is not None
    store = Store(root / "cache")
    if manifest.files.params is not None:
        _share_downloads(store)
    model = _model(manifest, find_model, root)
    made = []
    for target, proof in zip(manifest.targets, manifest.proofs, strict=True):
        job = Job(
            model=model,
            target=_target(target),
            shape=manifest.shape,
            weights=_chooser(manifest.build),
            params=manifest.files.params is not None,
            proof=proof.status != "disabled",
            kernels=_recipe(target).kernels,
            cpu=_cpu(target),
        )
        stages = Stages(store, job, BuildLog())
        _check_inputs(manifest, manifest.build, stages)
        made.append(bundles.build(stages, root / "build"))
    return made[0] if len(made) == 1 else merge.merge(made, root / "build")


def _share_downloads(store: Store) -> None:
    """What the hub gave once, whose digests are checked at every use, is not downloaded again."""
    downloads = default_root() / "hub"
    if downloads.is_dir():
        hub = store.root / "hub"
        with explained(hub):
            if hub.is_dir():
                hub.rmdir()
            hub.symlink_to(downloads.resolve(), target_is_directory=True)


def _model(manifest: Manifest, find_model: Callable[[str], Model], root: Path) -> PinnedModel:
    """The model with a lock of the manifest's own, and where its files are."""
    info, build = manifest.model, manifest.build
    assert build is not None
    lock = root / "lock.json"
    config: Mapping[str, Any] | None = None
    location = info.source
    if info.source.startswith("hf:") and build.files and info.revision is not None:
        files = {ref.path: (ref.sha256, ref.size) for ref in build.files}
        Lock(info.source, info.revision, info.revision, files).save(lock)
    else:
        found = find_model(info.name)
        location, config = found.location, None if build.files else found.config
    return PinnedModel(
        name=info.name,
        source=info.source,
        location=location,
        revision=info.revision,
        lock=lock,
        config=config,
        license=info.license,
    )


def _check_inputs(manifest: Manifest, build: BuildInfo, stages: Stages) -> None:
    """Raise UserError unless the checkpoint here is the one that the bundle was made from."""
    here = stages.checkpoint.files if stages.checkpoint else {}
    for ref in build.files:
        if here.get(ref.path) != (ref.sha256, ref.size):
            found = f"sha256 {here[ref.path][0][:12]}…" if ref.path in here else "no such file"
            raise UserError(
                f"{stages.job.model.location}: {ref.path}: {found}, expected"
                f" {ref.sha256[:12]}… of the bundle's build.files: name the checkpoint it was made"
                " from with model=DIR"
            )
    if more := sorted(here.keys() - {ref.path for ref in build.files}):
        raise UserError(
            f"{stages.job.model.location}: {more[0]}: not one of the bundle's build.files: name"
            " the checkpoint it was made from with model=DIR"
        )
    if stages.config_sha256 != manifest.model.config_sha256:
        raise UserError(
            f"{manifest.model.name}: {CONFIG}: sha256 {stages.config_sha256[:12]}…, expected"
            f" {manifest.model.config_sha256[:12]}…: the recipe is another now; name the one that"
            " the bundle was made by with model=YAML"
        )


def _recipe(target: TargetInfo) -> RecipeInfo:
    assert target.recipe is not None
    return target.recipe


def _target(target: TargetInfo) -> PinnedTarget:
    recipe = _recipe(target)
    return PinnedTarget(
        name=target.name,
        device=target.device,
        uri=target.uri,
        flags=recipe.flags,
        safe_flags=recipe.safe_flags,
        weights=recipe.weights,
        runs_here=recipe.runs_here,
        cpu=target.cpu,
        triple=_cpu_words(target).get("triple"),
        kernels=recipe.kernels,
    )


def _cpu_words(target: TargetInfo) -> dict[str, str]:
    pairs = (flag.partition("=") for flag in target.flags)
    return {_CPU_FLAGS[name]: value for name, _, value in pairs if name in _CPU_FLAGS}


def _cpu(target: TargetInfo) -> Cpu | None:
    """The CPU that the module was compiled for, whichever this machine has."""
    words = _cpu_words(target)
    if "name" not in words:
        return None
    features = words.get("features", "")
    return Cpu(
        name=words["name"],
        triple=words["triple"],
        features=tuple(filter(None, features.split(","))),
        required=target.features,
    )


def _chooser(build: BuildInfo) -> Callable[[str | None], str]:
    """See artifacts.job.Job.weights."""
    return lambda own: "auto" if own is None and build.own_weights else build.weights


def compare(bundle: Path, manifest: Manifest, made: Path) -> Iterator[Compared]:
    """A line for each file of the bundle or of the one that was made, the manifest last."""
    again = manifest_file.load(made)
    wanted = {ref.path: ref for ref in manifest.files.all()}
    found = {ref.path: ref for ref in again.files.all()}
    for name in dict.fromkeys([*wanted, *found]):
        yield _compared(bundle, name, found[name].sha256 if name in found else None)
    text = (bundle / manifest_file.FILE_NAME).read_bytes()
    other = (made / manifest_file.FILE_NAME).read_bytes()
    detail = f"bundle digest {manifest.digest}"
    if text != other:
        detail = _first_difference(json.loads(text), json.loads(other), "") or "another form"
    yield Compared(manifest_file.FILE_NAME, text == other, detail)


def _compared(bundle: Path, name: str, sha256: str | None) -> Compared:
    try:
        digest, size = hash_file(bundle / name)
    except OSError as error:
        return Compared(name, False, f"cannot be read in the bundle ({error.strerror})")
    if sha256 is None:
        return Compared(name, False, "was not made")
    if digest == sha256:
        return Compared(name, True, f"{size:,} bytes, sha256 {digest[:16]}…")
    return Compared(name, False, f"sha256 {digest[:16]}… in the bundle, made {sha256[:16]}…")


def _first_difference(one: Any, two: Any, where: str) -> str | None:
    """The first key under which two JSON values differ, with both values; digests come last."""
    if isinstance(one, dict) and isinstance(two, dict):
        keys = sorted({*one, *two}, key=lambda key: (key == "files", key))
        parts = [(one.get(k), two.get(k), f"{where}.{k}".lstrip(".")) for k in keys]
    elif isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        parts = [(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(one, two, strict=True))]
    else:
        shown = [json.dumps(value)[:60] for value in (one, two)]
        return None if one == two else f"{where}: {shown[0]} in the bundle, made {shown[1]}"
    return next(filter(None, (_first_difference(*part) for part in parts)), None)
