"""A bundle as a tar file: the same bytes each time, and nothing that a tar can do but files."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import transport

from artifacts import push
from runtime import cli
from runtime import manifest as mf
from runtime import pack as packing
from runtime.errors import UserError


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCANWRIGHT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return transport.made(tmp_path / "bundle")


def test_the_same_bundle_gives_the_same_bytes(bundle: Path, tmp_path: Path) -> None:
    first = push.pack(bundle, str(tmp_path / "one.tar"))
    again = tmp_path / "elsewhere" / "again"
    shutil.copytree(bundle, again)
    for number, path in enumerate(sorted(again.iterdir(), reverse=True)):
        os.utime(path, (number, number))
        path.chmod(0o600)
    umask = os.umask(0o077)
    try:
        push.pack(again, str(tmp_path / "two.tar"))
    finally:
        os.umask(umask)
    one, two = (tmp_path / name for name in ("one.tar", "two.tar"))
    assert one.read_bytes() == two.read_bytes() and len(first.splitlines()[1].split()[1]) == 64
    # GNU tar reads it, and what it tells is fixed
    told = subprocess.run(
        ["tar", "-tvf", str(one), "--numeric-owner", "--utc"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()  # fmt: skip
    assert [line.split()[-1] for line in told] == sorted([*transport.FILES, mf.FILE_NAME])
    assert all(line.startswith("-rw-r--r-- 0/0 ") and " 1970-01-01 00:00 " in line for line in told)


def test_it_comes_back_whole_with_sane_permissions(bundle: Path, tmp_path: Path) -> None:
    (bundle / "model.sig").write_bytes(b"signature")
    push.pack(bundle, str(tmp_path / "b.tar"))
    assert cli.main(["unpack", str(tmp_path / "b.tar"), str(tmp_path / "there")]) == 0
    assert cli.main(["pull", str(tmp_path / "b.tar"), str(tmp_path / "pulled")]) == 0
    for place in (tmp_path / "there", tmp_path / "pulled"):
        assert transport.contents(place) == transport.contents(bundle)
        assert all(path.stat().st_mode & 0o777 == 0o444 for path in place.iterdir())


def test_a_file_of_more_than_8_gib_has_a_header(tmp_path: Path) -> None:
    size = 9 << 30
    archive = tmp_path / "big.tar"
    with archive.open("wb") as out:
        out.write(packing._header("params.irpa", size))
        out.truncate(512 + size + 1024)  # a sparse file
    assert packing.members(archive) == {"params.irpa": packing.Member(512, size)}
    with tarfile.open(archive) as read:
        assert read.getmember("params.irpa").size == size


@pytest.mark.parametrize("kind", ["missing", "short", "flipped"])
def test_a_damaged_bundle_is_not_packed(bundle: Path, tmp_path: Path, kind: str) -> None:
    params = bundle / "params.irpa"
    data = params.read_bytes()
    params.unlink()
    if kind != "missing":
        params.write_bytes(data[:-1] if kind == "short" else bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(UserError, match=r"params\.irpa: .*expected"):
        push.pack(bundle, str(tmp_path / "b.tar"))
    assert not (tmp_path / "b.tar").exists() and transport.left_over(tmp_path) == []


# Hostile archives --------------------------------------------------------------------------------

Change = Callable[[tarfile.TarFile], object]


def entry(name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", link: str = "") -> Change:
    """Adds an entry; names go in as they are."""
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, len(data), link
    return lambda tar: tar.addfile(info, io.BytesIO(data))


HOSTILE: dict[str, tuple[Change, str]] = {
    "absolute": (entry("/tmp/evil", data=b"x"), "found the name '/tmp/evil'"),
    "parent": (entry("../evil", data=b"x"), r"found the name '\.\./evil'"),
    "inner parent": (entry("a/../../evil", data=b"x"), "found the name"),
    "not plain": (entry("./extra", data=b"x"), r"found the name '\./extra'"),
    "symbolic link": (entry("extra", tarfile.SYMTYPE, link="/etc/passwd"), "symbolic link"),
    "hard link": (entry("extra", tarfile.LNKTYPE, link="model.vmfb"), "hard link"),
    "character device": (entry("extra", tarfile.CHRTYPE), "a device"),
    "block device": (entry("extra", tarfile.BLKTYPE), "a device"),
    "pipe": (entry("extra", tarfile.FIFOTYPE), "a pipe"),
    "directory": (entry("extra", tarfile.DIRTYPE), "a directory"),
    "sparse": (entry("extra", tarfile.GNUTYPE_SPARSE), "type b'S'"),
    "long name": (entry("x" * 300), "type b'L'"),
    "twice": (entry("model.vmfb", data=b"x"), "'model.vmfb' is there twice"),
    "manifest twice": (entry("manifest.json", data=b"{}"), "'manifest.json' is there twice"),
    "unknown file": (entry("extra", data=b"x"), "'extra' is not in the manifest"),
}


def archive(bundle: Path, path: Path, change: Change, leave: str = "") -> Path:
    """The bundle as a tar made by the standard library, with one more entry."""
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for name in sorted(transport.contents(bundle)):
            if name != leave:
                tar.add(bundle / name, name)
        change(tar)
    return path


def refused(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which unpacking fails, leaving nothing behind."""
    place = tmp_path / "out" / "bundle"
    place.parent.mkdir()
    before = set(Path("/tmp").glob("evil*"))
    assert cli.main(["unpack", str(path), str(place)]) == 1
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]
    assert out == "" and last.startswith(f"error: {path}: ") and "expected" in last
    assert list(place.parent.iterdir()) == [] and not (tmp_path / "evil").exists()
    assert set(Path("/tmp").glob("evil*")) == before
    return last


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_entry_is_refused(
    name: str, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, told = HOSTILE[name]
    path = archive(bundle, tmp_path / "b.tar", change)
    assert re.search(told, refused(path, tmp_path, capsys))


def test_the_same_archive_without_the_entry_is_taken(bundle: Path, tmp_path: Path) -> None:
    path = archive(bundle, tmp_path / "b.tar", lambda tar: None)
    assert cli.main(["unpack", str(path), str(tmp_path / "there")]) == 0


def changed_size(bundle: Path, path: Path) -> Path:
    """An archive whose params are larger than the manifest says."""
    more = (bundle / "params.irpa").read_bytes() + b"more"
    return archive(bundle, path, entry("params.irpa", data=more), leave="params.irpa")


def test_other_sizes_missing_files_and_wrong_bytes_are_refused(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = []
    for name in ("size", "missing", "bytes"):
        work = tmp_path / name
        work.mkdir()
        path = work / "b.tar"
        if name == "size":
            changed_size(bundle, path)
        elif name == "missing":
            archive(bundle, path, lambda tar: None, leave="params.irpa")
        else:
            data = bytearray((bundle / "params.irpa").read_bytes())
            data[77] ^= 1
            archive(bundle, path, entry("params.irpa", data=bytes(data)), leave="params.irpa")
        cases.append(refused(path, work, capsys))
    assert "has 300004 bytes, expected 300000 by the manifest" in cases[0]
    assert "'params.irpa' is missing" in cases[1]
    assert "params.irpa: sha256 " in cases[2]


def test_damaged_archives_are_refused(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packing.pack(bundle, tmp_path / "good.tar")
    good = (tmp_path / "good.tar").read_bytes()
    huge = bytearray(packing._header("params.irpa", 1 << 50))
    for number, (data, told) in enumerate(
        [
            (b"", "without an end mark"),
            (good[:700], "is cut off"),
            (good[: len(good) // 2], "is cut off"),
            (good[:200_000].replace(b"ustar", b"evils"), "no tar header"),
            (b"\x1f\x8b" + good, "no tar header"),
            (bytes(huge), "is cut off"),
            (bytes(10240), "no manifest.json"),
            (packing._header("x", 0) * 2, "is there twice"),
            (b"".join(packing._header(f"x{n}", 0) for n in range(5000)), "more than 4096 files"),
        ]
    ):
        work = tmp_path / str(number)
        work.mkdir()
        (work / "b.tar").write_bytes(data)
        assert told in refused(work / "b.tar", work, capsys)


def test_a_directory_with_other_things_in_it_is_left_alone(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packing.pack(bundle, tmp_path / "b.tar")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("keep")
    assert cli.main(["unpack", str(tmp_path / "b.tar"), str(tmp_path / "mine")]) == 1
    assert "holds files and no manifest.json" in capsys.readouterr().err
    assert transport.contents(tmp_path / "mine") == {"notes": b"keep"}


def test_doit_packs(bundle: Path, tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    words = ["pack", f"bundle={bundle}", f"to={tmp_path / 'b.tar'}"]
    command = [sys.executable, "-m", "doit", "-f", str(root / "dodo.py"), "-d", str(root), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"packed: {tmp_path / 'b.tar'}\nsha256 ")
    assert packing.members(tmp_path / "b.tar").keys() == transport.contents(bundle).keys()
