"""Time of every kernel and copy on an NVIDIA GPU, by CUPTI's activity records.

IREE's CUDA driver has no profiling of its own, so this loads NVIDIA's libcupti (a CUDA toolkit, a
`nvidia-cuda-cupti` package or the pack itself has it) with ctypes. Needs no compiler.

Only fields that have stood at the same place in every version of the records since CUDA 11 are
read: kind u32 at 0; start u64 at 16 and end u64 at 24, in ns; of copies and fills bytes u64 at 8;
of kernels the name, a char*, at 104.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KERNEL, COPY, FILL = 10, 1, 2  # CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, _MEMCPY, _MEMSET
BUFFER_BYTES = 8 << 20
_FLUSH_FORCED = 1

_Request = ctypes.CFUNCTYPE(
    None,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.POINTER(ctypes.c_size_t),
)
_Complete = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
)


class NoProfiler(Exception):
    """CUPTI is not here or refuses to work; the message says why."""


@dataclass(frozen=True)
class Activity:
    """One kernel, copy or fill: times in ns on the device's clock, bytes of a copy or fill."""

    name: str
    start: int
    end: int
    bytes: int


def find_library(own: Path) -> Iterator[Path]:
    """Places of libcupti: $CUPTI_LIBRARY, installed packages, toolkits, the pack `own`."""
    if "CUPTI_LIBRARY" in os.environ:
        yield Path(os.environ["CUPTI_LIBRARY"])
    names = ("libcupti.so.13", "libcupti.so.12")
    for place in map(Path, sys.path):
        for folder in ("nvidia/cu13/lib", "nvidia/cuda_cupti/lib"):
            yield from (place / folder / name for name in names)
    for toolkit in sorted(Path("/usr/local").glob("cuda*"), reverse=True):
        for folder in ("lib64", "lib", "extras/CUPTI/lib64"):
            yield from (toolkit / folder / name for name in names)
    yield from (own / "site" / "lib" / name for name in names)


class Profiler:
    """Collects activities between `start` and `stop`; one a process."""

    def __init__(self, own: Path) -> None:
        """Load the library. Raises NoProfiler."""
        tried: list[str] = []
        self._cupti: Any = None
        for path in find_library(own):
            if not path.is_file():
                continue
            try:
                self._cupti = ctypes.CDLL(str(path))
                self.library = str(path)
                break
            except OSError as error:
                tried.append(f"{path}: {error}")
        if self._cupti is None:
            raise NoProfiler(f"no libcupti here ({'; '.join(tried) or 'not installed'})")
        self._free: dict[int, Any] = {}
        self._activities: list[Activity] = []
        self._callbacks = (_Request(self._request), _Complete(self._complete))
        self._check("cuptiActivityRegisterCallbacks", *self._callbacks)

    def start(self) -> None:
        """Begin to record. Raises NoProfiler."""
        for kind in (KERNEL, COPY, FILL):
            self._check("cuptiActivityEnable", kind)

    def stop(self) -> list[Activity]:
        """End recording; everything recorded, by start time. Raises NoProfiler."""
        self._check("cuptiActivityFlushAll", _FLUSH_FORCED)
        for kind in (KERNEL, COPY, FILL):
            self._check("cuptiActivityDisable", kind)
        found, self._activities = self._activities, []
        return sorted(found, key=lambda activity: activity.start)

    def _check(self, function: str, *arguments: Any) -> None:
        code = getattr(self._cupti, function)(*arguments)
        if code:
            word = ctypes.c_char_p()
            self._cupti.cuptiGetResultString(code, ctypes.byref(word))
            text = word.value.decode() if word.value else ""
            raise NoProfiler(f"{function}: {text or code} ({self.library})")

    def _request(self, buffer: Any, size: Any, records: Any) -> None:
        room = ctypes.create_string_buffer(BUFFER_BYTES + 8)
        address = -(-ctypes.addressof(room) // 8) * 8
        self._free[address] = room  # alive until it comes back
        buffer[0], size[0], records[0] = address, BUFFER_BYTES, 0

    def _complete(self, context: Any, stream: int, buffer: int, size: int, valid: int) -> None:
        record = ctypes.c_void_p()
        following = self._cupti.cuptiActivityGetNextRecord
        at = ctypes.c_void_p(buffer)
        while valid and following(at, ctypes.c_size_t(valid), ctypes.byref(record)) == 0:
            activity = read(record.value or 0)
            if activity is not None:
                self._activities.append(activity)
        self._free.pop(buffer, None)


def read(address: int) -> Activity | None:
    """The activity record at an address; None for a kind that was not asked for."""
    kind = ctypes.c_uint32.from_address(address).value
    if kind not in (KERNEL, COPY, FILL):
        return None
    start = ctypes.c_uint64.from_address(address + 16).value
    end = ctypes.c_uint64.from_address(address + 24).value
    if kind == KERNEL:
        name = ctypes.c_char_p.from_address(address + 104).value
        return Activity(name.decode(errors="replace") if name else "(kernel)", start, end, 0)
    moved = ctypes.c_uint64.from_address(address + 8).value
    return Activity("(copy)" if kind == COPY else "(fill)", start, end, moved)


def busy_ns(activities: list[Activity]) -> int:
    """Time in which at least one of them (ordered by start) ran."""
    total, until = 0, 0
    for activity in activities:
        total += max(0, activity.end - max(activity.start, until))
        until = max(until, activity.end)
    return total
