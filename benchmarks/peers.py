"""Scanwright beside llama.cpp and transformers on the same random weights, on this CPU.

    python benchmarks/peers.py --work /tmp/peers --prepare     # builds all of it, checks logits
    python benchmarks/peers.py --work /tmp/peers               # measures all of it
    python benchmarks/peers.py --work /tmp/peers --only decode --types bf16 --models mamba2-130m
    python benchmarks/plot.py                                  # peers.json to README's plots

`--prepare` writes checkpoints, bundles, GGUF files (see peer_llama.py for what llama.cpp needs; it
is left out if that is missing) and compares the float32 logits of the three, without which nothing
is measured. Measuring wants an idle machine, builds nothing but the compile part, and adds what it
measured to the file of `--out`, so that it can be run in parts. Sides take turns, each in a process
that is stopped meanwhile; figures are medians over rounds with quartiles.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from builds import ROOT, build, describe, machine, stages
from peer_llama import NoPeer, check
from peer_models import GGUF, MODELS, TORCH, built, bundle, checkpoint, multiplied, prepare
from peer_report import render

PARTS = ("decode", "prefill", "open", "compile")
TYPES = ("f32", "bf16", "int8", "int4")
TURN_S = 0.4  # of decode
SLOW_ROUNDS = 2  # of prompts, for torch
SAME = 1e-3  # relative distance of float32 logits that are the same
OUT = Path(__file__).with_name("peers.json")
OPEN = """
import json, resource, sys, time
started = time.perf_counter()
from pathlib import Path
from runtime import manifest as manifests
from runtime.module import open_bundle
from runtime.session import Session
import iree.runtime
def resident():
    sizes, name = {"mapped": 0, "anonymous": 0}, ""
    for line in open("/proc/self/smaps"):
        key, *rest = line.split()
        if not key.endswith(":"):
            name = rest[-1] if len(rest) == 5 else ""
        elif key == "Rss:" and name.endswith(".irpa"):
            sizes["mapped"] += int(rest[0]) * 1024
        elif key == "Anonymous:":
            sizes["anonymous"] += int(rest[0]) * 1024
    return sizes
before = resident()
imported = time.perf_counter()
path = Path(sys.argv[1])
manifest = manifests.load(path)
session = Session(open_bundle(path, manifest), manifest)
opened = time.perf_counter()
for chunk in manifest.shape.chunks:
    session.device.to_host(session.prefill([1] * chunk)[1])
session.admit(0)
session.device.to_host(session.decode([1], [32], [1])[1])
session.extract(0)
sizes = {key: value - before[key] for key, value in resident().items()}
print(json.dumps({"imports": imported - started, "open": opened - imported, **sizes}))
"""


class Worker:
    """A side in a process that only runs while it is asked."""

    def __init__(self, side: str, model: str, kind: str, work: Path) -> None:
        self.name = f"{side} {kind}".strip()
        script = str(Path(__file__).with_name("peer_sides.py"))
        self._log = (work / "log.txt").open("a")
        self._process = subprocess.Popen(
            [sys.executable, script, side, model, kind, str(work)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._answer()

    def ask(self, do: str, **given: Any) -> Any:
        """Let it run until it has answered. Raises RuntimeError if it died."""
        self._process.send_signal(signal.SIGCONT)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"do": do, **given}), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name}: died, see {self._log.name}")
        self._process.send_signal(signal.SIGSTOP)
        return json.loads(line)

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._log.close()


def say(line: str) -> None:
    """Progress, apart from the table."""
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def sides(name: str, args: argparse.Namespace) -> Iterator[list[Worker]]:
    """The workers of a model, whatever is there of it."""
    found: list[Worker] = []
    wanted = [("ours", kind) for kind in args.types if built(name, kind, args.work)]
    files = [file for kind in args.types for file in GGUF[kind]]
    there = [f for f in files if (args.work / "gguf" / name / f"{f}.gguf").exists()]
    wanted += [("llama.cpp", file) for file in there]
    wanted += [("torch", kind) for kind in args.types if kind in TORCH]
    try:
        for side, kind in wanted:
            if side in args.sides:
                try:
                    found.append(Worker(side, name, kind, args.work))
                except RuntimeError as died:
                    say(f"left out: {died}")
        yield found
    finally:
        for worker in found:
            worker.end()


def compare(name: str, args: argparse.Namespace) -> dict[str, float]:
    """Side and type -> largest distance of its logits from the reference's, over their largest.

    The reference is torch's float32, or ours. Raises SystemExit if float32 differs.
    """
    logits = {}
    with sides(name, args) as workers:
        for worker in workers:
            out = args.work / "logits" / name / f"{worker.name}.npy"
            out.parent.mkdir(parents=True, exist_ok=True)
            try:
                logits[worker.name] = np.load(worker.ask("logits", out=str(out)))
            except RuntimeError as died:
                say(f"left out: {died}")
    wanted = logits.get("torch f32", logits.get("ours f32"))
    if wanted is None:
        sys.exit(f"error: {name}: no float32 logits to compare with")
    scale = float(np.abs(wanted).max())
    found = {key: float(np.abs(value - wanted).max()) / scale for key, value in logits.items()}
    for key, distance in found.items():
        say(f"{name}: {key} within {distance:.1e} of the reference")
        if key.endswith(" f32") and not distance <= SAME:
            sys.exit(f"error: {name}: {key} is {distance:.1e} from the reference: another model")
    return found


def decode(name: str, workers: list[Worker], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Rows -> side -> seconds of a step, a round each."""
    batches = [rows for rows in (1, 8) if rows in MODELS[name].shapes]
    found: dict[str, dict[str, list[float]]] = {str(rows): {} for rows in batches}
    for number in range(rounds):
        for rows in batches:
            for worker in turned(workers, number):
                seconds = worker.ask("decode", rows=rows, seconds=TURN_S)
                found[str(rows)].setdefault(worker.name, []).append(seconds)
        say(f"{name}: decode, round {number + 1} of {rounds}")
    return found


def prefill(name: str, workers: list[Worker], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Tokens -> side -> seconds of a prompt, a round each after one to warm up.

    Without llama.cpp's other files of a type; torch, which takes long, only at first.
    """
    lengths = MODELS[name].prompts
    found: dict[str, dict[str, list[float]]] = {str(tokens): {} for tokens in lengths}
    others = {f"llama.cpp {file}" for files in GGUF.values() for file in files[1:]}
    workers = [worker for worker in workers if worker.name not in others]
    for worker in workers:
        worker.ask("prefill", tokens=lengths[0])
    for number in range(rounds):
        for tokens in lengths:
            for worker in turned(workers, number):
                if number < SLOW_ROUNDS or not worker.name.startswith("torch"):
                    seconds = worker.ask("prefill", tokens=tokens)
                    found[str(tokens)].setdefault(worker.name, []).append(seconds)
        say(f"{name}: prefill, round {number + 1} of {rounds}")
    return found


def turned(workers: list[Worker], number: int) -> list[Worker]:
    """The order of a round: nobody always follows the same one."""
    start = number * 3 % len(workers)
    order = workers[start:] + workers[:start]
    return order[::-1] if number % 2 else order


def opening(name: str, args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Type -> what a new process finds: seconds to import and to open, and the bytes of the
    parameter file and of memory of its own that are resident once every entry has run."""
    found: dict[str, dict[str, list[float]]] = {}
    kinds = [kind for kind in args.types if built(name, kind, args.work)]
    for _ in range(args.rounds):
        for kind in kinds:
            command = [sys.executable, "-c", OPEN, str(bundle(name, kind, 1, args.work))]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
            for key, value in json.loads(done.stdout).items():
                found.setdefault(kind, {}).setdefault(key, []).append(value)
    return found


def compiling(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Type -> seconds and peak bytes of the compile stage for all entries of the 130m model, and
    the seconds that the C kernels took, which are compiled once for all models."""
    name, found = "mamba2-130m", {}
    for kind in args.types:
        with tempfile.TemporaryDirectory(dir=args.work) as folder:
            words = ["--no-proof", f"model={checkpoint(name, args.work)}", "target=cpu"]
            words += [f"weights={kind}", f"shape={MODELS[name].shapes[1]}", "params=none"]
            try:
                made = build(words, Path(folder), Path(folder) / "cache")
            except SystemExit as refused:
                say(f"left out: {refused}")
                continue
            rows = stages(made)
            seconds, size = (rows["compile"][key] for key in ("seconds", "peak_rss_bytes"))
            kernels = rows.get("objects", {}).get("seconds", 0.0)
            found[kind] = {"seconds": seconds, "kernels": kernels, "bytes": size}
            say(f"compile {kind}: {seconds} s")
    return found


def measure(name: str, args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Adds a model's figures to those of earlier runs; the machine's own rates beside them."""
    into = found["models"].setdefault(name, {})
    if {"decode", "prefill"} & set(args.only):
        host = Worker("machine", name, "", args.work)
        with sides(name, args) as workers:
            rates = found.setdefault("rates", [])
            rates.append(host.ask("rates"))
            into["multiplied"] = multiplied(checkpoint(name, args.work))
            into.setdefault("facts", {}).update({w.name: w.ask("facts") for w in workers})
            for part, call in (("decode", decode), ("prefill", prefill)):
                if part in args.only and (part == "decode" or MODELS[name].prompts):
                    merge(into, part, call(name, workers, args.rounds))
                    rates.append(host.ask("rates"))
                    save(found, args.out)
        host.end()
    if "open" in args.only:
        into["open"] = into.get("open", {}) | opening(name, args)


def save(found: dict[str, Any], out: Path) -> None:
    """Writes everything so far."""
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def merge(into: dict[str, Any], part: str, new: dict[str, dict[str, Any]]) -> None:
    """Replaces what was measured again, keeps the rest."""
    for key, values in new.items():
        into.setdefault(part, {}).setdefault(key, {}).update(values)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="where everything built is kept")
    parser.add_argument("--prepare", action="store_true", help="build and check, measure nothing")
    parser.add_argument("--no-proof", action="store_true", help="build so, for a rehearsal")
    lists = {"only": PARTS, "types": TYPES, "models": tuple(MODELS),
             "sides": ("ours", "llama.cpp", "torch")}  # fmt: skip
    for name, words in lists.items():
        parser.add_argument(
            f"--{name}", type=lambda text: text.split(","), default=list(words),
            metavar="A,B", help=", ".join(words),
        )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=OUT, help="default: %(default)s")
    args = parser.parse_args()
    for name, words in lists.items():
        for word in set(getattr(args, name)) - set(words):
            parser.error(f"--{name}: {word!r}: expected some of {', '.join(words)}")
    args.work = args.work.absolute()
    return args


def prepared(args: argparse.Namespace) -> None:
    """`--prepare`."""
    args.work.mkdir(parents=True, exist_ok=True)
    if "llama.cpp" in args.sides:
        try:
            check(args.work / "llama")
        except NoPeer as missing:
            say(f"left out: {missing}")
    checks = args.work / "check.json"
    known = json.loads(checks.read_text()) if checks.exists() else {}
    for name in args.models:
        prepare(name, args.types, args.work, ["--no-proof"] * args.no_proof, say)
        known[name] = known.get(name, {}) | compare(name, args)
        checks.write_text(json.dumps(known, indent=1))


def main() -> None:
    """Prepare, or measure and print the tables."""
    args = arguments()
    if args.prepare:
        prepared(args)
        return
    checks = args.work / "check.json"
    known = json.loads(checks.read_text()) if checks.exists() else {}
    for name in args.models:
        if name not in known:
            sys.exit(f"error: {name}: its logits have not been compared: run --prepare first")
    found = json.loads(args.out.read_text()) if args.out.exists() else {}
    found |= {"machine": machine(), "check": found.get("check", {}) | known}
    found.setdefault("models", {})
    found.setdefault("load", []).append([os.getloadavg()[0]])
    say(describe(found["machine"]))
    begun = time.monotonic()
    for name in args.models:
        measure(name, args, found)
    if "compile" in args.only:
        found["compile"] = found.get("compile", {}) | compiling(args)
    found["load"][-1].append(os.getloadavg()[0])
    save(found, args.out)
    say(f"{time.monotonic() - begun:.0f} s")
    print(render(found))


if __name__ == "__main__":
    main()
