"""Bound the size of the cache: the results that were not used for longest go first."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from artifacts.disk import explained, remove_tree
from artifacts.locks import sweep
from artifacts.records import Record, is_digest
from artifacts.store import Store
from runtime.errors import UserError

OF_FILES = ("gguf-config", "weight-type", "storage")  # stages whose results others hold in words
ABANDONED_NS = 7 * 24 * 3600 * 10**9  # since a killed build was not gone on with
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE | re.ASCII)
_DIGEST = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")


@dataclass(frozen=True)
class GcReport:
    """Results removed, and bytes freed, kept (`in_use` of them because bundles use them)."""

    removed: int
    freed: int
    kept: int
    in_use: int

    def __str__(self) -> str:
        return (
            f"removed {self.removed} results, {size_text(self.freed)}; "
            f"kept {size_text(self.kept)}, {size_text(self.in_use)} of it used by bundles"
        )


def parse_size(text: str) -> int:
    """Bytes of `10G`, `500M`, `1.5GiB` or `4096`; K, M, G, T are powers of 1024.

    Raises UserError for anything else.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UserError(
            f"size {text!r}: expected a number of bytes with K, M, G or T, such as 10G or 500M"
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


def size_text(size: int) -> str:
    """`size` bytes as a person reads it: 512 B, 1.5 MiB."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


@dataclass
class _Entry:
    """Something that goes or stays as a whole: a record with its blobs, a blob without one, a
    downloaded checkpoint, or what a killed build left. `path` is the record or the directory,
    `size` its own bytes, `inputs` the digests that a record's fields name: what its result was made
    from."""

    last_use: int
    path: Path | None
    size: int
    digests: frozenset[str]
    inputs: frozenset[str] = frozenset()


def collect(store: Store, max_bytes: int, build_dir: Path) -> GcReport:
    """Remove results and downloads, the last used last, until there are at most `max_bytes`.

    A result with a blob whose digest occurs in any `build_dir/*/*/*/manifest.json` stays whatever
    its age, with its other blobs and the results it was made from (or the next build of the bundle
    would make those again), so more than `max_bytes` may be left. The manifests are
    searched as text, so that one of another schema, or a damaged one, protects its files too.

    Builds hold a lock of the store shared while they look up, make and link results; this takes
    it exclusively, so it waits for running builds and they wait for it. Timestamps or reference
    counts instead of the lock would leave a moment between a build's lookup and its link in which
    a blob could go, and a build killed in that moment would leave its count behind.

    Records go before their blobs: a kill in between leaves blobs without a record, which are
    found by the next collection, and never a record without blobs. Raises UserError if a manifest
    cannot be read (nothing is removed then) or a file cannot be removed.
    """
    with store.alone():
        named = set(_named_by_bundles(build_dir))
        sweep(store.root / "scratch")
        blobs, entries = _blobs(store), _records(store)
        holders = Counter(digest for entry in entries for digest in entry.digests)
        entries += [
            _Entry(info.st_mtime_ns, None, 0, frozenset([digest]))
            for digest, info in blobs.items()
            if digest not in holders
        ]
        entries += _downloads(store)
        entries += _unfinished(store)
        while (
            more := {d for e in entries if e.digests & named for d in e.digests | e.inputs} - named
        ):
            named |= more
        used = {d for entry in entries if entry.digests & named for d in entry.digests}
        sizes = {digest: info.st_size for digest, info in blobs.items()}
        total = sum(sizes.values()) + sum(entry.size for entry in entries)
        removed = freed = 0
        for entry in sorted(entries, key=lambda entry: entry.last_use):
            if total - freed <= max_bytes:
                break
            if entry.digests & named:
                continue
            with explained(store.root):
                freed += _remove(store, entry, holders, sizes)
            removed += 1
        _clear_locks(store)
        in_use = sum(size for digest, size in sizes.items() if digest in used)
        return GcReport(removed, freed, total - freed, in_use)


def _remove(store: Store, entry: _Entry, holders: Counter[str], sizes: dict[str, int]) -> int:
    """Remove an entry and the blobs that nothing else holds; returns the bytes of both."""
    freed = 0
    if entry.path is not None:
        if entry.path.is_dir():
            remove_tree(entry.path)
        else:
            entry.path.unlink(missing_ok=True)
        freed += entry.size
    for digest in entry.digests & sizes.keys():
        holders[digest] -= 1
        if holders[digest] <= 0:
            path = store.root / "blobs" / digest[:2] / digest
            path.unlink(missing_ok=True)
            path.with_suffix(".stamp").unlink(missing_ok=True)
            freed += sizes[digest]
    return freed


def _named_by_bundles(build_dir: Path) -> frozenset[str]:
    digests: set[str] = set()
    for path in build_dir.glob("*/*/*/manifest.json"):
        with explained(path):
            digests.update(_DIGEST.findall(path.read_text(encoding="utf-8", errors="replace")))
    return frozenset(digests)


def _blobs(store: Store) -> dict[str, os.stat_result]:
    found: dict[str, os.stat_result] = {}
    with explained(store.root / "blobs"):
        for path in (store.root / "blobs").glob("??/*"):
            if is_digest(path.name):
                found[path.name] = path.stat()
    return found


def _records(store: Store) -> list[_Entry]:
    entries: list[_Entry] = []
    with explained(store.root / "actions"):
        for path in (store.root / "actions").iterdir():
            key = path.name.removesuffix(".json")
            record: Record | None = store.peek(key) if is_digest(key) else None
            info = path.stat()
            # A broken record holds nothing and is as old as can be.
            digests = {key, *(b.sha256 for b in record.outputs.values())} if record else set()
            if record and record.stage == "proof":  # goes and stays with the module it is of
                digests.add(str(record.fields.get("compile")))
            if record and record.stage in OF_FILES:  # with what the same files became
                digests.update(_DIGEST.findall(json.dumps(record.fields.get("files"))))
            inputs = _DIGEST.findall(json.dumps(record.fields)) if record else ()
            last_use = info.st_mtime_ns if record else 0
            entries.append(
                _Entry(last_use, path, info.st_size, frozenset(digests), frozenset(inputs))
            )
    return entries


def _downloads(store: Store) -> list[_Entry]:
    """Each commit of each downloaded repository; a build can fetch it again by its lock."""
    entries: list[_Entry] = []
    with explained(store.root / "hub"):
        for directory in (store.root / "hub").glob("*--*/*"):
            if directory.is_dir():
                size = sum(file.stat().st_size for file in directory.iterdir())
                entries.append(_Entry(directory.stat().st_mtime_ns, directory, size, frozenset()))
    return entries


def _unfinished(store: Store) -> list[_Entry]:
    """What killed builds left of long results; that of a finished or an abandoned one goes now."""
    entries: list[_Entry] = []
    with explained(store.root / "work"):
        for directory in (store.root / "work").iterdir():
            files = [path.stat() for path in directory.rglob("*") if path.is_file()]
            last_use = max((info.st_mtime_ns for info in files), default=0)
            finished = not is_digest(directory.name) or store.record_path(directory.name).exists()
            if finished or last_use < time.time_ns() - ABANDONED_NS:
                remove_tree(directory)
            else:
                size = sum(info.st_size for info in files)
                entries.append(_Entry(last_use, directory, size, frozenset()))
    return entries


def _clear_locks(store: Store) -> None:
    """Remove the locks of single actions: every holder or waiter would hold the store's too."""
    for path in (store.root / "locks").iterdir():
        if is_digest(path.name.removesuffix(".lock")):
            with contextlib.suppress(OSError):
                path.unlink() if path.is_file() else remove_tree(path)
