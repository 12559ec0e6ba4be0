"""A hub that lies: about sizes and digests, with paths in place of them, and without end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import hub_server
import pytest
from hub_server import HubServer, commit_id

from artifacts.fetch import fetch
from artifacts.hub import Hub, Remote
from runtime.errors import UserError, shown

NAME = "org/tiny"
FILES = {"config.json": b'{"model_type": "mamba2"}', "model.safetensors": b"\0" * 64}


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        server.add(NAME, FILES)
        yield server


def told(hub: HubServer, place: Path) -> str:
    """The line of a failed fetch, which has left no file behind but its own lock."""
    (place / "cache").mkdir(exist_ok=True)
    before = {path for path in place.rglob("*") if not path.is_relative_to(place / "cache")}
    with pytest.raises(UserError) as caught:
        fetch(f"hf:{NAME}", None, place / "cache", place / "lock.json", endpoint=hub.url)
    after = {path for path in place.rglob("*") if not path.is_relative_to(place / "cache")}
    assert after == before
    line = shown(caught.value)
    assert line.startswith(f"hf:{NAME}") and line.isprintable()
    return line


@pytest.mark.parametrize("field", ["sha256", "blobId"])
@pytest.mark.parametrize("word", ["../../../owned", "/tmp/owned", "A" * 64, "a\0b", ""])
def test_a_path_in_place_of_a_digest_is_refused(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, word: str
) -> None:
    real = hub_server.json.dumps

    def lying(value: Any, **options: Any) -> str:
        for item in value.get("siblings", []) if isinstance(value, dict) else []:
            if field == "blobId":
                item["blobId"] = word
            elif "lfs" in item:
                item["lfs"]["sha256"] = word
        return real(value, **options)

    monkeypatch.setattr(hub_server.json, "dumps", lying)
    assert "expected bytes and hex digits" in told(hub, tmp_path)


@pytest.mark.parametrize("size", [-1, 2**70, 1.5, "7", True])
def test_a_size_that_is_none_is_refused(hub: HubServer, tmp_path: Path, size: Any) -> None:
    hub.repos[NAME].claimed_size["model.safetensors"] = size
    assert "model.safetensors" in told(hub, tmp_path)


@pytest.mark.parametrize("name", ["../owned.safetensors", "/etc/owned.safetensors", "a/b.json"])
def test_names_with_directories_are_never_brought(
    hub: HubServer, tmp_path: Path, name: str
) -> None:
    hub.add(NAME, {**FILES, name: b"x"})
    place = tmp_path / "cache"
    place.mkdir()
    fetch(f"hf:{NAME}", None, place, tmp_path / "lock.json", endpoint=hub.url)
    assert hub.downloads() and name not in hub.downloads()
    assert not list(tmp_path.rglob("*owned*"))


class _Endless(BaseHTTPRequestHandler):
    """Sends bytes until the other side goes, with and without a length."""

    protocol_version = "HTTP/1.1"
    sent = 0

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self.send_response(200)
        if "length" in self.path:
            self.send_header("Content-Length", str(1 << 50))
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            while type(self).sent < 1 << 30:
                self.wfile.write(b"x" * (1 << 16))
                type(self).sent += 1 << 16
        except OSError:
            return


@pytest.mark.parametrize("name", ["model.safetensors", "length.safetensors"])
def test_a_body_without_end_stops_at_its_size(tmp_path: Path, name: str) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Endless)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        remote = Remote(name, 100_000, "a" * 64, None)
        partial = tmp_path / "x.part"
        with pytest.raises(UserError, match="more than the expected 100000 bytes"):
            Hub(NAME, f"http://127.0.0.1:{server.server_port}").download(
                commit_id("one"), remote, tmp_path / name, partial
            )
        assert partial.stat().st_size == 0 and not (tmp_path / name).exists()
    finally:
        server.shutdown()
        server.server_close()


def test_a_redirect_elsewhere_takes_no_token_along(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
    with HubServer() as other:
        other.served.update(hub.served)
        here = hub.url
        hub.url = other.url  # where the store of large files is said to be
        sha = hub_server.hashlib.sha256(FILES["model.safetensors"]).hexdigest()
        other.served[sha] = FILES["model.safetensors"]
        (tmp_path / "cache").mkdir()
        fetch(f"hf:{NAME}", None, tmp_path / "cache", tmp_path / "lock.json", endpoint=here)
        assert [seen.path for seen in other.log] and not any(seen.token for seen in other.log)
        assert any(seen.token == hub_server.TOKEN for seen in hub.log)


def test_a_redirect_to_a_file_is_no_file(hub: HubServer, tmp_path: Path) -> None:
    hub.url, here = "file:///etc", hub.url
    with pytest.raises(UserError) as caught:
        (tmp_path / "cache").mkdir()
        fetch(f"hf:{NAME}", None, tmp_path / "cache", tmp_path / "lock.json", endpoint=here)
    assert shown(caught.value).startswith(f"hf:{NAME}: model.safetensors: ")
