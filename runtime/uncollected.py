"""Reads large files without the garbage collector."""

from __future__ import annotations

import gc
import threading


class _Uncollected:
    """No garbage collection within it: millions of new objects, none of them garbage, would call
    for it again and again, and it would look through all that was imported: ten times the time of
    the rest. Blocks may be in each other, and in several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._was_enabled = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._was_enabled:
                gc.enable()


UNCOLLECTED = _Uncollected()
