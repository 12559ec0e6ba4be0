"""`doit push` to real servers on this machine, and what others and `scanwright pull` get there."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import hub_server
import hub_uploads
import pytest
import transport
from transport import Web

from artifacts import push as pushing
from runtime import cli, oci, web
from runtime import manifest as mf
from runtime.errors import UserError

ROOT = Path(__file__).parents[1]
# `me` with the password `secret`, as htpasswd -B writes it
HTPASSWD = "me:$2b$04$b/MbPQkAhO5CsRf71L1kQuem2kd0OLVMMHq4Om8.JNmb/RPN7gdKS"


@pytest.fixture(autouse=True)
def _own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache, a docker configuration and a working directory of the test's own."""
    transport.alone(tmp_path, monkeypatch)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return transport.made(tmp_path / "made")


def doit(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A doit command as a user runs it."""
    command = [sys.executable, "-m", "doit", "-f", str(ROOT / "dodo.py"), "-d", str(ROOT), *words]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )


def pull(*words: object) -> None:
    assert cli.main(["pull", *map(str, words)]) == 0


def same(one: Path, other: Path) -> bool:
    return transport.contents(one) == transport.contents(other)


# A directory -------------------------------------------------------------------------------------


def test_a_directory_gets_the_bundle_and_only_a_bundle_is_replaced(tmp_path: Path) -> None:
    one = transport.made(tmp_path / "a", code=1)
    two = transport.made(tmp_path / "b", code=2)
    (one / "build.log.jsonl").write_text("not part of it")
    (one / "model.sig").write_text("part of it")
    told = pushing.push(one, "shared/there")
    assert told.startswith("pushed: shared/there\nmanifest.json: sha256 ")
    (one / "build.log.jsonl").unlink()
    assert same(Path("shared/there"), one)
    pull("shared/there", "here", "--digest", told.split()[-1])
    assert same(Path("here"), one)
    pushing.push(two, "shared/there")
    assert same(Path("shared/there"), two) and transport.left_over(Path("shared")) == []
    with pytest.raises(UserError, match="the bundle itself"):
        pushing.push(two, str(two))
    with pytest.raises(UserError, match=r"holds files and no manifest\.json"):
        pushing.push(two, "shared")


@pytest.mark.iree
def test_a_real_bundle_passes_its_check_where_it_was_pulled(tmp_path: Path) -> None:
    import toy

    pushing.push(toy.bundle(), "shared")
    pushing.pack(Path("shared"), "b.tar")
    assert cli.main(["unpack", "b.tar", "there"]) == 0
    assert cli.main(["verify", "there"]) == 0


@pytest.mark.parametrize(
    ("to", "told"),
    [
        (None, "to=: found nothing, expected oci://"),
        ("ftp://host/x", "no such kind of place"),
        ("oci://host/Name", "with a name in lower case"),
        (f"oci://host/name@sha256:{'0' * 64}", "found a digest, expected a tag"),
        ("hf://name", "expected hf://ORG/NAME"),
        ("oci://127.0.0.1:1/b", "cannot be reached"),
    ],
)
def test_wrong_places_are_one_line(to: str | None, told: str, bundle: Path) -> None:
    with pytest.raises(UserError, match=told):
        pushing.push(bundle, to)


def test_a_damaged_bundle_goes_nowhere(bundle: Path) -> None:
    with (bundle / "params.irpa").open("r+b") as file:
        file.write(b"changed")
    with pytest.raises(UserError, match=r"params\.irpa: sha256 .*doit build"):
        pushing.push(bundle, "there")
    (bundle / "params.irpa").unlink()
    with pytest.raises(UserError, match=r"params\.irpa: missing"):
        pushing.push(bundle, "there")
    assert not Path("there").exists()


def test_a_registry_that_takes_nothing_is_one_line(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Web() as server:
        monkeypatch.setattr(server, "_answer", lambda request: request.send_error(418))
        with pytest.raises(UserError) as caught:
            pushing.push(bundle, f"oci://{server.host}/b")
        assert "\n" not in str(caught.value) and "status 501" in str(caught.value)


def test_plain_http_is_for_this_machine(bundle: Path) -> None:
    done = doit("push", f"bundle={bundle}", "to=oci://registry.invalid/b:1")
    assert done.returncode == 1 and done.stderr.count("error: ") == 1
    assert "cannot be reached" in done.stderr
    assert oci.parse("oci://registry.invalid/b").base.startswith("https://")
    asked = oci.Registry(web.Client(plain=True), oci.parse("oci://registry.invalid/b"))
    assert asked.base == "http://registry.invalid/v2/b"
    for host in ("localhost:5000", "127.0.0.1", "[::1]:5000"):
        assert oci.parse(f"oci://{host}/b").base.startswith("http://")


# The hub -----------------------------------------------------------------------------------------


def test_the_hub_gets_one_commit(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_uploads.UploadHub() as hub:
        said = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": hub_server.TOKEN}
        words = ("push", f"bundle={bundle}")
        refused = doit(*words, "to=hf://org/name", **{**said, "HF_TOKEN": "hf_wrong"})
        assert refused.returncode == 1 and refused.stderr.count("\n") == 2, refused.stderr
        assert "did not take it" in refused.stderr and "set HF_TOKEN to a token" in refused.stderr
        done = doit(*words, "to=hf://org/name", **said)
        assert done.returncode == 0, done.stderr
        repo = hub.repos["org/name"]
        assert repo.private and len(repo.commits) == 2
        assert repo.commits[repo.refs["main"]] == transport.contents(bundle)
        assert done.stdout.startswith(f"pushed: hf://org/name@{repo.refs['main']}\n")
        again = doit(*words, "to=hf://org/name@other/cpu", **said)
        assert again.returncode == 0, again.stderr
        for name in ("HF_ENDPOINT", "HF_TOKEN"):
            monkeypatch.setenv(name, said[name])
        pull(done.stdout.split()[1], "one")
        pull("hf://org/name@other/cpu", "two")
        assert same(Path("one"), bundle) and same(Path("two"), bundle)


# Debian's docker-registry ------------------------------------------------------------------------


@pytest.mark.oracle
def test_a_registry_and_oras_get_the_files(tmp_path: Path) -> None:
    import oras.client

    one = transport.made(tmp_path / "a", "cpu", 1)
    two = transport.made(tmp_path / "b", "vulkan", 2)
    with transport.registry(tmp_path) as host:
        done = doit("push", f"bundle={one}", f"to=oci://{host}/team/models:cpu")
        assert done.returncode == 0, done.stderr
        pinned = done.stdout.split()[1]
        assert pinned.startswith(f"oci://{host}/team/models:cpu@sha256:")
        again = pushing.push(one, f"oci://{host}/team/models:again")
        assert again.split()[1].split("@")[1] == pinned.split("@")[1]  # the same bytes
        pushing.push(two, f"oci://{host}/team/models:vulkan")
        pull(f"oci://{host}/team/models:cpu", "cpu")
        pull(pinned, "pinned")
        pull(f"oci://{host}/team/models:vulkan", "vulkan")
        assert same(Path("cpu"), one) and same(Path("pinned"), one) and same(Path("vulkan"), two)
        assert Path("cpu/params.irpa").samefile("vulkan/params.irpa")
        client = oras.client.OrasClient(hostname=host, insecure=True)
        client.pull(target=f"{host}/team/models:cpu", outdir=str(tmp_path / "oras"))
        assert same(tmp_path / "oras", one)
        # and what oras pushes is pulled
        files = [str(two / name) for name in transport.contents(two)]
        client.push(
            target=f"{host}/team/models:oras", files=files, disable_path_validation=True,
            annotation_file=titles(tmp_path, two),
        )  # fmt: skip
        pull(f"oci://{host}/team/models:oras", "oras-made")
        assert same(Path("oras-made"), two)
        # a layer that is damaged where it lies
        params = mf.load(one).files.params
        assert params is not None
        blob = (
            tmp_path
            / f"data/docker/registry/v2/blobs/sha256/{params.sha256[:2]}/{params.sha256}/data"
        )
        blob.write_bytes(bytes(params.size))
        cache = {"SCANWRIGHT_CACHE": str(tmp_path / "fresh"), "PYTHONPATH": str(ROOT)}
        argv = [sys.executable, "-m", "runtime", "pull", f"oci://{host}/team/models:cpu", "damaged"]
        wrong = subprocess.run(
            argv, env={**os.environ, **cache}, capture_output=True, text=True, timeout=60
        )
        assert wrong.returncode == 1 and not Path("damaged").exists()
        assert "params.irpa: sha256 " in wrong.stderr.splitlines()[-1]


def titles(tmp_path: Path, bundle: Path) -> str:
    """An annotation file that gives oras the names without directories."""
    notes = {str(bundle / name): {oci.TITLE: name} for name in transport.contents(bundle)}
    (tmp_path / "notes.json").write_text(json.dumps(notes))
    return str(tmp_path / "notes.json")


@pytest.mark.oracle
def test_a_registry_with_passwords(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with transport.registry(tmp_path, HTPASSWD) as host:
        to = f"oci://{host}/b:1"
        with pytest.raises(UserError, match=r"needs credentials: status 401; docker login"):
            pushing.push(bundle, to)
        monkeypatch.setenv("SCANWRIGHT_REGISTRY_AUTH", f"me:wrong@{host}")
        with pytest.raises(UserError, match="needs credentials"):
            pushing.push(bundle, to)
        monkeypatch.delenv("SCANWRIGHT_REGISTRY_AUTH")
        (tmp_path / "docker").mkdir()
        auth = base64.b64encode(b"me:secret").decode()
        text = json.dumps({"auths": {host: {"auth": auth}}})
        (tmp_path / "docker" / "config.json").write_text(text)
        pushing.push(bundle, to)
        (tmp_path / "docker" / "config.json").unlink()
        monkeypatch.setenv("SCANWRIGHT_REGISTRY_AUTH", f"me:secret@{host}")
        pull(to, "there")
        assert same(Path("there"), bundle)


# S3 ----------------------------------------------------------------------------------------------


def put(url: str, data: bytes = b"") -> None:
    """Make a bucket or an object; the server does not look at signatures."""
    scope = "test/20260101/us-east-1/s3/aws4_request"
    signed = f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders=host, Signature=0"
    headers = {"Authorization": signed, "Content-Type": "application/octet-stream"}
    request = urllib.request.Request(url, data=data, headers=headers, method="PUT")
    urllib.request.urlopen(request, timeout=30).close()


@pytest.mark.oracle
def test_a_bucket(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = transport.free_port()
    url = f"http://127.0.0.1:{port}"
    for name, value in {
        "AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    server = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    environment = {"PYTHONPATH": str(ROOT)}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "runtime", "pull", *words]
        return subprocess.run(
            argv, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
        )

    with transport.program(server, url):
        missing = doit("push", f"bundle={bundle}", "to=s3://models/a/cpu")
        assert missing.returncode == 1 and missing.stderr.count("error: ") == 1, missing.stderr
        put(f"{url}/models")
        done = doit("push", f"bundle={bundle}", "to=s3://models/a/cpu")
        assert done.returncode == 0, done.stderr
        ref = mf.load(bundle).files.params
        assert ref is not None
        partial = tmp_path / "cache" / "pulled" / "partial" / ref.sha256
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes((bundle / "params.irpa").read_bytes()[:200_000])
        pulled = run("s3://models/a/cpu", "there")
        assert pulled.returncode == 0, pulled.stderr
        assert same(Path("there"), bundle)
        nothing = run("s3://models/b/cpu", "nothing")
        assert nothing.returncode == 1 and nothing.stderr.count("\n") == 1, nothing.stderr
        assert "manifest.json: is not there; check the bucket" in nothing.stderr
        module = mf.load(bundle).files.module
        cached = tmp_path / "cache" / "pulled" / module.sha256[:2] / module.sha256
        for size, told in ((20_000, "sha256 "), (19_000, "found 19000 bytes from byte 0 on")):
            put(f"{url}/models/a/cpu/model.vmfb", b"x" * size)
            cached.unlink(missing_ok=True)
            wrong = run("s3://models/a/cpu", "wrong")
            assert wrong.returncode == 1 and not Path("wrong").exists()
            assert told in wrong.stderr.splitlines()[-1], wrong.stderr
