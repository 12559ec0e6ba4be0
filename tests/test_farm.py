"""`doit farm`: real worker processes on the loopback, one killed in mid-compile."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from building import Place

from artifacts import farm_worker
from artifacts.farm import Farm, local_workers
from recipes import select
from runtime.errors import UserError

pytestmark = pytest.mark.iree
WORDS = ("target=cuda-sm90,cuda-sm80", "shape=b2-p8", "params=none")


def program(place: Place, *argv: str, **settings: str) -> subprocess.Popen[str]:
    """A program of the farm in the background, its output in a pipe."""
    return subprocess.Popen(
        [sys.executable, "-m", *argv], cwd=place.work, env=place.env(settings),
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@contextlib.contextmanager
def cluster(place: Place, remote: Path) -> Iterator[tuple[str, list[int]]]:
    """A scheduler and two workers, each with a cache of its own: its address, their processes."""
    file = place.home / "scheduler.json"
    known = ("--scheduler-file", str(file), "--no-dashboard")
    started = [program(place, "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port",
                       "0", *known)]  # fmt: skip
    options = ("--no-nanny", "--nthreads", "1", "--no-dashboard", "--host", "127.0.0.1")
    try:
        while not file.exists():
            assert started[0].poll() is None, started[0].communicate()
            time.sleep(0.05)
        address = json.loads(file.read_text())["address"]
        for name in ("one", "two"):
            started.append(
                program(
                    place,
                    "distributed.cli.dask_worker",
                    address,
                    *options,
                    SCANWRIGHT_CACHE=str(place.home / name),
                    SCANWRIGHT_REMOTE=str(remote),
                    SCANWRIGHT_REMOTE_WRITE="1",
                )
            )
        yield address, [worker.pid for worker in started[1:]]
    finally:
        for process in reversed(started):
            process.kill()
            process.communicate()


def running(text: str) -> list[int]:
    """Processes whose command line holds `text`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def kill_one_that_compiles(farm: subprocess.Popen[str]) -> tuple[str, str, str]:
    """Kill the first worker of which the farm says that it compiles, once its compiler runs.

    Returns what it compiled, its process, and all that the farm said to its end.
    """
    assert farm.stderr is not None
    killed, lines = None, []
    for line in farm.stderr:
        lines.append(line)
        compiling = re.match(r"farm: (.*): compile at \S+ \(process (\d+)\)", line)
        if compiling and killed is None:
            while not running(f"/scratch/{compiling[2]}-"):
                time.sleep(0.01)
            killed = compiling
            os.kill(int(compiling[2]), signal.SIGKILL)
    assert killed is not None, lines
    return killed[1], killed[2], "".join(lines)


@pytest.mark.slow
def test_a_worker_killed_in_mid_compile_is_made_up_for(tmp_path: Path) -> None:
    place, remote = Place.new(tmp_path / "place"), tmp_path / "remote"
    remote.mkdir()
    shared = {"SCANWRIGHT_REMOTE": str(remote)}
    with cluster(place, remote) as (address, workers):
        with subprocess.Popen(
            place.argv("farm", f"scheduler={address}", *WORDS), cwd=place.work,
            env=place.env(shared), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        ) as farm:  # fmt: skip
            what, process, said = kill_one_that_compiles(farm)
            assert farm.stdout is not None
            out = farm.stdout.read()
        assert farm.returncode == 0 and int(process) in workers, said
        again = re.findall(r"farm: (.*): \S+ \(process (\d+)\) was lost, started again", said)
        assert again == [(what, process)], said
        assert running(f"/scratch/{process}-") == []  # its compiler ended with it

        # The modules are in this machine's cache now, as the digests say.
        rows = re.findall(r"(\S+) (\S+) (\S+)  proof not-run  ([\d,]+) bytes  sha256:(\w+)", out)
        assert [row[1] for row in rows] == ["cuda-sm80", "cuda-sm90"], out
        for *_, size, digest in rows:
            data = (place.cache / "blobs" / digest[:2] / digest).read_bytes()
            assert hashlib.sha256(data).hexdigest() == digest
            assert len(data) == int(size.replace(",", ""))

        # Another run finds all of it, with processes of its own.
        done = place.doit("farm", "workers=1", *WORDS, env=shared)
        assert done.code == 0 and done.err.count(": cached, proof not-run") == 2, done.err
        assert done.out == out
        # What this machine cannot get is told; what a worker had already, it takes to the remote.
        shutil.rmtree(remote / "v1")
        new = {"SCANWRIGHT_CACHE": str(tmp_path / "other")}
        again = place.doit("farm", f"scheduler={address}", *WORDS, env=shared | new)
        assert again.code == 0 and again.out == out, again.err
        new = {"SCANWRIGHT_CACHE": str(tmp_path / "third")}
        done = place.doit("farm", f"scheduler={address}", *WORDS, env=new)
        assert done.code == 1
        assert done.errors[0].startswith("error: farm: 2 of 2 results are in caches of the workers")


@pytest.mark.slow
def test_what_kills_every_worker_is_given_up(tmp_path: Path) -> None:
    place = Place.new(tmp_path / "place")
    none = {"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0"}
    words = ("target=cuda-sm90", "params=none", "workers=1")
    with subprocess.Popen(
        place.argv("farm", *words), cwd=place.work, env=place.env(none),
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    ) as farm:  # fmt: skip
        what, _, said = kill_one_that_compiles(farm)
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert errors == [
        f"error: farm: {what}: every worker that tried it died, most likely out of memory"
    ], said
    assert farm.returncode == 1


def test_one_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    place = Place.new(tmp_path / "place")
    bad = place.work / "bad"
    bad.mkdir()
    (bad / "config.json").write_text('{"model_type": "no_such"}')
    (bad / "model.safetensors").write_bytes(b"")
    done = place.doit("farm", "model=bad,tiny", "target=cuda-sm90", "workers=1", "params=none",
                      "--no-proof")  # fmt: skip
    assert done.code == 1
    (error,) = done.errors
    assert error.startswith(f"error: farm: {bad} cuda-sm90 b2-p8: config.json: model_type = ")
    assert done.out.startswith(f"{place.work / 'tiny'} cuda-sm90 b2-p8  proof disabled  ")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("scheduler=tcp://127.0.0.1:1",), "scheduler=tcp://127.0.0.1:1: cannot be reached ("),
        (("scheduler=nonsense://x",), "scheduler=nonsense://x: cannot be reached ("),
        (("workers=0",), "workers=0: expected a number of processes, 1 or more"),
        (("target=cuda-sm9?,nope*",), "target=nope*: matches no recipe: "),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path: Path, words: tuple[str, ...], error: str) -> None:
    done = Place.new(tmp_path / "place").doit("farm", *words)
    assert done.code != 0 and len(done.errors) == 1, done.err
    assert done.errors[0].startswith(f"error: {error}")


def test_a_worker_of_another_version_is_refused() -> None:
    with pytest.raises(UserError, match=r"other sources or tools.* install the same version"):
        farm_worker.compile_triple({}, select.parts, True, "0" * 64, lambda event: None)


def test_without_the_extra_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    farm = Farm(Place.new(tmp_path / "place").store, [], select.parts)
    with pytest.raises(UserError, match=r"pip install 'scanwright\[build,farm\]'"):
        farm.run(None)


def test_a_machine_is_not_filled_with_compilers() -> None:
    assert local_workers(1) == 1 and local_workers(1000) == max(2, (os.cpu_count() or 1) // 4)
