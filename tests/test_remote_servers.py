"""The remote cache on an S3 server and a WebDAV server that fail in every way they can."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import remote_servers
from remote_servers import Fault, Server

from artifacts.actions import Action, Result, run
from artifacts.remote import Remote
from artifacts.remote_files import FAILURES, STALE_S
from artifacts.store import Store
from runtime.s3 import put_file

ROOT = Path(__file__).resolve().parent.parent
ACTION = Action("compile", {"x": 1}, {"model": "m"})
OTHER = Action("compile", {"x": 2}, {"model": "n"})
LARGE = random.Random(1).randbytes((9 << 20) + 7)  # more than two pieces
SHORT_S = 1.5  # of waiting, where the server does not answer
PART_S = 3.0  # where it answers to some requests, on a busy machine late

# Connections that a client was cut off from are closed by the collector.
pytestmark = [pytest.mark.filterwarnings("ignore::ResourceWarning"), pytest.mark.slow]


@pytest.fixture(scope="module", params=["s3", "webdav"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    if request.param == "webdav":
        if not remote_servers.NGINX or not remote_servers.DAV_MODULE.exists():
            pytest.skip("needs Debian's nginx and libnginx-mod-http-dav-ext")
    start = {"s3": remote_servers.s3, "webdav": remote_servers.webdav}[request.param]
    with start(tmp_path_factory.mktemp(request.param)) as running:
        yield running


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> str:
    """A folder of the server for this test alone."""
    return "".join(char if char.isalnum() else "-" for char in request.node.name)


@pytest.fixture(autouse=True)
def closed(server: Server) -> Iterator[None]:
    """What a test leaves open is closed with it."""
    yield
    server.close_clients()


def producing(text: bytes = b"right", size: int = 60_000) -> Callable[[Path], dict[str, Path]]:
    def produce(scratch: Path) -> dict[str, Path]:
        (scratch / "small").write_bytes(text)
        (scratch / "large").write_bytes(LARGE[:size])
        return {"small": scratch / "small", "large": scratch / "large"}

    return produce


def refuse(scratch: Path) -> dict[str, Path]:
    raise AssertionError("it was not to be made here")


def store(place: Path, remote: Remote) -> Store:
    return Store(place, remote=remote)


def warnings(capfd: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning: ")]


def filled(server: Server, folder: str, place: Path, size: int = 60_000) -> Result:
    """The result that a writer has taken to the server."""
    writer = store(place, server.remote(folder, write=True))
    return run(writer, ACTION, producing(size=size))


def test_what_one_machine_made_another_has(
    server: Server, folder: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made = filled(server, folder, tmp_path / "a", len(LARGE))
    uploaded = [r for r in server.proxy.requests if "/v1/blobs/" in r and "PUT" in r]
    reader = store(tmp_path / "b", server.remote(folder))
    found = run(reader, ACTION, refuse)
    assert (made.hit, made.remote, found.hit, found.remote) == (False, False, True, True)
    assert found.outputs == made.outputs
    assert reader.path(found.outputs["large"]).read_bytes() == LARGE
    server.proxy.requests.clear()
    assert run(reader, ACTION, refuse).remote is False  # from here now
    assert server.proxy.requests == []
    # A reader writes nothing; a writer takes nothing there that is there.
    assert not run(reader, OTHER, producing(size=len(LARGE))).hit
    assert not any(r.startswith(("PUT", "MKCOL")) for r in server.proxy.requests)
    server.proxy.requests.clear()
    run(store(tmp_path / "c", server.remote(folder, write=True)), OTHER, producing(size=len(LARGE)))
    assert not any(r.startswith("PUT") and "/v1/blobs/" in r for r in server.proxy.requests)
    assert run(store(tmp_path / "d", server.remote(folder)), OTHER, refuse).remote
    assert warnings(capfd) == []
    if server.url.startswith("webdav"):  # only whole files get their names
        assert uploaded == []


BUILD = """
import sys
from artifacts.actions import Action, run
from artifacts.remote import from_environment
from artifacts.store import Store
def produce(scratch):
    (scratch / "x").write_text("x")
    return {"x": scratch / "x"}
store = Store(sys.argv[1], remote=from_environment())
print([run(store, Action("compile", {"x": x}), produce).remote for x in range(3)])
"""


def test_a_process_is_set_up_by_variables_and_ends_though_the_server_hangs(
    server: Server, folder: str, tmp_path: Path
) -> None:
    protocol = server.url.partition(":")[0].upper()
    settings = {
        f"FSSPEC_{protocol}_{name.upper()}": value if isinstance(value, str) else json.dumps(value)
        for name, value in server.options.items()
    }
    settings |= {"SCANWRIGHT_REMOTE": f"{server.url}/{folder}", "PYTHONPATH": str(ROOT)}

    def build(cache: str, **more: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-c", BUILD, str(tmp_path / cache)]
        env = {**os.environ, **settings, **more}
        return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120)

    done = build("a", SCANWRIGHT_REMOTE_WRITE="1")
    assert (done.stdout, done.stderr) == ("[False, False, False]\n", "")
    assert build("b").stdout == "[True, True, True]\n"
    started = time.monotonic()
    with server.proxy.failing(Fault("stall")):
        done = build("c", SCANWRIGHT_REMOTE_TIMEOUT="1")
        assert time.monotonic() - started < FAILURES * 1 + 40  # the proxy holds on for a minute
    assert (done.returncode, done.stdout) == (0, "[False, False, False]\n")
    assert done.stderr.count("warning: ") == len(done.stderr.splitlines()) == FAILURES


CORRUPT = [
    Fault("wrong", "GET", "/v1/blobs/"),
    Fault("wrong", "GET", "/v1/actions/"),
    Fault("truncate", "GET", "/v1/blobs/"),
]
SILENT = [Fault("500"), Fault("down"), Fault("stall"), Fault("stall-body", "GET", "/v1/blobs/")]


def name(fault: Fault) -> str:
    return f"{fault.kind}-{fault.part.strip('/').rpartition('/')[2] or 'all'}"


@pytest.mark.parametrize("fault", CORRUPT + SILENT, ids=name)
def test_a_failing_server_costs_a_little_time_and_no_wrong_byte(
    fault: Fault, server: Server, folder: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    filled(server, folder, tmp_path / "a")
    assert warnings(capfd) == []
    bad = server.remote(folder, timeout=PART_S if fault.part else SHORT_S)
    reader = store(tmp_path / "b", bad)
    with server.proxy.failing(fault):
        started = time.monotonic()
        made = run(reader, ACTION, producing(b"made here", 3))
        for number in range(8):  # a build asks for many results
            run(reader, Action("compile", {"number": number}), producing(size=3))
        elapsed = time.monotonic() - started
        assert fault.seen > 0
    assert (made.hit, made.remote) == (False, False)
    assert reader.path(made.outputs["small"]).read_bytes() == b"made here"
    for path in (reader.root / "blobs").glob("*/*"):  # nothing that came was taken
        assert path.read_bytes() in (b"made here", b"right", LARGE[:3])
    told = warnings(capfd)
    assert 1 <= len(told) <= FAILURES, told
    assert elapsed < FAILURES * PART_S + 30
    if fault.kind == "wrong":
        assert len(told) == 1 and "not used" in told[0]
    if fault in SILENT[:3]:
        assert told[-1].endswith("left out for the rest of this run")
    # Once the server is right again, so is all the rest.
    assert run(store(tmp_path / "c", server.remote(folder)), ACTION, refuse).remote


@pytest.mark.parametrize(
    "fault",
    [
        Fault("500", "PUT"),
        Fault("cut", "PUT"),
        Fault("stall", "PUT"),
        Fault("down", "PUT", "/v1/actions/"),
        Fault("500", "MOVE"),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.methods}{'-record' if fault.part else ''}",
)
def test_an_upload_that_fails_leaves_nothing_to_be_found(
    fault: Fault, server: Server, folder: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    webdav = server.url.startswith("webdav")
    if fault.methods == "MOVE" and not webdav:
        return  # S3 moves nothing
    if fault.part and webdav:
        fault = Fault(fault.kind, "MOVE", "/v1/tmp/")
    writer = store(tmp_path / "a", server.remote(folder, write=True, timeout=SHORT_S))
    with server.proxy.failing(fault):
        started = time.monotonic()
        made = run(writer, ACTION, producing())
        run(writer, OTHER, producing())
        assert time.monotonic() - started < FAILURES * SHORT_S + 30
        assert fault.seen > 0
    assert not made.hit and writer.verify(made.outputs["large"])
    assert 1 <= len(warnings(capfd)) <= FAILURES
    reader = store(tmp_path / "b", server.remote(folder))
    assert not run(reader, ACTION, producing()).hit
    assert warnings(capfd) == []  # nothing was there, in part or whole
    filled(server, folder, tmp_path / "c")
    assert run(store(tmp_path / "d", server.remote(folder)), ACTION, refuse).remote


def test_what_a_killed_upload_left_is_cleared_away_by_a_later_one(
    server: Server, folder: str, tmp_path: Path
) -> None:
    if server.root is None:
        return  # on S3 an upload has no place before it is whole
    left = server.root / folder / "v1" / "tmp"
    left.mkdir(parents=True)
    for name, age in (("old", STALE_S + 3600), ("young", 0)):
        (left / name).write_text("a half")
        os.utime(left / name, (time.time() - age, time.time() - age))
    assert not filled(server, folder, tmp_path / "a").hit
    assert [path.name for path in left.iterdir()] == ["young"]


def test_an_upload_of_a_bundle_tells_how_far_it_is(
    server: Server, folder: str, tmp_path: Path
) -> None:
    if server.root is not None:
        return  # bundles go to S3
    (tmp_path / "file").write_bytes(LARGE)
    files, root = server.remote(folder)._files._filesystem()
    told: list[int] = []
    put_file(files, tmp_path / "file", f"{root}/one", told.append)
    assert told[-1] == files.info(f"{root}/one")["size"] == len(LARGE)
