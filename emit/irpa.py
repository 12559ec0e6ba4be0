"""IREE parameter archives: streamed writing that survives a kill, and reading as memory maps.

Layout (IREE's `parameter_archive.h`, version 0.0, little endian, packed): a header of 88 bytes, an
entry table of 76-byte records each starting on 16 bytes, the names, then the storage segment in
which each tensor starts on `ALIGNMENT` bytes. Sizes are known before any tensor is read, so the
file is written once, in order, a piece of a tensor in memory at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from emit.errors import EmitError
from emit.state import DTYPES

MAGIC = b"IRPA"
ALIGNMENT = 64
PAGE = 4096
BLOCK = 1 << 24  # bytes written, or read for a check, at a time
SYNC = 1 << 28  # bytes after which what is written must be on the disk
_PREFIX = struct.Struct("<4sHHQQQ")  # magic, major, minor, header size, next header, flags
_COUNTS = struct.Struct("<QQQQQQQ")  # entries, then (offset, length) of entries, names, storage
_ENTRY = struct.Struct("<QIQQQQQQQQ")  # size, type, flags, name, metadata, alignment, storage
_DATA = 2
_CRC = 9  # bytes of a line of the journal: eight hexadecimal digits


@dataclass(frozen=True)
class Tensor:
    """Name, dtype word (`f32`, `bf16`, …) and shape of one parameter."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def _up(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


def _header(specs: Sequence[Tensor]) -> tuple[bytes, list[tuple[int, int]]]:
    """All before the storage, and where each tensor (begins, ends) in the file."""
    names = [spec.name.encode() for spec in specs]
    header_size = _PREFIX.size + _COUNTS.size
    stride = _up(_ENTRY.size, 16)
    entries_at = _up(header_size, 16)
    entries_len = stride * (len(specs) - 1) + _ENTRY.size if specs else 0
    names_at = entries_at + entries_len
    names_len = sum(map(len, names))
    storage_at = _up(names_at + names_len, PAGE)
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        end = _up(end + spec.nbytes, ALIGNMENT)
    out = bytearray(storage_at)
    _PREFIX.pack_into(out, 0, MAGIC, 0, 0, header_size, 0, 0)
    segments = (entries_at, entries_len, names_at, names_len, storage_at, end)
    _COUNTS.pack_into(out, _PREFIX.size, len(specs), *segments)
    name_at = 0
    for i, (spec, name) in enumerate(zip(specs, names, strict=True)):
        where = (name_at, len(name), 0, 0, ALIGNMENT, offsets[i], spec.nbytes)
        _ENTRY.pack_into(out, entries_at + i * stride, _ENTRY.size, _DATA, 0, *where)
        name_at += len(name)
    out[names_at : names_at + names_len] = b"".join(names)
    begins = [storage_at + offset for offset in offsets]
    ends = [(at, at + spec.nbytes) for at, spec in zip(begins, specs, strict=True)]
    return bytes(out), ends


def size(specs: Iterable[Tensor]) -> int:
    """Bytes of the archive of `specs`."""
    header, places = _header(list(specs))
    return _size(header, places)


def _size(header: bytes, places: Sequence[tuple[int, int]]) -> int:
    return _up(_up(places[-1][1] if places else len(header), ALIGNMENT), PAGE)


def _ignore(count: int) -> None:
    del count


class Writer:
    """Writes the archive `path` of `specs`, as a context: `put` for each tensor, in order.

    The bytes are in `path`.partial until all are there. With a `key`, a word for all that they are
    made from, `path`.journal holds a checksum of each tensor that is complete, and a later Writer
    of the same specs and key goes on after them: `done` is their number. What does not match its
    checksum, or is of another key, is written again. An exception in the block removes both files,
    unless it ends the process (KeyboardInterrupt). The journal stays, so that a finished file is
    recognised, too; two Writers of one path and key wait for each other. `told` is called with the
    number of bytes that were written, or found to be there, as they are.
    """

    def __init__(
        self,
        path: Path,
        specs: Iterable[Tensor],
        key: str | None = None,
        told: Callable[[int], None] = _ignore,
    ) -> None:
        self.path, self.specs, self._key, self._told = path, list(specs), key, told
        self._partial = path.with_name(path.name + ".partial")
        self._journal_path = path.with_name(path.name + ".journal")
        self._header, self._places = _header(self.specs)
        self.done = 0
        self._file = self._journal = -1
        self._crc = self._at = self._synced = 0

    def __enter__(self) -> Writer:
        try:
            sums: list[int] = []
            if self._key is not None:
                self._lock_journal()
                sums = self._sums()
            if sums and self.path.exists() and not self._partial.exists():
                self.path.rename(self._partial)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._file = os.open(self._partial, flags, 0o666)
            self._continue(sums)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
        except Exception:
            self._discard()
            raise
        else:
            if isinstance(error, Exception) or (error is not None and self._key is None):
                self._discard()
        finally:
            self._close()

    def put(self, pieces: Iterable[np.ndarray]) -> None:
        """Write the next tensor, given as arrays that follow each other along its first axis.

        Raises EmitError where they are not what was declared.
        """
        spec = self.specs[self.done]
        rows = spec.shape[0] if spec.shape else 1
        self._pad(self._places[self.done][0])
        found = 0
        for piece in pieces:
            part = piece if spec.shape else piece.reshape(1, *piece.shape)
            found += part.shape[0] if part.ndim else rows + 1
            wrong = part.shape[1:] != spec.shape[1:] or found > rows
            if wrong or piece.dtype != DTYPES[spec.dtype]:
                raise EmitError(
                    f"{spec.name}: made as {piece.dtype}{list(piece.shape)}, "
                    f"declared as {spec.dtype}{list(spec.shape)}"
                )
            self._write(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
        if found != rows:
            raise EmitError(
                f"{spec.name}: made {found} of {rows} of {spec.dtype}{list(spec.shape)}"
            )
        self._complete()

    # What is there already

    def _lock_journal(self) -> None:
        """Open the journal and wait until no other Writer has it."""
        path, flags = self._journal_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        while True:
            self._journal = os.open(path, flags, 0o666)
            fcntl.flock(self._journal, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._journal), path.stat()):
                    return
            os.close(self._journal)  # another one has removed it
            self._journal = -1

    @property
    def _first_line(self) -> bytes:
        """Says of which conversion the journal is."""
        kinds = [[spec.name, spec.dtype, list(spec.shape)] for spec in self.specs]
        digest = hashlib.sha256(self._header + repr([self._key, kinds]).encode()).hexdigest()
        return f"{digest}\n".encode()

    def _sums(self) -> list[int]:
        """The checksums of the tensors that the journal names; none of another conversion."""
        size = os.fstat(self._journal).st_size
        text = os.pread(self._journal, size, 0)
        first = self._first_line
        if not text.startswith(first):
            return []
        sums = []
        for at in range(len(first), size - _CRC + 1, _CRC):
            line = text[at : at + _CRC]
            if line[-1:] != b"\n" or len(sums) == len(self.specs):
                break
            with contextlib.suppress(ValueError):
                sums.append(int(line, 16))
                continue
            break
        return sums

    def _continue(self, sums: Sequence[int]) -> None:
        """Go to the end of the tensors of `sums` that are there as they were written."""
        for wanted in sums:
            end, crc = self._places[self.done][1], 0
            while self._at < end:
                block = os.pread(self._file, min(BLOCK, end - self._at), self._at)
                if not block:
                    break
                crc = zlib.crc32(block, crc)
                self._at += len(block)
                self._told(len(block))
            if self._at < end or crc != wanted:
                break
            self.done += 1
        here = self._places[self.done - 1][1] if self.done else 0
        self._told(here - self._at)
        self._at = self._synced = here
        os.ftruncate(self._file, here)
        os.lseek(self._file, here, os.SEEK_SET)
        if self._key is not None:
            first = self._first_line
            os.ftruncate(self._journal, (len(first) + _CRC * self.done) if self.done else 0)
            if not self.done:
                os.write(self._journal, first)
            os.lseek(self._journal, 0, os.SEEK_END)
        if not self.done:
            self._write(self._header)

    # Bytes

    def _pad(self, offset: int) -> None:
        self._write(bytes(offset - self._at))

    def _write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for start in range(0, len(view), BLOCK):
            block = view[start : start + BLOCK]
            self._crc = zlib.crc32(block, self._crc)
            while block:
                count = os.write(self._file, block)
                block = block[count:]
                self._at += count
                self._told(count)

    def _complete(self) -> None:
        """Note the tensor in the journal; from here on it is not made again."""
        self.done += 1
        if self._key is not None:
            os.write(self._journal, f"{self._crc:08x}\n".encode())
            if self._at - self._synced >= SYNC:
                self._sync()
        self._crc = 0

    def _sync(self) -> None:
        os.fsync(self._file)
        os.fsync(self._journal)
        self._synced = self._at

    def _finish(self) -> None:
        """The whole file, under its name. ValueError if tensors lack."""
        if self.done != len(self.specs):
            raise ValueError(f"{self.done} tensors were put, expected {len(self.specs)}")
        self._pad(_size(self._header, self._places))
        if self._key is not None:
            self._sync()
        self._partial.rename(self.path)

    def _discard(self) -> None:
        self._partial.unlink(missing_ok=True)
        if self._key is not None:
            self._journal_path.unlink(missing_ok=True)

    def _close(self) -> None:
        for descriptor in (self._file, self._journal):
            if descriptor >= 0:
                os.close(descriptor)


def write(path: Path, specs: Iterable[Tensor], arrays: Iterable[np.ndarray]) -> None:
    """Write `arrays` (matching `specs` in order, dtype and shape) to `path`.

    Raises EmitError where an array differs from its spec.
    """
    with Writer(path, specs) as writer:
        for _, array in zip(writer.specs, arrays, strict=True):
            writer.put([array])


def read(path: Path, specs: Iterable[Tensor]) -> Mapping[str, np.ndarray]:
    """Read-only memory maps of the parameters `specs` in the archive `path`.

    Raises EmitError if the file is not an archive or lacks, or holds in another size, one of them.
    """
    try:
        found = _entries(np.memmap(path, dtype=np.uint8, mode="r"))
    except (ValueError, OverflowError, IndexError, struct.error) as error:
        raise EmitError(
            f"{path}: not an IREE parameter archive ({error}); convert the checkpoint again"
        ) from error
    views: dict[str, np.ndarray] = {}
    for spec in specs:
        if spec.name not in found or found[spec.name].size != spec.nbytes:
            size = found[spec.name].size if spec.name in found else "no"
            raise EmitError(f"{path}: {spec.name}: found {size} bytes, expected {spec.nbytes}")
        views[spec.name] = found[spec.name].view(DTYPES[spec.dtype]).reshape(spec.shape)
    return views


def _entries(raw: np.ndarray) -> dict[str, np.ndarray]:
    """The bytes of each tensor of the archive `raw`, by name; ValueError or struct.error if bad."""
    header = raw.data
    magic, *_ = _PREFIX.unpack_from(header)
    if magic != MAGIC:
        raise ValueError(f"begins with {magic!r}, expected {MAGIC!r}")
    count, entries_at, _, names_at, _, storage_at, _ = _COUNTS.unpack_from(header, _PREFIX.size)
    found: dict[str, np.ndarray] = {}
    named = 0
    for i in range(count):
        entry = _ENTRY.unpack_from(header, entries_at + i * _up(_ENTRY.size, 16))
        name_off, name_len, _, _, _, offset, length = entry[3:]
        named += name_len
        if named > len(raw):
            raise ValueError(f"names of {named} bytes in a file of {len(raw)}")
        name = raw[names_at + name_off : names_at + name_off + name_len].tobytes().decode()
        found[name] = raw[storage_at + offset : storage_at + offset + length]
    return found
