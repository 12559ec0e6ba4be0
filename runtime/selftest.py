"""`scanwright selftest`: a bundle on this device gives every request the same answer in company.

Each request first runs alone in slot 0, then all of them together (see runtime.company). Every
stream of tokens must be the one it had alone, and so must the logits of every step: to the bit in
the same slot, and across slots to the bit or, where the compiled code treats rows differently,
within 1e-6 of the row's scale (the report says how many differed).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from runtime import company, targets
from runtime.errors import UserError
from runtime.manifest import Manifest
from runtime.module import Device, open_bundle
from runtime.request import Request
from runtime.session import Session

CLOSE = 1e-6  # relative to the largest magnitude of the row
_SHOWN = 5  # failures that are printed
MUST_HAPPEN = ("cancelled", "length", "preempted", "saved and restored")
MUST_HAPPEN_BESIDE = ("steps with every slot decoding", "steps with prefill beside decode")


@dataclass
class Report:
    """What `selftest` found.

    `prefill`, `same_slot` and `other_slot` are [rows of logits compared with the solo run's, how
    many were equal to the bit]; `worst` is the largest difference relative to the row's scale,
    measured over 256 values of the row; `failures` are one line each.
    """

    device: str
    requests: int
    tokens: int = 0
    prefill: list[int] = field(default_factory=lambda: [0, 0])
    same_slot: list[int] = field(default_factory=lambda: [0, 0])
    other_slot: list[int] = field(default_factory=lambda: [0, 0])
    worst: float = 0.0
    events: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def compare(self, index: int, solo: company.Run, found: company.Run) -> None:
        """Check one request's run in company against its solo run."""
        for run in (solo, found):
            if run.ending is not None and run.ending.reason == "error":
                self.failures.append(f"request {index}: {run.ending.message}")
                return
        self.tokens += len(solo.tokens)
        for step, (want, got) in enumerate(zip(solo.prints, found.prints, strict=False)):
            slots = {solo.slots[step], found.slots[step]}
            kind = "prefill" if -1 in slots else "other_slot" if len(slots) == 2 else "same_slot"
            counts = getattr(self, kind)
            counts[0] += 1
            counts[1] += want.digest == got.digest
            if want.digest != got.digest:
                distance = want.distance(got)
                self.worst = max(self.worst, distance)
                if kind != "other_slot" or not distance <= CLOSE:
                    self.failures.append(
                        f"request {index}, token {step}: logits off by {distance:.1e} in"
                        f" {kind.replace('_', ' ')} {found.slots[step]}, expected"
                        f" {'≤ 1e-06' if kind == 'other_slot' else 'the same bits'}"
                    )
                    return
        if solo.tokens != found.tokens:
            step = next(
                (
                    i
                    for i, (a, b) in enumerate(zip(solo.tokens, found.tokens, strict=False))
                    if a != b
                ),
                min(len(solo.tokens), len(found.tokens)),
            )
            self.failures.append(
                f"request {index}, token {step}: {found.tokens[step : step + 1]}, expected"
                f" {solo.tokens[step : step + 1]} as when it ran alone"
            )


def selftest(device: Device, manifest: Manifest, count: int = 200, seed: int = 0) -> Report:
    """Run `count` random requests alone and in company on an opened bundle."""
    report = Report(device.uri, count)
    every = company.requests(manifest, count, seed)
    session = Session(device, manifest)
    solo = [company.alone(session, manifest, request) for request in every]
    session = Session(device, manifest)
    with tempfile.TemporaryDirectory(prefix="scanwright-selftest-") as folder:
        plans = company.plans(every, seed)
        together = company.Company(session, manifest, Path(folder), queue=len(plans))
        runs = together.run(plans)
        report.events = dict(sorted(together.events.items()))
    for index, run in enumerate(solo):
        report.compare(index, run, runs[index])
    must = MUST_HAPPEN + (MUST_HAPPEN_BESIDE if manifest.shape.slots > 1 else ())
    for event in must if count >= 50 else ():
        if not report.events.get(event):
            report.failures.append(f"{event}: never happened, expected some; use another --seed")
    _recycled(session, manifest, report)
    return report


def _recycled(session: Session, manifest: Manifest, report: Report) -> None:
    """Whether a slot is zero again after a request has left it."""
    host = session.device.to_host
    slots = range(manifest.shape.slots)
    work = company.Company(session, manifest, Path(), queue=len(slots))
    request = Request((0, 1 % manifest.model.vocab_size), 3, ignore_eos=True, logits=True)
    work.run([company.Plan(request, 0, i) for i in slots], poison=False)
    for slot in slots:
        names = [spec.name for spec in manifest.state]
        states = zip(names, session.extract(slot), strict=True)
        if bad := [name for name, buffer in states if np.any(host(buffer) != 0)]:
            report.failures.append(f"slot {slot}: {bad[0]} is not zero after its request has ended")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `scanwright selftest`."""
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="bundle directory")
    parser.add_argument("--device", metavar="URI", help="IREE device (default: the target's)")
    targets.add_argument(parser)
    parser.add_argument(
        "--requests", metavar="N", type=int, default=200, help="requests to run (default: 200)"
    )
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="which requests")
    parser.add_argument(
        "--random-params",
        metavar="SEED",
        nargs="?",
        type=int,
        const=0,
        help="make the parameters up (a bundle without weights needs it; default seed 0)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """`scanwright selftest`: 0 if every request had the same answer. Raises UserError."""
    for name in ("requests", "seed", "random_params"):
        value, least = getattr(args, name), int(name == "requests")
        if value is not None and value < least:
            raise UserError(f"{name.replace('_', '-')}: found {value}, expected {least} or more")
    manifest = targets.load(args.bundle, args.target, args.device)
    device = open_bundle(args.bundle, manifest, args.device, args.random_params)
    report = selftest(device, manifest, args.requests, args.seed)
    if args.json:
        print(json.dumps({**asdict(report), "passed": not report.failures}, allow_nan=False))
    else:
        _print(report)
    return 1 if report.failures else 0


def _print(report: Report) -> None:
    print(f"{report.requests} requests, {report.tokens} tokens, on {report.device}")
    for event, count in report.events.items():
        print(f"  {event}: {count}")
    for kind in ("prefill", "same_slot", "other_slot"):
        compared, equal = getattr(report, kind)
        print(f"logits, {kind.replace('_', ' ')}: {equal} of {compared} rows equal to the bit")
    if report.worst:
        print(f"largest difference: {report.worst:.1e} of the row's scale")
    for failure in report.failures[:_SHOWN]:
        print(f"FAILED {failure}")
    if len(report.failures) > _SHOWN:
        print(f"… and {len(report.failures) - _SHOWN} more")
    print("failed" if report.failures else "passed: every request as when it ran alone")
