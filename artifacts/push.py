"""`doit push` and `doit pack`: a bundle, checked, to a registry, hub, bucket, directory or file.

Whatever the place, manifest.json comes last or all comes at once, so that what is half there is no
bundle to anyone who pulls.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from artifacts.disk import explained
from runtime import manifest as manifest_file
from runtime.blobs import Blobs, default_root, wrong
from runtime.errors import UserError
from runtime.manifest import FileRef, Manifest
from runtime.pack import pack as write_tar
from runtime.place import MAX_UNLISTED, UNLISTED, alone, place
from runtime.progress import progress, shown

_PIECE = 1 << 20
PLACES = "oci://HOST/NAME:TAG, hf://ORG/NAME, s3://BUCKET/PATH or a directory"


def push(bundle: Path, to: str | None, plain: bool = False) -> str:
    """Bring the bundle to the place `to`; says where it is and how to pin it.

    plain: http to another machine is allowed. Raises UserError: a file is not what the manifest
    says, or the place refuses.
    """
    if not to:
        raise UserError(f"to=: found nothing, expected {PLACES}")
    manifest = manifest_file.load(bundle)
    _check(bundle, manifest)
    scheme = to.partition("://")[0] if "://" in to else ""
    pushers: dict[str, Callable[[], str]] = {
        "oci": lambda: _oci(bundle, manifest, to, plain),
        "hf": lambda: _hub(bundle, manifest, to),
        "s3": lambda: _s3(bundle, manifest, to),
        "": lambda: _directory(bundle, manifest, Path(to)),
    }
    if scheme not in pushers:
        raise UserError(f"to={to}: no such kind of place, expected {PLACES}")
    return f"pushed: {pushers[scheme]()}\nmanifest.json: sha256 {_digest(bundle)}"


def pack(bundle: Path, to: str | None) -> str:
    """Write the bundle to the tar file `to`; says its digest. Raises UserError."""
    if not to or "://" in to:
        raise UserError(f"to={to or ''}: expected the name of a tar file to make")
    with explained(Path(to)):
        digest = write_tar(bundle, Path(to))
    return f"packed: {to}\nsha256 {digest}"


def names(bundle: Path, manifest: Manifest) -> list[str]:
    """All files of a bundle, manifest.json last."""
    listed = sorted(ref.path for ref in manifest.files.all())
    unlisted = [n for n in UNLISTED if n not in listed and (bundle / n).is_file()]
    return [*listed, *unlisted, manifest_file.FILE_NAME]


def _check(bundle: Path, manifest: Manifest) -> None:
    for ref in manifest.files.all():
        path = bundle / ref.path
        if not path.is_file():
            raise UserError(f"{path}: missing, expected {ref.size} bytes; {manifest.rebuild}")
        with explained(path):
            problem = wrong(ref, path)
        if problem is not None:
            raise UserError(f"{path}: {problem}; {manifest.rebuild}")
    for name in UNLISTED:
        if (bundle / name).is_file() and (bundle / name).stat().st_size > MAX_UNLISTED:
            raise UserError(f"{bundle / name}: more than {MAX_UNLISTED} bytes, expected few")


def _digest(bundle: Path) -> str:
    from artifacts.disk import hash_file

    return hash_file(bundle / manifest_file.FILE_NAME)[0]


def _oci(bundle: Path, manifest: Manifest, to: str, plain: bool) -> str:
    from artifacts.push_oci import push_oci

    return push_oci(bundle, manifest, names(bundle, manifest), to, plain)


def _hub(bundle: Path, manifest: Manifest, to: str) -> str:
    from artifacts.push_hub import push_hub

    return push_hub(bundle, names(bundle, manifest), to)


def _s3(bundle: Path, manifest: Manifest, to: str) -> str:
    from runtime.s3 import explained as told
    from runtime.s3 import filesystem, prefix, put_file

    below, files = prefix(to), filesystem(to)
    for name in names(bundle, manifest):
        with progress(f"upload {name}", (bundle / name).stat().st_size) as far:
            try:
                put_file(files, bundle / name, f"{below}/{name}", far.reach)
            except Exception as error:
                raise told(f"{to.rstrip('/')}/{name}", error) from error
    return to


def _directory(bundle: Path, manifest: Manifest, directory: Path) -> str:
    def put(ref: FileRef, dest: Path) -> None:
        with shown(f"copy {ref.path}", bundle / ref.path) as file, dest.open("xb") as out:
            shutil.copyfileobj(file, out, _PIECE)
        dest.chmod(0o444)
        if problem := wrong(ref, dest):
            raise UserError(f"{dest}: {problem} after copying; check both disks")

    if directory.exists() and bundle.samefile(directory):
        raise UserError(f"to={directory}: the bundle itself, expected another directory")
    unlisted = {n: (bundle / n).read_bytes() for n in UNLISTED if (bundle / n).is_file()}
    text = (bundle / manifest_file.FILE_NAME).read_bytes()
    with explained(directory), alone(directory, Blobs(default_root()).root / "partial"):
        place(directory, manifest, text, unlisted, put)
    return str(directory)
