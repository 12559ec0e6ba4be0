"""`doit farm`: compiles of many models, targets and shapes, spread over a Dask cluster.

Each triple is one task: `farm_worker.compile_triple` at a worker, whose results are in the worker's
cache and come back as digests. The bytes travel by what the caches share: one directory, or the
remote cache. A task whose worker dies is given to another one by the scheduler.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from artifacts.actions import Action, remote_record
from artifacts.farm_worker import TOPIC, Resolver, compile_triple, identity
from artifacts.store import Store
from runtime.errors import UserError

QUIET_S = 30.0  # after which a line says that it goes on
PATIENCE_S = 60.0  # for the first worker of a scheduler
Triple = tuple[str, str, str]


@dataclass
class Farm:
    """One run over `words`, a mapping a triple; `lines` on stderr tell how it goes."""

    store: Store
    words: Sequence[Mapping[str, str | None]]
    resolver: Resolver
    proof: bool = True
    failures: list[str] = field(default_factory=list)
    rows: list[tuple[Triple, dict[str, Any]]] = field(default_factory=list)

    def run(self, scheduler: str | None, workers: int | None = None) -> bool:
        """Compile all; whether all ended well and their results are in this machine's cache.

        Without a `scheduler` (`tcp://host:port`) worker processes are started here, `workers` of
        them. Raises UserError if there is no cluster to be had.
        """
        with _client(scheduler, workers or local_workers(len(self.words))) as client:
            self._follow(client)
        absent = sum(not self._arrived(row) for _, row in self.rows)
        if absent:
            self._fail(
                f"{absent} of {len(self.rows)} results are in caches of the workers only; give"
                " workers and this machine one SCANWRIGHT_CACHE, or one SCANWRIGHT_REMOTE"
                " (and the workers SCANWRIGHT_REMOTE_WRITE=1)"
            )
        return not self.failures

    def _arrived(self, row: Mapping[str, Any]) -> bool:
        """Whether the compiled modules and their proof are in this machine's cache now.

        What is not is brought from the remote cache, if there is one.
        """
        for record in row["records"]:
            action = Action(record["stage"], record["fields"], record["about"])
            if record["stage"] in ("compile", "proof"):
                if self.store.lookup(action.key) is None:
                    if remote_record(self.store, action) is None:
                        return False
        return True

    def _follow(self, client: Any) -> None:
        """Submit all, and tell of what happens until all have ended."""
        happened: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        client.subscribe_topic(TOPIC, lambda event: happened.put(("event", event[1])))
        run = os.urandom(4).hex()
        waiting: dict[str, tuple[Triple, Any]] = {}
        expected = identity()
        for words in self.words:
            triple = (str(words["model"]), str(words["target"]), str(words["shape"]))
            key = f"compile {' '.join(triple)} {run}"
            future = client.submit(
                compile_triple, dict(words), self.resolver, self.proof, expected, key=key
            )
            future.add_done_callback(lambda _, key=key: happened.put(("done", key)))
            waiting[key] = (triple, future)
        seen: dict[Triple, str] = {}
        began = told = time.monotonic()
        try:
            while waiting:
                try:
                    kind, what = happened.get(timeout=1.0)
                except queue.Empty:
                    if time.monotonic() - told > QUIET_S:
                        told = time.monotonic()
                        _say(f"{len(waiting)} to go, {told - began:.0f} s")
                    continue
                told = time.monotonic()
                if kind == "done":
                    self._ended(*waiting.pop(what))
                else:
                    self._event(what, seen)
        finally:
            for _, future in waiting.values():
                future.cancel()

    def _event(self, event: Mapping[str, Any], seen: dict[Triple, str]) -> None:
        """Tell of a start or a stage; a second start is one after a loss."""
        triple = (event["model"], event["target"], event["shape"])
        where = f"{event['worker']} (process {event['process']})"
        if event["event"] == "stage":
            _say(f"{' '.join(triple)}: {event['stage']} at {where}")
        elif triple not in seen:
            _say(f"{' '.join(triple)}: started at {where}")
        else:
            _say(f"{' '.join(triple)}: {seen[triple]} was lost, started again at {where}")
        if event["event"] == "started":
            seen[triple] = where

    def _ended(self, triple: Triple, future: Any) -> None:
        from distributed.scheduler import KilledWorker

        name, count = " ".join(triple), len(self.rows) + len(self.failures) + 1
        error = future.exception()
        if isinstance(error, KilledWorker):
            self._fail(f"{name}: every worker that tried it died, most likely out of memory")
        elif isinstance(error, UserError):
            self._fail(f"{name}: {error}")
        elif error is not None:
            self._fail(f"{name}: {type(error).__name__}: {error}")
        else:
            row = future.result()
            self.rows.append((triple, row))
            made = [r["stage"] for r in row["records"] if not r["cached"]]
            how = f"{', '.join(made)} in {row['seconds']:.1f} s" if made else "cached"
            _say(f"{count} of {len(self.words)}: {name}: {how}, {_proof(row)}")

    def _fail(self, line: str) -> None:
        self.failures.append(line)
        print(f"error: farm: {' '.join(line.split())}", file=sys.stderr, flush=True)

    def table(self) -> list[str]:
        """A line for each module: its triple, proof, size and digest; sorted."""
        return [
            f"{' '.join(triple)}  {_proof(row)}  {row['module']['size']:,} bytes"
            f"  sha256:{row['module']['sha256']}"
            for triple, row in sorted(self.rows, key=lambda pair: pair[0])
        ]


def local_workers(tasks: int) -> int:
    """Worker processes to start here: a compile keeps some four cores busy."""
    return min(tasks, max(2, (os.cpu_count() or 1) // 4))


def _proof(row: Mapping[str, Any]) -> str:
    return f"proof {row['status']}"


def _say(line: str) -> None:
    print(f"farm: {line}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _client(scheduler: str | None, workers: int) -> Iterator[Any]:
    """A client of the cluster at `scheduler`, or of one that lives as long as the block."""
    try:
        from distributed import Client, LocalCluster
    except ImportError:
        raise UserError(
            "farm: the package distributed is not installed; pip install 'scanwright[build,farm]'"
        ) from None
    with contextlib.ExitStack() as stack:
        if scheduler is None:
            off: Any = None  # which the signature does not say
            cluster: Any = LocalCluster(
                n_workers=workers,
                threads_per_worker=1,
                processes=True,
                memory_limit=None,  # of the compilers only the system knows how much they use
                dashboard_address=off,
                silence_logs=50,
            )
            scheduler = stack.enter_context(cluster).scheduler_address
            _say(f"{workers} worker processes started on this machine")
        try:
            client = stack.enter_context(Client(scheduler, timeout=PATIENCE_S / 6))
            client.wait_for_workers(1, timeout=PATIENCE_S)
        except TimeoutError as error:
            raise UserError(
                f"scheduler={scheduler}: no workers in {PATIENCE_S:.0f} s; start some: "
                f"dask worker {scheduler} --nthreads 1"
            ) from error
        except (OSError, ValueError) as error:
            raise UserError(
                f"scheduler={scheduler}: cannot be reached ({error}); start one with "
                "`dask scheduler`, or leave the word out for processes on this machine"
            ) from error
        yield client
