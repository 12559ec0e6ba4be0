"""The gated delta rule as compiled: the numbers of JAX, and no copy of the state."""

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
from test_attention_compiled import DEVICES, TOOLS, compiled, copied
from test_ops_delta import inputs, padded

from emit.ops import delta

pytestmark = pytest.mark.iree
LENGTHS = {1: [1, 0, 1], 5: [5, 0, 2], 40: [40, 0, 33]}
FORMS = [("step", 1, 1), ("step", 1, 7), ("scan", 5, 1), ("scan", 40, 1), ("scan", 40, 7)]


def emitted(name: str, steps: int, channels: int) -> tuple[str, Any, list[np.ndarray]]:
    """(text whose last argument is consumed, the function, its arguments: ragged rows)."""
    function: Any = delta.step if name == "step" else partial(delta.scan, chunk=32)
    run = jax.jit(function, keep_unused=True)
    given = list(padded(inputs(steps, 3, channels, seed=steps), LENGTHS[steps], 3.0).values())
    text = run.lower(*given).as_text()
    assert "custom_call" not in text and "scatter" not in text and "barrier" not in text
    text, count = re.subn(r"%arg5: (tensor<[^>]*>)", r"%arg5: \1 {iree.abi.consume}", text, count=1)
    assert count == 1
    return text, run, given


@pytest.mark.parametrize("channels", [1, 7])
def test_a_step_writes_the_state_where_it_lies(channels: int, tmp_path: Path) -> None:
    text, _, given = emitted("step", 1, channels)
    stream = compiled(text, "cpu", "--compile-to=stream", "-o", "-", cwd=tmp_path)
    copies = re.findall(r"stream\.cmd\.copy", stream)
    assert "stream.cmd.dispatch" in stream
    assert not copies or copied(stream) < given[5].nbytes


@pytest.mark.parametrize("target", ["cpu", pytest.param("vulkan", marks=pytest.mark.vulkan)])
@pytest.mark.parametrize(("name", "steps", "channels"), FORMS)
def test_the_module_gives_the_numbers_of_jax(
    name: str, steps: int, channels: int, target: str, tmp_path: Path
) -> None:
    text, run, given = emitted(name, steps, channels)
    compiled(text, target, "-o", "model.vmfb", cwd=tmp_path)
    for i, array in enumerate(given):
        np.save(tmp_path / f"in{i}.npy", array)
    command = [str(TOOLS / "iree-run-module"), f"--device={DEVICES[target]}"]
    command += ["--module=model.vmfb", "--function=main"]
    command += [f"--input=@in{i}.npy" for i in range(len(given))]
    command += [f"--output=@out{i}.npy" for i in range(2)]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True, timeout=300)
    y, state = (np.load(tmp_path / f"out{i}.npy") for i in range(2))
    want, want_state = map(np.asarray, run(*given))
    assert relative(state, want_state) < 2e-6
    assert state[1].tobytes() == given[5][1].tobytes(), "a row of length 0 keeps its state"
    for b, length in enumerate(LENGTHS[steps]):
        if length:
            assert relative(y[b, :length], want[b, :length]) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda-sm121", "rocm-gfx942", "metal"])
@pytest.mark.parametrize(("name", "steps", "channels"), FORMS)
def test_every_form_compiles(
    name: str, steps: int, channels: int, target: str, tmp_path: Path
) -> None:
    compiled(emitted(name, steps, channels)[0], target, "-o", "model.vmfb", cwd=tmp_path)
    assert (tmp_path / "model.vmfb").stat().st_size > 0
