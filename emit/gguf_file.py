"""Reads a GGUF file: its metadata, the table of its tensors, and their bytes, mapped.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. A model
may be split into files `NAME-00001-of-00003.gguf` …, the first of which holds the metadata.

Nothing in a file is trusted: each count, length and offset is compared with the bytes that are
there before anything is allocated, tensors may not overlap, and no other file is read than the
other parts of a split one, which lie beside it.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from emit.checkpoint import TensorInfo, release
from emit.errors import EmitError, shallow

MAX_ITEMS = 1 << 22  # elements of all arrays of a file: some vocabularies have 10^6 with merges
MAX_TENSORS = 1 << 20
MAX_NAME = 1 << 10
MAX_RANK = 4
MAX_PARTS = 1000
AGAIN = "download or convert the file again"

PLAIN: dict[str, np.dtype[Any]] = {
    "f32": np.dtype("<f4"),
    "f16": np.dtype("<f2"),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}
# Number of a type in a file -> its name, how many elements a block has and how many bytes.
KINDS: dict[int, tuple[str, int, int]] = {
    0: ("f32", 1, 4), 1: ("f16", 1, 2), 30: ("bf16", 1, 2),
    2: ("q4_0", 32, 18), 3: ("q4_1", 32, 20), 6: ("q5_0", 32, 22), 7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34), 10: ("q2_k", 256, 84), 11: ("q3_k", 256, 110), 12: ("q4_k", 256, 144),
    13: ("q5_k", 256, 176), 14: ("q6_k", 256, 210), 20: ("iq4_nl", 32, 18),
    23: ("iq4_xs", 256, 136),
}  # fmt: skip
# What else there is, so that an error can name it.
OTHERS = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S",
    22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip

_NUMBERS = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_PART = re.compile(r"(?P<base>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True)
class Gguf:
    """An opened file (with all its parts); nothing of a tensor is read until `read` is called.

    The dtype of a tensor is a name of KINDS; its shape is row-major, the reverse of what the file
    says, and blocks lie along the last axis.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    _maps: Mapping[Path, mmap.mmap] = field(repr=False)

    def read(self, name: str) -> np.ndarray:
        """Tensor `name` as a read-only view: its numbers, or u8[..., bytes of a row] of blocks."""
        info = self.tensors[name]
        plain = info.dtype in PLAIN
        dtype = PLAIN[info.dtype] if plain else np.dtype(np.uint8)
        rows = info.shape[:-1]
        count = math.prod(rows)
        last = info.shape[-1] if plain else (info.end - info.begin) // max(count, 1)
        return np.ndarray((*rows, last), dtype, buffer=self._maps[info.file], offset=info.begin)

    def release(self) -> None:
        """Give back the memory of what was read."""
        release(self._maps.values())


def open_file(path: str | Path) -> Gguf:
    """Open the GGUF file at `path`, or all parts of a split one of which it is the first.

    Raises EmitError, one line naming file and field, for anything malformed or not supported.
    """
    first = Path(path).resolve()
    metadata: dict[str, Any] = {}
    tensors: dict[str, TensorInfo] = {}
    maps: dict[Path, mmap.mmap] = {}
    paths = [first, *_others(first)]
    for number, part in enumerate(paths):
        maps[part] = _mapped(part)
        reader = _Reader(part, maps[part])
        found, table = reader.header()
        if number == 0:
            metadata = found
        if found.get("split.count", 1) != len(paths) or found.get("split.no", 0) != number:
            raise _bad(
                part,
                f"split.no and split.count say part {_show(found.get('split.no', 0))} of"
                f" {_show(found.get('split.count', 1))}, expected {number} of {len(paths)} by its"
                " name: give the first part, with the others beside it under their own names",
            )
        if twice := sorted(tensors.keys() & table.keys()):
            raise _bad(part, f"holds {_show(twice[0])}, which another part holds too; {AGAIN}")
        tensors |= table
    wanted = metadata.get("split.tensors.count", len(tensors))
    if wanted != len(tensors):
        raise _bad(first, f"split.tensors.count: found {_show(wanted)}, but there are"
                   f" {len(tensors)} tensors; {AGAIN}")  # fmt: skip
    return Gguf(first, metadata, dict(sorted(tensors.items())), maps)


def parts(path: Path) -> list[Path]:
    """`path` and, where its name says that it is the first of several, the other parts."""
    match = _PART.fullmatch(path.name)
    if match is None or match["number"] != "00001" or not 1 < int(match["count"]) <= MAX_PARTS:
        return [path]
    names = (f"{match['base']}-{i:05}-of-{match['count']}.gguf" for i in
             range(1, int(match["count"]) + 1))  # fmt: skip
    return [path.with_name(name) for name in names]


def _others(first: Path) -> list[Path]:
    return parts(first)[1:]


def _mapped(path: Path) -> mmap.mmap:
    try:
        if not path.is_file():
            raise _bad(path, "no such file; expected a GGUF file and all its parts")
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                raise _bad(path, f"{size} bytes, expected at least the 24 of a header; {AGAIN}")
            return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except OSError as error:
        raise _bad(path, f"cannot be read ({error.strerror})") from None


class _Reader:
    """The header of one file, read from its beginning."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at, self.size = path, data, 0, len(data)
        self.items = 0

    def header(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        """The metadata, and the tensors by name."""
        magic, version, tensors, keys = self._unpack("<4sIQQ", "header")
        if magic != b"GGUF":
            raise _bad(self.path, f"begins with {magic!r}, expected GGUF: not a GGUF file")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3)
            what = "is big-endian, expected little-endian" if swapped else "is not supported"
            raise _bad(self.path, f"version {version if not swapped else '2 or 3'} {what}")
        left = self.size - self.at
        if keys * 13 > left or tensors * 24 > left or tensors > MAX_TENSORS:
            raise _bad(self.path, f"says {keys} keys and {tensors} tensors, which {left} bytes"
                       f" cannot hold; {AGAIN}")  # fmt: skip
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._string("a key", MAX_NAME)
            if key in metadata:
                raise _bad(self.path, f"the key {_show(key)} is there twice; {AGAIN}")
            (kind,) = self._unpack("<I", key)
            metadata[key] = self._value(key, kind)
        return metadata, self._table(tensors, metadata.get("general.alignment", 32))

    def _unpack(self, form: str, what: str) -> tuple[Any, ...]:
        end = self.at + struct.calcsize(form)
        if end > self.size:
            raise self._short(what)
        found = struct.unpack_from(form, self.data, self.at)
        self.at = end
        return found

    def _short(self, what: str) -> EmitError:
        return _bad(self.path, f"ends in {_show(what)}: {self.size} bytes are too few; {AGAIN}")

    def _string(self, what: str, most: int | None = None) -> str:
        (length,) = self._unpack("<Q", what)
        if length > self.size - self.at:
            raise self._short(what)
        if most is not None and length > most:
            raise _bad(self.path, f"{what} of {length} bytes, expected {most} at most; {AGAIN}")
        raw = self.data[self.at : self.at + length]
        self.at += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            if most is not None:
                raise _bad(self.path, f"{what} is not UTF-8: {raw[:40]!r}; {AGAIN}") from None
            return raw.decode("utf-8", "surrogateescape")  # tokens of some vocabularies are bytes

    def _value(self, key: str, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._numbers(key, kind, 1)[0]
        if kind == _STRING:
            return self._string(key)
        if kind != _ARRAY:
            raise _bad(self.path, f"{_show(key)} has the unknown type {kind}; {AGAIN}")
        inner, count = self._unpack("<IQ", key)
        self.items += count
        if self.items > MAX_ITEMS:
            raise _bad(self.path, f"{_show(key)} has {count} elements, expected at most"
                       f" {MAX_ITEMS} of all arrays")  # fmt: skip
        if inner == _STRING:
            if count * 8 > self.size - self.at:
                raise self._short(key)
            return [self._string(key) for _ in range(count)]
        if inner not in _NUMBERS:
            raise _bad(self.path, f"{_show(key)} is an array of type {inner}, which is not"
                       " supported")  # fmt: skip
        return self._numbers(key, inner, count)

    def _numbers(self, key: str, kind: int, count: int) -> list[Any]:
        dtype = np.dtype(_NUMBERS[kind])
        end = self.at + count * dtype.itemsize
        if end > self.size:
            raise self._short(key)
        found = np.frombuffer(self.data, dtype, count, self.at)
        self.at = end
        # The shortest decimal of a float32: 1e-05 was written, not 9.99999975e-06.
        return [float(str(x)) for x in found] if kind == 6 else found.tolist()

    def _table(self, count: int, alignment: Any) -> dict[str, TensorInfo]:
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise _bad(self.path, f"general.alignment = {_show(alignment)}, expected a power of 2")
        entries: list[tuple[int, str, str, tuple[int, ...], int]] = []
        seen: set[str] = set()
        for _ in range(count):
            name = self._string("a tensor's name", MAX_NAME)
            if name in seen:
                raise _bad(self.path, f"tensor {_show(name)} is there twice; {AGAIN}")
            seen.add(name)
            entries.append(self._entry(name))
        data = self.at + -self.at % alignment
        table, position = {}, 0
        for offset, name, dtype, shape, size in sorted(entries):
            if offset != position:
                raise _bad(self.path, f"tensor {_show(name)} begins at byte {offset} of the data,"
                           f" expected {position}; {AGAIN}")  # fmt: skip
            begin = data + offset
            if begin + size > self.size:
                raise _bad(self.path, f"truncated: {self.size} bytes, expected {begin + size} (to"
                           f" the end of tensor {_show(name)}); {AGAIN}")  # fmt: skip
            table[name] = TensorInfo(self.path, dtype, shape, begin, begin + size)
            position = offset + size + -size % alignment
        return table

    def _entry(self, name: str) -> tuple[int, str, str, tuple[int, ...], int]:
        """(offset, name, dtype, shape, bytes) of one tensor."""
        where = f"tensor {_show(name)}"
        (rank,) = self._unpack("<I", where)
        if not 1 <= rank <= MAX_RANK:
            raise _bad(self.path, f"{where} has {rank} dimensions, expected 1 to {MAX_RANK}")
        sizes = self._unpack(f"<{rank}Q", where)
        kind, offset = self._unpack("<IQ", where)
        if kind not in KINDS:
            words = ", ".join(word.upper() for word, _, _ in KINDS.values())
            raise _bad(self.path, f"{where} has the type {OTHERS.get(kind, kind)}, expected one of"
                       f" {words}")  # fmt: skip
        dtype, block, size = KINDS[kind]
        if not all(sizes) or math.prod(sizes) > self.size * 4:
            raise _bad(self.path, f"{where} has shape {list(sizes)[::-1]}, which {self.size} bytes"
                       f" cannot hold; {AGAIN}")  # fmt: skip
        if sizes[0] % block:
            raise _bad(self.path, f"{where} has rows of {sizes[0]}, expected a multiple of {block}"
                       f" for {dtype.upper()}; {AGAIN}")  # fmt: skip
        return offset, name, dtype, tuple(sizes[::-1]), math.prod(sizes) // block * size


def _show(value: object) -> str:
    """`value` in ASCII on one line, at most about 80 characters."""
    text = shallow(value)
    return text if len(text) <= 80 else text[:77] + "…"


def _bad(path: Path, message: str) -> EmitError:
    return EmitError(" ".join(f"{path}: {message}".split()))
