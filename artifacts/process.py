"""Runs a stage as a process of its own, so that the build never imports what the stage needs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from artifacts.commands import command_line
from artifacts.disk import no_space
from runtime.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
PROGRESS = "SCANWRIGHT_PROGRESS"  # what runtime.progress reads
_USER = 2  # the descriptor that leads to the user, whatever takes the place of sys.stderr
TICK_S = 0.2
_ERASE = b"\r\x1b[K"

# A small process between this one and the program. It makes both die with this one (Linux), where
# code between fork and exec is unsafe in a threaded parent, and it measures the program: peak
# memory survives exec, so a direct child of a big process would report that process's.
_LAUNCH = """
import json, os, sys
parent, usage, *command = sys.argv[1:]
def die_with(pid):
    if sys.platform == "linux":
        import ctypes
        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    if os.getppid() != int(pid):  # it may have died before the request
        os._exit(1)
die_with(parent)
me = os.getpid()
child = os.fork()
if child == 0:
    die_with(me)
    os.execv(command[0], command)
_, status, used = os.wait4(child, 0)
unit = 1 if sys.platform == "darwin" else 1024
with open(usage, "w") as out:
    json.dump([os.waitstatus_to_exitcode(status), used.ru_maxrss * unit], out)
"""


class Crashed(UserError):
    """A stage's process was ended by a signal that only its own doing can have raised."""


@dataclass(frozen=True)
class Usage:
    """Wall seconds and the peak resident bytes of a finished process, and what it was."""

    seconds: float
    peak_rss_bytes: int
    command: str = ""


def run_logged(
    argv: Sequence[str],
    log: Path,
    cwd: Path | None,
    env: Mapping[str, str],
    inherited: Sequence[int] = (),
    tick: Callable[[], None] | None = None,
) -> tuple[int, Usage]:
    """Run `argv` with its output in the file `log`; returns (exit code, usage).

    It leads a process group of its own, has the descriptors `inherited`, is killed with this
    process (Linux) and on any exception here. A negative exit code is the signal that ended it.
    `tick` is called now and then while it runs.
    """
    numbers = log.with_suffix(".usage").absolute()
    launch = [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), str(numbers)]
    started = time.perf_counter()
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [*launch, *argv],
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            process_group=0,
            pass_fds=inherited,
        )
        try:
            launched = _wait(process, tick)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    code, peak = launched or 1, 0
    with contextlib.suppress(OSError, ValueError):  # no usage: the launcher did not end well
        code, peak = json.loads(numbers.read_text(encoding="utf-8"))
    numbers.unlink(missing_ok=True)
    return code, Usage(time.perf_counter() - started, peak, command_line(argv))


def _wait(process: subprocess.Popen[bytes], tick: Callable[[], None] | None) -> int:
    """The exit code of `process`."""
    while tick is not None:
        try:
            return process.wait(TICK_S)
        except subprocess.TimeoutExpired:
            tick()
    return process.wait()


@contextlib.contextmanager
def _shown(wanted: bool) -> Iterator[tuple[str, Sequence[int]]]:
    """A descriptor by which a process can show the user its progress: as a word, and to inherit."""
    try:
        copy = os.dup(_USER) if wanted else -1
    except OSError:  # closed: there is no one to show it to
        copy = -1
    if copy < 0:
        yield "", ()
        return
    try:
        yield str(copy), (copy,)
    finally:
        if os.isatty(copy):  # the process may have been killed, and its bar left
            with contextlib.suppress(OSError):
                os.write(copy, _ERASE)
        os.close(copy)


def run_module(
    module: str,
    arguments: Sequence[str | Path],
    scratch: Path,
    progress: bool = False,
    tick: Callable[[], None] | None = None,
) -> Usage:
    """Run `python -m module arguments`; its own `error: …` line becomes a UserError.

    With `progress`, what it tells by `runtime.progress` reaches the user. `tick`: see run_logged.
    """
    log = scratch / f"{module}.log"
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    argv = [sys.executable, "-m", module, *map(str, arguments)]
    with _shown(progress) as (word, inherited):
        environment = {**os.environ, "PYTHONPATH": path, PROGRESS: word}
        code, usage = run_logged(argv, log, None, environment, inherited, tick)
    text = log.read_text(encoding="utf-8", errors="replace")
    full = no_space(scratch, text) if code else None
    log.unlink()
    if code == 0:
        return usage
    if os.environ.get("SCANWRIGHT_DEBUG") == "1":
        print(text, file=sys.stderr)
    raise full or _failure(f"{module} {arguments[0]}", code, text)


def _failure(step: str, code: int, text: str) -> UserError:
    """What to say of a process that ended with `code` and had written `text`."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if errors:
        return UserError(errors[-1])
    if code == -signal.SIGKILL:
        return UserError(
            f"{step}: killed, most likely out of memory; free some or use a smaller shape"
        )
    if code < 0:
        return Crashed(f"{step}: crashed ({signal.Signals(-code).name})")
    detail = lines[-1] if lines else f"exit code {code}"
    return UserError(f"{step}: failed: {detail}; SCANWRIGHT_DEBUG=1 shows all of its output")
