"""The README's support table, generated from the recipes: `python -m recipes.table README.md`."""

from __future__ import annotations

import sys
from pathlib import Path

from recipes.resolve import every_model, every_target
from recipes.schema import WEIGHT_TYPES, TargetRecipe
from runtime.errors import UserError, report

BEGIN, END = "<!-- support:begin -->", "<!-- support:end -->"
_PROOF = {
    "host": "at build, on a machine whose CPU has the features",
    "driver": "at build, where a driver is installed",
    "emulator": "at build, where qemu is installed",
    "never": "on the device, by `scanwright verify`",
}


def render() -> str:
    """The two Markdown tables (models; targets), without the markers around them."""
    models = [
        (f"`{m.name}`", m.family or "", _source(m.source), m.weights, _words(m.shapes), m.about)
        for m in every_model()
    ]
    targets = [
        (f"`{t.name}`", t.about, *(_weight(t, kind) for kind in WEIGHT_TYPES), _PROOF[t.runs_here])
        for t in every_target()
    ]
    return "\n\n".join(
        [
            "Every model below builds for every target below.",
            _table(("model", "family", "source", "weights", "shapes", "about"), models),
            _table(("target", "for", *WEIGHT_TYPES, "proof"), targets),
        ]
    )


def insert(text: str) -> str:
    """`text` with the tables between the markers. Raises UserError where a marker is missing."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise UserError(f"README: markers {BEGIN} … {END} not found: add them, in this order")
    return f"{head}{begin}\n{render()}\n{end}{tail}"


def _source(source: str) -> str:
    kind, _, place = source.partition(":")
    return f"[{place}](https://huggingface.co/{place})" if kind == "hf" else "in this repository"


def _weight(target: TargetRecipe, kind: str) -> str:
    return "yes" if kind in target.weights else f"as {target.substitute[kind]}"


def _words(words: tuple[str, ...]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in lines
    )


def main(argv: list[str]) -> int:
    """Write the tables into the file named by `argv[0]`; exit code."""
    try:
        if len(argv) != 1:
            raise UserError("usage: python -m recipes.table README.md")
        path = Path(argv[0])
        try:
            old = path.read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}: name the file to write into") from error
        path.write_text(insert(old), encoding="utf-8")
    except UserError as error:
        return report(error)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
