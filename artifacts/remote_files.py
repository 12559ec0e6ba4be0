"""Files of the remote cache, by fsspec, in bounded time.

Every operation runs in a thread of its own, which is left behind when it takes too long: only so
can any protocol be bounded, a mounted directory that hangs included. After FAILURES failures, or
when its answers have cost too much time in all, the remote is left out for the rest of the run.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from artifacts.disk import explained
from runtime.errors import UserError

FAILURES = 2
PATIENCE = 6  # timeouts, for all operations of a run together
LEAST_RATE = 1 << 20  # bytes a second; a slower transfer counts as one that hangs
STALE_S = 24 * 3600.0  # after which an unfinished upload is a killed one's
SWEPT = 50  # unfinished uploads looked at in a run
TEMP = "v1/tmp"
_PIECE = 4 << 20

T = TypeVar("T")


class Unavailable(Exception):
    """The remote did not do what it was asked; the user has been told."""


@dataclass
class _Transfer:
    """How many bytes an operation has moved, and whether nobody waits for it any more."""

    moved: int = 0
    abandoned: bool = False


class Files:
    """Files under `url`, in any protocol of fsspec; `options` are its filesystem's arguments.

    `timeout`: seconds that an operation may take beyond the time its bytes take at LEAST_RATE.
    fsspec and the protocol's package are imported, and the remote asked, at the first operation.
    Every operation raises Unavailable where the remote fails, and UserError where the URL or the
    installation is wrong.
    """

    def __init__(self, url: str, timeout: float, options: Mapping[str, Any] | None = None) -> None:
        self.url, self.timeout, self.options = url, timeout, dict(options or {})
        self.shown = re.sub(r"//[^/@]*@", "//", url)  # without a password
        self.left_out = False
        self._failures, self._lost = 0, 0.0
        self._swept = False
        self._opened: tuple[Any, str] | None = None
        self._mutex = threading.Lock()

    def read(self, name: str, limit: int) -> bytes | None:
        """The bytes of a file, at most `limit` + 1 of them; None if it is not there."""

        def work(transfer: _Transfer) -> bytes:
            filesystem, root = self._filesystem()
            with filesystem.open(f"{root}/{name}", "rb", block_size=_PIECE) as source:
                found = b""
                while len(found) <= limit and (piece := source.read(min(_PIECE, limit + 1))):
                    found += piece
                    transfer.moved = len(found)
                return found[: limit + 1]

        return self._run(f"reading {name}", work)

    def download(self, name: str, size: int, dest: Path) -> tuple[str, int] | None:
        """Write a file, at most `size` + 1 bytes of it, to the new file `dest`.

        Returns (sha256 hex, bytes) of what was written, None if the file is not there. UserError
        if `dest` cannot be written.
        """

        def work(transfer: _Transfer) -> tuple[str, int]:
            filesystem, root = self._filesystem()
            digest = hashlib.sha256()
            with filesystem.open(f"{root}/{name}", "rb", block_size=_PIECE) as source:
                with explained(dest, need=size):
                    writer = dest.open("xb")
                with writer:
                    while transfer.moved <= size and not transfer.abandoned:
                        piece = source.read(min(_PIECE, size + 1 - transfer.moved))
                        if not piece:
                            break
                        with explained(dest, need=size):
                            writer.write(piece)
                            writer.flush()
                        digest.update(piece)
                        transfer.moved += len(piece)
            return digest.hexdigest(), transfer.moved

        return self._run(f"reading {name}", work)

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if it is not there, or its size is not known."""

        def work(_: _Transfer) -> int | None:
            filesystem, root = self._filesystem()
            return filesystem.info(f"{root}/{name}").get("size")

        return self._run(f"looking for {name}", work)

    def upload(self, name: str, source: Path) -> None:
        """Make `name` the bytes of `source`: under its name it is never seen in part.

        The first upload clears away what killed ones have left.
        """
        size = source.stat().st_size
        if not self._swept:
            self._swept = True
            self._run(f"looking into {TEMP}", self._sweep)

        def work(_: _Transfer) -> None:
            filesystem, root = self._filesystem()
            path = f"{root}/{name}"
            move = _mover(filesystem)
            if move is None:
                _put(filesystem, source, path, size)
                return
            temp = f"{root}/{TEMP}/{os.urandom(12).hex()}"
            for place in (temp, path):
                filesystem.makedirs(place.rpartition("/")[0], exist_ok=True)
            try:
                _put(filesystem, source, temp, size)
                move(temp, path)
            except BaseException:
                with contextlib.suppress(Exception):
                    filesystem.rm_file(temp)
                raise

        self._run(f"writing {name}", work, size)

    def _sweep(self, transfer: _Transfer) -> None:
        """Remove unfinished uploads of more than STALE_S ago, where the protocol knows times."""
        filesystem, root = self._filesystem()
        if _mover(filesystem) is None:
            return
        oldest = time.time() - STALE_S
        with contextlib.suppress(Exception):  # none there, or no right to look
            for path in filesystem.ls(f"{root}/{TEMP}", detail=False)[:SWEPT]:
                with contextlib.suppress(Exception):  # moved meanwhile, or of no known age
                    if not transfer.abandoned and filesystem.modified(path).timestamp() < oldest:
                        filesystem.rm_file(path)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""

        def work(_: _Transfer) -> None:
            filesystem, root = self._filesystem()
            filesystem.rm_file(f"{root}/{name}")

        self._run(f"removing {name}", work)

    @property
    def protocol(self) -> str:
        """`s3` of `s3://bucket/path`, `file` of a path."""
        return self.url.partition("://")[0] if "://" in self.url else "file"

    def _filesystem(self) -> tuple[Any, str]:
        """The filesystem of fsspec, and the path of the remote's root in it."""
        import fsspec

        with self._mutex:
            if self._opened is None:
                fresh = {"skip_instance_cache": True, **self.options}
                filesystem, root = fsspec.url_to_fs(self.url, **fresh)
                self._opened = filesystem, root.rstrip("/")
            return self._opened

    def _check_installed(self) -> None:
        try:
            import fsspec

            fsspec.get_filesystem_class(self.protocol)
        except ImportError as error:
            raise UserError(
                f"SCANWRIGHT_REMOTE: {self.shown}: {error}; "
                "install what it needs with `pip install 'scanwright[remote]'`"
            ) from error
        except ValueError as error:
            raise UserError(
                f"SCANWRIGHT_REMOTE: {self.shown}: {error}; expected a directory or a URL that "
                "fsspec knows, such as s3://BUCKET/PATH"
            ) from error

    def _run(self, what: str, work: Callable[[_Transfer], T], uploaded: int = 0) -> T | None:
        """What `work` returns; None if the file it needs is not there."""
        if self.left_out:
            raise Unavailable
        if self._opened is None:
            self._check_installed()
        transfer, ended = _Transfer(), list[tuple[T | None, BaseException | None]]()

        def target() -> None:
            try:
                ended.append((work(transfer), None))
            except BaseException as error:
                ended.append((None, error))

        thread = threading.Thread(target=target, name="remote-cache", daemon=True)
        started, lost = time.monotonic(), 0.0
        thread.start()
        while thread.is_alive() and lost < self.timeout:
            thread.join(self.timeout - lost)
            moved = transfer.moved + uploaded
            lost = max(0.0, time.monotonic() - started - moved / LEAST_RATE)
        transfer.abandoned = True
        self._lost += lost
        if not ended:
            self._failed(f"{what}: no answer within {self.timeout:g} s")
        result, error = ended[0]
        if isinstance(error, UserError):
            raise error
        if error is not None and not isinstance(error, FileNotFoundError):
            reason = " ".join(str(error).split())[:200]
            self._failed(f"{what}: {reason or type(error).__name__}")
        if self._lost > PATIENCE * self.timeout:
            self._leave(f"slow, {self._lost:.0f} s spent waiting")
        return result

    def _failed(self, why: str) -> None:
        self._failures += 1
        if self._failures >= FAILURES or self._lost > PATIENCE * self.timeout:
            self._leave(why)
        else:
            tell(f"{self.shown}: {why}; going on without it")
        raise Unavailable

    def _leave(self, why: str) -> None:
        self.left_out = True
        tell(f"{self.shown}: {why}; left out for the rest of this run")


def tell(line: str) -> None:
    """One line about the remote on stderr, with nothing in it that a terminal would obey."""
    shown = "".join(char if char.isprintable() else "?" for char in line)
    print(f"warning: remote cache: {shown}", file=sys.stderr, flush=True)


def _put(filesystem: Any, source: Path, path: str, size: int) -> None:
    """Upload, and look whether all of it arrived; if not, it is removed."""
    filesystem.put_file(str(source), path)
    found = filesystem.info(path).get("size")
    if found != size:
        with contextlib.suppress(Exception):
            filesystem.rm_file(path)
        raise OSError(f"{found} of {size} bytes arrived")


def _mover(filesystem: Any) -> Callable[[str, str], object] | None:
    """What gives a file another name in one step, also one that is taken.

    None for object stores, where a move is a copy, and a file is there only once it is whole.
    """
    from fsspec.spec import AbstractFileSystem

    if "webdav" in filesystem.protocol:
        return lambda old, new: filesystem.client.move(old, new, overwrite=True)
    return None if type(filesystem).mv is AbstractFileSystem.mv else filesystem.mv
