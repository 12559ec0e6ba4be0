"""Converts a checkpoint: every parameter, as it is stored, to one archive."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from emit import irpa
from emit.dequant.coded import Coded, Dequantized
from emit.errors import EmitError
from emit.forms import Form
from emit.packed import Layout, Packed
from emit.quantize import quantize
from emit.state import DTYPES, WORDS
from emit.storage import How, Storage, carriable, coded_parts
from emit.weights import Param, Source, WeightMap, known_unused, resolve
from runtime.progress import progress

PIECE = 1 << 25  # numbers of a tensor that are made at once, where it can be read in pieces
MAPPED = 1 << 26  # bytes that are written until the memory of what was read is given back


def convert(
    weight_map: WeightMap, source: Source, storage: Storage, out: Path, key: str | None = None
) -> dict[str, Any]:
    """Write `out`/params.irpa and `out`/params.json; returns what the latter holds.

    Of a large parameter a piece is in memory at a time, or of one that is quantised in another way
    than by rows, all of it as float32. `key` is a word for all that the result depends on: with it,
    a conversion that was killed is gone on with. Raises EmitError for a checkpoint that does not
    fit.
    """
    chosen = resolve(weight_map, source)
    _check_copies(weight_map, source, chosen)
    specs, path = storage.specs(weight_map), out / "params.irpa"
    with progress("convert", irpa.size(specs)) as shown:

        def told(count: int) -> None:
            before = shown.done // MAPPED
            shown.add(count)
            if shown.done // MAPPED != before:
                source.release()

        with irpa.Writer(path, specs, key, told) as writer:
            _write(writer, weight_map, source, storage, chosen)
    report = {
        "weights": storage.weights,
        "params": storage.describe(weight_map),
        "unused": sorted(known_unused(weight_map, source)),
    }
    (out / "params.json").write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    return report


def _write(
    writer: irpa.Writer,
    weight_map: WeightMap,
    source: Source,
    storage: Storage,
    chosen: Mapping[str, Form],
) -> None:
    """All tensors that the archive lacks yet."""
    first = 0  # number of the parameter's first tensor
    for param in weight_map.params:
        after = first + len(storage.tensors(param))
        if after > writer.done:
            made = _stored(param, chosen[param.name], source, storage.of(param))
            for number, pieces in enumerate(made, first):
                if number == writer.done:
                    writer.put(pieces)
                else:  # it is there, and what comes of making it is not
                    deque(pieces, maxlen=0)
        first = after


def _stored(param: Param, form: Form, source: Source, how: How) -> Iterator[Iterable[np.ndarray]]:
    """The tensors that the archive holds of `param`, each in pieces along its first axis.

    Take all pieces of one before the next.
    """
    if isinstance(how, str):
        yield (narrow(name, array, DTYPES[how]) for name, array in _numbers(form, source))
        return
    scales: list[np.ndarray] = []
    offsets: list[np.ndarray] = []

    def codes() -> Iterator[np.ndarray]:
        for packed in _packed(form, source, how):
            shape = (len(packed.codes), *param.shape[1:])
            packed.check(param.name, shape)
            scales.append(packed.scales)
            offsets.extend([] if packed.offsets is None else [_signed(packed.offsets)])
            yield _signed(packed.codes)

    yield codes()
    yield scales
    if how.offset != "none":
        yield offsets


def _signed(array: np.ndarray) -> np.ndarray:
    """Bytes as the archive calls them."""
    return array.view(np.int8) if array.dtype == np.uint8 else array


def _pieces(
    form: Form, source: Source, step: int = 1
) -> Iterator[tuple[str, Coded, Form, list[np.ndarray]]]:
    """What a parameter is made of, one after the other along its first axis.

    (name of a tensor, how it is coded, what form its piece has, the piece's parts).
    """
    stored = source.source if isinstance(source, Dequantized) else source
    for name, coded in zip(form.names, _coded(form, source), strict=True):
        parts = [stored.read(part) for part in coded.parts]
        if form.stacked or not coded.step or not form.cuttable:
            yield name, coded, form, parts
            continue
        for begin, end in _cuts(form.shape, math.lcm(step, coded.step)):
            yield name, coded, form.cut(begin, end), coded.cut(parts, begin, end)


def _coded(form: Form, source: Source) -> list[Coded]:
    """How each tensor of `form` stands in the checkpoint."""
    plain = [Coded(form.shape, (name,), _itself, per=(1,)) for name in form.names]
    return [coded or own for coded, own in zip(coded_parts(form, source), plain, strict=True)]


def _cuts(shape: tuple[int, ...], step: int = 1) -> Iterator[tuple[int, int]]:
    """Ranges of the first axis with about PIECE numbers each, which begin at multiples of `step`.

    There is one even if the axis is empty.
    """
    count = shape[0] if shape else 0
    rows = max(step, PIECE // max(1, math.prod(shape[1:])) // step * step)
    yield from ((at, min(at + rows, count)) for at in range(0, max(count, 1), rows))


def _itself(tensor: np.ndarray) -> np.ndarray:
    return tensor


def _numbers(form: Form, source: Source, step: int = 1) -> Iterator[tuple[str, np.ndarray]]:
    """(tensor's name, a piece of the parameter) along its first axis, in the source's floats.

    Pieces begin at multiples of `step`.
    """
    for name, coded, part, parts in _pieces(form, source, step):
        array = part.transform(coded.widen(*parts))
        if form.stacked:
            yield name, array[None]
        elif not array.shape:
            yield name, array
        else:
            yield from ((name, array[begin:end]) for begin, end in _cuts(array.shape, step))


def _packed(form: Form, source: Source, layout: Layout) -> Iterator[Packed]:
    """Pieces of a parameter in `layout`: its own codes where it has such, else rounded."""
    own = carriable(form, source)
    if own is None or layout not in (own, dataclasses.replace(own, scale="f32")):
        for name, array in _numbers(form, source):
            yield quantize(name, narrow(name, array, DTYPES["f32"]), layout)
        return
    for name, coded, part, parts in _pieces(form, source):
        assert coded.pack is not None
        packed = _rescaled(name, part.carry(coded.pack(*parts)), layout)
        yield _one_of_a_stack(packed) if form.stacked else packed


def _one_of_a_stack(packed: Packed) -> Packed:
    offsets = None if packed.offsets is None else packed.offsets[None]
    return Packed(packed.layout, packed.codes[None], packed.scales[None], offsets)


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
        if not _equal(source, name, original):
            raise EmitError(
                f"{source.dir}: {name} differs from {original}, but config.json ties them; "
                'set "tie_word_embeddings": false there if both are meant'
            )


def _equal(source: Source, *names: str) -> bool:
    """Whether two tensors are the same numbers."""
    forms = [Form((name,), source.tensors[name].shape) for name in names]
    steps = [coded.step or 1 for form in forms for coded in _coded(form, source)]
    pieces = [_numbers(form, source, math.lcm(*steps)) for form in forms]
    if forms[0].shape != forms[1].shape:
        return False
    for (_, own), (_, other) in zip(*pieces, strict=True):
        if not np.array_equal(own, other):
            return False
        source.release()
    return True
