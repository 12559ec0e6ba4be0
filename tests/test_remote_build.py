"""Builds on two machines that share a remote cache; each machine is a cache and a directory."""

from __future__ import annotations

import shutil
from pathlib import Path

import building
import pytest
from building import Done, Place, assert_right, contents, log_rows

pytestmark = pytest.mark.iree


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The place of a build without a remote."""
    return building.cold(tmp_path_factory.getbasetemp())[0]


def warnings(done: Done) -> list[str]:
    return [line for line in done.err.splitlines() if line.startswith("warning: ")]


def stages_started(done: Done) -> set[str]:
    """Of the stages' processes, what each does."""
    lines = [line.split() for line in done.started]
    return {line[line.index("-m") + 2] for line in lines if "-m" in line and "doit" not in line}


def compiles(line: str) -> bool:
    """Whether the compiler is asked for a module, not only for what it calls this CPU."""
    return "iree-compile" in line and "model.vmfb" in line


def test_a_cold_machine_builds_from_the_remote(cold: Place, tmp_path: Path) -> None:
    """All but the weights, which are converted there; then nothing is asked any more. What is
    wrong in the remote is made again, and put right by a machine that may write.

    The remote is filled by a machine that has built it all before, and runs nothing for it."""
    shared = tmp_path / "shared"
    first = cold.copy(tmp_path / "first")
    done = first.built(env={"SCANWRIGHT_REMOTE": str(shared), "SCANWRIGHT_REMOTE_WRITE": "1"})
    assert (done.started, warnings(done)) == ([], []) and "cached: no input changed" in done.err
    params = cold.blob("convert", "params")
    uploaded = {path.name for path in shared.rglob("*")}
    assert cold.blob("compile", "model.vmfb").name in uploaded and params.name not in uploaded

    second = Place.new(tmp_path / "second")
    env = {"SCANWRIGHT_REMOTE": str(shared)}
    lines = second.doit("explain", env=env).out.splitlines()
    assert any(f"in the remote cache {shared}" in line for line in lines), lines
    done = second.built(env=env)
    assert warnings(done) == []
    assert stages_started(done) == {"convert"}
    assert not any(compiles(line) for line in done.started)
    assert_right(second.bundle)
    assert contents(second.bundle) == contents(cold.bundle)
    rows = {row["stage"]: row for row in log_rows(second.bundle) if "key" in row}
    assert rows["compile"]["remote"] is True and "remote" not in rows["convert"]
    before = [path.stat().st_atime_ns for path in sorted(shared.rglob("*"))]
    warm = second.built(env=env)
    assert warm.started == []
    imported = set(warm.processes[0]["modules"])
    assert "artifacts.remote" in imported and not imported & {"fsspec", "s3fs", "numpy"}
    assert [path.stat().st_atime_ns for path in sorted(shared.rglob("*"))] == before

    # A poisoned object of kernels and module.
    for stage, name in (("compile", "model.vmfb"), ("proof", "rows.json")):
        path = next(shared.rglob(cold.blob(stage, name).name))
        path.write_bytes(path.read_bytes()[::-1])
    third = Place.new(tmp_path / "third")
    done = third.built(env={**env, "SCANWRIGHT_REMOTE_WRITE": "1"})
    assert len(warnings(done)) == 2
    assert stages_started(done) == {"convert", "check"}
    assert any(compiles(line) for line in done.started)
    assert contents(third.bundle) == contents(cold.bundle)
    shutil.rmtree(third.cache)
    shutil.rmtree(third.build)
    done = third.built(env=env)
    assert (warnings(done), stages_started(done)) == ([], {"convert"})
