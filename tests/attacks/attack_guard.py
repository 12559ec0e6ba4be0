"""Runs parsers on hostile files, each in a child process that may do nothing but read them.

usage: python tests/attacks/attack_guard.py < JOBS

JOBS is JSON, [[directory, parser], …]; for each, a line of JSON says how it ended: `error` (what a
user would see of a declared error), `crash` (any other exception, signal or time out), `outside`
(what was opened, written, run or reached that should not be), `seconds` of processor time,
`mib` (memory above that of the process before).
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import signal
import socket
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 20  # of processor time before a parser is stopped
WAIT = 120  # seconds that it may wait for something, on a busy machine
MEMORY = 2 << 30  # bytes of address space that a parser may add
READABLE = tuple(
    f"{os.path.realpath(path)}/"
    for path in {
        ROOT, sys.prefix, sys.base_prefix, *sys.path[1:], *sysconfig.get_paths().values(),
        "/usr/lib", "/usr/share/zoneinfo", "/etc/localtime", "/proc/self", "/sys/devices/system",
    }
)  # fmt: skip
# What no parser has a reason to do, by the names of Python's audit events.
FORBIDDEN = (
    "socket.", "subprocess.", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.system",
    "os.kill", "os.symlink", "os.putenv", "pty.", "pickle.find_class", "marshal.", "ctypes.",
    "ftplib.", "urllib.", "webbrowser.", "sqlite3.",
)  # fmt: skip
WRITES = (
    "os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod",
    "os.chown", "os.utime", "os.mkfifo", "os.mknod", "shutil.",
)  # fmt: skip
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


# Parsers that do what none may, to see that it is seen.
PLANTED: dict[str, Callable[[Path], object]] = {
    "planted: reads": lambda root: Path("/etc/passwd").read_text(),
    "planted: reads beside": lambda root: (root / "../outside").resolve().read_text(),
    "planted: writes": lambda root: (root.parent / "planted").write_text("x"),
    "planted: leaves a file": lambda root: tempfile.mkstemp(),
    "planted: renames": lambda root: (root / "a").rename(root.parent / "b"),
    "planted: runs": lambda root: os.system("true"),
    "planted: connects": lambda root: socket.create_connection(("127.0.0.1", 9), 1),
    "planted: unpickles": lambda root: pickle.loads(b"cos\ngetpid\n."),
    "planted: takes memory": lambda root: bytearray(MEMORY * 2),
    "planted: dies": lambda root: os.abort(),
}


class Guard:
    """Notes what happens outside `directory` and a new directory for temporary files, which is to
    be empty when `close` takes it away; armed once, for the rest of the process."""

    def __init__(self, directory: Path, allowed: tuple[str, ...] = ()) -> None:
        sys.dont_write_bytecode = True  # of what a parser imports when it needs it
        tempfile.tempdir = tempfile.mkdtemp(prefix="attacks-")
        self.scratch = Path(tempfile.tempdir).resolve()
        self.homes = (f"{directory.resolve()}/", f"{self.scratch}/")
        self.allowed = allowed  # prefixes of events that are expected, such as "socket."
        self.outside: list[str] = []
        sys.addaudithook(self._hook)

    def close(self) -> None:
        """Remove the directory for temporary files."""
        self.outside += [f"left {path}" for path in self.scratch.iterdir()]
        shutil.rmtree(self.scratch)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if not isinstance(path, int):
                self._path("open", path, bool((flags or 0) & WRITE_FLAGS))
        elif event.startswith(WRITES):
            for path in (each for each in arguments if isinstance(each, (str, bytes, os.PathLike))):
                self._path(event, path, True)
        elif event.startswith(FORBIDDEN) and not event.startswith(self.allowed or ("\0",)):
            if not (event.startswith(("marshal.", "ctypes.")) and _importing()):
                self.outside.append(f"{event} {arguments!r}"[:200])

    def _path(self, event: str, path: Any, writes: bool) -> None:
        real = os.path.realpath(os.fsdecode(path))
        if f"{real}/".startswith(self.homes):
            return
        if not writes and f"{real}/".startswith(READABLE):
            return
        self.outside.append(f"{event} {real}{' to write' if writes else ''}")


def _importing() -> bool:
    """Whether Python's import machinery is at work: it reads compiled modules."""
    frame = sys._getframe(2)
    while frame is not None:
        if "importlib" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _peak() -> int:
    """The largest resident size of this process, in KiB; Linux starts anew when it is asked to."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def attempt(directory: Path, parser: str) -> dict[str, Any]:
    """How `parser` ends in `directory`. Arms the guard of this process."""
    from attack_parsers import ERRORS, PARSERS

    from runtime.errors import shown

    Path("/proc/self/clear_refs").write_text("5")
    before, began = _peak(), time.process_time()
    guard = Guard(directory)
    ended: dict[str, Any] = {"error": None, "crash": None}
    try:
        (PARSERS | PLANTED)[parser](directory)
    except ERRORS as error:
        ended["error"] = shown(error)
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        ended["crash"] = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"[:500]
    ended["seconds"] = time.process_time() - began
    guard.close()
    found = list(guard.outside)
    ended["mib"] = (_peak() - before) / 1024
    return ended | {"outside": found}


def limited(memory: int = MEMORY) -> None:
    """Bound the address space of this process to what it has and `memory` bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + memory
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _child(write: int, directory: Path, parser: str) -> None:
    """In the child: write how it ended, and be gone without any clean-up."""
    try:
        os.dup2(2, 1)  # stdout is for what is found; libraries print, too
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(WAIT)
        used = int(time.process_time()) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (used + SECONDS, used + SECONDS))
        limited()
        os.chdir(directory)
        data = json.dumps(attempt(directory, parser)).encode()
        while data:
            data = data[os.write(write, data) :]
    finally:
        os._exit(0)


def run(directory: Path, parser: str) -> dict[str, Any]:
    """`attempt` in a child process of its own, with its time and memory bounded."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _child(write, directory, parser)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    if not data:
        how = os.waitstatus_to_exitcode(status)
        name = signal.Signals(-how).name if how < 0 else f"exit {how}"
        return {"error": None, "crash": name, "outside": [], "seconds": SECONDS, "mib": 0}
    return json.loads(data)


def main() -> None:
    """Run the jobs of stdin."""
    import attack_parsers
    import tokenizers  # what parsers import when first used is no part of what they take

    tokenizers.Regex("a")
    assert attack_parsers.PARSERS
    for directory, parser in json.load(sys.stdin):
        print(json.dumps(run(Path(directory), parser)), flush=True)


if __name__ == "__main__":
    sys.path[1:1] = [str(ROOT), str(ROOT / "tests")]
    main()
