"""A batch shape is its name: `b<slots>-p<chunk>[+<chunk>…][-c<context>]`."""

from __future__ import annotations

import re
from dataclasses import dataclass

_WORD = re.compile(r"b([1-9]\d{0,3})-p([1-9]\d{0,4}(?:\+[1-9]\d{0,4})*)(?:-c([1-9]\d{0,6}))?")


class ShapeError(ValueError):
    """A word that is no shape; the message says what is wrong with it."""


@dataclass(frozen=True)
class Shape:
    """`slots` rows decoded together, the compiled prefill `chunks` (ascending, unique) in tokens,
    and `context`, the positions of a KV cache (None for models without one)."""

    slots: int
    chunks: tuple[int, ...]
    context: int | None

    @classmethod
    def parse(cls, word: str) -> Shape:
        """The shape named `word`; chunks may come in any order. Raises ShapeError."""
        match = _WORD.fullmatch(word)
        if match is None:
            raise ShapeError(
                f"shape {word!r}: expected b<slots>-p<chunk>[+<chunk>…][-c<context>], "
                "for example b4-p32+256 or b1-p256-c2048"
            )
        slots, chunks, context = match.groups()
        sizes = tuple(sorted({int(size) for size in chunks.split("+")}))
        limit = None if context is None else int(context)
        if limit is not None and limit < sizes[-1]:
            raise ShapeError(
                f"shape {word!r}: context {limit} is shorter than the prefill chunk {sizes[-1]}: "
                f"raise it to at least {sizes[-1]} or drop the chunk"
            )
        return cls(int(slots), sizes, limit)

    @property
    def name(self) -> str:
        """The canonical word: `Shape.parse(shape.name) == shape`."""
        context = "" if self.context is None else f"-c{self.context}"
        return f"b{self.slots}-p{'+'.join(map(str, self.chunks))}{context}"
