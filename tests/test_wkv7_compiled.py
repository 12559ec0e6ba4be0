"""RWKV-7's recurrence as compiled: the numbers of JAX, and no state read after it is written."""

from __future__ import annotations

import re
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from driver import relative
from test_attention_compiled import DEVICES, TOOLS, compiled
from test_ops_wkv7 import inputs, padded

from emit.ops import wkv7

pytestmark = pytest.mark.iree
# (function, tokens, chunk): a step, less than a chunk, chunks of two sizes, no power of two.
FORMS = [("step", 1, 0), ("scan", 8, 32), ("scan", 96, 32), ("scan", 80, 16), ("scan", 12, 32)]
LARGEST = 1e-5  # relative; a wrong index or mask costs 1e-2


def emitted(name: str, steps: int, chunk: int) -> tuple[str, Any, list[np.ndarray]]:
    """(text, the function, its arguments): ragged rows, one of them padding alone."""
    run = jax.jit(partial(wkv7.scan, chunk=chunk) if chunk else wkv7.step)
    a = inputs(steps, rows=3, seed=steps)
    given = list(padded(a, np.array([steps, 0, (steps + 1) // 2]), 3.0).values())
    text = run.lower(*given).as_text()
    assert "custom_call" not in text and "scatter" not in text
    return text, run, given


@pytest.mark.parametrize("target", ["cpu", pytest.param("vulkan", marks=pytest.mark.vulkan)])
@pytest.mark.parametrize(("name", "steps", "chunk"), FORMS)
def test_the_module_gives_the_numbers_of_jax(
    name: str, steps: int, chunk: int, target: str, tmp_path: Path
) -> None:
    text, run, given = emitted(name, steps, chunk)
    compiled(text, target, "-o", "model.vmfb", cwd=tmp_path)
    for i, array in enumerate(given):
        np.save(tmp_path / f"in{i}.npy", array)
    command = [str(TOOLS / "iree-run-module"), f"--device={DEVICES[target]}"]
    command += ["--module=model.vmfb", "--function=main"]
    command += [f"--input=@in{i}.npy" for i in range(7)]
    command += [f"--output=@out{i}.npy" for i in range(2)]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    for i, want in enumerate(run(*given)):
        assert relative(np.load(tmp_path / f"out{i}.npy"), want) < LARGEST
    kept = np.load(tmp_path / "out1.npy")[1]
    assert kept.tobytes() == given[6][1].tobytes(), "a row of length 0 keeps its state"


def test_a_step_writes_its_state_once(tmp_path: Path) -> None:
    text, _, _ = emitted("step", 1, 0)
    stream = compiled(text, "cpu", "--compile-to=stream", "-o", "-", cwd=tmp_path)
    assert "stream.cmd.dispatch" in stream and not re.search(r"stream\.cmd\.copy", stream)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda-sm121", "rocm-gfx942", "metal"])
@pytest.mark.parametrize(("name", "steps", "chunk"), FORMS)
def test_every_form_compiles(
    name: str, steps: int, chunk: int, target: str, tmp_path: Path
) -> None:
    compiled(emitted(name, steps, chunk)[0], target, "-o", "model.vmfb", cwd=tmp_path)
    assert (tmp_path / "model.vmfb").stat().st_size > 0
