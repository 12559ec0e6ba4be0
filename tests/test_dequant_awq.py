"""AWQ checkpoints."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import quantised
from quantised import Parts

SETTINGS = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "version": "gemm",
    "zero_point": True,
    "modules_to_not_convert": [quantised.KEPT],
}
IN_A_WORD = (0, 2, 4, 6, 1, 3, 5, 7)  # outputs, from the lowest bits


def by_hand(group: int, gemv: bool) -> Callable[[np.ndarray], tuple[Parts, np.ndarray]]:
    """Writes codes one by one, as the format says."""

    def write(weight: np.ndarray) -> tuple[Parts, np.ndarray]:
        outputs, inputs = weight.shape
        size = inputs if group == -1 else group
        rng = np.random.default_rng(group + 1)
        codes = rng.integers(0, 16, (outputs, inputs))
        zeros = rng.integers(0, 16, (outputs, inputs // size))
        scales = rng.uniform(0.01, 0.1, zeros.shape).astype(np.float16)
        mean = np.zeros(weight.shape)
        for o, i in np.ndindex(weight.shape):
            g = i // size
            mean[o, i] = (int(codes[o, i]) - int(zeros[o, g])) * float(scales[o, g])
        return (gemv_parts if gemv else gemm_parts)(codes, zeros, scales, size), mean

    return write


def gemm_parts(codes: Any, zeros: Any, scales: Any, _: int) -> Parts:
    def packed(matrix: np.ndarray) -> np.ndarray:
        words = np.zeros((matrix.shape[1], matrix.shape[0] // 8), np.uint32)
        for row, column, at in np.ndindex(*words.shape, 8):
            code = int(matrix[8 * column + IN_A_WORD[at], row])
            words[row, column] |= np.uint32(code << 4 * at)
        return words.view(np.int32)

    return {"qweight": packed(codes), "qzeros": packed(zeros), "scales": scales.T}


def gemv_parts(codes: Any, zeros: Any, scales: Any, size: int) -> Parts:
    def packed(matrix: np.ndarray, count: int) -> np.ndarray:
        words = np.zeros((len(matrix), count), np.uint32)
        for row, column in np.ndindex(matrix.shape):
            words[row, column // 8] |= np.uint32(int(matrix[row, column]) << 4 * (column % 8))
        return words.view(np.int32)

    width = -(-zeros.shape[1] // 8)
    width = {32: -(-width // 4) * 4, 64: -(-width // 2) * 2}.get(size, width)
    filled = np.zeros((len(scales), width * 8), np.float16)
    filled[:, : scales.shape[1]] = scales
    return {
        "qweight": packed(codes, codes.shape[1] // 8),
        "qzeros": packed(zeros, width),
        "scales": filled,
    }


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return quantised.plain(tmp_path / "checkpoint")


@pytest.mark.parametrize("gemv", [False, True])
@pytest.mark.parametrize("group", [32, 64, -1])
def test_reads_the_codes(plain: Path, group: int, gemv: bool) -> None:
    version = "gemv" if gemv else "GEMM"
    settings = SETTINGS | {"group_size": group, "version": version}
    means = quantised.quantise(plain, settings, by_hand(group, gemv))
    quantised.check(plain, means, packs=True)
    quantised.converts(plain, means)


@pytest.mark.parametrize("bits", [2, 3, 5, 6, 7, 8])
def test_other_widths_are_streams(plain: Path, bits: int) -> None:
    """As GPTQModel packs them: the outputs in order, over the ends of words."""

    def stream(rows: np.ndarray) -> np.ndarray:
        numbers = [sum(int(code) << bits * i for i, code in enumerate(row)) for row in rows]
        count = -(-rows.shape[1] * bits // 32)
        found = [[n >> 32 * i & 0xFFFFFFFF for i in range(count)] for n in numbers]
        return np.array(found, np.uint32).view(np.int32)

    def write(weight: np.ndarray) -> tuple[Parts, np.ndarray]:
        rng = np.random.default_rng(bits)
        codes = rng.integers(0, 2**bits, weight.T.shape)
        zeros = rng.integers(0, 2**bits, (len(codes) // 32, len(weight)))
        scales = rng.uniform(0.01, 0.1, zeros.shape).astype(np.float16)
        mean = (codes - np.repeat(zeros, 32, 0)) * np.repeat(scales.astype(float), 32, 0)
        return {"qweight": stream(codes), "qzeros": stream(zeros), "scales": scales}, mean.T

    means = quantised.quantise(plain, SETTINGS | {"bits": bits}, write)
    quantised.check(plain, means, packs=True)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"version": "gemv_fast"}, "version = "),
        ({"version": "marlin"}, "version = "),
        ({"version": ["gemm"]}, "version = "),
        ({"version": "gemm", "format": "gemv"}, "version = "),
        ({"backend": "llm-awq"}, "backend = "),
        ({"bits": 9}, "bits = 9, expected 2 to 8"),
        ({"bits": 8, "version": "gemv"}, "bits = 8, expected 4"),
        ({"group_size": -2}, "group_size = -2, expected"),
        ({"group_size": "32"}, 'group_size = "32", expected'),
        ({"colour": {}}, "colour = {} is not supported"),
        ({"dynamic": {"-:a": {}}}, "dynamic = "),
    ],
)
def test_other_settings_are_refused(plain: Path, keys: dict[str, Any], line: str) -> None:
    quantised.quantise(plain, SETTINGS, by_hand(32, False))
    assert line in quantised.refused(quantised.setting(plain, **keys))


def test_parts_must_go_together(plain: Path) -> None:
    quantised.quantise(plain, SETTINGS, by_hand(32, False))
    good = quantised.tensors(plain)
    codes, zeros, scales = (f"{quantised.MODULES[0]}.{w}" for w in ("qweight", "qzeros", "scales"))
    for change, line in (
        ({zeros: None}, f"{zeros} is missing"),
        ({scales: good[scales].T}, f"{scales} is f16["),
        ({codes: good[codes][:33]}, f"{codes} is [33, "),
        ({codes: good[codes][:0]}, f"{codes} is [0, "),
        ({codes: good[codes].astype(np.int64)}, f"{codes} is i64"),
    ):
        assert line in quantised.damaged(plain, change)
    assert "has 33" not in quantised.damaged(plain, {codes: good[codes][:, :-1]})


def library(name: str) -> Any:
    """A file of AutoAWQ: the package itself imports what needs a GPU."""
    found = importlib.util.find_spec("awq")
    if found is None or not found.submodule_search_locations:
        pytest.skip("autoawq is not installed")
    root, made = Path(found.submodule_search_locations[0]), {}
    for package in ("awq", "awq.utils", "awq.modules", "awq.modules.linear", "awq.utils.utils"):
        module: Any = types.ModuleType(package)
        module.__path__ = [str(root.joinpath(*package.split(".")[1:]))]
        made[package] = module
    made["awq.utils.utils"].get_best_device = lambda: "cpu"
    with mock.patch.dict(sys.modules, made):
        return importlib.import_module(f"awq.{name}")


def by_library(gemv: bool, group: int) -> Callable[[np.ndarray], tuple[Parts, np.ndarray]]:
    """AutoAWQ packs, and for gemm unpacks; its gemv has no unpacking of its own."""
    import torch

    kind = "gemv" if gemv else "gemm"
    linear = getattr(library(f"modules.linear.{kind}"), f"WQLinear_{kind.upper()}")
    unpacked = library("utils.packing_utils").dequantize_gemm

    def write(weight: np.ndarray) -> tuple[Parts, np.ndarray]:
        rng = np.random.default_rng(3)
        outputs, inputs = weight.shape
        groups = inputs // group
        zeros = rng.integers(0, 16, (outputs, groups)).astype(np.float32)
        scales = rng.uniform(0.02, 0.2, (outputs, groups)).astype(np.float16).astype(np.float32)
        codes = rng.integers(0, 16, weight.shape).astype(np.float32)
        index = np.arange(inputs) // group
        mean = (codes - zeros[:, index]) * scales[:, index]
        module = torch.nn.Linear(inputs, outputs, bias=False)
        module.weight.data = torch.from_numpy(mean)
        of = (lambda a: torch.from_numpy(a)) if gemv else (lambda a: torch.from_numpy(a.T.copy()))
        own = linear.from_linear(module, 4, group, False, of(scales), of(zeros))
        parts = {n: quantised.array(getattr(own, n)) for n in ("qweight", "qzeros", "scales")}
        if not gemv:
            found = unpacked(own.qweight, own.qzeros, own.scales.float(), 4, group)
            np.testing.assert_array_equal(found.numpy().T, mean)
        return parts, mean

    return write


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("gemv", [False, True])
@pytest.mark.parametrize("group", [32, 64])
def test_reads_as_the_library_does(plain: Path, group: int, gemv: bool) -> None:
    settings = SETTINGS | {"group_size": group, "version": "gemv" if gemv else "gemm"}
    means = quantised.quantise(plain, settings, by_library(gemv, group))
    quantised.check(plain, means, packs=True)
    quantised.converts(plain, means)
