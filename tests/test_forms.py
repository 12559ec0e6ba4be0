"""The forms that a checkpoint may hold a parameter in: exactly one is there, and it is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
from arranged import groups, joined, stacked

from emit import irpa
from emit.checkpoint import open_checkpoint
from emit.convert import convert
from emit.entry import Model
from emit.errors import EmitError
from emit.forms import Divided, Form, choose, copy, first_half
from emit.packed import Layout, Packed
from emit.storage import plan

SPARSE = ("jamba/plain", "nemotron_h/latent_experts", "qwen3_next/plain", "qwen3_5_moe/plain")


def converted(directory: Path, tensors: cases.Tensors) -> dict[str, np.ndarray]:
    cases.write_tensors(directory, tensors)
    source = open_checkpoint(directory)
    weight_map = Model.of(source.config).weight_map
    convert(weight_map, source, plan(weight_map, "f32"), directory)
    found = irpa.read(directory / "params.irpa", plan(weight_map, "f32").specs(weight_map))
    return {name: np.array(array) for name, array in found.items()}


@pytest.mark.parametrize("arrange", [stacked, joined])
@pytest.mark.parametrize("name", SPARSE)
def test_stacked_experts(
    name: str, arrange: Callable[[cases.Tensors], cases.Tensors], tmp_path: Path
) -> None:
    case = cases.find(name)
    cases.build(case, tmp_path)
    tensors = cases.tensors(case)
    wanted = converted(tmp_path, tensors)
    arranged = arrange(tensors)
    assert len(arranged) < len(tensors) and not groups(arranged)
    found = converted(tmp_path, arranged)
    assert found.keys() == wanted.keys()
    for key, array in wanted.items():
        np.testing.assert_array_equal(found[key], array)


def refused(directory: Path, tensors: cases.Tensors) -> str:
    with pytest.raises(EmitError) as caught:
        converted(directory, tensors)
    return str(caught.value)


def test_one_form_and_all_of_it(tmp_path: Path) -> None:
    case = cases.find("jamba/plain")
    cases.build(case, tmp_path)
    tensors = cases.tensors(case)
    arranged = stacked(tensors)
    first, second = sorted(groups(tensors).values())[:2]
    one = next(n for n in arranged if "switch_mlp.down_proj" in n)
    assert "is there under two names" in refused(tmp_path, tensors | {one: arranged[one]})
    less = {n: t for n, t in tensors.items() if n not in (first[1], second[0], second[2])}
    line = refused(tmp_path, less)
    assert "3 tensors" in line and f"{first[1]} is missing" in line
    line = refused(tmp_path, arranged | {one: arranged[one][:, :-1]})
    assert f"{one} has shape" in line and "1 tensors" in line
    assert f"expected {list(arranged[one].shape)}" in line
    assert f"{first[0]} is missing" in refused(
        tmp_path, {n: t for n, t in tensors.items() if n not in first}
    )


def info(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def test_a_mark_tells_forms_of_the_same_names_apart() -> None:
    here = Form(("w",), (4,), mark=("conv", (8, 1, 3)))
    there = Form(("w",), (4,), first_half, mark=("conv", (8, 3, 1)))
    forms = (here, there)
    assert choose(forms, {"w": info(4), "conv": info(8, 1, 3)}) == (here, [])
    assert choose(forms, {"w": info(4), "conv": info(8, 3, 1)}) == (there, [])
    wrong = "w has shape [5], expected [4]"
    assert choose(forms, {"w": info(5), "conv": info(8, 3, 1)}) == (None, [wrong])
    assert choose(forms, {"conv": info(8, 3, 1)}) == (None, ["w is missing"])


def test_forms_without_the_tensor_of_their_mark_are_refused_with_it() -> None:
    """Its own parameter says that it is missing; nothing is said of this one."""
    forms = (Form(("w",), (4,), mark=("conv", (8, 1, 3))),)
    assert choose(forms, {"w": info(4)}) == (forms[0], [])


@pytest.mark.parametrize("transform", [copy, first_half])
def test_codes_are_moved_as_numbers_are(transform: Callable[[np.ndarray], np.ndarray]) -> None:
    rng = np.random.default_rng(0)
    layout = Layout(4, 8, "uint", "f32", "bias")
    scales, offsets = (rng.standard_normal((3, 6, 2)).astype(np.float32) for _ in range(2))
    packed = Packed(layout, rng.integers(0, 256, (3, 6, 8)).astype(np.uint8), scales, offsets)
    form = Form(("w",), (3, 6, 16), transform, rows=transform is not copy)
    assert form.stored(layout) == layout
    np.testing.assert_array_equal(form.carry(packed).widen(), transform(packed.widen()))
    assert Form(("w",), (3, 6, 16), np.transpose).stored(layout) is None


@pytest.mark.parametrize(
    ("offset", "table"), [("bias", "uint"), ("zero", "uint"), ("none", "e2m1")]
)
def test_factors_are_taken_out_of_scales(offset: Any, table: Any) -> None:
    """One for each part of the rows; a factor of 0 leaves its rows as they are."""
    rng = np.random.default_rng(0)
    scales = rng.uniform(0.5, 2, (6, 2)).astype(np.float16)
    offsets = {
        "bias": rng.standard_normal((6, 2)).astype(np.float16),
        "zero": rng.integers(0, 16, (6, 2)).astype(np.uint8),
        "none": None,
    }[offset]
    layout = Layout(4, 8, table, "f16", offset)
    packed = Packed(layout, rng.integers(0, 256, (6, 8)).astype(np.uint8), scales, offsets)
    form = Form(("w",), (6, 16), Divided((2.0, 0.0, -1.3), (1, 2, 3)))
    wide = packed.widen()
    by = np.repeat([2.0, 1.0, -1.3], (1, 2, 3))[:, None]
    np.testing.assert_allclose(form.transform(wide), wide / by, rtol=1e-6)
    carried = form.carry(packed)
    carried.check("w", wide.shape)
    assert carried.layout == form.stored(layout) == Layout(4, 8, table, "f32", offset)
    np.testing.assert_allclose(carried.widen(), wide / by, rtol=0, atol=1e-5)
