"""A store that is only looked at: nothing is made, marked as used, locked or removed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from artifacts.disk import explained, hash_file
from artifacts.records import Blob, Record
from artifacts.store import Store


class Looking(Store):
    """The cache at `root`, which need not be there. What would write into it does not."""

    def __init__(self, root: Path | str, *, rehash_limit: int = 64 << 20) -> None:
        self.root = Path(root).expanduser().absolute()
        self.rehash_limit = rehash_limit

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """Nothing is held: a cleanup may take away what was just seen."""
        yield

    def put_file(self, path: Path, move: bool = False) -> Blob:
        """What the blob of the file would be."""
        with explained(path):
            return Blob(*hash_file(path))

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
