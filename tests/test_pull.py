"""`scanwright pull`: whole or not at all, resumed, checked, shared; a failure is one line."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hub_server
import pytest
import transport
from transport import PARAMS, Answer, Web

from runtime import cli, oci, web
from runtime import manifest as mf
from runtime.blobs import Blobs

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache and a working directory of the test's own, and no waiting between tries."""
    transport.alone(tmp_path, monkeypatch)
    monkeypatch.setattr(web.time, "sleep", lambda seconds: None)


@pytest.fixture
def server() -> Iterator[Web]:
    with Web() as started:
        yield started


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return transport.made(tmp_path / "made")


def pull(*words: object) -> None:
    """A pull that must succeed."""
    assert cli.main(["pull", *map(str, words)]) == 0


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line of a pull that must fail, with nothing half-written."""
    capsys.readouterr()
    assert cli.main(["pull", *map(str, words)]) == 1
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]
    assert out == "" and last.startswith("error: ") and err.count("error: ") == 1, err
    assert transport.left_over(Path()) == []
    return last


def same(one: Path, other: Path) -> bool:
    return transport.contents(one) == transport.contents(other)


def params_requests(server: Web) -> list[str | None]:
    """The ranges that params.irpa was asked for with."""
    return [asked for path, asked, _ in server.log if path.endswith("params.irpa")]


# Sharing and placing -----------------------------------------------------------------------------


def test_params_are_on_the_disk_once_for_many_targets(
    tmp_path: Path, server: Web, capsys: pytest.CaptureFixture[str]
) -> None:
    one = transport.made(tmp_path / "a", "cpu", 1)
    two = transport.made(tmp_path / "b", "vulkan", 2)
    server.serve(one, "/one")
    server.serve(two, "/two")
    pull(f"{server.url}/one", "there/one")
    pull(f"{server.url}/two")
    assert capsys.readouterr().out.splitlines() == ["bundle: there/one", "bundle: fake-vulkan-b3"]
    assert same(Path("there/one"), one) and same(Path("fake-vulkan-b3"), two)
    assert Path("there/one/params.irpa").samefile("fake-vulkan-b3/params.irpa")
    assert len(params_requests(server)) == 1
    assert all(p.stat().st_mode & 0o777 == 0o444 for p in Path("there/one").iterdir())
    # what no bundle uses can go, what one uses stays
    for path in Path("there/one").iterdir():
        path.unlink()
    assert cli.main(["pull", "--prune"]) == 0
    blobs = list((tmp_path / "cache" / "pulled").glob("??/*"))
    assert len(blobs) == 4 and capsys.readouterr().out == "pruned 19.5 KiB\n"
    pull(f"{server.url}/two", "again")
    assert len(params_requests(server)) == 1


def test_a_bundle_is_replaced_whole_and_readers_keep_theirs(tmp_path: Path) -> None:
    one = transport.made(tmp_path / "a", code=1)
    two = transport.made(tmp_path / "b", code=2)
    pull(one, "there")
    with Path("there/model.vmfb").open("rb") as held:
        pull(two, "there")
        assert same(Path("there"), two)
        assert held.read() == (one / "model.vmfb").read_bytes()
    assert transport.left_over(Path()) == []


def test_a_changed_file_of_a_bundle_does_not_reach_the_next(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pull(bundle, "first")
    params = Path("first/params.irpa")
    params.chmod(0o644)
    with params.open("r+b") as file:
        file.write(b"changed")
    pull(bundle, "second")
    assert same(Path("second"), bundle)
    assert "does not match its sha256, fetching it again" in capsys.readouterr().err


def test_the_working_directory_and_links_are_not_replaced(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    assert "not a directory" in refused(capsys, bundle, "link")
    monkeypatch.chdir(tmp_path / "empty")
    assert "the working directory" in refused(capsys, bundle, ".")


def test_without_hard_links_it_copies(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", none)
    pull(bundle, "there")
    assert same(Path("there"), bundle)
    assert Path("there/params.irpa").stat().st_nlink == 1


def test_a_failure_leaves_the_bundle_that_was_there(
    tmp_path: Path, server: Web, capsys: pytest.CaptureFixture[str]
) -> None:
    one = transport.made(tmp_path / "a", code=1)
    two = transport.made(tmp_path / "b", code=2)
    pull(one, "there")
    server.serve(two)
    server.answers["/model.vmfb"] = Answer(bytes(20_000))
    told = refused(capsys, server.url, "there")
    assert re.search(r"/model\.vmfb?: .*sha256 [0-9a-f]{64}, expected", told) or "sha256" in told
    assert same(Path("there"), one)
    server.serve(two)
    pull(server.url, "there")
    assert same(Path("there"), two)


def test_a_failure_while_it_is_put_in_place_leaves_the_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = transport.made(tmp_path / "a", code=1)
    two = transport.made(tmp_path / "b", code=2)
    pull(one, "there")
    link, rename = os.link, Path.rename

    def failing(source: Path, dest: Path) -> None:
        if dest.name == "reference.json":
            raise OSError(5, "Input/output error", str(dest))
        link(source, dest)

    def stuck(path: Path, to: Path) -> Path:
        if path.name.endswith("-new"):
            raise OSError(5, "Input/output error", str(to))
        return rename(path, to)

    for where, name, fault in ((os, "link", failing), (Path, "rename", stuck)):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, fault)
            assert "Input/output error" in refused(capsys, two, "there")
        assert same(Path("there"), one)
    # what a killed process left beside it goes
    shutil.copytree(one, ".there-new")
    pull(two, "there")
    assert same(Path("there"), two) and transport.left_over(Path()) == []


def test_pulls_at_the_same_time_download_once(bundle: Path, server: Web) -> None:
    server.serve(bundle)
    argv = [sys.executable, "-m", "runtime", "pull", server.url]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    at_once = [
        subprocess.Popen([*argv, name], env=environment, stdout=-3, stderr=-3)
        for name in ("one", "one", "two")
    ]
    assert [process.wait(60) for process in at_once] == [0, 0, 0]
    assert same(Path("one"), bundle) and same(Path("two"), bundle)
    assert len(params_requests(server)) == 1


def test_a_full_disk_is_told_before_anything_comes(
    tmp_path: Path, bundle: Path, server: Web, capsys: pytest.CaptureFixture[str]
) -> None:
    server.serve(bundle)
    text = server.answers["/manifest.json"].body.replace(b'"size": 300000', b'"size": %d' % 2**60)
    server.answers["/manifest.json"] = Answer(text)
    told = refused(capsys, server.url, "there")
    assert f"{2**60 + 23000} bytes needed, " in told and "free some space" in told
    assert params_requests(server) == []


def test_an_interrupted_pull_goes_on(bundle: Path, server: Web, tmp_path: Path) -> None:
    server.serve(bundle)
    params = bundle / "params.irpa"
    server.answers["/params.irpa"].headers["Content-Length"] = str(PARAMS)
    server.answers["/params.irpa"].drop_at = 100_000
    pull(server.url, "there")
    assert same(Path("there"), bundle)
    assert params_requests(server) == [None, "bytes=100000-"]
    # the same of a process that was killed: its bytes are in the cache
    Blobs(tmp_path / "other").partial(ref := mf.load(bundle).files.params or mf.FileRef("", "", 0))
    partial = Blobs(tmp_path / "cache").partial(ref)
    Blobs(tmp_path / "cache").path(ref).unlink()
    partial.write_bytes(params.read_bytes()[:250_000])
    pull(server.url, "again")
    assert params_requests(server)[2:] == ["bytes=250000-"]
    assert same(Path("again"), bundle)


def test_a_killed_pull_goes_on_where_it_was(bundle: Path, server: Web, tmp_path: Path) -> None:
    server.serve(bundle)
    stalled = server.answers["/params.irpa"]
    code = (
        "import os, runtime.web as web\n"
        "read = web._receive\n"
        "def dying(*args):\n"
        "    try:\n"
        "        return read(*args)\n"
        "    except web.BROKEN:\n"
        "        os.kill(os.getpid(), 9)\n"
        "web._receive = dying\n"
        "from runtime import cli\n"
        f"cli.main(['pull', '{server.url}', 'there'])\n"
    )
    stalled.drop_at = 200_000
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.returncode == -9 and not Path("there").exists()
    pull(server.url, "there")
    assert same(Path("there"), bundle)
    assert params_requests(server) == [None, "bytes=200000-"]


def test_a_wrong_beginning_is_thrown_away_once(bundle: Path, server: Web, tmp_path: Path) -> None:
    server.serve(bundle)
    ref = mf.load(bundle).files.params
    assert ref is not None
    Blobs(tmp_path / "cache").partial(ref).write_bytes(bytes(1000))
    pull(server.url, "there")
    assert same(Path("there"), bundle)
    assert params_requests(server) == ["bytes=1000-", None]


def test_a_server_without_ranges_is_read_from_the_start(bundle: Path, server: Web) -> None:
    server.serve(bundle)
    server.answers["/params.irpa"].ranges = False
    server.answers["/params.irpa"].drop_at = 100_000
    pull(server.url, "there")
    assert same(Path("there"), bundle)


def test_a_tar_file_from_the_web_goes_on_too(bundle: Path, server: Web, tmp_path: Path) -> None:
    from runtime.pack import pack

    pack(bundle, tmp_path / "b.tar")
    server.answers["/b.tar"] = Answer((tmp_path / "b.tar").read_bytes(), drop_at=150_000)
    pull(f"{server.url}/b.tar", "there")
    assert same(Path("there"), bundle)
    assert [asked for _, asked, _ in server.log] == [None, "bytes=150000-"]
    assert list((tmp_path / "cache/pulled/partial").glob("*.tar")) == []


@pytest.mark.parametrize("name", ["params.irpa", "manifest.json"])
def test_web_faults_are_one_line(
    name: str, bundle: Path, server: Web, capsys: pytest.CaptureFixture[str]
) -> None:
    right = (bundle / name).read_bytes()
    flipped = b"#" + right[1:]
    for answer, told in (
        (Answer(b"gone", 404), r"is not there: status 404 \(gone\)"),
        (Answer(b"", 403), "refuses this user: status 403"),
        (Answer(b"busy", 503), r"status 503 \(busy\)"),
        (Answer(flipped), "sha256 |not JSON|expected"),
        (Answer(right[:-5]), "broke off|not JSON|line"),
        (Answer(right + b"more"), "more than the expected|not JSON"),
        (Answer(b"", 302, {"Location": "http://example.invalid/x"}), "plain http to another"),
        (Answer(b"", 302, {"Location": "file:///etc/passwd"}), "status 302|expected https"),
        (Answer(b"", 302, {"Location": f"/{name}"}), "status 302|infinite loop"),
    ):
        server.serve(bundle)
        server.answers[f"/{name}"] = answer
        assert re.search(told, refused(capsys, server.url, "there")), (answer, told)
        assert not Path("there").exists()
    server.serve(bundle)
    pull(server.url, "there")


def test_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for url in (f"http://127.0.0.1:{transport.free_port()}/b", "oci://127.0.0.1:1/b"):
        assert re.search("cannot be reached .*Connection refused", refused(capsys, url))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nothing"], "no such file or directory, expected oci://"),
        (["ftp://host/x"], "no such kind of place, expected oci://"),
        (["http://example.com/b"], "plain http to another machine"),
        (["https://user:secret@example.com/b"], "found a user in the URL"),
        (["https:///b"], "found no host"),
        (["https://example.com:x/b"], "not a URL"),
        (["oci://host/Upper:tag"], "with a name in lower case"),
        (["oci://host"], "expected oci://HOST"),
        (["hf://name"], "expected hf://ORG/NAME"),
        (["s3://bucket"], "expected s3://BUCKET/PATH|needs the package s3fs"),
        (["."], "no manifest.json there"),
        ([], "URL: found none"),
    ],
)
def test_wrong_words_are_one_line(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, *words)
    assert re.search(told, line) and "secret" not in line


def test_another_digest_and_hostile_manifests_are_refused(
    bundle: Path, server: Web, capsys: pytest.CaptureFixture[str]
) -> None:
    server.serve(bundle)
    text = server.answers["/manifest.json"].body
    digest = hashlib.sha256(text).hexdigest()
    assert f"has the sha256 {digest}, expected {'0' * 64}" in refused(
        capsys, server.url, "there", "--digest", "0" * 64
    )
    pull(server.url, "there", "--digest", digest)
    for old, new, told in (
        (b'"path": "params.irpa"', b'"path": "../evil"', "relative path inside the bundle"),
        (b'"path": "params.irpa"', b'"path": "/tmp/evil"', "relative path inside the bundle"),
        (b'"name": "fake"', b'"name": "../evil"', "make no file name"),
        (b'"size": 300000', b'"size": -1', "expected 0 or more"),
        (b'"schema"', b'"\xff"', "not UTF-8"),
        (text, b"[" * 100_000, "nested too deeply"),
        (text, b"<html>", "not JSON"),
    ):
        server.answers["/manifest.json"] = Answer(text.replace(old, new, 1))
        assert told in refused(capsys, server.url)
    assert not Path("../evil").exists()


def test_s3_says_which_package_it_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    assert "needs the package s3fs, found none; pip install" in refused(capsys, "s3://bucket/b")


def test_only_the_standard_library_is_needed(bundle: Path, server: Web, tmp_path: Path) -> None:
    serve_artifact(server, bundle)
    code = (
        "import sys\n"
        "from runtime import cli\n"
        f"assert cli.main(['pull', 'oci://{server.host}/team/b:one', 'there']) == 0\n"
        "outside = {m.partition('.')[0] for m in sys.modules} - set(sys.stdlib_module_names)\n"
        "print(sorted(outside - {'runtime', 'sitecustomize'}))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-S", "-c", code]  # -S: nothing that pip installed can be found
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["bundle: there", "['__main__']"], done.stderr
    assert same(Path("there"), bundle)


# The hub -----------------------------------------------------------------------------------------


def test_a_bundle_comes_from_the_hub_without_its_library(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with hub_server.HubServer() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        files = {f"cpu/{name}": data for name, data in transport.contents(bundle).items()}
        hub.add("org/name", files, private=True, lfs=lambda name: name.endswith(".irpa"))
        hub.faults.append(hub_server.Fault("cpu/params.irpa", "drop", 100_000))
        assert "needs credentials" in refused(capsys, "hf://org/name/cpu")
        monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
        assert "is not there" in refused(capsys, "hf://org/name@other/cpu")
        assert "is not there" in refused(capsys, "hf://org/name")
        pull("hf://org/name/cpu", "there")
        assert same(Path("there"), bundle)
        ranges = [seen.range for seen in hub.log if "/store/" in seen.path]
        assert ranges == [None, 100_000]
        commit = hub_server.commit_id("one")
        asked = [seen.path for seen in hub.log if seen.path.endswith("model.vmfb")]
        assert asked == [f"/org/name/resolve/{commit}/cpu/model.vmfb"]  # what main was at first


# Registries that lie -----------------------------------------------------------------------------


def serve_artifact(server: Web, bundle: Path, name: str = "team/b") -> dict[str, Any]:
    """Answers of a registry for a bundle; returns its image manifest."""
    layers = []
    for title, data in sorted(transport.contents(bundle).items()):
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        notes = {oci.TITLE: title}
        kind = {"mediaType": oci.LAYER, "digest": digest, "size": len(data)}
        layers.append({**kind, "annotations": notes})
        server.answers[f"/v2/{name}/blobs/{digest}"] = Answer(data)
    image = {"schemaVersion": 2, "mediaType": oci.IMAGE_MANIFEST, "layers": layers}
    server.answers[f"/v2/{name}/manifests/one"] = Answer(json.dumps(image).encode())
    return image


def test_a_registry_that_answers_nonsense_is_one_line(
    bundle: Path, server: Web, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"oci://{server.host}/team/b:one"
    image = serve_artifact(server, bundle)
    first = image["layers"][0]

    def other(**fields: Any) -> bytes:
        layer = {**first, **fields}
        return json.dumps({**image, "layers": [layer, *image["layers"][1:]]}).encode()

    def said(body: bytes, status: int = 200, **headers: str) -> str:
        server.answers["/v2/team/b/manifests/one"] = Answer(body, status, headers)
        return refused(capsys, url, "there")

    assert "not JSON" in said(b"<html>hello</html>")
    assert "not JSON" in said(b"[" * 100_000)
    assert "found list, expected a JSON object" in said(b"[]")
    assert "no image manifest with layers" in said(b"{}")
    assert "no image manifest with layers" in said(b'{"schemaVersion": 1, "layers": []}')
    assert "an index of several images" in said(b'{"schemaVersion": 2, "manifests": []}')
    assert "no manifest.json in it" in said(b'{"schemaVersion": 2, "layers": []}')
    assert "layers[0]: no org.opencontainers" in said(b'{"schemaVersion": 2, "layers": [7]}')
    assert "found the digest" in said(other(digest="sha256:../../x"))
    assert "found the digest" in said(other(digest=5))
    assert "found the size" in said(other(size=-1))
    assert "found the size" in said(other(size=True))
    assert "is there twice" in said(other(annotations={oci.TITLE: "params.irpa"}))
    moved = json.dumps({**image, "layers": [x for x in image["layers"] if x["size"] != PARAMS]})
    assert "'params.irpa' is missing or another file" in said(moved.encode())
    assert "more than 4194304 bytes" in said(b" " * (5 << 20))
    assert "MANIFEST_UNKNOWN: no such tag" in said(
        b'{"errors": [{"code": "MANIFEST_UNKNOWN", "message": "no such\\n tag"}]}', 404
    )
    assert "status 500" in said(b'{"errors": "nonsense"}', 500)
    assert "needs credentials" in said(b"", 401)
    assert "needs credentials" in said(b"", 401, **{"WWW-Authenticate": "Basic realm=x"})
    assert "found no host" in said(b"", 401, **{"WWW-Authenticate": 'Bearer realm="http:///"'})
    assert "found no host" in said(b"", 401, **{"WWW-Authenticate": 'Bearer realm="file:///x"'})
    assert not Path("there").exists()
    pinned = f"{url}@sha256:{'0' * 64}"
    server.answers[f"/v2/team/b/manifests/sha256:{'0' * 64}"] = Answer(json.dumps(image).encode())
    assert "answered with sha256:" in refused(capsys, pinned, "there")
    # layers that are not what they are called
    serve_artifact(server, bundle)
    for title in (mf.FILE_NAME, "params.irpa"):
        (layer,) = (x for x in image["layers"] if x["annotations"][oci.TITLE] == title)
        path = f"/v2/team/b/blobs/{layer['digest']}"
        right = server.answers[path]
        server.answers[path] = Answer(right.body[:-9] + b"#" + right.body[-8:])
        assert f"{title}: sha256 " in refused(capsys, url, "there")
        server.answers[path] = right
    pull(url, "there")
    assert same(Path("there"), bundle)


def test_a_token_is_fetched_and_stays_with_its_host(
    bundle: Path, server: Web, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Bearer tokens by user and password; blobs behind a redirect get no credentials."""
    serve_artifact(server, bundle)
    with Web() as store:
        store.serve(bundle)
        params = mf.load(bundle).files.params
        assert params is not None
        server.answers[f"/v2/team/b/blobs/sha256:{params.sha256}"] = Answer(
            status=307, headers={"Location": f"{store.url}/params.irpa"}
        )
        server.answers["/token"] = Answer(b'{"token": "abc"}')
        asked = server._answer
        challenge = (
            f'Bearer realm="{server.url}/token",service="here",scope="repository:team/b:pull"'
        )

        def guarded(request: Any) -> None:
            if request.path.startswith("/v2/"):
                if request.headers.get("Authorization") != "Bearer abc":
                    request.send_response(401)
                    request.send_header("WWW-Authenticate", challenge)
                    request.send_header("Content-Length", "0")
                    return request.end_headers()
            return asked(request)

        monkeypatch.setattr(server, "_answer", guarded)
        monkeypatch.setenv("SCANWRIGHT_REGISTRY_AUTH", f"me:pass@word@{server.host}")
        pull(f"oci://{server.host}/team/b:one", "there")
        assert same(Path("there"), bundle)
        tokens = [seen for seen in server.log if seen[0].startswith("/token")]
        assert [token[2] for token in tokens] == ["Basic bWU6cGFzc0B3b3Jk"]
        assert "scope=repository%3Ateam%2Fb%3Apull" in tokens[0][0]
        assert [seen[2] for seen in store.log] == [None]
        # of another host's, nothing is sent
        monkeypatch.setenv("SCANWRIGHT_REGISTRY_AUTH", "me:password@other.example")
        pull(f"oci://{server.host}/team/b:one", "again")
        assert [t[2] for t in server.log if t[0].startswith("/token")][1:] == [None]


@pytest.mark.parametrize("text", ["[]", "{", '{"auths": {"HOST": {"auth": "!!"}}}'])
def test_a_damaged_docker_config_is_one_line(
    text: str, server: Web, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker" / "config.json").write_text(text.replace("HOST", server.host))
    server.answers["/v2/b/manifests/latest"] = Answer(
        status=401, headers={"WWW-Authenticate": "Basic realm=x"}
    )
    assert "docker/config.json: " in refused(capsys, f"oci://{server.host}/b")
