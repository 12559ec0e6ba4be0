"""Bundles in a container registry: the OCI distribution API, as much of it as a bundle needs.

A bundle is one artifact: an image manifest of type ARTIFACT whose layers are the bundle's files,
one each, with their names as `org.opencontainers.image.title`, as `oras` has it. So a layer's
digest is the sha256 that the bundle's manifest gives for the file.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import json
import os
import re
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime import manifest as mf
from runtime import web
from runtime.errors import UserError
from runtime.pack import MAX_MANIFEST
from runtime.place import MAX_UNLISTED, UNLISTED

ARTIFACT = "application/vnd.scanwright.bundle.v1+json"
LAYER = "application/vnd.scanwright.file.v1"
EMPTY = "application/vnd.oci.empty.v1+json"
IMAGE_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
TITLE = "org.opencontainers.image.title"
MAX_IMAGE_MANIFEST = 4 << 20
_NAME = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REFERENCE = re.compile(
    r"oci://(?P<host>[A-Za-z0-9.-]+(?::[0-9]{1,5})?|\[[0-9a-fA-F:]+\](?::[0-9]{1,5})?)"
    rf"/(?P<name>{_NAME}(?:/{_NAME})*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_CHALLENGE = re.compile(r'([a-zA-Z_]+)="([^"]*)"')


@dataclass(frozen=True)
class Reference:
    """`oci://host/name[:tag][@digest]`, in parts."""

    host: str
    name: str
    tag: str | None
    digest: str | None

    @property
    def base(self) -> str:
        """URL of the repository; http for this machine, else https."""
        name = urllib.parse.urlsplit(f"//{self.host}").hostname or ""
        return f"{'http' if web.is_loopback(name) else 'https'}://{self.host}/v2/{self.name}"

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return f"oci://{self.host}/{self.name}{tag}" + (f"@{self.digest}" if self.digest else "")


def parse(url: str) -> Reference:
    """A reference; the tag is `latest` if neither tag nor digest is given. Raises UserError."""
    match = _REFERENCE.fullmatch(url)
    if match is None:
        raise UserError(
            f"{url}: expected oci://HOST[:PORT]/NAME[:TAG][@sha256:…] with a name in lower case"
        )
    tag = match["tag"] or (None if match["digest"] else "latest")
    return Reference(match["host"], match["name"], tag, match["digest"])


class Registry:
    """Requests about one repository, with a token or password where it asks for one."""

    def __init__(self, client: web.Client, reference: Reference, actions: str = "pull") -> None:
        self._client, self._actions = client, actions
        self.host, self.name = reference.host, reference.name
        self.base = reference.base
        if client.plain:
            self.base = self.base.replace("https://", "http://", 1)
        self._authorization: str | None = None

    @contextlib.contextmanager
    def open(
        self, path: str, headers: Mapping[str, str] | None = None, **request: Any
    ) -> Iterator[web.Answer]:
        """The answer to a request for `path` below the repository, or for a URL of an upload.

        Raises as web.Client.open; a body that is a file is sent again after it was asked for
        credentials.
        """
        url = path if "://" in path else f"{self.base}{path}"
        own = web.origin(url) == web.origin(self.base)
        with contextlib.ExitStack() as stack:
            try:
                held = self._authorization if own else None
                first = self._client.open(url, headers, authorization=held, **request)
                answer = stack.enter_context(first)
            except web.Refused as error:
                if error.status != 401 or not own:
                    raise
                self._authorization = self._answered(error)
                if hasattr(request.get("data"), "seek"):
                    request["data"].seek(0)
                again = self._client.open(
                    url, headers, authorization=self._authorization, **request
                )
                answer = stack.enter_context(again)
            yield answer

    def _answered(self, error: web.Refused) -> str:
        """What to send after a 401: by its WWW-Authenticate. Raises Refused if there is nothing."""
        challenge = error.headers.get("WWW-Authenticate") or ""
        basic = credentials(self.host)
        scheme = challenge.partition(" ")[0].lower()
        if scheme == "basic" and basic is not None:
            return f"Basic {basic}"
        if scheme != "bearer":
            raise error
        fields = dict(_CHALLENGE.findall(challenge))
        realm = fields.get("realm", "")
        if self.base.startswith("https:") and not realm.startswith("https:"):
            raise UserError(
                f"oci://{self.host}: sends to {realm!a} for a token, expected https://…"
            )
        scope = fields.get("scope") or f"repository:{self.name}:{self._actions}"
        query = urllib.parse.urlencode({"service": fields.get("service", ""), "scope": scope})
        url = f"{realm}{'&' if '?' in realm else '?'}{query}"
        authorization = f"Basic {basic}" if basic else None
        with self._client.open(url, authorization=authorization) as answer:
            found = _json(web.read_all(answer, realm, 1 << 20), realm)
        token = found.get("token") or found.get("access_token")
        if not isinstance(token, str) or not token.isascii() or not token.isprintable():
            raise UserError(f"{realm}: gave no token, expected JSON with a token")
        return f"Bearer {token}"


def credentials(host: str) -> str | None:
    """`user:password` in base64 for a registry, or None.

    SCANWRIGHT_REGISTRY_AUTH (USER:PASSWORD@HOST[:PORT]) if it is that host's, else what `docker
    login` has written to config.json (in DOCKER_CONFIG or ~/.docker). Raises UserError for a config
    that cannot be read.
    """
    pair, _, whose = os.environ.get("SCANWRIGHT_REGISTRY_AUTH", "").rpartition("@")
    if whose == host and ":" in pair:
        return base64.b64encode(pair.encode()).decode()
    path = Path(os.environ.get("DOCKER_CONFIG") or "~/.docker").expanduser() / "config.json"
    if not path.is_file():
        return None
    auths = _json(path.read_bytes(), str(path)).get("auths")
    entry = auths.get(host) if isinstance(auths, dict) else None
    found = entry.get("auth") if isinstance(entry, dict) else None
    if not found:
        return None
    try:
        plain = base64.b64decode(found, validate=True) if isinstance(found, str) else b""
    except (binascii.Error, ValueError):
        plain = b""
    if b":" not in plain:
        raise UserError(f"{path}: auths.{host}.auth is no user:password in base64; log in again")
    return base64.b64encode(plain).decode()


def _json(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object. Raises UserError for anything else."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({str(error)[:80]}), expected an object") from error
    if not isinstance(found, dict):
        raise UserError(f"{where}: found {type(found).__name__}, expected a JSON object")
    return found


@dataclass(frozen=True)
class Layer:
    """A file of an artifact: sha256 hex and bytes."""

    sha256: str
    size: int


def layers(data: bytes, where: str) -> dict[str, Layer]:
    """The files of an image manifest by title. Raises UserError for one that is no artifact."""
    content = _json(data, where)
    if "manifests" in content:
        raise UserError(
            f"{where}: an index of several images, expected one artifact; name a digest"
        )
    listed = content.get("layers")
    if content.get("schemaVersion") != 2 or not isinstance(listed, list):
        raise UserError(f"{where}: no image manifest with layers, expected what doit push makes")
    found: dict[str, Layer] = {}
    for number, layer in enumerate(listed):
        field = f"{where}: layers[{number}]"
        part = layer if isinstance(layer, dict) else {}
        notes = part.get("annotations")
        title = notes.get(TITLE) if isinstance(notes, dict) else None
        digest, size = part.get("digest"), part.get("size")
        if not isinstance(title, str):
            raise UserError(f"{field}: no {TITLE}, expected a file's name; it is no bundle")
        if not isinstance(digest, str) or not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
            raise UserError(f"{field}: found the digest {str(digest)[:80]!a}, expected sha256:…")
        if type(size) is not int or size < 0:
            raise UserError(f"{field}: found the size {str(size)[:40]}, expected bytes")
        if title in found:
            raise UserError(f"{field}: {title[:80]!a} is there twice, expected each file once")
        found[title] = Layer(digest.removeprefix("sha256:"), size)
    return found


class OciSource:
    """A bundle in a registry, to be pulled."""

    def __init__(self, registry: Registry, reference: Reference) -> None:
        self.where, self._registry, self._reference = str(reference), registry, reference
        self._layers: dict[str, Layer] = {}

    def manifest(self) -> bytes:
        """The bytes of manifest.json; from now on all comes from the artifact that has it."""
        at = self._reference.digest or self._reference.tag
        data = self._get(f"/manifests/{at}", {"Accept": IMAGE_MANIFEST}, MAX_IMAGE_MANIFEST)
        found = hashlib.sha256(data).hexdigest()
        if self._reference.digest not in (None, f"sha256:{found}"):
            raise UserError(f"{self.where}: the registry answered with sha256:{found}, expected"
                            " what was asked for")  # fmt: skip
        self._layers = layers(data, self.where)
        if mf.FILE_NAME not in self._layers:
            raise UserError(f"{self.where}: no {mf.FILE_NAME} in it, expected a bundle")
        return self._blob(mf.FILE_NAME, MAX_MANIFEST)

    def _get(self, path: str, headers: Mapping[str, str], limit: int) -> bytes:
        try:
            with self._registry.open(path, headers) as answer:
                return web.read_all(answer, self.where, limit)
        except web.Refused as error:
            raise explained(self.where, error) from error
        except web.BROKEN as error:
            web.broken(self.where, error)

    def _blob(self, name: str, limit: int) -> bytes:
        layer = self._layers[name]
        data = self._get(f"/blobs/sha256:{layer.sha256}", {}, limit)
        got = hashlib.sha256(data).hexdigest()
        if got != layer.sha256:
            raise UserError(f"{self.where}: {name}: sha256 {got}, expected {layer.sha256}; try"
                            " again, or push it again")  # fmt: skip
        return data

    def check(self, manifest: mf.Manifest) -> None:
        """Raise UserError unless the artifact has the manifest's files, as it names them."""
        for ref in manifest.files.all():
            if self._layers.get(ref.path) != Layer(ref.sha256, ref.size):
                raise UserError(f"{self.where}: {ref.path!a} is missing or another file than the"
                                " manifest's; push it again")  # fmt: skip

    def unlisted(self) -> dict[str, bytes]:
        """Files that no manifest can list."""
        return {n: self._blob(n, MAX_UNLISTED) for n in UNLISTED if n in self._layers}

    def receive(self, ref: mf.FileRef, partial: Path, count: web.Count) -> None:
        """Append the rest of a file to `partial`."""

        def opener(headers: web.Headers) -> AbstractContextManager[web.Answer]:
            return self._registry.open(f"/blobs/sha256:{ref.sha256}", headers)

        web.download(opener, f"{self.where}: {ref.path}", partial, ref.size, count)


def explained(where: str, error: web.Refused) -> UserError:
    """A registry's refusal as one line, with the registry's own words."""
    hint = "; check the name and the tag" if error.status == 404 else ""
    if error.status in (401, 403):
        hint = "; docker login, or SCANWRIGHT_REGISTRY_AUTH=USER:PASSWORD@HOST"
    with contextlib.suppress(ValueError, TypeError, LookupError, AttributeError):
        told = json.loads(error.body)["errors"][0]
        words = f"{told['code']}: {told.get('message', '')}".encode()
        error = web.Refused(error.status, error.headers, words)
    return web.refusal(where, error, hint)
