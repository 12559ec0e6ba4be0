"""A store that is only looked at: nothing is made, marked as used, locked or removed."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from artifacts.disk import explained, hash_file
from artifacts.records import Blob, Record
from artifacts.store import Store

if TYPE_CHECKING:
    from artifacts.actions import Action
    from artifacts.remote import Remote

READ_LIMIT = 64 << 20  # bytes of a result in the remote cache that is read to look further
UNREAD = ("convert", "random-params")  # of which the digests are enough


class Looking(Store):
    """The cache at `root`, which need not be there. What would write into it does not.

    Results of the remote cache that later keys depend on go to a temporary directory, which lasts
    as long as the block; `elsewhere` holds the bytes of each that was seen there, by stage.
    """

    read_only = True

    def __init__(
        self, root: Path | str, *, rehash_limit: int = 64 << 20, remote: Remote | None = None
    ) -> None:
        self.root = Path(root).expanduser().absolute()
        self.rehash_limit = rehash_limit
        self.remote = remote
        self.elsewhere: dict[str, int] = {}
        self._hold = contextlib.ExitStack()
        self._copies: Store | None = None

    def __enter__(self) -> Looking:
        return self

    def __exit__(self, *_: object) -> None:
        self._hold.close()

    def path(self, blob: Blob) -> Path:
        """Where the bytes of `blob` are, or would be in the cache."""
        own = super().path(blob)
        if self._copies is not None and not own.exists():
            return self._copies.path(blob)
        return own

    def foreseen(self, action: Action) -> Record | None:
        """The record of an action that a build would bring from the remote cache."""
        record = None if self.remote is None else self.remote.peek(action)
        if record is None or self.remote is None:
            return None
        size = sum(blob.size for blob in record.outputs.values())
        if action.stage not in UNREAD:
            if size > READ_LIMIT:
                return None
            if self._copies is None:
                kept = tempfile.TemporaryDirectory(prefix="scanwright-plan-")
                self._copies = Store(self._hold.enter_context(kept))
            record = self._copies.lookup(action.key) or self.remote.pull(self._copies, action)
        if record is not None:
            self.elsewhere[action.stage] = size
        return record

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """Nothing is held: a cleanup may take away what was just seen."""
        yield

    def put_file(self, path: Path, move: bool = False) -> Blob:
        """What the blob of the file would be."""
        with explained(path):
            return Blob(*hash_file(path))

    def put_bytes(self, data: bytes) -> Blob:
        """What the blob of `data` would be."""
        return Blob(hashlib.sha256(data).hexdigest(), len(data))

    def lookup(self, key: str, *, report: bool = True) -> Record | None:
        """The record of `key` if every blob it names is right, else None."""
        record = self.peek(key)
        if record is None or not all(self.verify(blob) for blob in record.outputs.values()):
            return None
        return record

    def recent_keys(self) -> list[str]:
        """The keys of all records, last used first."""
        return super().recent_keys() if (self.root / "actions").is_dir() else []

    def _remember(self, path: Path, blob: Blob) -> None:
        pass
