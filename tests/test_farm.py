"""`doit farm`: real worker processes on the loopback, one killed in mid-compile."""

from __future__ import annotations

import contextlib
import json
import os
import re
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
WORDS = ("target=cuda-sm90,cuda-sm80", "shape=b2-p8")


def program(place: Place, *argv: str, **settings: str) -> subprocess.Popen[str]:
    """A program of the farm in the background, its output in a pipe."""
    return subprocess.Popen(
        [sys.executable, "-m", *argv], cwd=place.work, env=place.env(settings),
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@contextlib.contextmanager
def cluster(place: Place, *caches: Path) -> Iterator[tuple[str, list[int]]]:
    """A scheduler and a worker for each of `caches`: its address, and the workers' processes."""
    file = place.home / "scheduler.json"
    known = ("--scheduler-file", str(file), "--no-dashboard")
    started = [program(place, "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port",
                       "0", *known)]  # fmt: skip
    try:
        while not file.exists():
            assert started[0].poll() is None, started[0].communicate()
            time.sleep(0.05)
        address = json.loads(file.read_text())["address"]
        options = ("--no-nanny", "--nthreads", "1", "--no-dashboard", "--host", "127.0.0.1")
        for cache in caches:
            started.append(program(place, "distributed.cli.dask_worker", address, *options,
                                   SCANWRIGHT_CACHE=str(cache)))  # fmt: skip
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


@pytest.mark.slow
def test_a_worker_killed_in_mid_compile_is_made_up_for(tmp_path: Path) -> None:
    place = Place.new(tmp_path / "place")
    with cluster(place, place.cache, place.cache) as (address, workers):
        argv = place.argv("farm", f"scheduler={address}", *WORDS)
        farm = subprocess.Popen(
            argv, cwd=place.work, env=place.env(), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert farm.stderr is not None and farm.stdout is not None
        killed, lines = None, []
        for line in farm.stderr:
            lines.append(line)
            compiling = re.match(r"farm: (.*): compile at \S+ \(process (\d+)\)", line)
            if compiling and killed is None:
                while not running(str(place.cache / "scratch" / compiling[2])):
                    time.sleep(0.01)  # until its compiler is there
                killed = compiling
                os.kill(int(compiling[2]), signal.SIGKILL)
        out, code = farm.stdout.read(), farm.wait()
        text = "".join(lines)
        assert code == 0 and killed is not None, text
        assert int(killed[2]) in workers
        (again,) = re.findall(r"farm: (.*): \S+ \(process (\d+)\) was lost, started again", text)
        assert again == (killed[1], killed[2]), text
        # Its compiler ended with it.
        assert running(str(place.cache / "scratch" / killed[2])) == []

        rows = re.findall(r"(\S+) (\S+) (\S+)  proof not-run  ([\d,]+) bytes  sha256:(\w+)", out)
        assert [row[1] for row in rows] == ["cuda-sm80", "cuda-sm90"], out
        for *_, size, digest in rows:
            path = place.cache / "blobs" / digest[:2] / digest
            assert path.stat().st_size == int(size.replace(",", ""))

        # The build finds all of it (weights no compile needs); so does a run with own processes.
        assert place.doit("compile", "target=cuda-sm90").ran == {"convert"}
        done = place.doit("farm", "workers=1", *WORDS)
        assert done.code == 0 and done.err.count(": cached, proof not-run") == 2, done.err
        assert done.out == out
        # What this machine cannot get is told.
        done = place.doit("farm", f"scheduler={address}", *WORDS,
                          env={"SCANWRIGHT_CACHE": str(tmp_path / "other")})  # fmt: skip
        assert done.code == 1
        assert done.errors[0].startswith("error: farm: 2 of 2 results are in caches of the workers")


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
def test_what_cannot_be_is_one_line(
    tmp_path: Path, words: tuple[str, ...], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
