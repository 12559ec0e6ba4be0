"""Perplexity of a bundle on the text that comes with this package, and of its source on the same.

Perplexity is the exponential of the loss: of the mean of -log p(token | those before it), in nats,
over all tokens of some rows but the first of each. The rows are windows of the text, each read from
its own beginning, so that a module with several slots reads as many at once.

    python -m runtime.perplexity DIRECTORY --vocab N --length N --out FILE     the rows

They are made by the tokenizer whose files are in DIRECTORY. Where there is none, or it has ids that
the model has not, they are seeded random ids.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from runtime import tokenizer
from runtime.errors import UserError, report
from runtime.manifest import FileRef

if TYPE_CHECKING:
    from runtime.session import Session

TEXT = Path(__file__).with_suffix(".txt")
WINDOWS = 8
LENGTH = 64  # tokens of a window, where the context has room for them
SEED = 20240531  # of random rows

Rows = Sequence[Sequence[int]]


def windows(ids: Sequence[int], length: int) -> list[list[int]]:
    """The first tokens of a text in WINDOWS rows of `length`; the last may be shorter."""
    ids = list(ids[: WINDOWS * length])
    rows = [ids[at : at + length] for at in range(0, len(ids), length)]
    return [row for row in rows if len(row) > 1]


def seeded(vocab_size: int, length: int) -> list[list[int]]:
    """Random rows: the same everywhere, as the raw stream of PCG64 is."""
    raw = np.random.PCG64([SEED, zlib.crc32(b"perplexity")]).random_raw(WINDOWS * length)
    return windows((raw % np.uint64(vocab_size)).tolist(), length)


def is_random(rows: Rows, vocab_size: int) -> bool:
    """Whether `rows` are the seeded ones."""
    return [list(row) for row in rows] == seeded(vocab_size, max(map(len, rows), default=0))


def rows_of(directory: Path, vocab_size: int, length: int) -> list[list[int]]:
    """The text by the tokenizer whose files are all there is in `directory`, or seeded rows."""
    from runtime.verify import sha256

    files = sorted(directory.iterdir())
    refs = [FileRef(p.name, sha256(p), p.stat().st_size) for p in files]
    return rows_by(directory, refs, vocab_size, length)


def rows_by(
    directory: Path, refs: Sequence[FileRef], vocab_size: int, length: int
) -> list[list[int]]:
    """The text by the tokenizer of a bundle whose files are `refs`, or seeded rows."""
    try:
        found = tokenizer.load(directory, refs)
        ids = found.encode(TEXT.read_text(encoding="utf-8")) if found else []
    except UserError:  # told by those who use it; a build does not
        ids = []
    rows = windows(ids, length)
    known = all(0 <= token < vocab_size for row in rows for token in row)
    return rows if rows and known else seeded(vocab_size, length)


def surprise(logits: np.ndarray[Any, Any], token: int) -> float:
    """-log softmax(logits)[token], in float64."""
    wide = logits.astype(np.float64)
    top = wide.max()
    return float(top + np.log(np.exp(wide - top).sum()) - wide[token])


def loss(session: Session, rows: Rows) -> float:
    """The loss of `rows` by decode steps, as many rows at once as there are slots.

    NaN where a logit is none.
    """
    total: list[float] = []
    for first in range(0, len(rows), session.slots):
        total += _together(session, rows[first : first + session.slots])
    return math.fsum(total) / len(total) if np.isfinite(total).all() else math.nan


def _together(session: Session, rows: Rows) -> list[float]:
    """-log p of each token but the first of at most as many rows as there are slots."""
    found: list[float] = []
    for slot in range(len(rows)):
        session.reset(slot)
    given = np.zeros((3, session.slots), np.int32)
    for position in range(max(map(len, rows)) - 1):
        reading = [slot for slot, row in enumerate(rows) if position + 1 < len(row)]
        given[2] = 0
        for slot in reading:
            given[:, slot] = rows[slot][position], position, 1
        logits = session.device.to_host(session.decode(*given)[0])
        found += [surprise(logits[slot], rows[slot][position + 1]) for slot in reading]
    return found


def told(own: float, source: float | None, count: int, random: bool = False) -> str:
    """What `verify` says of a loss, and of the source's where it is known, over `count` tokens."""
    beside = ""
    if source is not None:
        change = 100 * math.expm1(min(own - source, 700.0))
        beside = f", of the source {math.exp(min(source, 700.0)):.3f} ({change:+.2f} %)"
    return f"{math.exp(min(own, 700.0)):.3f}{beside}, {count} {'random ' * random}tokens"


def main(argv: list[str] | None = None) -> int:
    """See the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m runtime.perplexity")
    parser.add_argument("directory", type=Path)
    for word in ("--vocab", "--length"):
        parser.add_argument(word, type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    try:
        rows = rows_of(args.directory, args.vocab, args.length)
        args.out.write_text(json.dumps(rows) + "\n")
    except (UserError, OSError) as error:
        return report(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
