"""Actions run once, also with two processes at once, and survive being killed at any point."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from artifacts.actions import Action, Result, differences, explain, run
from artifacts.records import action_key, decode_record
from artifacts.store import Store
from runtime.errors import UserError

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


def writing(text: str, calls: list[str] | None = None) -> Callable[[Path], dict[str, Path]]:
    def produce(scratch: Path) -> dict[str, Path]:
        assert list(scratch.iterdir()) == []
        if calls is not None:
            calls.append(text)
        (scratch / "file").write_text(text)
        return {"out": scratch / "file"}

    return produce


def in_scratch(store: Store) -> list[str]:
    return [p.name for p in (store.root / "scratch").glob("*/*")]


def test_second_run_is_a_hit_with_the_same_result(store: Store) -> None:
    calls: list[str] = []
    action = Action("s", {"x": [1, 2]}, {"model": "m"})
    first = run(store, action, writing("one", calls), meta=lambda: {"calls": len(calls)})
    again = run(Store(store.root), action, writing("two", calls), meta={"calls": 9})
    assert (first.hit, again.hit, calls) == (False, True, ["one"])
    assert again.outputs == first.outputs and again.meta == first.meta == {"calls": 1}
    assert store.path(again.outputs["out"]).read_text() == "one"
    assert in_scratch(store) == []
    other = run(store, Action("s", {"x": [2, 1]}), writing("three", calls))
    assert not other.hit and calls == ["one", "three"]


def test_about_is_not_part_of_the_key() -> None:
    keys = {
        Action("s", {"a": 1, "b": 2}, {"model": "m"}).key,
        Action("s", {"b": 2, "a": 1}, {"model": "n"}).key,
    }
    assert keys == {hashlib.sha256(b'{"fields":{"a":1,"b":2},"stage":"s"}').hexdigest()}
    assert Action("t", {"a": 1, "b": 2}).key not in keys
    with pytest.raises(ValueError, match="nan has no JSON form"):
        _ = Action("s", {"a": float("nan")}).key


def test_damaged_output_is_told_once_and_made_again(
    store: Store, capfd: pytest.CaptureFixture
) -> None:
    action = Action("s", {})
    path = store.path(run(store, action, writing("right")).outputs["out"])
    path.chmod(0o600)
    path.write_text("wrong")
    assert not run(store, action, writing("right")).hit
    assert path.read_text() == "right"
    assert capfd.readouterr().err.count("building again") == 1
    assert run(store, action, writing("right")).hit


def test_failed_action_leaves_nothing(store: Store) -> None:
    def fail(scratch: Path) -> dict[str, Path]:
        (scratch / "half").write_text("half")
        raise UserError("no")

    with pytest.raises(UserError, match="no"):
        run(store, Action("s", {}), fail)
    for files, error in (
        (lambda s: {}, ValueError),
        (lambda s: {"a": s / "missing"}, UserError),
        (lambda s: {"a": s}, UserError),
    ):
        with pytest.raises(error):
            run(store, Action("s", {}), files)
    with pytest.raises(ValueError, match="has no JSON form"):
        run(store, Action("s", {}), writing("x"), meta=Path("x"))
    assert in_scratch(store) == [] and list((store.root / "actions").iterdir()) == []
    assert not run(store, Action("s", {}), writing("x")).hit


def test_outputs_inside_scratch_move_and_others_stay(store: Store, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("kept")

    def produce(scratch: Path) -> dict[str, Path]:
        (scratch / "x").write_text("x")
        return {"a": scratch / "x", "b": scratch / "x", "c": outside}

    result = run(store, Action("s", {}), produce)
    assert result.outputs["a"] == result.outputs["b"] != result.outputs["c"]
    assert outside.read_text() == "kept"
    outside.write_text("changed")
    assert store.verify(result.outputs["c"])


# Two processes


SLOW = """
import sys, time
from pathlib import Path
from artifacts.actions import Action, run
from artifacts.store import Store
root = Path(sys.argv[1])
def produce(scratch):
    with (root / "log").open("a") as log:
        log.write("produced\\n")
    while not (root / "go").exists():
        time.sleep(0.01)
    (scratch / "x").write_text("x")
    return {"x": scratch / "x"}
result = run(Store(root / "cache"), Action("slow", {}, {"model": "m"}), produce)
print(result.hit, result.outputs["x"].size)
"""


def start(code: str, *args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_two_slow(root: Path) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    """A process in the middle of an action, and one that waits for it and has said so."""
    first = start(SLOW, root)
    while not (root / "log").exists():
        assert first.poll() is None
        time.sleep(0.01)
    second = start(SLOW, root)
    assert second.stderr is not None
    watchdog = threading.Timer(30, second.kill)
    watchdog.start()
    line = second.stderr.readline()
    watchdog.cancel()
    if not line:
        first.kill()
    assert line == "waiting for another build of slow (model=m)\n"
    return first, second


def test_two_processes_make_it_once_and_the_second_says_that_it_waits(tmp_path: Path) -> None:
    first, second = start_two_slow(tmp_path)
    (tmp_path / "go").touch()
    assert first.communicate(timeout=60) == ("False 1\n", "")
    assert second.communicate(timeout=60) == ("True 1\n", "")
    assert (first.returncode, second.returncode) == (0, 0)
    assert (tmp_path / "log").read_text() == "produced\n"


def test_waiting_process_takes_over_when_the_builder_is_killed(tmp_path: Path) -> None:
    first, second = start_two_slow(tmp_path)
    first.kill()
    first.communicate()
    (tmp_path / "go").touch()
    assert second.communicate(timeout=60) == ("False 1\n", "")
    assert (tmp_path / "log").read_text() == "produced\n" * 2
    assert len(list((tmp_path / "cache/actions").iterdir())) == 1


# kill -9


BUILDER = """
import random, sys, time
from pathlib import Path
from artifacts.actions import Action, run
from artifacts.store import Store
root, seed = Path(sys.argv[1]), int(sys.argv[2])
store = Store(root / "cache", rehash_limit=1 << 19)
rng = random.Random(seed)
numbers = list(range(24))
rng.shuffle(numbers)
print("ready", flush=True)
for n in numbers * 100:
    def produce(scratch):
        with (scratch / "big").open("wb", buffering=0) as f:
            for part in range(16):
                f.write(b"%d big %06d " % (n, part) * 4096)
                time.sleep(rng.random() * 0.002)
        (scratch / "small").write_text(f"{n} small")
        return {"big": scratch / "big", "small": scratch / "small", "copied": root / "source"}
    if rng.random() < 0.3:
        store.forget(Action("kill", {"n": n}).key)  # so that there is always something to do
    with store.using():
        result = run(store, Action("kill", {"n": n}), produce, meta={"n": n})
        store.link(result.outputs["big"], root / "build" / str(n) / "big")
        store.link(result.outputs["small"], root / "build" / str(n) / "small")
"""


def expected(n: int, name: str) -> bytes:
    if name == "copied":
        return b"source" * 1000
    if name == "small":
        return f"{n} small".encode()
    return b"".join(b"%d big %06d " % (n, part) * 4096 for part in range(16))


def check_everything_visible(root: Path) -> int:
    """Every record, blob and linked file that is there is complete and right; counts records.

    What builders are to do with damage they find is another matter: here there must be none.
    """
    blobs = {p.name: p for p in (root / "cache/blobs").glob("*/*") if p.suffix == ""}
    for name, path in blobs.items():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == name
    records = list((root / "cache/actions").glob("*.json"))
    for path in records:
        record = decode_record(path.read_bytes(), path.stem)
        assert set(record.outputs) == {"big", "small", "copied"}
        assert record.meta == record.fields
        for name, blob in record.outputs.items():
            assert blobs[blob.sha256].read_bytes() == expected(record.fields["n"], name)
    for path in (root / "build").glob("*/[!.]*"):
        assert path.read_bytes() == expected(int(path.parent.name), path.name)
    return len(records)


def test_kill_at_random_points_leaves_nothing_wrong(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    (tmp_path / "source").write_bytes(b"source" * 1000)
    rng = random.Random(20)
    interrupted = kills = 0
    for turn in range(16):
        builders = [start(BUILDER, tmp_path, 2 * turn + k) for k in range(2)]
        for builder in builders:
            assert builder.stdout is not None and builder.stdout.readline() == "ready\n"
        for builder in builders:
            time.sleep(rng.random() * 0.15)
            assert builder.poll() is None
            builder.kill()
            kills += 1
        for builder in builders:
            err = builder.communicate()[1]
            assert "Error" not in err and "building again" not in err, err
        interrupted += any((tmp_path / "cache/scratch").glob("*/*/*"))
        check_everything_visible(tmp_path)
    assert kills >= 30
    assert interrupted >= 5, "the kills came at points where nothing was going on"

    store = Store(tmp_path / "cache")
    for n in range(24):
        run(store, Action("kill", {"n": n}), lambda _, n=n: rebuild(tmp_path, n), meta={"n": n})
        store.link(store.put_bytes(f"{n} small".encode()), tmp_path / f"build/{n}/small")
    assert check_everything_visible(tmp_path) == 24
    assert not list((tmp_path / "build").glob("*/.*")), "unfinished links are cleaned up"
    left = {p.name.removesuffix(".lock") for p in (tmp_path / "cache/scratch").iterdir()}
    assert len(left) == 1, "scratch of killed processes is cleaned up"
    assert capfd.readouterr().err == ""


RESUMED = """
import os, signal, sys
from pathlib import Path
from artifacts.actions import Action, run
from artifacts.store import Store
store, stop = Store(sys.argv[1]), int(sys.argv[2])
def produce(work):
    with (work / "out").open("a") as out:
        for n in range(out.tell(), 9):
            if n == stop:
                os.kill(os.getpid(), signal.SIGKILL)
            out.write(str(n))
            out.flush()
    print("made from", n)
    return {"out": work / "out"}
result = run(store, Action("long", {}), produce, resumed=True)
print(result.hit, store.path(result.outputs["out"]).read_text())
"""


def test_a_long_action_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    work = tmp_path / "work" / Action("long", {}).key
    for stop in (4, 7):
        killed = start(RESUMED, tmp_path, stop)
        assert killed.communicate()[0] == "" and killed.returncode == -signal.SIGKILL
        assert (work / "out").read_text() == "012345678"[:stop]
    for hit in (False, True):
        done = start(RESUMED, tmp_path, 99)
        assert done.communicate()[0].endswith(f"{hit} 012345678\n")
    assert list((tmp_path / "work").iterdir()) == []


def test_a_failed_long_action_leaves_only_what_it_kept(store: Store) -> None:
    action = Action("long", {})

    def fails(work: Path) -> dict[str, Path]:
        (work / "out" / "empty").mkdir(parents=True)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        run(store, action, fails, resumed=True)
    assert list((store.root / "work").iterdir()) == []

    def interrupted(work: Path) -> dict[str, Path]:
        (work / "part").write_text("x")
        return fails(work)

    with pytest.raises(RuntimeError):
        run(store, action, interrupted, resumed=True)
    assert [p.name for p in (store.root / "work" / action.key).iterdir()] == ["part"]


def rebuild(root: Path, n: int) -> dict[str, Path]:
    folder = root / "again"
    folder.mkdir(exist_ok=True)
    for name in ("big", "small"):
        (folder / name).write_bytes(expected(n, name))
    return {"big": folder / "big", "small": folder / "small", "copied": root / "source"}


STEPS = frozenset(
    "open write close fsync replace rename link unlink chmod mkdir rmdir utime flock".split()
)


def kill_at_every_step(root: Path, damaged: bool) -> int:
    """Run a build in forks, each killed before one more of its file operations; counts them.

    After each, what is visible must be right, and a build by the next process must end right.
    `damaged`: the build finds a truncated blob, and a file to replace where it links to.
    """
    for step in range(1000):
        here = root / str(step)
        (here / "build" / "3").mkdir(parents=True)
        (here / "source").write_bytes(expected(3, "copied"))
        if damaged:
            result = build_and_link(here)
            path = Store(here / "cache").path(result.outputs["big"])
            path.unlink()
            path.write_bytes(b"truncated")
        child = os.fork()
        if child == 0:
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, 2)
            seen = 0

            def hook(frame: object, event: str, called: object, step: int = step) -> None:
                nonlocal seen
                if event == "c_call" and getattr(called, "__name__", "") in STEPS:
                    if seen == step:
                        os.kill(os.getpid(), signal.SIGKILL)
                    seen += 1

            sys.setprofile(hook)
            build_and_link(here)
            sys.setprofile(None)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if damaged:  # which the record goes on naming until it is put right
            for path in (here / "cache/blobs").glob("*/*"):
                data = path.read_bytes()
                assert data == b"truncated" or hashlib.sha256(data).hexdigest() == path.name
        else:
            check_everything_visible(here)
        build_and_link(here)
        assert check_everything_visible(here) == 1
        assert sorted(p.name for p in (here / "build/3").iterdir()) == ["big", "small"]
        shutil.rmtree(here)
        if os.waitstatus_to_exitcode(status) == 0:
            return step
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    raise AssertionError("the build does not end")


def build_and_link(root: Path) -> Result:
    store = Store(root / "cache")

    def produce(scratch: Path) -> dict[str, Path]:
        for name in ("big", "small"):
            (scratch / name).write_bytes(expected(3, name))
        return {"big": scratch / "big", "small": scratch / "small", "copied": root / "source"}

    with store.using():
        result = run(store, Action("kill", {"n": 3}), produce, meta={"n": 3})
        for name in ("big", "small"):
            store.link(result.outputs[name], root / "build/3" / name)
    return result


@pytest.mark.parametrize("damaged", [False, True])
def test_kill_before_each_file_operation_leaves_nothing_wrong(
    tmp_path: Path, damaged: bool
) -> None:
    # In a process of its own, which has no other threads, so that it can fork; in memory where
    # that can be, as thousands of fsyncs would only wait for the disk.
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_actions as t;"
        f"print(t.kill_at_every_step(t.Path(sys.argv[2]), {damaged}))"
    )
    memory = Path("/dev/shm")
    parent = memory if memory.is_dir() and os.access(memory, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=parent) as place:
        process = start(code, Path(__file__).parent, place)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert int(out) > 50


# Explain


def fields(**changed: object) -> dict[str, object]:
    base = {
        "flags": ["-a", "-b"],
        "tools": {"jax": "0.10.2", "iree": "3.13.0"},
        "mlir": "a" * 64,
        "cpu": None,
    }
    return base | changed


def test_explain_names_the_fields_that_differ(store: Store) -> None:
    def action(model: str, **changed: object) -> Action:
        return Action("compile", fields(**changed), {"model": model, "target": "cpu"})

    new = action("m", flags=["-a", "-c", "-d"], tools={"jax": "0.11"}, mlir="b" * 64, cpu="zen4")
    assert explain(store, new) == [
        "compile (model=m, target=cpu): will run, no compile is in the cache yet"
    ]
    run(store, action("m"), writing("x"))
    run(store, action("other", cpu="z"), writing("y"))
    run(store, Action("emit", fields(), {"model": "m", "target": "cpu"}), writing("z"))
    assert explain(store, action("m")) == [
        f"compile (model=m, target=cpu): cached (1 file, 1 bytes, key {action('m').key[:12]})"
    ]
    assert explain(store, new) == [
        "compile (model=m, target=cpu): will run, 6 of its inputs differ from the last cached "
        "compile (model=m, target=cpu)",
        '  cpu         null -> "zen4"',
        '  flags[1]    "-b" -> "-c"',
        '  flags[2]    (absent) -> "-d"',
        "  mlir        aaaaaaaaaaaa… -> bbbbbbbbbbbb…",
        '  tools.iree  "3.13.0" -> (absent)',
        '  tools.jax   "0.10.2" -> "0.11"',
    ]
    lines = explain(store, action("other", cpu="y"))
    assert lines[0].endswith("compile (model=other, target=cpu)")
    assert lines[1:] == ['  cpu  "z" -> "y"']


def test_explain_compares_with_the_last_used(store: Store) -> None:
    for n in (1, 2, 1):
        run(store, Action("s", {"n": n}), writing(str(n)))
        time.sleep(0.01)
    assert explain(store, Action("s", {"n": 3}))[1:] == ["  n  1 -> 3"]


def test_explain_tells_of_damage_and_changes_nothing(
    store: Store, capfd: pytest.CaptureFixture
) -> None:
    action = Action("s", {})
    path = store.path(run(store, action, writing("x")).outputs["out"])
    path.chmod(0o600)
    path.write_text("longer")
    lines = explain(store, action)
    assert "not all right" in lines[0] and lines[1] == f"  out: {path} has 6 bytes, expected 1"
    assert path.read_text() == "longer" and capfd.readouterr().err == ""


def test_differences_tells_kinds_apart() -> None:
    assert list(differences({"a": 1}, {"a": True})) == [("a", "1", "true")]
    assert list(differences({"a": None}, {})) == [("a", "null", "(absent)")]
    assert list(differences([{"b": {"c": 1}}], [{"b": {"c": 1.5}}])) == [("[0].b.c", "1", "1.5")]
    assert list(differences({"a": {}}, {"a": []})) == [("a", "{}", "[]")]
    assert list(differences({"a": [1, {"b": 2}]}, json.loads('{"a": [1, {"b": 2}]}'))) == []
    assert action_key("s", {"a": (1, 2)}) == action_key("s", {"a": [1, 2]})
