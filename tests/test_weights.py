"""From a checkpoint to canonical parameters: total, explicit, and all errors together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import cases
import ml_dtypes
import numpy as np
import pytest

from emit import irpa, weights
from emit.checkpoint import Checkpoint, open_checkpoint
from emit.convert import convert
from emit.entry import Model
from emit.errors import EmitError
from emit.state import DTYPES
from emit.storage import own_type, plan

ROOT = Path(__file__).parents[1]
PLAIN = cases.find("mamba2/plain")
TIED = cases.Case("tied", "mamba2", {"tie_word_embeddings": True})
OUT_PROJ = "backbone.layers.1.mixer.out_proj.weight"


def opened(directory: Path, tensors: cases.Tensors, case: cases.Case = PLAIN) -> Checkpoint:
    """`case`'s config beside `tensors`, opened."""
    directory.mkdir(exist_ok=True)
    cases.write_config(directory / "config.json", cases.full_config(case), case)
    cases.write_tensors(directory, tensors)
    return open_checkpoint(directory)


def converted(source: Checkpoint, kind: str, out: Path) -> dict[str, np.ndarray]:
    """Canonical parameters as they come back from the archive."""
    weight_map = Model.of(source.config).weight_map
    out.mkdir(exist_ok=True)
    convert(weight_map, source, plan(weight_map, kind), out)
    return dict(irpa.read(out / "params.irpa", plan(weight_map, kind).specs(weight_map)))


def refused(source: Checkpoint, out: Path, kind: str = "f32") -> str:
    with pytest.raises(EmitError) as caught:
        converted(source, kind, out)
    line = str(caught.value)
    assert "\n" not in line
    return line


CHANGES_NUMBERS = {"softplus"}  # transforms that do more than move numbers


@pytest.mark.parametrize("case", cases.CASES, ids=cases.ids)
def test_every_number_arrives_once(case: cases.Case, tmp_path: Path) -> None:
    """All numbers of the checkpoint are in the archive, each once; matrices as narrow as asked."""
    source = open_checkpoint(cases.build(case, tmp_path / "checkpoint"))
    wide = converted(source, "f32", tmp_path / "out")
    stored = cases.tensors(case)
    if case.config.get("tie_word_embeddings"):
        stored.pop("lm_head.weight", None)
    for param in Model.of(source.config).weight_map.params:
        form = param.forms[0]
        if getattr(form.transform, "__name__", "") in CHANGES_NUMBERS:
            (name,) = form.names
            stored[name] = form.transform(stored[name])
    want = np.concatenate([array.astype(np.float32).reshape(-1) for array in stored.values()])
    got = np.concatenate([array.reshape(-1) for array in wide.values()])
    assert np.array_equal(np.sort(got), np.sort(want))
    rows = {param.name: param for param in Model.of(source.config).weight_map.params}
    for kind in ("bf16", "f16"):
        for name, array in converted(source, kind, tmp_path / kind).items():
            assert array.dtype == (DTYPES[kind] if rows[name].matrix else np.float32), name
            assert np.array_equal(array, wide[name].astype(array.dtype)), name


def test_report_tells_what_was_stored(tmp_path: Path) -> None:
    source = opened(tmp_path / "checkpoint", cases.tensors(PLAIN))
    converted(source, "bf16", tmp_path)
    report = json.loads((tmp_path / "params.json").read_text())
    model = Model.of(source.config)
    specs = model.storage("bf16").specs(model.weight_map)
    assert report["weights"] == "bf16" and report["unused"] == []
    assert [(p["name"], p["dtype"], tuple(p["shape"])) for p in report["params"]] == [
        (spec.name, spec.dtype, spec.shape) for spec in specs
    ]


def test_missing_extra_and_misshapen_are_listed_at_once(tmp_path: Path) -> None:
    tensors = cases.tensors(PLAIN)
    del tensors["backbone.layers.0.mixer.A_log"], tensors["lm_head.weight"]
    tensors[OUT_PROJ] = np.ascontiguousarray(tensors[OUT_PROJ].T)
    tensors["backbone.layers.0.mixer.Alog"] = np.zeros(4, np.float32)
    tensors["backbone.layers.2.norm.weight"] = np.zeros(32, np.float32)
    line = refused(opened(tmp_path / "checkpoint", tensors), tmp_path / "out")
    for words in (
        "5 tensors",
        "backbone.layers.0.mixer.A_log is missing",
        "lm_head.weight is missing",
        f"{OUT_PROJ} has shape [64, 32], expected [32, 64]",
        "backbone.layers.0.mixer.Alog is not a tensor of this family (like ",
        "backbone.layers.2.norm.weight is not",
    ):
        assert words in line, line
    assert not (tmp_path / "out" / "params.irpa").exists(), "checked before anything is written"


def test_many_offenders_keep_one_line_of_bearable_length(tmp_path: Path) -> None:
    tensors = {f"unknown.{i}": np.zeros(1, np.float32) for i in range(500)}
    line = refused(opened(tmp_path / "checkpoint", tensors), tmp_path / "out")
    assert "more" in line and len(line) < 3000


def test_a_transposed_square_matrix_is_not_guessed(tmp_path: Path) -> None:
    """A kernel [C, K] without its middle axis has as many elements, and is refused."""
    tensors = cases.tensors(PLAIN)
    name = "backbone.layers.0.mixer.conv1d.weight"
    tensors[name] = tensors[name][:, 0].copy()
    line = refused(opened(tmp_path / "checkpoint", tensors), tmp_path / "out")
    assert f"{name} has shape [88, 4], expected [88, 1, 4]" in line


def test_biases_the_config_denies_are_extra(tmp_path: Path) -> None:
    case = cases.Case("denied", "mamba2", {"use_conv_bias": False})
    line = refused(opened(tmp_path / "c", cases.tensors(PLAIN), case), tmp_path / "out")
    assert "2 tensors" in line and "layers.1.mixer.conv1d.bias is not a tensor" in line


def test_tied_head_that_differs_is_refused(tmp_path: Path) -> None:
    tensors = cases.tensors(TIED)
    tensors["lm_head.weight"] = tensors["backbone.embeddings.weight"] * np.float32(1.01)
    source = opened(tmp_path / "checkpoint", tensors, TIED)
    with pytest.raises(EmitError, match=r"lm_head.weight differs from backbone.embeddings.weight"):
        model = Model.of(source.config)
        convert(model.weight_map, source, model.storage("f32"), tmp_path)


def test_tied_models_may_carry_their_head(tmp_path: Path) -> None:
    tensors = cases.tensors(TIED)
    without = converted(opened(tmp_path / "a", tensors, TIED), "f32", tmp_path / "out_a")
    tensors["lm_head.weight"] = tensors["backbone.embeddings.weight"]
    source = opened(tmp_path / "b", tensors, TIED)
    with_head = converted(source, "f32", tmp_path / "out_b")
    assert without.keys() == with_head.keys() and "lm_head.weight" not in with_head
    assert json.loads((tmp_path / "out_b" / "params.json").read_text())["unused"] == [
        "lm_head.weight"
    ]


def test_the_first_published_name_of_the_embedding(tmp_path: Path) -> None:
    tensors = cases.tensors(PLAIN)
    table = tensors["backbone.embeddings.weight"]
    old = {n: t for n, t in tensors.items() if n != "backbone.embeddings.weight"}
    old["backbone.embedding.weight"] = table
    params = converted(opened(tmp_path / "old", old), "f32", tmp_path / "out")
    assert np.array_equal(params["embeddings.weight"], table)
    both = {**tensors, "backbone.embedding.weight": table}
    assert "is there under two names" in refused(opened(tmp_path / "both", both), tmp_path / "out")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_values_that_are_not_finite_are_refused(value: float, dtype: type, tmp_path: Path) -> None:
    tensors = cases.tensors(PLAIN)
    tensors[OUT_PROJ] = tensors[OUT_PROJ].astype(dtype)
    tensors[OUT_PROJ][3, 5] = value
    line = refused(opened(tmp_path / "checkpoint", tensors), tmp_path / "out", "bf16")
    assert OUT_PROJ in line and "NaN or infinity" in line


def test_f16_overflow_names_tensor_value_and_remedy(tmp_path: Path) -> None:
    tensors = cases.tensors(PLAIN)
    tensors[OUT_PROJ][0, 0] = -70000.0
    source = opened(tmp_path / "checkpoint", tensors)
    line = refused(source, tmp_path / "out", "f16")
    assert OUT_PROJ in line and "70000" in line and "weights=f32 or bf16" in line
    assert converted(source, "bf16", tmp_path / "b")["layers.1.mixer.out_proj.weight"][0, 0] < -6e4


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.float64])
def test_other_dtypes_are_refused(dtype: type, tmp_path: Path) -> None:
    tensors = cases.tensors(PLAIN)
    tensors[OUT_PROJ] = tensors[OUT_PROJ].astype(dtype)
    line = refused(opened(tmp_path / "checkpoint", tensors), tmp_path / "out")
    assert OUT_PROJ in line and np.dtype(dtype).name in line


@pytest.mark.parametrize(
    ("matrices", "want"), [("bf16", "bf16"), ("f16", "f16"), ("f32", "f32"), (None, "f32")]
)
def test_checkpoint_type_is_that_of_its_matrices(
    matrices: str | None, want: str, tmp_path: Path
) -> None:
    tensors = cases.tensors(PLAIN)
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            tensors[name] = tensor.astype(cases.DTYPES[matrices or "bf16"])
    if matrices is None:
        tensors[OUT_PROJ] = tensors[OUT_PROJ].astype(np.float16)
    source = opened(tmp_path / "checkpoint", tensors)
    weight_map = Model.of(source.config).weight_map
    chosen = weights.resolve(weight_map, source)
    assert own_type(weight_map, source, chosen) == want


def test_specs_need_no_checkpoint_and_agree_with_it() -> None:
    """What shape-only builds use is what a conversion stores, type by type."""
    weight_map = Model.of(cases.full_config(PLAIN)).weight_map
    storage = plan(weight_map, "f16")
    rows = storage.describe(weight_map)
    specs = storage.specs(weight_map)
    for param, spec, row in zip(weight_map.params, specs, rows, strict=True):
        assert (row["name"], row["dtype"], tuple(row["shape"])) == (
            spec.name,
            spec.dtype,
            spec.shape,
        )
        assert spec.dtype == ("f16" if param.matrix else "f32") and row["scale"] > 0


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "emit", *words]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_the_command_converts_and_says_in_one_line_why_it_cannot(tmp_path: Path) -> None:
    checkpoint = cases.build(PLAIN, tmp_path / "checkpoint")
    done = run("convert", str(checkpoint), "--weights", "bf16", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    model = Model.of(cases.full_config(PLAIN))
    specs = model.storage("bf16").specs(model.weight_map)
    assert irpa.read(tmp_path / "out" / "params.irpa", specs).keys() == {s.name for s in specs}
    tensors = cases.tensors(PLAIN)
    del tensors["lm_head.weight"]
    cases.write_tensors(checkpoint, tensors)
    failed = run("convert", str(checkpoint), "--weights", "f32", "--out", str(tmp_path / "bad"))
    assert failed.returncode == 1 and failed.stderr.count("\n") == 1
    assert failed.stderr.startswith("error: ") and "lm_head.weight is missing" in failed.stderr
    assert not (tmp_path / "bad").exists()


def test_many_strange_names_take_no_time(tmp_path: Path) -> None:
    """The nearest name is looked for among a few kinds, and for those that are shown."""
    names = [f"backbone.layers.{i}.mixer.in_proj.wieght" for i in range(20000)]
    known = {f"backbone.layers.{i}.mixer.in_proj.weight" for i in range(50000)}
    source = opened(tmp_path / "checkpoint", dict.fromkeys(names[:30], np.zeros(1, np.float32)))
    started = time.monotonic()
    assert weights._strangers(names[:20], known)[7] == (
        f"{names[7]} is not a tensor of this family (like backbone.layers.7.mixer.in_proj.weight)"
    )
    assert time.monotonic() - started < 2
    line = refused(source, tmp_path / "out")
    assert "is missing" in line and " more" in line
