"""Seeded random parameters from a manifest's specs, for bundles without weights.

Values are `offset + scale * z`. z is a fixed block of about four million values of an
approximately standard normal law (the centred sum of twelve 16-bit uniforms: integer arithmetic
on a bit stream that NumPy guarantees, so the values are the same on every machine), repeated and
entered at a place that depends on the parameter's name. One block serves any size, so on Linux a
tensor of any size is a few megabytes of memory mapped again and again.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import json
import mmap
import os
import shutil
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runtime import manifest as mf
from runtime.errors import UserError, report
from runtime.hal import DTYPES, rt

PAGE_VALUES = 4096  # a whole number of memory pages in every dtype
BLOCK_VALUES = PAGE_VALUES * 1021  # 1021 is prime, so rows of a matrix do not line up


@functools.lru_cache(maxsize=1)
def normal_block(seed: int) -> np.ndarray[Any, Any]:
    """f32[BLOCK_VALUES] approximately standard normal: mean 0, variance 1, within ±6."""
    bits = np.random.PCG64(seed).random_raw(BLOCK_VALUES * 3).astype("<u8", copy=False)
    words = bits.view("<u2").reshape(12, BLOCK_VALUES)
    total = np.zeros(BLOCK_VALUES, np.int32)
    for row in words:
        total += row
    return (total.astype(np.float32) - np.float32(12 * 32767.5)) * np.float32(2.0**-16)


@functools.lru_cache(maxsize=16)
def _block(seed: int, dtype: str, offset: float, scale: float) -> np.ndarray[Any, Any]:
    """The block of one law and dtype, BLOCK_VALUES long."""
    values = normal_block(seed) * np.float32(scale) + np.float32(offset)
    if dtype in ("i8", "i32"):
        values = np.rint(values)
        if dtype == "i8":
            values = values.clip(-128, 127)
    return values.astype(DTYPES[dtype])


def _start(name: str) -> int:
    """Where in the block a parameter begins: a whole number of pages."""
    return zlib.crc32(name.encode()) % (BLOCK_VALUES // PAGE_VALUES) * PAGE_VALUES


def dense(spec: mf.ParamSpec, seed: int) -> np.ndarray[Any, Any]:
    """The bytes of one parameter as u8[nbytes] in memory of its own, 64-byte aligned."""
    raw = _block(seed, spec.dtype, spec.offset, spec.scale).view(np.uint8)
    at = _start(spec.name) * mf.DTYPE_BYTES[spec.dtype]
    room = np.empty(spec.nbytes + 64, np.uint8)
    skip = -room.ctypes.data % 64
    out = room[skip : skip + spec.nbytes]
    done = 0
    while done < spec.nbytes:
        piece = raw[at : at + spec.nbytes - done]
        out[done : done + len(piece)] = piece
        done += len(piece)
        at = 0
    return out


def random_values(specs: Sequence[mf.ParamSpec], seed: int) -> list[np.ndarray[Any, Any]]:
    """Every parameter in its shape and dtype, in memory."""
    return [dense(s, seed).view(DTYPES[s.dtype]).reshape(s.shape) for s in specs]


class MappedBlocks:
    """Parameters as read-only memory that costs one block a law and dtype (Linux only).

    The memory is valid until `close`.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._files: dict[tuple[str, float, float], int] = {}
        self._maps: list[tuple[int, int]] = []
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        kinds = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._libc.mmap.argtypes = kinds
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def _map(self, at: int | None, length: int, flags: int, fd: int, offset: int) -> int:
        # Writable: some drivers pin what they read for writing, which read-only memory refuses, and
        # the block is mapped shared, since a private page would become a copy when it is pinned.
        access = mmap.PROT_READ | mmap.PROT_WRITE
        found = self._libc.mmap(at, length, access, flags, fd, offset)
        if found in (None, ctypes.c_void_p(-1).value):
            raise MemoryError(os.strerror(ctypes.get_errno()))
        return int(found)

    def _file(self, spec: mf.ParamSpec) -> int:
        key = (spec.dtype, spec.offset, spec.scale)
        if key not in self._files:
            fd = os.memfd_create("scanwright-random")
            self._files[key] = fd
            os.truncate(fd, BLOCK_VALUES * mf.DTYPE_BYTES[spec.dtype])
            with mmap.mmap(fd, 0) as view:
                view[:] = _block(self._seed, *key).tobytes()
        return self._files[key]

    def view(self, spec: mf.ParamSpec) -> np.ndarray[Any, Any]:
        """The bytes of one parameter as u8[nbytes]."""
        fd = self._file(spec)
        block = BLOCK_VALUES * mf.DTYPE_BYTES[spec.dtype]
        at = _start(spec.name) * mf.DTYPE_BYTES[spec.dtype]
        length = -(-spec.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        no_reserve = 0x4000  # MAP_NORESERVE
        base = self._map(None, length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve, -1, 0)
        self._maps.append((base, length))
        done = 0
        while done < length:
            size = min(block - at, length - done)
            self._map(base + done, size, mmap.MAP_SHARED | 0x10, fd, at)  # MAP_FIXED
            done += size
            at = 0
        return np.ctypeslib.as_array((ctypes.c_uint8 * spec.nbytes).from_address(base))

    def close(self) -> None:
        """Unmap everything; arrays from `view` must not be used again."""
        for base, length in self._maps:
            self._libc.munmap(base, length)
        for fd in self._files.values():
            os.close(fd)
        self._maps.clear()
        self._files.clear()


def can_map_blocks() -> bool:
    """Whether MappedBlocks works here."""
    return sys.platform == "linux" and hasattr(os, "memfd_create") and mmap.PAGESIZE <= PAGE_VALUES


def write_archive(specs: Sequence[mf.ParamSpec], seed: int, out: Path) -> None:
    """Write the values as an aligned .irpa, whole or not at all. Raises UserError (disk)."""
    blocks = MappedBlocks(seed) if can_map_blocks() else None
    index = rt.ParameterIndex()
    for spec in specs:
        index.add_buffer(spec.name, blocks.view(spec) if blocks else dense(spec, seed))
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    needed = sum(spec.nbytes for spec in specs)
    try:
        free = shutil.disk_usage(out.parent).free
        if free < needed:  # the archive is written through a mapping, where a full disk is fatal
            raise OSError(f"{free} bytes free")
        index.create_archive_file(str(temporary))
        temporary.replace(out)
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"{out}: cannot write {needed} bytes of parameters"
            f" ({str(error).splitlines()[0][:200]}); free disk space or choose another --out"
        ) from error
    finally:
        del index
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        if blocks:
            blocks.close()


def _specs(path: Path) -> tuple[mf.ParamSpec, ...]:
    """Parameter specs of a manifest.json or an interface.json."""
    try:
        is_manifest = "schema" in json.loads(path.read_text())
    except (OSError, ValueError, TypeError):
        is_manifest = False
    return mf.load(path).params if is_manifest else mf.load_interface(path).params


def main(argv: list[str] | None = None) -> int:
    """Command line: write an .irpa for a manifest or interface."""
    parser = argparse.ArgumentParser(prog="python -m runtime.params_random", description=__doc__)
    parser.add_argument("interface", type=Path, help="manifest.json or interface.json")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="the .irpa to write")
    args = parser.parse_args(argv)
    try:
        write_archive(_specs(args.interface), args.seed, args.out)
    except UserError as error:
        return report(error)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
