"""What a recorded attack is, and makers of its files."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

OUTSIDE = "../outside"  # a directory beside that of the case, which no parser may look into
DEEP = "[" * 100_000 + "]" * 100_000


@dataclass(frozen=True)
class Case:
    """`make` writes the files into an empty directory; the message must hold `said`."""

    name: str
    parser: str
    make: Callable[[Path], object]
    said: str | None


def text(name: str, content: str | bytes) -> Callable[[Path], object]:
    """A maker of one file."""
    data = content.encode(errors="surrogatepass") if isinstance(content, str) else content
    return lambda root: (root / name).write_bytes(data)


def sparse(name: str, head: bytes, size: int) -> Callable[[Path], object]:
    """A maker of a file of `size` bytes, most of which take no place on the disk."""

    def make(root: Path) -> None:
        (root / name).write_bytes(head)
        os.truncate(root / name, size)

    return make


def both(*makers: Callable[[Path], object]) -> Callable[[Path], object]:
    """A maker of several files."""
    return lambda root: [make(root) for make in makers]


def link(name: str, to: str) -> Callable[[Path], object]:
    return lambda root: (root / name).symlink_to(to)
