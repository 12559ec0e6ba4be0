"""Compiles the C sources of this folder into one object for a CPU level, by the package ziglang."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from emit.errors import EmitError
from emit.kernels.splice import OBJECT

# What the code may use, as ziglang calls it.
LEVELS = {
    "x86-64-v3": ("-target", "x86_64-linux-gnu", "-mcpu=x86_64_v3"),
    "x86-64-v4": (
        *("-target", "x86_64-linux-gnu", "-mcpu=x86_64_v4"),
        "-mprefer-vector-width=512",
    ),
    "x86-64-v4-vnni": (
        *("-target", "x86_64-linux-gnu", "-mcpu=x86_64_v4+avx512vnni"),
        "-mprefer-vector-width=512",
    ),
    "aarch64": ("-target", "aarch64-linux-gnu", "-mcpu=generic", "-ffixed-x18"),
}
# Freestanding: a module's executables have no libc. Hidden symbols, or aarch64 goes through a table
# that nobody fills. A section a function, so that the linker keeps what a module calls.
FLAGS = (
    *("-O3", "-g0", "-std=c17", "-ffreestanding", "-fno-builtin", "-fPIC", "-fvisibility=hidden"),
    *("-ffunction-sections", "-ffp-contract=fast", "-fno-math-errno", "-fno-sanitize=all"),
    *("-fno-stack-protector", "-fno-unwind-tables", "-fno-asynchronous-unwind-tables"),
    *("-Wall", "-Wextra", "-Werror"),
)
# What of the environment reaches the compiler: others, such as CPATH, would change what it makes.
_ENVIRONMENT = (
    *("PATH", "PYTHONPATH", "HOME", "TMPDIR", "XDG_CACHE_HOME", "LD_LIBRARY_PATH", "SYSTEMROOT"),
    *("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"),
)


def sources() -> list[Path]:
    """The C sources, in the order they are compiled in."""
    return sorted(Path(__file__).parent.glob("*.c"))


def build(level: str, out: Path) -> Path:
    """Write the object of all kernels for `level`, a name in LEVELS, to the directory `out`.

    Raises EmitError with the compiler's first error.
    """
    lines = [f'#include "{path.name}"\n' for path in sources()]
    command = [
        *(sys.executable, "-m", "ziglang", "cc", *LEVELS[level], *FLAGS),
        *("-I", str(Path(__file__).parent), "-x", "c", "-c", "-", "-o", OBJECT),
    ]
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    done = subprocess.run(
        command, input="".join(lines), cwd=out, env=environment, capture_output=True, text=True
    )
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        first = next((line for line in said if "error:" in line), said[0] if said else "no output")
        if "No module named ziglang" in done.stderr:
            first = "the package ziglang is not installed: pip install 'scanwright[build]'"
        raise EmitError(f"kernels for {level}: {first[:400]}")
    return out / OBJECT
