"""Runs, checks or explains the stages of one job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from artifacts import bundle
from artifacts.actions import explain, share
from artifacts.buildlog import BuildLog
from artifacts.job import Job
from artifacts.stages import Miss, Stages
from artifacts.store import Store
from runtime.errors import UserError

ORDER = ("fetch", "convert", "emit", "expect", "compile", "proof", "bundle")


@dataclass(frozen=True)
class Finding:
    """What would become of a stage, and the lines that say why.

    `state` is done (cached, or not part of the job), run, or after: it waits for the result of
    another stage that would run, before which its own key is not known.
    """

    stage: str
    state: Literal["done", "run", "after"]
    lines: tuple[str, ...]


class Plan:
    """The stages of `job`, with the bundle under the directory `build`."""

    def __init__(self, store: Store, job: Job, build: Path) -> None:
        self.store, self.job, self.build = store, job, build
        self._stages = Stages(store, job, BuildLog())
        self._dry = Stages(store, job, BuildLog(), dry=True)

    def _step(self, stages: Stages, name: str) -> object:
        steps: dict[str, Callable[[], object]] = {
            "fetch": lambda: stages.checkpoint,
            "convert": lambda: stages.convert,
            "emit": lambda: stages.emit,
            "expect": lambda: stages.expect,
            # Its graphs first: without them there is no need to ask what the target's CPU is.
            "proof": lambda: stages.emit and bundle.compiled_module(stages),
            "compile": lambda: stages.emit and bundle.compiled_module(stages),
            "bundle": lambda: stages.emit and bundle.build(stages, self.build),
        }
        return steps[name]()

    def run(self, name: str) -> None:
        """Run the stage and what it needs, as far as it is not cached."""
        self._step(self._stages, name)
        share(self.store)
        self._dry = Stages(self.store, self.job, BuildLog(), dry=True)

    @property
    def made(self) -> list[str]:
        """The stages that `run` had to run so far; what came from the cache is not among them."""
        return [row["stage"] for row in self._stages.log.rows if row.get("cached") is False]

    @property
    def dry(self) -> Stages:
        """The stages to be looked at: what is not there raises Miss."""
        return self._dry

    def ready(self, name: str) -> bool:
        """Whether the stage's results are all there; nothing is run or downloaded to find out.

        They are offered to the remote cache. What is wrong with the input is told by the run that
        follows.
        """
        try:
            self._step(self._dry, name)
        except (Miss, UserError):
            return False
        share(self.store)
        return True

    def explain(self) -> list[str]:
        """Lines for every stage: cached, or which input made it a miss."""
        return [line for finding in self.survey() for line in finding.lines]

    def survey(self) -> list[Finding]:
        """What would become of every stage, in order, and of small ones that would run."""
        found: list[Finding] = []
        told: set[str] = set()
        for name in ORDER:
            try:
                self._step(self._dry, name)
                found.append(Finding(name, "done", (f"{name}: done",)))
                continue
            except Miss as miss:
                fetching = bool(found) and found[0].state == "run"
                own = "fetch" if fetching else name  # what has no action of its own
                first = own if miss.action is None else miss.action.stage
                # A small stage that only others ask for is told before the first of them.
                if miss.action is not None and first not in {*ORDER, *told}:
                    found.append(Finding(first, "run", tuple(explain(self.store, miss.action))))
                    told.add(first)
                if first == name:
                    lines = [f"{name}: will run"]
                    if miss.action is not None:
                        lines = explain(self.store, miss.action)
                    found.append(Finding(name, "run", tuple(lines)))
                elif first in ORDER and ORDER.index(first) > ORDER.index(name):
                    found.append(Finding(name, "done", (f"{name}: done",)))
                else:
                    line = f"{name}: will run after {first}, whose result it needs"
                    found.append(Finding(name, "after", (line,)))
        return found
