"""Runs a module for another architecture under a user-mode emulator.

For checks, not for use: each call starts IREE's own `iree-run-module` for that architecture under
`qemu-aarch64`, with arguments and results in files. The runtime is an unpacked wheel of
iree-base-runtime for it, named by SCANWRIGHT_AARCH64_RUNTIME.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runtime.errors import UserError
from runtime.manifest import FunctionSpec

URI = "qemu-aarch64"
VARIABLE = "SCANWRIGHT_AARCH64_RUNTIME"
SYSROOT = Path("/usr/aarch64-linux-gnu")
TIMEOUT_S = 600
_DTYPES = {"f32": np.float32, "i32": np.int32, "f16": np.float16, "i8": np.int8}

Buffer = Any  # the path of an .npy file


class Emulated:
    """A module and its parameters; implements `runtime.module.Device`. Buffers are .npy files."""

    def __init__(self, code: Path, params: Path | None, functions: dict[str, FunctionSpec]) -> None:
        """Raises UserError if the emulator, its libraries or the runtime are not here."""
        emulator = shutil.which(URI)
        runtime = os.environ.get(VARIABLE, "")
        program = Path(runtime, "iree", "_runtime_libs", "iree-run-module")
        if emulator is None or not SYSROOT.is_dir():
            raise UserError(
                f"device {URI!r}: the emulator is not installed; on Debian: "
                "apt-get install qemu-user libc6-arm64-cross libstdc++6-arm64-cross"
            )
        if not runtime or not program.is_file():
            raise UserError(
                f"device {URI!r}: {VARIABLE} is {runtime!r}, expected a directory with an unpacked "
                "aarch64 wheel of iree-base-runtime"
            )
        self.uri = URI
        folder = Path(tempfile.mkdtemp(prefix="scanwright-emulated-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._names = (folder / f"{i}.npy" for i in itertools.count())
        self._functions = functions
        self._command = [emulator, "-L", str(SYSROOT), str(program), "--device=local-sync"]
        self._command += [f"--module={code}"]
        self._command += [f"--parameters=model={params}"] if params else []

    def call(self, function: str, args: Sequence[Buffer]) -> list[Buffer]:
        """See Device.call."""
        outputs = [next(self._names) for _ in self._functions[function].outputs]
        command = [*self._command, f"--function={function}"]
        command += [f"--input=@{path}" for path in args]
        command += [f"--output=@{path}" for path in outputs]
        ended = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
        if ended.returncode:
            lines = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
            raise UserError(f"{function} failed on device {URI!r} ({lines[0]})")
        return outputs

    def to_device(self, array: np.ndarray[Any, Any]) -> Buffer:
        """See Device.to_device."""
        path = next(self._names)
        np.save(path, array)
        return path

    def to_host(self, buffer: Buffer) -> np.ndarray[Any, Any]:
        """See Device.to_host."""
        return np.load(buffer)

    def rows(self, buffer: Buffer, indices: Sequence[int]) -> list[np.ndarray[Any, Any]]:
        """See Device.rows."""
        whole = np.load(buffer)
        return [whole[i] for i in indices]

    def zeros(self, dtype: str, shape: tuple[int, ...]) -> Buffer:
        """See Device.zeros."""
        return self.to_device(np.zeros(shape, _DTYPES[dtype]))

    def empty(self, dtype: str, shape: tuple[int, ...]) -> Buffer:
        """See Device.empty."""
        return self.zeros(dtype, shape)
