"""Bundles for several targets: one params file, and the module that is best on the machine."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import bundles
import pytest
import toy
from building import assert_right
from test_determinism import NAME, SHAPE
from test_trust import key_pair

from artifacts import merge, push, report
from runtime import cli, targets, trust
from runtime import manifest as mf
from runtime.errors import UserError
from runtime.targets import Here

V3, V4 = "cpu-x86-64-v3", "cpu-x86-64-v4"
SSE = {"sse4_2", "popcnt"}
AVX2, AVX512 = SSE | {"avx2"}, SSE | {"avx2", "avx512f"}
X86 = ("--iree-llvmcpu-target-triple=x86_64-unknown-linux-gnu",)


# Described machines ------------------------------------------------------------------------------


def cpu(name: str, features: set[str], triple: str = "x86_64") -> mf.TargetInfo:
    flags = (f"--iree-llvmcpu-target-triple={triple}-unknown-linux-gnu",)
    words = tuple(f"+{word}" for word in sorted(features))
    return mf.TargetInfo(name, "local", "local-task", name, words, "0", "0", flags, None, None)


def gpu(name: str, device: str, *flags: str) -> mf.TargetInfo:
    return mf.TargetInfo(name, device, device, None, (), "0", "0", flags, None, None)  # type: ignore[arg-type]


V2 = cpu("v2", SSE)
WIDE = {
    t.name: t for t in (V2, cpu("v3", AVX2), cpu("v4", AVX512), cpu("arm", {"asimd"}, "aarch64"))
}
CUDA = {
    name: gpu(name, "cuda", f"--iree-cuda-target=sm_{code}")
    for name, code in (
        ("cuda-sm80", "80"), ("cuda-sm89", "89"), ("cuda-sm90", "89"), ("cuda-sm120", "120"),
        ("hopper", "90a"), ("cuda-sm100", "89a"), ("family", "100f"), ("cuda-sm121", "121"),
    )
}  # fmt: skip
ROCM = ("gfx942", "gfx1100", "gfx9-4-generic", "gfx11-generic", "gfx90a:xnack-")
HIP = {f"rocm-{n}": gpu(f"rocm-{n}", "hip", f"--iree-rocm-target={n}") for n in ROCM}
OTHER = {"vulkan": gpu("vulkan", "vulkan"), "metal": gpu("metal", "metal")}
ALL = WIDE | CUDA | HIP | OTHER


def many(*names: str) -> mf.Manifest:
    """A manifest for these targets."""
    files = mf.Files(mf.FileRef("0.vmfb", "0" * 64, 1), None, None, (), None, ())
    one = toy.make_manifest("local", (), files, "17.0")
    modules = tuple(mf.FileRef(f"{i}.vmfb", "0" * 64, 1) for i in range(1, len(names)))
    return dataclasses.replace(
        one,
        target=ALL[names[0]],
        files=dataclasses.replace(files, alternatives=modules),
        alternatives=tuple(mf.Alternative(ALL[name], one.proof) for name in names[1:]),
    )


def machine(words: set[str] | None = frozenset(AVX512), **more: object) -> Here:  # type: ignore[assignment]
    return Here("x86_64", None if words is None else frozenset(words), **more)  # type: ignore[arg-type]


LLVMPIPE, RADV = "vulkan://0 (llvmpipe (LLVM 15.0.6, 256 bits))", "vulkan://1 (AMD RADV)"
EVERY = ("v2", "v3", "v4", "arm", "vulkan", "cuda-sm80", "cuda-sm89", "cuda-sm90")
CHOICES = [
    (EVERY, machine(cuda=(90,)), "cuda-sm90", "compiled for this GPU's architecture, sm_90"),
    (EVERY, machine(cuda=(89,)), "cuda-sm89", "compiled for this GPU's architecture, sm_89"),
    (EVERY, machine(cuda=(86,)), "cuda-sm80", "PTX of sm_80, which this GPU (sm_86) also runs"),
    (EVERY, machine(cuda=(121,)), "cuda-sm89", "PTX of sm_89, which this GPU (sm_121) also runs"),
    (("hopper", "v3"), machine(cuda=(120,)), "v3", "widest CPU level"),
    (("hopper", "v3"), machine(cuda=(90,)), "hopper", "this GPU's architecture, sm_90"),
    (EVERY, machine(cuda=(75,), vulkan=(RADV,)), "vulkan", f"Vulkan runs on {RADV}"),
    (EVERY, machine(vulkan=(LLVMPIPE,)), "v4", "the widest CPU level that this processor has"),
    (("family", "v3"), machine(cuda=(103,)), "family", "PTX of sm_100, which this GPU (sm_103)"),
    (("family", "v3"), machine(cuda=(120,)), "v3", "widest CPU level"),
    (("cuda-sm100", "v3"), machine(cuda=(100,)), "v3", "widest CPU level"),
    (("cuda-sm120", "cuda-sm121"), machine(cuda=(121,)), "cuda-sm121", "architecture, sm_121"),
    (("cuda-sm121", "vulkan"), machine(cuda=(120,), vulkan=(RADV,)), "vulkan", RADV),
    (EVERY, machine(set(), vulkan=(LLVMPIPE,)), "vulkan", "which is a CPU"),
    (EVERY, machine(AVX2), "v3", "the widest CPU level that this processor has"),
    (EVERY, machine(SSE), "v2", "the widest CPU level that this processor has"),
    (EVERY, machine(None), "v2", "the CPU level that asks for least"),
    (EVERY, Here("arm64", frozenset({"asimd"})), "arm", "the widest CPU level"),
    ((*HIP, "vulkan"), machine(hip=("gfx942",), vulkan=(RADV,)), "rocm-gfx942", "gfx942"),
    ((*HIP, "vulkan"), machine(hip=("gfx1030",), vulkan=(RADV,)), "vulkan", "Vulkan runs on"),
    ((*HIP, "vulkan"), machine(hip=("gfx950",)), "rocm-gfx9-4-generic", "(gfx950) also runs"),
    ((*HIP, "vulkan"), machine(hip=("gfx1151",)), "rocm-gfx11-generic", "code of gfx11-generic"),
    ((*HIP, "vulkan"), machine(hip=("gfx90a",)), "rocm-gfx90a:xnack-", "architecture, gfx90a"),
    (("metal", "arm"), Here("arm64", None, metal=True), "metal", "an Apple GPU"),
]  # fmt: skip


@pytest.mark.parametrize(("names", "here", "name", "why"), CHOICES)
def test_the_best_that_the_machine_runs_is_chosen(
    names: tuple[str, ...], here: Here, name: str, why: str
) -> None:
    for order in (names, names[::-1]):
        found, said = targets.choose(many(*order), here)
        assert found.target == ALL[name] and why in said
        assert found.files.module.path == f"{order.index(name)}.vmfb"
        assert found.targets == (ALL[name],) and len(found.files.all()) == 1


def test_the_user_has_the_last_word() -> None:
    here = machine(cuda=(90,))
    assert targets.choose(many(*EVERY), here, "arm") == (
        targets.view(many(*EVERY), EVERY.index("arm")), "as asked for"
    )  # fmt: skip
    for device, name in (
        ("local-task", "v4"), ("local-sync", "v4"), ("cuda://1", "cuda-sm90"), ("vulkan", "vulkan"),
        ("qemu-aarch64", "arm"),
    ):  # fmt: skip
        assert targets.choose(many(*EVERY), here, None, device)[0].target.name == name
    with pytest.raises(UserError, match=r"target: found 'v5', expected one .*: v2, v3, vulkan$"):
        targets.choose(many("v2", "v3", "vulkan"), here, "v5")
    with pytest.raises(
        UserError, match=r"device 'hip' cannot run .* for v2 \(local\), v3 \(local\);"
    ):
        targets.choose(many("v2", "v3"), here, None, "hip")


def test_where_nothing_runs_each_is_told() -> None:
    with pytest.raises(UserError) as caught:
        targets.choose(
            many("v4", "arm", "cuda-sm120", "vulkan", "metal"), machine(AVX2, cuda=(90,))
        )
    said = str(caught.value)
    for words in (
        "v4: this CPU lacks avx512f", "arm: for aarch64, here is x86_64",
        "cuda-sm120: for sm_120, here is sm_90", "vulkan: no Vulkan device is here",
        "metal: no such GPU is here", "build one for this machine: doit build model=toy target=…",
    ):  # fmt: skip
        assert words in said
    assert "\n" not in said


def test_amd_gpus_are_read_from_what_the_driver_lists(tmp_path: Path) -> None:
    for number, word in enumerate(("0", "90402", "110000", "90010", "100306")):
        node = tmp_path / str(number)
        node.mkdir()
        text = f"cpu_cores_count 0\nunique_id {number}\ngfx_target_version {word}\n"
        (node / "properties").write_text(text)
    (tmp_path / "4").rename(tmp_path / "10")  # after 9, and not after 1
    found = targets.hip_gpus(tmp_path)
    assert [arch for _, arch in found] == ["gfx942", "gfx1100", "gfx90a", "gfx1036"]
    assert found[2][0] == "GPU-0000000000000003"
    assert targets.hip_gpus(tmp_path / "absent") == ()
    assert targets.visible(found, {}) == found
    environ = {"ROCR_VISIBLE_DEVICES": "3,GPU-0000000000000001", "HIP_VISIBLE_DEVICES": "1"}
    assert targets.visible(found, environ) == (found[0],)


def test_of_several_gpus_the_one_that_is_opened_counts() -> None:
    found = (("GPU-aa", 80), ("GPU-bb", 90))
    for uri, gpus in (
        ("cuda", (80,)), ("cuda://0", (80,)), ("cuda://1", (90,)), ("cuda://2", ()),
        ("cuda://GPU-BB", (90,)), ("cuda://GPU-cc", ()), ("cuda://1?x=y", (90,)),
    ):  # fmt: skip
        assert targets.opened(found, uri) == gpus
    assert targets.choose(many("cuda-sm90", "v3"), machine(cuda=(80,)))[0].target.name == "v3"


def test_targets_that_store_weights_otherwise_are_refused_before_any_work(tmp_path: Path) -> None:
    for weights, words in (
        ("bf16", "weights stored as bf16 and as f32"),
        ("int8", "weights stored as int8 with scales of different types"),
    ):
        given = ["build", "model=mamba2", f"target={V3},vulkan", f"weights={weights}"]
        done = bundles.doit(given, tmp_path, tmp_path / "cache")
        assert done.returncode == 1 and not (tmp_path / "build").exists()
        (line,) = (x for x in done.stderr.splitlines() if x.startswith("error: "))
        assert f"targets {V3} and vulkan: {words}, expected one params file for both" in line
    done = bundles.doit(["build", f"target={V3},{V3}"], tmp_path, tmp_path / "cache")
    assert "a target is named twice" in done.stderr


# Real modules ------------------------------------------------------------------------------------


def host(features: tuple[str, ...]) -> bool:
    words = targets.here(()).features
    return words is not None and {f.removeprefix("+") for f in features} <= words


@pytest.fixture(scope="module")
def merged() -> Path:
    return bundles.build(NAME, f"{V4},{V3}", SHAPE)


@pytest.mark.iree
def test_one_bundle_holds_both_modules_over_one_params_file(merged: Path) -> None:
    manifest = mf.load(merged)
    assert [target.name for target in manifest.targets] == [V3, V4]  # by name, not as asked for
    assert merged.parent.name == f"{V3}+{V4}"
    assert (
        manifest.rebuild == f"doit build model={NAME.split('/')[1]} target={V3},{V4} shape={SHAPE}"
    )
    names = {path.name for path in merged.iterdir()} - {"build.log.jsonl"}
    assert names == {ref.path for ref in manifest.files.all()} | {"manifest.json"}
    assert f"model.{V3}.vmfb" in names and f"model.{V4}.vmfb" in names
    assert_right(merged)
    build = merged.parent.parent
    for number, name in enumerate((V3, V4)):
        single = mf.load(build / name / SHAPE)
        one = targets.view(manifest, number)
        assert one.target == single.target and one.proof == single.proof
        assert one.files.module.sha256 == single.files.module.sha256
        assert (merged / "params.irpa").samefile(build / name / SHAPE / "params.irpa")
    narrow, wide = (set(target.features) for target in manifest.targets)
    assert narrow < wide
    text = json.loads((merged / "sbom.cdx.json").read_text())
    assert f"{V3}, {V4}" in text["metadata"]["component"]["description"]


@pytest.mark.iree
def test_every_command_picks_and_says_which_and_why(
    merged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = mf.load(merged)
    best = V4 if host(manifest.targets[1].features) else V3
    other = V3 if best == V4 else V4
    line = f"target {best}: the widest CPU level that this processor has (there is also {other})\n"
    tokens = ["--tokens", "1,2,3", "--max-tokens", "4", "--json"]
    assert cli.main(["generate", str(merged), *tokens]) == 0
    out, err = capsys.readouterr()
    assert err == line
    assert cli.main(["generate", str(merged), *tokens, "--target", V3]) == 0
    chosen, err = capsys.readouterr()
    assert err == f"target {V3}: as asked for (there is also {V4})\n"
    assert json.loads(out)["tokens"] == json.loads(chosen)["tokens"]
    assert cli.main(["inspect", str(merged), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["target"]["name"], found["targets"]) == (best, [V3, V4])
    assert found["why"] == "the widest CPU level that this processor has"
    assert cli.main(["inspect", str(merged), "--target", V4]) == 0
    assert f"as asked for; there is also {V3}" in capsys.readouterr().out
    words = ["bench", str(merged), "--json", "--rounds", "1", "--save", str(tmp_path)]
    assert cli.main([*words, "--target", best]) == 0
    assert json.loads(capsys.readouterr().out)["target"] == best
    (kept,) = tmp_path.iterdir()  # under the name of what ran
    assert f".{best}-" in kept.name and json.loads(kept.read_text())["bundle"] == manifest.digest
    assert cli.main(["serve", str(merged), "--target", "v9", "--port", "0"]) == 1
    assert "target: found 'v9', expected one that the bundle has" in capsys.readouterr().err


@pytest.mark.iree
@pytest.mark.parametrize("name", [V3, V4])
def test_each_module_passes_verify(
    name: str, merged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    number = (V3, V4).index(name)
    if not host(mf.load(merged).targets[number].features):
        pytest.skip(f"this CPU is no {name}")
    kept = tmp_path / "kept"
    assert cli.main(["verify", str(merged), "--target", name, "--save", str(kept)]) == 0
    (found,) = (json.loads(file.read_text()) for file in kept.iterdir())
    assert (found["target"], found["bundle"]) == (name, mf.load(merged).digest)
    out = capsys.readouterr().out
    assert f"model.{V3}.vmfb" in out and f"model.{V4}.vmfb" in out and "passed" in out
    copy = tmp_path / "copy"
    shutil.copytree(merged, copy)
    module = copy / f"model.{(V3, V4)[1 - number]}.vmfb"
    module.chmod(0o600)
    module.write_bytes(module.read_bytes() + b"x")  # also of the target that is not run
    assert cli.main(["verify", str(copy), "--target", name]) == 1


@pytest.mark.iree
def test_a_pulled_bundle_is_called_after_all_its_targets(
    merged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for bundle, called in ((merged, f"{V3}+{V4}"), (merged.parent.parent / V3 / SHAPE, V3)):
        assert cli.main(["pull", str(bundle)]) == 0
        name = f"{mf.load(bundle).model.name}-{called}-{SHAPE}"
        assert mf.load(tmp_path / name) == mf.load(bundle)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.iree
def test_a_second_build_leaves_it_and_repairs_it(merged: Path) -> None:
    cwd = merged.parents[3]
    words = ["build", f"model={bundles.checkpoint(NAME)}", f"shape={SHAPE}", f"target={V3},{V4}"]
    (merged / "model.sig").write_text("kept as long as the manifest is")
    assert bundles.built(bundles.doit(words, cwd, bundles.cache()), cwd) == merged
    assert (merged / "model.sig").exists()
    (merged / f"model.{V4}.vmfb").unlink()
    bundles.built(bundles.doit(words, cwd, bundles.cache()), cwd)
    assert_right(merged)
    assert (merged / "model.sig").exists()  # it is the bundle that was signed once more
    path = merged / "manifest.json"
    path.write_text(path.read_text().replace('"not-run"', '"passed"').replace("1e-05", "2e-05"))
    path.write_text(path.read_text() + " ")
    bundles.built(bundles.doit(words, cwd, bundles.cache()), cwd)
    assert_right(merged)
    assert not (merged / "model.sig").exists()


@pytest.mark.iree
def test_signed_it_travels_whole(
    merged: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also the plan, the results and the report of a bundle for two targets know both."""
    monkeypatch.setenv("SCANWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    bundle, (private, public) = tmp_path / "build" / "m" / "both" / SHAPE, key_pair(tmp_path, "k")
    shutil.copytree(merged, bundle)
    trust.sign(bundle, private)
    push.push(bundle, str(tmp_path / "there"))
    push.pack(bundle, str(tmp_path / "packed.tar"))
    push.push(merged.parents[1] / V4 / SHAPE, str(tmp_path / "single"))
    for words in (["pull", "there"], ["unpack", "packed.tar", "unpacked"], ["pull", "single"]):
        assert cli.main(words) == 0, capsys.readouterr().err
    stem = mf.load(merged).model.name
    pulled, single = (tmp_path / f"{stem}-{t}-{SHAPE}" for t in (f"{V3}+{V4}", V4))
    assert pulled.is_dir() and single.is_dir()  # neither takes the other's place
    assert (pulled / "params.irpa").samefile(single / "params.irpa")
    assert (pulled / f"model.{V4}.vmfb").samefile(single / "model.vmfb")
    for place in (pulled, tmp_path / "unpacked"):
        trust.check(place, public)
        words = ["verify", str(place), "--trust", str(public), "--target", V3]
        assert cli.main([*words, "--save", "build/results"]) == 0
    (kept,) = (tmp_path / "build" / "results").iterdir()
    assert f"{V3}+{V4}.{V3}" in kept.name
    assert json.loads(kept.read_text())["bundle"] == mf.load(merged).digest
    for name in (V3, V4):
        log = merged.parents[1] / name / SHAPE / "build.log.jsonl"
        place = bundle.parents[1] / name / SHAPE
        place.mkdir(parents=True)
        shutil.copyfile(log, place / log.name)
    (found,) = report.collect(tmp_path / "build").bundles
    assert not found.problems and {"proof", "compile"} <= {row["stage"] for row in found.log}
    text = report.write(tmp_path / "build").read_text()
    assert f"({V3}): " in text and f"proof, {V4}" in text and f"{V3}: local-task" in text


def test_the_plan_tells_of_every_target(tmp_path: Path) -> None:
    words = ["plan", "model=mamba2-2.7b", "params=none", "target=cuda-sm90,cuda-sm80"]
    done = bundles.doit(words, tmp_path, tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    heads = [x.split()[1] for x in done.stdout.splitlines() if x.startswith("model=")]
    assert heads == ["target=cuda-sm90", "target=cuda-sm80"]
    assert done.stdout.count("\ntotal: ") == 2
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "vulkan.yaml").write_bytes(
        (bundles.ROOT / "recipes" / "targets" / "vulkan.yaml").read_bytes()
    )
    done = bundles.doit(["plan", "target=vulkan,a/vulkan.yaml"], tmp_path, tmp_path / "cache")
    assert done.returncode == 1 and "two targets of one name" in done.stderr


@pytest.mark.iree
def test_bundles_that_do_not_belong_together_are_refused(merged: Path) -> None:
    build = merged.parent.parent
    one, two = (mf.load(build / name / SHAPE) for name in (V3, V4))
    merge.check_agree(one, two)
    other = dataclasses.replace(one.model, config_sha256="0" * 64)
    reference = dataclasses.replace(two.files, reference=mf.FileRef("r.json", "0" * 64, 1))
    packages = dataclasses.replace(one.build or pytest.fail(), packages=(mf.Package("jax", "0"),))
    numbers = dataclasses.replace(two.numerics, weights="f16")
    for changed, words in (
        (dataclasses.replace(two, model=other), "model differs"),
        (dataclasses.replace(two, files=reference), "files.reference differs"),
        (dataclasses.replace(two, numerics=numbers), "weights stored as"),
    ):
        with pytest.raises(UserError, match=words):
            merge.check_agree(one, changed)
    with pytest.raises(UserError, match=r"build\.packages: jax"):
        merge._builds([one, dataclasses.replace(two, build=packages)])


@pytest.mark.iree
@pytest.mark.vulkan
def test_vulkan_beside_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    bundle = bundles.build(NAME, f"{V3},vulkan", SHAPE, "weights=f32")
    assert cli.main(["verify", str(bundle), "--target", "vulkan"]) == 0
    assert "on vulkan" in capsys.readouterr().out
    found = targets.here(mf.load(bundle).targets)
    best = targets.choose(mf.load(bundle), found)[0].target.name
    imitated = all("llvmpipe" in name for name in found.vulkan)
    assert best == (V3 if imitated else "vulkan")
