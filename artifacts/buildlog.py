"""The log of one build: a JSON line a stage, with what is kept out of the bundle for its digest.

Times, memory, commands and sizes go here, next to the bundle (`build.log.jsonl`), never into it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from artifacts.actions import Result
from artifacts.disk import explained
from artifacts.process import Usage

FILE_NAME = "build.log.jsonl"


@dataclass
class BuildLog:
    """Collects what happened; `append_to` writes it."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    _usage: Usage | None = None

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Note when a stage began and what it took; stages that never ran add nothing."""
        started, clock = time.time(), time.perf_counter()
        before = len(self.rows)
        yield
        seconds = time.perf_counter() - clock
        for row in self.rows[before:]:
            row.setdefault("started", round(started, 3))
            row.setdefault("seconds", round(seconds, 3))
        if before == len(self.rows):
            self.rows.append(
                {"stage": name, "started": round(started, 3), "seconds": round(seconds, 3)}
            )

    def add(self, usage: Usage) -> None:
        """What the process behind the next result used."""
        self._usage = usage

    def result(self, stage: str, result: Result, extra: Mapping[str, Any] | None = None) -> None:
        """A stage's result: whether it was cached, and where, its key, and the files it made."""
        row: dict[str, Any] = {"stage": stage, "cached": result.hit, "key": result.key}
        row |= {"remote": True} if result.remote else {}
        row["outputs"] = {name: blob.size for name, blob in result.outputs.items()}
        if self._usage is not None and not result.hit:
            row["process_seconds"] = round(self._usage.seconds, 3)
            row["peak_rss_bytes"] = self._usage.peak_rss_bytes
        self._usage = None
        self.rows.append(row | dict(extra or {}))

    def append_to(self, directory: Path) -> None:
        """Add the rows to `directory`/build.log.jsonl, if a stage did run or came from afar."""
        if all(row.get("cached", True) and not row.get("remote") for row in self.rows):
            return
        path = directory / FILE_NAME
        with explained(path), path.open("a", encoding="utf-8") as out:
            told: set[tuple[str, str]] = set()  # a result is looked up again by later stages
            for row in self.rows:
                name = (row["stage"], row.get("key", ""))
                if name not in told:
                    out.write(json.dumps(row, sort_keys=True) + "\n")
                told.add(name)
