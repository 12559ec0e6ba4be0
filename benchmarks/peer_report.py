"""Tables of what peers.py measured, from its JSON file alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from builds import describe, table

PEER = {"f32": "f32", "bf16": "bf16", "int8": "q8_0", "int4": "q4_0"}
SECOND = {"int4": ("q4_1", "q4_K")}
DECODE_GOALS = {"f32": (1.15, 0.85), "bf16": (1.0, 0.85), "int8": (1.2, 0.75), "int4": (1.25, 0.6)}
Figures = dict[str, dict[str, list[float]]]


def spread(values: Sequence[float], scale: float = 1.0) -> str:
    """Median (quartiles), scaled."""
    scaled = sorted(value * scale for value in values)
    if len(scaled) == 1:
        return f"{scaled[0]:.3g}"
    low, middle, high = statistics.quantiles(scaled, n=4, method="inclusive")
    return f"{middle:.3g} ({low:.3g}-{high:.3g})"


def ratios(theirs: Sequence[float], ours: Sequence[float]) -> list[float]:
    """How many times as fast ours is, round by round."""
    return [b / a for a, b in zip(ours, theirs, strict=False)]


def rate(found: dict[str, Any], name: str) -> float:
    """The best that any turn of the machine found, a second. 0 if it was not measured."""
    return max((turn.get(name, 0.0) for turn in found.get("rates", [])), default=0.0)


def product_rate(found: dict[str, Any], kind: str) -> float:
    """Operations a second of a matrix product at a type: float32 for weights that are widened."""
    f32 = max(rate(found, "numpy f32"), rate(found, "torch f32"))
    return rate(found, "torch bf16") or f32 if kind == "bf16" else f32


def types(rows: dict[str, list[float]]) -> list[str]:
    """The weight types that ours was measured at."""
    return [kind for kind in PEER if f"ours {kind}" in rows]


def beside(
    ours: Sequence[float], theirs: Sequence[float] | None, each: float = 1e3
) -> tuple[str, str]:
    """(their time, ours as a multiple of their speed), dashes if they were not measured."""
    if not theirs:
        return "-", "-"
    return spread(theirs, each), spread(ratios(theirs, ours))


def decode_rows(found: dict[str, Any], name: str) -> list[dict[str, str]]:
    """One sequence: milliseconds a token, and bytes moved a second over the read limit."""
    model = found["models"][name]
    rows, limit = model["decode"]["1"], rate(found, "read")
    lines = []
    for kind in types(rows):
        ours, facts = rows[f"ours {kind}"], model["facts"][f"ours {kind}"]
        moved = facts["weights"] + facts["state"]
        for file in (PEER[kind], *SECOND.get(kind, ())):
            first = file == PEER[kind]
            theirs = rows.get(f"llama.cpp {file}")
            if not (first or theirs):
                continue
            theirs_ms, ratio = beside(ours, theirs)
            torch_ms, torch_ratio = beside(ours, rows.get(f"torch {kind}"))
            share = spread([moved / seconds / limit for seconds in ours]) if limit else "-"
            goals = DECODE_GOALS[kind]
            lines.append(
                {
                    "type": kind,
                    "MB moved": f"{moved / 1e6:.0f}",
                    "ms": spread(ours, 1e3),
                    "of the read limit": f"{share}, goal {goals[1]}",
                    "llama.cpp": f"{file} {theirs_ms}",
                    "times its speed": f"{ratio}, goal {goals[0]}" if first else ratio,
                    "torch ms": torch_ms if first else "",
                    "times torch": torch_ratio if first else "",
                }
            )
    return lines


def batch_rows(found: dict[str, Any], name: str) -> list[dict[str, str]]:
    """Eight sequences: a step of all, what one more row costs, all rows against llama.cpp's."""
    model = found["models"][name]
    one, eight = model["decode"].get("1", {}), model["decode"].get("8", {})
    lines = []
    for kind in types(eight):
        ours, alone = eight[f"ours {kind}"], one.get(f"ours {kind}", [])
        extra = [(b - a) / 7 / a for a, b in zip(alone, ours, strict=False)]
        theirs_ms, ratio = beside(ours, eight.get(f"llama.cpp {PEER[kind]}"))
        torch_ms, torch_ratio = beside(ours, eight.get(f"torch {kind}"))
        lines.append(
            {
                "type": kind,
                "ms": spread(ours, 1e3),
                "tokens/s": spread([8 / seconds for seconds in ours]),
                "a row more": (spread(extra, 100) if extra else "-") + " %",
                "llama.cpp": f"{PEER[kind]} {theirs_ms}",
                "times its speed": ratio,
                "torch ms": torch_ms,
                "times torch": torch_ratio,
            }
        )
    return lines


def prefill_rows(found: dict[str, Any], name: str) -> list[dict[str, str]]:
    """Prompts: tokens a second, and the projections' operations over those of a matrix product."""
    model = found["models"][name]
    lines = []
    for tokens, rows in model["prefill"].items():
        for kind in types(rows):
            ours, count = rows[f"ours {kind}"], int(tokens)
            work, limit = 2 * count * model["multiplied"], product_rate(found, kind)
            theirs, torch = rows.get(f"llama.cpp {PEER[kind]}"), rows.get(f"torch {kind}")
            lines.append(
                {
                    "tokens": tokens,
                    "type": kind,
                    "tokens/s": spread([count / seconds for seconds in ours]),
                    "of the product": spread([work / s / limit for s in ours]) if limit else "-",
                    "llama.cpp": PEER[kind]
                    + " "
                    + (spread([count / seconds for seconds in theirs]) if theirs else "-"),
                    "times its speed": spread(ratios(theirs, ours)) if theirs else "-",
                    "torch": spread([count / seconds for seconds in torch]) if torch else "-",
                    "times torch": spread(ratios(torch, ours)) if torch else "-",
                }
            )
    return lines


def open_rows(found: dict[str, Any], name: str) -> list[dict[str, str]]:
    """Opening in a new process, and what is resident after every entry has run."""
    model = found["models"][name]
    lines = []
    for kind, figures in model["open"].items():
        stored = model.get("facts", {}).get(f"ours {kind}", {}).get("file", 0)
        mapped, own = (statistics.median(figures[key]) for key in ("mapped", "anonymous"))
        lines.append(
            {
                "type": kind,
                "imports ms": spread(figures["imports"], 1e3),
                "open ms": spread(figures["open"], 1e3),
                "weights MB": f"{stored / 1e6:.0f}",
                "of these resident MB": f"{mapped / 1e6:.0f}",
                "other memory MB": f"{own / 1e6:.0f}",
            }
        )
    return lines


def check_rows(found: dict[str, Any], name: str) -> list[dict[str, str]]:
    """How far each side's logits are from the float32 reference."""
    return [
        {"side": side, "largest distance": f"{distance:.1e}"}
        for side, distance in found.get("check", {}).get(name, {}).items()
    ]


def summary(found: dict[str, Any]) -> str:
    """The README's sentence on where figures come from, and the decode ratios it states."""
    host, lines = found["machine"], []
    for name, model in found["models"].items():
        rows = model.get("decode", {}).get("1", {})
        told = [
            f"{kind} {statistics.median(ratios(theirs, rows[f'ours {kind}'])):.2f}"
            for kind in types(rows)
            if (theirs := rows.get(f"llama.cpp {PEER[kind]}"))
        ]
        if told:
            lines.append(f"{name}: {', '.join(told)}")
    loads = max((load for run in found.get("load", []) for load in run[:1]), default=0.0)
    return (
        f"{host['cores']} cores of {host['cpu']}, load average {loads:.1f} at the start; medians,"
        f" quartiles as lines. Decode of one sequence, times llama.cpp's speed: {'; '.join(lines)}."
    )


SECTIONS = {
    "decode": (
        ("decode, one sequence, ms a token", decode_rows),
        ("decode, eight sequences, ms a step", batch_rows),
    ),
    "prefill": (("prefill, tokens/s", prefill_rows),),
    "open": (("opening a bundle in a new process", open_rows),),
}


def render(found: dict[str, Any]) -> str:
    """Everything as Markdown."""
    loads = [" to ".join(f"{load:.1f}" for load in run) for run in found.get("load", [])]
    parts = [describe(found["machine"]), f"load average of each run: {', '.join(loads)}"]
    systems = {
        facts["system"]
        for model in found["models"].values()
        for facts in model.get("facts", {}).values()
        if "system" in facts
    }
    parts += [f"llama.cpp: {system}" for system in sorted(systems)]
    if found.get("rates"):
        names = [name for name in found["rates"][0] if name != "read"]
        products = ", ".join(f"{name} {rate(found, name) / 1e9:.0f} GFLOP/s" for name in names)
        parts.append(f"machine: reads {rate(found, 'read') / 1e9:.1f} GB/s; {products}")
    for name, model in found["models"].items():
        parts.append(f"### {name}")
        checked = table(check_rows(found, name))
        parts += [f"Logits from the float32 reference's, over its largest\n\n{checked}"]
        for part, sections in SECTIONS.items():
            for title, make in sections if part in model else ():
                if rows := make(found, name):
                    parts.append(f"{title[0].upper()}{title[1:]}\n\n{table(rows)}")
    if compiled := found.get("compile"):
        rows = [
            {
                "type": kind,
                "s": f"{row['seconds']:.1f}",
                "C kernels s": f"{row['kernels']:.1f}",
                "peak MB": f"{row['bytes'] / 1e6:.0f}",
            }
            for kind, row in compiled.items()
        ]
        parts.append(f"Compiling all entries of mamba2-130m\n\n{table(rows)}")
    return "\n\n".join(parts)
