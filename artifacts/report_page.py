"""The page of `doit report`: one HTML tree, readable on a phone, without scripts or requests."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from xml.etree.ElementTree import Element

from artifacts import report_plots as plots
from artifacts.markup import Child, tag
from runtime.manifest import DTYPE_BYTES, Manifest
from runtime.progress import clock, sized

if TYPE_CHECKING:
    from artifacts.report import Bundle, Found

LARGEST = {
    "logits": "max logit difference",
    "argmax": "tokens",
    "state": "max state difference",
}
FIGURES = ("open_s", "first_token_s", "prefill_tokens_per_s", "decode_tokens_per_s")
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
STYLE = """
:root { color-scheme: light dark; --line: #d0d7de; --soft: #57606a; --card: #ffffff;
  --ground: #f6f8fa; --text: #1f2328; --good: #116329; --bad: #a40e26; }
@media (prefers-color-scheme: dark) { :root { --line: #3d444d; --soft: #9198a1; --card: #151b23;
  --ground: #0d1117; --text: #e6edf3; --good: #3fb950; --bad: #ff7b72; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 0.75rem; max-width: 64rem; background: var(--ground);
  color: var(--text); font: 15px/1.45 system-ui, sans-serif; overflow-wrap: anywhere; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 0.75rem; margin: 0.75rem 0; }
h1 { font-size: 1.3rem; margin: 0.25rem 0; } h2 { font-size: 1.1rem; margin: 0 0 0.5rem; }
h3 { font-size: 0.95rem; margin: 1rem 0 0.25rem; }
.parts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr));
  gap: 0 1.5rem; }
.parts > * { min-width: 0; }
table { border-collapse: collapse; width: 100%; margin-top: 0.5rem; font-size: 0.85rem; }
th, td { text-align: left; vertical-align: top; padding: 0.15rem 0.4rem 0.15rem 0;
  border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
td.n, .good, .soft { white-space: nowrap; } p.soft { white-space: normal; }
th { overflow-wrap: normal; }
code { font: 0.8rem/1.4 ui-monospace, monospace; }
svg { display: block; max-width: 100%; height: auto; overflow: hidden;
  fill: var(--text); font: 12px sans-serif; }
svg .group { font-weight: 600; } svg .spread { stroke: var(--text); stroke-width: 1.5; }
.soft { color: var(--soft); } .good { color: var(--good); } .bad { color: var(--bad); }
p { margin: 0.25rem 0; } ul { margin: 0.25rem 0; padding-left: 1.2rem; }
@media (max-width: 30rem) { table { font-size: 0.75rem; } th, td { padding-right: 0.3rem; } }
"""


def page(found: Found) -> Element:
    """The whole document."""
    count = len(found.bundles)
    title = f"{count} bundle{'' if count == 1 else 's'}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"Scanwright: {title}"),
        tag("style", STYLE),
    )
    body = tag(
        "body",
        tag("h1", f"Scanwright: {title}"),
        _overview(found),
        _plots("Speed", plots.of_benches(found.benches), _figures(found)),
        (_bundle(bundle, found) for bundle in found.bundles),
        _plots("Beside other runtimes, one machine", plots.of_peers(found.peers)),
        _problems(found.problems),
    )
    return tag("html", head, body, lang="en")


def is_number(value: Any) -> bool:
    """A finite number that is not below 0."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return plain and math.isfinite(value) and value >= 0


def are_rows(value: Any) -> bool:
    """The rows that `verify` keeps."""
    return isinstance(value, list) and all(
        isinstance(row, dict)
        and isinstance(row.get("what"), str)
        and isinstance(row.get("detail"), str)
        and isinstance(row.get("ok"), bool)
        for row in value
    )


def table(heads: Sequence[str], rows: Iterable[Sequence[Child]], numbers: int = 0) -> Child:
    """A table whose last `numbers` columns are aligned as numbers; nothing without rows."""
    rows, first = list(rows), len(heads) - numbers
    if not rows:
        return None

    def cells(kind: str, row: Sequence[Child]) -> Element:
        classes = ["n" if i >= first else None for i in range(len(row))]
        return tag("tr", [tag(kind, c, class_=k) for c, k in zip(row, classes, strict=True)])

    head = tag("thead", cells("th", heads)) if any(heads) else None
    return tag("table", head, tag("tbody", [cells("td", row) for row in rows]))


def _overview(found: Found) -> Element:
    rows = []
    for bundle in found.bundles:
        made = bundle.manifest
        if made is not None:
            stored = sum(ref.size for ref in made.files.all())
            state = sized(made.state_bytes_per_slot)
            rows.append([bundle.path, _weights(made), _status(made), sized(stored), state])
    heads = ("bundle", "weights", "proof", "size", "a slot")
    empty = tag("p", "No bundle is here yet: doit build makes one.")
    return tag("section", table(heads, rows, 2) or empty)


def _weights(made: Manifest) -> str:
    return made.numerics.quantization or made.numerics.weights


def _status(made: Manifest) -> Element:
    """The proof's, of each target where there are several."""
    found = [_proof(proof.status) for proof in made.proofs]
    if len(found) == 1:
        return found[0]
    named = zip(made.targets, found, strict=True)
    return tag("span", [tag("span", f"{target.name}: ", word, tag("br")) for target, word in named])


def _proof(status: str) -> Element:
    return tag("span", status, class_="good" if status == "passed" else "soft")


def _plots(title: str, made: Iterable[tuple[str, Element]], more: Child = None) -> Child:
    """A section of charts, two or more beside each other where there is room."""
    drawn = [tag("div", tag("h3", name), chart) for name, chart in made]
    if not drawn:
        return None
    about = tag("p", "Bars are medians; thin lines go from the least to the most.", class_="soft")
    return tag("section", tag("h2", title), about, tag("div", drawn, class_="parts"), more)


def _figures(found: Found) -> Child:
    """The figures of what was measured."""
    rows = [
        [
            f"{row['model']} {row['target']} {row['shape']} {row['weights']} on {row['device']}",
            f"{1e3 * row['open_s']:.1f}",
            f"{1e3 * row['first_token_s']:.1f}",
            f"{row['prefill_tokens_per_s']:,.0f}",
            f"{row['decode_tokens_per_s']:,.0f}",
        ]
        for row in found.benches
    ]
    heads = ("bundle", "open ms", "first token ms", "prefill /s", "decode /s")
    return table(heads, rows, 4)


def _bundle(bundle: Bundle, found: Found) -> Element:
    made = bundle.manifest
    parts: list[Child] = [tag("h2", bundle.path)]
    if made is not None:
        revision = f" @ {made.model.revision[:12]}" if made.model.revision else ""
        cpus = [f", CPU {target.cpu}" if target.cpu else "" for target in made.targets]
        named = zip(made.targets, cpus, strict=True)
        targets = "; ".join(f"{target.name}: {target.uri}{cpu}" for target, cpu in named)
        about = (
            f"{made.model.family} from {made.model.source}{revision}; {targets}; "
            f"IREE {made.target.compiler}; {made.shape.slots} slots, "
            f"chunks of {', '.join(map(str, made.shape.chunks))}; digest "
        )
        parts.append(tag("p", about, tag("code", made.digest[:16])))
        columns = (_sizes(made), _state(made), _parity(bundle, made), _times(bundle))
        parts.append(tag("div", columns, class_="parts"))
        parts += [_verified(row) for row in found.verified if row.get("bundle") == made.digest]
    parts += [_commands(bundle), _problems(bundle.problems)]
    return tag("section", parts)


def _sizes(made: Manifest) -> Element:
    files = [[ref.path, sized(ref.size)] for ref in made.files.all()]
    kinds: dict[str, list[int]] = {}
    for spec in made.params:
        kinds.setdefault(spec.dtype, []).append(spec.nbytes)
    rows = [
        [kind, len(sizes), f"{sum(sizes) // DTYPE_BYTES[kind]:,}", sized(sum(sizes))]
        for kind, sizes in sorted(kinds.items())
    ]
    stored = table(("file", "size"), files, 1)
    by_type = table(("type", "tensors", "numbers", "size"), rows, 3)
    return tag("div", tag("h3", "Size"), stored, tag("h3", "Parameters by type"), by_type)


def _state(made: Manifest) -> Element:
    groups: dict[tuple[str, str], list[int]] = {}
    for spec in made.state:
        groups.setdefault((spec.kind.replace("_", " "), spec.dtype), []).append(spec.nbytes)
    rows = [[kind, dtype, len(sizes), sized(sum(sizes))] for (kind, dtype), sizes in groups.items()]
    one = made.state_bytes_per_slot
    rows.append([f"one of {made.shape.slots} slots", "", len(made.state), f"{one:,} B"])
    rows.append(["all slots", "", "", sized(one * made.shape.slots)])
    heads = ("state", "type", "tensors", "a slot")
    return tag("div", tag("h3", "State"), table(heads, rows, 2))


def _parity(bundle: Bundle, made: Manifest) -> Element:
    """The proof, what it measured, and the reference that devices are compared with."""
    rows: list[list[Child]] = []
    for target, proof, module in zip(made.targets, made.proofs, made.modules, strict=True):
        why = f" ({proof.reason})" if proof.reason else ""
        name = f"proof, {target.name}" if made.alternatives else "proof"
        rows.append([name, tag("span", _proof(proof.status), f"{why}, {proof.flags} flags")])
        measured = _proved(bundle.log, made, module.sha256) if proof.status == "passed" else {}
        if isinstance(measured.get("worst"), dict):
            rows.append(["outputs compared", f"{measured.get('compared', 0)}"])
            rows += _largest(measured["worst"])
    if bundle.reference is not None and bundle.reference.prompts:
        prompts = bundle.reference.prompts
        count = sum(len(prompt.generated) for prompt in prompts)
        rows.append(["reference", f"{count} tokens after {len(prompts)} prompts"])
        gap = min(prompt.min_gap for prompt in prompts)
        rows.append(["smallest margin", f"{gap:.3g} between the two best logits of a token"])
    return tag("div", tag("h3", "Parity with JAX"), table(("", ""), rows))


def _proved(log: Sequence[Mapping[str, Any]], made: Manifest, module: str) -> Mapping[str, Any]:
    """The log's row of the proof of the module of this sha256 with the bundle's parameters; {} if
    it is not there.

    The log of a place also tells of what was there before, with other weights.
    """
    params = made.files.params
    for row in reversed(log):
        same = row["stage"] == "proof" and row.get("module") == module
        if same and (params is None or row.get("params") == params.sha256):
            return row
    return {}


def _largest(worst: Mapping[str, Any]) -> Iterable[list[Child]]:
    """Of logits, tokens and states the largest error, and how much of its bound it is."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for name, row in worst.items():
        if isinstance(row, dict) and all(is_number(row.get(k)) for k in ("error", "tolerance")):
            kind = name if name in LARGEST else "state"
            groups.setdefault(kind, []).append({"tensor": name, **row})
    for name in sorted(groups, key=list(LARGEST).index):
        row = max(groups[name], key=lambda row: row["error"] / (row["tolerance"] or 1))
        share = f"{row['error'] / row['tolerance']:.0%}" if row["tolerance"] else "all"
        place = f"in {row.get('function')}" + (f", {row['tensor']}" if name == "state" else "")
        same = name == "argmax" and row["error"] == 0
        text = f"{row['error']:.1e}, {share} of the bound {row['tolerance']:.1e}, {place}"
        yield [LARGEST[name], "all equal" if same else text]


def _times(bundle: Bundle) -> Child:
    """Seconds and memory of each stage when it last ran, and how often it came from the cache."""
    stages: dict[str, list[dict[str, Any]]] = {}
    for row in bundle.log:
        stages.setdefault(row["stage"], []).append(row)
    if not stages:
        return None
    rows, taken, hits = [], {}, 0
    for stage, runs in stages.items():
        ran = [row for row in runs if row.get("cached") is False]
        seconds = _seconds(ran[-1]) if ran else None
        if seconds is not None:
            taken[stage] = seconds
        peak: Any = ran[-1].get("peak_rss_bytes") if ran else None
        hits += len(runs) - len(ran)
        took = "" if seconds is None else f"{seconds:.1f}"
        memory = sized(peak) if is_number(peak) else ""
        rows.append([stage, took, memory, f"{len(runs) - len(ran)}/{len(runs)}"])
    starts = [row["started"] for row in bundle.log if is_number(row.get("started"))]
    when = time.strftime(", last on %Y-%m-%d %H:%M UTC", time.gmtime(max(starts))) if starts else ""
    about = f"{clock(sum(taken.values()))} in all; cache hits: {hits} of {len(bundle.log)}{when}"
    figures = table(("stage", "s", "memory", "hits"), rows, 3)
    words = tag("p", about, class_="soft")
    return tag("div", tag("h3", "Build"), words, plots.of_times(taken), figures)


def _seconds(row: Mapping[str, Any]) -> float | None:
    for name in ("seconds", "process_seconds"):
        if is_number(row.get(name)):
            return float(row[name])
    return None


def _verified(found: Mapping[str, Any]) -> Element:
    """What `verify` found on a device: every entry and prompt."""
    good = found.get("passed") is True
    words = tag("span", "passed" if good else "failed", class_="good" if good else "bad")
    rows = [
        [row["what"], tag("span", row["detail"], class_=None if row["ok"] else "bad")]
        for row in found["rows"]
    ]
    return tag(
        "details", tag("summary", f"Verified on {found['device']} ({found['target']}): ", words),
        table(("compared", "found"), rows),
    )  # fmt: skip


def _commands(bundle: Bundle) -> Child:
    """The command lines of the log, folded away."""
    rows: list[Sequence[Child]] = []
    for row in bundle.log:
        commands = row.get("commands")
        for command in commands if isinstance(commands, list) else ():
            if isinstance(command, dict) and isinstance(command.get("command"), str):
                rows.append([row["stage"], tag("code", command["command"])])
    if not rows:
        return None
    head = tag("summary", f"Commands ({len(rows)})")
    return tag("details", head, table(("stage", "command"), rows))


def _problems(problems: Sequence[str]) -> Child:
    if not problems:
        return None
    return tag("ul", [tag("li", problem) for problem in problems], class_="bad")
