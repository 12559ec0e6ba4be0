"""`doit reproduce` makes a bundle again from its manifest, elsewhere, and tells what differs."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import bundles
import pytest
from test_determinism import ELSEWHERE, NAME, SHAPE

from artifacts import reproduce
from artifacts.disk import remove_tree
from artifacts.fetch import fetch
from artifacts.store import Store
from recipes.resolve import every_target
from runtime import manifest as manifests
from runtime.errors import UserError

pytestmark = pytest.mark.iree


@pytest.fixture(scope="module")
def bundle() -> Path:
    return bundles.build(NAME, "cpu", SHAPE)


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    place = tmp_path / "copy"
    place.mkdir()
    for path in bundle.iterdir():
        shutil.copyfile(path, place / path.name)
    return place


def again(bundle: Path, home: Path, *words: str) -> tuple[int, dict[str, list[str]], str]:
    """(exit code, file → words of its line, stderr) of a run in another directory, process and
    environment, on one core; the checkpoint is a copy in yet another place."""
    checkpoint = home / "other checkpoints" / NAME
    if not checkpoint.exists():
        shutil.copytree(bundles.checkpoint(NAME), checkpoint)
    given = {word.partition("=")[0] for word in words}
    more = [] if "model" in given else [f"model={checkpoint}"]
    done = bundles.doit(
        ["reproduce", f"bundle={bundle}", *more, *words],
        home / "elsewhere", home / "cache", ELSEWHERE, umask=0o077, one_core=True,
    )  # fmt: skip
    lines = [line.split() for line in done.stdout.splitlines()]
    rows = {words[1]: words for words in lines if words[0] in ("same", "DIFFERS")}
    return done.returncode, rows, done.stderr


def test_a_bundle_is_reproduced_elsewhere(bundle: Path, tmp_path: Path) -> None:
    code, rows, said = again(bundle, tmp_path)
    assert code == 0, said
    listed = [ref.path for ref in manifests.load(bundle).files.all()]
    assert sorted(rows) == sorted([*listed, "manifest.json"])
    assert {words[0] for words in rows.values()} == {"same"}
    assert rows["manifest.json"][-1] == manifests.load(bundle).digest
    scratch = tmp_path / "cache" / "scratch"
    assert list(scratch.iterdir()) == []  # what it built there is gone


@pytest.mark.slow
def test_what_differs_is_told_and_fails(copy: Path, tmp_path: Path) -> None:
    data = bytearray((copy / "params.irpa").read_bytes())
    data[-1] ^= 1
    (copy / "params.irpa").write_bytes(data)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["proof"]["tolerance"]["state"] *= 2
    (copy / "manifest.json").write_text(json.dumps(manifest))
    code, rows, said = again(copy, tmp_path)
    assert code == 1 and "error" not in said
    different = {name for name, words in rows.items() if words[0] == "DIFFERS"}
    assert different == {"params.irpa", "manifest.json"}
    assert "proof.tolerance.state:" in rows["manifest.json"]


def test_every_file_is_compared(bundle: Path, copy: Path) -> None:
    manifest = manifests.load(bundle)
    for name in [ref.path for ref in manifest.files.all()]:
        kept = (copy / name).read_bytes()
        (copy / name).write_bytes(kept + b"x")
        rows = list(reproduce.compare(copy, manifest, bundle))
        assert [row.name for row in rows if not row.same] == [name]
        (copy / name).unlink()
        rows = list(reproduce.compare(copy, manifest, bundle))
        assert [row.name for row in rows if not row.same] == [name]
        (copy / name).write_bytes(kept)
    assert all(row.same for row in reproduce.compare(copy, manifest, bundle))


def rewritten(copy: Path, **changes: object) -> None:
    """Write another manifest into the copy."""
    manifest = dataclasses.replace(manifests.load(copy), **changes)
    (copy / "manifest.json").write_text(manifests.dumps(manifest))


def test_other_versions_are_refused_before_any_work(copy: Path, tmp_path: Path) -> None:
    build = manifests.load(copy).build
    assert build is not None
    packages = [
        dataclasses.replace(p, version="0.1" if p.name == "jax" else p.version)
        for p in build.packages
    ]
    rewritten(copy, build=dataclasses.replace(build, packages=tuple(packages)))
    code, rows, said = again(copy, tmp_path)
    assert code == 1 and not rows
    (line,) = (line for line in said.splitlines() if line.startswith("error: "))
    assert "manifest.json: build.packages: jax 0.1, found " in line
    assert line.endswith("expected the versions it was made by: pip install jax==0.1")


@pytest.mark.parametrize(
    "flag", ["--iree-llvmcpu-system-linker-path=evil", "--iree-opt-level=/x", "-o", "--load=x"]
)
def test_a_manifest_that_reaches_out_is_refused(flag: str, copy: Path, tmp_path: Path) -> None:
    manifest = manifests.load(copy)
    name = f"../{tmp_path.name}/evil"
    for words in (
        {"target": dataclasses.replace(manifest.target, name=name)},
        {"target": manifest.target, "model": dataclasses.replace(manifest.model, name="..")},
    ):
        rewritten(copy, **words)
        with pytest.raises(UserError, match="a model, target or shape, expected a plain file name"):
            reproduce.check_words(copy, manifests.load(copy))
    path = copy / manifests.FILE_NAME
    content = json.loads(path.read_text())
    content["target"]["recipe"]["safe_flags"] = [[flag]]
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"target\.recipe: .*expected a"):
        manifests.load(copy)


def test_every_recipe_can_be_reproduced(bundle: Path) -> None:
    manifest = manifests.load(bundle)
    recipe = manifest.target.recipe or pytest.fail()
    for target in every_target():
        plain = dataclasses.replace(recipe, flags=target.flags, safe_flags=target.safe_flags)
        words = dataclasses.replace(manifest.target, name=target.name, recipe=plain)
        reproduce.check_words(bundle, dataclasses.replace(manifest, target=words))


def test_a_bundle_made_by_hand_is_refused(copy: Path, tmp_path: Path) -> None:
    rewritten(copy, build=None)
    code, _, said = again(copy, tmp_path)
    assert code == 1
    assert f"error: {copy}/manifest.json: build: null, or target.recipe is:" in said


def test_another_checkpoint_is_refused(copy: Path, tmp_path: Path) -> None:
    other = bundles.checkpoint("mamba2/groups4_tied_no_conv_bias")
    code, _, said = again(copy, tmp_path, f"model={other}")
    assert code == 1
    assert "expected" in said and "of the bundle's build.files: name the checkpoint" in said


def test_a_missing_word_is_told(tmp_path: Path) -> None:
    for task, word in (("reproduce", "bundle"), ("sign", "bundle")):
        done = bundles.doit([task], tmp_path, tmp_path / "cache")
        assert done.returncode == 1
        assert f"error: {word}: missing, expected doit {task} bundle=DIR" in done.stderr


def test_a_download_is_pinned_by_the_manifest_alone(bundle: Path, tmp_path: Path) -> None:
    manifest = manifests.load(bundle)
    info = dataclasses.replace(manifest.model, source="hf:org/tiny", revision="c" * 40)

    def find(name: str) -> None:
        raise AssertionError(f"recipe {name} was asked for")

    model = reproduce._model(dataclasses.replace(manifest, model=info), find, tmp_path)  # type: ignore[arg-type]
    lock = json.loads(model.lock.read_text())
    assert (model.location, model.revision, lock["commit"]) == ("hf:org/tiny", "c" * 40, "c" * 40)
    assert manifest.build is not None
    assert lock["files"] == {
        ref.path: {"sha256": ref.sha256, "size": ref.size} for ref in manifest.build.files
    }


def test_what_was_downloaded_once_is_used_and_kept(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCANWRIGHT_CACHE", str(tmp_path / "cache"))
    manifest, commit = manifests.load(bundle), "c" * 40
    downloaded = tmp_path / "cache" / "hub" / "org--tiny" / commit
    downloaded.mkdir(parents=True)
    assert manifest.build is not None
    for ref in manifest.build.files:
        shutil.copyfile(bundles.checkpoint(NAME) / ref.path, downloaded / ref.path)
    info = dataclasses.replace(manifest.model, source="hf:org/tiny", revision=commit)
    named = dataclasses.replace(manifest, model=info)
    scratch = tmp_path / "scratch"
    store = Store(scratch / "cache")
    reproduce._share_downloads(store)
    model = reproduce._model(named, lambda name: pytest.fail(name), scratch)
    hub = store.root / "hub"
    found = fetch(model.location, model.revision, hub, model.lock, offline=True)
    assert found.revision == commit
    assert found.files == {ref.path: (ref.sha256, ref.size) for ref in manifest.build.files}
    assert remove_tree(scratch) and len(list(downloaded.iterdir())) == len(found.files)


@pytest.mark.slow
def test_a_bundle_for_two_targets_is_reproduced(tmp_path: Path) -> None:
    merged = bundles.build(NAME, "cpu-x86-64-v4,cpu-x86-64-v3", SHAPE)
    code, rows, said = again(merged, tmp_path)
    assert code == 0, said
    assert {words[0] for words in rows.values()} == {"same"}
    assert {"model.cpu-x86-64-v3.vmfb", "model.cpu-x86-64-v4.vmfb", "manifest.json"} <= set(rows)


def test_a_cpu_is_the_one_in_the_manifest_and_not_this_machines(bundle: Path) -> None:
    target = manifests.load(bundle).target
    flags = [f for f in target.flags if "llvmcpu-target" not in f]
    flags += ["--iree-llvmcpu-target-triple=x86_64-unknown-linux-gnu"]
    flags += ["--iree-llvmcpu-target-cpu=znver9", "--iree-llvmcpu-target-cpu-features=+avx2,-adx"]
    other = dataclasses.replace(target, flags=tuple(flags), features=("+avx2",))
    cpu = reproduce._cpu(other)
    assert cpu is not None
    assert (cpu.name, cpu.features, cpu.required) == ("znver9", ("+avx2", "-adx"), ("+avx2",))
    assert list(cpu.flags) == flags[-3:]
