"""Bundles of quantised weights, as a user builds them: rounded, or with a checkpoint's codes."""

from __future__ import annotations

import json
from pathlib import Path

import bundles
import cases
import numpy as np
import pytest
import references
from bundles import Opened, check_tokens, follow

from emit import expect, irpa
from emit.checkpoint import open_checkpoint
from emit.dequant import dequantized
from emit.entry import Model
from emit.forms import Divided
from emit.packed import Layout, Packed
from emit.storage import Storage, plan
from emit.weights import resolve

pytestmark = pytest.mark.iree
CASE = "mamba2/groups2_biases"
SLOW = pytest.mark.slow
CODES = [
    pytest.param("mamba2/mlx_affine_g64_b4"),
    pytest.param("nemotron_h/mlx_mxfp4_g32_b4", marks=SLOW),
    pytest.param("kimi_linear/mlx_affine_g32_b8", marks=SLOW),
    pytest.param("falcon_h1/mlx_nvfp4_g16_b4", marks=SLOW),
]


def archive(path: Path, model: Model, storage: Storage) -> dict[str, np.ndarray]:
    """Every parameter of a bundle as numbers: f32, of codes by NumPy."""
    found = irpa.read(path / "params.irpa", storage.specs(model.weight_map))
    wide = {}
    for param in model.weight_map.params:
        how = storage.of(param)
        if isinstance(how, Layout):
            codes, scales, *offsets = (found[t.name] for t in storage.tensors(param))
            offset = offsets[0] if offsets else None
            if offset is not None and how.offset == "zero":
                offset = offset.view(np.uint8)
            wide[param.name] = Packed(how, codes.view(np.uint8), scales, offset).widen()
        else:
            wide[param.name] = np.asarray(found[param.name], np.float32)
    return wide


def stored(checkpoint: Path, kind: str) -> tuple[Model, Storage]:
    """The model of a checkpoint, and how it is stored."""
    opened = open_checkpoint(checkpoint)
    model = Model.of(opened.config, bundles.CONTEXT)
    source = dequantized(opened, opened.config)
    chosen = resolve(model.weight_map, source)
    return model, plan(model.weight_map, kind, source, chosen)


@pytest.mark.parametrize("kind", ["int4", pytest.param("int8", marks=SLOW)])
def test_the_reference_is_that_of_the_dequantised_weights(kind: str) -> None:
    """Tokens and logits of reference.json, again from the numbers; and the module's tokens."""
    bundle = bundles.build(CASE, "cpu", "b1-p8", f"weights={kind}")
    opened = Opened.open(bundle)
    assert opened.manifest.numerics.weights == kind and opened.manifest.proof.status == "passed"
    assert opened.manifest.target.kernels is not None
    model, storage = stored(bundles.checkpoint(CASE), kind)
    wide = archive(bundle, model, storage)
    rows = json.loads((bundle / "reference.json").read_text())["prompts"]
    again = expect.generate(model, wide, [row["tokens"] for row in rows], len(rows[0]["generated"]))
    for row, now in zip(rows, again, strict=True):
        assert now["generated"] == row["generated"]
        np.testing.assert_allclose(now["top_logits"], row["top_logits"], rtol=1e-5, atol=1e-5)
        tokens, _ = follow(opened, {0: row["tokens"]}, {0: row["generated"]})[0]
        assert tokens == row["generated"]


@pytest.mark.parametrize("name", CODES)
def test_codes_of_a_checkpoint_are_carried_into_the_bundle(name: str, tmp_path: Path) -> None:
    """The checkpoint's own type, its numbers to the bit, and the tokens that they give."""
    directory = cases.HANDED / name
    model, storage = stored(directory, "int4")
    shape = f"b1-p8-c{bundles.CONTEXT}" if model.keeps_kv else "b1-p8"
    done = bundles.doit(
        ["build", f"model={directory}", "target=cpu", f"shape={shape}"], tmp_path, bundles.cache()
    )
    bundle = bundles.built(done, tmp_path)
    opened = Opened.open(bundle)
    assert opened.manifest.numerics.weights == ("int8" if name.endswith("b8") else "int4")
    assert opened.manifest.proof.status == "passed"
    source = open_checkpoint(directory)
    numbers = dequantized(source, source.config)
    chosen = resolve(model.weight_map, numbers)
    kept = 0
    for own, array in archive(bundle, model, storage).items():
        form = chosen[own]
        parts = [form.transform(numbers.read(part)) for part in form.names]
        if all(part.dtype == np.float32 for part in parts) and own in storage.how:
            wanted = np.stack(parts) if form.stacked else parts[0]
            # A multiplier that was folded in divides the scales, not the numbers.
            off = 2e-7 if isinstance(form.transform, Divided) else 0.0
            np.testing.assert_allclose(array, wanted, rtol=off)
            kept += isinstance(storage.how[own], Layout)
    assert kept > 4
    _, rows = references.recorded(f"mlx/{name.replace('/', '-')}")
    for row in rows:
        check_tokens(*follow(opened, {0: row.prompt}, {0: row.tokens})[0], row)
