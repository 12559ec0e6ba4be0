"""Packs for a machine with a GPU: made here, run with nothing but what they carry.

The rehearsal runs the very same commands on this machine's CPU; the GPU's own test needs one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import bundles
import pytest

GPU = Path(__file__).resolve().parent.parent / "benchmarks" / "gpu"
TINY = Path(__file__).parent / "data" / "mamba2" / "checkpoint"
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"

pytestmark = pytest.mark.iree


def prepare(out: Path, *words: str, cache: Path | None = None) -> Path:
    """A pack for this machine's Python, which has the runtime's packages already."""
    command = [sys.executable, str(GPU / "prepare.py"), "--python", PYTHON, "--out", str(out)]
    environment = os.environ | ({"SCANWRIGHT_CACHE": str(cache)} if cache else {})
    done = subprocess.run(
        [*command, "--no-wheels", *words], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return out


def run(pack: Path, cwd: Path, **variables: str) -> tuple[int, str, dict[str, Any]]:
    """(exit code, output, results) of the pack's one command, away from the repository."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        ["bash", str(pack / "run.sh"), "--out", str(cwd / "results.json")],
        cwd=cwd,
        env={**kept, "PYTHON": sys.executable, **variables},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert (cwd / "results.json").exists(), done.stderr
    return done.returncode, done.stdout, json.loads((cwd / "results.json").read_text())


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of the tiny checkpoint for cpu, with and without its weights."""
    out = tmp_path_factory.mktemp("gpu") / "pack"
    words = ["--demo", f"{TINY}==b2-p8", "--models", f"{TINY}=f32=b2-p8"]
    return prepare(out, "--target", "cpu", *words, cache=bundles.cache())


@pytest.mark.slow
def test_rehearsal_on_this_machine(pack, tmp_path):
    code, out, results = run(pack, tmp_path)
    assert code == 0 and results["failures"] == [], out
    name = "checkpoint-f32-b2-p8"
    bench, steps = results[f"bench {name}"], results[f"steps {name}"]
    assert bench["params"] == "random seed 0" and bench["device"] == "local-task"
    assert results["copy"]["bytes_per_s"] > 1e8
    assert set(steps["kernels"]) == {"decode", "prefill"}
    for kernels in steps["kernels"].values():
        assert kernels["calls"] >= kernels["kinds"] > 10
        assert kernels["busy_ms"] > 0 and kernels["top"][0]["ms"] >= kernels["top"][-1]["ms"]
        assert sum(row["ms"] for row in kernels["top"]) <= kernels["busy_ms"] * 1.001
    assert steps["parts"]["decode_call_ms"] > 0
    assert "verify: passed" in out and "of copy" in out and "0 failures" in out


@pytest.mark.slow
def test_a_damaged_pack_fails_and_the_rest_is_still_measured(pack, tmp_path):
    damaged = tmp_path / "pack"
    shutil.copytree(pack, damaged)
    module = damaged / "bundles" / "checkpoint-b2-p8" / "model.vmfb"
    data = bytearray(module.read_bytes())
    data[len(data) // 2] ^= 1
    module.unlink()
    module.write_bytes(data)
    code, out, results = run(damaged, tmp_path)
    assert code == 1
    assert [line.partition(":")[0] for line in results["failures"]] == [
        "verify checkpoint-b2-p8",
        "generate checkpoint-b2-p8",
    ]
    assert "bench checkpoint-f32-b2-p8" in results and "2 failures" in out


@pytest.mark.gpu
def test_on_an_nvidia_gpu(tmp_path):
    """Needs the driver; compiles for minutes here, where it is to be run from a carried pack."""
    pack = prepare(tmp_path / "pack", "--target", "cuda-sm90")
    code, out, results = run(pack, tmp_path)
    print(out)
    assert code == 0, out
    assert results["seconds"] < 360
    for name in json.loads((pack / "pack.json").read_text())["bench"]:
        assert results[f"bench {name}"]["decode_tokens_per_s"] > 0
        assert results[f"steps {name}"]["kernels"]
