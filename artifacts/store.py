"""Content store (sha256 -> bytes) and action cache (key -> result record) in one directory.

    blobs/<2 hex>/<sha256>          bytes, read-only, named after their digest
    blobs/<2 hex>/<sha256>.stamp    of a large blob: size, mtime and inode when it was last hashed
    actions/<key>.json              result record: fields, outputs, meta, and a sum over all of it
    locks/                          flock files: store, blobs, one for each key being built
    scratch/<token>/                files of a living process; what a dead one left is swept
    work/<key>/                     what a killed process made of a long result, to go on from

Everything is written in `scratch` or `work` (the same filesystem), fsynced and renamed into place,
blobs before the record that names them, so whatever is visible is complete. The modification time
of a record is the time of its last use (the access time would change when somebody only looks).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifacts.disk import (
    copy_hashed,
    explained,
    hash_file,
    remove_empty,
    remove_tree,
    sync,
    write_new,
)
from artifacts.locks import Scratch, alive, locked, sweep
from artifacts.records import Blob, Record, action_key, decode_record, encode_record, is_digest
from runtime.errors import UserError

if TYPE_CHECKING:
    from artifacts.actions import Action
    from artifacts.remote import Remote


def default_root() -> Path:
    """SCANWRIGHT_CACHE, or ~/.cache/scanwright."""
    return Path(os.environ.get("SCANWRIGHT_CACHE") or "~/.cache/scanwright").expanduser()


class Store:
    """The cache at `root`, made if it is not there; see the module for its layout.

    Blobs of up to `rehash_limit` bytes are hashed again whenever they are looked up, larger ones
    only if size, modification time or inode changed since they were last hashed.
    `remote` is what actions look into for results that are not here; `found` holds those that a
    lookup found here and that were not offered to it yet, by key with their stages.
    Raises UserError if the directory cannot be made or written.
    """

    read_only = False  # whether nothing at all may be written under `root`

    def __init__(
        self, root: Path | str, *, rehash_limit: int = 64 << 20, remote: Remote | None = None
    ) -> None:
        self.root = Path(root).expanduser().absolute()
        self.remote = remote
        self.found: dict[str, str] = {}
        self.rehash_limit = rehash_limit
        for name in ("blobs", "actions", "locks", "scratch", "work"):
            with explained(self.root):
                (self.root / name).mkdir(parents=True, exist_ok=True)
        self._mutex = threading.Lock()
        self._users = 0
        self._scratch: Scratch | None = None
        self._hold = contextlib.ExitStack()

    # Locks and scratch space

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """Keep `gc` in any process away for the block. May be nested; builds do not exclude
        each other. Hold it from the first lookup until the files are linked where they go."""
        with self._mutex:
            if self._users == 0:
                self._hold.enter_context(self._store_lock(shared=True))
            self._users += 1
        try:
            yield
        finally:
            with self._mutex:
                self._users -= 1
                if self._users == 0:
                    self._hold.close()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no process uses the store and keep all away for the block."""
        if self._users:
            raise RuntimeError("the store is in use by this process itself")
        with self._store_lock(shared=False):
            yield

    def _store_lock(self, *, shared: bool) -> contextlib.AbstractContextManager[None]:
        other = "a cache cleanup in another process" if shared else "running builds to end"
        return locked(self.root / "locks" / "store.lock", shared=shared, waiting_for=other)

    @contextlib.contextmanager
    def key_lock(self, key: str, label: str) -> Iterator[None]:
        """Be the only one to build `key`; waiting is told as another build of `label`."""
        path = self.root / "locks" / f"{key}.lock"
        with locked(path, waiting_for=f"another build of {label}"):
            yield

    def _blobs_lock(self) -> contextlib.AbstractContextManager[None]:
        return locked(self.root / "locks" / "blobs.lock", waiting_for="another cache write")

    def _own_scratch(self) -> Scratch:
        with self._mutex:
            if self._scratch is None or self._scratch.pid != os.getpid():
                parent = self.root / "scratch"
                with explained(parent):
                    sweep(parent)
                self._scratch = Scratch(parent)
            return self._scratch

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """An empty directory on the store's filesystem, removed after the block."""
        path = self._own_scratch().new_path()
        with explained(path):
            path.mkdir()
        try:
            yield path
        finally:
            remove_tree(path)

    @contextlib.contextmanager
    def work(self, key: str) -> Iterator[Path]:
        """A directory for the result of `key`, with what a killed process left there.

        It is removed after the block; if the block fails, only the empty directories of it are.
        Hold the key's lock.
        """
        path = self.root / "work" / key
        with explained(path):
            path.mkdir(exist_ok=True)
        try:
            yield path
        except BaseException:
            remove_empty(path)
            raise
        remove_tree(path)

    # Content

    def path(self, blob: Blob) -> Path:
        """Where the bytes of `blob` are (or would be)."""
        if not is_digest(blob.sha256):
            raise ValueError(f"{blob.sha256!r} is not a sha256 digest")
        return self.root / "blobs" / blob.sha256[:2] / blob.sha256

    def put_file(self, path: Path, move: bool = False) -> Blob:
        """Store the bytes of the file `path`; with `move` it is gone afterwards.

        A plain file with one name on the same filesystem is renamed, any other copied.
        Raises UserError, naming the cache and the bytes needed, if there is no space.
        """
        with explained(path):
            info = path.lstat()
        rename = (
            move
            and stat.S_ISREG(info.st_mode)
            and info.st_nlink == 1
            and info.st_dev == (self.root / "blobs").stat().st_dev
        )
        if rename:
            with explained(path):
                blob = Blob(*hash_file(path))
                sync(path)
            self._publish(path, blob)
            return blob
        if not path.is_file():
            raise UserError(f"{path}: not a file, expected a regular file to store")
        temp = self._own_scratch().new_path()
        with explained(self.root / "blobs", need=path.stat().st_size):
            blob = Blob(*copy_hashed(path, temp))
        self._publish(temp, blob)
        if move:
            with explained(path):
                path.unlink()
        return blob

    def put_bytes(self, data: bytes) -> Blob:
        """Store `data`."""
        temp = self._own_scratch().new_path()
        with explained(self.root / "blobs", need=len(data)):
            write_new(temp, data)
        blob = Blob(hashlib.sha256(data).hexdigest(), len(data))
        self._publish(temp, blob)
        return blob

    def _publish(self, temp: Path, blob: Blob) -> None:
        """Give the complete, fsynced file `temp` its place; drop it if the place is well taken."""
        dest = self.path(blob)
        try:
            with self.using(), self._blobs_lock(), explained(dest, need=blob.size):
                if self.verify(blob):
                    return
                temp.chmod(0o444)
                if not dest.parent.exists():
                    dest.parent.mkdir()
                    sync(dest.parent.parent)
                temp.replace(dest)
                sync(dest.parent)
                self._remember(dest, blob)
        finally:
            temp.unlink(missing_ok=True)

    def _stamp(self, path: Path) -> str:
        info = path.stat()
        return f"{info.st_size} {info.st_mtime_ns} {info.st_ino}\n"

    def _remember(self, path: Path, blob: Blob) -> None:
        if blob.size > self.rehash_limit:
            # Only saves time: a torn or missing stamp means that the blob is hashed again.
            with contextlib.suppress(OSError):
                path.with_suffix(".stamp").write_text(self._stamp(path))

    def problem(self, blob: Blob) -> str | None:
        """What is wrong with the stored bytes of `blob`, in words; None if they are right."""
        path = self.path(blob)
        try:
            size = path.stat().st_size
            if size != blob.size:
                return f"has {size} bytes, expected {blob.size}"
            if size > self.rehash_limit:
                with contextlib.suppress(OSError):
                    if path.with_suffix(".stamp").read_text() == self._stamp(path):
                        return None
            stamp = self._stamp(path)
            if hash_file(path)[0] != blob.sha256:
                return "does not match its sha256"
            if stamp == self._stamp(path):
                self._remember(path, blob)
        except FileNotFoundError:
            return "is missing"
        except OSError as error:
            return f"cannot be read ({error.strerror})"
        return None

    def verify(self, blob: Blob) -> bool:
        """True if the bytes of `blob` are in the store, with the right size and digest."""
        return self.problem(blob) is None

    def _drop(self, blob: Blob) -> None:
        with self._blobs_lock(), explained(self.path(blob)):
            if not self.verify(blob):  # another process may have put it right meanwhile
                self.path(blob).unlink(missing_ok=True)
                self.path(blob).with_suffix(".stamp").unlink(missing_ok=True)

    def link(self, blob: Blob, dest: Path) -> None:
        """Make `dest` the bytes of `blob`: a hard link where that can be, else a copy.

        `dest` is replaced in one step, so that no half file is ever there and a process that has
        the old one mapped keeps it. Raises UserError if there is no space or the blob is gone.
        """
        source = self.path(blob)
        with explained(source):
            if not source.exists():
                raise UserError(
                    f"{source}: gone from the cache while it was needed; run the build again"
                )
        with explained(dest, need=blob.size):
            if dest.exists() and not dest.is_symlink() and dest.samefile(source):
                return
            dest.parent.mkdir(parents=True, exist_ok=True)
            self._sweep_links(dest.parent)
            temp = dest.with_name(f".link-{self._own_scratch().token}-{os.urandom(4).hex()}")
            try:
                try:
                    os.link(source, temp)
                except OSError:  # another filesystem, too many links, or links not allowed
                    copy_hashed(source, temp)
                    temp.chmod(0o444)
                temp.replace(dest)
                sync(dest.parent)
            finally:
                temp.unlink(missing_ok=True)

    def _sweep_links(self, directory: Path) -> None:
        for path in directory.glob(".link-*"):
            token = path.name.removeprefix(".link-").rpartition("-")[0]
            if not alive(self.root / "scratch", token):
                path.unlink(missing_ok=True)

    # Records

    def record_path(self, key: str) -> Path:
        """Where the record of `key` is (or would be)."""
        if not is_digest(key):
            raise ValueError(f"{key!r} is not a key")
        return self.root / "actions" / f"{key}.json"

    def peek(self, key: str) -> Record | None:
        """The record of `key`, if it is whole; its blobs are not looked at and nothing changes."""
        try:
            return decode_record(self.record_path(key).read_bytes(), key)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def lookup(self, key: str, *, report: bool = True) -> Record | None:
        """The record of `key` if every blob it names is right, else None.

        A bad record or blob is removed and told in one line on stderr. Without `report` nothing is
        told or removed, so that whoever builds it again finds and tells what was wrong.
        """
        path = self.record_path(key)
        with self.using():
            record = self.peek(key)
            if record is None:
                if report and path.exists():
                    _tell(f"{path}: broken record in the cache, building again")
                    with explained(path):
                        path.unlink(missing_ok=True)
                return None
            good = True
            for name, blob in sorted(record.outputs.items()):
                trouble = self.problem(blob)
                if trouble is not None:
                    good = False
                    if report:
                        where = self.path(blob)
                        _tell(f"{where}: cached {name} {trouble}, building again")
                        self._drop(blob)
            if good:
                self.found[key] = record.stage
                with contextlib.suppress(OSError):
                    os.utime(path)
            return record if good else None

    def foreseen(self, action: Action) -> Record | None:
        """What a look without a build may know of an action that is not here: nothing."""
        return None

    def record(
        self,
        key: str,
        fields: Mapping[str, Any],
        outputs: Mapping[str, Blob],
        meta: Any = None,
        *,
        stage: str,
        about: Mapping[str, str] | None = None,
    ) -> Record:
        """Make the result of an action visible. Its blobs must be in the store.

        Raises ValueError if `key` is not the key of `stage` and `fields` or a value is not JSON.
        """
        if action_key(stage, fields) != key:
            raise ValueError(f"{key} is not the key of these fields")
        entry = Record(key, stage, dict(fields), dict(about or {}), dict(outputs), meta)
        data = encode_record(entry)
        path, temp = self.record_path(key), self._own_scratch().new_path(".json")
        with self.using(), explained(path, need=len(data)):
            write_new(temp, data)
            temp.replace(path)
            sync(path.parent)
        return entry

    def forget(self, key: str) -> None:
        """Remove the record of `key`, here and in the remote, so that it is built again; its bytes
        stay for `gc`."""
        with explained(self.record_path(key)):
            self.record_path(key).unlink(missing_ok=True)
        if self.remote is not None:
            self.remote.forget(key)

    def recent_keys(self) -> list[str]:
        """The keys of all records, last used first."""
        found: list[tuple[int, str]] = []
        with explained(self.root / "actions"), os.scandir(self.root / "actions") as entries:
            for entry in entries:
                key = entry.name.removesuffix(".json")
                if is_digest(key):
                    with contextlib.suppress(FileNotFoundError):
                        found.append((entry.stat().st_mtime_ns, key))
        return [key for _, key in sorted(found, reverse=True)]


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
