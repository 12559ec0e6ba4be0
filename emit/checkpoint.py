"""Reads a checkpoint directory as its library wrote it: config, tensor table, mapped tensors.

Nothing in the directory is trusted. Every header is checked in full before the first tensor is
read: the format's own rules (https://github.com/huggingface/safetensors, "Format"), no byte of the
data section used twice or left over, and no file reached outside the directory.

Symbolic links: a file may be a link only to a file inside the checkpoint directory, or, when the
directory is `<repo>/snapshots/<commit>` (the layout of the Hugging Face cache), to a file directly
in `<repo>/blobs`. Which file names are read never depends on anything but fixed names and the plain
file names in `model.safetensors.index.json`.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import stat
import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from emit.errors import EmitError, shallow
from runtime.uncollected import UNCOLLECTED

CONFIG = "config.json"
QUANTIZATION = "hf_quant_config.json"  # of NVIDIA's ModelOpt
GENERATION_CONFIG = "generation_config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

MAX_HEADER = 100_000_000  # bytes; the format's own limit
MAX_JSON = 16 << 20  # bytes of config.json or the like
MAX_INDEX = 64 << 20  # bytes; a quarter of a million tensors take some 25 MB
MAX_RANK = 32
MAX_BYTES = 2**63 - 1
AGAIN = "download or convert the checkpoint again"

DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
FLOATS = ("f64", "f32", "f16", "bf16", "f8_e4m3", "f8_e5m2")


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: `file[begin:end]` (bytes from the start of the file), row-major.

    `dtype` is the format's word in lower case: f32, bf16, f16, i32, u8, f8_e4m3 …
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. `tensors` is sorted by name; nothing is read until `read` is called."""

    dir: Path
    config: dict[str, Any]
    generation_config: dict[str, Any] | None
    tensors: dict[str, TensorInfo]
    _maps: dict[Path, mmap.mmap] = field(repr=False)

    def read(self, name: str) -> np.ndarray:
        """Tensor `name` as a read-only view of the mapped file: its own shape and dtype, no copy.

        bf16 and f8 come as ml_dtypes types. Raises EmitError when there is no such tensor.
        """
        info = self.tensors.get(name)
        if info is None:
            raise EmitError(
                f"{self.dir}: no tensor {_show(name)}; the checkpoint holds {_some(self.tensors)}"
            )
        dtype = DTYPES[info.dtype.upper()]
        if info.begin == info.end:
            empty = np.empty(info.shape, dtype)
            empty.flags.writeable = False
            return empty
        return np.ndarray(info.shape, dtype, buffer=self._maps[info.file], offset=info.begin)

    def release(self) -> None:
        """Give back the memory of what was read; arrays stay good, and are read again if used."""
        release(self._maps.values())

    @property
    def own_dtype(self) -> str:
        """The one dtype of all floating-point tensors; "f32" if they differ or there are none."""
        found = {info.dtype for info in self.tensors.values() if info.dtype in FLOATS}
        return found.pop() if len(found) == 1 else "f32"


def open_checkpoint(directory: str | Path) -> Checkpoint:
    """Open the checkpoint in `directory` (config.json and one or more .safetensors files).

    `model.safetensors` is read where it exists and an index does not list it among others (what
    transformers loads too); else the shards that `model.safetensors.index.json` names. Raises
    EmitError, one line naming file and field, for anything missing, malformed or contradictory.
    """
    root = Path(directory)
    if not root.is_dir():
        raise EmitError(f"{root}: no such directory; expected a checkpoint directory with {CONFIG}")
    root = root.resolve()
    config = read_config(root)
    generation = None
    if os.path.lexists(root / GENERATION_CONFIG):
        generation = _read_object(_inside(root, GENERATION_CONFIG, "generation settings"))
    shards, weight_map = _weight_files(root)
    tensors: dict[str, TensorInfo] = {}
    maps: dict[Path, mmap.mmap] = {}
    for name in shards:
        path = _inside(root, name, "weights")
        mapped, table = _open_file(path)
        maps[path] = mapped
        if twice := sorted(tensors.keys() & table.keys()):
            other = tensors[twice[0]].file.name
            raise _bad(path, f"holds {_some(twice)}, which {other} holds too; keep one of the two")
        tensors.update(table)
        if weight_map is not None:
            _check_index(root / INDEX, name, weight_map, table)
    return Checkpoint(root, config, generation, dict(sorted(tensors.items())), maps)


def release(maps: Iterable[mmap.mmap]) -> None:
    """Let the system take back the pages of mapped files that were read."""
    if hasattr(mmap, "MADV_DONTNEED"):
        for mapped in maps:
            mapped.madvise(mmap.MADV_DONTNEED)


def read_config(directory: str | Path) -> dict[str, Any]:
    """config.json of a checkpoint directory.

    Both spellings of non-finite numbers are read: Infinity, NaN and {"__float__": "Infinity"}.
    Where it says nothing of quantisation and hf_quant_config.json stands beside it, that is its
    `quantization_config`, of the method `modelopt`. Raises EmitError when it is absent, is not a
    JSON object or repeats a key.
    """
    root = Path(directory).resolve()
    if not os.path.lexists(root / CONFIG):
        raise _bad(
            root / CONFIG, "no such file; expected the model's configuration beside its weights"
        )
    config = _read_object(_inside(root, CONFIG, "configuration"))
    if config.get("quantization_config") is None and os.path.lexists(root / QUANTIZATION):
        beside = _read_object(_inside(root, QUANTIZATION, "quantisation settings"))
        config["quantization_config"] = beside | {"quant_method": "modelopt"}
    return config


def read_config_file(path: str | Path) -> dict[str, Any]:
    """A configuration file of any name, read as `read_config` does. Raises EmitError."""
    return _read_object(Path(path))


# --- which files -----------------------------------------------------------------------------


def _weight_files(root: Path) -> tuple[list[str], dict[str, str] | None]:
    """Names of the weight files, and the index's tensor → file map (None for a single file)."""
    single = os.path.lexists(root / SINGLE)
    if os.path.lexists(root / INDEX):
        weight_map = _read_index(_inside(root, INDEX, "index"))
        shards = sorted(set(weight_map.values()))
        if SINGLE in shards or not single:
            return shards, weight_map
    if single:
        return [SINGLE], None
    pickles = sorted(p.name for ext in ("bin", "pt", "pth", "ckpt") for p in root.glob(f"*.{ext}"))
    if pickles:
        rwkv = " (RWKV-7's own .pth: python -m emit pth FILE --out DIRECTORY)"
        raise _bad(
            root,
            f"holds only pickle files ({_some(pickles)}), which can run code when read; "
            "expected safetensors: convert it with the model's own library"
            + (rwkv if any(name.endswith(".pth") for name in pickles) else ""),
        )
    raise _bad(root, f"no {SINGLE} and no {INDEX}; expected one of them: {AGAIN}")


def _read_index(path: Path) -> dict[str, str]:
    index = _read_object(path, MAX_INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _bad(path, "weight_map: expected an object of tensor name to file name; " + AGAIN)
    for tensor, name in weight_map.items():
        if not _plain_name(name):
            raise _bad(
                path,
                f"weight_map[{_show(tensor)}]: found {_show(name)}, expected the plain name "
                "of a .safetensors file in the same directory; do not use "
                "this checkpoint unless you know who made it",
            )
    return weight_map


def _plain_name(name: object) -> bool:
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and name.isprintable()
        and not name.startswith(".")
        and not any(c in name for c in "/\\:")
    )


def _inside(root: Path, name: str, what: str) -> Path:
    """root/name, if it is a file and the link rule of this module allows it."""
    path = root / name
    try:
        real = path.resolve(strict=True)
        regular = stat.S_ISREG(real.stat().st_mode)
    except (OSError, RuntimeError):
        raise _bad(path, f"no such file; expected {what}: {AGAIN}") from None
    if not regular:
        raise _bad(path, f"not a regular file; expected {what}: {AGAIN}")
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else None
    if not real.is_relative_to(root) and real.parent != blobs:
        raise _bad(
            path, "is a link out of the checkpoint directory; copy the file into the directory"
        )
    return path


def _check_index(
    index: Path, shard: str, weight_map: dict[str, str], table: dict[str, TensorInfo]
) -> None:
    expected = {tensor for tensor, name in weight_map.items() if name == shard}
    absent, unlisted = sorted(expected - table.keys()), sorted(table.keys() - expected)
    wrong = []
    if absent:
        wrong.append(f"lists {_some(absent)} in {shard}, which does not hold them")
    if unlisted:
        wrong.append(f"does not list {_some(unlisted)}, which {shard} holds")
    if wrong:
        raise _bad(index, "; ".join(wrong) + f"; index and files must agree: {AGAIN}")


# --- one safetensors file --------------------------------------------------------------------


def _open_file(path: Path) -> tuple[mmap.mmap, dict[str, TensorInfo]]:
    """Map `path` and check its header. Offsets in the result count from the start of the file."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size < 8:
            raise _bad(
                path,
                f"truncated: {size} bytes, expected at least the 8 of a header length; {AGAIN}",
            )
        try:
            mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        except OSError as error:
            raise _bad(path, f"{size} bytes cannot be mapped ({error.strerror})") from None
    (length,) = struct.unpack("<Q", mapped[:8])
    if length > MAX_HEADER:
        raise _bad(
            path, f"header length: found {length}, expected at most {MAX_HEADER} bytes; {AGAIN}"
        )
    if 8 + length > size:
        raise _bad(
            path, f"header length: found {length}, but only {size - 8} bytes follow it; {AGAIN}"
        )
    raw = mapped[8 : 8 + length]
    if raw[:1] != b"{":
        raise _bad(path, f"header: expected a JSON object, found {raw[:12]!r}; {AGAIN}")
    header = _parse(path, raw, "header", finite=True)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _bad(path, "header: __metadata__: expected an object of strings")
    data = 8 + length
    table = {name: _entry(path, name, entry, data) for name, entry in header.items()}
    _check_layout(path, table, data, size)
    return mapped, table


def _entry(path: Path, name: str, entry: object, data: int) -> TensorInfo:
    """One tensor's header entry, checked for itself."""
    where = f"tensor {_show(name)}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _bad(path, f"{where}: expected exactly dtype, shape and data_offsets; {AGAIN}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _bad(
            path, f"{where}: dtype: found {_show(dtype)}, expected one of {', '.join(DTYPES)}"
        )
    if not _sizes(shape) or len(shape) > MAX_RANK:
        raise _bad(
            path, f"{where}: shape: found {_show(shape)}, expected at most {MAX_RANK} sizes ≥ 0"
        )
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _bad(
            path, f"{where}: data_offsets: found {_show(offsets)}, expected [begin, end]; {AGAIN}"
        )
    itemsize = DTYPES[dtype].itemsize
    if math.prod(n for n in shape if n) * itemsize > MAX_BYTES:
        raise _bad(
            path, f"{where}: shape: found {_show(shape)}, which no machine can address; {AGAIN}"
        )
    found, expected = offsets[1] - offsets[0], math.prod(shape) * itemsize
    if found != expected:
        raise _bad(
            path,
            f"{where}: data_offsets span {found} bytes, but {dtype} {shape} "
            f"needs {expected}; {AGAIN}",
        )
    return TensorInfo(path, dtype.lower(), tuple(shape), data + offsets[0], data + offsets[1])


def _check_layout(path: Path, table: dict[str, TensorInfo], data: int, size: int) -> None:
    """The tensors must tile the data section: no gap, no overlap, nothing after the last."""
    position, previous = data, "the header"
    for name, info in sorted(table.items(), key=lambda item: (item[1].begin, item[1].end)):
        if info.begin != position:
            how = "overlaps" if info.begin < position else "leaves a gap after"
            raise _bad(
                path,
                f"tensor {_show(name)}: begins at byte {info.begin}, expected {position}: "
                f"it {how} {previous}; {AGAIN}",
            )
        position, previous = info.end, f"tensor {_show(name)}"
    if position > size:
        raise _bad(
            path,
            f"truncated: {size} bytes, expected {position} (to the end of {previous}); {AGAIN}",
        )
    if position < size:
        raise _bad(path, f"{size - position} bytes after {previous} belong to no tensor; {AGAIN}")


def _sizes(value: object) -> bool:
    """True for a list of integers ≥ 0 (JSON true and 1.0 are not integers here)."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n <= MAX_BYTES for n in value)


# --- JSON ------------------------------------------------------------------------------------


def _read_object(path: Path, most: int = MAX_JSON) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(most + 1)
    except OSError as error:
        raise _bad(path, f"cannot be read ({error.strerror}); expected a JSON object") from None
    if len(raw) > most:
        raise _bad(path, f"more than {most} bytes; expected a JSON object of usual size")
    return _parse(path, raw, "file", finite=False)


def _parse(path: Path, raw: bytes, what: str, *, finite: bool) -> dict[str, Any]:
    """A JSON object in UTF-8 with no repeated key; `finite` refuses Infinity and NaN."""

    def constant(word: str) -> float:
        if finite:
            raise ValueError(f"{word} is not JSON")
        return float(word)

    def pairs(items: list[tuple[str, Any]]) -> Any:
        result = dict(items)
        if len(result) != len(items):
            twice = [key for key, count in Counter(key for key, _ in items).items() if count > 1]
            raise ValueError(f"repeated key {_some(twice)}")
        if not finite and result.keys() == {"__float__"}:
            return _non_finite(result["__float__"])
        return result

    try:
        with UNCOLLECTED:
            value = json.loads(raw.decode(), object_pairs_hook=pairs, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"{what}: not a JSON object: {error}; {AGAIN}") from None
    if not isinstance(value, dict):
        raise _bad(path, f"{what}: expected a JSON object, found {type(value).__name__}; {AGAIN}")
    return value


def _non_finite(word: object) -> float:
    if word not in ("Infinity", "-Infinity", "NaN"):
        raise ValueError(f"__float__: found {_show(word)}, expected Infinity, -Infinity or NaN")
    return float(str(word))


# --- messages --------------------------------------------------------------------------------


def _show(value: object) -> str:
    """`value` in ASCII on one line, at most about 80 characters."""
    text = shallow(value)
    return text if len(text) <= 80 else text[:77] + "…"


def _some(names: Iterable[str], most: int = 5) -> str:
    """The first few of `names` and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(_show(name) for name in listed[:most]) + more if listed else "none"


def _bad(path: Path, message: str) -> EmitError:
    return EmitError(" ".join(f"{path}: {message}".split()))
