"""ModelOpt checkpoints."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import quantised
from quantised import Parts

from emit.packed import TABLES

Write = Callable[[np.ndarray], tuple[Parts, np.ndarray]]
E4M3 = ml_dtypes.float8_e4m3fn
PRODUCER = {"name": "modelopt", "version": "0.47.0"}


def raw(algorithm: str, **keys: Any) -> dict[str, Any]:
    """What hf_quant_config.json holds."""
    inner = {"quant_algo": algorithm, "kv_cache_quant_algo": None} | keys
    inner.setdefault("exclude_modules", ["lm_head", f"{quantised.KEPT}*"])
    return {"quant_method": "modelopt", "producer": PRODUCER, "quantization": inner}


def converted(algorithm: str, bits: int, **weights: Any) -> dict[str, Any]:
    """What config.json holds of it."""
    own = {"dynamic": False, "num_bits": bits, "type": "float"} | weights
    group = {"input_activations": own, "weights": own, "targets": ["Linear"]}
    return {
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", f"{quantised.KEPT}*"],
        "quant_algo": algorithm,
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "producer": PRODUCER,
        "quant_method": "modelopt",
    }


def by_hand(algorithm: str, group: int) -> Write:
    """Writes codes one by one, as the format says."""
    four, nv, mx = "FP4" in algorithm, "NVFP4" in algorithm, "MX" in algorithm

    def write(weight: np.ndarray) -> tuple[Parts, np.ndarray]:
        rng, (outputs, inputs) = np.random.default_rng(group), weight.shape
        rows, columns = {"FP8": (outputs, inputs), "FP8_PB_WO": (128, 128)}.get(
            algorithm, (1, group or inputs)
        )
        grid = -(-outputs // rows), -(-inputs // columns)
        scales = rng.uniform(0.5, 3, grid).astype(np.float32)
        stored: np.ndarray = scales
        whole = np.float32(0.037) if nv else np.float32(1)
        if mx:
            stored = rng.integers(110, 135, grid).astype(np.uint8)
            scales = np.array([[2.0 ** (int(e) - 127) for e in row] for row in stored], np.float32)
        elif nv:
            stored = scales.astype(E4M3)
            scales = stored.astype(np.float32)
        codes: np.ndarray = rng.integers(-127, 128, weight.shape).astype(np.int8)
        numbers: np.ndarray = codes.astype(np.float32)
        if four:
            codes = rng.integers(0, 16, weight.shape).astype(np.uint8)
            numbers = np.asarray(TABLES["e2m1"], np.float32)[codes]
            codes = codes[:, ::2] | codes[:, 1::2] << 4
        elif not algorithm.startswith("W8"):
            codes = rng.uniform(-400, 400, weight.shape).astype(E4M3)
            numbers = codes.astype(np.float32)
        mean = np.zeros(weight.shape, np.float32)
        for o, i in np.ndindex(weight.shape):
            mean[o, i] = numbers[o, i] * (scales[o // rows, i // columns] * whole)
        if algorithm == "FP8":
            stored = stored.reshape(())
        elif not group and rows == 1:
            stored = stored.reshape(-1)
        parts: Parts = {"weight": codes, "weight_scale": stored}
        parts["input_scale"] = np.array(2, np.float32)
        if nv:
            parts["weight_scale_2"] = np.array(whole)
        return parts, mean

    return write


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return quantised.plain(tmp_path / "checkpoint")


ALL = {
    "FP8": 0,
    "FP8_PER_CHANNEL_PER_TOKEN": 0,
    "FP8_PB_WO": 0,
    "NVFP4": 16,
    "W4A16_NVFP4": 16,
    "W4A8_NVFP4_FP8": 32,
    "W4A8_MXFP4_FP8": 32,
    "MXFP8": 32,
    "W8A16": 0,
    "W8A8_SQ_PER_CHANNEL": 0,
}


@pytest.mark.parametrize("algorithm", ALL)
def test_reads_the_codes(plain: Path, algorithm: str) -> None:
    group = ALL[algorithm]
    given = raw(algorithm, **({"group_size": group} if group else {}))
    means = quantised.quantise(plain, given, by_hand(algorithm, group))
    quantised.check(plain, means, packs="FP8" not in algorithm.removesuffix("_FP8"))
    quantised.converts(plain, means)


@pytest.mark.parametrize(("algorithm", "bits", "group"), [("FP8", 8, 0), ("NVFP4", 4, 32)])
def test_the_settings_in_config_json(plain: Path, algorithm: str, bits: int, group: int) -> None:
    given = converted(algorithm, bits, **({"group_size": group} if group else {}))
    means = quantised.quantise(plain, given, by_hand(algorithm, group))
    quantised.check(plain, means)
    quantised.converts(plain, means)


def test_the_settings_in_a_file_of_their_own(plain: Path) -> None:
    """As older exports have them; what stands in config.json counts first."""
    given = raw("NVFP4", group_size=16)
    means = quantised.quantise(plain, given, by_hand("NVFP4", 16))
    config = json.loads((plain / "config.json").read_text())
    del config["quantization_config"], given["quant_method"]
    (plain / "config.json").write_text(json.dumps(config))
    assert "is not a tensor of this family" in quantised.unread(plain)
    beside = plain / "hf_quant_config.json"
    beside.write_text(json.dumps(given))
    quantised.check(plain, means)
    quantised.converts(plain, means)
    beside.write_text("[1]")
    assert f"{beside}: file: expected a JSON object" in quantised.unread(plain)
    beside.unlink()
    beside.symlink_to("/etc/passwd")
    assert f"{beside}: is a link out of" in quantised.unread(plain)


@pytest.mark.parametrize("inner", [True, False])
def test_mixed_precision(plain: Path, inner: bool) -> None:
    first, second, third = quantised.MODULES
    layers = {
        first: {"quant_algo": "FP8"},
        "*.0.mixer.out_proj": {"quant_algo": "NVFP4", "group_size": 32},
        third: {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    }
    given = raw("MIXED_PRECISION", quantized_layers=layers)
    if not inner:
        given = converted("MIXED_PRECISION", 8) | {"quantized_layers": layers}
    stored = quantised.tensors(plain)
    parts, means = {}, {}
    for module, write in (
        (first, by_hand("FP8", 0)),
        (second, by_hand("NVFP4", 32)),
        (third, by_hand("NVFP4", 16)),
    ):
        parts[module], means[f"{module}.weight"] = write(stored[f"{module}.weight"])
    quantised.check(quantised.rewrite(plain, given, parts), means)
    quantised.converts(plain, means)


def test_excluded_modules_are_left_alone(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from emit.__main__ import main

    quantised.quantise(plain, raw("FP8"), by_hand("FP8", 0))
    quantised.setting(plain, quantization={"quant_algo": "FP8", "exclude_modules": ["*0.mix*"]})
    out = str(plain.parent / "out")
    assert main(["convert", str(plain), "--weights", "f32", "--out", out]) == 1
    assert "0.mixer.in_proj.weight_scale is not a tensor" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (raw("NVFP4_AWQ"), 'quant_algo = "NVFP4_AWQ", expected one of'),
        (raw("NVFP4", pre_quant_scale=True), "pre_quant_scale = true is not supported"),
        (raw("NVFP4", group_size=24), "in groups of 24"),
        (raw("NVFP4", group_size="16"), 'group_size = "16", expected'),
        (raw("NVFP4", colour=1), "colour = 1 is not supported"),
        (raw("FP8") | {"colour": 1}, "colour = 1 is not supported"),
        (raw("FP8") | {"quantization": []}, "quantization = [], expected"),
        (raw("FP8", exclude_modules="lm_head"), "expected a list of names"),
        (raw("MIXED_PRECISION"), "quantized_layers = null, expected"),
        (raw("MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "X"}}), 'quant_algo = "X"'),
        (converted("NVFP4", 4) | {"config_groups": {"a": 1}}, "config_groups.a = 1, expected"),
        ({"quant_method": "modelopt"}, "quant_algo = null, expected"),
    ],
)
def test_other_settings_are_refused(plain: Path, given: dict[str, Any], line: str) -> None:
    quantised.quantise(plain, given, by_hand("NVFP4", 16))
    assert line in quantised.refused(plain)


def test_parts_must_go_together(plain: Path) -> None:
    quantised.quantise(plain, raw("NVFP4"), by_hand("NVFP4", 16))
    good = quantised.tensors(plain)
    codes = f"{quantised.MODULES[0]}.weight"
    scales, whole = f"{codes}_scale", f"{codes}_scale_2"
    for change, line in (
        ({whole: None}, f"{whole} is missing"),
        ({whole: good[scales]}, f"{whole} is f8_e4m3"),
        ({scales: good[scales][:3]}, f"{scales} is f8_e4m3[3, 4]"),
        ({scales: good[scales].astype(np.float32)}, f"{scales} is f32"),
        ({codes: None}, f"{codes} is missing"),
        ({codes: good[codes].view(np.int8)}, f"{codes} is i8"),
    ):
        assert line in quantised.damaged(plain, change)


def library(name: str) -> Any:
    """A module of ModelOpt."""
    pytest.importorskip("modelopt", reason="nvidia-modelopt is not installed")
    return importlib.import_module(f"modelopt.{name}")


def by_library(algorithm: str) -> Write:
    """Its tensors quantise, and dequantise to float32."""
    import torch

    qtensor = library("torch.quantization.qtensor")

    def nvfp4(weight: Any) -> tuple[Any, ...]:
        codes, scales, whole = qtensor.NVFP4QTensor.quantize(weight.clone(), 16)
        mean = codes.dequantize(
            torch.float32, scale=scales, double_scale=whole, block_sizes={-1: 16}
        )
        return codes._quantized_data, scales, mean, whole

    def fp8(weight: Any) -> tuple[Any, ...]:
        codes, scales = qtensor.FP8QTensor.quantize(weight)
        return codes._quantized_data, scales, codes.dequantize(torch.float32, scale=scales)

    def blocks(weight: Any) -> tuple[Any, ...]:
        sizes = {-1: 128, -2: 128}
        padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 128))
        padded = torch.nn.functional.pad(padded, (0, 0, 0, -weight.shape[0] % 128))
        codes, scales = qtensor.FP8QTensor.quantize(padded, block_sizes=sizes)
        mean = codes.dequantize(torch.float32, scale=scales, block_sizes=sizes)
        rows, columns = weight.shape
        return codes._quantized_data[:rows, :columns], scales, mean[:rows, :columns]

    def mxfp8(weight: Any) -> tuple[Any, ...]:
        codes, scales = qtensor.MXFP8QTensor.quantize(weight)
        return codes._quantized_data, scales, codes.dequantize(torch.float32, scale=scales)

    ways = {"NVFP4": nvfp4, "FP8": fp8, "FP8_PB_WO": blocks, "MXFP8": mxfp8}

    def write(weight: np.ndarray) -> tuple[Parts, np.ndarray]:
        codes, scales, mean, *whole = ways[algorithm](torch.from_numpy(weight))
        parts = {"weight": quantised.array(codes), "weight_scale": quantised.array(scales)}
        if whole:
            parts["weight_scale_2"] = quantised.array(whole[0])
        return parts, mean.numpy()

    return write


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("algorithm", ["NVFP4", "FP8", "FP8_PB_WO", "MXFP8"])
def test_reads_as_the_library_does(plain: Path, algorithm: str) -> None:
    means = quantised.quantise(plain, raw(algorithm), by_library(algorithm))
    quantised.check(plain, means, packs=algorithm == "NVFP4")
    quantised.converts(plain, means)


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("algorithm", ["NVFP4", "FP8", "W4A16_NVFP4"])
def test_both_spellings_of_the_library_mean_the_same(algorithm: str) -> None:
    from emit.dequant import modelopt

    convert = library("torch.export.convert_hf_config").convert_hf_quant_config_format
    given = raw(algorithm, group_size=16 if "4" in algorithm else None)
    config = convert(given)
    found = [modelopt.read({"quantization_config": each}) for each in (given, config)]
    assert found[0].every == found[1].every and found[0].every is not None
    assert found[0].excluded.exact == found[1].excluded.exact
