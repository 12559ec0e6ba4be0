"""bitsandbytes checkpoints."""

from __future__ import annotations

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

FOUR = {
    "quant_method": "bitsandbytes",
    "_load_in_4bit": True,
    "_load_in_8bit": False,
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": False,
    "llm_int8_enable_fp32_cpu_offload": False,
    "llm_int8_has_fp16_weight": False,
    "llm_int8_skip_modules": [quantised.KEPT],
    "llm_int8_threshold": 6.0,
}
EIGHT = FOUR | {
    "_load_in_4bit": False,
    "_load_in_8bit": True,
    "load_in_4bit": False,
    "load_in_8bit": True,
}
Write = Callable[[np.ndarray], tuple[Parts, np.ndarray]]


def by_hand(kind: str, block: int, nested: bool) -> Write:
    """Writes codes one by one, as the format says."""

    def write(weight: np.ndarray) -> tuple[Parts, np.ndarray]:
        rng, count = np.random.default_rng(block), weight.size
        codes = rng.integers(0, 16, count)
        blocks = -(-count // block)
        absmax = rng.uniform(0.1, 1, blocks).astype(np.float32)
        said: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16"}
        said["shape"] = list(weight.shape)
        parts: Parts = {"weight.absmax": absmax}
        parts["weight.quant_map"] = np.array(TABLES[kind], np.float32)
        if nested:
            inner = rng.integers(0, 256, blocks).astype(np.uint8)
            outer = rng.uniform(0.1, 1, -(-blocks // 4)).astype(np.float32)
            levels = np.sort(rng.uniform(0, 1, 256)).astype(np.float32)
            said |= {"nested_blocksize": 4, "nested_dtype": "float32", "nested_offset": 0.125}
            parts |= {"weight.absmax": inner, "weight.nested_absmax": outer}
            parts["weight.nested_quant_map"] = levels
            for i in range(blocks):
                absmax[i] = levels[inner[i]] * outer[i // 4] + np.float32(0.125)
        mean, packed = np.zeros(count, np.float32), np.zeros(-(-count // 2), np.uint8)
        for i in range(count):
            mean[i] = np.float32(TABLES[kind][codes[i]]) * absmax[i // block]
            packed[i // 2] |= codes[i] << (0 if i % 2 else 4)
        raw = np.frombuffer(json.dumps(said).encode(), np.uint8)
        parts |= {"weight": packed[:, None], f"weight.quant_state.bitsandbytes__{kind}": raw}
        return parts, mean.reshape(weight.shape)

    return write


def eight_by_hand(weight: np.ndarray) -> tuple[Parts, np.ndarray]:
    rng = np.random.default_rng(0)
    codes = rng.integers(-127, 128, weight.shape).astype(np.int8)
    scales = rng.uniform(0.1, 1, len(weight)).astype(np.float32)
    mean = np.zeros(weight.shape, np.float32)
    for o, i in np.ndindex(weight.shape):
        mean[o, i] = np.float32(codes[o, i]) * scales[o] * np.float32(7.874015718698502e-3)
    return {"weight": codes, "SCB": scales, "weight_format": np.array(0, np.uint8)}, mean


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return quantised.plain(tmp_path / "checkpoint")


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize(("block", "packs"), [(64, True), (32, True), (256, False)])
def test_reads_the_codes(plain: Path, kind: str, block: int, packs: bool, nested: bool) -> None:
    settings = FOUR | {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested}
    means = quantised.quantise(plain, settings, by_hand(kind, block, nested))
    quantised.check(plain, means, packs=packs)
    quantised.converts(plain, means)


def test_codes_stored_as_another_type(plain: Path) -> None:
    def write(weight: np.ndarray) -> tuple[Parts, np.ndarray]:
        parts, mean = by_hand("nf4", 64, False)(weight)
        parts["weight"] = parts["weight"].reshape(-1).view(ml_dtypes.bfloat16)[:, None]
        return parts, mean

    quantised.check(plain, quantised.quantise(plain, FOUR, write), packs=True)


def test_reads_int8(plain: Path) -> None:
    means = quantised.quantise(plain, EIGHT, eight_by_hand)
    quantised.check(plain, means, packs=False)
    quantised.converts(plain, means)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"load_in_8bit": True}, "one of load_in_4bit and load_in_8bit"),
        ({"load_in_4bit": None, "_load_in_4bit": None}, "one of load_in_4bit and load_in_8bit"),
        ({"bnb_4bit_quant_type": "int4"}, 'bnb_4bit_quant_type = "int4", expected'),
        ({"llm_int8_has_fp16_weight": True}, "llm_int8_has_fp16_weight = true is not supported"),
        ({"colour": "red"}, 'colour = "red" is not supported'),
    ],
)
def test_other_settings_are_refused(plain: Path, keys: dict[str, Any], line: str) -> None:
    quantised.quantise(plain, FOUR, by_hand("nf4", 64, False))
    assert line in quantised.refused(quantised.setting(plain, **keys))


def test_parts_must_go_together(plain: Path) -> None:
    quantised.quantise(plain, FOUR, by_hand("nf4", 64, True))
    good = quantised.tensors(plain)
    codes = f"{quantised.MODULES[0]}.weight"
    said = f"{codes}.quant_state.bitsandbytes__nf4"
    for change, line in (
        ({codes: None}, f"{codes} has 0 bytes"),
        ({codes: good[codes][:-1]}, f"{codes} has "),
        ({f"{codes}.absmax": None}, f"{codes}.absmax is missing"),
        ({f"{codes}.absmax": good[codes][:, 0]}, f"{codes}.absmax is u8"),
        ({f"{codes}.quant_map": np.zeros(16, np.float32)}, "is not the table of nf4"),
        ({f"{codes}.nested_quant_map": np.zeros(255, np.float32)}, "nested_quant_map is f32[255]"),
    ):
        assert line in quantised.damaged(plain, change)
    held = json.loads(good[said].tobytes())
    for wrong in (
        {"blocksize": 0},
        {"blocksize": True},
        {"blocksize": 2**50},
        {"shape": [-1, 2]},
        {"shape": None},
        {"shape": [1] * 20},
        {"quant_type": "fp4"},
        {"nested_offset": "a"},
        {"nested_blocksize": 0},
        {"colour": 1},
    ):
        raw = np.frombuffer(json.dumps(held | wrong).encode(), np.uint8)
        line = quantised.damaged(plain, {said: raw})
        assert f"{said} is no JSON of a nf4 state" in line, wrong
    for raw in (b"", b"{", b"[" * 4000, b" " * 5000, b"\xff"):
        line = quantised.damaged(plain, {said: np.frombuffer(raw, np.uint8)})
        assert f"{said} is no JSON of a nf4 state" in line


def test_int8_parts_must_go_together(plain: Path) -> None:
    quantised.quantise(plain, EIGHT, eight_by_hand)
    good = quantised.tensors(plain)
    module = quantised.MODULES[0]
    for change, line in (
        ({f"{module}.SCB": good[f"{module}.SCB"][:1]}, f"{module}.SCB is f32[1]"),
        ({f"{module}.weight": None}, f"{module}.weight is missing"),
        ({f"{module}.weight_format": np.array(2, np.uint8)}, "is not 0"),
    ):
        assert line in quantised.damaged(plain, change)


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_the_tables_are_the_libraries(kind: str) -> None:
    from bitsandbytes.functional import get_4bit_type

    wanted = get_4bit_type(kind, device="cpu").numpy()
    np.testing.assert_array_equal(np.asarray(TABLES[kind], np.float32), wanted)


@pytest.mark.oracle
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("block", [32, 64, 256])
def test_reads_as_the_library_does(plain: Path, kind: str, block: int, nested: bool) -> None:
    """Not with its kernel for AVX-512, which is wrong where a row is no whole number of blocks."""
    import torch
    from bitsandbytes import functional
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute

    def write(weight: np.ndarray) -> tuple[Parts, np.ndarray]:
        codes, state = functional.quantize_4bit(
            torch.from_numpy(weight), blocksize=block, quant_type=kind, compress_statistics=nested
        )
        parts: Parts = {"weight": quantised.array(codes)}
        for name, tensor in state.as_dict(packed=True).items():
            parts[f"weight.{name}"] = quantised.array(tensor)
        absmax, table = state.absmax, state.code
        assert table is not None
        if nested:
            assert state.offset is not None
            absmax = functional.dequantize_blockwise(absmax, state.state2) + state.offset
        shape = list(weight.shape)
        mean = _dequantize_4bit_compute(
            codes.reshape(-1), absmax, table, block, shape, torch.float32
        )
        if weight.shape[1] % block == 0:
            assert torch.equal(mean, functional.dequantize_4bit(codes, state))
        return parts, mean.numpy()

    settings = FOUR | {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested}
    means = quantised.quantise(plain, settings, write)
    quantised.check(plain, means, packs=block <= 64)
    quantised.converts(plain, means)


@pytest.mark.oracle
def test_reads_int8_as_the_library_does(plain: Path) -> None:
    import torch
    from bitsandbytes import functional

    def write(weight: np.ndarray) -> tuple[Parts, np.ndarray]:
        codes, scales, _ = functional.int8_vectorwise_quant(torch.from_numpy(weight).half())
        parts = {"weight": quantised.array(codes), "SCB": quantised.array(scales)}
        return parts, functional.int8_vectorwise_dequant(codes, scales).numpy()

    means = quantised.quantise(plain, EIGHT, write)
    quantised.check(plain, means, packs=False)
    quantised.converts(plain, means)
