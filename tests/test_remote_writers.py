"""What a machine that may write takes to the remote cache unmade, and what it clears away."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from test_remote import ACTION, files, producing, reader, refuse, warnings

from artifacts.actions import Action, run, share
from artifacts.remote import Remote
from artifacts.remote_files import FAILURES, STALE_S, SWEPT
from artifacts.store import Store


def test_what_a_machine_has_had_already_is_taken_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a writer that uses it, and only what the remote lacks, for one look a result."""
    from fsspec.implementations.local import LocalFileSystem

    shared, weights = tmp_path / "shared", Action("convert", {"x": 1})
    actions = (ACTION, weights, Action("emit", {"x": 2}))
    made = [run(Store(tmp_path / "old"), action, producing(action.key)) for action in actions]

    def use(**options: Any) -> Store:
        store = reader(tmp_path, "old", **options)
        for action in actions:
            run(store, action, refuse)
        return store

    share(use())
    assert not shared.exists()  # it may only read
    store = use(write=True)
    store.path(made[2].outputs["a"]).chmod(0o644)
    store.path(made[2].outputs["a"]).write_text("damaged since")
    share(store)
    assert len(files(shared, "actions")) == 1 and len(files(shared, "blobs")) == 2
    assert run(reader(tmp_path), ACTION, refuse).remote

    looked, looking = [], LocalFileSystem.info
    monkeypatch.setattr(
        LocalFileSystem, "info", lambda *a, **k: looked.append(str(a[1])) or looking(*a, **k)
    )
    actions, times = (ACTION, weights), [path.stat().st_mtime_ns for path in shared.rglob("*")]
    store = use(write=True)
    for _ in range(2):
        share(store)
    assert looked == [str(shared / "v1" / "actions" / ACTION.key[:2] / f"{ACTION.key}.json")]
    assert [path.stat().st_mtime_ns for path in shared.rglob("*")] == times
    share(use(write=True, weights=True))
    assert run(reader(tmp_path, "other"), weights, refuse).remote
    looked.clear()
    store = reader(tmp_path, "third", write=True)
    run(store, ACTION, refuse)  # it came from there
    run(store, ACTION, refuse)
    share(store)
    assert looked == []


def test_a_remote_that_is_down_is_offered_little(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "shared").write_text("a file")
    for number in range(5):
        run(Store(tmp_path / "old"), Action("emit", {"number": number}), producing())
    store = reader(tmp_path, "old", write=True)
    for number in range(5):
        run(store, Action("emit", {"number": number}), refuse)
    share(store)
    told = warnings(capfd)
    assert len(told) == FAILURES and told[-1].endswith("left out for the rest of this run")


def test_what_killed_writers_left_is_cleared_away_once_it_is_old(tmp_path: Path) -> None:
    left = tmp_path / "shared" / "v1" / "tmp"
    left.mkdir(parents=True)
    old = time.time() - STALE_S - 60
    for number in range(SWEPT + 2):
        (left / f"{number:024}").write_text("a half")
        os.utime(left / f"{number:024}", (old, old))
    (left / "young").write_text("another writer is at it")
    run(reader(tmp_path, "a"), Action("emit", {"y": 1}), producing())
    assert len(files(tmp_path / "shared", "tmp")) == SWEPT + 3  # who reads removes nothing
    for name in ("b", "c"):  # so many in a run
        run(reader(tmp_path, name, write=True), Action("emit", {"y": name}), producing())
    assert files(tmp_path / "shared", "tmp") == [left / "young"]


def test_a_file_under_way_is_as_young_as_its_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However old the file is that it comes from: another writer would take it for left over."""
    from fsspec.implementations.local import LocalFileSystem

    old, ages, moving = time.time() - 2 * STALE_S, [], LocalFileSystem.mv

    def move(self: Any, path: str, *args: Any) -> Any:
        ages.append(time.time() - self.modified(path).timestamp())
        return moving(self, path, *args)

    monkeypatch.setattr(LocalFileSystem, "mv", move)
    (tmp_path / "file").write_text("old")
    os.utime(tmp_path / "file", (old, old))
    Remote(str(tmp_path / "shared"))._files.upload("v1/blobs/x", tmp_path / "file")
    assert len(ages) == 1 and ages[0] < STALE_S / 2
