"""GGUF files that llama.cpp's own conversion made of cases, and what tests ask of them.

tests/data/gguf/<family>-<case>.gguf is the case's checkpoint, converted without a tokenizer.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from driver import CONTEXT, Driver

from emit import expect
from emit.convert import convert
from emit.dequant import dequantized
from emit.entry import Model

DATA = Path(__file__).parent / "data" / "gguf"
FILES = sorted(DATA.glob("*.gguf"))


def case_id(file: Path) -> str:
    """`family/case` of a file."""
    family, _, case = file.stem.partition("-")
    return f"{family}/{case}"


def driver(checkpoint: Any) -> Driver:
    """Through a build's conversion, as `Driver.load` of a directory."""
    model = Model.of(checkpoint.config, CONTEXT)
    with tempfile.TemporaryDirectory() as out:
        source = dequantized(checkpoint, checkpoint.config)
        convert(model.weight_map, source, model.storage("f32"), Path(out))
        params = expect.load_params(model, model.storage("f32"), Path(out) / "params.irpa")
        return Driver(model, {name: jnp.array(p, copy=True) for name, p in params.items()})


def canonical(checkpoint: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """The family's config of a checkpoint, and the parameters as float32."""
    made = driver(checkpoint)
    return made.model.cfg, {name: np.asarray(p) for name, p in made.params.items()}
