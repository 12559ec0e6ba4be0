"""Compile, and let nothing through that does not compute what JAX computes.

The compiler can be wrong without a word, so each compiled module is run on random inputs in a fresh
process and every output of every entry is compared with JAX on the same parameters. A module that
fails is removed. Where it has C kernels, the entries that were wrong go without them; then no entry
has any; then the target's safe flags are tried in order. A failure is remembered, so that a warm
build does not compile what is known to be wrong.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from artifacts import devices, process
from artifacts.actions import Action, Result
from artifacts.compile import compile_module
from artifacts.cpu import Cpu, resolve_cpu
from artifacts.link import MODULE
from artifacts.objects import level, objects
from artifacts.records import Blob
from artifacts.sources import source_digest
from artifacts.stages import SEED, Stages
from artifacts.tools import versions
from runtime.errors import UserError
from runtime.vmfb import bytecode_version

# Largest accepted error of an output, relative to its largest magnitude and to its norm: (for any
# model, more for each layer), and more where a call amplifies errors (`runtime.probe.bound`). All
# arithmetic is float32 whatever type the weights are stored in, so the types share one bound. Sums
# in another order differ by some 1e-7 in each layer. What the compiler got wrong was never below
# 1e-3; an epsilon ten times too small costs 1.5e-5 with 3 layers.
TOLERANCE = (3e-6, 3e-6)
EMULATED = "uncaught target signal"  # what qemu says when the program under it crashes


@dataclass(frozen=True)
class Compiled:
    """A module that passed, or could not be or was not asked to be run here."""

    module: Blob
    cpu: Cpu | None
    flags: tuple[str, ...]
    compiler: str
    bytecode: str
    label: str  # "fast", or "safe-<n>" for the n-th safe flag list
    kernels: Mapping[str, Any] | None  # the manifest's target.kernels
    status: str  # "passed", "not-run" or "disabled"
    reason: str | None


@dataclass(frozen=True)
class Attempt:
    """One way to compile: flags, and the kernels' object, its level and who calls them."""

    graphs: Mapping[str, Blob]
    flags: tuple[str, ...]
    label: str
    level: str | None = None
    kernels: Blob | None = None
    functions: tuple[str, ...] = ()

    @property
    def about(self) -> str:
        """In a word or three."""
        return f"{self.label} with kernels" if self.functions else self.label


class WriteBundle(Protocol):
    """Writes a whole bundle with the module `compiled` into the new directory `out`."""

    def __call__(self, compiled: Compiled, out: Path, *, proving: bool) -> None: ...


def tolerance(stages: Stages) -> dict[str, float]:
    """The manifest's tolerances for a model of this depth; see runtime.probe for more of them."""
    base, per_layer = TOLERANCE
    bound = round(base + per_layer * int(stages.interface["num_layers"]), 9)
    return {"logits": bound, "state": bound}


def compile_and_prove(stages: Stages, write_bundle: WriteBundle) -> Compiled:
    """The first of the target's flag lists whose module passes. Raises UserError if none does.

    The proof runs on a whole bundle made by `write_bundle`, opened as a user does.
    """
    job, target = stages.job, stages.job.target
    cpu = job.cpu
    if cpu is None and target.cpu is not None:
        notes = stages.store.root / "cpu.json"
        cpu = resolve_cpu(target.cpu, target.triple, notes, keep=not stages.store.read_only)
    device, why_not = ("", "--no-proof") if not job.proof else devices.usable(target, cpu)
    failures: list[str] = []
    wrong: set[str] = set()  # functions that were wrong
    for attempt in _attempts(stages, cpu, wrong):
        action = _compile_action(stages, attempt)
        if device is not None and job.proof and stages.expect is not None:
            known = _known_failure(stages, action, device)
            if known is not None:
                failures.append(f"{attempt.about}: {known['problem']}")
                wrong.update(known["functions"])
                continue
        result = _compile(stages, action, attempt)
        compiled = _compiled(result, action, attempt, cpu)
        if not job.proof:
            return replace(compiled, status="disabled", reason="--no-proof")
        if device is None:
            return replace(compiled, reason=why_not)
        if stages.expect is None:
            return replace(compiled, reason="the parameters are too big to make up here")
        verdict = _prove(stages, action, compiled, device, write_bundle)
        if verdict["problem"] is None:
            return replace(compiled, status="passed")
        failures.append(f"{attempt.about}: {verdict['problem']}")
        wrong.update(verdict["functions"])
        _delete(stages, result)
        flags = f"{attempt.label} flags{' and kernels' if attempt.functions else ''}"
        said = f"proof failed with {flags}: {verdict['problem']}"
        print(said, file=sys.stderr, flush=True)
    raise UserError(
        f"{job.model.name} for {target.name}: every flag list compiles to wrong numbers "
        f"({'; '.join(failures)}); try another target or weight type, and report the graph"
    )


def _attempts(stages: Stages, cpu: Cpu | None, wrong: set[str]) -> Iterator[Attempt]:
    """Ways to compile, the best first; `wrong` grows as they fail."""
    target, more = stages.job.target, cpu.flags if cpu else ()
    has = level(cpu) if cpu and stages.job.kernels else None
    if has is not None:
        calling = _calling(stages)
        made = objects(stages, has) if calling else None
        if calling:
            yield Attempt(stages.graphs, (*target.flags, *more), "fast", has, made, calling)
        right = tuple(name for name in calling if name not in wrong)
        if right and len(right) < len(calling):
            plain = _without_kernels(stages)
            graphs = {
                name: plain[name] if name in wrong else blob for name, blob in stages.graphs.items()
            }
            yield Attempt(graphs, (*target.flags, *more), "fast", has, made, right)
    plain = _without_kernels(stages)
    for number, flags in enumerate((target.flags, *target.safe_flags)):
        yield Attempt(plain, (*flags, *more), f"safe-{number}" if number else "fast")


def _without_kernels(stages: Stages) -> Mapping[str, Blob]:
    """The graphs that every target compiles."""
    return stages.without_kernels.graphs if stages.job.kernels else stages.graphs


def _calling(stages: Stages) -> tuple[str, ...]:
    """The functions that call kernels."""
    return tuple(
        name
        for name, blob in sorted(stages.graphs.items())
        if f"@{name}.kernels::".encode() in stages.store.path(blob).read_bytes()
    )


def _compiled(result: Result, action: Action, attempt: Attempt, cpu: Cpu | None) -> Compiled:
    kernels = None
    if attempt.functions:
        kernels = {"level": attempt.level, "functions": list(attempt.functions)}
    return Compiled(
        module=result.outputs["model.vmfb"],
        cpu=cpu,
        flags=tuple(action.fields["flags"]),
        compiler=action.fields["compiler"],
        bytecode=result.meta["bytecode_version"],
        label=attempt.label,
        kernels=kernels,
        status="not-run",
        reason=None,
    )


def _compile_action(stages: Stages, attempt: Attempt) -> Action:
    """The key holds the graphs' digests, not the weights': new weights recompile nothing."""
    fields = {
        "graphs": {name: blob.sha256 for name, blob in attempt.graphs.items()},
        "flags": list(attempt.flags),
        "kernels": attempt.kernels.sha256 if attempt.kernels else None,
        "compiler": versions(["iree-base-compiler"])["iree-base-compiler"],
        "source": source_digest(["artifacts.link"]),
    }
    return Action("compile", fields, stages.job.about)


def _compile(stages: Stages, action: Action, attempt: Attempt) -> Result:
    meta: dict[str, Any] = {}

    def produce(scratch: Path) -> Mapping[str, Path]:
        texts = [(name, stages.store.path(blob)) for name, blob in sorted(attempt.graphs.items())]
        out = scratch / f"{MODULE}.vmfb"
        kernels = stages.store.path(attempt.kernels) if attempt.kernels else None
        stats = compile_module(texts, action.fields["flags"], out, kernels)
        stages.log.add(process.Usage(stats.seconds, stats.peak_rss_bytes, stats.command))
        meta["bytecode_version"] = bytecode_version(out)
        meta["seconds"] = round(stats.seconds, 3)
        meta["peak_rss_bytes"] = stats.peak_rss_bytes
        return {"model.vmfb": out}

    with stages.log.stage("compile"):
        # What the run measured is in the log; a record must not differ from run to run.
        kept: Callable[[], Any] = lambda: {"bytecode_version": meta["bytecode_version"]}  # noqa: E731
        result = stages.run_action(action, produce, kept)
        measured = {k: v for k, v in meta.items() if k != "bytecode_version"}
        stages.log.result("compile", result, measured)
    return result


def _proof_action(stages: Stages, compiling: Action, device: str) -> Action:
    assert stages.expect is not None and stages.params is not None
    fields = {
        "compile": compiling.key,
        "params": stages.params.outputs["params"].sha256,
        "expected": {name: blob.sha256 for name, blob in stages.expect.outputs.items()},
        "device": device,
        "host": devices.identity(device),
        "seed": SEED,
        "tolerance": tolerance(stages),
        "runtime": versions(["iree-base-runtime"])["iree-base-runtime"],
        "source": source_digest(["runtime.probe", "runtime.module"]),
    }
    return Action("proof", fields, stages.job.about)


def _known_failure(stages: Stages, compiling: Action, device: str) -> Mapping[str, Any] | None:
    record = stages.look(_proof_action(stages, compiling, device))
    return None if record is None or record.meta["problem"] is None else record.meta


def _prove(
    stages: Stages, compiling: Action, compiled: Compiled, device: str, write_bundle: WriteBundle
) -> Mapping[str, Any]:
    """`problem`: None if every output of every entry is right, else the worst one in words; and
    `functions`, those that are wrong."""
    assert stages.expect is not None
    expected_files = stages.expect.outputs
    verdict: dict[str, Any] = {}

    def produce(scratch: Path) -> Mapping[str, Path]:
        bundle, expected, out = scratch / "bundle", scratch / "expected", scratch / "rows.json"
        expected.mkdir()
        for name, blob in expected_files.items():
            if name.endswith(".npz"):
                stages.store.link(blob, expected / name)
        write_bundle(compiled, bundle, proving=True)
        arguments: list[str | Path] = ["check", bundle, "--device", device, "--seed", str(SEED)]
        arguments += ["--expected", expected, "--out", out]
        try:
            stages.log.add(_run_check(arguments, scratch))
            rows = json.loads(out.read_text())
            bad = {row["function"] for row in rows if not row["error"] <= row["tolerance"]}
            verdict["problem"] = worst(rows)
            verdict["functions"] = sorted({call.partition("@")[0] for call in bad})
        except UserError as error:
            if not isinstance(error, process.Crashed) and EMULATED not in str(error):
                raise
            verdict.update(problem=str(error), functions=sorted(stages.graphs))
            out.write_text("[]\n")
        shutil.rmtree(bundle)
        return {"rows.json": out}

    with stages.log.stage("proof"):
        action = _proof_action(stages, compiling, device)
        result = stages.run_action(action, produce, lambda: verdict)
        measured = _measured(stages.store.path(result.outputs["rows.json"]))
        measured |= {"module": compiled.module.sha256, "params": action.fields["params"]}
        stages.log.result("proof", result, {"problem": result.meta["problem"], **measured})
    return result.meta


def _run_check(arguments: Sequence[str | Path], scratch: Path) -> process.Usage:
    """Run the check; once more if the driver lost its device, as llvmpipe does under heavy load."""
    try:
        return process.run_module("runtime.probe", arguments, scratch, progress=True)
    except UserError as error:
        if "DEVICE_LOST" not in str(error):
            raise
        print(f"{error}; trying once more", file=sys.stderr, flush=True)
        return process.run_module("runtime.probe", arguments, scratch, progress=True)


def _measured(path: Path) -> dict[str, Any]:
    """For the log: how many outputs were compared, and of each tensor the largest error."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    largest: dict[str, Any] = {}
    for row in rows:
        kept = {key: row[key] for key in ("function", "error", "tolerance")}
        if row["error"] >= largest.get(row["tensor"], kept)["error"]:
            largest[row["tensor"]] = kept
    return {"compared": len(rows), "worst": largest}


def worst(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """The output furthest beyond its tolerance, in words; None if all are within."""
    bad = [row for row in rows if not row["error"] <= row["tolerance"]]
    if not bad:
        return None
    row = max(bad, key=lambda r: r["error"] / r["tolerance"])
    error = "not finite" if row["error"] > 1e300 else f"relative error {row['error']:.2g}"
    more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
    return f"{row['function']}: {row['tensor']}: {error}, allowed {row['tolerance']:g}{more}"


def _delete(stages: Stages, result: Result) -> None:
    """Remove a wrong module from the cache."""
    stages.store.forget(result.key)
    stages.store.path(result.outputs["model.vmfb"]).unlink(missing_ok=True)
