"""Bar charts as inline SVG, narrow enough for a phone: one bar below the other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from artifacts.markup import tag

WIDTH, LABEL, VALUE = (
    340,
    112,
    62,
)  # of all, of names and of figures
BAR, GAP, TITLE = 17, 7, 24
COLORS = ("#1b6ca8", "#e08e45", "#8b929a", "#4b9b6e", "#9a5fa8", "#b5525c")


@dataclass(frozen=True)
class Bar:
    """One bar: `value`, and the least and most that was measured."""

    label: str
    value: float
    low: float
    high: float
    series: str


def chart(title: str, groups: Mapping[str, Sequence[Bar]], unit: str) -> Element:
    """A picture of `groups` of bars, all to one scale that begins at 0.

    `unit` is told in its title for those who hear the page.
    """
    every = [bar for bars in groups.values() for bar in bars]
    names = list(dict.fromkeys(bar.series for bar in every))
    color = {name: COLORS[i % len(COLORS)] for i, name in enumerate(names)}
    most = max((bar.high for bar in every), default=0.0) or 1.0
    scale, y, parts = (WIDTH - LABEL - VALUE) / most, 4, []
    for group, bars in groups.items():
        if group:
            y += TITLE
            parts.append(tag("text", _cut(group, 44), x=0, y=y - 7, class_="group"))
        for bar in bars:
            parts += _row(bar, y, scale, color[bar.series])
            y += BAR + GAP
    said = ", ".join(f"{group} {bar.label}: {figure(bar.value)} {unit}".strip()
                     for group, bars in groups.items() for bar in bars)  # fmt: skip
    return tag(
        "svg", tag("title", f"{title}: {said}"), parts, role="img", viewBox=f"0 0 {WIDTH} {y}",
        width=WIDTH, height=y,
    )  # fmt: skip


def _row(bar: Bar, y: int, scale: float, color: str) -> list[Element]:
    """A bar with its name before and its figure behind, and a thin line from least to most."""
    middle, end = y + BAR / 2, LABEL + max(bar.value, bar.high) * scale
    parts = [
        tag("text", _cut(bar.label, 17), x=LABEL - 6, y=middle + 4, text_anchor="end"),
        tag("rect", x=LABEL, y=y, width=bar.value * scale, height=BAR, fill=color),
    ]
    if bar.low < bar.high:
        ends = {"x1": LABEL + bar.low * scale, "x2": LABEL + bar.high * scale}
        parts.append(tag("line", **ends, y1=middle, y2=middle, class_="spread"))
    parts.append(tag("text", figure(bar.value), x=end + 5, y=middle + 4))
    return parts


def figure(value: float) -> str:
    """Three digits that say something: 12,345 or 1.23."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 6)}f}"


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
