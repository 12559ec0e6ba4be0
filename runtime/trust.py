"""Signatures of bundles, by the package model-signing with a key pair: no service is asked.

`model.sig` in the bundle is a Sigstore bundle over every file but itself and the build log, as
`model_signing verify key` reads it, too. It is not listed in the manifest: signing a bundle does
not change its digest.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runtime import manifest as mf
from runtime.errors import UserError
from runtime.verify import check_files

SIGNATURE = "model.sig"
_NEW = f".{SIGNATURE}.new"
UNSIGNED = (SIGNATURE, "build.log.jsonl")
MAX_SIGNATURE_BYTES = 16 << 20
_CURVES = "P-256, P-384 or P-521"


def sign(bundle: Path, key: Path) -> Path:
    """Write `model.sig` into the bundle with the private key in the PEM file `key`; its path.

    Raises UserError: a bundle that is damaged or has files that its manifest does not list (they
    would not travel with it), a key that cannot be used, no package.
    """
    manifest = mf.load(bundle)
    listed = {ref.path for ref in manifest.files.all()} | {mf.FILE_NAME, *UNSIGNED, _NEW}
    there = (path for path in sorted(bundle.rglob("*")) if path.is_symlink() or not path.is_dir())
    if more := [str(path) for path in there if path.relative_to(bundle).as_posix() not in listed]:
        raise UserError(f"{more[0]}: not a file of the bundle's manifest, expected no other: remove"
                        " it")  # fmt: skip
    for row in check_files(bundle, manifest):
        if not row.ok:
            raise UserError(f"{bundle / row.what}: {row.detail}; rebuild: {manifest.rebuild}")
    signing = _package("signing")
    with _refused(f"key {key}", f"expected a PEM file with an unencrypted EC key of {_CURVES}"):
        config = signing.Config().use_elliptic_key_signer(private_key=key)
    path = bundle / SIGNATURE
    new = bundle / _NEW
    new.unlink(missing_ok=True)  # a killed signing's
    with _refused(str(bundle), "expected a bundle of plain files that can be read"):
        try:
            config.set_hashing_config(_hashing()).sign(bundle, new)
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)
    return path


def check(bundle: Path, key: Path) -> str:
    """Raise UserError unless every file of the bundle is what the owner of the key pair, whose
    public key is in the PEM file `key`, has signed, and nothing is there besides.

    Returns the sha256 of manifest.json by the signature. Its text is read once, so that what was
    checked is what is believed."""
    path = bundle / SIGNATURE
    verifying = _package("verifying")
    with _refused(f"key {key}", f"expected a PEM file with a public EC key of {_CURVES}"):
        config = verifying.Config().use_elliptic_key_verifier(public_key=key)
    if path.is_symlink() or not path.is_file():
        raise UserError(
            f"{bundle}: not signed (no {SIGNATURE}), expected one by the owner of {key};"
            f" sign it with doit sign bundle={bundle} key=KEY, or leave --trust out"
        )
    if path.stat().st_size > MAX_SIGNATURE_BYTES:
        raise UserError(f"{path}: larger than {MAX_SIGNATURE_BYTES} bytes: no signature")
    with (
        _refused(str(path), f"expected the files that the owner of {key} signed: do not use it"),
        tempfile.TemporaryDirectory(prefix="scanwright-") as own,
    ):
        copy = Path(own) / SIGNATURE
        copy.write_bytes(path.read_bytes())
        config.set_hashing_config(_hashing()).verify(bundle, copy)
        found = _signed(copy)
        if mf.FILE_NAME not in found:
            raise ValueError(f"it does not cover {mf.FILE_NAME}")
        return found[mf.FILE_NAME]


def _hashing() -> Any:
    config = _package("hashing").Config()
    return config.set_ignored_paths(paths=UNSIGNED, ignore_git_paths=False)


def _signed(path: Path) -> dict[str, str]:
    """Name → sha256 of the files that a signature, already checked, is over."""
    envelope = json.loads(path.read_text(encoding="utf-8"))["dsseEnvelope"]
    statement = json.loads(base64.b64decode(envelope["payload"]))
    resources = statement["predicate"]["resources"]
    return {str(resource["name"]): str(resource["digest"]) for resource in resources}


def _package(name: str) -> Any:
    try:
        return importlib.import_module(f"model_signing.{name}")
    except ImportError as error:
        raise UserError(
            f"signatures need the package model-signing ({error}): pip install 'scanwright[sign]'"
        ) from error


@contextlib.contextmanager
def _refused(what: str, expected: str) -> Iterator[None]:
    """Any failure of the package is a refusal, in one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{what}: {_said(error)}; {expected}") from error


def _said(error: Exception) -> str:
    """The package's words in one printable line, without the raw digests that it adds."""
    said = " ".join(str(error).replace("\\'", "'").split()).partition(": Expected '")[0]
    shown = "".join(c if c.isprintable() else "?" for c in said if c not in '[]"')
    return shown[:300] or type(error).__name__
