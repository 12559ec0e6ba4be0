"""How far a compile is, by how long the last one of its kind took: compilers do not say.

`<cache>/pace.json` keeps, for each kind, the bytes of text that were compiled a second.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from runtime.progress import Progress, progress

FIRST = 20e3  # bytes a second, where none is known: a guess
MOST = 0.99  # of the text is called done until the compiler has ended
LEAST = 4096  # bytes of a text that teach a pace: a smaller one takes what starting takes
_FLAGS = ("--iree-hal-target-device=", "--iree-hal-target-backends=")


def kind(flags: Sequence[str]) -> str:
    """What modules that compile at about the same pace have in common: the device in `flags`."""
    named = (flag.partition("=")[2] for flag in flags if flag.startswith(_FLAGS))
    return next(named, "")


class Paced:
    """A compile of `size` bytes of text, as a context; `tick` is to be called while it runs."""

    def __init__(self, root: Path, kind: str, size: int, word: str = "compile") -> None:
        self._path, self._kind, self._size = root / "pace.json", kind, size
        self._rate = _read(self._path).get(self._kind, FIRST)
        self._shown: Progress = progress(f"{word} (estimated)", size)
        self._began = time.monotonic()

    def __enter__(self) -> Paced:
        self._shown.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._shown.done = self._size
            self._remember(self._size / max(time.monotonic() - self._began, 1e-3))
        self._shown.__exit__(kind, error, trace)

    def tick(self) -> None:
        """Tell how far it may be."""
        passed = time.monotonic() - self._began
        self._shown.reach(int(self._size * min(MOST, passed * self._rate / max(1, self._size))))

    def _remember(self, rate: float) -> None:
        """Keep the pace; a cache that cannot be written costs an estimate only."""
        if self._size < LEAST:
            return
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            content = _read(self._path) | {self._kind: round(rate, 1)}
            temporary.write_text(json.dumps(content, sort_keys=True) + "\n", encoding="utf-8")
            temporary.replace(self._path)


def _read(path: Path) -> dict[str, float]:
    """What is known; nothing of a file that is not there or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {
        str(name): float(rate)
        for name, rate in content.items()
        if isinstance(rate, int | float) and math.isfinite(rate) and rate > 0
    }
