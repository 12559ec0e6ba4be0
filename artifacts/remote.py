"""The remote cache: results of actions that machines share, read by all and written by some.

    v1/actions/<2 hex>/<key>.json    result records, as in the local cache
    v1/blobs/<2 hex>/<sha256>        the bytes that they name
    v1/tmp/                          uploads under way, where the protocol can move a file; what
                                     killed ones left is removed by a later one, a day after

Nothing that comes from it is believed: a record must be the one of its key, and a file enters the
local cache only with the size and digest that the record names. Whatever is wrong is a miss, told
in one line. Whoever can write to it decides, though, which results those are.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from artifacts.disk import explained, write_new
from artifacts.records import Blob, Record, canonical, decode_record, encode_record
from artifacts.remote_files import Files, Unavailable, tell
from runtime.errors import UserError

if TYPE_CHECKING:
    from artifacts.actions import Action
    from artifacts.store import Store

TIMEOUT_S = 10.0
RECORD_LIMIT = 8 << 20  # bytes
_CONTROL = re.compile(rb"\\u00(?:[0189]|7f)")  # in JSON: what a terminal would obey
# Stages whose results hold no weights: others are uploaded only if that is asked for.
WITHOUT_WEIGHTS = frozenset(
    {"weight-type", "storage", "gguf-metadata", "emit", "objects", "perplexity", "expect"}
    | {"compile", "proof"}
)


def from_environment(environment: Mapping[str, str] = os.environ) -> Remote | None:
    """The remote that SCANWRIGHT_REMOTE names, if it does. UserError for a wrong setting."""
    url = environment.get("SCANWRIGHT_REMOTE")
    if not url:
        return None
    word = environment.get("SCANWRIGHT_REMOTE_TIMEOUT") or str(TIMEOUT_S)
    try:
        timeout = float(word)
    except ValueError:
        timeout = 0.0
    if not 0 < timeout < 1e6:
        raise UserError(f"SCANWRIGHT_REMOTE_TIMEOUT: found {word!r}, expected seconds above 0")
    write, weights = (
        _switch(environment, f"SCANWRIGHT_REMOTE_{name}") for name in ("WRITE", "WEIGHTS")
    )
    return Remote(url, write=write, weights=weights, timeout=timeout)


def _switch(environment: Mapping[str, str], name: str) -> bool:
    word = environment.get(name) or "0"
    if word not in ("0", "1"):
        raise UserError(f"{name}: found {word!r}, expected 1, or 0 or nothing for no")
    return word == "1"


class Remote:
    """The remote cache at `url`: what `pull` brings and, with `write`, `push` takes there.

    With `weights`, also model weights are uploaded. `timeout` and `options` are those of Files.
    Nothing here fails a build, but for a URL that is wrong or a package that is missing.
    """

    def __init__(
        self,
        url: str,
        *,
        write: bool = False,
        weights: bool = False,
        timeout: float = TIMEOUT_S,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.write, self.weights = write, weights
        self._files = Files(url, timeout, options)
        self._told: set[str] = set()
        self._bad: set[str] = set()  # sha256 of blobs that may be there and wrong
        self._settled: set[str] = set()  # keys that came from there, or were taken or offered

    @property
    def url(self) -> str:
        """The URL, without a password."""
        return self._files.shown

    def peek(self, action: Action) -> Record | None:
        """The record of `action`, if there is a right one; its files are not looked at."""
        with contextlib.suppress(Unavailable):
            data = self._files.read(_record_name(action.key), RECORD_LIMIT)
            if data is None:
                return None
            try:
                if len(data) > RECORD_LIMIT:
                    raise ValueError(f"has more than {RECORD_LIMIT} bytes")
                record = decode_record(data, action.key)
                if _CONTROL.search(canonical(record.meta)):
                    raise ValueError("has control characters")
                return record
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                reason = " ".join(str(error).split())[:200]
                self._tell(f"{action.label}: its record is wrong: {reason}; not used")
        return None

    def pull(self, store: Store, action: Action) -> Record | None:
        """Bring the result of `action` into `store`; None if not all of it is there and right.

        UserError if the local disk is full or cannot be written.
        """
        record = self.peek(action)
        if record is None:
            return None
        with contextlib.suppress(Unavailable):
            # The smallest first, so that least is lost where one is wrong.
            for name, blob in sorted(record.outputs.items(), key=lambda item: item[1].size):
                if not store.verify(blob) and not self._fetch(store, action, name, blob):
                    rest = record.outputs.values()  # where one is wrong, others may be
                    self._bad.update(blob.sha256 for blob in rest if not store.verify(blob))
                    return None
            self._settled.add(action.key)
            # Its fields are the action's, since both have the same key; its words may not be.
            return store.record(
                action.key,
                action.fields,
                record.outputs,
                record.meta,
                stage=action.stage,
                about=action.about,
            )
        return None

    def _fetch(self, store: Store, action: Action, name: str, blob: Blob) -> bool:
        """Bring one file into the store; False, and told, if it is not there or wrong."""
        with store.scratch() as scratch:
            path = scratch / "blob"
            found = self._files.download(_blob_name(blob), blob.size, path)
            if found == (blob.sha256, blob.size):
                store.put_file(path, move=True)
                return True
        if found is None:
            trouble = "is missing"
        elif found[1] > blob.size:
            trouble = f"has more than {blob.size} bytes"
        elif found[1] < blob.size:
            trouble = f"has {found[1]} bytes, expected {blob.size}"
        else:
            trouble = "does not match its sha256"
        self._tell(f"{action.label}: {name} {trouble}; not used")
        return False

    def _tell(self, line: str) -> None:
        """Once, however often a result is asked for."""
        if line not in self._told:
            self._told.add(line)
            tell(line)

    def push(self, store: Store, record: Record) -> None:
        """Take a result there, its record last, if that is wanted and the remote is in order."""
        if not self._takes(record.stage):
            return
        self._settled.add(record.key)
        with contextlib.suppress(Unavailable):
            for blob in record.outputs.values():
                name = _blob_name(blob)
                if blob.sha256 in self._bad or self._files.size(name) != blob.size:
                    self._files.upload(name, store.path(blob))
                    self._bad.discard(blob.sha256)
            with store.scratch() as scratch:
                path, data = scratch / "record", encode_record(record)
                with explained(path, need=len(data)):
                    write_new(path, data)
                self._files.upload(_record_name(record.key), path)

    def offer(self, store: Store, key: str, stage: str) -> None:
        """Take a result there that the store has had before this run, if the remote lacks it.

        One look at the remote, once in a run. The store must be in use.
        """
        if not self._takes(stage) or key in self._settled:
            return
        self._settled.add(key)
        with contextlib.suppress(Unavailable):
            if self._files.size(_record_name(key)) is None:
                record = store.lookup(key, report=False)
                if record is not None:
                    self.push(store, record)

    def _takes(self, stage: str) -> bool:
        return self.write and (self.weights or stage in WITHOUT_WEIGHTS)

    def forget(self, key: str) -> None:
        """Remove the record of `key`, if this run may write."""
        if self.write:
            with contextlib.suppress(Unavailable):
                self._files.remove(_record_name(key))


def _record_name(key: str) -> str:
    return f"v1/actions/{key[:2]}/{key}.json"


def _blob_name(blob: Blob) -> str:
    return f"v1/blobs/{blob.sha256[:2]}/{blob.sha256}"
