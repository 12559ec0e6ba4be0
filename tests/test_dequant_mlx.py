"""MLX's quantised checkpoints against mlx.core.dequantize, to the bit, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import quantised
from quantised import KEPT, MODULES, Parts

from emit.checkpoint import open_checkpoint
from emit.dequant import plain, scheme
from emit.dequant.bits import length
from emit.dequant.mlx import MODES, Setting

AFFINE = {"group_size": 32, "bits": 4, "mode": "affine"}
SINGLE = ("mxfp4", "mxfp8", "nvfp4")
WIDTHS = MODES["affine"].bits
Write = Callable[[np.ndarray], tuple[Parts, np.ndarray]]


def library() -> Any:
    """mlx.core."""
    import mlx.core

    return mlx.core


def settings(directory: Path, said: Any) -> Path:
    """Write MLX's two copies of the settings into config.json."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | {"quantization": said, "quantization_config": said}
    path.write_text(json.dumps(config))
    return directory


def affine(group: int, bits: int) -> Write:
    """MLX's affine mode spelled out: from the least number of a group to its largest."""

    def write(weight: np.ndarray) -> tuple[Parts, np.ndarray]:
        groups = weight.reshape(len(weight), -1, group)
        low, high = groups.min(axis=-1), groups.max(axis=-1)
        scales = (high - low) / np.float32(2**bits - 1)
        codes = np.rint((groups - low[..., None]) / scales[..., None]).astype(np.uint8)
        mean = codes * scales[..., None] + low[..., None]
        parts = {"weight": packed(codes.reshape(weight.shape), bits), "scales": scales}
        return parts | {"biases": low}, mean.reshape(weight.shape)

    return write


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes u8[O, I] as a stream of bits in u32, the lowest first."""
    stream = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little")
    whole = np.packbits(stream.reshape(len(codes), -1), axis=-1, bitorder="little")
    return whole.view("<u4")


def written(directory: Path, write: Write, said: Any) -> dict[str, np.ndarray]:
    """A mixed checkpoint in `directory`; what its codes stand for."""
    means = quantised.quantise(quantised.plain(directory), None, write)
    settings(directory, said)
    return means


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A checkpoint of affine codes."""
    written(tmp_path / "good", affine(32, 4), AFFINE)
    return tmp_path / "good"


@pytest.mark.parametrize("bits", WIDTHS)
def test_codes_of_every_width(tmp_path: Path, bits: int) -> None:
    means = written(tmp_path / "c", affine(32, bits), AFFINE | {"bits": bits})
    quantised.check(tmp_path / "c", means, packs=True)
    quantised.converts(tmp_path / "c", means)


def test_settings_of_single_modules(tmp_path: Path) -> None:
    """Those of an object are whole: what it leaves out is its mode's default, not the file's."""
    directory = quantised.plain(tmp_path / "c")
    stored = quantised.tensors(directory)
    parts, means = {}, {}
    for module, (group, bits) in zip(MODULES, ((32, 3), (64, 8), (64, 4)), strict=True):
        name = f"{module}.weight"
        parts[module], means[name] = affine(group, bits)(stored[name])
    quantised.rewrite(directory, None, parts)
    said = {"group_size": 32, "bits": 3, MODULES[0]: True, KEPT: False, "no.such.module": False}
    said |= {MODULES[1]: {"bits": 8, "group_size": None}, MODULES[2]: {"mode": "affine"}}
    settings(directory, said | {"another": {"bits": 4}})
    quantised.check(directory, means)
    quantised.converts(directory, means)


def test_the_model_of_the_config_is_the_one_not_quantised(good: Path) -> None:
    found = open_checkpoint(good).config
    assert "quantization" in found and scheme(found) is not None
    kept = {k: v for k, v in found.items() if not k.startswith("quantization")}
    assert plain(found) == kept
    assert scheme({"quantization": None}) is None


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("group", MODES["affine"].groups)
@pytest.mark.parametrize("bits", WIDTHS)
def test_affine_is_read_as_the_library_reads_it(bits: int, group: int, kind: str) -> None:
    """Of scales in bf16 and f16 too, widened first: the library itself would round to them."""
    mx = library()
    rng = np.random.default_rng(bits * group)
    for shape in ((6, 384), (2, 5, 256)):
        given = mx.array(rng.standard_normal(shape).astype(np.float32)).astype(getattr(mx, kind))
        codes, *rest = mx.quantize(given, group, bits)
        wide = [each.astype(mx.float32) for each in rest]
        wanted = np.array(mx.dequantize(codes, *wide, group, bits))
        same(Setting(group, bits, "affine"), [np.array(codes), *map(numbers, rest)], wanted)


@pytest.mark.oracle
@pytest.mark.parametrize("mode", SINGLE)
def test_other_modes_are_read_as_the_library_reads_them(mode: str) -> None:
    mx = library()
    (group,), (bits,), rng = MODES[mode].groups, MODES[mode].bits, np.random.default_rng(0)
    for shape in ((6, 384), (2, 5, 256)):
        given = mx.array(rng.standard_normal(shape).astype(np.float32) * 30)
        codes, scales = mx.quantize(given, group, bits, mode=mode)
        wanted = mx.dequantize(codes, scales, None, group, bits, mode=mode, dtype=mx.float32)
        same(Setting(group, bits, mode), [np.array(codes), np.array(scales)], np.array(wanted))


@pytest.mark.oracle
@pytest.mark.parametrize("mode", SINGLE)
def test_every_code_with_every_scale(mode: str) -> None:
    """But the scales that are not finite: a conversion refuses them."""
    mx = library()
    (group,), (bits,) = MODES[mode].groups, MODES[mode].bits
    scales = np.arange(256, dtype=np.uint8)
    scales = scales[scales & 127 != 127] if mode == "nvfp4" else scales[:255]
    every = [c for c in range(2**bits) if bits == 4 or c & 127 != 127]
    row = np.resize(np.array(every, np.uint8), -(-len(every) // group) * group)
    codes = packed(np.tile(row, (len(scales), 1)), bits)
    columns = np.repeat(scales[:, None], len(row) // group, axis=1)
    with np.errstate(over="ignore"):
        wanted = mx.dequantize(
            mx.array(codes), mx.array(columns), None, group, bits, mode=mode, dtype=mx.float32
        )
        same(Setting(group, bits, mode), [codes, columns], np.array(wanted))


@pytest.mark.oracle
def test_a_scale_of_a_whole_matrix() -> None:
    mx = library()
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 2**32, (40, 8, 8), dtype=np.uint32)
    scales = rng.integers(0, 126, (40, 8, 4)).astype(np.uint8)
    whole = rng.uniform(0.01, 90, 40).astype(np.float32)
    wanted = [
        mx.dequantize(
            *(mx.array(each[e]) for each in (codes, scales)),
            mode="nvfp4",
            global_scale=mx.array(whole[e]),
            dtype=mx.float32,
        )
        for e in range(40)
    ]
    setting = Setting(16, 4, "nvfp4", matrix_scale=True)
    same(setting, [codes, scales, whole], np.stack([np.array(each) for each in wanted]))


def numbers(array: Any) -> np.ndarray:
    """An array of MLX as NumPy has it."""
    mx = library()
    if array.dtype == mx.bfloat16:
        return np.array(array.view(mx.uint16)).view(ml_dtypes.bfloat16)
    return np.array(array)


def same(setting: Setting, parts: list[np.ndarray], wanted: np.ndarray) -> None:
    """The same bits, widened and, where a bundle can store it, packed."""
    np.testing.assert_array_equal(setting.widen(*parts).view(np.uint32), wanted.view(np.uint32))
    word = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}.get(parts[1].dtype.name, "f32")
    layout = setting.layout(word)  # pyright: ignore[reportArgumentType]
    assert (layout is None) == (setting.mode == "mxfp8")
    if layout is not None:
        found = setting.pack(*parts, layout=layout)
        found.check("it", wanted.shape)
        np.testing.assert_array_equal(found.widen().view(np.uint32), wanted.view(np.uint32))


@pytest.mark.oracle
@pytest.mark.parametrize("mode", ["affine", *SINGLE])
def test_as_the_library_writes_it(tmp_path: Path, mode: str) -> None:
    mx = library()

    def write(weight: np.ndarray) -> tuple[Parts, np.ndarray]:
        found = mx.quantize(mx.array(weight), mode=mode)
        mean = mx.dequantize(*found, mode=mode, dtype=mx.float32)
        words = ("weight", "scales", "biases")
        return dict(zip(words, map(numbers, found), strict=False)), np.array(mean)

    means = written(tmp_path / "c", write, {"mode": mode, "group_size": None, "bits": None})
    quantised.check(tmp_path / "c", means, packs=mode != "mxfp8")
    quantised.converts(tmp_path / "c", means)


LENGTH = length(64, 4)


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (["affine"], 'quantization = ["affine"], expected an object'),
        (AFFINE | {"mode": "affine2"}, 'mode = "affine2", expected one of affine, mxfp4'),
        (AFFINE | {"bits": 7}, "bits = 7, expected 1 or 2 or 3 or 4 or 5 or 6 or 8 with mode"),
        (AFFINE | {"bits": True}, "bits = true, expected"),
        (AFFINE | {"group_size": 16}, "group_size = 16, expected 32 or 64 or 128"),
        (AFFINE | {"group_size": "32"}, 'group_size = "32", expected 32'),
        ({"mode": "mxfp4", "bits": 8}, "bits = 8, expected 4 with mode mxfp4"),
        (AFFINE | {"damping": 3}, "quantization: damping = 3, expected an object or false"),
        (AFFINE | {"a.b": {"scheme": 3}}, "quantization: a.b: scheme = 3, expected one of"),
        (AFFINE | {"a.b": {"bits": 7}}, "quantization: a.b: bits = 7"),
        (AFFINE | {"a.b": {"global_scale": True}}, "a.b: global_scale = true, expected false"),
        (AFFINE | {MODULES[0]: False}, f"quantization says false of {MODULES[0]}"),
        (AFFINE | {KEPT: {"bits": 4}}, f"{KEPT}.weight is f32 and {KEPT}.scales is missing"),
        (
            AFFINE | {"bits": 8},
            f"{MODULES[0]}.weight is u32[320, {LENGTH}], expected u32 [320, 16]",
        ),
        (AFFINE | {"group_size": 64}, "affine, 4 bits, groups of 64, by config.json"),
        ({"mode": "mxfp4"}, f"{MODULES[0]}.scales is f32[320, 2], expected u8"),
    ],
)
def test_other_settings_are_refused_by_name(good: Path, said: Any, line: str) -> None:
    assert line in quantised.refused(settings(good, said))


def test_two_copies_that_differ_are_refused(good: Path) -> None:
    path = good / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    path.write_text(json.dumps(config))
    assert "quantization_config and quantization differ" in quantised.refused(good)
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    assert scheme(open_checkpoint(good).config) is not None
    config["quantization_config"] = {"quant_method": "quantization"}
    del config["quantization"]
    path.write_text(json.dumps(config))
    assert 'quantization_config = {"quant_method": "quantization"}' in quantised.refused(good)


def test_parts_that_do_not_go_together(good: Path) -> None:
    module, stored = MODULES[0], quantised.tensors(good)
    codes, scales, biases = (f"{module}.{word}" for word in ("weight", "scales", "biases"))
    for change, line in (
        ({codes: None}, f"{codes} is missing"),
        ({scales: None}, f"{codes} is u32 and {scales} is missing"),
        ({biases: None}, f"{biases} is missing"),
        ({biases: stored[biases].astype(np.float16)}, f"{biases} is f16[320, 2], expected f32"),
        ({biases: stored[biases][:, :1]}, f"{biases} is f32[320, 1], expected f32 [320, 2]"),
        ({scales: stored[scales][0]}, f"{scales} is f32[2], expected"),
        ({scales: stored[scales].astype(np.int32)}, f"{scales} is i32[320, 2], expected"),
        ({codes: stored[codes].astype(np.int32)}, f"{codes} is i32[320, 8], expected u32"),
        ({codes: stored[codes][:, :7]}, f"{codes} is u32[320, 7], expected u32 [320, 8]"),
        ({"x.weight": np.zeros((2, 2), np.uint32)}, "x.weight is u32 and x.scales is missing"),
        ({scales: np.zeros((0, 0), np.float32)}, f"{codes} is u32[320, 8], expected u32 [0, 0]"),
    ):
        assert line in quantised.damaged(good, change)


def test_codes_without_their_config_are_refused(good: Path) -> None:
    """Nothing is guessed from the tensors."""
    path = good / "config.json"
    config = json.loads(path.read_text())
    del config["quantization"], config["quantization_config"]
    path.write_text(json.dumps(config))
    assert f"{MODULES[0]}.biases is not a tensor of this family" in quantised.unread(good)
