"""What a build would run, why, and about how much time and space that takes; nothing is run.

An estimate comes from the logs beside earlier bundles, of the same model if there are any, else of
another one, scaled by the bytes of parameters; where no log has the stage, from a coarse rule over
those bytes that fits two cores. It says which.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from artifacts import buildlog
from artifacts.lockfile import Lock, is_weights
from artifacts.looking import Looking
from artifacts.plan import Finding, Plan
from artifacts.process import ROOT
from artifacts.stages import RANDOM_PARAMS_LIMIT, Miss
from runtime import manifest as manifest_file
from runtime.errors import UserError
from runtime.manifest import byte_size

MB = 1e6
WIDTHS = {"f32": 4.0, "bf16": 2.0, "f16": 2.0, "int8": 1.04, "int4": 0.6}  # bytes a number
UNKNOWN_WIDTH = 2.0  # of a checkpoint that was not opened
# Stage -> (seconds, seconds a MB of parameters, bytes, bytes a byte of parameters).
RULES: dict[str, tuple[float, float, float, float]] = {
    "fetch": (1.0, 1 / 20, 0.0, 1.0),
    "convert": (1.0, 1 / 35, 0.0, 1.0),
    "emit": (2.0, 1 / 200, 0.5 * MB, 0.0),
    "random-params": (1.0, 1 / 100, 0.0, 1.0),
    "expect": (10.0, 1 / 13, 5 * MB, 0.65),
    "objects": (22.0, 0.0, MB, 0.0),
    "compile": (6.0, 1 / 1000, 0.4 * MB, 0.0),
    "proof": (1.0, 1 / 500, 0.1 * MB, 0.0),
    "bundle": (0.5, 0.0, 0.0, 0.0),  # links
}
OTHER = (2.0, 1 / 100, 0.01 * MB, 0.0)  # a small stage


@dataclass(frozen=True)
class Estimate:
    """Bytes and seconds, None where nothing tells, and where they are from, in words."""

    size: float | None
    seconds: float | None
    basis: str


@dataclass(frozen=True)
class Past:
    """What a stage took in an earlier build of the bundle in `place` (model/target/shape)."""

    place: tuple[str, ...]
    started: float
    seconds: float
    size: int
    params: int  # bytes


class Estimator:
    """Estimates for the stages of `plan`, whose store is `cache`."""

    def __init__(self, plan: Plan, cache: Looking) -> None:
        self.plan, self.job, self.cache = plan, plan.job, cache

    def rows(self) -> list[tuple[Finding, Estimate | None]]:
        """Every stage with its estimate, None for what would not run."""
        found: list[tuple[Finding, Estimate | None]] = []
        survey = self.plan.survey()
        states = {finding.stage: finding.state for finding in survey}
        for finding in survey:
            skipped = finding.state == "after" and self._skipped(finding.stage)
            if skipped:
                why = f"{finding.stage}: not part of this build, {skipped}"
                finding = Finding(finding.stage, "done", (why,))
            brought = self.cache.elsewhere.get(finding.stage)
            if finding.state == "done" and brought is not None:
                line = f"{finding.stage}: done, in the remote cache"
                estimate = Estimate(brought, rule_of("fetch", brought)[0], "to download")
                found.append((Finding(finding.stage, "done", (line,)), estimate))
                continue
            if finding.stage in ("expect", "compile") and finding.state == "after":
                found += [(row, self.of(row.stage)) for row in self._foreseen(finding, states)]
            found.append((finding, None if finding.state == "done" else self.of(finding.stage)))
        return found

    def _skipped(self, stage: str) -> str | None:
        """Why a stage that waits for others will turn out not to be needed, if it will."""
        if stage in ("expect", "proof") and not self.job.params:
            if (self.params or 0) > RANDOM_PARAMS_LIMIT:
                return "the parameters are too big to make up here"
        if stage == "proof" and not self.job.proof:
            return "--no-proof"
        if stage == "proof" and self.job.target.runs_here == "never":
            return f"no {self.job.target.device} device of this target is at hand to the build"
        return None

    def _foreseen(self, finding: Finding, states: Mapping[str, str]) -> list[Finding]:
        """Small stages that one that waits will ask for, and that no record is there of."""
        wanted: list[str] = []
        if finding.stage == "expect" and not self.job.params:
            wanted.append("random-params")
        if finding.stage == "compile" and self.job.kernels and "objects" not in self.sizes:
            wanted.append("objects")
        line = f"will run before {finding.stage}, if it is not in the cache"
        return [Finding(w, "after", (f"{w}: {line}",)) for w in wanted if w not in states]

    def of(self, stage: str) -> Estimate:
        """What running the stage takes."""
        past = self._nearest(stage)
        if past is not None and (past.params == self.params or self.params is not None):
            ratio_s, ratio_b = self._ratios(stage, past)
            scaled = "" if (ratio_s, ratio_b) == (1, 1) else ", scaled by the bytes of parameters"
            basis = f"log of {'/'.join(past.place)}{scaled}"
            return Estimate(past.size * ratio_b, past.seconds * ratio_s, basis)
        size = self.sizes.get(stage)
        if self.params is None:
            return Estimate(size, None, "nothing is known of the model before it is fetched")
        rule = rule_of(stage, self.params)
        if size is None:
            return Estimate(rule[1], rule[0], f"from {self.counted}")
        return Estimate(size, rule[0], f"size of the last result, time from {self.counted}")

    def _ratios(self, stage: str, past: Past) -> tuple[float, float]:
        """What to multiply seconds and bytes of `past` with."""
        if self.params is None or past.params == self.params:
            return 1, 1
        here, there = rule_of(stage, self.params), rule_of(stage, past.params)
        return here[0] / there[0], (here[1] / there[1] if there[1] else 1)

    def _nearest(self, stage: str) -> Past | None:
        """The last run of the stage whose model, target and shape are most alike."""
        own = tuple(self.job.about.values())
        alike: Callable[[Past], tuple[Any, ...]] = lambda past: (  # noqa: E731
            [a == b for a, b in zip(own, past.place, strict=True)],
            past.started,
        )
        return max(self.past.get(stage, ()), key=alike, default=None)

    @cached_property
    def past(self) -> dict[str, list[Past]]:
        """Stage → what earlier builds took, from their logs; damaged lines are left out."""
        found: dict[str, list[Past]] = {}
        for path in sorted(self.plan.build.glob(f"*/*/*/{buildlog.FILE_NAME}")):
            try:
                params = sum(p.nbytes for p in manifest_file.load(path.parent).params)
                lines = path.read_text(encoding="utf-8").splitlines()
            except (UserError, OSError, UnicodeDecodeError):
                continue
            place = path.parent.relative_to(self.plan.build).parts
            for line in lines:
                stage, past = _read(line, place, params)
                if past is not None:
                    found.setdefault(stage, []).append(past)
        return found

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Stage → bytes of its last result in the cache for this model (`objects`: for any)."""
        found: dict[str, int] = {}
        for key in self.plan.store.recent_keys():
            record = self.plan.store.peek(key)
            if record is None:
                continue
            if record.about.get("model") == self.job.model.name or record.stage == "objects":
                total = sum(blob.size for blob in record.outputs.values())
                found.setdefault(record.stage, total)
        return found

    # Parameters

    @cached_property
    def _known(self) -> tuple[int | None, str]:
        """Bytes of the parameters as a bundle stores them, and how they were counted."""
        stages = self.plan.dry
        try:
            specs = stages.interface["params"]
            return sum(byte_size(p["dtype"], p["shape"]) for p in specs), "the graph's parameters"
        except (Miss, UserError, OSError, ValueError, KeyError):
            pass
        counts = _count(self._config)
        if counts is not None:
            number = counts["matrix"] + counts["other"]
            size = counts["matrix"] * self._width + counts["other"] * WIDTHS["f32"]
            return round(size), f"{number:,} parameters"
        try:
            lock = Lock.load(self.job.model.lock)
        except UserError:
            lock = None
        if lock is None:
            return None, ""
        total = sum(size for name, (_, size) in lock.files.items() if is_weights(name))
        return total, "the sizes in the lock"

    @property
    def params(self) -> int | None:
        """Bytes of the parameters in a bundle; None if nothing is known of the model."""
        return self._known[0]

    @property
    def counted(self) -> str:
        """How the parameters were counted, in words."""
        size = "" if self.params is None else f", {self.params / MB:,.1f} MB"
        return f"{self._known[1]}{size}"

    @property
    def _config(self) -> str | None:
        try:
            return self.plan.dry.config
        except (Miss, UserError):
            config = self.job.model.config
            return None if config is None else json.dumps(config)

    @property
    def _width(self) -> float:
        try:
            return WIDTHS.get(self.plan.dry.weights, UNKNOWN_WIDTH)
        except (Miss, UserError):
            return WIDTHS.get(self.job.weights(None), UNKNOWN_WIDTH)


def rule_of(stage: str, params: int) -> tuple[float, float]:
    """(seconds, bytes) of a stage on a model with so many bytes of parameters, by a coarse rule."""
    seconds, each_mb, size, each = RULES.get(stage, OTHER)
    return seconds + each_mb * params / MB, size + each * params


def _read(line: str, place: tuple[str, ...], params: int) -> tuple[str, Past | None]:
    """The stage of a line of a build log, and what it took if it did run."""
    try:
        row = json.loads(line)
        if row.get("cached") is not False or "seconds" not in row:
            return "", None
        size = sum(row["outputs"].values())
        past = Past(place, float(row.get("started", 0)), float(row["seconds"]), size, params)
        return str(row["stage"]), past
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", None


def _count(config: str | None) -> dict[str, int] | None:
    """`matrix` and `other` of `python -m emit.count`, which reads the config alone."""
    if config is None:
        return None
    argv = [sys.executable, "-m", "emit.count", "/dev/stdin"]
    done = subprocess.run(argv, input=config, cwd=ROOT, capture_output=True, text=True, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else None


def report(plan: Plan, cache: Looking) -> list[str]:
    """The lines of `doit plan`: every stage, why it would run, size, time, and the total."""
    rows = Estimator(plan, cache).rows()
    lines = [" ".join(f"{name}={word}" for name, word in plan.job.about.items())]
    for finding, estimate in rows:
        first, *rest = finding.lines
        lines.append(first)
        lines += rest
        if estimate is not None:
            lines.append(f"  about {_size(estimate.size)}, {_time(estimate.seconds)}"
                         f" ({estimate.basis})")  # fmt: skip
    running = [estimate for _, estimate in rows if estimate is not None]
    if not running:
        return [*lines, "total: nothing to run, all of it is cached"]
    size = sum(estimate.size or 0 for estimate in running)
    seconds = sum(estimate.seconds or 0 for estimate in running)
    open_ends = sum(estimate.seconds is None for estimate in running)
    more = f", and {open_ends} of which nothing is known yet" if open_ends else ""
    count = "1 stage" if len(running) == 1 else f"{len(running)} stages"
    return [*lines, f"total: {count}, about {_size(size)}, {_time(seconds)}{more}"]


def _size(size: float | None) -> str:
    if size is None:
        return "? bytes"
    for unit, limit in (("B", 1e3), ("kB", 1e6), ("MB", 1e9)):
        if size < limit:
            return f"{size * 1e3 / limit:.3g} {unit}"
    return f"{size / 1e9:,.1f} GB"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "? s"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
