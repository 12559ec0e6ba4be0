"""Puts a bundle where it is wanted: whole, or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from runtime import manifest as mf
from runtime.blobs import locked
from runtime.errors import UserError

UNLISTED = mf.UNLISTED
MAX_UNLISTED = 1 << 20  # bytes


def check_destination(directory: Path) -> None:
    """Raise UserError unless `directory` is free, empty or a bundle that may be replaced."""
    if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
        raise UserError(f"{directory}: not a directory, expected a new directory or a bundle")
    if directory.is_dir() and directory.samefile("."):
        raise UserError(f"{directory}: the working directory, expected another one to replace")
    if directory.is_dir() and any(directory.iterdir()) and not _is_bundle(directory):
        raise UserError(
            f"{directory}: holds files and no {mf.FILE_NAME}, expected a new directory or a bundle"
            " to replace; name another one"
        )


def _is_bundle(directory: Path) -> bool:
    return (directory / mf.FILE_NAME).is_file()


@contextlib.contextmanager
def alone(directory: Path, locks: Path) -> Iterator[None]:
    """Be the only process that writes `directory`; lock files are in `locks`."""
    name = hashlib.sha256(os.fsencode(directory.absolute())).hexdigest()[:32]
    with locked(locks / f"{name}.place"):
        yield


def place(
    directory: Path,
    manifest: mf.Manifest,
    text: bytes,
    unlisted: Mapping[str, bytes],
    put: Callable[[mf.FileRef, Path], None],
) -> None:
    """Make the bundle `directory` of `text`, the manifest's bytes, and files written by `put`.

    It is made beside it, and takes its name when it is whole and on the disk. A bundle that was
    there is replaced; whoever has its files open keeps them.
    """
    check_destination(directory)
    directory = directory.absolute()
    directory.parent.mkdir(parents=True, exist_ok=True)
    new = directory.with_name(f".{directory.name}-new")
    old = directory.with_name(f".{directory.name}-old")
    for left in (new, old):
        _discard(left)
    try:
        _fill(new, manifest, text, unlisted, put)
        if directory.exists():
            directory.rename(old)
        new.rename(directory)
    except BaseException:
        if old.exists() and not directory.exists():
            old.rename(directory)
        _discard(new)
        raise
    _sync(directory.parent)
    _discard(old)


def _fill(
    new: Path,
    manifest: mf.Manifest,
    text: bytes,
    unlisted: Mapping[str, bytes],
    put: Callable[[mf.FileRef, Path], None],
) -> None:
    new.mkdir()
    folders = {new}
    for ref in manifest.files.all():
        dest = new / ref.path
        for folder in reversed(dest.relative_to(new).parents[:-1]):
            (new / folder).mkdir(exist_ok=True)
            folders.add(new / folder)
        put(ref, dest)
    for name, data in {**unlisted, mf.FILE_NAME: text}.items():
        _write(new / name, data)
    for folder in folders:
        _sync(folder)


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    path.chmod(0o444)


def _discard(directory: Path) -> None:
    """Remove a bundle, its manifest first, so that what a kill leaves of it does not open."""
    if directory.is_dir() and not directory.is_symlink():
        (directory / mf.FILE_NAME).unlink(missing_ok=True)
        shutil.rmtree(directory)


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
