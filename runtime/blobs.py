"""The bytes of pulled bundles, once each: files named by their sha256 that bundles link to.

    <cache>/pulled/<2 hex>/<sha256>       bytes, read-only, complete and checked
    <cache>/pulled/partial/<sha256>       a download in progress or broken off
    <cache>/pulled/partial/<sha256>.lock  held while downloading

The cache is SCANWRIGHT_CACHE or ~/.cache/scanwright. A blob is hashed whenever it is used: whoever
changed a file of a bundle has changed the blob.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from runtime.errors import UserError
from runtime.manifest import FileRef
from runtime.verify import sha256

_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES, errno.ENOSYS}


def default_root() -> Path:
    """SCANWRIGHT_CACHE, or ~/.cache/scanwright."""
    return Path(os.environ.get("SCANWRIGHT_CACHE") or "~/.cache/scanwright").expanduser()


@contextlib.contextmanager
def locked(path: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold the lock file `path`, told on stderr if that has to wait."""
    mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    with path.open("a") as file:
        try:
            fcntl.flock(file, mode | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another pull", file=sys.stderr, flush=True)
            fcntl.flock(file, mode)
        yield


class Blobs:
    """The store under the cache directory `root`. OSErrors name their file."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute() / "pulled"
        self._partial = self.root / "partial"
        self._partial.mkdir(parents=True, exist_ok=True)

    def path(self, ref: FileRef) -> Path:
        """Where the blob of `ref` is, or would be."""
        return self.root / ref.sha256[:2] / ref.sha256

    def partial(self, ref: FileRef) -> Path:
        """What there is of a download that broke off."""
        return self._partial / ref.sha256

    def using(self) -> contextlib.AbstractContextManager[None]:
        """Keep `prune` away for the block."""
        return locked(self.root / "lock", shared=True)

    def has(self, ref: FileRef) -> bool:
        """Whether the blob is there and right; a damaged one is told and removed."""
        path = self.path(ref)
        if not path.is_file():
            return False
        if path.stat().st_size == ref.size and sha256(path) == ref.sha256:
            return True
        print(f"{path}: does not match its sha256, fetching it again", file=sys.stderr, flush=True)
        path.unlink()
        return False

    def ensure(self, ref: FileRef, where: str, receive: Callable[[Path], None]) -> bool:
        """Have the blob of `ref`; whether it had to be received.

        `receive` appends to the file it is given until it is whole. Raises UserError, naming
        `where`, for other bytes than the manifest's: then nothing is kept.
        """
        if self.has(ref):
            return False
        with locked(self._partial / f"{ref.sha256}.lock"):
            if self.has(ref):
                return False
            partial = self.partial(ref)
            partial.touch()
            fresh = partial.stat().st_size == 0
            receive(partial)
            problem = wrong(ref, partial)
            if problem is not None and not fresh:  # what an earlier run left may be to blame
                os.truncate(partial, 0)
                receive(partial)
                problem = wrong(ref, partial)
            if problem is not None:
                partial.unlink()
                raise UserError(
                    f"{where}: {problem}; the download or the bundle there is damaged: try again,"
                    " or push it again"
                )
            self._keep(ref, partial)
        return True

    def _keep(self, ref: FileRef, partial: Path) -> None:
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.chmod(0o444)
        path = self.path(ref)
        path.parent.mkdir(exist_ok=True)
        partial.replace(path)
        (self._partial / f"{ref.sha256}.lock").unlink(missing_ok=True)

    def link(self, ref: FileRef, dest: Path) -> None:
        """The new file `dest` with the blob's bytes: a hard link, or a copy where none can be."""
        source = self.path(ref)
        try:
            os.link(source, dest)
            return
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
        shutil.copyfile(source, dest)
        dest.chmod(0o444)
        if problem := wrong(ref, dest):
            raise UserError(f"{dest}: {problem} after copying; check this disk")

    def prune(self) -> int:
        """Remove blobs that no bundle on this disk links to, and broken-off downloads; bytes."""
        freed = 0
        with locked(self.root / "lock"):
            for path in self.root.glob("*/*"):
                facts = path.lstat()
                if facts.st_nlink == 1 and path.is_file():
                    freed += facts.st_size
                    path.unlink()
        return freed


def wrong(ref: FileRef, path: Path) -> str | None:
    """How the file differs from what the manifest says; None if it does not."""
    size = path.stat().st_size
    if size != ref.size:
        return f"{size} bytes, expected {ref.size}"
    found = sha256(path)
    return None if found == ref.sha256 else f"sha256 {found}, expected {ref.sha256}"
