"""Fetching from a hub on this machine with the real client: locks, resuming, refusals."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import STRANGER, TOKEN, Fault, HubServer, commit_id

from artifacts.fetch import SMALL, Checkpoint, fetch
from artifacts.lockfile import INDEX, Lock, is_metadata, select
from runtime.errors import UserError

NAME, SOURCE = "org/tiny", "hf:org/tiny"
WEIGHTS = bytes(range(256)) * 4096  # 1 MiB
SHARDS = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
FILES = {
    "config.json": b'{"model_type": "mamba2"}',
    "generation_config.json": b"{}",
    "tokenizer.json": b'{"model": {}}',
    "model.safetensors": WEIGHTS,
    "README.md": b"# tiny",
    "pytorch_model.bin": b"PK pickle",
    "tiny.gguf": b"GGUF",
    "modeling_tiny.py": b"import os",
    "onnx/model.safetensors": b"elsewhere",
}
USED = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        server.add(NAME, FILES)
        yield server


class Place:
    """A cache and a lock; calling it fetches."""

    def __init__(self, root: Path) -> None:
        self.root, self.lock = root / "hub", root / "locks" / "tiny.json"

    def __call__(self, source: str = SOURCE, revision: str | None = None, **options: Any):
        return fetch(source, revision, self.root, self.lock, **options)

    def refused(self, *words: str, source: str = SOURCE, revision: str | None = None) -> str:
        with pytest.raises(UserError) as caught:
            self(source, revision)
        line = str(caught.value)
        assert "\n" not in line
        for word in words:
            assert word in line, line
        return line


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def check(got: Checkpoint, files: dict[str, bytes], names: list[str]) -> None:
    """The directory holds exactly the `names`, with the right bytes and digests."""
    assert sorted(item.name for item in got.dir.iterdir()) == sorted(names)
    assert got.files == {name: (sha(files[name]), len(files[name])) for name in sorted(names)}
    for name in names:
        assert (got.dir / name).read_bytes() == files[name]


def subprocess_fetch(
    place: Place, code: str = "", before: str = "", **options: Any
) -> subprocess.Popen[str]:
    """`fetch` in a process of its own, which finds the hub in HF_ENDPOINT; prints the directory."""
    program = (
        f"{before}\nimport sys, pathlib\nfrom artifacts.fetch import fetch\n"
        f"from runtime.errors import UserError, report\n"
        f"try:\n  got = fetch({SOURCE!r}, None, pathlib.Path({str(place.root)!r}), "
        f"pathlib.Path({str(place.lock)!r}))\n"
        f"except UserError as error:\n  sys.exit(report(error))\n{code}\nprint(got.dir)"
    )
    env = {**os.environ, "HF_HOME": str(place.root / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=env, cwd=Path(__file__).parent.parent, **options,
    )  # fmt: skip


# --- what is downloaded, and the lock --------------------------------------------------------


def test_only_needed_files_come_and_the_lock_pins_them(hub: HubServer, place: Place) -> None:
    got = place()
    check(got, FILES, USED)
    assert got.revision == commit_id("one") and got.dir.name == commit_id("one")
    assert sorted(hub.downloads()) == USED
    assert json.loads(place.lock.read_text()) == {
        "schema": 1, "source": SOURCE, "revision": "main", "commit": commit_id("one"),
        "files": {name: {"sha256": sha(FILES[name]), "size": len(FILES[name])} for name in USED},
    }  # fmt: skip
    lock = Lock.load(place.lock)
    assert lock is not None and lock.dumps() == place.lock.read_bytes()


def test_second_time_makes_no_request_and_works_offline(hub: HubServer, place: Place) -> None:
    first = place()
    hub.log.clear()
    assert place() == first
    assert hub.log == []
    hub.stop()
    assert place() == first
    warm = subprocess_fetch(place, "assert not {'huggingface_hub', 'numpy'} & sys.modules.keys()")
    out, err = warm.communicate(timeout=60)
    assert (warm.returncode, out.strip(), err) == (0, str(first.dir), "")


def test_moved_branch_is_not_followed_once_locked(hub: HubServer, place: Place) -> None:
    place()
    hub.add(NAME, {**FILES, "model.safetensors": b"new" * 100}, commit="two")
    assert place().revision == commit_id("one")
    second = Place(place.root.parent / "elsewhere")  # another machine with the same lock
    second.lock = place.lock
    got = second()
    assert got.revision == commit_id("one")
    check(got, FILES, USED)
    place.lock.unlink()
    assert place().revision == commit_id("two")


def test_pinned_commit_and_tag(hub: HubServer, place: Place) -> None:
    hub.add(NAME, {**FILES, "config.json": b"{}"}, commit="two").refs["v1"] = commit_id("one")
    assert place(revision="v1").revision == commit_id("one")
    place.refused("revision: found 'v1', but 'main' is asked for", str(place.lock))
    place.lock.unlink()
    assert place(revision=commit_id("one")).revision == commit_id("one")
    place.lock.unlink()
    assert place().revision == commit_id("two")


def test_shards_come_by_the_index_and_consolidated_copies_do_not(
    hub: HubServer, place: Place
) -> None:
    files = {
        "config.json": b"{}", "tokenizer.model.v3": b"sp", "consolidated.safetensors": WEIGHTS,
        "consolidated-00001-of-00002.safetensors": WEIGHTS,
        INDEX: json.dumps({"weight_map": SHARDS}).encode(),
        **{name: WEIGHTS + name.encode() for name in SHARDS.values()},
    }  # fmt: skip
    hub.add(NAME, files)
    used = ["config.json", INDEX, *SHARDS.values(), "tokenizer.model.v3"]
    check(place(), files, used)
    assert sorted(hub.downloads()) == sorted(used)


def test_single_file_wins_over_an_index_of_other_files(hub: HubServer, place: Place) -> None:
    files = {**FILES, INDEX: json.dumps({"weight_map": SHARDS}).encode()}
    hub.add(NAME, {**files, **dict.fromkeys(SHARDS.values(), b"shard")})
    check(place(), files, USED)


def test_metadata_only_then_weights(hub: HubServer, place: Place) -> None:
    metadata = [name for name in USED if name != "model.safetensors"]
    got = place(weights=False)
    check(got, FILES, metadata)
    assert hub.sent("model.safetensors") == 0
    lock = place.lock.read_bytes()
    check(place(), FILES, USED)
    assert place.lock.read_bytes() == lock
    assert sorted(place(weights=False).files) == metadata


def test_empty_file_comes(hub: HubServer, place: Place) -> None:
    hub.add(NAME, {**FILES, "merges.txt": b""})
    check(place(), {**FILES, "merges.txt": b""}, [*USED, "merges.txt"])


@pytest.mark.parametrize(
    ("name", "used"),
    [
        ("tokenizer.jsonl", True), ("rwkv_vocab_v20230424.txt", True), ("tiktoken.model", True),
        ("chat_template.jinja", True), ("special_tokens_map.json", True), ("merges.txt", True),
        ("tokenizer.model.bin", False), ("optimizer.pt", False), ("tokenization_x.py", False),
        ("../config.json", False), ("sub/tokenizer.json", False), (".tokenizer.json", False),
        ("tokenizer.model\n", False), ("training_args.json", False),
    ],
)  # fmt: skip
def test_which_files_are_metadata(name: str, used: bool) -> None:
    assert is_metadata(name) is used


# --- the lock is enforced --------------------------------------------------------------------


def test_changed_byte_on_the_server_is_refused(hub: HubServer, place: Place) -> None:
    got = place()
    wrong = WEIGHTS[:-1] + b"\0"
    hub.served[sha(WEIGHTS)] = wrong
    (got.dir / "model.safetensors").unlink()
    place.refused("model.safetensors", sha(wrong), sha(WEIGHTS), "delete the lock", str(place.lock))
    assert not (got.dir / "model.safetensors").exists()
    hub.served.clear()
    check(place(), FILES, USED)


def test_changed_small_file_on_the_server_is_refused(hub: HubServer, place: Place) -> None:
    got = place()
    hub.repos[NAME].commits[commit_id("one")]["config.json"] = b'{"model_type": "mamba1"}'
    (got.dir / "config.json").unlink()
    place.refused("config.json", sha(FILES["config.json"]), sha(b'{"model_type": "mamba1"}'))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_wrong_bytes_on_the_first_fetch_are_refused(
    hub: HubServer, place: Place, name: str
) -> None:
    hub.faults.append(Fault(name, "flip", at=9))
    place.refused(name, "expected")
    assert not place.lock.exists()
    assert not list(place.root.rglob(name)) and not list(place.root.rglob("*.part"))
    check(place(), FILES, USED)


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("change", ["byte", "cut", "gone", "link"])
def test_damaged_local_copy_is_told_and_fetched_again(
    hub: HubServer, place: Place, capsys: pytest.CaptureFixture[str], name: str, change: str
) -> None:
    path = place().dir / name
    data = FILES[name]
    if change == "byte":
        path.write_bytes(data[:-1] + b"?")
    elif change == "cut":
        path.write_bytes(data[:-1])
    else:
        path.unlink()
    if change == "link":
        (place.root / "other").write_bytes(data)
        path.symlink_to(place.root / "other")
    hub.log.clear()
    check(place(), FILES, USED)
    assert hub.downloads() == [name]
    told = capsys.readouterr().err.splitlines()
    assert len(told) == (change in ("byte", "cut"))
    assert all(str(path) in line and sha(data) in line for line in told)


def test_large_files_are_rehashed_only_when_touched(
    hub: HubServer, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    import artifacts.fetch as module

    big = os.urandom(SMALL + 1)
    hub.add(NAME, {**FILES, "model.safetensors": big})
    path = place().dir / "model.safetensors"
    hashed: list[str] = []
    real = module.hash_file
    monkeypatch.setattr(module, "hash_file", lambda p: (hashed.append(p.name), real(p))[1])
    place()
    assert sorted(hashed) == [name for name in USED if name != "model.safetensors"]
    with path.open("r+b") as file:  # same size, one byte differs
        file.write(bytes([big[0] ^ 1]))
    check(place(), {**FILES, "model.safetensors": big}, USED)
    assert "model.safetensors" in hashed


def test_foreign_file_in_the_snapshot_is_refused(hub: HubServer, place: Place) -> None:
    (place().dir / INDEX).write_bytes(b"{}")
    place.refused(INDEX, "not a file of hf:org/tiny")


GOOD_LOCK = {
    "schema": 1, "source": SOURCE, "revision": "main", "commit": commit_id("one"),
    "files": {"config.json": {"sha256": "0" * 64, "size": 3}},
}  # fmt: skip


def in_files(name: str, entry: object) -> dict[str, Any]:
    return {"files": {**GOOD_LOCK["files"], name: entry}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 2}, "schema: found 2, expected 1"),
        ({"schema": True}, "schema: found True"),
        ({"commit": "main"}, "commit: found 'main', expected 40 hex digits"),
        ({"extra": 1}, "'extra'"),
        ({"revision": None}, "revision: expected a string"),
        ({"files": {}}, "files: expected an object with config.json"),
        (in_files("../evil.safetensors", GOOD_LOCK["files"]["config.json"]), "'../evil"),
        (in_files("/etc/passwd", GOOD_LOCK["files"]["config.json"]), "'/etc/passwd'"),
        (in_files("pytorch_model.bin", GOOD_LOCK["files"]["config.json"]), "'pytorch_model.bin'"),
        (in_files("merges.txt", {"sha256": "0" * 63, "size": 3}), "merges.txt: sha256"),
        (in_files("merges.txt", {"sha256": "0" * 64, "size": -1}), "merges.txt: size"),
        (in_files("merges.txt", {"sha256": "0" * 64}), "merges.txt: found 'sha256'"),
        ({"source": "hf:org/other"}, "source: found 'hf:org/other', but 'hf:org/tiny'"),
    ],
)
def test_bad_lock_is_refused(
    hub: HubServer, place: Place, change: dict[str, Any], words: str
) -> None:
    place.lock.parent.mkdir()
    place.lock.write_text(json.dumps({**GOOD_LOCK, **change}))
    place.refused(str(place.lock), words)
    assert hub.log == []


@pytest.mark.parametrize("raw", [b"", b"[1]", b"\xff", b"{", b"[" * 100_000])
def test_lock_that_is_no_json_object_is_refused(hub: HubServer, place: Place, raw: bytes) -> None:
    place.lock.parent.mkdir()
    place.lock.write_bytes(raw)
    place.refused(f"{place.lock}: not a lock file", "delete it")


# --- broken downloads ------------------------------------------------------------------------


BIG = bytes(range(256)) * (24 << 12)  # 24 MiB; the client writes 10 MiB at a time
MIB = 1 << 20


@pytest.mark.parametrize(("kind", "kept"), [("drop", 20 * MIB), ("short", 21 * MIB)])
def test_broken_download_goes_on_where_it_stopped(
    hub: HubServer, place: Place, kind: str, kept: int
) -> None:
    files = {**FILES, "model.safetensors": BIG}
    hub.add(NAME, files)
    hub.faults.append(Fault("model.safetensors", kind, at=21 * MIB))
    check(place(), files, USED)
    served = [(seen.range, seen.sent) for seen in hub.log if seen.path.startswith("/store/")]
    assert served == [(None, 21 * MIB), (kept, len(BIG) - kept)]


def test_next_run_goes_on_where_a_dead_hub_stopped(hub: HubServer, place: Place) -> None:
    files = {**FILES, "model.safetensors": BIG}
    hub.add(NAME, files)
    hub.faults.append(Fault("model.safetensors", "drop", at=21 * MIB))
    hub.faults.append(Fault("model.safetensors", 503, times=9))
    place.refused("model.safetensors", "broke off", "503", "params=none")
    assert not place.lock.exists()
    hub.faults.clear()
    hub.log.clear()
    check(place(), files, USED)
    served = [(seen.range, seen.sent) for seen in hub.log if seen.path.startswith("/store/")]
    assert served == [(20 * MIB, 4 * MIB)]
    assert hub.downloads() == ["model.safetensors"]


def test_wrong_partial_file_starts_over(hub: HubServer, place: Place) -> None:
    partial = place.root / "org--tiny" / "partial" / f"{sha(WEIGHTS)}.part"
    for number, left in enumerate([b"?" * 500_000, b"?" * len(WEIGHTS), WEIGHTS + b"more"]):
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(left)
        got = place()
        check(got, FILES, USED)
        assert not partial.exists(), number
        (got.dir / "model.safetensors").unlink()


def test_passing_server_errors_are_retried(hub: HubServer, place: Place) -> None:
    hub.faults.append(Fault("model.safetensors", 500, times=2))
    check(place(), FILES, USED)


def test_killed_process_leaves_nothing_wrong_and_its_bytes_are_used(
    hub: HubServer, place: Place
) -> None:
    big = os.urandom(1 << 20) * 24
    hub.add(NAME, {**FILES, "model.safetensors": big})
    hub.faults.append(Fault("model.safetensors", "drop", at=20 << 20))  # it then waits a second
    process = subprocess_fetch(place)
    partial = place.root / "org--tiny" / "partial" / f"{sha(big)}.part"
    deadline = time.monotonic() + 60
    while not (partial.exists() and partial.stat().st_size > (1 << 20)):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not place.lock.exists() and not list(place.root.rglob("model.safetensors"))
    hub.faults.clear()
    hub.log.clear()
    check(place(), {**FILES, "model.safetensors": big}, USED)
    assert hub.sent("model.safetensors") < len(big)


def test_two_processes_download_once(hub: HubServer, place: Place) -> None:
    both = [subprocess_fetch(place) for _ in range(2)]
    for process in both:
        assert process.communicate(timeout=60)[0].strip() == str(
            place.root / "org--tiny" / commit_id("one")
        )
    assert sorted(hub.downloads()) == USED
    check(place(), FILES, USED)


# --- disk ------------------------------------------------------------------------------------


def test_what_cannot_fit_is_refused_before_the_first_byte(hub: HubServer, place: Place) -> None:
    hub.repos[NAME].claimed_size["model.safetensors"] = 10**17
    place.refused("no space", "bytes needed", "bytes free", "SCANWRIGHT_CACHE")
    assert hub.downloads() == [] and not place.lock.exists()


def test_full_disk_in_the_middle_is_one_line_and_leaves_nothing(
    hub: HubServer, place: Place
) -> None:
    limit = 600_000
    small = f"import resource as r\nr.setrlimit(r.RLIMIT_FSIZE, ({limit}, {limit}))"
    process = subprocess_fetch(place, before=small)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.count("\n") == 1 and "model.safetensors: no space to write" in err
    assert not place.lock.exists()
    assert not list(place.root.rglob("*.part")) + list(place.root.rglob("*.safetensors"))
    check(place(), FILES, USED)


# --- refusals of the hub ---------------------------------------------------------------------


def test_unreachable_hub_names_params_none(hub: HubServer, place: Place) -> None:
    hub.stop()
    place.refused(SOURCE, hub.url, "cannot be reached", "params=none")
    assert not place.lock.exists()


def test_unreachable_hub_with_a_lock_names_params_none(hub: HubServer, place: Place) -> None:
    path = place().dir / "config.json"
    hub.stop()
    path.write_bytes(b"damaged")
    place.refused(SOURCE, "config.json", hub.url, "params=none")
    assert not path.exists()


def test_server_error_on_first_contact(hub: HubServer, place: Place) -> None:
    hub.faults.append(Fault("/main", 500, times=9))
    place.refused("cannot be reached", "500", "params=none")


@pytest.mark.parametrize(
    ("token", "words"),
    [
        (None, "gated repository and no token was sent; accept its terms at {url}/org/tiny"),
        (STRANGER, "has not been granted access; ask for it at {url}/org/tiny"),
        ("hf_wrong", "the hub refused the token that was sent (401), from HF_TOKEN"),
    ],
)
def test_gated_repository(
    hub: HubServer, place: Place, monkeypatch: pytest.MonkeyPatch, token: str | None, words: str
) -> None:
    hub.repos[NAME].gated = True
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    line = place.refused(words.format(url=hub.url))
    assert token is None or token not in line
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    check(place(), FILES, USED)


def test_private_and_unknown_repositories(
    hub: HubServer, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos[NAME].private = True
    place.refused("no such repository", "if it is private, set HF_TOKEN")
    place.refused("hf:org/none", "no such repository", source="hf:org/none")
    monkeypatch.setenv("HF_TOKEN", STRANGER)
    line = place.refused("hf:org/tiny", "no such repository", "check the name")
    assert "HF_TOKEN" not in line
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    check(place(), FILES, USED)


def test_unknown_revision(hub: HubServer, place: Place) -> None:
    place.refused("no revision v9", "branch, tag or commit", revision="v9")


@pytest.mark.parametrize("source", ["org/tiny", "hf:", "hf:a/b/c", "hf:../x", "hf:a/--b", "dir:"])
def test_bad_source(hub: HubServer, place: Place, source: str) -> None:
    place.refused("expected hf:org/name or dir:PATH", source=source)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"pytorch_model.bin": b"PK"}, "only pickle files (pytorch_model.bin), refused because"),
        ({"x.pth": b"PK", "y.gguf": b""}, "only pickle files (x.pth), refused because"),
        ({"y.gguf": b""}, "only y.gguf; expected model.safetensors"),
        ({"consolidated.safetensors": b""}, "only consolidated.safetensors; expected"),
        ({}, "no weights; expected model.safetensors"),
        ({INDEX: b'{"weight_map": {"a": "../x.safetensors"}}'}, "found '../x.safetensors'"),
        ({INDEX: b'{"weight_map": {"a": "x.bin"}}'}, "found 'x.bin'"),
        ({INDEX: b'{"weight_map": {"a": "x.safetensors"}}'}, "names x.safetensors, which is not"),
        ({INDEX: b'{"weight_map": []}'}, "weight_map: expected an object"),
        ({INDEX: b"[" * 100_000}, "weight_map: expected an object"),
    ],
)
def test_unusable_repositories_and_directories(
    hub: HubServer, place: Place, tmp_path: Path, files: dict[str, bytes], words: str
) -> None:
    hub.add(NAME, {"config.json": b"{}", **files})
    place.refused(SOURCE, words)
    assert not place.lock.exists() and "pytorch_model.bin" not in hub.downloads()
    local = tmp_path / "local"
    local.mkdir()
    for name, data in {"config.json": b"{}", **files}.items():
        (local / name).write_bytes(data)
    place.refused(str(local), words, source=f"dir:{local}")


def test_repository_without_config(hub: HubServer, place: Place) -> None:
    hub.add(NAME, {"model.safetensors": WEIGHTS})
    place.refused("no config.json")


# --- local directories -----------------------------------------------------------------------


def test_local_directory_is_used_in_place(place: Place, tmp_path: Path) -> None:
    local = tmp_path / "my model"
    local.mkdir()
    for name, data in FILES.items():
        if "/" not in name:
            (local / name).write_bytes(data)
    got = place(f"dir:{local}")
    assert (got.dir, got.revision) == (local, None)
    assert got.files == {name: (sha(FILES[name]), len(FILES[name])) for name in USED}
    assert not place.lock.exists()
    assert "model.safetensors" not in place(f"dir:{local}", weights=False).files
    (local / "config.json").write_bytes(b"{}")
    assert place(f"dir:{local}").files["config.json"] == (sha(b"{}"), 2)
    place.refused("nowhere: no such directory", source=f"dir:{tmp_path}/nowhere")


def test_index_is_not_read_when_there_is_none() -> None:
    def no_index() -> bytes:
        raise AssertionError

    assert select("x", ["config.json", "model.safetensors"], no_index) == [
        "config.json", "model.safetensors",
    ]  # fmt: skip
