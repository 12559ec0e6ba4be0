"""Recorded attacks: each ends in one line, having touched nothing but its own files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from attack_binaries import CHECKPOINTS, GGUFS, PTHS
from attack_case import Case
from attack_guard import PLANTED
from attack_texts import JSONS, RECIPES, TEMPLATES, TOKENIZERS
from attack_transport import IMAGES, REPRODUCED, SIGNATURES, TARS

HERE = Path(__file__).resolve().parent
ALL = [
    *CHECKPOINTS, *GGUFS, *PTHS, *JSONS, *RECIPES, *TOKENIZERS, *TEMPLATES,
    *TARS, *IMAGES, *SIGNATURES, *REPRODUCED,
]  # fmt: skip
CASES = {case.name: case for case in ALL}
MIB = 700  # of memory that a parser may take for files of a few megabytes
SECONDS = 15  # of processor time


def ended(jobs: list[tuple[Path, str]]) -> list[dict[str, Any]]:
    """How each job (directory, parser) ended, of one guarded process."""
    done = subprocess.run(
        [sys.executable, HERE / "attack_guard.py"],
        input=json.dumps([[str(directory), parser] for directory, parser in jobs]),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # what the system's libraries say of themselves
        text=True,
        check=True,
        timeout=900,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """How every case ended, by its name; "left" is what is in its directory then."""
    root, jobs = tmp_path_factory.mktemp("attacks"), []
    (root / "outside").mkdir()
    (root / "outside" / "secret").write_bytes(b"\x02" + bytes(7) + b"{}")
    for i, case in enumerate(CASES.values()):
        directory = root / f"case-{i}"
        directory.mkdir()
        case.make(directory)
        jobs.append((directory, case.parser))
    before = [sorted(path.name for path in directory.iterdir()) for directory, _ in jobs]
    found = ended(jobs)
    for one, (directory, _), names in zip(found, jobs, before, strict=True):
        one["left"] = sorted({path.name for path in directory.iterdir()} - set(names))
    return dict(zip(CASES, found, strict=True))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_attack_ends_in_one_line_and_does_nothing(
    case: Case, results: dict[str, dict[str, Any]]
) -> None:
    end = results[case.name]
    assert end["crash"] is None
    assert end["outside"] == [] and end["left"] == []
    assert end["seconds"] < SECONDS and end["mib"] < MIB
    if case.said is not None:
        assert end["error"] is not None, "it was read"
        assert case.said in end["error"]
    if end["error"] is not None:
        assert end["error"].isprintable() and len(end["error"]) < 5000


def test_names_of_cases_are_their_own() -> None:
    assert len(CASES) == len(ALL)


def test_the_guard_sees_what_it_is_there_for(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "outside").write_text("x")
    (tmp_path / "home" / "a").write_text("x")
    found = ended([(tmp_path / "home", name) for name in PLANTED])
    for name, end in zip(PLANTED, found, strict=True):
        if name in ("planted: takes memory", "planted: dies"):
            assert end["crash"] is not None, name
        else:
            assert end["outside"], name
