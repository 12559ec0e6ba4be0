"""Hostile tar files, image manifests, signatures, and manifests that ask to be built again."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from attack_case import DEEP, OUTSIDE, Case, both, link, sparse, text
from attack_parsers import MANIFEST

from runtime import manifest as mf
from runtime import oci, trust
from runtime.manifest import FileRef

# --- tar files -----------------------------------------------------------------------------------

CODE = b"code" * 200
END = bytes(2 * tarfile.BLOCKSIZE)


def ref(path: str, data: bytes = CODE) -> FileRef:
    return FileRef(path, hashlib.sha256(data).hexdigest(), len(data))


def listing(**files: Any) -> bytes:
    """A manifest of MANIFEST's with these files."""
    none = replace(MANIFEST.files, module=ref("model.vmfb"), tokenizer=())
    return mf.dumps(replace(MANIFEST, files=replace(none, **files))).encode()


def relisted(change: Callable[[dict[str, Any]], object]) -> str:
    """MANIFEST's JSON after `change`, which need not make sense."""
    plain = json.loads(mf.dumps(MANIFEST))
    change(plain)
    return json.dumps(plain)


def member(name: str, data: bytes = b"", **header: Any) -> bytes:
    """An entry as it is, whatever its header says."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in header.items():
        setattr(info, key, value)
    head = info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
    return head + data + bytes(-len(data) % tarfile.BLOCKSIZE)


def patched(entry: bytes, at: int, field: bytes) -> bytes:
    """The entry with other bytes in its header, and the checksum that they have."""
    head = bytearray(entry[: tarfile.BLOCKSIZE])
    head[at : at + len(field)] = field
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head) + entry[tarfile.BLOCKSIZE :]


def packed(more: bytes = b"", listed: bytes | None = None, code: bytes | None = None) -> bytes:
    """A packed bundle and another entry."""
    module = member("model.vmfb", CODE) if code is None else code
    return member(mf.FILE_NAME, listed or listing()) + module + more + END


def tar(name: str, data: bytes, said: str | None) -> Case:
    return Case(f"tar: {name}", "tar", text("b.tar", data), said)


def wide(size: int) -> bytes:
    """A size in base 256."""
    return b"\x80" + (size % (1 << 88)).to_bytes(11, "big")


def terabyte(root: Path) -> None:
    """A manifest and a file of a terabyte of nothing, which is as long as it says."""
    huge = FileRef("params.irpa", "0" * 64, 1 << 40)
    head = packed(listed=listing(params=huge))[: -len(END)]
    head += member("params.irpa", size=1 << 40)
    sparse("b.tar", head, len(head) + (1 << 40) + len(END))(root)


COMMAND = "--iree-hal-preprocess-executables-with=touch owned"
TARS = [
    tar("a bundle", packed(), None),
    tar("what is behind the end", packed(END + member("../evil", b"x")), None),
    tar("a module with every mode there is", packed(code=member("model.vmfb", CODE, mode=0o7777,
                                                            uid=0, uname="root")), None),
    tar("a pax header of a terabyte", packed(member("x", type=b"x", size=1 << 40)), "type b'x'"),
    tar("a pax header for all", packed(member("x", b"11 size=99\n", type=b"g")), "type b'g'"),
    tar("a long link", packed(member("x", b"/etc/passwd", type=b"K")), "type b'K'"),
    tar("a contiguous file", packed(member("x", type=b"7")), "type b'7'"),
    tar("a volume label", packed(member("x", type=b"V")), "type b'V'"),
    tar("a size of 2^80", packed(patched(member("x"), 124, wide(1 << 80))), "is cut off"),
    tar("a size below 0", packed(patched(member("x"), 124, b"\xff" * 11 + b"\0")), "0 or more"),
    tar("a size that is a word", packed(patched(member("x"), 124, b"elephants\0")), "no tar"),
    tar("a directory in the old way", packed(patched(member("x/"), 156, b"\0")), "a directory"),
    tar("a name in two parts", packed(patched(member("passwd"), 257, b"ustar\00000" + bytes(80)
                                      + b"/etc")), "'/etc/passwd'"),
    tar("a name in two parts that climbs", packed(patched(member("evil"), 257, b"ustar\00000"
                                      + bytes(80) + b"..")), "'../evil'"),
    tar("a name that moves the cursor", packed(member("\x1b[2Jx")), r"\x1b[2Jx"),
    tar("a name that is no text", packed(patched(member("xx"), 0, b"\xff\xfe")), "no tar header"),
    tar("a name that is nothing", packed(patched(member("x"), 0, b"\0")), "found the name ''"),
    tar("a name in other case", packed(member("MODEL.VMFB", CODE)), "is not in the manifest"),
    tar("a signature of 2 MB", packed(member("model.sig", bytes(2 << 20))), "small file"),
    tar("a file below a file", packed(member("model.vmfb/x"), relisted(
        lambda m: m["files"]["tokenizer"][0].update(path="model.vmfb/x")).encode()),
        "'model.vmfb' is a file and a directory"),
    tar("a manifest nested without end", packed(listed=DEEP.encode()), "too deeply"),
    Case("tar: a manifest of a terabyte", "tar", sparse(
        "b.tar", member(mf.FILE_NAME, size=1 << 40), (1 << 40) + 2048), "expected a small file"),
    Case("tar: a terabyte of nothing", "tar", terabyte, "bytes needed"),
    Case("tar: 8 GB of headers", "tar", sparse("b.tar", packed()[: -len(END)], 8 << 30), None),
]  # fmt: skip


# --- image manifests of registries ---------------------------------------------------------------


def layer(title: Any = "model.vmfb", **fields: Any) -> dict[str, Any]:
    digest = f"sha256:{hashlib.sha256(CODE).hexdigest()}"
    return {"digest": digest, "size": len(CODE), "annotations": {oci.TITLE: title}, **fields}


def image(name: str, said: str | None, *layers: Any, **fields: Any) -> Case:
    body = {"schemaVersion": 2, "layers": list(layers), **fields}
    return Case(f"image: {name}", "image manifest", text("image.json", json.dumps(body)), said)


IMAGES = [
    image("one layer", None, layer()),
    image("a digest that climbs", "found the digest", layer(digest="sha256:../../etc/passwd")),
    image("a digest and a line", "found the digest", layer(digest="sha256:" + "a" * 64 + "\n")),
    image("a digest of a megabyte", "found the digest", layer(digest="x" * (1 << 20))),
    image("a size of 10^4000", "layers[0]", layer(size=-(10**4000))),
    image("a size that is true", "found the size True", layer(size=True)),
    image("a title that is a list", "no org.opencontainers.image.title", layer(title=["a"])),
    image("a title of a megabyte twice", "is there twice", *[layer("x" * 10**6)] * 2),
    image("a layer that is a word", "layers[0]", "model.vmfb"),
    image("300,000 layers of nothing", "layers[0]", *[{}] * 300_000),
    image("layers nested without end", "not JSON", _="deep"),
]  # fmt: skip
IMAGES[-1] = replace(IMAGES[-1], make=text("image.json", '{"layers": ' + DEEP + "}"))


# --- signatures ----------------------------------------------------------------------------------


def sealed(payload: bytes, **envelope: Any) -> str:
    """A Sigstore bundle as model-signing writes one, of any payload; nobody has signed it."""
    content = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": "application/vnd.in-toto+json",
        "signatures": [{"sig": base64.b64encode(b"0" * 70).decode(), "keyid": ""}],
    }
    return json.dumps({
        "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
        "verificationMaterial": {"publicKey": {"hint": "a" * 64}, "tlogEntries": []},
        "dsseEnvelope": content | envelope,
    })  # fmt: skip


def statement(**fields: Any) -> bytes:
    content = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": "model", "digest": {"sha256": "a" * 64}}],
        "predicateType": "https://model_signing/signature/v1.0",
        "predicate": {"resources": [], "serialization": {"method": "files"}},
    }
    return json.dumps(content | fields).encode()


def signature(name: str, content: str | Callable[[Path], object], said: str = "model.sig") -> Case:
    made = content if callable(content) else text(trust.SIGNATURE, content)
    whole = both(text(mf.FILE_NAME, listing()), text("model.vmfb", CODE), made)
    return Case(f"signature: {name}", "signature", whole, said)


TREE = {"name": f"{OUTSIDE}/secret", "digest": "a" * 64, "algorithm": "sha256"}
SIGNATURES = [
    signature("of nobody", sealed(statement())),
    signature("nested without end", DEEP),
    signature("of a payload nested without end", sealed(DEEP.encode())),
    signature("of a payload of 10 MB", sealed(b"[" + b"[]," * 3_000_000 + b"[]]")),
    signature("of an integer of a million digits", '{"mediaType": ' + "9" * 1_000_000 + "}"),
    signature("of 15 MB of lists", '{"x": [' + "[]," * 5_000_000 + "[]]}"),
    signature("of half a character", sealed(statement()).replace("v0.3", "\\ud800")),
    signature("of a file outside", sealed(statement(predicate={
        "resources": [TREE], "serialization": {"method": "files", "hash_type": "sha256"}}))),
    signature("without signatures", sealed(statement(), signatures=[])),
    signature("of 100,000 signatures", sealed(statement(), signatures=[{"sig": "MA=="}] * 100_000)),
    signature("that moves the cursor", '{"\\u001b[2J": 1}'),
    signature("of 1 TB", sparse(trust.SIGNATURE, b"{", 1 << 40), "no signature"),
    signature("that is a pipe", lambda root: os.mkfifo(root / trust.SIGNATURE), "not signed"),
    signature("that is a link", link(trust.SIGNATURE, f"{OUTSIDE}/secret"), "not signed"),
    signature("that is an endless device", link(trust.SIGNATURE, "/dev/zero"), "not signed"),
]  # fmt: skip


# --- manifests that ask to be built again --------------------------------------------------------

RECIPE = {"flags": [], "safe_flags": [], "weights": ["f32"], "runs_here": "host", "kernels": False}
BUILD = {"weights": "f32", "own_weights": True, "files": [], "packages": []}


def asks(name: str, said: str | None, **parts: dict[str, Any]) -> Case:
    """A manifest with other values in `target`, `model`, `shape`, `files`, `build` or its recipe
    (`recipe`)."""

    def change(plain: dict[str, Any]) -> None:
        plain["build"] = BUILD | parts.get("build", {})
        plain["target"]["recipe"] = RECIPE | parts.get("recipe", {})
        for key in parts.keys() & {"target", "model", "shape", "files"}:
            plain[key].update(parts[key])

    return Case(f"manifest: {name}", "reproduced", text(mf.FILE_NAME, relisted(change)), said)


def packages(*names: str, version: str = "1") -> dict[str, Any]:
    return {"packages": [{"name": name, "version": version} for name in names]}


FLAGS = (
    COMMAND,
    COMMAND.partition(" ")[0],
    "--iree-load-plugin=./evil.so",
    "--iree-load-plugin=evil.so",
    "--iree-llvmcpu-embedded-linker-path=evil",
    "--iree-llvmcpu-system-linker-path=touch",
    "--iree-cuda-use-ptxas-from=evil",
    "--iree-hal-dump-executable-files-to=owned",
    "--iree-opt-export-parameters=model.irpa",
    "--iree-preprocessing-pass-pipeline=builtin.module(iree-hal-preprocess-with-tool{command=x})",
    "--iree-preprocessing-pass-pipeline=builtin.module(iree-hal-dump-executable-sources)",
    "--iree-preprocessing-pass-pipeline=iree-hal-dump-executable-sources",
    "--iree-opt-level=O2 -o /tmp/owned",
    "--iree-opt-level=O2 -o owned",
    "--iree-opt-level=O2\n-o",
    "--iree-cuda-target=../x/y",
    "-o",
    "@/etc/passwd",
)
ABSENT = packages(*(f"absent-{i}" for i in range(1001)))
MANY = [{"path": f"t/{i}", "sha256": "a" * 64, "size": 1} for i in range(150_000)]
ALIKE = {"path": "t/0", "sha256": "a" * 64, "size": 1}
SBOM = {"path": f"{OUTSIDE}/secret", "sha256": "a" * 64, "size": 1}

REPRODUCED = [
    asks("nothing but itself", None),
    Case("manifest: made by hand", "reproduced", text(mf.FILE_NAME, listing()), "made by hand"),
    *(asks(f"the flag {flag[:60]!a}", "expected", recipe={"flags": [flag]}) for flag in FLAGS),
    asks("a flag tried later", "names no file", recipe={"safe_flags": [[], [COMMAND]]}),
    *(asks(f"a {part} named {name!a}", "a plain file name", **{part: {"name": name}})
      for part, name in (("model", "../../owned"), ("target", "/tmp/owned"), ("shape", ".."),
                         ("model", ""), ("target", "a\nb"))),
    asks("a device elsewhere", "found the uri", target={"uri": "cuda://../../x"}),
    asks("a hub's repository that climbs", "model.source", model={"source": "hf:../../x"}),
    asks("a revision that climbs", "model.revision", model={
        "source": "hf:org/name", "revision": "../../x"}),
    asks("a file of the checkpoint outside", "path", build={"files": [SBOM]}),
    asks("a package from elsewhere", "name or the version", build=packages("--index-url=x")),
    asks("a package and a command", "name or the version", build=packages("a; touch owned")),
    asks("a version and a command", "name or the version", build=packages("a", version="1 $(id)")),
    asks("a package by its path", "name or the version", build=packages("../../x")),
    asks("1001 packages", "1001 packages, expected 1000", build=ABSENT),
    asks("a package that is not there", "not installed", build=packages("absent-package")),
    asks("an inventory outside", "path", files={"sbom": SBOM}),
    asks("an inventory that is the module", "listed twice", files={"sbom": {
        "path": "model.vmfb", "sha256": "a" * 64, "size": 10}}),
    asks("a module for no target", "files.alternatives: 1 files", files={"alternatives": [ALIKE]}),
    asks("a module for no target outside", "path", files={"alternatives": [SBOM]}),
    asks("150,000 files", None, files={"tokenizer": MANY}),
    asks("one file 150,000 times", "listed twice", files={"tokenizer": [ALIKE] * 150_000}),
    asks("a file whose name is no text", "path", files={"sbom": {**ALIKE, "path": "\ud800"}}),
    asks("a file whose name moves the cursor", "path", files={"sbom": {**ALIKE, "path": "\x1b[J"}}),
    asks("a file whose name is too long", "path", files={"sbom": {**ALIKE, "path": "x" * 256}}),
    asks("a path of a thousand parts", "path", files={"sbom": {**ALIKE, "path": "a/" * 999 + "a"}}),
]  # fmt: skip
