"""Quantised checkpoints for tests: one small mamba2, some of whose projections are stored as codes.

One projection always stays as it is, so every such checkpoint is a mixed one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cases
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from cases.case import Case

from emit.__main__ import main
from emit.checkpoint import open_checkpoint
from emit.dequant import dequantized
from emit.dequant import scheme as scheme_of
from emit.entry import Model
from emit.errors import EmitError
from emit.expect import load_params
from emit.weights import resolve

CASE = Case(
    "quantised",
    "mamba2",
    {"hidden_size": 64, "num_heads": 16, "head_dim": 8, "n_groups": 1, "state_size": 24},
)
KEPT = "backbone.layers.1.mixer.in_proj"
MODULES = tuple(
    f"backbone.layers.{at}" for at in ("0.mixer.in_proj", "0.mixer.out_proj", "1.mixer.out_proj")
)
Parts = dict[str, np.ndarray]


def plain(directory: Path) -> Path:
    """The checkpoint before it is quantised: projections [320, 64] and [64, 128]."""
    return cases.build(CASE, directory)


def tensors(directory: Path) -> Parts:
    """All tensors of a checkpoint of one file, as they are stored."""
    opened = open_checkpoint(directory)
    return {name: np.array(opened.read(name)) for name in opened.tensors}


def rewrite(directory: Path, settings: Any, parts: Mapping[str, Parts]) -> Path:
    """The same checkpoint with `parts` of each module in place of its weight."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = settings
    path.write_text(json.dumps(config))
    stored = tensors(directory)
    for module, own in parts.items():
        del stored[f"{module}.weight"]
        stored |= {f"{module}.{word}": array for word, array in own.items()}
    save(directory, stored)
    return directory


def save(directory: Path, stored: Parts) -> None:
    """Write the tensors of a checkpoint."""
    whole = {name: np.ascontiguousarray(array) for name, array in stored.items()}
    safetensors.numpy.save_file(whole, directory / "model.safetensors")


def quantise(
    directory: Path, settings: Any, write: Callable[[np.ndarray], tuple[Parts, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Quantise by `write`: weight → (parts, what they stand for). Returns all of the latter."""
    stored, parts, means = tensors(directory), {}, {}
    for module in MODULES:
        parts[module], means[f"{module}.weight"] = write(stored[f"{module}.weight"])
    rewrite(directory, settings, parts)
    return means


def check(directory: Path, means: Mapping[str, np.ndarray], packs: bool | None = None) -> None:
    """The checkpoint reads as `means`, to the bit; so does what a bundle stores of it.

    `packs`: whether all of it can be stored as codes, or none of it.
    """
    opened = open_checkpoint(directory)
    source = dequantized(opened, opened.config)
    found = scheme_of(opened.config)
    assert found is not None
    coded = found.coded(opened)
    assert means and coded.keys() == means.keys()
    for name, mean in means.items():
        assert source.tensors[name].shape == mean.shape and source.tensors[name].dtype == "f32"
        equal(source.read(name), mean)
        tensor = coded[name]
        assert packs is None or (tensor.pack is not None) == packs, name
        if tensor.pack is not None:
            assert tensor.layout is not None
            packed = tensor.pack(*(opened.read(part) for part in tensor.parts))
            assert packed.layout == tensor.layout
            packed.check(name, tensor.shape)
            equal(packed.widen(), mean)


def equal(got: np.ndarray, wanted: np.ndarray) -> None:
    """The same float32 numbers; 0 and -0 are one."""
    assert got.dtype == np.float32 and got.shape == wanted.shape
    np.testing.assert_array_equal(got, wanted.astype(np.float32))
    assert np.isfinite(got).all() and np.abs(got).max() > 0


def converts(directory: Path, means: Mapping[str, np.ndarray]) -> None:
    """`emit convert` of the checkpoint gives what one that holds `means` gives."""
    whole = directory.parent / "dequantised"
    stored = tensors(plain(whole)) | {n: m.astype(np.float32) for n, m in means.items()}
    save(whole, stored)
    found = []
    for checkpoint in (directory, whole):
        out = directory.parent / f"{checkpoint.name}-out"
        assert main(["convert", str(checkpoint), "--weights", "f32", "--out", str(out)]) == 0
        model = Model.of(open_checkpoint(checkpoint).config)
        found.append(load_params(model, model.storage("f32"), out / "params.irpa"))
    assert found[0].keys() == found[1].keys()
    for name, wanted in found[1].items():
        np.testing.assert_array_equal(np.asarray(found[0][name]), np.asarray(wanted))


def refused(directory: Path) -> str:
    """The one line that reading `directory` is refused with."""
    with pytest.raises(EmitError) as caught:
        opened = open_checkpoint(directory)
        Model.of(opened.config)
        _ = dequantized(opened, opened.config).tensors
    line = str(caught.value)
    assert "\n" not in line
    return line


def unread(directory: Path) -> str:
    """The line that the checkpoint is refused with."""
    with pytest.raises(EmitError) as caught:
        opened = open_checkpoint(directory)
        resolve(Model.of(opened.config).weight_map, dequantized(opened, opened.config))
    return str(caught.value)


def setting(directory: Path, **keys: Any) -> Path:
    """Change keys of the checkpoint's quantization_config; None takes one away."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    given = config["quantization_config"] | keys
    config["quantization_config"] = {k: v for k, v in given.items() if v is not None}
    path.write_text(json.dumps(config))
    return directory


def damaged(directory: Path, change: Mapping[str, np.ndarray | None]) -> str:
    """The line it is refused with when tensors are changed, or taken away; then as it was."""
    good = tensors(directory)
    save(directory, {n: t for n, t in (good | dict(change)).items() if t is not None})
    try:
        return refused(directory)
    finally:
        save(directory, good)


def array(tensor: Any) -> np.ndarray:
    """A torch tensor as NumPy has it, floats of 8 and 16 bits included."""
    import torch

    kinds = {
        torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
        torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
        torch.float8_e8m0fnu: (torch.uint8, ml_dtypes.float8_e8m0fnu),
    }
    held = tensor.detach().contiguous()
    if held.dtype not in kinds:
        return held.numpy().copy()
    raw, kind = kinds[held.dtype]
    return held.view(raw).numpy().view(kind).reshape(tuple(held.shape)).copy()
