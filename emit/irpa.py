"""IREE parameter archives: streamed writing, and reading as memory maps.

Layout (IREE's `parameter_archive.h`, version 0.0, little endian, packed): a header of 88 bytes, an
entry table of 76-byte records each starting on 16 bytes, the names, then the storage segment in
which each tensor starts on `ALIGNMENT` bytes. Sizes are known before any tensor is read, so the
file is written once, in order, one tensor in memory at a time.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from emit.errors import EmitError
from emit.state import DTYPES

MAGIC = b"IRPA"
ALIGNMENT = 64
PAGE = 4096
_PREFIX = struct.Struct("<4sHHQQQ")  # magic, major, minor, header size, next header, flags
_COUNTS = struct.Struct("<QQQQQQQ")  # entries, then (offset, length) of entries, names, storage
_ENTRY = struct.Struct("<QIQQQQQQQQ")  # size, type, flags, name, metadata, alignment, storage
_DATA = 2


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


def write(path: Path, specs: Iterable[Tensor], arrays: Iterable[np.ndarray]) -> None:
    """Write `arrays` (matching `specs` in order, dtype and shape) to `path`.

    Raises EmitError where an array differs from its spec.
    """
    specs = list(specs)
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
    with path.open("wb") as out:
        out.write(_PREFIX.pack(MAGIC, 0, 0, header_size, 0, 0))
        segments = (entries_at, entries_len, names_at, names_len, storage_at, end)
        out.write(_COUNTS.pack(len(specs), *segments))
        name_at = 0
        for i, (spec, name) in enumerate(zip(specs, names, strict=True)):
            _pad_to(out, entries_at + i * stride)
            where = (name_at, len(name), 0, 0, ALIGNMENT, offsets[i], spec.nbytes)
            out.write(_ENTRY.pack(_ENTRY.size, _DATA, 0, *where))
            name_at += len(name)
        out.write(b"".join(names))
        for spec, offset, array in zip(specs, offsets, arrays, strict=True):
            if array.dtype != DTYPES[spec.dtype] or array.shape != spec.shape:
                raise EmitError(
                    f"{spec.name}: made as {array.dtype}{list(array.shape)}, "
                    f"declared as {spec.dtype}{list(spec.shape)}"
                )
            _pad_to(out, storage_at + offset)
            out.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        _pad_to(out, _up(storage_at + end, PAGE))


def _pad_to(out: BinaryIO, offset: int) -> None:
    out.write(b"\0" * (offset - out.tell()))


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
    for i in range(count):
        entry = _ENTRY.unpack_from(header, entries_at + i * _up(_ENTRY.size, 16))
        name_off, name_len, _, _, _, offset, length = entry[3:]
        name = raw[names_at + name_off : names_at + name_off + name_len].tobytes().decode()
        found[name] = raw[storage_at + offset : storage_at + offset + length]
    return found
