"""Brings a model's files to this machine once, pinned by a lock, and proves them at every use.

    <root>/<org>--<name>/<commit>/<file>       the files, complete and checked
    <root>/<org>--<name>/partial/<id>.part     a download in progress or broken off
    <root>/<org>--<name>/fetch.lock            held while downloading
    <root>/stamps/<directory id>.json          size, mtime, inode and sha256 of large files

With the lock written and every file in place nothing is requested and huggingface_hub is not
imported. Without a lock the hub is asked what the revision names, and the lock is written last.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from artifacts.disk import explained, hash_file, user_error, write_new
from artifacts.hub import Hub, Remote, differs
from artifacts.lockfile import (
    CONFIG,
    INDEX,
    MAX_INDEX,
    Digest,
    Lock,
    is_metadata,
    is_weights,
    select,
)
from artifacts.locks import locked
from runtime.errors import UserError

SMALL = 16 << 20  # bytes; files up to this size are hashed at every use
DEFAULT_REVISION = "main"
_PARTS = re.compile(r"(?P<base>.+)-00001-of-(?P<count>\d{5})\.gguf")
_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}(/[A-Za-z0-9][A-Za-z0-9_.-]{0,95})?")
# Each a tokenizer by itself, and what may go with one.
TOKENIZERS = ("tokenizer.json", "tokenizer.jsonl", "tiktoken.model", "rwkv_vocab_v20230424.txt")
TOKENIZER_FILES = (
    *TOKENIZERS, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.json", "chat_template.jinja",
)  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on this machine: `files` is name → (sha256 hex, bytes), sorted by name.

    `revision` is the commit of a hub repository, None for a local directory. `gguf` is the name of
    the GGUF file that is the model, the first of its parts; then there is no config.json.
    """

    dir: Path
    revision: str | None
    files: dict[str, Digest]
    gguf: str | None = None

    @property
    def place(self) -> Path:
        """What to read the weights from: the directory, or the GGUF file in it."""
        return self.dir if self.gguf is None else self.dir / self.gguf


class NotHere(UserError):
    """Files are missing that only the hub can give."""


def fetch(
    source: str,
    revision: str | None,
    dest_root: Path,
    lock_path: Path | None,
    *,
    weights: bool = True,
    endpoint: str | None = None,
    offline: bool = False,
) -> Checkpoint:
    """The files of `source`, each equal to what the lock says.

    source: `hf:org/name` (downloaded under `dest_root`) or `dir:PATH` (used in place; a directory
    or a GGUF file has no lock, its digests are the result).
    revision: branch, tag or commit, None for main.
    lock_path: written on first use and enforced afterwards; a branch that has moved since is not
    followed. weights=False brings configuration and tokenizer only; the lock is the same.
    endpoint: the hub, by default HF_ENDPOINT or https://huggingface.co.
    offline: raise NotHere instead of asking the hub for anything.

    Raises UserError, one line, when the hub cannot be reached or refuses, when there is nothing
    but pickle files, when bytes differ from the lock, or when the disk is full.
    """
    kind, _, rest = source.partition(":")
    if kind == "dir" and rest:
        if rest.endswith(".gguf"):
            return _gguf(Path(rest), dest_root)
        return _local(Path(rest), dest_root, weights)
    if kind != "hf" or not _REPO.fullmatch(rest) or ".." in rest or "--" in rest:
        raise UserError(f"source: found {source!a}, expected hf:org/name or dir:PATH")
    if lock_path is None:
        raise UserError(f"{source}: a hub repository needs a lock file to pin it")
    wanted = revision or DEFAULT_REVISION
    lock = _load(lock_path, source, wanted)
    home = dest_root / rest.replace("/", "--")
    if lock is None:
        if offline:
            raise NotHere(f"{source}: not fetched yet")
        with _alone(home, source):
            lock = _load(lock_path, source, wanted)  # another process may have been first
            if lock is None:
                lock = _pin(Hub(rest, endpoint), home, source, wanted, weights)
                lock.save(lock_path)
    names = [name for name in sorted(lock.files) if weights or not is_weights(name)]
    directory = home / lock.commit
    if _missing(directory, dest_root, lock, names, tell=False):
        if offline:
            raise NotHere(f"{source}: not here in full")
        with _alone(home, source):
            missing = _missing(directory, dest_root, lock, names, tell=True)
            _complete(Hub(rest, endpoint), home, lock, missing, lock_path)
        if left := _missing(directory, dest_root, lock, names, tell=True):
            raise UserError(f"{directory / left[0]}: changed while it was fetched; try again")
    _no_strangers(directory, lock)
    with contextlib.suppress(OSError):
        os.utime(directory)  # its last use, for gc
    return Checkpoint(directory, lock.commit, {name: lock.files[name] for name in names})


def _load(path: Path, source: str, revision: str) -> Lock | None:
    lock = Lock.load(path)
    if lock is None:
        return None
    for key, found, expected in (
        ("source", lock.source, source),
        ("revision", lock.revision, revision),
    ):
        if found != expected:
            raise UserError(
                f"{path}: {key}: found {found!a}, but {expected!a} is asked for; delete "
                "the lock to pin it anew"
            )
    return lock


@contextlib.contextmanager
def _alone(home: Path, source: str) -> Iterator[None]:
    with explained(home):
        (home / "partial").mkdir(parents=True, exist_ok=True)
    with locked(home / "fetch.lock", waiting_for=f"another process that fetches {source}"):
        yield


# --- hub repositories ------------------------------------------------------------------------


def _pin(hub: Hub, home: Path, source: str, revision: str, weights: bool) -> Lock:
    """Ask what `revision` is now, download, and return the lock of what came."""
    commit, listing = hub.resolve(revision)
    directory = home / commit
    with explained(directory):
        directory.mkdir(exist_ok=True)

    def read_index() -> bytes:
        remote = listing[INDEX]
        if remote.size > MAX_INDEX:
            raise UserError(f"{source}/{INDEX}: {remote.size} bytes, expected at most {MAX_INDEX}")
        _bring(hub, home, commit, remote)
        return (directory / INDEX).read_bytes()

    names = select(source, listing, read_index)
    if INDEX in listing and INDEX not in names:
        (directory / INDEX).unlink()
    known: dict[str, Digest] = {}
    needed: list[Remote] = []
    for remote in (listing[name] for name in names):
        if remote.sha256 is not None and is_weights(remote.name) and not weights:
            known[remote.name] = (remote.sha256, remote.size)
        else:
            needed.append(remote)
    _check_space(home, commit, needed)
    for remote in sorted(needed, key=_small_first):
        known[remote.name] = _bring(hub, home, commit, remote)
    return Lock(source, revision, commit, known)


def _complete(hub: Hub, home: Path, lock: Lock, missing: list[str], lock_path: Path) -> None:
    """Download the files `missing`, each as the lock says."""
    remotes = [Remote(name, lock.files[name][1], lock.files[name][0], None) for name in missing]
    with explained(home):
        (home / lock.commit).mkdir(exist_ok=True)
    _check_space(home, lock.commit, remotes)
    for remote in sorted(remotes, key=_small_first):
        try:
            _bring(hub, home, lock.commit, remote)
        except UserError as error:
            raise UserError(f"{error} ({lock_path} pins commit {lock.commit})") from error


def _bring(hub: Hub, home: Path, commit: str, remote: Remote) -> Digest:
    """Download one file unless it is there already; returns its digest."""
    dest = home / commit / remote.name
    if dest.is_file() and not dest.is_symlink() and dest.stat().st_size == remote.size:
        digest = hash_file(dest)
        if not differs(remote, dest, digest):
            return digest
    return hub.download(commit, remote, dest, _partial(home, commit, remote))


def _small_first(remote: Remote) -> tuple[int, str]:
    return remote.size, remote.name


def _partial(home: Path, commit: str, remote: Remote) -> Path:
    identity = remote.sha256 or remote.git_oid or f"{commit}-{remote.name}"
    return home / "partial" / f"{identity}.part"


def _check_space(home: Path, commit: str, remotes: Iterable[Remote]) -> None:
    """Refuse before the first byte when what is to come cannot fit."""
    need = 0
    with explained(home):
        for remote in remotes:
            places = (home / commit / remote.name, _partial(home, commit, remote))
            there = sum(place.stat().st_size for place in places if place.is_file())
            need += max(0, remote.size - there)
        free = shutil.disk_usage(home).free
    if need > free:
        raise user_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), home, need)


def _missing(
    directory: Path, dest_root: Path, lock: Lock, names: Iterable[str], *, tell: bool
) -> list[str]:
    """Names that are absent or not what the lock says; with `tell` the wrong ones are removed."""
    stamps = _Stamps(dest_root, directory)
    missing = []
    for name in names:
        path = directory / name
        if not path.is_file() or path.is_symlink():
            missing.append(name)
            continue
        found, expected = stamps.digest(path), lock.files[name]
        if found != expected:
            missing.append(name)
            if tell:
                print(
                    f"{path}: sha256 is {found[0]} ({found[1]} bytes), the lock says {expected[0]} "
                    f"({expected[1]} bytes); fetching it again",
                    file=sys.stderr,
                )
                with explained(path):
                    path.unlink()
    stamps.save()
    return missing


def _no_strangers(directory: Path, lock: Lock) -> None:
    """A file that the lock does not name could be read in place of one that it does."""
    for name in sorted({item.name for item in directory.iterdir()} - lock.files.keys()):
        raise UserError(
            f"{directory / name}: not a file of {lock.source} at {lock.commit}; remove it"
        )


# --- local directories -----------------------------------------------------------------------


def _local(directory: Path, dest_root: Path, weights: bool) -> Checkpoint:
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory; expected a checkpoint in it")
    with explained(directory):
        present = sorted(item.name for item in directory.iterdir() if item.is_file())

    def read_index() -> bytes:
        with explained(directory / INDEX), (directory / INDEX).open("rb") as file:
            raw = file.read(MAX_INDEX + 1)
        if len(raw) > MAX_INDEX:
            raise UserError(f"{directory / INDEX}: expected at most {MAX_INDEX} bytes")
        return raw

    names = select(str(directory), present, read_index)
    stamps = _Stamps(dest_root, directory)
    files = {}
    for name in names:
        if weights or not is_weights(name):
            with explained(directory / name):
                files[name] = stamps.digest(directory / name)
    stamps.save()
    return Checkpoint(directory, None, files)


def _gguf(file: Path, dest_root: Path) -> Checkpoint:
    """The GGUF file `file`, all its parts, and the tokenizer's files beside it."""
    if not file.is_file():
        raise UserError(f"{file}: no such file; expected a GGUF file")
    part = _PARTS.fullmatch(file.name)
    count = 1 if part is None else min(int(part["count"]), 1000)
    weights = [file.name] if part is None else [
        f"{part['base']}-{i:05}-of-{part['count']}.gguf" for i in range(1, count + 1)
    ]  # fmt: skip
    with explained(file.parent):
        beside = sorted(p.name for p in file.parent.iterdir() if p.is_file())
    stamps, files = _Stamps(dest_root, file.parent), {}
    for name in sorted({*weights, *(n for n in beside if is_metadata(n) and n != CONFIG)}):
        with explained(file.parent / name):
            files[name] = stamps.digest(file.parent / name)
    stamps.save()
    return Checkpoint(file.parent, None, files, file.name)


class _Stamps:
    """Remembered digests of the large files in a directory, by size, mtime and inode."""

    def __init__(self, dest_root: Path, directory: Path) -> None:
        identity = hashlib.sha256(os.fsencode(directory.resolve())).hexdigest()[:32]
        self._path = dest_root / "stamps" / f"{identity}.json"
        self._known: dict[str, list[int | str]] = {}
        self._changed = False
        with contextlib.suppress(OSError, ValueError):
            data = json.loads(self._path.read_text("ascii"))
            self._known = {name: list(stamp) for name, stamp in data.items()}

    def digest(self, path: Path) -> Digest:
        """(sha256 hex, bytes) of `path`, from the stamp if it is large and unchanged."""
        before = path.stat()
        if before.st_size <= SMALL:
            return hash_file(path)
        key = [before.st_size, before.st_mtime_ns, before.st_ino]
        stamp = self._known.get(path.name)
        if stamp is not None and stamp[:3] == key and len(stamp) == 4:
            return str(stamp[3]), before.st_size
        sha, size = hash_file(path)
        self._known[path.name] = [*key, sha]
        self._changed = True
        return sha, size

    def save(self) -> None:
        """Keep what was learnt; a cache that cannot be written only costs time."""
        if not self._changed:
            return
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.unlink(missing_ok=True)
            write_new(temporary, json.dumps(self._known, sort_keys=True).encode("ascii"))
            temporary.replace(self._path)
