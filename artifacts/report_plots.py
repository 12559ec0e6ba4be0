"""The charts of the report: what was measured, against targets and weight types."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from xml.etree.ElementTree import Element

from artifacts.bars import Bar, chart

RATES = {
    "decode_tokens_per_s": "Decode, tokens/s of all slots",
    "prefill_tokens_per_s": "Prefill, tokens/s of one prompt",
}
# Weight types as benchmarks/peers.json names them for each side.
PEERS = {"f32": "f32", "bf16": "bf16", "int8": "q8_0", "int4": "q4_0"}
Groups = dict[str, list[Bar]]


def of_benches(benches: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Element]]:
    """(title, chart) of each rate: a group a model and shape, a bar a target and weight type."""
    for name, title in RATES.items():
        groups: Groups = {}
        for row in sorted(benches, key=lambda row: (row["model"], row["shape"], row["target"])):
            value = float(row[name])
            low, high = _spread(row.get("spread"), name, value)
            bar = Bar(f"{row['target']} {row['weights']}", value, low, high, row["weights"])
            groups.setdefault(f"{row['model']} {row['shape']}", []).append(bar)
        if groups:
            yield title, chart(title, groups, "tokens/s")


def _spread(spread: Any, name: str, value: float) -> tuple[float, float]:
    """The least and most that was measured; the value itself where that is not said."""
    ends = spread.get(name) if isinstance(spread, dict) else None
    if isinstance(ends, list) and len(ends) == 2 and all(map(_finite, ends)):
        return min(ends[0], value), max(ends[1], value)
    return value, value


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0


def of_peers(found: Mapping[str, Any]) -> Iterator[tuple[str, Element]]:
    """Charts of peers.json: a group a weight type, a bar for each side, by model and part."""
    models = found.get("models")
    for name, model in models.items() if isinstance(models, dict) else ():
        for part, each in (("decode", "sequences"), ("prefill", "tokens of prompt")):
            measured = model.get(part) if isinstance(model, dict) else None
            for count, rows in measured.items() if isinstance(measured, dict) else ():
                groups = _sides(rows, int(count)) if str(count).isdecimal() else {}
                if groups:
                    unit = each.removesuffix("s") if count == "1" else each
                    title = f"{name}: {part}, {count} {unit}, tokens/s"
                    yield title, chart(title, groups, "tokens/s")


def _sides(rows: Any, tokens: int) -> Groups:
    """Bars of one part: `rows` are seconds of each round by side and type."""
    groups: Groups = {}
    for kind, other in PEERS.items() if isinstance(rows, dict) else ():
        sides = {"Scanwright": f"ours {kind}", "llama.cpp": f"llama.cpp {other}"}
        sides["torch"] = f"torch {kind}"
        for side, key in sides.items():
            seconds = rows.get(key)
            if not isinstance(seconds, list) or not seconds or not all(map(_finite, seconds)):
                continue
            if min(seconds) > 0:
                rates = [tokens / second for second in seconds]
                bar = Bar(side, statistics.median(rates), min(rates), max(rates), side)
                groups.setdefault(kind, []).append(bar)
    return groups


def of_times(seconds: Mapping[str, float]) -> Element | None:
    """A bar for each stage that ran."""
    if not seconds:
        return None
    bars = [Bar(stage, value, value, value, "s") for stage, value in seconds.items()]
    return chart("Build times by stage", {"": bars}, "s")
