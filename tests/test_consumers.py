"""A bundle without this project: through IREE's own program and its C API, as the papers show."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import bundles
import numpy as np
import pytest
from test_readme import blocks

from runtime import manifest, reference

WALKTHROUGH = Path(__file__).resolve().parent.parent / "docs" / "c-api.md"


def shown() -> str:
    """The README's commands."""
    (block,) = (block for block in blocks("bash") if "iree-run-module" in block)
    return block


@pytest.mark.iree
def test_iree_s_own_program_computes_what_the_reference_says(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(bundles.build("mamba2/handed"), bundle)
    script, count = re.subn(r"^cd build/\S+$", f"cd '{bundle}'", shown(), flags=re.M)
    assert count == 1
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        env={**os.environ, "PATH": path, "PYTHONPATH": "/nowhere"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = re.findall(r"^result\[\d+\]: hal\.buffer_view\n(\S+?)=(.*)$", done.stdout, re.M)
    about = manifest.load(bundle)
    prefill = about.functions[manifest.prefill_name(about.shape.chunks[0])]
    kinds = ["x".join(map(str, [*spec.shape, spec.dtype])) for spec in prefill.outputs]
    assert [kind for kind, _ in results] == kinds
    want = reference.load(bundle / "reference.json", about.rebuild).prompts[1]
    assert len(want.tokens) > 1 and results[1][1] == str(want.generated[0])
    logits = np.array(re.findall(r"[-+.\deE]+", results[0][1]), np.float32)
    top = want.top_logits[0]
    assert list(np.argsort(-logits, kind="stable")[: len(top)]) == [token for token, _ in top]
    found = [logits[token] for token, _ in top]
    np.testing.assert_allclose(found, [value for _, value in top], rtol=2e-5)  # of six digits


@pytest.mark.thorough
def test_the_code_of_the_walkthrough_compiles(tmp_path: Path) -> None:
    source = os.environ.get("SCANWRIGHT_IREE_SOURCE")
    if source is None:
        pytest.skip("SCANWRIGHT_IREE_SOURCE names no source tree of IREE, whose headers it needs")
    code = re.findall(r"^```c\n(.*?)^```", WALKTHROUGH.read_text(), re.M | re.S)
    assert len(code) == 2
    file = tmp_path / "walkthrough.c"
    file.write_text("".join(code))
    command = [sys.executable, "-m", "ziglang", "cc", "-std=gnu11", "-c", "-o", tmp_path / "x.o",
               "-Werror", "-Wall", "-Wno-unused-function", f"-isystem{source}/runtime/src",
               file]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
