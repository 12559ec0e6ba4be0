"""Signed bundles and their SBOM: what the owner of a key signed opens, anything else is refused."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import bundles
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from test_determinism import NAME, SHAPE

from artifacts import sbom
from runtime import cli, trust
from runtime import manifest as manifests
from runtime.errors import UserError

pytestmark = [
    pytest.mark.iree,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # of what model-signing imports
]


def key_pair(home: Path, name: str) -> tuple[Path, Path]:
    """(private, public) PEM files, as openssl writes them."""
    key = ec.generate_private_key(ec.SECP256R1())
    private, public = home / f"{name}.pem", home / f"{name}.pub"
    kind = serialization.PrivateFormat.PKCS8
    plain = serialization.NoEncryption()
    private.write_bytes(key.private_bytes(serialization.Encoding.PEM, kind, plain))
    public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return private, public


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return key_pair(tmp_path_factory.mktemp("keys"), "ours")


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A copy of a bundle, not signed."""
    place = tmp_path / "bundle"
    place.mkdir()
    for path in bundles.build(NAME, "cpu", SHAPE).iterdir():
        shutil.copyfile(path, place / path.name)
    return place


def test_what_would_not_travel_with_the_bundle_is_not_signed(
    bundle: Path, keys: tuple[Path, Path]
) -> None:
    for more in ("notes.txt", "more/.hidden"):
        path = bundle / more
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
        with pytest.raises(UserError, match=rf"{more}: not a file of the bundle's manifest"):
            trust.sign(bundle, keys[0])
        path.unlink()
    (bundle / "build.log.jsonl").write_text("{}\n")
    (bundle / ".model.sig.new").write_text("of a killed signing")
    trust.check(trust.sign(bundle, keys[0]).parent, keys[1])
    trust.check(trust.sign(bundle, keys[0]).parent, keys[1])  # signed anew


def test_what_was_replaced_after_its_check_is_not_believed(
    signed: Path, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    checked = trust.check

    def check(place: Path, key: Path) -> str:
        found = checked(place, key)
        resealed(place)
        return found

    monkeypatch.setattr(trust, "check", check)
    code, out, err = verify(signed, keys[1], capsys)
    assert code == 1 and "sha256 matches" not in out
    assert "manifest.json: sha256" in err and "it was replaced" in err


@pytest.fixture
def signed(bundle: Path, keys: tuple[Path, Path]) -> Path:
    trust.sign(bundle, keys[0])
    return bundle


def verify(bundle: Path, key: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of scanwright verify --trust."""
    code = cli.main(["verify", str(bundle), "--trust", str(key)])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_bundle_is_signed_and_verified_by_the_commands(
    bundle: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    digest = manifests.load(bundle).digest
    words = ["sign", f"bundle={bundle}", f"key={keys[0]}"]
    done = bundles.doit(words, tmp_path, tmp_path / "cache")
    assert (done.returncode, done.stdout) == (0, f"signed: {bundle}/model.sig\n"), done.stderr
    assert manifests.load(bundle).digest == digest
    moved = bundle.rename(tmp_path / "elsewhere")  # neither its name nor its place is signed
    (moved / "build.log.jsonl").write_text("{}\n")  # nor what the next build logs
    found = subprocess.run(
        [sys.executable, "-m", "runtime", "verify", str(moved), "--trust", str(keys[1])],
        capture_output=True, text=True, cwd=bundles.ROOT,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith(f"{moved}: signed by the owner of {keys[1]}\n")
    assert "model.sig" not in {ref.path for ref in manifests.load(moved).files.all()}


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def resealed(bundle: Path) -> None:
    """Other weights, with a manifest that is right about them."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    flipped(bundle / "params.irpa")
    from runtime.verify import sha256

    manifest["files"]["params"]["sha256"] = sha256(bundle / "params.irpa")
    text = json.dumps(manifest, sort_keys=True, indent=1) + "\n"
    (bundle / "manifest.json").write_text(text)


def linked(bundle: Path) -> None:
    (bundle / "params.irpa").rename(bundle.parent / "params.irpa")
    (bundle / "params.irpa").symlink_to(bundle.parent / "params.irpa")


CHANGES: dict[str, Callable[[Path], object]] = {
    "Hash mismatch for 'params.irpa'": lambda b: flipped(b / "params.irpa"),
    "Hash mismatch for 'manifest.json'": resealed,
    "Hash mismatch for 'sbom.cdx.json'": lambda b: flipped(b / "sbom.cdx.json"),
    "Extra files found": lambda b: (b / "tokenizer.json").write_text("{}"),
    "Extra files found in model": lambda b: (b / ".gitignore").write_text("x"),
    "Missing files": lambda b: (b / "sbom.cdx.json").unlink(),
    "it is a symlink": linked,
    "not signed (no model.sig)": lambda b: (b / "model.sig").unlink(),
    "model.sig": lambda b: (b / "model.sig").write_text("{}"),
    "model.sig: Expecting value": lambda b: (b / "model.sig").write_text(""),
    "no signature": lambda b: os.truncate(b / "model.sig", trust.MAX_SIGNATURE_BYTES + 1),
}


@pytest.mark.parametrize("word", CHANGES)
def test_an_altered_or_unsigned_bundle_is_refused(
    word: str, signed: Path, keys: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    trust.check(signed, keys[1])
    CHANGES[word](signed)
    code, out, err = verify(signed, keys[1], capsys)
    assert (code, out) == (1, "")  # nothing is opened or run
    assert err.count("\n") == 1 and err.startswith(f"error: {signed}") and word in err
    assert "[" not in err


def test_only_the_owner_of_the_key_is_trusted(
    signed: Path, keys: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    private, public = key_pair(tmp_path, "another")
    assert "Key mismatch" in verify(signed, public, capsys)[2]
    # the hint of the key in the file is not what decides
    trust.sign(signed, private)
    content = json.loads((signed / "model.sig").read_text())
    other = json.loads((trust.sign(signed, keys[0])).read_text())
    content["verificationMaterial"] = other["verificationMaterial"]
    (signed / "model.sig").write_text(json.dumps(content))
    code, out, err = verify(signed, keys[1], capsys)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "model.sig" in err


def test_a_signature_of_other_contents_under_the_same_key_is_refused(
    signed: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    payload = json.loads((signed / "model.sig").read_text())["dsseEnvelope"]["payload"]
    names = {r["name"] for r in json.loads(base64.b64decode(payload))["predicate"]["resources"]}
    listed = {ref.path for ref in manifests.load(signed).files.all()}
    assert names == {*listed, "manifest.json"}
    # One whose signer left the manifest out: it says nothing of a bundle.
    from model_signing import hashing, signing

    config = hashing.Config().set_ignored_paths(
        paths=["manifest.json", *trust.UNSIGNED], ignore_git_paths=False
    )
    signer = signing.Config().use_elliptic_key_signer(private_key=keys[0])
    signer.set_hashing_config(config).sign(signed, signed / "model.sig")
    with pytest.raises(UserError, match=r"it does not cover manifest\.json"):
        trust.check(signed, keys[1])


def test_keys_and_bundles_that_cannot_be_used_are_told(
    bundle: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    words = tmp_path / "words"
    words.write_text("not a key")
    form, kind = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    others = {"rsa": rsa.generate_private_key(65537, 2048), "ed": Ed25519PrivateKey.generate()}
    for name, key in others.items():
        (tmp_path / name).write_bytes(key.private_bytes(form, kind, serialization.NoEncryption()))
    locked = serialization.BestAvailableEncryption(b"word")
    (tmp_path / "locked").write_bytes(
        ec.generate_private_key(ec.SECP256R1()).private_bytes(form, kind, locked)
    )
    unusable = [tmp_path / name for name in ("absent", "rsa", "ed", "locked")]
    for key in (words, keys[1], *unusable):
        with pytest.raises(UserError, match=r"^key .*; expected a PEM file with an unencrypted"):
            trust.sign(bundle, key)
    trust.sign(bundle, keys[0])
    for key in (words, tmp_path / "absent", keys[0]):
        with pytest.raises(UserError, match=r"^key .*; expected a PEM file with a public EC key"):
            trust.check(bundle, key)
    flipped(bundle / "model.vmfb")
    with pytest.raises(UserError, match=r"model\.vmfb: sha256 .*; rebuild: doit build"):
        trust.sign(bundle, keys[0])


def test_without_the_package_the_extra_is_named(
    signed: Path, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "model_signing.verifying", None)
    with pytest.raises(UserError, match=r"pip install 'scanwright\[sign\]'"):
        trust.check(signed, keys[1])


# SBOM --------------------------------------------------------------------------------------------


def problem(text: str) -> object:
    """What the CycloneDX schema has against a document; None if nothing."""
    return JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)


def test_the_sbom_of_a_bundle_is_cyclonedx_and_says_what_made_it() -> None:
    bundle = bundles.build(NAME, "cpu", SHAPE)
    manifest = manifests.load(bundle)
    text = (bundle / sbom.FILE_NAME).read_text()
    assert problem(text) is None
    assert manifest.files.sbom == sbom.reference(text.encode())
    content = json.loads(text)
    assert "serialNumber" not in content and "timestamp" not in content["metadata"]
    model, *packages = content["components"]
    assert manifest.build is not None
    assert [(p["name"], p["version"]) for p in packages] == [
        (p.name, p.version) for p in manifest.build.packages
    ]
    compiler = [p for p in packages if p["type"] == "application"]
    assert [(p["name"], p["version"]) for p in compiler] == [
        ("iree-base-compiler", manifest.target.compiler)
    ]
    assert model["name"] == manifest.model.source
    files = [(f["name"], f["hashes"][0]["content"]) for f in model["components"]]
    assert files == [(ref.path, ref.sha256) for ref in manifest.build.files]


def test_the_sbom_of_a_download_has_its_address_and_licence() -> None:
    build = manifests.BuildInfo("bf16", False, (), (manifests.Package("jax", "0.1"),))
    model = {"name": "m", "family": "mamba2", "source": "hf:org/m", "revision": "a" * 40}
    text = sbom.document(model | {"license": "gemma"}, build, "cpu, vulkan", "b1-p8").decode()
    assert problem(text) is None
    found = json.loads(text)["components"][0]
    assert found["licenses"] == [{"license": {"name": "gemma"}}]
    assert found["version"] == "a" * 40
    url = f"https://huggingface.co/org/m/tree/{'a' * 40}"
    assert found["externalReferences"] == [{"type": "distribution", "url": url}]


def test_what_is_not_cyclonedx_would_be_found() -> None:
    text = (bundles.build(NAME, "cpu", SHAPE) / sbom.FILE_NAME).read_text()
    assert problem(text.replace('"SHA-256"', '"sha256"')) is not None
    assert problem(text.replace('"bomFormat": "CycloneDX"', '"bomFormat": "X"')) is not None
