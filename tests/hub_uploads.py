"""The hub server's other half: what huggingface_hub asks for to make a repository and to commit.

Requests of `create_repo`, `create_branch`, the choice between plain and LFS upload, the LFS batch
with its uploads, and commits, each of which needs the right token.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import Any
from urllib.parse import unquote, urlsplit

from hub_server import TOKEN, HubServer, Repo, _Handler, commit_id


class UploadHub(HubServer):
    """A hub that takes commits."""

    def __init__(self) -> None:
        super().__init__()
        self._http.RequestHandlerClass = type("Uploads", (_Uploads,), {"hub": self})


class _Uploads(_Handler):
    def do_PUT(self) -> None:
        digest = urlsplit(self.path).path.rsplit("/", 1)[1]
        data = self._body()
        right = hashlib.sha256(data).hexdigest() == digest
        self.hub.served[digest] = data
        self._json(200 if right else 400, {})

    def do_POST(self) -> None:
        path, body = unquote(urlsplit(self.path).path), self._body()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._json(401, {"error": "Invalid credentials in Authorization header"})
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif match := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)/branch/(.+)", path):
            repo = self.hub.repos[match[1]]
            repo.refs.setdefault(match[2], repo.refs["main"])
            self._json(200, {})
        elif re.fullmatch(r"/api/models/[\w.-]+/[\w.-]+/preupload/.+", path):
            asked = json.loads(body)["files"]
            files = [{"path": f["path"], "uploadMode": self._mode(f["path"])} for f in asked]
            self._json(200, {"files": [{**f, "shouldIgnore": False} for f in files]})
        elif path.endswith(".git/info/lfs/objects/batch"):
            self._json(200, self._batch(json.loads(body)))
        elif match := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)/commit/(.+)", path):
            self._commit(match[1], match[2], [json.loads(line) for line in body.splitlines()])
        else:
            self._json(404, {"error": "not found"})

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _json(self, status: int, value: Any) -> None:
        self.seen = type("Unlogged", (), {"sent": 0})()
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _mode(self, path: str) -> str:
        return "lfs" if path.endswith((".irpa", ".vmfb")) else "regular"

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        there = name in self.hub.repos
        if not there:
            empty = commit_id(name)
            self.hub.repos[name] = repo = Repo({empty: {}}, {"main": empty})
            repo.private = bool(asked.get("private") or asked.get("visibility") == "private")
            repo.lfs = lambda file: self._mode(file) == "lfs"
        self._json(409 if there else 200, {"url": f"{self.hub.url}/{name}", "error": "exists"})

    def _batch(self, asked: dict[str, Any]) -> dict[str, Any]:
        objects = []
        for item in asked["objects"]:
            new = {"upload": {"href": f"{self.hub.url}/uploads/{item['oid']}"}}
            there = item["oid"] in self.hub.served
            objects.append({**item, **({} if there else {"actions": new})})
        return {"transfer": "basic", "objects": objects}

    def _commit(self, name: str, branch: str, lines: list[dict[str, Any]]) -> None:
        repo = self.hub.repos[name]
        files = dict(repo.commits[repo.refs[branch]])
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.served[value["oid"]]
        commit = commit_id(f"{name}{len(repo.commits)}")
        repo.commits[commit], repo.refs[branch] = files, commit
        url = f"{self.hub.url}/{name}/commit/{commit}"
        self._json(200, {"success": True, "commitUrl": url, "commitOid": commit})
