"""A bundle as one tar file: the same bundle gives the same bytes, and nothing else is read back.

Plain files only, uncompressed, sorted by name, with a fixed mode, owner and time. Reading looks at
headers one by one and keeps none of them large, so a hostile archive costs neither memory nor time.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from runtime import manifest as mf
from runtime import web
from runtime.errors import UserError
from runtime.place import MAX_UNLISTED, UNLISTED
from runtime.progress import shown
from runtime.strict import MAX_JSON_BYTES

MAX_MEMBERS = 4096
MAX_MANIFEST = MAX_JSON_BYTES
_BLOCK = tarfile.BLOCKSIZE
_USTAR_MAX = 8 << 30  # from here on a size is written as GNU tar does
_CHUNK = 1 << 20
_KINDS = {
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a pipe",
    tarfile.DIRTYPE: "a directory",
}


# Writing ------------------------------------------------------------------------------------------


def pack(bundle: Path, to: Path) -> str:
    """Write the bundle to the tar file `to`, which appears whole; returns its sha256.

    Raises UserError if a file is not what the manifest says.
    """
    manifest = mf.load(bundle)
    members = {ref.path: ref for ref in manifest.files.all()}
    names = sorted({*members, mf.FILE_NAME, *_unlisted(bundle, members)})
    to.absolute().parent.mkdir(parents=True, exist_ok=True)
    if to.is_dir():
        raise UserError(f"to={to}: a directory, expected the name of a tar file")
    new = to.with_name(f".{to.name}-new")
    try:
        digest = hashlib.sha256()
        with new.open("wb") as out:
            for name in names:
                _append(out, digest, bundle, name, members.get(name))
            _put(out, digest, bytes(2 * _BLOCK))
            _put(out, digest, bytes(-out.tell() % tarfile.RECORDSIZE))
            out.flush()
            os.fsync(out.fileno())
        new.replace(to)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    return digest.hexdigest()


def _unlisted(bundle: Path, members: dict[str, mf.FileRef]) -> list[str]:
    return [name for name in UNLISTED if name not in members and (bundle / name).is_file()]


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = size, 0o644, 0
    kind = tarfile.USTAR_FORMAT if size < _USTAR_MAX else tarfile.GNU_FORMAT
    try:
        header = info.tobuf(kind, "utf-8", "strict")
    except ValueError as error:
        raise UserError(f"{name}: {error}, expected a name that a tar header holds") from error
    if len(header) != _BLOCK:
        raise UserError(f"{name}: found {len(name)} characters, expected 100 at most for a tar")
    return header


def _append(
    out: BinaryIO, digest: hashlib._Hash, bundle: Path, name: str, ref: mf.FileRef | None
) -> None:
    path = bundle / name
    if not path.is_file():
        raise UserError(f"{path}: missing, expected a file that the manifest lists; rebuild it")
    size, own = path.stat().st_size, hashlib.sha256()
    if ref is not None and size != ref.size:
        raise UserError(f"{path}: {size} bytes, expected {ref.size}; rebuild the bundle")
    _put(out, digest, _header(name, size))
    with shown(f"pack {name}", path) as file:
        while piece := file.read(_CHUNK):
            own.update(piece)
            _put(out, digest, piece)
    if ref is not None and own.hexdigest() != ref.sha256:
        raise UserError(
            f"{path}: sha256 {own.hexdigest()}, expected {ref.sha256}; rebuild the bundle"
        )
    _put(out, digest, bytes(-size % _BLOCK))


def _put(out: BinaryIO, digest: hashlib._Hash, data: bytes) -> None:
    out.write(data)
    digest.update(data)


# Reading ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Member:
    """Where in the archive a file's bytes are."""

    offset: int
    size: int


def members(path: Path) -> dict[str, Member]:
    """The plain files of a tar file, by name. Raises UserError for an archive with anything else:
    links, devices, directories, absolute names, `..`, a name twice, a size beyond its end."""
    found: dict[str, Member] = {}
    total = path.stat().st_size
    with path.open("rb") as file:
        while True:
            block = file.read(_BLOCK)
            if len(block) < _BLOCK:
                raise UserError(f"{path}: ends at byte {file.tell()} without an end mark, expected"
                                " a whole tar file; get it again")  # fmt: skip
            if block == bytes(_BLOCK):
                return found
            name, size = _member(path, block)
            if name in found:
                raise UserError(f"{path}: {name!a} is there twice, expected each file once")
            if len(found) >= MAX_MEMBERS:
                raise UserError(f"{path}: more than {MAX_MEMBERS} files, expected a bundle's")
            if file.tell() + size > total:
                raise UserError(
                    f"{path}: {name!a} of {size} bytes is cut off, expected a whole tar file; get"
                    " it again"
                )
            found[name] = Member(file.tell(), size)
            file.seek(size + -size % _BLOCK, os.SEEK_CUR)


def _member(path: Path, block: bytes) -> tuple[str, int]:
    """Name and size of a header."""
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise UserError(
            f"{path}: no tar header where one must be ({error}), expected a tar file made by doit"
            " pack"
        ) from error
    name = info.name
    if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        what = _KINDS.get(info.type, f"an entry of type {info.type!a}")
        raise UserError(f"{path}: {name!a} is {what}, expected plain files only")
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or str(PurePosixPath(name)) != name:
        raise UserError(f"{path}: found the name {name!a}, expected a relative path inside")
    if info.size < 0:
        raise UserError(f"{path}: {name!a} has {info.size} bytes, expected 0 or more")
    return name, info.size


class TarSource:
    """A bundle in a tar file, to be pulled."""

    def __init__(self, path: Path) -> None:
        self.where, self._path = str(path), path
        self._members = members(path)

    def _read(self, name: str, limit: int) -> bytes:
        member = self._members[name]
        if member.size > limit:
            raise UserError(f"{self.where}: {name} has {member.size} bytes, expected a small file")
        with self._path.open("rb") as file:
            file.seek(member.offset)
            return file.read(member.size)

    def manifest(self) -> bytes:
        """The bytes of manifest.json."""
        if mf.FILE_NAME not in self._members:
            raise UserError(f"{self.where}: no {mf.FILE_NAME} in it, expected a packed bundle")
        return self._read(mf.FILE_NAME, MAX_MANIFEST)

    def check(self, manifest: mf.Manifest) -> None:
        """Raise UserError unless the archive has exactly the manifest's files, of its sizes."""
        sizes = {ref.path: ref.size for ref in manifest.files.all()}
        for name, member in self._members.items():
            if name not in sizes and name not in (mf.FILE_NAME, *UNLISTED):
                raise UserError(f"{self.where}: {name!a} is not in the manifest, expected no such"
                                " file")  # fmt: skip
            if name in sizes and member.size != sizes[name]:
                raise UserError(
                    f"{self.where}: {name!a} has {member.size} bytes, expected {sizes[name]} by the"
                    " manifest"
                )
        for name in sizes:
            if name not in self._members:
                raise UserError(f"{self.where}: {name!a} is missing, expected it by the manifest")

    def unlisted(self) -> dict[str, bytes]:
        """Files that no manifest can list."""
        return {n: self._read(n, MAX_UNLISTED) for n in UNLISTED if n in self._members}

    def receive(self, ref: mf.FileRef, partial: Path, count: web.Count) -> None:
        """Append the rest of a file to `partial`."""
        member = self._members[ref.path]
        with self._path.open("rb") as file, partial.open("ab") as out:
            have = min(out.tell(), member.size)
            out.truncate(have)
            file.seek(member.offset + have)
            left = member.size - have
            while left and (piece := file.read(min(_CHUNK, left))):
                out.write(piece)
                left -= len(piece)
                count(member.size - left)


# Command ------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `scanwright unpack`."""
    parser.add_argument("file", metavar="FILE.tar", type=Path, help="what doit pack made")
    parser.add_argument("directory", metavar="DIR", type=Path, help="the bundle to make")


def run(args: argparse.Namespace) -> int:
    """`scanwright unpack`. Raises UserError."""
    from runtime.pull import pull

    if not args.file.is_file():
        raise UserError(f"{args.file}: no such file, expected what doit pack made")
    print(f"bundle: {pull(TarSource(args.file), args.directory)}")
    return 0
