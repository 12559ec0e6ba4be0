"""What downloads, compiles and proofs tell of how far they are, on a terminal and elsewhere.

(Conversion is in test_memory; how a line looks in test_progress.)
"""

from __future__ import annotations

import hashlib
import json
import os
import pty
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import transport
from hub_server import TOKEN, Fault, HubServer
from hub_uploads import UploadHub

from artifacts import compile as compiler
from artifacts import push
from artifacts.hub import Hub, Remote
from artifacts.pace import FIRST, LEAST, Paced
from runtime import probe, progress
from runtime.errors import UserError
from runtime.manifest import FunctionSpec, TensorSpec, Tolerance
from runtime.progress import ERASE

Told = Callable[[], str]


@pytest.fixture(params=["terminal", "file"])
def told(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Told]:
    """What was told where the user is since last asked; nothing is too quick or too often."""
    for name in ("QUIET_S", "REDRAW_S", "FIRST_S", "LINE_S", "TOLD_S"):
        monkeypatch.setattr(progress, name, 0.0)
    if request.param == "terminal":
        user, program = pty.openpty()
    else:
        program = os.open(tmp_path / "stderr", os.O_RDWR | os.O_CREAT)
        user = os.open(tmp_path / "stderr", os.O_RDONLY)
    monkeypatch.setenv(progress.VARIABLE, str(program))

    def text() -> str:
        if request.param == "file":
            return os.read(user, 1 << 24).decode()
        os.write(program, b"\0")
        found = b""
        while not found.endswith(b"\0"):
            found += os.read(user, 1 << 16)
        return found[:-1].decode()

    yield text
    for descriptor in (user, program):
        os.close(descriptor)


def lines(text: str) -> list[str]:
    """What was shown, each state of the one line of a terminal by itself, bars left out.

    On a terminal nothing is left at the end, and no line is ever ended; elsewhere all are.
    """
    if ERASE in text:
        assert text.endswith(ERASE) and "\n" not in text
        return [re.sub(r" \[[#.]+\]$", "", part) for part in text.split(ERASE) if part]
    assert text.endswith("\n") and "\r" not in text and "\x1b" not in text
    return text.splitlines()


RATE = r", [\d.]+ [KMG]?i?B/s(, \d+:\d\d left|, in \d+:\d\d)"


@pytest.mark.parametrize("broken", [False, True])
def test_a_download(
    told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    """One that breaks off goes on in the same line, from the bytes that are there."""
    data = os.urandom(3_000_000)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 300_000)
    with HubServer() as hub:
        repo = hub.add("org/name", {"model.safetensors": data})
        if broken:
            hub.faults.append(Fault("model.safetensors", "drop", 1_500_000))
        (commit,) = repo.commits
        remote = Remote("model.safetensors", len(data), hashlib.sha256(data).hexdigest(), None)
        Hub("org/name", hub.url).download(commit, remote, tmp_path / "got", tmp_path / "part")
    assert (tmp_path / "got").read_bytes() == data
    shown = lines(told())
    shares = [int(re.match(r"download model.safetensors: +(\d+) %, ", line)[1]) for line in shown]  # type: ignore[index]
    assert len(shares) >= 10 and shares == sorted(shares) and shares[-1] == 100
    assert all(re.search(RATE + "$", line) for line in shown[1:])


def test_what_an_earlier_run_left_counts_for_no_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, begun = os.urandom(3000), []

    def recorded(word: str, total: int, **more: Any) -> progress.Progress:
        begun.append((word, total, more))
        return progress.progress(word, total, **more)

    monkeypatch.setattr("artifacts.hub.progress", recorded)
    (tmp_path / "part").write_bytes(data[:1000])
    with HubServer() as hub:
        (commit,) = hub.add("org/name", {"config.json": data}).commits
        remote = Remote("config.json", len(data), hashlib.sha256(data).hexdigest(), None)
        Hub("org/name", hub.url).download(commit, remote, tmp_path / "got", tmp_path / "part")
        assert hub.sent("config.json") == 2000
    assert begun == [("download config.json", 3000, {"done": 1000})]


class Registry(BaseHTTPRequestHandler):
    """Takes every upload; `taken` has their bytes."""

    protocol_version = "HTTP/1.1"
    taken: ClassVar[list[bytes]] = []

    def answer(self, status: int) -> None:
        self.taken.append(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
        self.send_response(status)
        self.send_header("Location", "/v2/b/blobs/uploads/1")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        self.answer(202)

    def do_PUT(self) -> None:
        self.answer(201)

    def do_HEAD(self) -> None:
        self.answer(404)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


def test_a_push_and_a_pack(told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a registry, a directory, a tar file: each file by its name, to its end."""
    transport.alone(tmp_path, monkeypatch)
    bundle = transport.made(tmp_path / "made")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        push.push(bundle, f"oci://127.0.0.1:{server.server_port}/b:1")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert (bundle / "params.irpa").read_bytes() in Registry.taken
    shown = lines(told())
    push.push(bundle, "there")
    shown += lines(told())
    push.pack(bundle, "there.tar")
    shown += lines(told())
    for word in ("upload", "copy", "pack"):
        found = [re.match(rf"{word} params.irpa: +(\d+) %, .* of 293 KiB", x) for x in shown]
        shares = [int(match[1]) for match in found if match]
        assert shares[-1] == 100 and shares == sorted(shares), shown
    assert len([line for line in shown if line.startswith("upload params.irpa: ")]) > 10


@pytest.mark.filterwarnings("ignore:Use 'content=")  # of huggingface_hub's own HTTP client
def test_a_push_to_the_hub(
    told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Off a terminal each file when it is there."""
    transport.alone(tmp_path, monkeypatch)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    with UploadHub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        push.push(transport.made(tmp_path / "made"), "hf://org/name")
    said = told()
    if request.node.callspec.id == "terminal":
        assert said == ""
    else:
        names = [re.match(r"upload (\S+): 100 %, .*, in 0:0\d$", x) for x in lines(said)]
        assert [match[1] for match in names if match][:2] == ["model.vmfb", "params.irpa"]


@pytest.fixture
def slow_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in the compiler's place that takes a second, and fails for the flag --fail."""
    program = tmp_path / "iree-compile"
    program.write_text(
        "#!/bin/sh\nsleep 1; case $* in *--fail*) echo 'error: no' >&2; exit 1;; esac\n"
        "echo made > model.vmfb\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(compiler, "compiler_path", lambda: program)
    monkeypatch.setenv("SCANWRIGHT_CACHE", str(tmp_path / "cache"))
    return program


def test_a_compile(told: Told, tmp_path: Path, slow_compiler: Path) -> None:
    """The second is told by the pace of the first; one that fails teaches no pace."""
    text, flags = "x" * 100_000, ["--iree-hal-target-device=local"]
    compiler.run_compiler(text, flags, tmp_path)
    first = lines(told())
    pace = (tmp_path / "cache" / "pace.json").read_bytes()
    with pytest.raises(UserError, match=r"^iree-compile: error: no; "):
        compiler.run_compiler(text, [*flags, "--fail"], tmp_path)
    assert (tmp_path / "cache" / "pace.json").read_bytes() == pace
    failed = told()
    assert failed.rpartition("compile")[2].count("100 %") == 0
    compiler.run_compiler(text, flags, tmp_path)
    second = lines(told())
    assert all(line.startswith("compile (estimated): ") for line in [*first, *second])
    assert len(second) >= 4 and all(re.search(RATE + "$", line) for line in second)
    shares = [[int(line.split()[2]) for line in rows] for rows in (first, second)]
    assert 5 < max(share for share in shares[0] if share < 99) < 40  # FIRST: five seconds
    assert max(share for share in shares[1] if share < 99) > 40  # as long as the first
    assert len(text) == FIRST * 5


DAMAGED = ["", "[]", "{", '{"a": 0}', '{"a": "1"}', '{"a": NaN}', "[" * 9999]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_memory_of_paces_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "pace.json").write_text(content)
    with Paced(tmp_path, "a", LEAST) as paced:
        paced.tick()
    assert json.loads((tmp_path / "pace.json").read_text())["a"] > 0


def test_a_small_text_teaches_no_pace(tmp_path: Path) -> None:
    with Paced(tmp_path, "a", LEAST - 1) as paced:
        paced.tick()
    assert list(tmp_path.iterdir()) == []


def test_where_no_pace_can_be_kept_the_compile_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with Paced(tmp_path / "file", "a", LEAST) as paced:
        paced.tick()


def test_a_proof(told: Told, tmp_path: Path) -> None:
    """Every call of every entry counts once."""
    logits = (TensorSpec("logits", "f32", (1, 5)), TensorSpec("argmax", "i32", (1,)))
    tokens = TensorSpec("tokens", "i32", (1,))
    manifest: Any = SimpleNamespace(
        functions={"decode": FunctionSpec((tokens,), logits)},
        model=SimpleNamespace(vocab_size=5),
        shape=SimpleNamespace(context=None),
        proof=SimpleNamespace(tolerance=Tolerance(1e-5, 1e-5)),
    )
    values = np.arange(5, dtype=np.float32)[None]
    found = [values, np.asarray([4], np.int32)]
    device = SimpleNamespace(
        to_device=lambda array: array, to_host=lambda array: array, call=lambda name, given: found
    )
    for call, _ in probe.calls(manifest.functions):
        np.savez(tmp_path / f"{call}.npz", logits=values, argmax=found[1])
    rows = probe.check_whole(device, manifest, 1, tmp_path)
    assert len(rows) == 4 and all(row.ok for row in rows)
    shown = [re.sub(r"[\d.]+ calls/s, .*", "RATE", line) for line in lines(told())]
    assert shown[:2] == ["proof:  50 %, 1 of 2 calls, RATE", "proof: 100 %, 2 of 2 calls, RATE"]
