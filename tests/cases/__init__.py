"""Tiny random checkpoints, one row a case: the same files that a family's library would write.

A module a family: CASES, the rows; BASE, the config they vary; DEFAULTS, the keys that a published
config.json leaves out where that value is meant; `tensors(config, rng)`, the weights under their
checkpoint names; and, where hub files have other keys, `hub(config)`. `build` draws the weights
from the row's seed and writes config.json and safetensors. No torch: tests of a checkpoint need
none.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy

from cases.case import Case, Tensors

HANDED = Path(__file__).parent.parent / "data"
DTYPES = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype("f2")}
LONG = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


FAMILIES = tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "case"))


def family(name: str) -> Any:
    """The module of one family."""
    return importlib.import_module(f"cases.{name}")


CASES: tuple[Case, ...] = tuple(case for name in FAMILIES for case in family(name).CASES)


# The first row of each family that is not slow, and with them mamba2's others: a default run.
FIRST = [next(c for c in CASES if c.family == name and not c.slow) for name in FAMILIES]
QUICK = [c for c in CASES if c in FIRST or (c.family == "mamba2" and not c.slow)]


def find(id: str) -> Case:
    """The case called `family/name`."""
    (case,) = (case for case in CASES if case.id == id)
    return case


def ids(case: Case) -> str:
    """A test id for `case`."""
    return f"{case.family}-{case.name}"


def full_config(case: Case) -> dict[str, Any]:
    """Every key of the case's config, non-finite numbers as floats."""
    return {**family(case.family).BASE, **case.config}


def tensors(case: Case) -> Tensors:
    """The case's weights by their usual checkpoint names, in the dtype they are stored in."""
    rng = np.random.default_rng(case.seed)
    drawn = family(case.family).tensors(full_config(case), rng)
    return {name: array.astype(DTYPES[case.dtype]) for name, array in drawn.items()}


def write_config(path: Path, config: Mapping[str, Any], case: Case) -> None:
    """Write `config` in the case's dialect."""
    out = dict(config)
    if case.dialect == "hub":
        defaults = family(case.family).DEFAULTS
        out = {k: v for k, v in out.items() if k not in defaults or defaults[k] != v}
        out |= {"torch_dtype": LONG[case.dtype]}
        out = getattr(family(case.family), "hub", dict)(out)
        path.write_text(json.dumps(out, indent=2))
    else:
        out |= {"dtype": LONG[case.dtype]}
        path.write_text(json.dumps(_native(out), indent=2, allow_nan=False))


def _native(value: Any) -> Any:
    """Non-finite floats as transformers 5 writes them."""
    if isinstance(value, dict):
        return {key: _native(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_native(item) for item in value]
    if isinstance(value, float) and value in (float("inf"), -float("inf")):
        return {"__float__": "Infinity" if value > 0 else "-Infinity"}
    return value


def write_tensors(directory: Path, tensors: Tensors, shards: int = 1) -> None:
    """One model.safetensors, or `shards` files (tensors dealt in turn) and their index."""
    if shards == 1:
        path = directory / "model.safetensors"
        safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
        return
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    where = {name: files[i % shards] for i, name in enumerate(tensors)}
    for file in files:
        part = {name: array for name, array in tensors.items() if where[name] == file}
        safetensors.numpy.save_file(part, directory / file, metadata={"format": "pt"})
    total = sum(array.nbytes for array in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def build(case: Case, directory: Path) -> Path:
    """Write the case's checkpoint into `directory` (made if absent) and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    write_config(directory / "config.json", full_config(case), case)
    named = {case.rename.get(name, name): array for name, array in tensors(case).items()}
    write_tensors(directory, named, case.shards)
    return directory
