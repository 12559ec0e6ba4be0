"""A small hub on this machine: enough of the HTTP API for the real huggingface_hub client.

Speaks model info at a revision (with file metadata), HEAD and GET of resolve with ETag and
X-Repo-Commit, LFS files behind a redirect to a store with X-Linked-Etag and X-Linked-Size, Range,
gated and private repositories with tokens, the X-Error-Code answers, and faults on request.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

TOKEN = "hf_right"
STRANGER = "hf_no_access"  # a valid token of an account without access


@dataclass
class Repo:
    """`commits`: commit → file name → bytes; `refs`: branch or tag → commit."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    gated: bool = False
    private: bool = False
    lfs: Callable[[str], bool] = lambda name: name.endswith((".safetensors", ".bin"))
    claimed_size: dict[str, int] = field(default_factory=dict)  # lies in the listing


@dataclass
class Fault:
    """Strikes the next `times` GETs of the file `name`, or of model info at `/<revision>`.

    kind: "drop" closes the connection after `at` bytes, "flip" inverts the byte at `at`,
    "short" ends the answer properly after `at` bytes, an integer answers with that status.
    """

    name: str
    kind: str | int
    at: int = 0
    times: int = 1


@dataclass
class Seen:
    """One request: `range` is the first byte asked for or None, `sent` the body bytes written."""

    method: str
    path: str
    token: str | None
    range: int | None
    status: int = 0
    sent: int = 0


def commit_id(word: str) -> str:
    """A commit hash for a test's word."""
    return hashlib.sha1(word.encode()).hexdigest()


def git_id(data: bytes) -> str:
    """The git object id of a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class HubServer:
    """`with HubServer() as hub:` serves `hub.repos` at `hub.url` and records `hub.log`."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.faults: list[Fault] = []
        self.log: list[Seen] = []
        self.connections: list[socket.socket] = []
        self.served: dict[str, bytes] = {}  # sha256 → bytes sent instead of the right ones
        handler = type("Handler", (_Handler,), {"hub": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Refuse connections from now on and end those that are open."""
        if self._thread.is_alive():
            self._http.shutdown()
            self._thread.join()
        self._http.server_close()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def add(self, name: str, files: dict[str, bytes], commit: str = "one", **options: Any) -> Repo:
        """A repository whose `main` is `commit`; adding again moves `main`."""
        repo = self.repos.setdefault(name, Repo({}, {}))
        repo.commits[commit_id(commit)] = dict(files)
        repo.refs["main"] = commit_id(commit)
        for key, value in options.items():
            setattr(repo, key, value)
        return repo

    def downloads(self) -> list[str]:
        """Names of the files asked for, in order."""
        found = (re.search(r"/resolve/[^/]+/(.+)$", seen.path) for seen in self.log)
        return [match[1] for match in found if match]

    def sent(self, suffix: str) -> int:
        """Body bytes of files sent for paths that end with `suffix`."""
        return sum(seen.sent for seen in self.log if seen.path.endswith(suffix))


class _Handler(BaseHTTPRequestHandler):
    hub: ClassVar[HubServer]
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.hub.connections.append(self.connection)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: the log is `hub.log`."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        first = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        self.seen = Seen(self.command, path, token, int(first[1]) if first else None)
        self.hub.log.append(self.seen)
        if info := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)/revision/(.+)", path):
            self._info(info[1], info[2])
        elif file := re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(file[1], file[2], file[3])
        elif blob := re.fullmatch(r"/store/([0-9a-f]{64})/(.+)", path):
            self._store(blob[1], blob[2])
        else:
            self._refuse(404, None, "not found")

    def _open(self, name: str, revision: str, *, content: bool) -> tuple[Repo, str] | None:
        """The repository and commit, or None when the request has been refused."""
        repo, token = self.hub.repos.get(name), self.seen.token
        if token not in (None, TOKEN, STRANGER):
            return self._refuse(401, None, "Invalid credentials in Authorization header")
        if repo is None or (repo.private and token != TOKEN):
            status = 401 if token is None else 404
            return self._refuse(status, "RepoNotFound" if token else None, "Repository not found")
        if repo.gated and content and token != TOKEN:
            return self._refuse(401 if token is None else 403, "GatedRepo", f"{name} is gated")
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repo, commit

    def _info(self, name: str, revision: str) -> None:
        found = self._open(name, revision, content=False)
        if found is None:
            return
        if fault := self._fault(f"/{revision}"):
            self._refuse(int(fault.kind), None, "a fault")
            return
        repo, commit = found
        siblings = []
        for file, data in sorted(repo.commits[commit].items()):
            size = repo.claimed_size.get(file, len(data))
            item: dict[str, Any] = {"rfilename": file, "size": size, "blobId": git_id(data)}
            if repo.lfs(file):
                sha = hashlib.sha256(data).hexdigest()
                item["lfs"] = {"sha256": sha, "size": size, "pointerSize": 134}
            siblings.append(item)
        body = json.dumps({"id": name, "modelId": name, "sha": commit, "siblings": siblings,
                           "private": repo.private, "gated": repo.gated, "tags": []})  # fmt: skip
        self._send(200, body.encode(), {"Content-Type": "application/json"})

    def _resolve(self, name: str, revision: str, file: str) -> None:
        found = self._open(name, revision, content=True)
        if found is None:
            return
        repo, commit = found
        data = repo.commits[commit].get(file)
        if data is None:
            self._refuse(404, "EntryNotFound", "Entry not found")
        elif repo.lfs(file):
            sha = hashlib.sha256(data).hexdigest()
            self.hub.served.setdefault(sha, data)
            self._send(302, b"", {
                "Location": f"{self.hub.url}/store/{sha}/{file}", "X-Repo-Commit": commit,
                "X-Linked-Etag": f'"{sha}"', "X-Linked-Size": str(len(data)),
            })  # fmt: skip
        else:
            data = self.hub.served.get(git_id(data), data)
            self._file(file, data, {"ETag": f'"{git_id(data)}"', "X-Repo-Commit": commit})

    def _store(self, sha: str, file: str) -> None:
        self._file(file, self.hub.served[sha], {"ETag": f'"{sha}"'})

    # --- bodies ------------------------------------------------------------------------------

    def _file(self, name: str, data: bytes, headers: dict[str, str]) -> None:
        fault = self._fault(name)
        if fault is not None and isinstance(fault.kind, int):
            self._refuse(fault.kind, None, "a fault")
            return
        start = self.seen.range
        if start is not None and start >= len(data):
            self._send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            return
        body, status = data, 200
        if fault is not None and fault.kind == "flip":
            body = data[: fault.at] + bytes([data[fault.at] ^ 0xFF]) + data[fault.at + 1 :]
        if start is not None:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            body, status = body[start:], 206
        if fault is not None and fault.kind == "short":
            body = body[: fault.at]
        self._send(status, body, headers, fault.at if fault and fault.kind == "drop" else None)

    def _fault(self, name: str) -> Fault | None:
        """The first fault that has strikes left for a GET of `name`."""
        for fault in self.hub.faults:
            if self.command == "GET" and fault.times and name == fault.name:
                fault.times -= 1
                return fault
        return None

    def _refuse(self, status: int, code: str | None, message: str) -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self._send(status, json.dumps({"error": message}).encode(), headers)

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], drop_at: int | None = None
    ) -> None:
        self.seen.status = status
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        part = body if drop_at is None else body[:drop_at]
        self.wfile.write(part)
        if status in (200, 206):
            self.seen.sent += len(part)
        if drop_at is not None:
            self.wfile.flush()
            self.close_connection = True
