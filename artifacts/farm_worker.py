"""What a Dask worker does for `doit farm`: one compile, and all that it needs before it.

A worker has this package and its own cache (SCANWRIGHT_CACHE), which all workers may share, and the
remote cache, if SCANWRIGHT_REMOTE names one. It gets words, not files, and gives back digests; the
bytes stay in the store.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from artifacts import bundle
from artifacts.actions import share
from artifacts.buildlog import BuildLog
from artifacts.job import Job
from artifacts.process import ROOT
from artifacts.remote import from_environment
from artifacts.sources import PACKAGES
from artifacts.stages import Stages
from artifacts.store import Store, default_root
from artifacts.tools import versions
from runtime.errors import UserError

TOOLS = ("iree-base-compiler", "iree-base-runtime", "jax", "jaxlib", "numpy", "ziglang")
_KINDS = (".py", ".yaml", ".c", ".h", ".inc")
Resolver = Callable[..., Mapping[str, Any]]
Tell = Callable[[dict[str, Any]], None]


def identity() -> str:
    """Digest of the sources and tools that keys depend on: who has another makes other results."""
    digest = hashlib.sha256(repr(sorted(versions(TOOLS).items())).encode())
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*")):
            if path.suffix in _KINDS and "models/mamba2" not in path.as_posix():
                digest.update(path.relative_to(ROOT).as_posix().encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


@dataclass
class ToldLog(BuildLog):
    """A build log that tells of each stage when it begins and of what it made."""

    tell: Tell = field(default=lambda event: None)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """As of any log."""
        self.tell({"event": "stage", "stage": name})
        with super().stage(name):
            yield


def compile_triple(
    words: Mapping[str, str | None],
    resolver: Resolver,
    proof: bool,
    expected: str,
    tell: Tell | None = None,
) -> dict[str, Any]:
    """Compile (and prove, where this machine can) what `words` ask for, as far as it is not cached.

    `resolver(words, proof=)` gives the fields of the job. Returns the worker's `process`,
    `seconds`, `module` ({"sha256", "size"}), `status` and `reason` of the proof, and `records`:
    stage, fields, about, key, cached, outputs by name. Raises UserError, also if this
    installation's identity is not the `expected` one.
    """
    if identity() != expected:
        raise UserError(
            f"{os.uname().nodename}: other sources or tools than where the farm was started;"
            " install the same version of scanwright[build,farm] there"
        )
    say = tell or _dask_event(words)
    say({"event": "started"})
    started = time.perf_counter()
    store = Store(default_root(), remote=from_environment())
    log = ToldLog(tell=say)
    with store.using():
        stages = Stages(store, Job(**resolver(words, proof=proof)), log)
        compiled = bundle.compiled_module(stages)
        share(store)
    return {
        "process": os.getpid(),
        "seconds": round(time.perf_counter() - started, 3),
        "module": {"sha256": compiled.module.sha256, "size": compiled.module.size},
        "status": compiled.status,
        "reason": compiled.reason,
        "records": _records(store, log),
    }


def _records(store: Store, log: BuildLog) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for row in log.rows:
        record = store.peek(row["key"]) if "key" in row else None
        if record is not None and record.key not in found:
            outputs = {n: {"sha256": b.sha256, "size": b.size} for n, b in record.outputs.items()}
            found[record.key] = {
                "stage": record.stage,
                "fields": record.fields,
                "about": record.about,
                "key": record.key,
                "cached": row["cached"],
                "outputs": outputs,
            }
    return list(found.values())


def _dask_event(words: Mapping[str, str | None]) -> Tell:
    """Send events to those who listen at the scheduler."""
    from distributed import get_worker

    worker = get_worker()
    about = {name: words.get(name) for name in ("model", "target", "shape")}
    about |= {"worker": worker.address, "process": os.getpid()}
    return lambda event: worker.log_event(TOPIC, about | event)


TOPIC = "scanwright"
