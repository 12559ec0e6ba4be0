"""Durable file writes, hashing, and disk errors told in one line."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from runtime.errors import UserError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_CHUNK = 1 << 20
# Bytes free on a disk that a failed program is taken to have filled: it may have removed a file.
_FULL_BELOW = 2 << 20


def is_full(error: OSError) -> bool:
    """True if `error` says that a disk, a quota or a file size limit is exhausted."""
    return error.errno in _FULL


def user_error(error: OSError, path: Path, need: int | None = None) -> UserError:
    """`error` as one line that names `path`, the bytes needed and free, and what to do."""
    why = error.strerror or type(error).__name__
    if is_full(error):
        facts = [why]
        if need is not None:
            facts.append(f"{need} bytes needed")
        free = _free_bytes(path)
        if free is not None:
            facts.append(f"{free} bytes free")
        return UserError(
            f"{path}: no space to write ({', '.join(facts)}); free some space, run `doit gc`, "
            "or set SCANWRIGHT_CACHE to a directory on another disk"
        )
    if error.errno in _DENIED:
        return UserError(
            f"{path}: cannot be read or written ({why}); fix its permissions or set "
            "SCANWRIGHT_CACHE to a directory you can write"
        )
    if error.errno in {errno.ENOTDIR, errno.EEXIST}:
        return UserError(
            f"{path}: not a directory ({why}), expected a directory; move the file away or set "
            "SCANWRIGHT_CACHE to a directory"
        )
    return UserError(f"{path}: {why}; check that the file and its disk are there and try again")


def _free_bytes(path: Path) -> int | None:
    for place in (path, *path.parents):
        with contextlib.suppress(OSError):
            stats = os.statvfs(place)
            return stats.f_bavail * stats.f_frsize
    return None


def no_space(path: Path, output: str) -> UserError | None:
    """What to say if a program failed because the disk of `path` is full, else None.

    `output` is what it said; with no space left it may not have been able to say a thing.
    """
    free = _free_bytes(path)
    for code in _FULL:
        if os.strerror(code) in output:
            return user_error(OSError(code, os.strerror(code)), path)
    if free is not None and free < _FULL_BELOW:
        return user_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), path)
    return None


@contextlib.contextmanager
def explained(path: Path, need: int | None = None) -> Iterator[None]:
    """Turn an OSError of the block into a UserError about `path` (`need`: bytes to be written)."""
    try:
        yield
    except OSError as error:
        raise user_error(error, path, need) from error


def sync(path: Path) -> None:
    """fsync a file or a directory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def hash_file(path: Path) -> tuple[str, int]:
    """(sha256 hex, size in bytes) of the bytes read from `path`."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as source:
        while piece := source.read(_CHUNK):
            digest.update(piece)
            size += len(piece)
    return digest.hexdigest(), size


def copy_hashed(source: Path, dest: Path) -> tuple[str, int]:
    """Copy to the new file `dest`, fsynced; returns (sha256 hex, size). `dest` goes on failure."""
    digest, size = hashlib.sha256(), 0
    try:
        with source.open("rb", buffering=0) as reader, dest.open("xb", buffering=0) as writer:
            while piece := reader.read(_CHUNK):
                _write_all(writer.fileno(), piece)
                digest.update(piece)
                size += len(piece)
            os.fsync(writer.fileno())
    except BaseException:
        dest.unlink(missing_ok=True)
        raise
    return digest.hexdigest(), size


def write_new(dest: Path, data: bytes) -> None:
    """Write the new file `dest`, fsynced; `dest` is removed if that fails."""
    try:
        with dest.open("xb", buffering=0) as writer:
            _write_all(writer.fileno(), data)
            os.fsync(writer.fileno())
    except BaseException:
        dest.unlink(missing_ok=True)
        raise


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def remove_tree(path: Path) -> bool:
    """Remove a directory with all it holds; False if something could not be removed."""
    import shutil  # not needed on a warm path

    shutil.rmtree(path, ignore_errors=True)
    return not path.exists()


def remove_empty(path: Path) -> None:
    """Remove a directory with the directories in it, as far as there is no file in them."""
    for directory, _, _ in os.walk(path, topdown=False):
        with contextlib.suppress(OSError):  # not empty
            Path(directory).rmdir()
