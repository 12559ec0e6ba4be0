"""Runs iree-compile on linked StableHLO text. The compiler is a subprocess, never imported.

The same text and flags give the same bytes: the input has one fixed relative name in a directory
of its own, and only a few variables of the environment reach the compiler.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import mmap
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from artifacts.disk import explained
from artifacts.link import MODULE, link
from artifacts.tools import versions
from runtime.errors import UserError

PACKAGE = "iree-base-compiler"
_ENVIRONMENT = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "SYSTEMROOT")
_INPUT = f"{MODULE}.mlir"

# A small process between this one and the compiler. It makes both die with this one (Linux), where
# code between fork and exec is unsafe in a threaded parent, and it measures the compiler: peak
# memory survives exec, so a direct child of a big process would report that process's.
_USAGE = "usage.json"
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


@dataclass(frozen=True)
class CompileStats:
    """`seconds` of wall time, `peak_rss_bytes` of the compiler, `size` in bytes of the result."""

    seconds: float
    peak_rss_bytes: int
    size: int


def compiler_version() -> str:
    """The installed compiler package's version, without importing it. Raises UserError."""
    return versions([PACKAGE])[PACKAGE]


def compiler_path() -> Path:
    """iree-compile as the package ships it, without importing the package. Raises UserError."""
    spec = importlib.util.find_spec("iree.compiler") if importlib.util.find_spec("iree") else None
    places = spec.submodule_search_locations if spec else None
    for place in places or ():
        binary = Path(place) / "_mlir_libs" / "iree-compile"
        if binary.is_file():
            return binary
    raise UserError(f"{PACKAGE} is not installed: pip install 'scanwright[build]'")


def compile_module(
    mlir: Sequence[tuple[str, Path]], flags: Sequence[str], out: Path
) -> CompileStats:
    """Link the (entry name, StableHLO file) pairs and compile them into the module `out`.

    `flags` are all flags of the target, its CPU included (artifacts.cpu); a CPU called "host" is
    refused, since neither a cache key nor a manifest could say what it was. `out` appears whole
    or not at all. Raises UserError with the compiler's first error and the path of the kept text.
    """
    if any(flag.endswith(("-target-cpu=host", "-cpu-features=host")) for flag in flags):
        raise UserError("compile flags name the CPU `host`: resolve it first (artifacts.cpu)")
    text = link([(entry, Path(path).read_text(encoding="utf-8")) for entry, path in mlir])
    with explained(out), _workspace(out.parent) as work:
        stats = run_compiler(text, [*flags, "-o", "model.vmfb"], work)
        (work / "model.vmfb").replace(out)
    return CompileStats(stats.seconds, stats.peak_rss_bytes, out.stat().st_size)


def dump_ptx(text: str, flags: Sequence[str], out_dir: Path) -> list[Path]:
    """Compile linked `text` for a cuda target and leave its PTX in `out_dir`; sorted paths."""
    out_dir.mkdir(parents=True, exist_ok=True)
    dump = f"--iree-hal-dump-executable-binaries-to={out_dir.resolve()}"
    with _workspace(out_dir) as work:
        run_compiler(text, [*flags, dump, "-o", "model.vmfb"], work)
    found = sorted(out_dir.glob("*.ptx"))
    if not found:
        raise UserError(f"{out_dir}: no PTX came out: these are no flags of a cuda target")
    return found


def run_compiler(text: str, arguments: Sequence[str], work: Path) -> CompileStats:
    """Run iree-compile in `work` on `text`; files it makes are relative to `work` (size is 0).

    The compiler leads a process group of its own, is killed with this process (Linux) and on any
    exception here. Raises UserError on failure.
    """
    (work / _INPUT).write_text(text, encoding="utf-8")
    log = work / "compiler.log"
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    launch = [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), _USAGE]
    started = time.perf_counter()
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [*launch, str(compiler_path()), _INPUT, *arguments],
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            process_group=0,
        )
        try:
            launched = process.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    code, peak = launched or 1, 0
    with contextlib.suppress(OSError, ValueError):  # no usage: the launcher itself did not end well
        code, peak = json.loads((work / _USAGE).read_text(encoding="utf-8"))
    if code != 0:
        raise _failure(text, log, code)
    return CompileStats(time.perf_counter() - started, peak, 0)


@contextlib.contextmanager
def _workspace(parent: Path) -> Iterator[Path]:
    """An empty directory beside the result, so that the result can be renamed into place."""
    work = Path(tempfile.mkdtemp(prefix=".compile-", dir=parent))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _failure(text: str, log: Path, code: int) -> UserError:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    kept = Path(tempfile.gettempdir()) / "scanwright-failed"
    stem = hashlib.sha256(text.encode()).hexdigest()[:12]
    try:
        kept.mkdir(exist_ok=True)
        shutil.copyfile(log, kept / f"{stem}.log")
        (kept / f"{stem}.mlir").write_text(text, encoding="utf-8")
        where = f"the text is kept as {kept / stem}.mlir, the compiler's output beside it"
    except OSError as error:
        where = f"the text could not be kept: {error}"
    errors = (line for line in lines if "error:" in line.lower())
    first = next(errors, next((line for line in lines if line.strip()), "no output"))
    if code < 0:
        name = signal.Signals(-code).name
        memory = " (out of memory?)" if code == -signal.SIGKILL else ""
        first = f"killed by {name}{memory}: {first}"
    return UserError(f"iree-compile: {first.strip()[:400]}; {where}")


# the module file ---------------------------------------------------------------------------------

_ZIP_HEADER = struct.Struct("<4s22xHH")  # signature, …, length of name, length of extra field
_BYTECODE_VERSION_FIELD = 13  # ordinal of bytecode_version in the BytecodeModuleDef table


def bytecode_version(vmfb: Path) -> str:
    """The VM bytecode version "major.minor" that the module file `vmfb` declares.

    Read from the flatbuffer (BytecodeModuleDef.bytecode_version), in its zip wrapping or bare.
    Raises UserError where the file is no IREE module.
    """
    try:
        with vmfb.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            version = _read_version(data)
    except (OSError, ValueError, struct.error, IndexError) as error:
        raise UserError(f"{vmfb}: not an IREE module file ({error}): build it again") from error
    return f"{version >> 16}.{version & 0xFFFF}"


def _read_version(data: mmap.mmap) -> int:
    start = 0
    if data[:4] == b"PK\x03\x04":
        _, name, extra = _ZIP_HEADER.unpack_from(data, 0)
        start = _ZIP_HEADER.size + name + extra
    if data[start + 8 : start + 12] == b"IREE":  # a size prefix before the root offset
        start += 4
    if data[start + 4 : start + 8] != b"IREE":
        raise ValueError("no IREE identifier")
    (offset,) = struct.unpack_from("<I", data, start)
    table = start + offset
    (back,) = struct.unpack_from("<i", data, table)
    vtable = table - back
    (length,) = struct.unpack_from("<H", data, vtable)
    slot = 4 + 2 * _BYTECODE_VERSION_FIELD
    if slot + 2 > length:
        raise ValueError("no bytecode version")
    (field,) = struct.unpack_from("<H", data, vtable + slot)
    if field == 0:
        raise ValueError("no bytecode version")
    return struct.unpack_from("<I", data, table + field)[0]
