"""Pushes a bundle to a container registry as one artifact; see `runtime.oci` for its form."""

from __future__ import annotations

import contextlib
import hashlib
import json
import urllib.parse
from pathlib import Path
from typing import Any

from artifacts.disk import hash_file
from runtime import oci, web
from runtime.errors import UserError
from runtime.manifest import Manifest
from runtime.progress import shown

_CONFIG = b"{}"


def push_oci(bundle: Path, manifest: Manifest, names: list[str], to: str, plain: bool) -> str:
    """Upload what the registry does not have, then the manifest under its tag; the reference with
    the digest that pins it. The same bundle has the same digest. Raises UserError."""
    reference = oci.parse(to)
    if reference.digest is not None:
        raise UserError(f"to={to}: found a digest, expected a tag to push to")
    registry = oci.Registry(web.Client(plain), reference, "pull,push")
    try:
        config = _upload(registry, to, "config", _CONFIG, oci.EMPTY)
        layers = []
        for name in sorted(names):
            layers.append(_upload(registry, to, name, bundle / name, oci.LAYER))
            layers[-1]["annotations"] = {oci.TITLE: name}
        targets = ", ".join(target.name for target in manifest.targets)
        about = f"{manifest.model.name} for {targets}, {manifest.shape.name}"
        content = {
            "schemaVersion": 2,
            "mediaType": oci.IMAGE_MANIFEST,
            "artifactType": oci.ARTIFACT,
            "config": config,
            "layers": layers,
            "annotations": {"org.opencontainers.image.description": about},
        }
        data = json.dumps(content, sort_keys=True, indent=1).encode()
        headers = {"Content-Type": oci.IMAGE_MANIFEST}
        with registry.open(f"/manifests/{reference.tag}", headers, method="PUT", data=data):
            pass
    except web.Refused as error:
        raise oci.explained(to, error) from error
    except web.BROKEN as error:
        if getattr(error, "filename", None) is not None:
            raise
        web.broken(to, error)
    return f"{reference}@sha256:{hashlib.sha256(data).hexdigest()}"


def _upload(
    registry: oci.Registry, to: str, name: str, content: Path | bytes, kind: str
) -> dict[str, Any]:
    """The descriptor of a blob that the registry has afterwards. Raises as Registry.open."""
    if isinstance(content, bytes):
        digest, size = hashlib.sha256(content).hexdigest(), len(content)
    else:
        digest, size = hash_file(content)
    descriptor = {"mediaType": kind, "digest": f"sha256:{digest}", "size": size}
    try:
        with registry.open(f"/blobs/sha256:{digest}", method="HEAD"):
            return descriptor
    except web.Refused as error:
        if error.status != 404:
            raise
    with registry.open("/blobs/uploads/", method="POST", data=b"") as answer:
        location = answer.headers.get("Location")
    if not location:
        raise UserError(
            f"{to}: {name}: the registry names no place to upload to, expected a Location"
        )
    url = urllib.parse.urljoin(f"{registry.base}/blobs/uploads/", location)
    url += ("&" if urllib.parse.urlsplit(url).query else "?") + f"digest=sha256:{digest}"
    headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
    with contextlib.ExitStack() as stack:
        data = content if isinstance(content, bytes) else b""
        if isinstance(content, Path) and size:
            data = stack.enter_context(shown(f"upload {name}", content))
        with registry.open(url, headers, method="PUT", data=data):
            return descriptor
