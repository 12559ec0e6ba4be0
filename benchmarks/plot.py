"""The README's plots: tokens a second by weight type, beside llama.cpp and torch, as SVG.

    python benchmarks/plot.py          benchmarks/peers.json to benchmarks/plots/*.svg and README.md

Bars are medians over rounds, their thin lines quartiles; a group is a weight type.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from peer_report import PEER, summary

HERE = Path(__file__).resolve().parent
SERIES = {"Scanwright": "#1b6ca8", "llama.cpp": "#e08e45", "torch": "#8b929a"}
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 400, 270, 46, 56, 30  # of a panel, and its margins
Rates = dict[str, dict[str, list[float]]]  # weight type -> series -> tokens a second, by round


def rates(rows: Mapping[str, Sequence[float]], tokens: int) -> Rates:
    """A panel's groups, of seconds that `tokens` tokens took."""
    found: Rates = {}
    for kind, file in PEER.items():
        names = {"Scanwright": f"ours {kind}", "llama.cpp": f"llama.cpp {file}"}
        names["torch"] = f"torch {kind}"
        group = {series: rows[name] for series, name in names.items() if name in rows}
        if group:
            found[kind] = {s: [tokens / second for second in v] for s, v in group.items()}
    return found


def ceiling(value: float) -> float:
    """The least of 1, 2, 3, 4, 6, 8 and 10 times a power of ten that is not below `value`."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 3, 4, 6, 8, 10) if step * power >= value)


def mark(tag: str, text: str = "", **attributes: Any) -> str:
    """An element; numbers are written with one decimal, `_` in names as `-`."""
    words = "".join(
        f' {key.replace("_", "-")}="{f"{value:.1f}" if isinstance(value, float) else value}"'
        for key, value in attributes.items()
    )
    return f"<{tag}{words}>{escape(text)}</{tag}>" if text else f"<{tag}{words}/>"


def panel(title: str, groups: Rates, left: int) -> list[str]:
    """Elements of one panel whose left edge is at `left`."""
    highest = max(max(values) for group in groups.values() for values in group.values())
    top, base, scale = ceiling(highest), HEIGHT - BOTTOM, HEIGHT - BOTTOM - TOP
    right, start = float(left + WIDTH - 8), left + LEFT
    parts = [mark("text", title, x=start, y=TOP - 10, font_weight="bold")]
    for i in range(5):
        y, value = base - scale * i / 4, top * i / 4
        parts.append(mark("line", x1=start, x2=right, y1=y, y2=y, stroke="#d8dce0"))
        parts.append(mark("text", f"{value:g}", x=start - 5, y=y + 4, text_anchor="end"))
    wide = (right - start) / len(groups)
    for i, (kind, group) in enumerate(groups.items()):
        bar = (wide - 14) / len(SERIES)
        middle = start + wide * (i + 0.5)
        parts.append(mark("text", kind, x=middle, y=base + 17, text_anchor="middle"))
        for j, (series, values) in enumerate(group.items()):
            x = middle + bar * (j - len(group) / 2)
            parts += column(values, x, bar - 2, base, scale / top, SERIES[series])
    return parts


def column(
    values: Sequence[float], x: float, wide: float, base: int, scale: float, color: str
) -> list[str]:
    """A bar with its value above, and its quartiles if there are some."""
    middle, center = statistics.median(values), x + wide / 2
    y = base - middle * scale
    parts = [mark("rect", x=x, y=y, width=wide, height=middle * scale, fill=color)]
    if len(values) > 1:
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        end = base - high * scale
        parts.append(
            mark("line", x1=center, x2=center, y1=base - low * scale, y2=end, stroke="#202428")
        )
        y = min(y, end)
    label = f"{middle:.0f}" if middle >= 10 else f"{middle:.1f}"
    return [*parts, mark("text", label, x=center, y=y - 3, text_anchor="middle", font_size=9)]


def svg(title: str, panels: Mapping[str, Rates]) -> str:
    """A picture of panels side by side, each with its own scale."""
    width = WIDTH * len(panels)
    parts = [mark("title", title), mark("rect", width=width, height=HEIGHT, fill="#ffffff")]
    parts.append(mark("text", title, x=LEFT, y=20, font_size=14))
    shown = [s for s in SERIES if any(s in g for p in panels.values() for g in p.values())]
    for i, series in enumerate(shown):
        x = width - 100 * (len(shown) - i)
        parts.append(mark("rect", x=x, y=10, width=11, height=11, fill=SERIES[series]))
        parts.append(mark("text", series, x=x + 16, y=20))
    for i, (name, groups) in enumerate(panels.items()):
        parts += panel(name, groups, WIDTH * i)
    size = f'viewBox="0 0 {width} {HEIGHT}" width="{width}" height="{HEIGHT}"'
    style = 'font-family="sans-serif" font-size="11" fill="#202428"'
    return "\n".join(
        [f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', *parts, "</svg>\n"]
    )


def pictures(found: Mapping[str, Any]) -> dict[str, str]:
    """File name -> SVG, of what was measured."""
    made = {}
    for name, model in found["models"].items():
        for part, each in (("decode", "sequences"), ("prefill", "tokens of prompt")):
            panels = {
                f"{key} {each}".replace("1 sequences", "1 sequence"): rates(rows, int(key))
                for key, rows in model.get(part, {}).items()
            }
            panels = {title: groups for title, groups in panels.items() if groups}
            if panels:
                made[f"{part}-{name}.svg"] = svg(f"{name}, {part}, tokens/s", panels)
    return made


def shown(readme: str, names: Sequence[str], words: str) -> str:
    """README.md with the plots between its markers."""
    start, end = "<!-- plots:begin -->\n", "<!-- plots:end -->"
    before, _, rest = readme.partition(start)
    lines = [f"![{Path(name).stem}](benchmarks/plots/{name})\n" for name in names]
    return (
        before
        + start
        + textwrap.fill(words, 100)
        + "\n\n"
        + "".join(lines)
        + end
        + (rest.partition(end)[2])
    )


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("json", type=Path, nargs="?", default=HERE / "peers.json")
    parser.add_argument("--out", type=Path, default=HERE / "plots", metavar="DIR")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    found = json.loads(args.json.read_text(encoding="utf-8"))
    made = pictures(found)
    for name, text in made.items():
        (args.out / name).write_text(text, encoding="utf-8")
        print(args.out / name, len(text))
    if args.out == HERE / "plots":
        readme = HERE.parent / "README.md"
        text = shown(readme.read_text(encoding="utf-8"), list(made), summary(found))
        readme.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
