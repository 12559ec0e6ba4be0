"""A GGUF file as a checkpoint: config.json and tensors of the model it was converted from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from emit.checkpoint import Checkpoint, open_checkpoint
from emit.dequant import ggml
from emit.errors import EmitError
from emit.gguf_config import config_of
from emit.gguf_file import PLAIN, Gguf, open_file
from emit.gguf_names import UNUSED, Row, rows
from emit.gguf_undo import Misfit

SUFFIX = ".gguf"


@dataclass(frozen=True)
class TensorInfo:
    """A tensor by its published name: `dtype` f32, bf16, f16, or a type of blocks (`dequant.ggml`).

    `shape` counts elements; a tensor of blocks is read as u8[..., bytes of a row].
    """

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class GgufCheckpoint:
    """An opened file. A tensor is read, and what conversion did to it undone, when asked for."""

    dir: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    _file: Gguf = field(repr=False)
    _rows: Mapping[str, Row] = field(repr=False)

    def read(self, name: str) -> np.ndarray:
        """Tensor `name`: its numbers, or its blocks where its dtype is a type of these."""
        info, row = self.tensors[name], self._rows[name]
        arrays = [self._file.read(part) for part in row.parts]
        if info.dtype == "f32":
            arrays = [
                _numbers(array, self._file.tensors[part].dtype)
                for array, part in zip(arrays, row.parts, strict=True)
            ]
        return row.undo(*arrays)

    def release(self) -> None:
        """Give back the memory of what was read."""
        self._file.release()


def open_gguf(path: str | Path) -> GgufCheckpoint:
    """Open the GGUF file at `path`. Raises EmitError, one line naming file and field."""
    file = open_file(path)
    config = config_of(file)
    chosen = _chosen(file, config)
    tensors = {name: _info(file, row) for name, row in sorted(chosen.items())}
    return GgufCheckpoint(file.path, config, tensors, file, chosen)


def opened(path: str | Path) -> Checkpoint | GgufCheckpoint:
    """The checkpoint at `path`: a GGUF file, or a directory as `open_checkpoint` reads it."""
    return open_gguf(path) if Path(path).suffix == SUFFIX else open_checkpoint(path)


def _chosen(file: Gguf, config: Mapping[str, Any]) -> dict[str, Row]:
    """The rows whose tensors are there; tensors that no row takes stand under their own names."""
    chosen: dict[str, Row] = {}
    taken: set[str] = set()
    try:
        listed = rows(config)
    except EmitError as error:
        raise EmitError(f"{file.path}: {error}") from None
    for row in listed:
        if not all(part in file.tensors for part in row.parts):
            continue
        taken |= set(row.parts)
        if row.name in chosen:
            other = chosen[row.name].parts[0]
            raise EmitError(f"{file.path}: {row.parts[0]} and {other} are both there: one is of"
                            " another way to convert; expected one of them")  # fmt: skip
        if row.name != UNUSED:
            chosen[row.name] = row
    for name in file.tensors.keys() - taken:
        match = re.match(r"blk\.(\d{1,6})\.", name)
        beyond = match is not None and config["num_hidden_layers"] <= int(match[1])
        # Layers that predict further tokens come last, and are left out by their families.
        shown = f"mtp.{name}" if beyond else name
        chosen[shown] = Row(shown, (name,))
    return chosen


def _info(file: Gguf, row: Row) -> TensorInfo:
    """What reading `row` will give. Raises EmitError where its tensors do not fit."""
    parts = [file.tensors[part] for part in row.parts]
    try:
        shape = row.undo.shape(*(part.shape for part in parts))
    except Misfit as error:
        shown = " and ".join(f"{p} {list(file.tensors[p].shape)}" for p in row.parts)
        raise EmitError(f"{file.path}: {shown} cannot make {row.name}: {error}") from None
    found = {part.dtype for part in parts}
    dtype = found.pop() if len(found) == 1 else "f32"
    values_change = not row.undo.rows and dtype not in PLAIN
    return TensorInfo("f32" if values_change else dtype, shape)


def _numbers(array: np.ndarray, dtype: str) -> np.ndarray:
    """A tensor as float32, dequantised where it has blocks."""
    return array.astype(np.float32) if dtype in PLAIN else ggml.widen(array, dtype)
