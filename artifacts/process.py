"""Runs a stage as a process of its own, so that the build never imports what the stage needs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Usage:
    """Wall seconds and the peak resident bytes of a finished process."""

    seconds: float
    peak_rss_bytes: int


def run_logged(
    argv: Sequence[str], log: Path, cwd: Path | None, env: dict[str, str]
) -> tuple[int, Usage]:
    """Run `argv` with its output in the file `log`; returns (exit code, usage).

    The process leads a group of its own, is killed with this process (Linux) and on any exception
    here. A negative exit code is the signal that ended it.
    """
    started = time.perf_counter()
    with log.open("wb") as sink:
        process = subprocess.Popen(
            list(argv),
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            process_group=0,
            preexec_fn=_die_with_parent(os.getpid()),
        )
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    process.returncode = os.waitstatus_to_exitcode(status)
    unit = 1 if sys.platform == "darwin" else 1024
    seconds = time.perf_counter() - started
    return process.returncode, Usage(seconds, usage.ru_maxrss * unit)


def run_module(module: str, arguments: Sequence[str | Path], scratch: Path) -> Usage:
    """Run `python -m module arguments`; its own `error: …` line becomes a UserError."""
    log = scratch / f"{module}.log"
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    argv = [sys.executable, "-m", module, *map(str, arguments)]
    code, usage = run_logged(argv, log, None, {**os.environ, "PYTHONPATH": path})
    text = log.read_text(encoding="utf-8", errors="replace")
    log.unlink()
    if code == 0:
        return usage
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if os.environ.get("SCANWRIGHT_DEBUG") == "1":
        print(text, file=sys.stderr)
    if errors:
        raise UserError(errors[-1])
    step = f"{module} {arguments[0]}"
    if code == -signal.SIGKILL:
        raise UserError(
            f"{step}: killed, most likely out of memory; free some or use a smaller shape"
        )
    detail = lines[-1] if lines else f"exit code {code}"
    raise UserError(f"{step}: failed: {detail}; SCANWRIGHT_DEBUG=1 shows all of its output")


def _die_with_parent(parent: int) -> Callable[[], None] | None:
    """What the child runs first: ask to be killed when the parent dies (Linux only)."""
    if sys.platform != "linux":
        return None
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the request
            os._exit(1)

    return ask
