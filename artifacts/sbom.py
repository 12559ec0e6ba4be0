"""sbom.cdx.json: what a bundle was made of and by, as CycloneDX 1.6 JSON.

No serial number and no time: the same inputs give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from runtime.manifest import BuildInfo, FileRef, Package

FILE_NAME = "sbom.cdx.json"
COMPILER = "iree-base-compiler"
SPEC = "1.6"


def document(model: Mapping[str, Any], build: BuildInfo, target: str, shape: str) -> bytes:
    """The text for a bundle of `model` (the manifest's section of that name).

    Components: the model with its licence, where it is from and the digests of the checkpoint's
    files; the compiler and the other packages with their versions.
    """
    components = [_model(model, build), *(_package(package) for package in build.packages)]
    bundle = {"type": "machine-learning-model", "bom-ref": "bundle", "name": str(model["name"])}
    bundle["description"] = f"Scanwright bundle for {target}, {shape}"
    content = {
        "$schema": f"http://cyclonedx.org/schema/bom-{SPEC}.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": SPEC,
        "version": 1,
        "metadata": {"component": bundle},
        "components": components,
        "dependencies": [
            {"ref": "bundle", "dependsOn": sorted(c["bom-ref"] for c in components)},
            *({"ref": ref} for ref in sorted(c["bom-ref"] for c in components)),
        ],
    }
    return (json.dumps(content, sort_keys=True, indent=1, ensure_ascii=True) + "\n").encode()


def _model(model: Mapping[str, Any], build: BuildInfo) -> dict[str, Any]:
    source, revision = str(model["source"]), model["revision"]
    found: dict[str, Any] = {
        "type": "machine-learning-model",
        "bom-ref": "model",
        "name": source,
        "description": f"checkpoint of the family {model['family']}",
        "components": [
            {
                "type": "file",
                "bom-ref": f"model/{ref.path}",
                "name": ref.path,
                "hashes": [{"alg": "SHA-256", "content": ref.sha256}],
            }
            for ref in build.files
        ],
    }
    if revision is not None:
        found["version"] = revision
    if model["license"] is not None:
        found["licenses"] = [{"license": {"name": model["license"]}}]
    if source.startswith("hf:"):
        at = "" if revision is None else f"/tree/{revision}"
        url = f"https://huggingface.co/{source.removeprefix('hf:')}{at}"
        found["externalReferences"] = [{"type": "distribution", "url": url}]
    return found


def _package(package: Package) -> dict[str, Any]:
    purl = f"pkg:pypi/{package.name}@{package.version}"
    about = {"description": "the compiler"} if package.name == COMPILER else {}
    kind = "application" if about else "library"
    return {
        "type": kind,
        "bom-ref": purl,
        "name": package.name,
        "version": package.version,
        "purl": purl,
        **about,
    }


def packages(found: Mapping[str, str]) -> Iterable[Package]:
    """Name → version as the manifest has them, by name."""
    return (Package(name, version) for name, version in sorted(found.items()))


def reference(text: bytes) -> FileRef:
    """The manifest's entry for the document `text`."""
    return FileRef(FILE_NAME, hashlib.sha256(text).hexdigest(), len(text))
