"""Runs iree-compile on linked StableHLO text. The compiler is a subprocess, never imported.

The same text and flags give the same bytes: the input has one fixed relative name in a directory
of its own, and only a few variables of the environment reach the compiler.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from artifacts import failures
from artifacts.disk import explained, no_space
from artifacts.link import MODULE, link
from artifacts.pace import Paced, kind
from artifacts.process import run_logged
from artifacts.store import default_root
from runtime.errors import UserError

PACKAGE = "iree-base-compiler"
_ENVIRONMENT = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "SYSTEMROOT")
_INPUT = f"{MODULE}.mlir"
KERNELS = "kernels.o"  # as the modules name it


@dataclass(frozen=True)
class CompileStats:
    """`seconds` of wall time, `peak_rss_bytes` of the compiler, `size` in bytes of the result.

    `command` is the compiler's command line.
    """

    seconds: float
    peak_rss_bytes: int
    size: int
    command: str = ""


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
    mlir: Sequence[tuple[str, Path]],
    flags: Sequence[str],
    out: Path,
    kernels: Path | None = None,
) -> CompileStats:
    """Link the (entry name, StableHLO file) pairs and compile them into the module `out`.

    `kernels` is the object that holds the C functions of modules emitted with kernels.
    `flags` are all flags of the target, its CPU included (artifacts.cpu); a CPU called "host" is
    refused, since neither a cache key nor a manifest could say what it was. `out` appears whole
    or not at all. Raises UserError with the compiler's first error, and a line that
    compiles once more what is kept of it (artifacts.failures).
    """
    if any(flag.endswith(("-target-cpu=host", "-cpu-features=host")) for flag in flags):
        raise UserError("compile flags name the CPU `host`: resolve it first (artifacts.cpu)")
    text = link([(entry, Path(path).read_text(encoding="utf-8")) for entry, path in mlir])
    with explained(out), _workspace(out.parent) as work:
        found: list[str] = []
        if kernels is not None:
            shutil.copyfile(kernels, work / KERNELS)
            found = ["--iree-hal-executable-object-search-path=."]
        stats = run_compiler(text, [*flags, *found, "-o", "model.vmfb"], work)
        (work / "model.vmfb").replace(out)
    return replace(stats, size=out.stat().st_size)


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

    See run_logged for how it is run. Raises UserError on failure.
    """
    (work / _INPUT).write_text(text, encoding="utf-8")
    log = work / "compiler.log"
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    command = [str(compiler_path()), _INPUT, *arguments]
    with Paced(default_root(), kind(arguments), len(text)) as paced:
        code, usage = run_logged(command, log, work, environment, tick=paced.tick)
        if code != 0:
            said = log.read_text(encoding="utf-8", errors="replace")
            raise no_space(work, said) or _failure(work, command, said, code)
    return CompileStats(usage.seconds, usage.peak_rss_bytes, 0, usage.command)


@contextlib.contextmanager
def _workspace(parent: Path) -> Iterator[Path]:
    """An empty directory beside the result, so that the result can be renamed into place."""
    work = Path(tempfile.mkdtemp(prefix=".compile-", dir=parent))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _failure(work: Path, command: Sequence[str], said: str, code: int) -> UserError:
    """What to say of a compile in `work` that ended with `code`, and how to see it once more."""
    lines = said.splitlines()
    errors = (line for line in lines if "error:" in line.lower())
    first = next(errors, next((line for line in lines if line.strip()), "no output"))
    if code < 0:
        name = signal.Signals(-code).name
        memory = " (out of memory?)" if code == -signal.SIGKILL else ""
        first = f"killed by {name}{memory}: {first}"
    first = first.strip()[:400]
    inputs = [name for name in (_INPUT, KERNELS) if (work / name).exists()]
    lasting = (name for name in _ENVIRONMENT if name in os.environ and name != "TMPDIR")
    environment = {name: os.environ[name] for name in lasting}
    try:
        root = default_root() / "failed"
        place = failures.keep(root, work, inputs, command, said, first, environment)
        where = f"its input and output are kept; to reproduce it: {failures.reproduce(place)}"
    except OSError as error:
        where = f"its input could not be kept: {error}"
    return UserError(f"iree-compile: {first}; {where}")
