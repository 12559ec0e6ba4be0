"""`doit report`: all that is known of the bundles under `build/`, on one page, build/report.html.

The page is one file that asks no one for anything and runs nothing. What it says comes from the
manifests, the references, the build logs, from what `bench` and `verify` kept in build/results/,
and from benchmarks/peers.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from artifacts import buildlog, report_page
from artifacts.disk import explained, write_new
from artifacts.markup import document
from runtime import manifest as manifest_file
from runtime import reference as reference_file
from runtime.errors import UserError
from runtime.manifest import Manifest
from runtime.reference import Reference

FILE_NAME = "report.html"
RESULTS = "results"
MOST_BYTES = 64 << 20  # of a file that is read whole


@dataclass
class Bundle:
    """One bundle, as far as it can be read; `problems` says what could not be."""

    path: str
    manifest: Manifest | None = None
    reference: Reference | None = None
    log: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass
class Found:
    """All that the page tells of."""

    bundles: list[Bundle] = field(default_factory=list)
    benches: list[dict[str, Any]] = field(default_factory=list)
    verified: list[dict[str, Any]] = field(default_factory=list)
    peers: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def write(build: Path, peers: Path | None = None) -> Path:
    """Write the report of the bundles under `build`; returns its path. UserError if it cannot."""
    path = build / FILE_NAME
    text = document(report_page.page(collect(build, peers)))
    with explained(path):
        build.mkdir(parents=True, exist_ok=True)
        temporary = build / f".{FILE_NAME}"
        temporary.unlink(missing_ok=True)
        write_new(temporary, text.encode("utf-8"))
        temporary.replace(path)
    return path


def collect(build: Path, peers: Path | None = None) -> Found:
    """Read everything. What cannot be read is a problem of the page, never an exception."""
    found = Found(bundles=[_bundle(build, path) for path in _places(build)])
    for path in sorted((build / RESULTS).glob("*.json")):
        content = _result(path, found.problems)
        kind = "verify" if content.get("kind") == "verify" else "bench"
        if content:
            (found.verified if kind == "verify" else found.benches).append(content)
    if peers is not None and peers.is_file():
        found.peers = _object(peers, found.problems)
    return found


def _places(build: Path) -> Iterator[Path]:
    """Directories with a manifest, but for those that a build is making or replacing."""
    for path in sorted(build.rglob(manifest_file.FILE_NAME)):
        place = path.parent
        if not any(part.startswith(".") for part in place.relative_to(build).parts):
            yield place


def _bundle(build: Path, place: Path) -> Bundle:
    found = Bundle(str(place.relative_to(build)))
    try:
        found.manifest = manifest_file.load(place)
        ref = found.manifest.files.reference
        if ref is not None:
            found.reference = reference_file.load(place / ref.path, found.manifest.rebuild)
    except (UserError, OSError) as error:
        found.problems.append(str(error))
    logs = [log / buildlog.FILE_NAME for log in _logged(place, found.manifest)]
    found.log = [row for log in logs if log.is_file() for row in _rows(log, found.problems)]
    if not any(log.is_file() for log in logs):
        found.problems.append(f"{buildlog.FILE_NAME}: not there: no times are known")
    return found


def _logged(place: Path, manifest: Manifest | None) -> list[Path]:
    """Where the logs are: that of a bundle for several targets is those of the bundles it is of."""
    if manifest is None or not manifest.alternatives:
        return [place]
    names = [target.name for target in manifest.targets]
    return [place, *(place.parent.parent / name / place.name for name in names)]


def _rows(path: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    """The rows of a build log; lines that are none, as a kill may leave, are counted."""
    wrong = 0
    for line in _text(path, problems).splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict) and isinstance(row.get("stage"), str):
            yield row
        else:
            wrong += 1
    if wrong:
        problems.append(f"{path.name}: lines that are no rows: {wrong}")


def _result(path: Path, problems: list[str]) -> dict[str, Any]:
    """What `bench` or `verify` kept, or `bench --json` printed; {} and a problem if it is none."""
    content = _object(path, problems)
    if not content:
        return {}
    words = ("model", "target", "shape", "weights", "device")
    rates = () if content.get("kind") == "verify" else report_page.FIGURES
    wrong = [name for name in words if not isinstance(content.get(name), str)]
    wrong += [name for name in rates if not report_page.is_number(content.get(name))]
    if content.get("kind") == "verify" and not report_page.are_rows(content.get("rows")):
        wrong.append("rows")
    if wrong:
        problems.append(f"{path.name}: {', '.join(wrong)}: not as `bench` and `verify` write them")
        return {}
    return content


def _object(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        content = json.loads(_text(path, problems) or "{}")
    except (ValueError, RecursionError) as error:
        problems.append(f"{path.name}: not JSON ({error})")
        return {}
    if not isinstance(content, dict):
        problems.append(f"{path.name}: found a {type(content).__name__}, expected a JSON object")
        return {}
    return content


def _text(path: Path, problems: list[str]) -> str:
    """The file; "" and a problem if it cannot be read."""
    try:
        if path.stat().st_size > MOST_BYTES:
            problems.append(f"{path.name}: more than {MOST_BYTES} bytes, not read")
            return ""
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        problems.append(f"{path.name}: cannot be read ({error.strerror})")
        return ""
