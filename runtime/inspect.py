"""`scanwright inspect`: what a bundle is, from its manifest alone."""

from __future__ import annotations

import argparse
import dataclasses
import json
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from runtime import manifest as mf
from runtime import targets
from runtime.errors import UserError

_Specs = list[dict[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `scanwright inspect`."""
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="bundle directory")
    targets.add_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """`scanwright inspect`. Raises UserError for a bundle that cannot be read."""
    found = summary(args.bundle, args.target)
    print(json.dumps(found, indent=1) if args.json else render(found))
    return 0


def summary(bundle: Path, target: str | None = None) -> dict[str, Any]:
    """Facts about a bundle as JSON: sizes in bytes, tokens and slots as counts.

    Of several targets, `target` and `proof` are those of the one that is asked for or best here
    (`why`), or of the first where none runs.
    """
    whole = mf.load(bundle)
    manifest, why = whole, None
    if whole.alternatives or target is not None:
        try:
            manifest, why = targets.choose(whole, targets.here(whole.targets), target)
        except UserError:
            if target is not None:
                raise
            manifest, why = targets.view(whole, 0), "none runs here"
    plain = dataclasses.asdict
    elements = [spec.nbytes // mf.DTYPE_BYTES[spec.dtype] for spec in manifest.params]
    return {
        "bundle": str(bundle),
        "model": plain(manifest.model) | {"parameters": sum(elements)},
        "numerics": plain(manifest.numerics),
        "target": plain(manifest.target),
        "targets": [each.name for each in whole.targets],
        "why": why,
        "shape": plain(manifest.shape),
        "files": [plain(ref) for ref in whole.files.all()],
        "weight_bytes": sum(spec.nbytes for spec in manifest.params),
        "state": [plain(spec) | {"bytes_per_slot": spec.nbytes} for spec in manifest.state],
        "state_bytes_per_slot": manifest.state_bytes_per_slot,
        "state_bytes": manifest.state_bytes_per_slot * manifest.shape.slots,
        "functions": {
            name: {"inputs": len(spec.inputs), "outputs": len(spec.outputs)}
            for name, spec in sorted(manifest.functions.items())
        },
        "prefix_sharing": manifest.prefix_sharing,
        "proof": plain(manifest.proof),
    }


def size(count: int) -> str:
    """Bytes for a reader: 1536 -> "1.5 KiB"."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{count} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def render(found: dict[str, Any]) -> str:
    """The summary as a table a person can read."""
    return "\n".join(f"{name:<10} {value}".rstrip() for name, value in _lines(found))


def _lines(found: dict[str, Any]) -> Iterable[tuple[str, str]]:
    model, target, shape, proof = (found[k] for k in ("model", "target", "shape", "proof"))
    revision = f" @ {model['revision']}" if model["revision"] else ""
    yield "bundle", found["bundle"]
    yield "model", f"{model['name']} ({model['family']}) from {model['source']}{revision}"
    precision = found["numerics"]["quantization"] or found["numerics"]["weights"]
    yield "weights", f"{model['parameters']:,} in {precision}, {size(found['weight_bytes'])}"
    yield "vocabulary", f"{model['vocab_size']:,} ids, end {list(model['eos_token_ids'])}"
    cpu = f", CPU {target['cpu']}" if target["cpu"] else ""
    yield "target", f"{target['name']}: device {target['uri']}{cpu}"
    if len(found["targets"]) > 1:
        others = ", ".join(name for name in found["targets"] if name != target["name"])
        yield "", f"{found['why']}; there is also {others}"
    if target["features"]:
        for line in textwrap.wrap("needs " + " ".join(target["features"]), 88):
            yield "", line
    yield "compiler", f"IREE {target['compiler']}, bytecode {target['bytecode_version']}"
    chunks = ", ".join(map(str, shape["chunks"]))
    context = f", context {shape['context']}" if shape["context"] else ""
    yield "shape", f"{shape['name']}: {shape['slots']} slots, chunks of {chunks} tokens{context}"
    yield (
        "state",
        f"{size(found['state_bytes_per_slot'])} a slot, {size(found['state_bytes'])} in all",
    )
    for label, kind, group in _grouped_state(found["state"]):
        total = sum(spec["bytes_per_slot"] for spec in group)
        yield "", f"{label}  {kind}  {size(total)}"
    functions = (f"{n} ({f['inputs']} → {f['outputs']})" for n, f in found["functions"].items())
    yield "functions", ", ".join(functions)
    why = f" ({proof['reason']})" if proof["reason"] else ""
    yield "proof", f"{proof['status']}{why}, {proof['flags']} flags"
    for file in found["files"]:
        yield "file", f"{file['path']:<24} {size(file['size']):>10}  {file['sha256'][:16]}…"


def _grouped_state(state: _Specs) -> Iterable[tuple[str, str, _Specs]]:
    """State tensors of one shape, dtype and kind together, as layers repeat them."""
    groups: dict[tuple[str, str, str], _Specs] = {}
    for spec in state:
        key = (spec["dtype"], str(list(spec["shape"])), spec["kind"])
        groups.setdefault(key, []).append(spec)
    for (dtype, shape, kind), group in groups.items():
        names = group[0]["name"] if len(group) == 1 else f"{group[0]['name']} … {group[-1]['name']}"
        count = f"{len(group)} × " if len(group) > 1 else ""
        yield f"{names}: {count}{dtype}{shape}", kind, group
