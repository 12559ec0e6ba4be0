"""The same inputs give the same bytes, whatever process, directory and environment made them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import bundles
import pytest

pytestmark = pytest.mark.iree

NAME, SHAPE = "mamba2/bf16_sharded", "b1-p8"
ELSEWHERE = {
    "PYTHONHASHSEED": "12345",
    "TZ": "Pacific/Chatham",
    "LANG": "tr_TR.UTF-8",
    "LC_ALL": "C",
    "COLUMNS": "40",
    "USER": "somebody",
    "SOURCE_DATE_EPOCH": "1",
    # None of these may reach what computes or compiles.
    "XLA_FLAGS": "--xla_cpu_max_isa=SSE4_2",
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    "JAX_ENABLE_X64": "1",
    "OPENBLAS_CORETYPE": "Prescott",
}
TARGETS = ["cpu", *(pytest.param(t, marks=pytest.mark.slow) for t in ("cuda-sm121", "vulkan"))]


def blobs(cache: Path) -> dict[str, Path]:
    """sha256 → file of everything that the stages of the builds in `cache` made."""
    return {path.name: path for path in (cache / "blobs").rglob("*") if path.is_file()}


def contents(bundle: Path) -> dict[str, bytes]:
    """The bundle's files; the build log tells of one run and is not part of it."""
    return {p.name: p.read_bytes() for p in bundle.iterdir() if p.name != "build.log.jsonl"}


def build_elsewhere(target: str, home: Path) -> tuple[Path, Path]:
    """(bundle, cache) of the same build with another cache, directory, umask, environment and
    number of cores."""
    copy = home / "other checkpoints" / NAME
    shutil.copytree(bundles.checkpoint(NAME), copy)
    cwd, cache, temporary = home / "a långer name", home / "x", home / "tmp"
    temporary.mkdir()
    headers = home / "include"
    headers.mkdir()
    (headers / "stdint.h").write_text("#error not this one")
    env = {**ELSEWHERE, "HOME": str(home), "TMPDIR": str(temporary), "CPATH": str(headers)}
    words = ["build", f"model={copy}", f"target={target}", f"shape={SHAPE}"]
    done = bundles.doit(words, cwd, cache, env, umask=0o077, one_core=True)
    return bundles.built(done, cwd), cache


@pytest.mark.parametrize("target", TARGETS)
def test_emitted_text_module_and_bundle_are_the_same_bytes(target: str, tmp_path: Path) -> None:
    here = bundles.build(NAME, target, SHAPE)
    there, cache = build_elsewhere(target, tmp_path)
    ours, theirs = blobs(bundles.cache()), blobs(cache)
    texts = [p for p in theirs.values() if p.read_bytes().startswith(b"module @")]
    assert len(texts) == 4 and len(theirs) > 10  # prefill_8, decode, seed, extract
    different = {name: path.read_bytes()[:60] for name, path in theirs.items() if name not in ours}
    assert not different
    assert contents(here) == contents(there)
    names = {"manifest.json", "model.vmfb", "params.irpa", "reference.json", "sbom.cdx.json"}
    assert names == set(contents(here))
    for path in theirs.values():
        data = path.read_bytes()
        for word in (tmp_path, bundles.ROOT, bundles.home()):
            assert os.fsencode(word) not in data, (path.name, word)


OTHER_CPU = """
import hashlib, os
from emit.machine import pin
pin(os.environ)
import jax, numpy as np
rng = np.random.default_rng(0)
for m, k, n in ((1, 768, 64), (5, 2048, 64), (64, 2048, 96)):
    a, b = (rng.standard_normal((rows, k), np.float32) for rows in (m, n))
    found = jax.jit(lambda a, b: jax.nn.softmax((a * jax.nn.silu(a)) @ b.T))(a, b)
    print(hashlib.sha256(np.asarray(found).tobytes()).hexdigest())
"""


@pytest.mark.thorough  # a minute or two under qemu
def test_jax_computes_the_same_bits_on_another_cpu() -> None:
    """One with AVX2 alone and other caches, and one core; its products would differ by default."""
    qemu = shutil.which("qemu-x86_64") or pytest.skip("no qemu-x86_64 here")
    python = [sys.executable, "-c", OTHER_CPU]
    env = {**os.environ, "PYTHONPATH": str(bundles.ROOT)}
    runs = (
        python,
        ["taskset", "-c", str(min(os.sched_getaffinity(0))), *python],
        [qemu, "-cpu", "Haswell", *python],
    )
    found = [subprocess.run(r, env=env, capture_output=True, text=True).stdout for r in runs]
    assert found[0].count("\n") == 3 and len(set(found)) == 1


def test_another_graph_is_other_bytes() -> None:
    one, two = (
        contents(bundles.build(name)) for name in (NAME, "mamba2/groups4_tied_no_conv_bias")
    )
    assert not [name for name in one if one[name] == two[name]]
