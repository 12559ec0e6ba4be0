"""A bundle without this project: through IREE's own program and its C API, as the papers show."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import bundles
import numpy as np
import pytest
import toy
from test_readme import blocks
from test_targets_merged import many

from artifacts.link import MODULE
from runtime import manifest, reference

WALKTHROUGH = (Path(__file__).resolve().parent.parent / "docs" / "c-api.md").read_text()
EXAMPLE = "build/mamba2/cpu/b4-p32+256 cpu"  # the words that both papers give
C_TYPES = {"f32": "FLOAT_32", "bf16": "BFLOAT_16"}


def of(script: str, bundle: Path, target: str) -> str:
    """A script of a paper for this bundle and target."""
    assert script.count(EXAMPLE) == 1
    return script.replace(EXAMPLE, f"'{bundle}' {target}")


def run(script: str, cwd: Path) -> str:
    """What a script of a paper prints, where this project is not."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=cwd, env={**os.environ, "PATH": path, "PYTHONPATH": "/nowhere"},
        capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout[-2000:]
    return done.stdout


def beside_another(bundle: Path, to: Path) -> Path:
    """The same bundle with its module as the second of two; the first is no module."""
    shutil.copytree(bundle, to)
    about = manifest.load(bundle)
    (to / "first.vmfb").write_bytes(b"0")
    first = dataclasses.replace(about.files.module, path="first.vmfb", size=1)
    two = dataclasses.replace(
        about,
        target=dataclasses.replace(about.target, name="another", uri="cuda", device="cuda"),
        files=dataclasses.replace(about.files, module=first, alternatives=(about.files.module,)),
        alternatives=(manifest.Alternative(about.target, about.proof),),
    )
    (to / manifest.FILE_NAME).write_text(manifest.dumps(two))
    assert manifest.load(to).targets[1] == about.target
    return to


@pytest.mark.iree
@pytest.mark.parametrize("targets", [1, 2])
def test_iree_s_own_program_computes_what_the_reference_says(targets: int, tmp_path: Path) -> None:
    bundle = bundles.build("mamba2/handed")
    about = manifest.load(bundle)
    if targets == 2:
        bundle = beside_another(bundle, tmp_path / "bundle")
    (script,) = (block for block in blocks("bash") if "iree-run-module" in block)
    printed = run(of(script, bundle, "cpu"), tmp_path)
    results = re.findall(r"^result\[\d+\]: hal\.buffer_view\n(\S+?)=(.*)$", printed, re.M)
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


# From C ------------------------------------------------------------------------------------------


def shown(language: str) -> list[str]:
    """The walkthrough's blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", WALKTHROUGH, re.M | re.S)


def test_the_header_of_the_walkthrough_says_what_the_manifest_does(tmp_path: Path) -> None:
    params = manifest.FileRef("params.irpa", "0" * 64, 1)
    about = many("vulkan", "v3", "v4")
    state, shape = toy.HYBRID_STATE, about.shape
    about = dataclasses.replace(
        about,
        files=dataclasses.replace(about.files, params=params),
        functions=manifest.expected_functions(toy.V, shape.slots, shape.chunks, state),
        state=state,
    )
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / manifest.FILE_NAME).write_text(manifest.dumps(about))
    header = {}
    for number, target in enumerate(about.targets):
        run(of(shown("bash")[0], bundle, target.name), tmp_path)
        text = (tmp_path / "bundle.h").read_text()
        header = dict(re.findall(r"^#define (\w+) (.*)$", text, re.M))
        assert header == {
            "DEVICE": f'"{target.uri}"',
            "MODULE": f'"{bundle}/{number}.vmfb"',
            "PARAMS": f'"{bundle}/params.irpa"',
            "SLOTS": str(shape.slots),
            "CHUNK": str(shape.chunks[0]),
            "PREFILL": f'"{MODULE}.{manifest.prefill_name(shape.chunks[0])}"',
        }
        rows = re.findall(r"^  \{IREE_HAL_ELEMENT_TYPE_(\w+), (.*)\},  // (\S+)$", text, re.M)
        assert rows == [
            (C_TYPES[s.dtype],
             f"{int(s.kind == 'fixed')}, {s.slot_axis}, {len(s.shape)},"
             f" {{{', '.join(map(str, s.shape))}}}", s.name)
            for s in state
        ]  # fmt: skip
    (code,) = shown("c")
    (told,) = re.findall(r'^#include "bundle.h"  // (.*)$', code, re.M)
    assert set(told.split(", ")) == {*header, "STATE"}
    called = re.findall(r'(?<!include )"(\w+)\.(\w+)"', code)
    assert {module for module, _ in called} == {MODULE}
    assert {"seed", "decode"} == {name for _, name in called} <= set(about.functions)


def test_the_walkthrough_is_of_a_hundred_lines() -> None:
    (code,) = shown("c")
    lines = [line for line in code.splitlines() if line.strip() and line.strip()[:2] != "//"]
    assert len(lines) <= 120 and max(map(len, code.splitlines())) <= 100


@pytest.mark.thorough
def test_the_program_of_the_walkthrough_writes_what_the_reference_says(tmp_path: Path) -> None:
    source = os.environ.get("SCANWRIGHT_IREE_SOURCE")
    if source is None or shutil.which("cmake") is None:
        pytest.skip("needs cmake, and a source tree of IREE as SCANWRIGHT_IREE_SOURCE")
    (code,), (project,), (header, commands) = shown("c"), shown("cmake"), shown("bash")
    (tmp_path / "greedy.c").write_text(code)
    (tmp_path / "CMakeLists.txt").write_text(project)
    set_up, build, go = commands.replace("path/to/iree", f"'{source}'").splitlines()
    handed = bundles.build("mamba2/handed")
    several = beside_another(toy.bundle(hybrid=True), tmp_path / "several")
    for bundle in (handed, several):
        about = manifest.load(bundle)
        run(of(header, bundle, "cpu"), tmp_path)
        run(f"[ -d out ] || {set_up}; {build}", tmp_path)
        for prompt in reference.load(bundle / "reference.json", about.rebuild).prompts:
            words = f"{len(prompt.generated)} {' '.join(map(str, prompt.tokens))}"
            assert "8 1 2 3 4 5" in go
            printed = run(go.replace("8 1 2 3 4 5", words), tmp_path)
            assert tuple(map(int, printed.split())) == tuple(prompt.generated)
