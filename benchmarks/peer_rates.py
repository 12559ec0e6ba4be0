"""What the machine can do: bytes read a second, multiply-adds a second."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

THREADS = 2
READ_BYTES = 512 << 20
EDGE = 1536  # of the square matrices that are multiplied


class Machine:
    """The best of a few repeats of each, so that a turn lasts about half a second."""

    def __init__(self, work: Path) -> None:
        """Compiles peer_rates.c into `work` by ziglang."""
        source, library = Path(__file__).with_suffix(".c"), work / "peer_rates.so"
        command = [sys.executable, "-m", "ziglang", "cc", "-O3", "-march=native", "-shared"]
        command += ["-fPIC", "-mprefer-vector-width=512"] if sys.platform == "linux" else []
        subprocess.run([*command, str(source), "-o", str(library)], check=True)
        self._read = ctypes.CDLL(str(library)).read_all
        self._read.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._buffer = np.ones(READ_BYTES // 8 + 8, np.uint64)
        self._pool = ThreadPoolExecutor(THREADS)
        self._products = products()

    def rates(self) -> dict[str, float]:
        """`read` in bytes a second; of each product, operations a second (two a multiply-add)."""
        found = {"read": READ_BYTES / best(self._read_once, 6)}
        for name, call in self._products.items():
            found[name] = 2 * EDGE**3 / best(call, 6)
        return found

    def _read_once(self) -> None:
        start = -self._buffer.ctypes.data % 64 + self._buffer.ctypes.data
        part = READ_BYTES // THREADS
        jobs = [self._pool.submit(self._read, start + i * part, part) for i in range(THREADS)]
        for job in jobs:
            job.result()


def products() -> dict[str, Callable[[], Any]]:
    """Products of square matrices: by NumPy, and by torch if it is there."""
    a = np.random.default_rng(0).standard_normal((EDGE, EDGE), np.float32)
    out = np.empty_like(a)
    found: dict[str, Callable[[], Any]] = {"numpy f32": lambda: np.matmul(a, a, out=out)}
    try:
        import torch
    except ImportError:
        return found
    torch.set_num_threads(THREADS)
    for name, dtype in {"torch f32": torch.float32, "torch bf16": torch.bfloat16}.items():
        b = torch.from_numpy(a).to(dtype)
        product = torch.empty_like(b)
        found[name] = lambda b=b, product=product: torch.mm(b, b, out=product)
    return found


def best(call: Callable[[], Any], repeats: int) -> float:
    """Seconds of the fastest of some calls, after one more."""
    call()
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return min(times)
