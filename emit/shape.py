"""The batch shape that entry points are compiled for."""

from __future__ import annotations

import re
from dataclasses import dataclass

from emit.errors import EmitError

_NAME = re.compile(r"b([1-9]\d*)-p([1-9]\d*(?:\+[1-9]\d*)*)(?:-c([1-9]\d*))?")


@dataclass(frozen=True)
class Shape:
    """`b<slots>-p<chunk>[+<chunk>…][-c<context>]`, parsed."""

    name: str
    slots: int
    chunks: tuple[int, ...]
    context: int | None

    @classmethod
    def parse(cls, name: str) -> Shape:
        """EmitError unless `name` has that form."""
        match = _NAME.fullmatch(name)
        if not match:
            raise EmitError(f"shape {name!r}: expected b<slots>-p<chunk>[+<chunk>…][-c<context>]")
        chunks = tuple(sorted({int(c) for c in match[2].split("+")}))
        return cls(name, int(match[1]), chunks, int(match[3]) if match[3] else None)
