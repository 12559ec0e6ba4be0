"""GPTQ checkpoints."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantised
from quantised import Parts

SETTINGS = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}


def by_hand(bits: int, group: int, bias: int, index: list[int] | None, kind: Any = np.float16):
    """Writes codes one by one, as the format says."""

    def write(weight: np.ndarray) -> tuple[Parts, np.ndarray]:
        outputs, inputs = weight.shape
        size = inputs if group == -1 else group
        rng = np.random.default_rng(bits)
        codes = rng.integers(0, 2**bits, (outputs, inputs))
        zeros = rng.integers(0, 2**bits, (outputs, -(-inputs // size)))
        scales = rng.uniform(0.01, 0.1, zeros.shape).astype(kind)
        where = [i // size for i in range(inputs)] if index is None else index[:inputs]
        mean = np.zeros(weight.shape, np.float64)
        for o, i in np.ndindex(weight.shape):
            g = where[i]
            mean[o, i] = (int(codes[o, i]) - int(zeros[o, g])) * float(scales[o, g])
        columns = [sum(int(codes[o, i]) << bits * i for i in range(inputs)) for o in range(outputs)]
        rows = [
            sum((int(zeros[o, g]) - bias) % 2**bits << bits * o for o in range(outputs))
            for g in range(zeros.shape[1])
        ]
        parts = {
            "qweight": words(columns, inputs * bits // 32).T,
            "qzeros": words(rows, outputs * bits // 32),
            "scales": scales.T,
        }
        if index is not None:
            parts["g_idx"] = np.array(where, np.int32)
        return parts, mean.astype(np.float32)

    return write


def words(numbers: list[int], count: int) -> np.ndarray:
    """Long integers as rows of i32, the lowest first."""
    return np.array(
        [[n >> 32 * i & 0xFFFFFFFF for i in range(count)] for n in numbers], np.uint32
    ).view(np.int32)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return quantised.plain(tmp_path / "checkpoint")


@pytest.mark.parametrize("kind", [np.float16, np.float32])
@pytest.mark.parametrize(("form", "bias"), [("gptq", 1), ("gptq_v2", 0), (None, 1)])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_reads_the_codes(
    plain: Path, bits: int, form: str | None, bias: int, kind: type[Any]
) -> None:
    settings = SETTINGS | {"bits": bits} | ({"checkpoint_format": form} if form else {})
    means = quantised.quantise(plain, settings, by_hand(bits, 32, bias, None, kind))
    quantised.check(plain, means, packs=True)


@pytest.mark.parametrize("group", [-1, 16, 64])
def test_groups_and_conversion(plain: Path, group: int) -> None:
    settings = SETTINGS | {"group_size": group}
    means = quantised.quantise(plain, settings, by_hand(4, group, 1, None))
    quantised.check(plain, means, packs=True)
    quantised.converts(plain, means)


def test_act_order(plain: Path) -> None:
    """Any group at any input; the order 0, 0 … 1, 1 … is none."""
    rng = np.random.default_rng(0)
    shuffled = [int(g) for g in rng.permutation(np.arange(64) // 32)] * 2
    means = quantised.quantise(plain, SETTINGS, by_hand(4, 32, 1, shuffled))
    quantised.check(plain, means, packs=False)
    quantised.converts(plain, means)
    name = f"{quantised.MODULES[0]}.g_idx"
    good = quantised.tensors(plain)[name]
    for value in (4, -1):
        line = quantised.damaged(plain, {name: np.where(np.arange(len(good)) == 3, value, good)})
        assert f"{name} holds a number that is none of" in line


def test_the_usual_order_in_g_idx(plain: Path) -> None:
    usual = [i // 32 for i in range(128)]
    means = quantised.quantise(plain, SETTINGS, by_hand(4, 32, 1, usual))
    quantised.check(plain, means, packs=True)


def test_a_last_group_that_is_not_full(plain: Path) -> None:
    means = quantised.quantise(plain, SETTINGS | {"group_size": 48}, by_hand(4, 48, 1, None))
    quantised.check(plain, means, packs=False)


def test_modules_with_other_settings(plain: Path) -> None:
    first, *others = quantised.MODULES
    stored = quantised.tensors(plain)
    dynamic = {
        "-:.*lm_head": {},
        rf"+:.*{first.removeprefix('backbone.')}$": {"bits": 8, "group_size": 64},
    }
    parts, means = {}, {}
    for module in (first, *others):
        write = by_hand(8, 64, 1, None) if module == first else by_hand(4, 32, 1, None)
        parts[module], means[f"{module}.weight"] = write(stored[f"{module}.weight"])
    quantised.rewrite(plain, SETTINGS | {"dynamic": dynamic}, parts)
    quantised.check(plain, means, packs=True)
    quantised.setting(plain, dynamic={f"-:{first}": {}})
    assert f"{first}.qweight is not a tensor" in quantised.unread(plain)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"bits": 5}, "bits = 5, expected 2, 3, 4 or 8"),
        ({"bits": True}, "bits = true, expected"),
        ({"bits": None}, "bits = -1, expected"),
        ({"group_size": 0}, "group_size = 0, expected"),
        ({"group_size": 32.0}, "group_size = 32.0, expected"),
        ({"checkpoint_format": "marlin"}, 'checkpoint_format = "marlin", expected'),
        ({"checkpoint_format": ["gptq"]}, "checkpoint_format = "),
        ({"checkpoint_format": "gptq", "format": "gptq_v2"}, "checkpoint_format = "),
        ({"pack_dtype": "int64"}, 'pack_dtype = "int64" is not supported'),
        ({"rotation": "hadamard"}, 'rotation = "hadamard" is not supported'),
        ({"colour": 1}, "colour = 1 is not supported"),
        ({"dynamic": [1]}, "dynamic = [1], expected"),
        ({"dynamic": {"a": {"bits": 16}}}, "bits = 16"),
        ({"dynamic": {"(": {"bits": 8}}}, "malformed"),
        ({"dynamic": {"a": {"colour": 1}}}, "colour = 1 is not supported"),
    ],
)
def test_other_settings_are_refused(plain: Path, keys: dict[str, Any], line: str) -> None:
    quantised.quantise(plain, SETTINGS, by_hand(4, 32, 1, None))
    assert line in quantised.refused(quantised.setting(plain, **keys))


def test_parts_must_go_together(plain: Path) -> None:
    quantised.quantise(plain, SETTINGS, by_hand(4, 32, 1, None))
    good = quantised.tensors(plain)
    module = quantised.MODULES[0]
    codes, zeros, scales = (f"{module}.{word}" for word in ("qweight", "qzeros", "scales"))
    for change, line in (
        ({zeros: None}, f"{zeros} is missing"),
        ({scales: good[scales][:1]}, f"{scales} is f16[1, "),
        ({scales: good[scales].astype(np.int32)}, f"{scales} is i32"),
        ({codes: good[codes].astype(np.float32)}, f"{codes} is f32"),
        ({codes: good[codes][:, :8]}, f"{zeros} is i32"),
        ({codes: good[codes][:0]}, f"{codes} has 0 rows"),
        ({codes: good[codes].reshape(-1)}, f"{codes} is i32"),
    ):
        assert line in quantised.damaged(plain, change)


def library(name: str) -> Any:
    """A module of AutoGPTQ by its file: the package itself imports much that is not needed."""
    found = importlib.util.find_spec("auto_gptq")
    if found is None or not found.submodule_search_locations:
        pytest.skip("auto-gptq is not installed")
    path = Path(found.submodule_search_locations[0]) / "nn_modules" / "qlinear" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def by_library(bits: int, group: int, order: np.ndarray | None) -> Callable[..., Any]:
    """AutoGPTQ packs and, multiplied by one, unpacks."""
    import torch

    linear = library("qlinear_cuda").QuantLinear

    def write(weight: np.ndarray) -> tuple[Parts, np.ndarray]:
        outputs, inputs = weight.shape
        own = linear(bits, group, inputs, outputs, False, weight_dtype=torch.float32)
        rng = np.random.default_rng(1)
        groups = inputs // group
        zeros = torch.from_numpy(rng.integers(1, 2**bits, (outputs, groups)).astype(np.float32))
        scales = torch.from_numpy(rng.uniform(0.02, 0.2, (outputs, groups)).astype(np.float32))
        index = np.arange(inputs) // group if order is None else order[:inputs] // group
        spread = np.clip(weight * 2, -1, 1)
        half = scales.numpy()[:, index] * (2 ** (bits - 1))
        middle = (2 ** (bits - 1) - zeros.numpy())[:, index] * scales.numpy()[:, index]
        module = torch.nn.Linear(inputs, outputs, bias=False)
        module.weight.data = torch.from_numpy((spread * half * 0.9 + middle).astype(np.float32))
        own.pack(module, scales, zeros.clone(), torch.from_numpy(index.astype(np.int32)))
        words = {name: getattr(own, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
        mean = own(torch.eye(inputs)).detach().numpy().T
        return {name: quantised.array(tensor) for name, tensor in words.items()}, mean

    return write


@pytest.mark.oracle
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_reads_as_the_library_does(plain: Path, bits: int, ordered: bool) -> None:
    rng = np.random.default_rng(2)
    order = None if ordered else np.concatenate([rng.permutation(64), 64 + rng.permutation(64)])
    means = quantised.quantise(
        plain, SETTINGS | {"bits": bits, "desc_act": not ordered}, by_library(bits, 32, order)
    )
    quantised.check(plain, means, packs=ordered)
    quantised.converts(plain, means)
