"""What the benchmark scripts share: builds as a user makes them, their log, and the machine."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("iree-base-runtime", "iree-base-compiler", "jax", "numpy")


def machine() -> dict[str, Any]:
    """The machine that figures come from: processor, cores, memory, load, versions."""
    return {
        "cpu": _first(Path("/proc/cpuinfo"), r"model name\s*:\s*(.+)") or platform.processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def describe(found: Mapping[str, Any]) -> str:
    """The machine in two lines, with a warning if it was busy."""
    packages = ", ".join(f"{name} {version}" for name, version in found["packages"].items())
    lines = [
        f"machine: {found['cpu']}, {found['cores']} cores,"
        f" {found['memory_bytes'] / 2**30:.0f} GiB, {found['system']}",
        f"versions: Python {found['python']}, {packages}",
    ]
    if found["load_average"] > 0.5:
        lines.append(
            f"warning: load average {found['load_average']:.1f} at the start: other work ran here,"
            " times are not to be trusted (memory and sizes are)"
        )
    return "\n".join(lines)


def _first(path: Path, pattern: str) -> str | None:
    try:
        found = re.search(pattern, path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return found[1].strip() if found else None


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def build(words: Sequence[str], directory: Path, cache: Path | None = None) -> Path:
    """The bundle of `doit build WORDS`, made under `directory`/build. SystemExit if it fails."""
    directory.mkdir(parents=True, exist_ok=True)
    environment = os.environ | ({"SCANWRIGHT_CACHE": str(cache)} if cache else {})
    command = [sys.executable, "-m", "doit", "-f", str(ROOT / "dodo.py"), "-d", str(directory)]
    done = subprocess.run(
        [*command, "build", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("bundle: ")]
    if done.returncode or not lines:
        sys.exit(f"error: doit build {' '.join(words)}: {done.stderr.strip()}")
    return directory / lines[-1].removeprefix("bundle: ")


def stages(bundle: Path) -> dict[str, dict[str, Any]]:
    """Stage → the row of its last run in the bundle's build log (cached results have no times)."""
    lines = (bundle / "build.log.jsonl").read_text(encoding="utf-8").splitlines()
    rows: Iterable[dict[str, Any]] = map(json.loads, lines)
    return {row["stage"]: row for row in rows if not row.get("cached")}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of equal keys as a Markdown table."""
    if not rows:
        return ""
    heads = list(rows[0])
    cells = [heads, *([str(row[head]) for head in heads] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(heads))]
    text = [" | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in cells]
    text.insert(1, " | ".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" for line in text)
