"""The cache is bounded, oldest first, and never loses what a bundle or a running build uses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from artifacts import gc
from artifacts.actions import Action, run
from artifacts.gc import collect, parse_size, size_text
from artifacts.records import Blob
from artifacts.store import Store
from runtime.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
KB = 1000  # of a blob; a record adds less than 500 bytes


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


def add(store: Store, n: int, *datas: bytes, last_use: int) -> list[Blob]:
    """A result of stage `s` with field `n` and these outputs, last used at second `last_use`."""

    def produce(scratch: Path) -> dict[str, Path]:
        for index, data in enumerate(datas):
            (scratch / str(index)).write_bytes(data)
        return {str(index): scratch / str(index) for index in range(len(datas))}

    action = Action("s", {"n": n})
    result = run(store, action, produce)
    os.utime(store.record_path(action.key), (last_use, last_use))
    return list(result.outputs.values())


def present(store: Store) -> list[int]:
    """The `n` of all results that are still hits."""
    found = []
    for n in range(10):
        record = store.peek(Action("s", {"n": n}).key)
        if record is not None:
            assert all(store.verify(blob) for blob in record.outputs.values())
            found.append(n)
    return found


def data(n: int, size: int = 10 * KB) -> bytes:
    return bytes([n]) * size


def bundle(build_dir: Path, text: str) -> None:
    path = build_dir / "model" / "target" / "shape" / "manifest.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_oldest_go_first_until_the_bound_holds(store: Store, tmp_path: Path) -> None:
    for n, last_use in enumerate([30, 10, 40, 20]):
        add(store, n, data(n), last_use=last_use)
    report = collect(store, 50 * KB, tmp_path / "build")
    assert (report.removed, report.freed, present(store)) == (0, 0, [0, 1, 2, 3])
    report = collect(store, 25 * KB, tmp_path / "build")
    assert present(store) == [0, 2]
    assert report.removed == 2 and 20 * KB <= report.freed <= 21 * KB
    assert report.kept <= 25 * KB and report.in_use == 0
    assert str(report).startswith("removed 2 results, 20.")
    on_disk = [p for part in ("blobs", "actions") for p in (store.root / part).rglob("*")]
    assert sum(p.stat().st_size for p in on_disk if p.is_file()) == report.kept
    assert collect(store, 0, tmp_path / "build").kept == 0
    assert present(store) == []


def unfinished(store: Store, key: str, size: int, age_s: float) -> Path:
    """What a killed build left `age_s` seconds ago."""
    path = store.root / "work" / key / "out" / "part"
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(size))
    when = time.time() - age_s
    os.utime(path, (when, when))
    return path


def test_what_a_killed_build_left_goes_when_it_is_old_or_too_much(
    store: Store, tmp_path: Path
) -> None:
    add(store, 0, data(0), last_use=10)
    lost = unfinished(store, "a" * 64, 10, 8 * 24 * 3600)
    done = unfinished(store, Action("s", {"n": 0}).key, 10, 1)
    kept = unfinished(store, "b" * 64, 20 * KB, 6 * 24 * 3600)
    strange = unfinished(store, "strange", 10, 1)
    report = collect(store, 31 * KB, tmp_path / "build")
    assert not lost.exists() and not done.exists() and not strange.exists() and kept.exists()
    assert (report.removed, report.freed, present(store)) == (0, 0, [0])
    assert 30 * KB <= report.kept <= 31 * KB
    report = collect(store, 25 * KB, tmp_path / "build")
    assert kept.exists() and present(store) == [], "the last used goes last"
    report = collect(store, 10 * KB, tmp_path / "build")
    assert not kept.parent.parent.exists() and (report.removed, report.freed) == (1, 20 * KB)


def test_a_hit_makes_a_result_young(store: Store, tmp_path: Path) -> None:
    for n in range(3):
        add(store, n, data(n), last_use=n + 1)
    assert store.lookup(Action("s", {"n": 0}).key) is not None
    store.peek(Action("s", {"n": 1}).key)
    store.record_path(Action("s", {"n": 1}).key).read_bytes()
    collect(store, 11 * KB, tmp_path)
    assert present(store) == [0]


def test_shared_blob_stays_while_one_result_has_it(store: Store, tmp_path: Path) -> None:
    shared, _ = add(store, 0, data(7), data(0), last_use=1)
    add(store, 1, data(7), data(1), last_use=2)
    report = collect(store, 21 * KB, tmp_path)
    assert present(store) == [1] and store.verify(shared)
    assert 10 * KB <= report.freed <= 11 * KB


@pytest.mark.parametrize("damage", ["none", "schema", "cut"])
def test_what_a_bundle_names_stays_whatever_its_age(
    store: Store, tmp_path: Path, damage: str
) -> None:
    used, beside = add(store, 0, data(0), data(8), last_use=1)
    add(store, 1, data(1), last_use=2)
    orphan = store.put_bytes(data(9))
    lost = store.put_bytes(data(6))
    files = {"module": {"sha256": used.sha256}, "params": {"sha256": orphan.sha256}}
    text = json.dumps({"schema": 99 if damage == "schema" else 1, "files": files, "z": 1})
    bundle(tmp_path / "build", text[:-9] if damage == "cut" else text)
    report = collect(store, 0, tmp_path / "build")
    assert present(store) == [0]
    assert store.verify(used) and store.verify(beside) and store.verify(orphan)
    assert not store.verify(lost)
    assert report.in_use == 30 * KB and report.kept < 31 * KB and report.removed == 2
    (tmp_path / "build/model/target/shape/manifest.json").unlink()
    assert collect(store, 0, tmp_path / "build").kept == 0


def test_unreadable_manifest_stops_before_anything_is_removed(store: Store, tmp_path: Path) -> None:
    add(store, 0, data(0), last_use=1)
    (tmp_path / "build/a/b/c/manifest.json").mkdir(parents=True)
    with pytest.raises(UserError, match=r"manifest\.json: Is a directory"):
        collect(store, 0, tmp_path / "build")
    assert present(store) == [0]


def test_broken_records_stale_scratch_and_locks_go(store: Store, tmp_path: Path) -> None:
    (blob,) = add(store, 0, data(0), last_use=1)
    store.record_path(Action("s", {"n": 0}).key).write_text("{")
    stale = store.root / "scratch" / "123-abc"
    stale.mkdir()
    (stale / "half").write_text("half")
    stale.with_name("123-abc.lock").touch()
    report = collect(store, 9 * KB, tmp_path)
    assert not store.verify(blob) and report.kept == 0 and not stale.exists()
    assert not stale.with_name("123-abc.lock").exists()
    assert sorted(p.name for p in (store.root / "locks").iterdir()) == ["blobs.lock", "store.lock"]
    assert run(store, Action("s", {"n": 0}), lambda _: {"x": Path(__file__)}).hit is False


def test_interrupted_collection_leaves_no_record_without_its_blobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = Path.unlink, 0

    def unlink(path: Path, missing_ok: bool = False) -> None:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        real(path, missing_ok)

    for steps in range(7):
        store = Store(tmp_path / str(steps))
        for n in range(3):
            add(store, n, data(n), data(n + 3), last_use=n + 1)
        left = steps
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Path, "unlink", unlink)
            collect(store, 0, tmp_path)
        assert present(store) == list(range(3 - len(present(store)), 3))
        assert collect(store, 0, tmp_path).kept == 0


BUILD = """
import sys, time
from pathlib import Path
from artifacts.actions import Action, run
from artifacts.store import Store
root = Path(sys.argv[1])
store = Store(root / "cache")
with store.using():
    result = run(store, Action("s", {"n": 0}), lambda _: {})
    print(result.hit, flush=True)
    while not (root / "go").exists():
        time.sleep(0.01)
    store.link(result.outputs["0"], root / "linked")
"""

COLLECT = """
import sys
from pathlib import Path
from artifacts.gc import collect
from artifacts.store import Store
root = Path(sys.argv[1])
print(collect(Store(root / "cache"), 0, root / "build").removed)
"""


def start(code: str, root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, str(root)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_collection_waits_for_a_running_build(store: Store, tmp_path: Path) -> None:
    add(store, 0, data(0), last_use=1)
    build = start(BUILD, tmp_path)
    assert build.stdout is not None and build.stdout.readline() == "True\n"
    cleanup = start(COLLECT, tmp_path)
    assert cleanup.stderr is not None
    assert cleanup.stderr.readline() == "waiting for running builds to end\n"
    assert present(store) == [0]
    (tmp_path / "go").touch()
    assert cleanup.communicate(timeout=60) == ("1\n", "")
    assert build.communicate(timeout=60) == ("", "")
    assert (tmp_path / "linked").read_bytes() == data(0)
    assert present(store) == []


def test_build_waits_for_a_running_collection(store: Store, tmp_path: Path) -> None:
    add(store, 0, data(0), last_use=1)
    (tmp_path / "go").touch()
    with store.alone():
        build = start(BUILD, tmp_path)
        assert build.stderr is not None
        assert build.stderr.readline() == "waiting for a cache cleanup in another process\n"
        assert not (tmp_path / "linked").exists()
    assert build.communicate(timeout=60) == ("True\n", "")
    assert (tmp_path / "linked").read_bytes() == data(0)


def test_collection_inside_a_build_of_the_same_process_is_refused(store: Store) -> None:
    with store.using(), store.using(), pytest.raises(RuntimeError, match="in use"):
        collect(store, 0, store.root)
    start = time.monotonic()
    collect(store, 0, store.root)
    assert time.monotonic() - start < 1


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("10G", 10 << 30),
        ("500m", 500 << 20),
        ("1.5GiB", 3 << 29),
        (" 2 KB ", 2048),
        ("3TB", 3 << 40),
        ("7B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1G", "10X", "1e9", "1,5G", "ten", "1.G", "10GG", "٣"])
def test_wrong_sizes_are_one_line(text: str) -> None:
    with pytest.raises(UserError, match=r"expected a number of bytes.*10G") as caught:
        parse_size(text)
    assert "\n" not in str(caught.value) and repr(text) in str(caught.value)


def test_size_text() -> None:
    sizes = [0, 1023, 1536, 5 << 20, 3 << 29, 1 << 41]
    assert [size_text(n) for n in sizes] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 MiB",
        "1.5 GiB",
        "2.0 TiB",
    ]
    assert gc.GcReport(1, 1024, 2048, 0).kept == 2048


def test_downloads_count_and_go_by_their_last_use(store: Store, tmp_path: Path) -> None:
    add(store, 1, data(1), last_use=2_000)
    for name, last_use in (("old", 1_000), ("new", 3_000)):
        directory = store.root / "hub" / "org--model" / name
        directory.mkdir(parents=True)
        (directory / "model.safetensors").write_bytes(data(7, 50 * KB))
        os.utime(directory, (last_use, last_use))
    report = collect(store, 70 * KB, tmp_path / "build")
    assert (report.removed, present(store)) == (1, [1])
    assert [path.name for path in (store.root / "hub" / "org--model").iterdir()] == ["new"]
    collect(store, 60 * KB, tmp_path / "build")
    assert present(store) == [] and (store.root / "hub" / "org--model" / "new").is_dir()
