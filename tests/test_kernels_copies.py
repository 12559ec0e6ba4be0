"""A decode step by kernels copies no state: each goes straight to the caller's storage."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from emit.entry import Model, entries, param_structs
from emit.shape import Shape
from emit.stablehlo import lower
from recipes.resolve import resolve_target

pytestmark = pytest.mark.iree
TOOLS = Path(sys.executable).parent
RECIPES = Path(__file__).parent.parent / "recipes" / "models"
FLAGS = [
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
    "--iree-llvmcpu-target-cpu=x86-64-v3",
    "--iree-input-type=stablehlo",
    "--compile-to=stream",
]


def copies(name: str, by_kernels: bool, cwd: Path) -> int:
    """How many copies a decode step of two layers of the recipe `name` has."""
    recipe = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    config = {"model_type": recipe["family"], **recipe["config"], "num_hidden_layers": 2}
    model = Model.of(config)
    (decode,) = (each for each in entries(model, Shape.parse("b1-p8")) if each.name == "decode")
    text = lower(decode, param_structs(model, model.storage("bf16")), by_kernels)
    (cwd / "model.mlir").write_text(text)
    flags = [*FLAGS, *resolve_target("cpu").flags]
    command = [str(TOOLS / "iree-compile"), "model.mlir", *flags, "-o", "-"]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True)
    assert "stream.cmd.dispatch" in done.stdout
    return len(re.findall(r"stream\.cmd\.copy|stream\.async\.(?:copy|clone)", done.stdout))


@pytest.mark.parametrize("name", ["mamba2-130m", "mamba-130m"])
def test_a_step_copies_no_state(name: str, tmp_path: Path) -> None:
    assert copies(name, True, tmp_path) == 0


def test_a_copy_would_be_seen(tmp_path: Path) -> None:
    """Code generation copies each layer's convolution tail."""
    assert copies("mamba2-130m", False, tmp_path) >= 2
