"""The content store and its records: complete or not there, and never wrong in silence."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts.records import Blob, action_key, canonical
from artifacts.store import Store
from runtime.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
FIELDS = {"x": 1}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


def save(store: Store, data: bytes = b"some bytes", fields: dict | None = None) -> str:
    key = action_key("stage", fields or FIELDS)
    store.record(key, fields or FIELDS, {"out": store.put_bytes(data)}, {"n": 1}, stage="stage")
    return key


def debris(store: Store) -> list[str]:
    """Names of temporary files that are left (directories and locks of this process aside)."""
    return [str(p) for p in (store.root / "scratch").rglob("*") if p.is_file() and p.stat().st_size]


# Canonical JSON


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.floats(allow_nan=False).filter(lambda x: abs(x) != float("inf")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(json_values)
def test_canonical_is_ascii_and_reads_back(value: object) -> None:
    data = canonical(value)
    assert data.isascii()
    assert canonical(json.loads(data)) == data


def test_canonical_has_one_form_and_tells_types_apart() -> None:
    assert canonical({"b": [1, "é"], "a": {"y": None, "x": 1.5}}) == (
        b'{"a":{"x":1.5,"y":null},"b":[1,"\\u00e9"]}'
    )
    assert len({canonical(v) for v in (1, 1.0, True, "1", [1], None)}) == 6


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": [1, float("nan")]}, r"value\.a\[1\]: nan"),
        ({"a": float("-inf")}, r"value\.a: -inf"),
        ({"a": {2: 1}}, r"value\.a: key 2 is not a string"),
        ([Path("x")], r"value\[0\]: PosixPath has no JSON"),
        ({"a": b"x"}, r"value\.a: bytes"),
    ],
)
def test_canonical_refuses_what_json_would_change(value: object, where: str) -> None:
    with pytest.raises(ValueError, match=where):
        canonical(value)


# Content


def test_put_gives_the_digest_and_read_only_bytes(store: Store, tmp_path: Path) -> None:
    blob = store.put_bytes(b"abc")
    assert blob == Blob("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad", 3)
    assert store.path(blob).read_bytes() == b"abc"
    assert stat.S_IMODE(store.path(blob).stat().st_mode) == 0o444
    source = tmp_path / "source"
    source.write_bytes(b"abc")
    inode = store.path(blob).stat().st_ino
    assert store.put_file(source) == blob
    assert source.exists()
    assert store.put_file(source, move=True) == blob
    assert not source.exists()
    assert store.path(blob).stat().st_ino == inode
    assert debris(store) == []


def test_move_copies_links_and_shared_files(store: Store, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.write_bytes(b"shared")
    other, link = tmp_path / "other", tmp_path / "link"
    os.link(shared, other)
    link.symlink_to(other)
    blob = store.put_file(link, move=True)
    assert not link.is_symlink() and other.exists()
    assert store.put_file(shared, move=True) == blob
    other.write_bytes(b"changed afterwards")
    assert store.verify(blob)
    with pytest.raises(UserError, match="not a file"):
        store.put_file(tmp_path)
    with pytest.raises(UserError, match=r"nothing.*No such file"):
        store.put_file(tmp_path / "nothing")


def test_link_is_one_inode_and_replaces_in_one_step(store: Store, tmp_path: Path) -> None:
    old, new = store.put_bytes(b"old"), store.put_bytes(b"newer")
    dest = tmp_path / "deep" / "er" / "file"
    store.link(old, dest)
    store.link(old, dest)
    assert dest.samefile(store.path(old))
    with dest.open("rb") as mapped:
        store.link(new, dest)
        assert mapped.read() == b"old"
    assert dest.read_bytes() == b"newer"
    (dest.parent / ".link-1-00-dead").write_bytes(b"left by a dead process")
    own = f".link-{store._own_scratch().token}-cafe"
    (dest.parent / own).write_bytes(b"of a living one")
    store.link(old, dest)
    assert sorted(p.name for p in dest.parent.iterdir()) == [own, "file"]
    shutil.rmtree(store.path(old).parent)
    with pytest.raises(UserError, match=r"gone from the cache.*run the build again"):
        store.link(old, tmp_path / "x")


def test_link_over_a_symlink_replaces_the_symlink(store: Store, tmp_path: Path) -> None:
    blob = store.put_bytes(b"x")
    dest = tmp_path / "dest"
    dest.symlink_to(store.path(blob))
    store.link(blob, dest)
    assert not dest.is_symlink() and dest.read_bytes() == b"x"


def test_link_to_another_filesystem_copies(store: Store, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        if Path(name).stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("no second filesystem here")
        blob = store.put_bytes(b"far away")
        dest = Path(name) / "dest"
        store.link(blob, dest)
        assert dest.read_bytes() == b"far away" and dest.stat().st_nlink == 1
        dest.chmod(0o600)
        assert store.put_file(dest, move=True) == blob
        assert list(Path(name).iterdir()) == []


# Damage


def flip(path: Path) -> None:
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.chmod(0o600)
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    path.chmod(0o600)
    os.truncate(path, 0)


@pytest.mark.parametrize("rehash_limit", [1 << 20, 0])
@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (flip, "does not match its sha256"),
        (truncate, "has 9 bytes, expected 10"),
        (empty, "has 0 bytes, expected 10"),
        (Path.unlink, "is missing"),
    ],
)
def test_damaged_blob_is_told_dropped_and_a_miss(
    tmp_path: Path, capfd: pytest.CaptureFixture, harm, words: str, rehash_limit: int
) -> None:
    store = Store(tmp_path, rehash_limit=rehash_limit)
    key = save(store)
    assert store.lookup(key) is not None
    assert capfd.readouterr().err == ""
    (path,) = (p for p in (tmp_path / "blobs").glob("*/*") if p.suffix == "")
    harm(path)
    assert store.lookup(key) is None
    err = capfd.readouterr().err
    assert words in err and "building again" in err and err.count("\n") == 1
    assert not path.exists()
    save(store)
    assert store.lookup(key) is not None
    assert capfd.readouterr().err == ""


def test_put_repairs_a_damaged_blob(store: Store) -> None:
    blob = store.put_bytes(b"some bytes")
    flip(store.path(blob))
    assert not store.verify(blob)
    store.put_bytes(b"some bytes")
    assert store.verify(blob)


def test_large_blob_is_hashed_again_only_if_its_stamp_differs(tmp_path: Path) -> None:
    store = Store(tmp_path, rehash_limit=0)
    blob = store.put_bytes(b"some bytes")
    path = store.path(blob)
    before = path.stat()
    flip(path)
    assert not store.verify(blob)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert store.verify(blob), "an equal stamp means that the bytes are not read"
    assert not Store(tmp_path).verify(blob)
    path.with_suffix(".stamp").write_text("torn")
    assert not store.verify(blob)
    flip(path)
    assert store.verify(blob)
    assert path.with_suffix(".stamp").read_text() == store._stamp(path)


@pytest.mark.parametrize("position", [0, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("harm", ["flip", "cut", "empty"])
def test_damaged_record_is_a_miss(
    store: Store, capfd: pytest.CaptureFixture, position: float, harm: str
) -> None:
    key = save(store)
    path = store.record_path(key)
    data = bytearray(path.read_bytes())
    at = int(position * len(data))
    data[at] ^= 1
    path.write_bytes({"flip": data, "cut": data[:at], "empty": b""}[harm])
    assert store.lookup(key) is None
    err = capfd.readouterr().err
    assert str(path) in err and "broken record" in err and err.count("\n") == 1
    assert not path.exists()


def test_record_of_another_key_is_a_miss(store: Store, capfd: pytest.CaptureFixture) -> None:
    key = save(store)
    other = action_key("stage", {"x": 2})
    shutil.copy(store.record_path(key), store.record_path(other))
    assert store.lookup(other) is None
    assert "broken record" in capfd.readouterr().err
    with pytest.raises(ValueError, match="not the key"):
        store.record(other, FIELDS, {}, stage="stage")


def test_lookup_gives_back_what_was_recorded(store: Store) -> None:
    key = action_key("s", {"f": [1, None]})
    outputs = {"a": store.put_bytes(b"a"), "b": store.put_bytes(b"b")}
    made = store.record(key, {"f": [1, None]}, outputs, {"m": 1.5}, stage="s", about={"model": "m"})
    assert Store(store.root).lookup(key) == made
    assert store.lookup("0" * 64) is None
    store.forget(key)
    assert store.lookup(key) is None
    for bad in ("../x", "0" * 63, "G" * 64):
        with pytest.raises(ValueError, match="not a key"):
            store.lookup(bad)


# Places that cannot be written


@contextlib.contextmanager
def read_only(path: Path) -> Iterator[None]:
    """Make a tree read-only, with this process not allowed to ignore that."""
    places = [path, *path.rglob("*")]
    for place in places:
        place.chmod(0o555)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        for place in places:
            place.chmod(0o755)


def test_unwritable_root_is_one_line() -> None:
    with tempfile.TemporaryDirectory(prefix="scanwright-") as name:
        with (
            read_only(Path(name)),
            pytest.raises(UserError, match=rf"{name}.*Permission denied.*SCANWRIGHT_CACHE"),
        ):
            Store(Path(name) / "cache")
        store = Store(Path(name) / "cache")
        key = save(store)
        with read_only(store.root):
            for attempt in (
                lambda: Store(store.root).put_bytes(b"x"),
                lambda: store.put_bytes(b"x"),
                lambda: store.forget(key),
            ):
                with pytest.raises(UserError, match=rf"{name}.*Permission denied"):
                    attempt()
        assert store.lookup(key) is not None


def test_root_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("not a cache")
    for root in (path, path / "below"):
        with pytest.raises(UserError, match=r"not a directory.*SCANWRIGHT_CACHE"):
            Store(root)
    assert path.read_text() == "not a cache"


FILL = """
import resource, sys
from pathlib import Path
from artifacts.actions import Action, run
from artifacts.store import Store
from runtime.errors import UserError
root, limit = Path(sys.argv[1]), int(sys.argv[2])
store = Store(root / "cache")
source = Path(sys.argv[3])
small = store.put_bytes(b"small")
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
def produce(scratch):
    with (scratch / "out").open("wb", buffering=0) as f:
        for _ in range(64):
            f.write(bytes(1 << 16)) == 1 << 16 or f.write(b"x")
    return {"out": scratch / "out"}
for attempt in (
    lambda: store.put_file(source),
    lambda: store.put_bytes(source.read_bytes()),
    lambda: run(store, Action("fill", {}), produce),
    lambda: run(store, Action("copy", {}), lambda scratch: {"out": source}),
):
    try:
        attempt()
        print("no error")
    except UserError as error:
        print(error)
assert store.verify(small)
for path in (root / "cache").rglob("*"):
    if path.is_file() and path.stat().st_size:
        print("left", path.relative_to(root / "cache").parts[0])
"""


def check_fill(done: subprocess.CompletedProcess, why: str) -> None:
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[4:] == ["left blobs"], "only the small blob may be there"
    for line in lines[:4]:
        assert why in line and "doit gc" in line and "cache" in line
    assert f"{3 << 20} bytes needed" in lines[0]
    assert f"{3 << 20} bytes needed" in lines[1]
    assert "scratch" in lines[2]


def test_file_size_limit_leaves_nothing(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(3 << 20))
    args = [sys.executable, "-c", FILL, str(tmp_path), str(1 << 20), str(source)]
    done = subprocess.run(args, cwd=ROOT, capture_output=True, text=True, check=False)
    check_fill(done, os.strerror(errno.EFBIG))


def test_full_disk_leaves_nothing(tmp_path: Path) -> None:
    source, disk = tmp_path / "source", tmp_path / "disk"
    source.write_bytes(bytes(3 << 20))
    disk.mkdir()
    mount = 'mount -t tmpfs -o size=2m none "$0" || exit 99; exec "$@"'
    enter = ["unshare", "-Urm", "sh", "-c", mount, str(disk)]
    if not shutil.which("unshare") or subprocess.run([*enter, "true"], check=False).returncode:
        pytest.skip("this machine does not let a test mount a small disk")
    args = [*enter, sys.executable, "-c", FILL, str(disk), "0", str(source)]
    done = subprocess.run(args, cwd=ROOT, capture_output=True, text=True, check=False)
    check_fill(done, os.strerror(errno.ENOSPC))
