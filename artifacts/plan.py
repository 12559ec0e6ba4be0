"""Runs, checks or explains the stages of one job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from artifacts import bundle
from artifacts.actions import explain
from artifacts.buildlog import BuildLog
from artifacts.job import Job
from artifacts.stages import Miss, Stages
from artifacts.store import Store
from runtime.errors import UserError

ORDER = ("fetch", "convert", "emit", "expect", "compile", "proof", "bundle")


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
            "proof": lambda: bundle.compiled_module(stages),
            "compile": lambda: bundle.compiled_module(stages),
            "bundle": lambda: bundle.build(stages, self.build),
        }
        return steps[name]()

    def run(self, name: str) -> None:
        """Run the stage and what it needs, as far as it is not cached."""
        self._step(self._stages, name)
        self._dry = Stages(self.store, self.job, BuildLog(), dry=True)

    def ready(self, name: str) -> bool:
        """Whether the stage's results are all there; nothing is run or downloaded to find out.

        What is wrong with the input is told by the run that follows.
        """
        try:
            self._step(self._dry, name)
        except (Miss, UserError):
            return False
        return True

    def explain(self) -> list[str]:
        """Lines for every stage: cached, or which input made it a miss."""
        lines: list[str] = []
        told: set[str] = set()
        for name in ORDER:
            first = name  # the first stage that would run, if one would
            try:
                self._step(self._dry, name)
                lines.append(f"{name}: done")
                continue
            except Miss as miss:
                if miss.action is not None:
                    first = miss.action.stage
                    if first not in {*ORDER, *told}:  # a small stage that only others ask for
                        lines += explain(self.store, miss.action)
                        told.add(first)
                if first == name:
                    lines += (
                        [f"{name}: will run"]
                        if miss.action is None
                        else explain(self.store, miss.action)
                    )
                elif first in ORDER and ORDER.index(first) > ORDER.index(name):
                    lines.append(f"{name}: done")
                else:
                    lines.append(f"{name}: will run after {first}, whose result it needs")
        return lines
