"""What a device does with a bundle, measured with the runtime alone; prints one JSON object.

    python measure.py copy --device cuda              bytes a second of a copy on the device
    python measure.py steps BUNDLE --device cuda      where the time of a decode and a prefill goes

`copy` counts bytes read plus bytes written. `steps` uses seeded random parameters and times the
parts of a step as the host sees them, then each kernel: with CUPTI on cuda (kernels.py), elsewhere
with the runtime package's iree-benchmark-module.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kernels
import numpy as np

from runtime import manifest as mf
from runtime import params_random
from runtime.errors import UserError, report
from runtime.hal import driver_of, open_device, rt
from runtime.module import open_bundle
from runtime.session import Session, zero_state

HERE = Path(__file__).resolve().parent
SEED = 0
COPIES = 16  # in one submission, so that the cost of submitting does not count
COPY_BYTES = {"cuda": 2 << 30}
SMALL_COPY_BYTES = 128 << 20
PROFILED_STEPS = 5
ROUNDS = 5
ROUND_S = 0.3
TOP = 12


def copy_rate(uri: str, size: int | None) -> dict[str, Any]:
    """Median rate of copying between two buffers in the device's own memory."""
    hal = open_device(uri)
    size = size or COPY_BYTES.get(driver_of(uri), SMALL_COPY_BYTES)
    usage = int(rt.BufferUsage.DEFAULT)
    pair = [
        hal.device.allocator.allocate_buffer(
            memory_type=int(rt.MemoryType.DEVICE_LOCAL), allowed_usage=usage, allocation_size=size
        )
        for _ in range(2)
    ]
    semaphore, at = hal.device.create_semaphore(0), 0

    def submit(commands: Any) -> float:
        nonlocal at
        fence = rt.HalFence.create_at
        at += 1
        start = time.perf_counter()
        hal.device.queue_execute(
            commands,
            wait_semaphores=fence(semaphore, at - 1),
            signal_semaphores=fence(semaphore, at),
        )
        fence(semaphore, at).wait()
        return time.perf_counter() - start

    for buffer in pair:
        fill = rt.HalCommandBuffer(hal.device)
        fill.fill(buffer, np.array([0x3C9D5A71], np.uint32), 0, size, end=True)
        submit(fill)
    seconds = []
    for _ in range(ROUNDS + 1):  # the first warms up
        commands = rt.HalCommandBuffer(hal.device)
        for i in range(COPIES):
            commands.copy(pair[i % 2], pair[1 - i % 2], end=i == COPIES - 1)
        seconds.append(submit(commands))
    rates = [2 * size * COPIES / s for s in seconds[1:]]
    return {
        "device": uri,
        "bytes": size,
        "bytes_per_s": statistics.median(rates),
        "spread": [min(rates), max(rates)],
    }


class Steps:
    """The functions of one opened bundle, called on buffers that stay on the device."""

    def __init__(self, bundle: Path, uri: str) -> None:
        start = time.perf_counter()
        self.manifest = mf.load(bundle)
        self.device = open_bundle(bundle, self.manifest, uri, SEED)
        self.session = Session(self.device, self.manifest)
        self.open_s = time.perf_counter() - start
        self.slots, self.chunk = self.manifest.shape.slots, self.manifest.shape.chunks[-1]
        put, size = self.device.to_device, np.int32
        self.host_rows = [
            np.ones(self.slots, size),
            np.full(self.slots, self.chunk, size),
            np.ones(self.slots, size),
        ]
        tokens = np.arange(self.chunk, dtype=size)[None] * 7919 % self.manifest.model.vocab_size
        self.rows = [put(row) for row in self.host_rows]
        self.prompt = [put(tokens), put(np.array([self.chunk], size)), put(np.zeros(1, size))]
        self.one, self.one_out = (zero_state(self.device, self.manifest, 1) for _ in range(2))
        self.all, self.all_out = (
            zero_state(self.device, self.manifest, self.slots) for _ in range(2)
        )
        self.argmax: Any = None

    def decode(self) -> None:
        """One decode of all slots: nothing but the call."""
        before = self.all
        _, self.argmax, *self.all = self.device.call("decode", [*self.rows, *before, *self.all_out])
        self.all_out = before

    def prefill(self) -> None:
        """One full chunk of one sequence: nothing but the call."""
        name = f"prefill_{self.chunk}"
        before = self.one
        _, self.argmax, *self.one = self.device.call(name, [*self.prompt, *before, *self.one_out])
        self.one_out = before

    def upload(self) -> None:
        """The inputs of a decode from the host."""
        self.rows = [self.device.to_device(row) for row in self.host_rows]

    def readback(self) -> None:
        """The chosen tokens to the host."""
        self.device.to_host(self.argmax)


def milliseconds(work: Callable[[], None]) -> float:
    """Median over rounds of one call, warmed up."""
    work()
    start = time.perf_counter()
    work()
    repeats = max(1, int(ROUND_S / max(time.perf_counter() - start, 1e-6)))
    found = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(min(repeats, 2000)):
            work()
        found.append((time.perf_counter() - start) / min(repeats, 2000))
    return statistics.median(found) * 1e3


def steps(bundle: Path, uri: str) -> dict[str, Any]:
    """Host-side times of the parts of a step, then the kernels of decode and prefill."""
    work = Steps(bundle, uri)
    parts = {
        "decode_call_ms": milliseconds(work.decode),
        "inputs_to_device_ms": milliseconds(work.upload),
        "tokens_to_host_ms": milliseconds(work.readback),
        "prefill_call_ms": milliseconds(work.prefill),
    }
    found: dict[str, Any] = {"bundle": bundle.name, "device": uri, "open_s": work.open_s}
    found |= {"chunk": work.chunk, "batch": work.slots, "parts": parts}
    names = {"decode": "decode", "prefill": f"prefill_{work.chunk}"}
    try:
        if driver_of(uri) == "cuda":
            profiler = kernels.Profiler(HERE)
            found["profiler"] = profiler.library
            found["kernels"] = {name: by_cupti(profiler, getattr(work, name)) for name in names}
        else:
            found["profiler"] = "iree-benchmark-module --dispatch_statistics"
            found["kernels"] = by_tool(bundle, work.manifest, uri, names)
    except (kernels.NoProfiler, OSError, subprocess.SubprocessError) as error:
        found["profiler"] = f"none: {error}"
        found["kernels"] = {}
    return found


def by_cupti(profiler: kernels.Profiler, work: Callable[[], None]) -> dict[str, Any]:
    """Kernels, copies and fills of a call, from `PROFILED_STEPS` of them."""
    work()
    profiler.start()
    start = time.perf_counter()
    for _ in range(PROFILED_STEPS):
        work()
    wall = time.perf_counter() - start
    activities = profiler.stop()
    groups: dict[str, list[kernels.Activity]] = defaultdict(list)
    for activity in activities:
        groups[activity.name].append(activity)
    rows = [
        {
            "name": name,
            "calls": len(group) / PROFILED_STEPS,
            "ms": sum(a.end - a.start for a in group) / 1e6 / PROFILED_STEPS,
            "bytes": sum(a.bytes for a in group) / PROFILED_STEPS,
        }
        for name, group in groups.items()
    ]
    busy = kernels.busy_ns(activities) / 1e6 / PROFILED_STEPS
    return _summary(rows, wall * 1e3 / PROFILED_STEPS, busy)


def _summary(rows: list[dict[str, Any]], wall_ms: float, busy_ms: float) -> dict[str, Any]:
    """The longest kernels, and what all of them come to. Raises NoProfiler if there is none."""
    if not rows:
        raise kernels.NoProfiler("this driver tells of no dispatch")
    rows.sort(key=lambda row: -row["ms"])
    return {
        "wall_ms": wall_ms,
        "busy_ms": busy_ms,
        "calls": sum(row["calls"] for row in rows),
        "kinds": len(rows),
        "top": rows[:TOP],
    }


def by_tool(bundle: Path, manifest: mf.Manifest, uri: str, names: dict[str, str]) -> dict[str, Any]:
    """Dispatches by the runtime package's own benchmark tool, on zero inputs."""
    spec = importlib.util.find_spec("iree._runtime_libs")
    assert spec is not None and spec.submodule_search_locations
    tool = Path(spec.submodule_search_locations[0]) / "iree-benchmark-module"
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        archive = Path(scratch) / "params.irpa"
        params_random.write_archive(manifest.params, SEED, archive)
        for name, function in names.items():
            inputs = [
                f"--input={'x'.join(map(str, (*item.shape, item.dtype)))}"
                for item in manifest.functions[function].inputs
            ]
            done = subprocess.run(
                [tool, f"--device={uri}", f"--module={bundle / manifest.files.module.path}",
                 f"--parameters=model={archive}", f"--function={function}",
                 "--dispatch_statistics", f"--benchmark_min_time={PROFILED_STEPS}x",
                 "--benchmark_format=json", *inputs],
                capture_output=True, text=True, timeout=120, check=True,
            )  # fmt: skip
            found[name] = _dispatches(json.loads(done.stdout)["benchmarks"])
    return found


def _dispatches(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The tool's rows: the function itself first, then a row a dispatch function."""
    unit = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3}
    own = [row for row in rows if "calls" in row]
    whole = next(row for row in rows if "calls" not in row)
    found = [
        {
            "name": re.sub(r"^BM_[^/]*/", "", row["name"]),
            "calls": row["calls"],
            "ms": row["real_time"] * unit[row["time_unit"]],
            "bytes": 0,
        }
        for row in own
    ]
    busy = sum(row["ms"] for row in found)
    return _summary(found, whole["real_time"] * unit[whole["time_unit"]], busy)


def main() -> int:
    """Print the JSON object of one measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["copy", "steps"])
    parser.add_argument("bundle", type=Path, nargs="?")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--bytes", type=int, help="size of one buffer of `copy`")
    args = parser.parse_args()
    if args.what == "steps" and args.bundle is None:
        parser.error("steps needs a BUNDLE")
    try:
        copying = args.what == "copy"
        found = copy_rate(args.device, args.bytes) if copying else steps(args.bundle, args.device)
    except UserError as error:
        return report(error)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
