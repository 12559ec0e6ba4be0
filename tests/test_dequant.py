"""Quantised checkpoints: the numbers they stand for, and those that are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cases
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from driver import Driver

from emit.__main__ import main
from emit.checkpoint import open_checkpoint
from emit.dequant import dequantized, scheme
from emit.dequant.fp8 import Fp8
from emit.entry import Model
from emit.errors import EmitError

F8 = ml_dtypes.float8_e4m3fn
BASE = "mamba2/plain"
LARGEST = 448.0  # of e4m3


def narrowed(weight: np.ndarray, block: tuple[int, int] | None) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of a matrix, a block at a time."""
    rows, columns = block or weight.shape
    grid = [-(-weight.shape[0] // rows), -(-weight.shape[1] // columns)]
    codes, scales = np.zeros(weight.shape, F8), np.zeros(grid, np.float32)
    for i, j in np.ndindex(*grid):
        at = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        scales[i, j] = np.abs(weight[at]).max() / LARGEST
        codes[at] = (weight[at] / scales[i, j]).astype(F8)
    return codes, scales if block else scales.reshape(())


def read(directory: Path) -> dict[str, Any]:
    """All tensors of a checkpoint of one file."""
    opened = open_checkpoint(directory)
    return {name: np.array(opened.read(name)) for name in opened.tensors}


def quantise(
    directory: Path, block: tuple[int, int] | None, skip: tuple[str, ...] = (), **keys: Any
) -> dict[str, np.ndarray]:
    """Make the checkpoint fp8, all projections but those in `skip`; returns what they become."""
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": None if block is None else list(block),
        "modules_to_not_convert": list(skip),
        **keys,
    }
    (directory / "config.json").write_text(json.dumps(config))
    tensors = read(directory)
    means: dict[str, np.ndarray] = {}
    for name in [n for n in tensors if n.endswith("proj.weight")]:
        if name.removesuffix(".weight") in skip:
            continue
        tensors[name], scales = narrowed(tensors[name], block)
        tensors[name + "_scale_inv"] = scales
        rows, columns = block or tensors[name].shape
        means[name] = tensors[name].astype(np.float32)
        for (i, j), scale in np.ndenumerate(scales.reshape(-1, scales.shape[-1] if block else 1)):
            means[name][i * rows : (i + 1) * rows, j * columns : (j + 1) * columns] *= scale
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    return means


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A checkpoint that is not quantised."""
    return cases.build(cases.find(BASE), tmp_path / "checkpoint")


@pytest.mark.parametrize("block", [(16, 24), (128, 128), None])
def test_fp8_reads_as_code_times_scale(plain: Path, block: tuple[int, int] | None) -> None:
    skipped = "backbone.layers.1.mixer.in_proj"
    before = open_checkpoint(plain)
    whole = np.array(before.read(skipped + ".weight"))
    means = quantise(plain, block, (skipped,))
    opened = open_checkpoint(plain)
    source = dequantized(opened, opened.config)
    assert means and source.tensors.keys() == before.tensors.keys()
    for name, mean in means.items():
        got = source.read(name)
        assert got.dtype == np.float32 and source.tensors[name].dtype == "f32"
        np.testing.assert_array_equal(got, mean)
    np.testing.assert_array_equal(source.read(skipped + ".weight"), whole)


def test_a_quantised_checkpoint_converts_and_runs(plain: Path, tmp_path: Path) -> None:
    """Its logits are those of the numbers it stands for, written as float32."""
    means = quantise(plain, (32, 32))
    out = tmp_path / "out"
    assert main(["convert", str(plain), "--weights", "bf16", "--out", str(out)]) == 0
    assert main(["type", str(plain), "--out", str(out)]) == 0
    assert (out / "type.txt").read_text() == "f32\n"
    found = Driver.load(plain)
    tensors = read(plain)
    kept = {n: t for n, t in tensors.items() if not n.endswith("_scale_inv")} | means
    safetensors.numpy.save_file(kept, plain / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    wanted = Driver.load(plain)
    assert found.params.keys() == wanted.params.keys()
    for name, value in wanted.params.items():
        np.testing.assert_array_equal(np.asarray(found.params[name]), np.asarray(value))


@pytest.mark.oracle
def test_fp8_is_read_as_the_library_reads_it() -> None:
    import torch
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    rng = np.random.default_rng(0)
    codes, scales = narrowed(rng.standard_normal((96, 64)).astype(np.float32), (32, 16))
    theirs = Fp8Dequantize(None)._dequantize_one(
        torch.from_numpy(codes.view(np.uint8)).view(torch.float8_e4m3fn), torch.from_numpy(scales)
    )
    np.testing.assert_array_equal(Fp8((32, 16)).widen(codes, scales), theirs.numpy())


def e8m0(exponents: np.ndarray) -> np.ndarray:
    """2 ^ exponent, as its type stores it."""
    return (exponents + 127).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)


def variant(directory: Path, change: Any, **keys: Any) -> None:
    """Quantise per tensor, and change the tensors of each projection: (tensors, name)."""
    quantise(directory, None, **keys)
    tensors = read(directory)
    for name in [n for n in tensors if n.endswith("proj.weight")]:
        change(tensors, name)
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")


def source_of(directory: Path) -> Any:
    """The checkpoint as it reads."""
    opened = open_checkpoint(directory)
    return dequantized(opened, opened.config)


def test_scales_of_activations_are_left_out(plain: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray], name: str) -> None:
        one = np.ones((), np.float32)
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.activation_scale": one, f"{module}.input_scale": one}

    before = set(open_checkpoint(plain).tensors)
    variant(plain, change, activation_scheme="static")
    assert source_of(plain).tensors.keys() == before
    assert main(["convert", str(plain), "--weights", "f32", "--out", str(tmp_path / "o")]) == 0


@pytest.mark.parametrize("by_row", [False, True])
def test_scales_as_autofp8_writes_them(plain: Path, by_row: bool) -> None:
    """`weight_scale`, one or one a row, and no block size in the config."""
    means: dict[str, np.ndarray] = {}

    def change(tensors: dict[str, np.ndarray], name: str) -> None:
        scale = tensors.pop(name + "_scale_inv")
        codes = tensors[name].astype(np.float32)
        rows = np.linspace(1, 2, len(codes), dtype=np.float32)[:, None]
        scale = scale * rows if by_row else scale.reshape(1)
        tensors[name + "_scale"] = scale
        means[name] = codes * scale

    variant(plain, change, ignored_layers=["lm_head"])
    config = json.loads((plain / "config.json").read_text())
    del config["quantization_config"]["weight_block_size"]
    (plain / "config.json").write_text(json.dumps(config))
    source = source_of(plain)
    for name, mean in means.items():
        np.testing.assert_array_equal(source.read(name), mean)


@pytest.mark.parametrize("raw", [False, True])
def test_scales_that_are_exponents(plain: Path, raw: bool) -> None:
    means: dict[str, np.ndarray] = {}

    def change(tensors: dict[str, np.ndarray], name: str) -> None:
        codes = tensors[name]
        grid = -(-codes.shape[0] // 32), -(-codes.shape[1] // 32)
        powers = np.arange(grid[0] * grid[1]).reshape(grid) - 9
        found = e8m0(powers)
        tensors[name + "_scale_inv"] = found.view(np.uint8) if raw else found
        means[name] = codes.astype(np.float32)
        for i, j in np.ndindex(*codes.shape):
            means[name][i, j] *= 2.0 ** powers[i // 32, j // 32]

    variant(plain, change, scale_fmt="ue8m0", weight_block_size=[32, 32])
    source = source_of(plain)
    assert means
    for name, mean in means.items():
        np.testing.assert_array_equal(source.read(name), mean)
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"]["scale_fmt"] = "float"
    (plain / "config.json").write_text(json.dumps(config))
    assert "_scale_inv is " in refused(plain)


def experts(directory: Path, block: list[int] | None, **tensors: np.ndarray) -> Any:
    """A checkpoint of only these tensors; its source."""
    given = {"quant_method": "fp8", "weight_block_size": block, "scale_fmt": "ue8m0"}
    config = {"quantization_config": given | {"expert_dtype": "fp4"}}
    (directory / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    return source_of(directory)


@pytest.mark.parametrize("block", [[8, 12], None])
def test_stacks_of_experts(tmp_path: Path, block: list[int] | None) -> None:
    rng = np.random.default_rng(0)
    codes = rng.standard_normal((3, 20, 24)).astype(F8)
    grid = (3, 3, 2) if block else (3, 1, 1)
    scales = rng.uniform(0.5, 2, grid).astype(np.float32)
    given = {"e.up_proj": codes, "e.up_proj_scale_inv": scales}
    given["e.up_proj_activation_scale"] = np.ones(3, np.float32)
    source = experts(tmp_path, block, **given)
    assert list(source.tensors) == ["e.up_proj"]
    found = source.read("e.up_proj")
    rows, columns = block or (20, 24)
    for e, i, j in np.ndindex(*codes.shape):
        assert found[e, i, j] == np.float32(codes[e, i, j]) * scales[e, i // rows, j // columns]


@pytest.mark.oracle
def test_experts_of_four_bits_are_read_as_the_library_reads_them(tmp_path: Path) -> None:
    import torch
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    rng = np.random.default_rng(0)
    codes = rng.integers(-128, 128, (3, 20, 32)).astype(np.int8)
    scales = e8m0(rng.integers(-5, 5, (3, 20, 2)))
    source = experts(tmp_path, [128, 128], **{"e.up": codes, "e.up_scale_inv": scales})
    theirs = Fp8Dequantize(None)._dequantize_one(
        torch.from_numpy(codes),
        torch.from_numpy(scales.view(np.uint8)),
        output_dtype=torch.float32,
    )
    np.testing.assert_array_equal(source.read("e.up"), theirs.numpy())
    opened = open_checkpoint(tmp_path)
    found = scheme(opened.config)
    assert found is not None
    coded = found.coded(opened)["e.up"]
    assert coded.pack is not None
    packed = coded.pack(*(opened.read(part) for part in coded.parts))
    packed.check("e.up", coded.shape)
    np.testing.assert_array_equal(packed.widen(), theirs.numpy())


@pytest.mark.oracle
@pytest.mark.parametrize("block", [(32, 16), None])
@pytest.mark.parametrize("form", ["float", "ue8m0"])
def test_fp8_as_the_library_writes_it(
    plain: Path, tmp_path: Path, block: tuple[int, int] | None, form: str
) -> None:
    """Its quantiser writes the checkpoint, its dequantiser says what that stands for."""
    import quantised
    import torch
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    size: Any = block
    config: Any = FineGrainedFP8Config(weight_block_size=size, scale_fmt=form)
    quantizer = Fp8Quantize(SimpleNamespace(quantization_config=config))
    directory = quantised.plain(tmp_path / "written")

    def write(weight: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        found = quantizer._quantize_one("x.weight", torch.from_numpy(weight))
        codes, scales = found["x.weight"], found["x.weight_scale_inv"]
        raw = scales.view(torch.uint8) if form == "ue8m0" else scales
        mean = Fp8Dequantize(None)._dequantize_one(codes, raw, output_dtype=torch.float32)
        parts = {"weight": codes, "weight_scale_inv": scales}
        return {word: quantised.array(t) for word, t in parts.items()}, mean.numpy()

    means = quantised.quantise(directory, json.loads(config.to_json_string(False)), write)
    quantised.check(directory, means)
    quantised.converts(directory, means)


def refused(directory: Path) -> str:
    """The one line that reading `directory` is refused with."""
    with pytest.raises(EmitError) as caught:
        opened = open_checkpoint(directory)
        Model.of(opened.config)
        _ = dequantized(opened, opened.config).tensors
    return str(caught.value)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"fmt": "e5m2"}, 'fmt = "e5m2" is not supported'),
        ({"scale_fmt": "e5m2"}, 'scale_fmt = "e5m2" is not supported'),
        ({"expert_dtype": "fp6"}, 'expert_dtype = "fp6" is not supported'),
        ({"group_size": 64}, "group_size = 64 is not supported"),
        ({"weight_block_size": [128]}, "weight_block_size = [128], expected two sizes"),
        ({"weight_block_size": [128, 0]}, "weight_block_size = [128, 0], expected two sizes"),
        ({"quant_method": "hqq"}, '"hqq"'),
    ],
)
def test_other_ways_are_refused_by_name(plain: Path, keys: Mapping[str, Any], line: str) -> None:
    quantise(plain, (16, 16), **keys)
    assert line in refused(plain)


def test_codes_and_scales_must_go_together(plain: Path) -> None:
    quantise(plain, (16, 16))
    path = plain / "model.safetensors"
    good = read(plain)
    name = next(n for n in good if n.endswith("_scale_inv"))
    codes = name.removesuffix("_scale_inv")
    for change, line in (
        ({name: None}, f"{codes} is f8_e4m3 and {name} is missing"),
        ({name: good[name][:1]}, f"{name} has shape"),
        ({codes: good[codes].astype(np.float32)}, f"{name} scales no f8_e4m3 tensor"),
    ):
        changed = {n: t for n, t in (good | change).items() if t is not None}
        safetensors.numpy.save_file(changed, path)
        assert line in refused(plain)


def test_codes_without_a_config_are_refused(plain: Path, tmp_path: Path, capsys: Any) -> None:
    """Nothing is guessed from the tensors."""
    quantise(plain, (16, 16))
    config = json.loads((plain / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    assert main(["convert", str(plain), "--weights", "f32", "--out", str(tmp_path / "o")]) == 1
    assert "_scale_inv is not a tensor of this family" in capsys.readouterr().err
