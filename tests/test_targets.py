"""Every target recipe builds a bundle of a real model, and its manifest says what it is.

One target of a kind in a default run; `slow` has the others.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import bundles
import pytest
from test_compile import find_ptxas

from artifacts import cpu as cpus
from artifacts import devices
from artifacts.compile import dump_ptx
from artifacts.cpu import Cpu
from artifacts.link import link
from recipes.resolve import every_target, resolve_target
from recipes.schema import WEIGHT_TYPES, TargetRecipe
from runtime import manifest as manifests
from runtime import module
from runtime.errors import UserError
from runtime.probe import calls
from runtime.vmfb import bytecode_version

pytestmark = pytest.mark.iree

F32, BF16 = "mamba2/groups4_tied_no_conv_bias", "mamba2/bf16_sharded"
SHAPE = "b1-p8"
DEFAULT = ("cpu", "cuda-sm121")
SUBSTITUTES = {"metal": "f16", "vulkan": "f32"}
ALL = [
    pytest.param(target.name, marks=() if target.name in DEFAULT else pytest.mark.slow)
    for target in every_target()
]
CUDA = [target for target in every_target() if target.device == "cuda"]


def recorded_cpu(recipe: TargetRecipe, manifest: manifests.Manifest) -> Cpu | None:
    """The CPU that the manifest names, as devices.usable asks for it."""
    if recipe.cpu is None:
        return None
    name = manifest.target.cpu
    assert name is not None
    return Cpu(name, recipe.triple or "", (), tuple(manifest.target.features))


@pytest.mark.parametrize("name", ALL)
def test_target_builds_and_its_manifest_loads(name: str) -> None:
    recipe, bundle = resolve_target(name), bundles.build(F32, name, SHAPE)
    manifest = manifests.load(bundle)
    target, numerics = manifest.target, manifest.numerics
    assert (target.name, target.device, target.uri) == (name, recipe.device, recipe.uri)
    assert target.flags[: len(recipe.flags)] == recipe.flags  # the fast ones, none was refused
    assert numerics.weights == "f32" and manifest.params
    assert target.bytecode_version == bytecode_version(bundle / "model.vmfb")
    assert target.bytecode_version == module.runtime_bytecode_version(bundle / "model.vmfb")
    assert set(manifest.functions) == {"prefill_8", "decode", "seed", "extract"}
    device, why_not = devices.usable(recipe, recorded_cpu(recipe, manifest))
    expected = ("passed", None) if device else ("not-run", why_not)
    assert (manifest.proof.status, manifest.proof.reason) == expected
    assert manifest.proof.flags == "fast"
    if recipe.device not in ("local", "vulkan"):
        assert expected[0] == "not-run" and why_not and recipe.device in why_not
    verified = json.loads((bundle / "reference.json").read_text())
    assert set(verified["entries"]["functions"]) == {c for c, _ in calls(manifest.functions)}
    check_cpu(recipe, manifest)


def check_cpu(recipe: TargetRecipe, manifest: manifests.Manifest) -> None:
    """The CPU and its features are recorded where code was made for one, and only there."""
    target, flags = manifest.target, " ".join(manifest.target.flags)
    if recipe.cpu is None:
        assert target.cpu is None and not target.features
        assert "llvmcpu" not in flags
        return
    assert (
        target.cpu and target.cpu != "host" and f"--iree-llvmcpu-target-cpu={target.cpu}" in flags
    )
    assert target.features and all(f.startswith("+") for f in target.features)
    if recipe.cpu == "host":
        assert {f.removeprefix("+") for f in target.features} <= cpus.host_features()
    if recipe.name == "cpu-x86-64-v3":
        assert "+avx2" in target.features and "+avx512f" not in target.features
    if recipe.name == "cpu-x86-64-v4":
        assert "+avx512f" in target.features
    if recipe.name == "cpu-aarch64":
        assert "aarch64" in flags and "+asimd" in target.features


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n == "vulkan" else ()) for n in SUBSTITUTES]
)
def test_a_weight_type_the_target_lacks_is_replaced_aloud(name: str) -> None:
    """The checkpoint is bf16; only the notice and the manifest change with the target."""
    cwd, used = bundles.home() / "substitutes", SUBSTITUTES[name]
    words = ["build", f"model={bundles.checkpoint(BF16)}", f"target={name}", f"shape={SHAPE}"]
    done = bundles.doit(words, cwd, bundles.cache())
    manifest = manifests.load(bundles.built(done, cwd))
    notices = [line for line in done.stderr.splitlines() if "bf16" in line]
    assert notices == [f"target {name} has no bf16 weights: converting to {used} instead"]
    assert manifest.numerics.weights == used
    wide = {spec.dtype for spec in manifest.params}
    assert used in wide and "bf16" not in wide
    kept = manifests.load(bundles.build(BF16))
    assert kept.numerics.weights == "bf16" and "bf16" in {spec.dtype for spec in kept.params}


def test_every_target_takes_or_replaces_every_weight_type() -> None:
    for target in every_target():
        assert set(target.weights) | set(target.substitute) == set(WEIGHT_TYPES)
        assert not set(target.weights) & set(target.substitute)
        assert set(target.substitute.values()) <= set(target.weights)
    replaced = {t.name: t.substitute["bf16"] for t in every_target() if "bf16" in t.substitute}
    assert replaced == SUBSTITUTES


def test_a_bundle_of_another_device_is_refused_in_one_line() -> None:
    bundle = bundles.build(F32, "cuda-sm121", SHAPE)
    with pytest.raises(UserError, match=r"compiled for cuda \(target cuda-sm121\)"):
        module.open_bundle(bundle, manifests.load(bundle), "local-task")


# PTX ---------------------------------------------------------------------------------------------


@cache
def emitted(weights: str) -> str:
    """The linked text of the model's own entries."""
    out = bundles.home() / "emitted" / weights
    config = bundles.checkpoint(BF16) / "config.json"
    command = [sys.executable, "-m", "emit", "graphs", "--config", str(config)]
    command += ["--weights", weights, "--shape", "b2-p8+32", "--out", str(out)]
    subprocess.run(command, cwd=bundles.ROOT, check=True)
    texts = [(path.stem, path.read_text(encoding="utf-8")) for path in sorted(out.glob("*.mlir"))]
    assert len(texts) == 5
    return link(texts)


def ptx_row(name: str, weights: str):
    """One row in a default run, the others slow."""
    quick = (name, weights) == ("cuda-sm121", "bf16")
    return pytest.param(name, weights, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "weights"), [ptx_row(t.name, w) for t in CUDA for w in ("f32", "bf16", "f16")]
)
def test_ptx_of_the_model_assembles(tmp_path: Path, name: str, weights: str) -> None:
    """Every executable of every entry, for the GPU that the target is named for, without spills.

    Two registers at most: a prefill's product with a gate and six operands has had 0 or 8 bytes by
    how its operands lie in memory.
    """
    ptxas = find_ptxas()
    if ptxas is None:
        pytest.skip("no ptxas here (PATH, or pip install nvidia-cuda-nvcc)")
    files = dump_ptx(emitted(weights), resolve_target(name).flags, tmp_path / "ptx")
    gpu, kernels = name.replace("cuda-sm", "sm_"), 0
    for ptx in files:
        command = [ptxas, f"-arch={gpu}", "-v", str(ptx), "-o", str(tmp_path / "out.cubin")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        spills = re.findall(r"(\d+) bytes spill stores", done.stderr)
        assert set(spills) <= {"0", "8"}
        assert len(spills) == ptx.read_text(encoding="utf-8").count(".entry ")
        kernels += len(spills)
    assert kernels > 50
