"""Runs C kernels alone, for any CPU level: natively, or under qemu for aarch64.

A static program with all kernels and kernel_driver.c is built for each level, once a run.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from artifacts.cpu import host_features
from artifacts.objects import LEVELS
from emit import kernels
from emit.kernels import objects

HERE = Path(__file__).parent
FIRST = "x86-64-v3"  # a level that is tested wherever x86-64 is
TRIPLES = {"x86_64": "x86_64-linux-musl", "aarch64": "aarch64-linux-musl"}


def levels() -> list[object]:
    """Parameters of a test for each level that can run here, and aarch64."""
    return [
        pytest.param(name, marks=[pytest.mark.aarch64] if family == "aarch64" else [])
        for name, (family, needed) in LEVELS.items()
        if family == "aarch64" or needed <= host_features()
    ]


@cache
def built(level: str) -> Path:
    """The object of all kernels for `level`."""
    return objects.build(level, Path(mkdtemp(prefix="scanwright-kernels-")))


def names() -> list[str]:
    """The kernels that the sources export, without `scanwright_`."""
    made = built(FIRST).read_bytes()
    return sorted({m.decode() for m in re.findall(rb"\0scanwright_(\w+)(?=\0)", made)})


@cache
def program(level: str) -> Path:
    """The program for `level`."""
    made = built(level)
    work = made.parent
    table = "".join(f"KERNEL(scanwright_{name})\n" for name in names())
    (work / "kernels.inc").write_text(table)
    triple = TRIPLES[LEVELS[level][0]]
    command = [sys.executable, "-m", "ziglang", "cc", "-target", triple, "-static", "-O1"]
    command += ["-I", str(work), str(HERE / "kernel_driver.c"), str(made), "-o", "driver"]
    subprocess.run(command, cwd=work, check=True, capture_output=True)
    return work / "driver"


def run(
    level: str, name: str, arrays: Sequence[np.ndarray], sizes: Sequence[int], tiles: int
) -> list[np.ndarray]:
    """All arrays after `tiles` calls of `scanwright_<name>`, the last tile first."""
    head = np.asarray([len(arrays), len(sizes), tiles, *sizes], np.uint64).tobytes()
    body = b"".join(np.uint64(a.nbytes).tobytes() + a.tobytes() for a in arrays)
    command = [str(program(level)), f"scanwright_{name}"]
    if level == "aarch64":
        emulator = shutil.which("qemu-aarch64")
        assert emulator is not None, "qemu-aarch64 is not installed"
        command = [emulator, *command]
    done = subprocess.run(command, input=head + body, capture_output=True, check=True)
    found, at = [], 0
    for array in arrays:
        raw = done.stdout[at : at + array.nbytes]
        found.append(np.frombuffer(raw, array.dtype).reshape(array.shape))
        at += array.nbytes
    assert at == len(done.stdout)
    return found


@contextmanager
def used(level: str) -> Iterator[list[str]]:
    """Within it, ops on arrays call their kernels of `level`; the list names those called.

    What a kernel does not write is NaN, and an operand that it changes is an error.
    """
    called: list[str] = []

    def call(
        name: str,
        operands: Sequence[jax.Array],
        results: Sequence[tuple[tuple[int, ...], Any]],
        sizes: Sequence[int],
        tiles: int,
    ) -> list[jax.Array]:
        called.append(name)
        given = [np.asarray(each) for each in operands]
        empty = [np.full(shape, np.nan, dtype) for shape, dtype in results]
        after = run(level, name, [*given, *empty], [int(size) for size in sizes], tiles)
        for i, array in enumerate(given):
            np.testing.assert_array_equal(after[i], array, f"{name}: operand {i} was changed")
        return [jnp.asarray(each) for each in after[len(given) :]]

    with pytest.MonkeyPatch.context() as patch, kernels.used():
        patch.setattr(kernels, "call", call)
        yield called
