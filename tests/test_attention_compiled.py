"""Attention as compiled: the KV region is updated where it lies, and the numbers are JAX's.

The region is an argument that the function consumes, as in an entry point of a model.
"""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from driver import relative

from emit.ops import attention
from recipes.resolve import resolve_target

pytestmark = pytest.mark.iree
TOOLS = Path(sys.executable).parent
DEVICES = {"cpu": "local-task", "vulkan": "vulkan"}
TARGETS = {
    "cpu": [
        "--iree-hal-target-device=local",
        "--iree-hal-local-target-device-backends=llvm-cpu",
        "--iree-llvmcpu-target-cpu=host",
    ],
    "vulkan": ["--iree-hal-target-device=vulkan"],
    "cuda-sm121": ["--iree-hal-target-device=cuda"],
    "rocm-gfx942": ["--iree-hal-target-device=hip"],
    "metal": ["--iree-hal-target-device=metal"],
}
B, H, G, D, C = 3, 6, 2, 16, 256
REGION = 4 * B * G * C * D
# (function, tokens, window): a step and a chunk, over a full region and over a ring.
FORMS = [("step", 1, None), ("step", 1, C), ("scan", 16, None), ("scan", 16, C), ("scan", 64, C)]


def arguments(steps: int, window: int | None) -> list[np.ndarray]:
    """Ragged rows, one of them padding alone, in regions in use."""
    rng = np.random.default_rng(0)
    shapes = [(B, steps, H, D), (B, steps, G, D), (B, steps, G, D), (B, G, C, D), (B, G, C, D)]
    q, k, v, keys, values = (rng.standard_normal(s).astype(np.float32) for s in shapes)
    lengths = np.array([steps, 0, max(steps // 3, 1)], np.int32)
    positions = np.array([C - steps, 5, 20] if window is None else [500, 5, 250], np.int32)
    return [q, k, v, lengths, positions, keys, values]


def emitted(name: str, steps: int, window: int | None) -> tuple[str, Any, list[np.ndarray]]:
    """(text whose last two arguments are consumed, the function, its arguments)."""
    run = jax.jit(
        partial(getattr(attention, name), scale=0.3, window=window, softcap=4.0), keep_unused=True
    )
    given = arguments(steps, window)
    text = run.lower(*given).as_text()
    assert "custom_call" not in text and "scatter" not in text
    for argument in (5, 6):
        consumed = rf"%arg{argument}: \1 {{iree.abi.consume}}"
        text, count = re.subn(rf"%arg{argument}: (tensor<[^>]*>)", consumed, text, count=1)
        assert count == 1
    return text, run, given


def compiled(text: str, target: str, *words: str, cwd: Path) -> str:
    (cwd / "model.mlir").write_text(text)
    flags = [*TARGETS[target], *resolve_target(target).flags, "--iree-input-type=stablehlo"]
    command = [str(TOOLS / "iree-compile"), "model.mlir", *flags, *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True).stdout


def copied(stream: str) -> int:
    """Bytes of the largest copy within one function; fails where none of it can be read."""
    constants = dict(re.findall(r"(%c\d+\w*) = arith.constant (\d+) : index", stream))
    found = re.findall(r"stream\.cmd\.copy %\w+\[[^]]*\], %\w+\[[^]]*\], (%\w+) :", stream)
    assert found and "stream.cmd.dispatch" in stream
    return max(int(constants[size]) for size in found)


@pytest.mark.parametrize(("name", "steps", "window"), FORMS)
def test_the_region_is_not_copied(
    name: str, steps: int, window: int | None, tmp_path: Path
) -> None:
    text, _, _ = emitted(name, steps, window)
    stream = compiled(text, "cpu", "--compile-to=stream", "-o", "-", cwd=tmp_path)
    assert len(re.findall(r"tensor\.import .* consume", stream)) == 2
    assert copied(stream) < REGION


def test_a_copy_of_the_region_would_be_seen(tmp_path: Path) -> None:
    """What the caller keeps has to be copied before it is written over."""
    text = emitted("step", 1, None)[0].replace(" {iree.abi.consume}", "")
    stream = compiled(text, "cpu", "--compile-to=stream", "-o", "-", cwd=tmp_path)
    assert copied(stream) >= REGION


@pytest.mark.parametrize("target", ["cpu", pytest.param("vulkan", marks=pytest.mark.vulkan)])
@pytest.mark.parametrize(("name", "steps", "window"), FORMS)
def test_the_module_gives_the_numbers_of_jax(
    name: str, steps: int, window: int | None, target: str, tmp_path: Path
) -> None:
    text, run, given = emitted(name, steps, window)
    compiled(text, target, "-o", "model.vmfb", cwd=tmp_path)
    for i, array in enumerate(given):
        np.save(tmp_path / f"in{i}.npy", array)
    command = [str(TOOLS / "iree-run-module"), f"--device={DEVICES[target]}"]
    command += ["--module=model.vmfb", "--function=main"]
    command += [f"--input=@in{i}.npy" for i in range(7)]
    command += [f"--output=@out{i}.npy" for i in range(3)]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    y, keys, values = (np.load(tmp_path / f"out{i}.npy") for i in range(3))
    want, want_keys, want_values = map(np.asarray, run(*given))
    assert keys.tobytes() == want_keys.tobytes() and values.tobytes() == want_values.tobytes()
    for b, length in enumerate(given[3]):
        if length:
            assert relative(y[b, :length], want[b, :length]) < 3e-6


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda-sm121", "rocm-gfx942", "metal"])
@pytest.mark.parametrize(("name", "steps", "window"), FORMS)
def test_every_form_compiles(
    name: str, steps: int, window: int | None, target: str, tmp_path: Path
) -> None:
    compiled(emitted(name, steps, window)[0], target, "-o", "model.vmfb", cwd=tmp_path)
    assert (tmp_path / "model.vmfb").stat().st_size > 0
