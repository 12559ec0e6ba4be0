"""Seeded inputs for every entry of a module, and the comparison of its outputs with the oracle's.

Three users: the build gives the inputs to the oracle and compares whole tensors in a fresh process;
reference.json carries a summary of the oracle's outputs; `verify` makes the inputs again on the
device and compares with the summary. The numbers come from the raw stream of PCG64, which NumPy
keeps stable, so a seed means the same inputs everywhere.

    python -m runtime.probe inputs INTERFACE.json --seed N --out DIR     <call>.npz each
    python -m runtime.probe summarize INTERFACE.json --seed N --expected DIR --out FILE
    python -m runtime.probe check BUNDLE --device URI --seed N --expected DIR --out FILE
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtime import manifest as manifest_file
from runtime.errors import UserError, report
from runtime.manifest import FunctionSpec, Manifest, Tolerance
from runtime.progress import progress

SAMPLES = 32
PROJECTIONS = 4
SENSITIVITY = "sensitivity"  # the array beside the outputs: how far logits and state moved
# What a layer rounds the next ones amplify, in some models and calls more than in others': so an
# error may be as large as this times how far JAX's own outputs of the call move when small
# parameters change by 2^-22 of themselves (emit.expect). Right modules of all families, of 3 layers
# and 24, are at 0.2 to 1.5 times that; attention scores of a few hundred at 2.2 times.
SHAKES = 6.0
MOST = 1e-3  # whatever moves: what the compiler got wrong was never below it
STATE_SCALE = 0.5
POSITION = 7  # any non-zero position
# Further calls of a prefill: the number of valid tokens of a chunk, and whether they begin a text.
# What a kernel gets wrong may be one token of four, or the first of a text: so the last valid token
# takes every place modulo four.
PREFILLS: tuple[tuple[Callable[[int], int], bool], ...] = (
    (lambda chunk: 1, True),
    (lambda chunk: chunk - 2, False),
    (lambda chunk: chunk - 1, False),
    (lambda chunk: chunk, False),
)


@dataclass(frozen=True)
class Check:
    """One output tensor compared: `error` is relative, and infinite where a NaN stands."""

    function: str
    tensor: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the output is right."""
        return self.error <= self.tolerance


def _raw(seed: int, label: str, count: int) -> np.ndarray:
    """`count` stable pseudo-random u64 for this seed and label."""
    return np.random.PCG64([seed, zlib.crc32(label.encode())]).random_raw(count)


def calls(functions: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(name of a call, its entry) of every call that is compared: `decode`, `prefill_8@1` …

    Each entry is called more than once: what a driver keeps from a first call may be wrong later.
    """
    for name in functions:
        further = len(PREFILLS) if name.startswith("prefill_") else 1
        yield from ((f"{name}@{i}" if i else name, name) for i in range(further + 1))


def _number(call: str) -> int:
    """0 for the first call of an entry."""
    return int(call.partition("@")[2] or 0)


def _valid(call: str, chunk: int) -> tuple[int, bool]:
    """How many tokens of the chunk are valid in `call`, and whether they begin a text."""
    number = _number(call)
    if not number or not call.startswith("prefill_"):
        return max(1, chunk - chunk // 4), False
    count, first = PREFILLS[number - 1]
    return min(max(1, count(chunk)), chunk), first


def inputs(
    call: str, function: FunctionSpec, vocab_size: int, context: int | None, seed: int
) -> dict[str, np.ndarray]:
    """Arguments of the call `call` (see `calls`) of an entry, by input name.

    States are uniform in ±STATE_SCALE, tokens uniform over the vocabulary (also where they are
    padding), a prefill is a quarter short of its chunk, or as PREFILLS says, and storage holds NaN.
    Where positions are bounded, a prefill ends at the last one and the slots of a decode are spread
    over all of them. In an entry's first call the first of several slots is inactive and `slot` is
    the last one; in its second all slots are active and `slot` is the first.
    """
    tokens = next((s.shape for s in function.inputs if s.name == "tokens"), (1,))
    chunk, slots = tokens[-1], max((s.shape[0] for s in function.inputs if s.shape), default=1)
    arrays: dict[str, np.ndarray] = {}
    for spec in function.inputs:
        count = int(np.prod(spec.shape))
        if spec.name.startswith("out.") and spec.dtype == "f32":
            arrays[spec.name] = np.full(spec.shape, np.nan, np.float32)
            continue
        raw = _raw(seed, f"{call}/{spec.name}", count)
        if spec.dtype == "f32":
            unit = (raw >> np.uint64(40)).astype(np.float32) / np.float32(1 << 23) - 1
            arrays[spec.name] = (unit * np.float32(STATE_SCALE)).reshape(spec.shape)
            continue
        (length, first), end = _valid(call, chunk), context or POSITION + chunk
        value = {
            "length": length,
            "position": 0 if first else max(0, end - length),
            "positions": np.arange(count, 0, -1) * (end - 1) // count,
            "slot": 0 if _number(call) else slots - 1,
            "active": 1,
        }.get(spec.name)
        ids = (raw % np.uint64(vocab_size)).astype(np.int32) if value is None else value
        array = np.broadcast_to(np.asarray(ids, np.int32).reshape(-1), (count,)).copy()
        if spec.name == "active" and count > 1 and not _number(call):
            array[0] = 0
        arrays[spec.name] = array.reshape(spec.shape)
    return arrays


def summarize(name: str, tensor: str, array: np.ndarray, seed: int) -> dict[str, Any]:
    """Samples, norm, largest magnitude and random ±1 projections: each element counts in these."""
    flat = array.reshape(-1).astype(np.float64)
    if flat.size <= SAMPLES:
        places = np.arange(flat.size)
    else:
        picks = _raw(seed, f"{name}/{tensor}/samples", SAMPLES) % np.uint64(flat.size)
        places = np.unique(picks.astype(np.int64))
    return {
        "name": tensor,
        "samples": [[int(i), float(flat[i])] for i in places],
        "projections": [float(p) for p in _projections(name, tensor, flat, seed)],
        "norm": _norm(flat),
        "scale": float(np.max(np.abs(flat))),
    }


def _projections(name: str, tensor: str, flat: np.ndarray, seed: int) -> Iterator[float]:
    for k in range(PROJECTIONS):
        words = _raw(seed, f"{name}/{tensor}/signs{k}", -(-flat.size // 64))
        bits = np.unpackbits(words.view(np.uint8))[: flat.size]
        yield float(np.sum(np.where(bits, flat, -flat)))


def bound(tensor: str, tolerance: Tolerance, moved: Mapping[str, float] | None) -> float:
    """The largest accepted error of an output of a call whose outputs `moved` (see SHAKES)."""
    kind = "logits" if tensor in ("logits", "argmax") else "state"
    least = tolerance.logits if kind == "logits" else tolerance.state
    return max(least, min(SHAKES * moved[kind], MOST)) if moved else least


def whole_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Largest of the max-norm and 2-norm relative errors of two equally shaped tensors."""
    if actual.shape != expected.shape or not np.isfinite(actual).all():
        return float("inf")
    difference = actual.astype(np.float64) - expected
    tiny = np.finfo(np.float32).tiny
    largest = np.max(np.abs(difference)) / max(np.max(np.abs(expected)), tiny)
    return float(max(largest, _norm(difference) / max(_norm(expected), tiny)))


def _norm(array: np.ndarray) -> float:
    """The 2-norm. Not by BLAS, whose sums go with the processor and the number of cores."""
    return float(np.sqrt(np.sum(np.square(array, dtype=np.float64))))


def summary_error(name: str, actual: np.ndarray, entry: Mapping[str, Any], seed: int) -> float:
    """As `whole_error`, from a summary: samples against the largest magnitude, projections against
    the norm (a projection of an error vector is some times, hardly ever over four, its norm)."""
    flat = actual.reshape(-1).astype(np.float64)
    if not np.isfinite(flat).all() or any(not 0 <= i < flat.size for i, _ in entry["samples"]):
        return float("inf")
    tiny = np.finfo(np.float32).tiny
    scale, norm = max(entry["scale"], tiny), max(entry["norm"], tiny)
    errors = [abs(flat[i] - value) / scale for i, value in entry["samples"]]
    found = _projections(name, entry["name"], flat, seed)
    pairs = zip(found, entry["projections"], strict=True)
    errors += [abs(a - b) / (4 * norm) for a, b in pairs]
    return float(max([*errors, abs(_norm(flat) - norm) / norm]))


def argmax_error(actual: np.ndarray, expected: np.ndarray, logits: np.ndarray) -> float:
    """0 where the tokens agree; else how far apart this device's own logits of both are."""
    if actual.shape != expected.shape:
        return float("inf")
    worst = 0.0
    for row, (a, b) in enumerate(zip(actual, expected, strict=True)):
        if a != b:
            inside = 0 <= a < logits.shape[1] and 0 <= b < logits.shape[1]
            scale = float(np.max(np.abs(logits[row])))
            gap = abs(float(logits[row, a]) - float(logits[row, b])) if inside else float("inf")
            worst = max(worst, gap / (2 * scale) if scale else float("inf"))
    return worst


class Runs:
    """Calls of entries. `device` is a `runtime.module.Device`.

    The buffers of a call live on through the next one, as they do in use: so that each call has
    other buffers than the one before.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._before: list[Any] = []

    def __call__(
        self, name: str, spec: FunctionSpec, given: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Outputs of one call by name, on the host."""
        arguments = [self._device.to_device(given[tensor.name]) for tensor in spec.inputs]
        results = self._device.call(name, arguments)
        self._before = [*arguments, *results]
        return {
            tensor.name: np.asarray(self._device.to_host(result))
            for tensor, result in zip(spec.outputs, results, strict=True)
        }


def check_entries(device: Any, manifest: Manifest, entries: Mapping[str, Any]) -> list[Check]:
    """Run every entry on its seeded inputs and compare with the summaries of reference.json."""
    seed, rows, run = int(entries["seed"]), [], Runs(device)
    moved = entries.get("sensitivity") or {}
    for call, name in calls(sorted(manifest.functions)):
        spec = manifest.functions[name]
        given = inputs(call, spec, manifest.model.vocab_size, manifest.shape.context, seed)
        found = run(name, spec, given)
        for entry in entries["functions"][call]:
            actual = found[entry["name"]]
            if entry["name"] == "argmax":
                wanted = np.asarray([value for _, value in entry["samples"]], actual.dtype)
                error = argmax_error(actual[: wanted.size], wanted, found["logits"])
            else:
                error = summary_error(call, actual, entry, seed)
            allowed = bound(entry["name"], manifest.proof.tolerance, moved.get(call))
            rows.append(Check(call, entry["name"], error, allowed))
    return rows


def check_whole(device: Any, manifest: Manifest, seed: int, expected: Path) -> list[Check]:
    """Run every entry on its seeded inputs and compare with `expected`/<call>.npz in full."""
    rows: list[Check] = []
    run, every = Runs(device), list(calls(manifest.functions))
    with progress("proof", len(every), unit="calls") as shown:
        for call, name in every:
            rows += _check_call(run, call, manifest.functions[name], manifest, seed, expected)
            shown.add(1)
    return rows


def _check_call(
    run: Runs, call: str, spec: FunctionSpec, manifest: Manifest, seed: int, expected: Path
) -> Iterator[Check]:
    """One call, each of its outputs compared in full."""
    given = inputs(call, spec, manifest.model.vocab_size, manifest.shape.context, seed)
    found = run(call.partition("@")[0], spec, given)
    with np.load(expected / f"{call}.npz") as wanted:
        moved = _moved(wanted)
        for tensor in spec.outputs:
            want = wanted[tensor.name]
            if tensor.name == "argmax":
                error = argmax_error(found["argmax"], want, found["logits"])
            else:
                error = whole_error(found[tensor.name], want)
            allowed = bound(tensor.name, manifest.proof.tolerance, moved)
            yield Check(call, tensor.name, error, allowed)


def _moved(wanted: Mapping[str, Any]) -> dict[str, float] | None:
    if SENSITIVITY not in wanted:
        return None
    logits, state = map(float, wanted[SENSITIVITY])
    return {"logits": logits, "state": state}


def _inputs(args: argparse.Namespace) -> None:
    interface = manifest_file.load_interface(args.interface)
    args.out.mkdir(parents=True, exist_ok=True)
    for call, name in calls(interface.functions):
        spec = interface.functions[name]
        arrays: dict[str, Any] = inputs(
            call, spec, interface.vocab_size, interface.context, args.seed
        )
        np.savez(args.out / f"{call}.npz", **arrays)


def _summarize(args: argparse.Namespace) -> None:
    interface = manifest_file.load_interface(args.interface)
    functions: dict[str, list[dict[str, Any]]] = {}
    sensitivity: dict[str, dict[str, float]] = {}
    for call, name in calls(interface.functions):
        with np.load(args.expected / f"{call}.npz") as wanted:
            functions[call] = [
                summarize(call, tensor.name, wanted[tensor.name], args.seed)
                for tensor in interface.functions[name].outputs
            ]
            if moved := _moved(wanted):
                sensitivity[call] = moved
    content = {"seed": args.seed, "functions": functions, "sensitivity": sensitivity}
    args.out.write_text(json.dumps(content, sort_keys=True, allow_nan=False) + "\n")


def _check(args: argparse.Namespace) -> None:
    from runtime.module import open_bundle

    manifest = manifest_file.load(args.bundle)
    device = open_bundle(args.bundle, manifest, args.device)
    rows = check_whole(device, manifest, args.seed, args.expected)
    # JSON has no infinity: the largest float stands for "a NaN or another shape".
    plain = [asdict(row) | {"error": min(row.error, sys.float_info.max)} for row in rows]
    args.out.write_text(json.dumps(plain, indent=1) + "\n")


def main(argv: list[str] | None = None) -> int:
    """See the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m runtime.probe")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run in (("inputs", _inputs), ("summarize", _summarize), ("check", _check)):
        sub = commands.add_parser(name)
        if name == "check":
            sub.add_argument("bundle", type=Path)
            sub.add_argument("--device")
        else:
            sub.add_argument("interface", type=Path)
        if name != "inputs":
            sub.add_argument("--expected", type=Path, required=True)
        sub.add_argument("--seed", type=int, required=True)
        sub.add_argument("--out", type=Path, required=True)
        sub.set_defaults(run=run)
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except (UserError, OSError) as error:
        return report(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
