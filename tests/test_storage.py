"""Which parameters become codes, how they are rounded, and that nothing is rounded twice."""

from __future__ import annotations

import json
from pathlib import Path

import cases
import numpy as np
import pytest
import quantised
import test_dequant_mlx as mlx
from hypothesis import given
from hypothesis import strategies as st

from emit import irpa
from emit.checkpoint import open_checkpoint
from emit.convert import convert
from emit.dequant import dequantized
from emit.entry import Model
from emit.errors import EmitError
from emit.packed import Layout, Packed
from emit.quantize import quantize
from emit.state import DTYPES
from emit.storage import Storage, default, own_type, plan
from emit.weights import resolve

INT8, INT4 = Layout(8, 64, "int", "bf16"), Layout(4, 64, "uint", "bf16", "bias")

SMALL = {
    *("dt_proj", "in_proj_ba", "in_proj_a", "in_proj_b", "shared_expert_gate"),
    *("embed_q", "unembed_out", "b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"),
}


def planned(directory: Path, kind: str, words: str = "f32 bf16 f16") -> Storage:
    """How the checkpoint in `directory` is stored."""
    opened = open_checkpoint(directory)
    weight_map = Model.of(opened.config).weight_map
    source = dequantized(opened, opened.config)
    return plan(weight_map, kind, source, resolve(weight_map, source), words.split())


def stored(directory: Path, storage: Storage, out: Path) -> dict[str, np.ndarray]:
    """The archive of the checkpoint, by tensor."""
    opened = open_checkpoint(directory)
    weight_map = Model.of(opened.config).weight_map
    out.mkdir()
    convert(weight_map, dequantized(opened, opened.config), storage, out)
    return dict(irpa.read(out / "params.irpa", storage.specs(weight_map)))


def packed(arrays: dict[str, np.ndarray], name: str, layout: Layout) -> Packed:
    """One matrix of an archive."""
    offsets = arrays.get(f"{name}.offsets")
    if offsets is not None and layout.offset == "zero":
        offsets = offsets.view(np.uint8)
    return Packed(layout, arrays[f"{name}.codes"].view(np.uint8), arrays[f"{name}.scales"], offsets)


# What becomes codes ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_what_decides_much_and_weighs_little_is_kept(family: str) -> None:
    """By the shapes alone; in every family, of the names that the families are written with."""
    model = Model.of(cases.full_config(next(c for c in cases.CASES if c.family == family)))
    for kind in ("int8", "int4"):
        storage = model.storage(kind)
        for param in model.weight_map.params:
            how, word = storage.of(param), param.name.removesuffix(".weight").rpartition(".")[2]
            if not param.matrix:
                assert how == "f32", param.name
            elif word in SMALL or "_lora." in param.name or word.endswith("_gate_weight"):
                assert how == "bf16", param.name
            else:
                assert isinstance(how, Layout), param.name
                table = word in ("embed_tokens", "embeddings", "lm_head")
                wide = table or param.shape[-1] % 32 > 0
                assert how.bits == (8 if wide else int(kind[3:])), param.name
            if any(each in param.name for each in ("router", ".gate.", "norm", "conv", "A_log")):
                assert isinstance(how, str), param.name


def test_groups_divide_the_inputs() -> None:
    assert default("int8", "product", 768) == INT8 and default("int4", "product", 768) == INT4
    assert default("int4", "table", 768) == INT8
    assert default("int4", "product", 96).group == 32 and default("int8", "product", 96).group == 32
    assert default("int4", "product", 100) == Layout(8, 100, "int", "bf16")


def test_a_target_without_bfloat16_gets_float32_scales(tmp_path: Path) -> None:
    checkpoint = quantised.plain(tmp_path / "checkpoint")
    found = planned(checkpoint, "int4", "f32").how.values()
    assert {how if isinstance(how, str) else how.scale for how in found} == {"f32"}


def test_storage_is_written_and_read(tmp_path: Path) -> None:
    found = planned(quantised.plain(tmp_path / "checkpoint"), "int4")
    assert Storage.from_json(found.to_json()) == found
    assert found.quantization == "uint4-g64-bias-bf16"
    with pytest.raises(EmitError, match="weights = int3: expected one of f32, "):
        planned(tmp_path / "checkpoint", "int3")


# Rounding ----------------------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 1e-6, 1.0, 1e4]), st.floats(-10, 10))
def test_codes_are_the_nearest_ones(seed: int, spread: float, middle: float) -> None:
    """Within half a step of the stored scale, and of what rounding scale and bias costs."""
    random = np.random.default_rng(seed)
    wide = (random.standard_normal((3, 128)) * spread + middle).astype(np.float32)
    for layout in (INT8, INT4, Layout(8, 128, "int", "f32"), Layout(4, 32, "uint", "f32", "bias")):
        found = quantize("w", wide, layout)
        found.check("w", wide.shape)
        groups = wide.reshape(3, -1, layout.group)
        reach = np.ptp(groups, axis=-1) / 15 if layout.bits == 4 else None
        largest = np.abs(groups).max(axis=-1)
        step = largest / 127 if reach is None else reach
        rounding = largest * (2e-6 if layout.scale == "f32" else 2**-8)
        error = np.abs(found.widen() - wide).reshape(groups.shape).max(axis=-1)
        slack = 1.0 if layout.bits == 4 else 0.51  # least squares trades the ends for the rest
        np.testing.assert_array_less(error, slack * step + rounding + 1e-30)


def test_four_bits_are_fitted_and_not_only_spanned() -> None:
    """The squared error is below that of the range's own ends (measured 0.93 of it)."""
    wide = np.random.default_rng(1).standard_normal((64, 256)).astype(np.float32)
    error = np.square(quantize("w", wide, INT4).widen() - wide).sum()
    groups = wide.reshape(64, -1, 64)
    low, high = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
    scale = (high - low) / 15
    spanned = np.square(np.rint((groups - low) / scale) * scale + low - groups).sum()
    assert error < 0.97 * spanned


def test_numbers_that_are_codes_come_back() -> None:
    random = np.random.default_rng(2)
    for layout in (INT8, INT4):
        codes = random.integers(-127, 128, (5, 192)) if layout.bits == 8 else None
        wide = codes if codes is not None else random.integers(0, 16, (5, 192)) - 3
        wide = wide.astype(np.float32).reshape(5, -1, 64)
        wide[..., 0], wide[..., 1] = (127, -127) if layout.bits == 8 else (-3, 12)
        wide = wide.reshape(5, 192) * np.float32(0.25)
        np.testing.assert_array_equal(quantize("w", wide, layout).widen(), wide)


def test_a_range_that_no_scale_holds_is_refused() -> None:
    wide = np.full((1, 64), 3e38, np.float32) * np.where(np.arange(64) % 2, 1, -1)
    with pytest.raises(EmitError, match="w: its range does not fit in f16; use weights=f32"):
        quantize("w", wide.astype(np.float32), Layout(4, 64, "uint", "f16", "bias"))


# Codes of a checkpoint ---------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 64), (3, 32), (6, 32)])
def test_own_codes_are_kept(bits: int, group: int, tmp_path: Path) -> None:
    """The archive holds the very numbers of MLX's codes; the rest is rounded as of a plain one."""
    checkpoint = quantised.plain(tmp_path / "checkpoint")
    said = {"group_size": group, "bits": bits, "mode": "affine"}
    means = quantised.quantise(checkpoint, said, mlx.affine(group, bits))
    mlx.settings(checkpoint, said | {quantised.KEPT: False})
    for kind in ("int4", "int8"):
        storage = planned(checkpoint, kind)
        arrays = stored(checkpoint, storage, tmp_path / kind)
        for name, mean in means.items():
            own = name.replace("backbone.", "")
            how = storage.how[own]
            assert isinstance(how, Layout) and (how.bits == 4) == (bits <= 4)
            np.testing.assert_array_equal(packed(arrays, own, how).widen(), mean)
        rounded = storage.how[f"{quantised.KEPT}.weight".replace("backbone.", "")]
        assert rounded == (INT4 if kind == "int4" else INT8)


def test_what_a_quantised_checkpoint_has_in_floats_stays_under_its_own_type(tmp_path: Path) -> None:
    checkpoint = quantised.plain(tmp_path / "checkpoint")
    said = {"group_size": 32, "bits": 4, "mode": "affine"}
    quantised.quantise(checkpoint, said, mlx.affine(32, 4))
    mlx.settings(checkpoint, said | {quantised.KEPT: False})
    opened = open_checkpoint(checkpoint)
    weight_map, source = Model.of(opened.config).weight_map, dequantized(opened, opened.config)
    chosen = resolve(weight_map, source)
    found = plan(weight_map, "int4", source, chosen, own=True).how
    coded = {f"{module}.weight".replace("backbone.", "") for module in quantised.MODULES}
    assert {name for name, how in found.items() if isinstance(how, Layout)} == coded
    assert {how for how in found.values() if isinstance(how, str)} == {"f32"}


def test_a_quantised_checkpoint_has_its_own_type(tmp_path: Path) -> None:
    """int4 or int8 where most numbers are such codes; of other codes float32."""
    for bits, want in ((4, "int4"), (8, "int8"), (2, "int4")):
        checkpoint = quantised.plain(tmp_path / f"{bits}")
        said = {"group_size": 32, "bits": bits, "mode": "affine"}
        quantised.quantise(checkpoint, said, mlx.affine(32, bits))
        mlx.settings(checkpoint, said | {quantised.KEPT: False})
        opened = open_checkpoint(checkpoint)
        weight_map = Model.of(opened.config).weight_map
        source = dequantized(opened, opened.config)
        sizes = {param.name: param.size for param in weight_map.params if param.matrix}
        codes = sum(sizes[f"{m}.weight".replace("backbone.", "")] for m in quantised.MODULES)
        expected = want if 2 * codes > sum(sizes.values()) else "f32"
        assert own_type(weight_map, source, resolve(weight_map, source)) == expected


def test_random_stand_ins_have_the_matrix_s_law() -> None:
    """Made-up codes, scales and offsets are numbers around 0 with the spread of the weights."""
    from runtime.manifest import ParamSpec
    from runtime.params_random import random_values

    model = Model.of(cases.full_config(quantised.CASE))
    for kind in ("int8", "int4"):
        storage = model.storage(kind)
        rows = storage.describe(model.weight_map)
        specs = [ParamSpec(**{**row, "shape": tuple(row["shape"])}) for row in rows]
        values = random_values(specs, 0)
        arrays = {row["name"]: value for row, value in zip(rows, values, strict=True)}
        for param in model.weight_map.params:
            how = storage.of(param)
            if isinstance(how, Layout):
                wide = packed(arrays, param.name, how).widen()
                assert 0.5 < wide.std() / param.scale < 2, param.name
                assert abs(wide.mean()) < 0.2 * param.scale, param.name
                assert len(np.unique(arrays[f"{param.name}.codes"])) > 100
    assert json.loads(storage.to_json())["weights"] == "int4" and DTYPES["i8"] == np.int8
