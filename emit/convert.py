"""Converts a checkpoint: every parameter, as it is stored, to one archive."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from emit import irpa
from emit.errors import EmitError
from emit.forms import Form
from emit.packed import Layout, Packed
from emit.quantize import quantize
from emit.state import DTYPES, WORDS
from emit.storage import Storage, carriable, coded_parts
from emit.weights import Param, Source, WeightMap, known_unused, resolve


def convert(weight_map: WeightMap, source: Source, storage: Storage, out: Path) -> dict[str, Any]:
    """Write `out`/params.irpa and `out`/params.json; returns what the latter holds.

    One parameter at a time is in memory. Raises EmitError for a checkpoint that does not fit.
    """
    chosen = resolve(weight_map, source)
    _check_copies(weight_map, source, chosen)

    def arrays() -> Iterator[np.ndarray]:
        for param in weight_map.params:
            yield from _stored(param, chosen[param.name], source, storage)

    irpa.write(out / "params.irpa", storage.specs(weight_map), arrays())
    report = {
        "weights": storage.weights,
        "params": storage.describe(weight_map),
        "unused": sorted(known_unused(weight_map, source)),
    }
    (out / "params.json").write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    return report


def _stored(param: Param, form: Form, source: Source, storage: Storage) -> list[np.ndarray]:
    """The arrays of `param` that the archive holds."""
    how = storage.of(param)
    if isinstance(how, str):
        parts = [
            narrow(name, form.transform(source.read(name)), DTYPES[how]) for name in form.names
        ]
        return [np.stack(parts) if form.stacked else parts[0]]
    packed = list(_packed(form, source, how))
    joined = [
        np.stack(arrays) if form.stacked else arrays[0]
        for arrays in zip(*map(_arrays, packed), strict=True)
    ]
    codes, scales, *offsets = joined
    Packed(how, codes, scales, *offsets).check(param.name, param.shape)
    return [array.view(np.int8) if array.dtype == np.uint8 else array for array in joined]


def _arrays(packed: Packed) -> list[np.ndarray]:
    offsets = [] if packed.offsets is None else [packed.offsets]
    return [packed.codes, packed.scales, *offsets]


def _packed(form: Form, source: Source, layout: Layout) -> Iterator[Packed]:
    """Each tensor of `form` in `layout`: its own codes where it has such, else rounded."""
    own = carriable(form, source)
    keep = own is not None and layout in (own, dataclasses.replace(own, scale="f32"))
    for name, coded in zip(form.names, coded_parts(form, source), strict=True):
        if keep:
            assert coded is not None and coded.pack is not None
            yield _rescaled(name, form.carry(coded.pack(*map(source.read, coded.parts))), layout)
        else:
            wide = narrow(name, form.transform(source.read(name)), DTYPES["f32"])
            yield quantize(name, wide, layout)


def _rescaled(name: str, packed: Packed, layout: Layout) -> Packed:
    """`packed` with its scales (and biases) in the layout's type, which holds them exactly."""
    dtype = DTYPES[layout.scale]
    offsets = packed.offsets
    if offsets is not None and layout.offset == "bias":
        offsets = offsets.astype(dtype)
    packed = Packed(layout, packed.codes, packed.scales.astype(dtype), offsets)
    numbers = [packed.scales, *([] if layout.offset != "bias" else [offsets])]
    if not all(np.isfinite(np.asarray(array, np.float32)).all() for array in numbers):
        raise EmitError(f"{name}: a scale is NaN or infinite; the checkpoint is damaged")
    return packed


def narrow(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`array` as `dtype`; EmitError if a finite value becomes infinite or a value is not finite."""
    if array.dtype not in WORDS or array.dtype.kind in "iu":
        raise EmitError(f"{name}: found dtype {array.dtype}, expected float32, bfloat16 or float16")
    wide = array.astype(np.float32)
    if not np.isfinite(wide).all():
        raise EmitError(f"{name}: holds NaN or infinity; the checkpoint is damaged")
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore"):
        out = wide.astype(dtype)
    if not np.isfinite(out.astype(np.float32)).all():
        largest = float(np.abs(wide).max())
        raise EmitError(f"{name}: {largest:g} does not fit in {dtype}; use weights=f32 or bf16")
    return out


def _check_copies(weight_map: WeightMap, source: Source, chosen: Mapping[str, Form]) -> None:
    """EmitError for a second copy that differs: the config says that it is not used."""
    for name, param in weight_map.copies.items():
        if name not in source.tensors:
            continue
        (original,) = chosen[param].names
        if not np.array_equal(source.read(name), source.read(original)):
            raise EmitError(
                f"{source.dir}: {name} differs from {original}, but config.json ties them; "
                'set "tie_word_embeddings": false there if both are meant'
            )
