"""The remote cache in a shared directory: what it brings, what it refuses, what it never shows."""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from artifacts.actions import Action, Result, explain, run
from artifacts.records import Blob, Record, canonical, encode_record
from artifacts.remote import WITHOUT_WEIGHTS, Remote, from_environment
from artifacts.remote_files import FAILURES, PATIENCE
from artifacts.store import Store
from runtime.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
ACTION = Action("emit", {"x": 1}, {"model": "m"})
WEIGHTS = {"convert", "random-params"}


def producing(text: str = "right") -> Callable[[Path], dict[str, Path]]:
    def produce(scratch: Path) -> dict[str, Path]:
        (scratch / "a").write_text(text)
        (scratch / "b").write_text(text * 1000)
        return {"a": scratch / "a", "b": scratch / "b"}

    return produce


def refuse(scratch: Path) -> dict[str, Path]:
    raise AssertionError("it was not to be made here")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A directory with the result of ACTION."""
    made = filled(tmp_path, "first")
    assert not made.hit
    return tmp_path / "shared"


def filled(tmp_path: Path, name: str, **options: Any) -> Result:
    remote = Remote(str(tmp_path / "shared"), write=True, **options)
    return run(Store(tmp_path / name, remote=remote), ACTION, producing())


def reader(tmp_path: Path, name: str = "reader", **options: Any) -> Store:
    return Store(tmp_path / name, remote=Remote(str(tmp_path / "shared"), **options))


def files(shared: Path, kind: str) -> list[Path]:
    return sorted(path for path in (shared / "v1" / kind).rglob("*") if path.is_file())


def warnings(capfd: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning: ")]


def test_results_are_read_by_all_and_written_by_writers(
    shared: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store = reader(tmp_path)
    assert explain(store, ACTION) == [f"emit (model=m): in the remote cache {shared} (5005 bytes)"]
    found = run(store, Action("emit", {"x": 1}, {"model": "other words"}), refuse, meta="unused")
    assert (found.hit, found.remote) == (True, True)
    assert store.path(found.outputs["b"]).read_text() == "right" * 1000
    record = store.peek(ACTION.key)
    assert record is not None and record.about == {"model": "other words"}  # not the writer's
    run(store, Action("emit", {"x": 2}), producing("more"))
    assert len(files(shared, "actions")) == 1 and len(files(shared, "blobs")) == 2
    assert files(shared, "tmp") == [] and warnings(capfd) == []
    writer = Store(tmp_path / "w", remote=Remote(f"file://{shared}", write=True))
    run(writer, ACTION, refuse)
    writer.forget(ACTION.key)  # as for a module that failed its proof
    assert files(shared, "actions") == []
    assert not run(reader(tmp_path, "later"), ACTION, producing()).hit


def test_weights_are_taken_there_only_if_that_is_asked_for(tmp_path: Path) -> None:
    shared, action = tmp_path / "shared", Action("convert", {"x": 1})
    run(reader(tmp_path, "a", write=True), action, producing("weights"))
    run(reader(tmp_path, "b", write=True), Action("a later stage", {}), producing("what?"))
    assert not shared.exists()
    run(reader(tmp_path, "c", write=True, weights=True), action, producing("weights"))
    assert run(reader(tmp_path, "d"), action, refuse).remote


def test_every_stage_has_weights_or_has_none() -> None:
    """A stage that is not known here would be left out of the remote without a word."""
    found = set()
    for path in (ROOT / "artifacts").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and node.args:
                called = getattr(node.func, "attr", getattr(node.func, "id", None))
                first = node.args[0]
                if called in ("Action", "_run") and isinstance(first, ast.Constant):
                    found.add(first.value)
    assert found == WITHOUT_WEIGHTS | WEIGHTS


# Hostile files -----------------------------------------------------------------------------------


def change_blob(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(shared: Path) -> None:
        for path in files(shared, "blobs"):
            path.write_bytes(change(path.read_bytes()))

    return damage


def record_with(**changes: Any) -> Callable[[Path], None]:
    """A record with a right sum in the place of ACTION's."""

    def damage(shared: Path) -> None:
        (path,) = files(shared, "actions")
        body = json.loads(path.read_bytes())
        outputs = {name: Blob(**item) for name, item in body["outputs"].items()}
        given = {"outputs": outputs, **changes}
        parts = {k: given.get(k, body[k]) for k in ("key", "stage", "fields", "about", "meta")}
        path.write_bytes(encode_record(Record(outputs=given["outputs"], **parts)))

    return damage


def record_text(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(shared: Path) -> None:
        (path,) = files(shared, "actions")
        path.write_bytes(change(path.read_bytes()))

    return damage


def zeros(shared: Path) -> None:
    """Files without end."""
    for path in files(shared, "blobs"):
        path.unlink()
        path.symlink_to("/dev/zero")


GOOD = Blob("a" * 64, 5)
HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "wrong bytes": (change_blob(lambda data: b"x" + data[1:]), "does not match its sha256"),
    "truncated": (change_blob(lambda data: data[:-1]), "has 4 bytes, expected 5"),
    "empty": (change_blob(lambda data: b""), "has 0 bytes"),
    "longer": (change_blob(lambda data: data + b"x"), "has more than 5 bytes"),
    "endless": (zeros, "has more than 5 bytes"),
    "no blob": (lambda shared: shutil.rmtree(shared / "v1" / "blobs"), "is missing"),
    "record cut": (record_text(lambda data: data[:-10]), "its record is wrong"),
    "record empty": (record_text(lambda data: b""), "its record is wrong"),
    "record changed": (record_text(lambda data: data.replace(b"right", b"wrong", 1)
                                   .replace(b'"size":5}', b'"size":6}')), "its own sum"),
    "not a record": (record_text(lambda data: b"[1]"), "not a record of schema"),
    "deep": (record_text(lambda data: b"[" * 200_000), "its record is wrong"),
    "large": (record_text(lambda data: b" " * ((8 << 20) + 1)), "has more than"),
    "other fields": (record_with(fields={"x": 2}), "not the record of its key"),
    "other stage": (record_with(stage="compile"), "not the record of its key"),
    "other key": (record_with(key="b" * 64), "not the record of its key"),
    "path": (record_with(outputs={"../../x.npz": GOOD}), "is not a file's name"),
    "absolute": (record_with(outputs={"/etc/x": GOOD}), "is not a file's name"),
    "digest": (record_with(outputs={"a": Blob("../../x", 5)}), "expected a digest"),
    "size": (record_with(outputs={"a": Blob("a" * 64, -1)}), "expected a digest"),
    "escapes": (record_with(meta={"problem": "\x1b]0;title\x07"}), "has control characters"),
}  # fmt: skip


@pytest.mark.parametrize("damage", HOSTILE)
def test_what_is_wrong_there_is_a_miss_with_one_warning(
    damage: str, shared: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    change, said = HOSTILE[damage]
    change(shared)
    store = reader(tmp_path, write=True)
    made = run(store, ACTION, producing())
    assert (made.hit, made.remote) == (False, False)
    (told,) = warnings(capfd)
    assert said in told and told.startswith("warning: remote cache: emit (model=m): "), told
    assert "\x1b" not in told
    assert all(store.verify(blob) for blob in made.outputs.values())
    assert len(list((store.root / "blobs").glob("*/*"))) == 2  # what was made, nothing else
    # The writer has put right what it found wrong.
    assert run(reader(tmp_path, "next"), ACTION, refuse).remote
    assert warnings(capfd) == []


def test_a_directory_that_hangs_costs_a_bounded_time(
    shared: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A pipe that nobody writes to stands for a mount whose server is gone."""
    for path in files(shared, "blobs"):
        path.unlink()
        os.mkfifo(path)
    store, started = reader(tmp_path, timeout=0.3), time.monotonic()
    for number in range(5):
        (found,) = files(shared, "actions")
        other = Action("emit", {"number": number})
        place = shared / "v1" / "actions" / other.key[:2]
        place.mkdir(exist_ok=True)
        body = json.loads(found.read_bytes())
        outputs = {name: Blob(**item) for name, item in body["outputs"].items()}
        record = Record(other.key, "emit", dict(other.fields), {}, outputs, None)
        (place / f"{other.key}.json").write_bytes(encode_record(record))
        assert not run(store, other, producing(str(number))).hit
        (place / f"{other.key}.json").unlink()
    assert time.monotonic() - started < FAILURES * 0.3 + 30
    first, last = warnings(capfd)
    assert first.endswith("no answer within 0.3 s; going on without it")
    assert last.endswith("no answer within 0.3 s; left out for the rest of this run")


def test_a_slow_remote_is_left_out(
    shared: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """Each answer comes in time, and all of them together take too long."""
    from fsspec.implementations.local import LocalFileSystem

    opening, asked = LocalFileSystem._open, []

    def slowly(self: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        asked.append(path)
        time.sleep(0.3)
        return opening(self, path, *args, **kwargs)

    monkeypatch.setattr(LocalFileSystem, "_open", slowly)
    store = reader(tmp_path, timeout=0.5)
    for number in range(40):
        run(store, Action("emit", {"number": number}), producing())
    told = warnings(capfd)
    assert told[-1].endswith("left out for the rest of this run")
    assert "slow, " in told[-1] or len(told) > 1  # on a busy machine some come too late
    assert len(asked) <= PATIENCE * 0.5 / 0.3 + 1


def test_a_directory_that_cannot_be_written_fails_no_build(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "shared").write_text("a file")
    store = reader(tmp_path, write=True)
    for number in range(4):
        assert not run(store, Action("emit", {"number": number}), producing()).hit
    told = warnings(capfd)
    assert len(told) == FAILURES and told[-1].endswith("left out for the rest of this run")


# Kills -------------------------------------------------------------------------------------------

WRITER = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_remote as t
kill_at, moves = int(sys.argv[3]), 0
def seen(event, args):
    global moves
    copied = event == "shutil.copyfile" and "v1/tmp" in str(args[1])
    if not copied and not (event == "os.rename" and "v1/tmp" in str(args[0])):
        return
    moves += 1
    if moves == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
t.Remote("memory://")  # what it imports
sys.addaudithook(seen)
t.filled(Path(sys.argv[2]), "killed")
"""


@pytest.mark.parametrize("kill_at", range(1, 7))
def test_a_writer_killed_at_any_point_leaves_nothing_half(
    kill_at: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Three files go there, each copied under another name and then moved."""
    argv = [sys.executable, "-c", WRITER, str(ROOT / "tests"), str(tmp_path), str(kill_at)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, capture_output=True, text=True, env=env)
    assert done.returncode == -signal.SIGKILL, done.stderr
    shared = tmp_path / "shared"
    assert files(shared, "actions") == []
    for path in files(shared, "blobs"):
        assert path.read_text() in ("right", "right" * 1000)
    assert not run(reader(tmp_path), ACTION, producing()).hit
    assert not filled(tmp_path, "second").hit
    assert run(reader(tmp_path, "third"), ACTION, refuse).remote
    assert warnings(capfd) == []


# Settings ----------------------------------------------------------------------------------------


def test_settings_that_are_wrong_are_told(tmp_path: Path) -> None:
    assert from_environment({}) is None and from_environment({"SCANWRIGHT_REMOTE": ""}) is None
    there = {"SCANWRIGHT_REMOTE": "s3://user:secret@host/path"}
    remote = from_environment(there)
    assert remote is not None and not remote.write and not remote.weights
    assert remote.url == "s3://host/path"
    with pytest.raises(UserError, match="SCANWRIGHT_REMOTE_WRITE: found 'yes', expected 1"):
        from_environment({**there, "SCANWRIGHT_REMOTE_WRITE": "yes"})
    with pytest.raises(UserError, match="SCANWRIGHT_REMOTE_WEIGHTS: found '2', expected 1"):
        from_environment({**there, "SCANWRIGHT_REMOTE_WEIGHTS": "2"})
    for word in ("0", "-1", "soon", "nan", "inf"):
        with pytest.raises(UserError, match=f"TIMEOUT: found '{word}', expected seconds above 0"):
            from_environment({**there, "SCANWRIGHT_REMOTE_TIMEOUT": word})
    store = Store(tmp_path / "a", remote=Remote("s4://bucket"))
    with pytest.raises(UserError, match=r"s4://bucket: Protocol not known: s4; expected a dir"):
        run(store, ACTION, producing())


def test_a_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    store = Store(tmp_path / "a", remote=Remote("s3://bucket"))
    with pytest.raises(UserError, match=r"pip install 'scanwright\[remote\]'"):
        run(store, ACTION, producing())


def test_nothing_is_imported_before_something_is_missing(shared: Path, tmp_path: Path) -> None:
    filled(tmp_path, "warm")
    code = """if True:
        import sys
        from pathlib import Path
        from artifacts.actions import Action, run
        from artifacts.remote import from_environment
        from artifacts.store import Store
        store = Store(sys.argv[1], remote=from_environment())
        assert run(store, Action("emit", {"x": int(sys.argv[2])}), lambda scratch: {}).hit
        print("fsspec" in sys.modules)
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT), "SCANWRIGHT_REMOTE": str(shared)}
    for cache, imported in (("warm", "False"), ("new", "True")):
        argv = [sys.executable, "-c", code, str(tmp_path / cache), "1"]
        done = subprocess.run(argv, capture_output=True, text=True, env=env, check=True)
        assert done.stdout.split() == [imported]


def test_the_records_of_hostile_tests_are_read_as_right(shared: Path, tmp_path: Path) -> None:
    """Unchanged, a record made by `record_with` is one that would be used."""
    record_with()(shared)
    assert run(reader(tmp_path), ACTION, refuse).remote
    (path,) = files(shared, "actions")
    assert canonical(json.loads(path.read_bytes())) == path.read_bytes()
