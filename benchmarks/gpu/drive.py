"""Runs a pack made by prepare.py on this machine; only the standard library is needed.

Unpacks the carried wheels, then runs each step as a process of its own under a time limit: verify
the demo bundle and let it write, the device's copy rate, `bench` of each bundle and where its time
goes. Prints a table; exit code 0 only if every step ended well.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROUNDS = 3
LIMIT = 345.0  # seconds for everything; with another --limit the steps' own grow in proportion
LIMITS = {"driver": 20, "verify": 90, "generate": 60, "copy": 45, "bench": 100, "steps": 80}


@dataclass
class Run:
    """The steps so far, each run in `home`; all must have ended at `until` (time.monotonic)."""

    until: float
    home: Path
    environment: dict[str, str]
    patience: float = 1.0  # times the limit of each step
    results: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def step(self, name: str, argv: Sequence[str], show: bool = False) -> str | None:
        """Standard output of `argv`, shown if asked; None, and a failure, if it did not end well.

        `name` is `kind` or `kind object`; the kind gives its limit.
        """
        left = self.until - time.monotonic()
        limit = min(LIMITS[name.partition(" ")[0]] * self.patience, left)
        if left < 3:
            return self._failed(name, "not run: no time left")
        start = time.monotonic()
        try:
            process = subprocess.Popen(
                argv,
                cwd=self.home,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            return self._failed(name, f"{argv[0]}: {error.strerror}")
        try:
            out, err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, _ = process.communicate()
            return self._failed(name, f"killed after {limit:.0f} s; it printed: {out[-500:]}")
        seconds = time.monotonic() - start
        if show and out.strip():
            print("\n".join(f"    {line}" for line in out.rstrip().splitlines()))
        if process.returncode:
            lines = err.strip().splitlines() or ["no message"]
            return self._failed(name, f"exit code {process.returncode}: {' / '.join(lines[-3:])}")
        print(f"ok    {name} ({seconds:.1f} s)", flush=True)
        return out

    def measure(self, name: str, argv: Sequence[str]) -> dict[str, Any] | None:
        """As `step`, for a program that prints one JSON object; kept in `results`."""
        out = self.step(name, argv)
        if out is None:
            return None
        self.results[name] = json.loads(out)
        return self.results[name]

    def _failed(self, name: str, why: str) -> None:
        self.failures.append(f"{name}: {why}")
        print(f"FAIL  {name}: {why}", flush=True)


def unpack(pack: Path, python: str) -> Path:
    """The carried packages, unpacked beside the pack (wheels are zip files)."""
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if own != python:
        sys.exit(
            f"error: {pack}: made for Python {python}, this is {own};"
            f" set PYTHON=python{python}, or make a pack with prepare.py --python {own}"
        )
    site = pack / "site"
    if (site / ".complete").exists():
        return site
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir()
    for wheel in sorted((pack / "wheels").glob("*")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    for tool in site.glob("iree/_runtime_libs/iree-*"):
        tool.chmod(0o755)
    (site / ".complete").touch()
    return site


def machine(run: Run, device: str) -> None:
    """Say what this machine is; on cuda also its GPU and driver."""
    print(
        f"machine: {platform.platform()}, {os.cpu_count()} cores, Python {sys.version.split()[0]}"
    )
    if device.startswith("cuda"):
        fields = "name,driver_version,memory.total,clocks.max.sm,clocks.max.mem"
        out = run.step("driver", ["nvidia-smi", f"--query-gpu={fields}", "--format=csv"], True)
        run.results["driver"] = out


def demo(run: Run, bundle: Path, prompt: str | None, device: str) -> None:
    """Verify the bundle with weights and let it write."""
    base = [sys.executable, "-m", "runtime"]
    run.step(f"verify {bundle.name}", [*base, "verify", str(bundle), "--device", device], True)
    words = ["--tokens", "1,2,3"] if prompt is None else ["--prompt", prompt]
    words += ["--max-tokens", "48", "--device", device]
    run.step(f"generate {bundle.name}", [*base, "generate", str(bundle), *words], True)


def benches(run: Run, pack: Path, names: Sequence[str], device: str) -> None:
    """`scanwright bench` of every bundle first, then where the time of each goes."""
    base = [sys.executable, "-m", "runtime"]
    for name in names:
        argv = ["bench", str(pack / "bundles" / name), "--device", device, "--json"]
        run.measure(f"bench {name}", [*base, *argv, "--random-params", "--rounds", str(ROUNDS)])
    for name in names:
        argv = [str(pack / "measure.py"), "steps", str(pack / "bundles" / name)]
        run.measure(f"steps {name}", [sys.executable, *argv, "--device", device])


def report(results: dict[str, Any], names: Sequence[str]) -> str:
    """The figures as text."""
    copy = results.get("copy")
    rate = copy["bytes_per_s"] if copy else float("nan")
    lines = [""]
    if copy:
        low, high = copy["spread"]
        lines.append(
            f"device copy ({copy['bytes'] / 2**20:.0f} MiB, read + written):"
            f" {rate / 1e9:,.1f} GB/s ({low / 1e9:,.1f} … {high / 1e9:,.1f})"
        )
    lines.append(
        f"{'bundle':<20}{'open s':>8}{'first token ms':>16}{'prefill tok/s':>15}"
        f"{'decode tok/s':>14}{'GB/s':>9}{'of copy':>9}"
    )
    for name in names:
        found = results.get(f"bench {name}")
        if found is None:
            lines.append(f"{name:<20}  not measured")
            continue
        moved = found["decode_bytes_per_s"]
        lines.append(
            f"{name:<20}{found['open_s']:>8.2f}{found['first_token_s'] * 1e3:>16.2f}"
            f"{found['prefill_tokens_per_s']:>15,.0f}{found['decode_tokens_per_s']:>14,.1f}"
            f"{moved / 1e9:>9,.1f}{moved / rate:>9.0%}"
        )
    for name in names:
        if f"steps {name}" in results:
            lines += ["", *step_lines(name, results, rate)]
    return "\n".join(lines)


def step_lines(name: str, results: dict[str, Any], rate: float) -> list[str]:
    """Where the time of one bundle's steps goes."""
    found, bench = results[f"steps {name}"], results.get(f"bench {name}")
    parts = found["parts"]
    lines = [
        f"{name}: batch {found['batch']}, chunk {found['chunk']}; kernels by {found['profiler']}",
        f"  decode: call {parts['decode_call_ms']:.3f} ms, inputs to the device"
        f" {parts['inputs_to_device_ms']:.3f} ms, tokens to the host"
        f" {parts['tokens_to_host_ms']:.3f} ms; prefill call {parts['prefill_call_ms']:.3f} ms",
    ]
    if bench:
        moved = bench["weight_bytes_per_token"] + bench["batch"] * bench["state_bytes_per_token"]
        lines.append(
            f"  decode moves {moved / 1e6:,.1f} MB: {moved / rate * 1e3:.3f} ms at the copy rate"
        )
    for what, kernels in found["kernels"].items():
        idle = kernels["wall_ms"] - kernels["busy_ms"]
        lines.append(
            f"  {what}: {kernels['calls']:.0f} launches of {kernels['kinds']} kinds:"
            f" busy {kernels['busy_ms']:.3f} ms, idle {idle:.3f} ms of {kernels['wall_ms']:.3f}"
        )
        for row in kernels["top"]:
            share = row["ms"] / kernels["busy_ms"] if kernels["busy_ms"] else 0.0
            lines.append(
                f"    {share:>5.1%} {row['ms']:>9.4f} ms {row['calls']:>6.0f}x {row['name']}"
            )
    return lines


def main() -> int:
    """Run all of it; 0 if every step ended well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--device", help="IREE device URI (default: the pack's)")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for everything")
    parser.add_argument("--out", type=Path, help="also write all results there as JSON")
    args = parser.parse_args()
    start = time.monotonic()
    args.pack = args.pack.resolve()
    plan = json.loads((args.pack / "pack.json").read_text(encoding="utf-8"))
    device = args.device or plan["device"]
    site = unpack(args.pack, plan["python"])
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(args.pack), str(site)]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    run = Run(start + args.limit, args.pack, environment, max(1.0, args.limit / LIMIT))
    machine(run, device)
    demo(run, args.pack / "bundles" / plan["verify"], plan["prompt"], device)
    copying = [sys.executable, str(args.pack / "measure.py"), "copy", "--device", device]
    run.measure("copy", copying)
    benches(run, args.pack, plan["bench"], device)
    print(report(run.results, plan["bench"]))
    seconds = time.monotonic() - start
    print(f"\n{len(run.failures)} failures; {seconds:.0f} s of {args.limit:.0f}")
    for failure in run.failures:
        print(f"  {failure}")
    if args.out:
        content = {"device": device, "seconds": seconds, "failures": run.failures} | run.results
        args.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 1 if run.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
