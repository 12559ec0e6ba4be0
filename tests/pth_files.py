"""torch's .pth files written by hand, instruction by instruction, as torch writes them."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

KINDS = {"float32": b"FloatStorage", "float16": b"HalfStorage", "bfloat16": b"BFloat16Storage"}
DICT = b"ccollections\nOrderedDict\n)R"


def text(word: str) -> bytes:
    return b"X" + struct.pack("<I", len(word.encode())) + word.encode()


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def numbers(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def rebuilt(
    storage: bytes, shape: tuple[int, ...], offset: int = 0, strides: tuple[int, ...] | None = None
) -> bytes:
    """The instructions that stand for one tensor."""
    steps = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    parts = number(offset) + numbers(shape) + numbers(steps if strides is None else strides)
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + parts + b"\x89" + DICT + b"tR"


def storage(kind: bytes, key: str, count: int) -> bytes:
    return b"(" + text("storage") + b"ctorch\n" + kind + b"\n" + text(key) + text("cpu") + number(
        count
    ) + b"tQ"  # fmt: skip


def pickled(items: Mapping[str, bytes], before: bytes = b"\x80\x02" + DICT) -> bytes:
    return before + b"(" + b"".join(text(k) + v for k, v in items.items()) + b"u."


def archive(path: Path, pickle: bytes, files: Mapping[str, bytes], **extra: bytes) -> Path:
    storages = {f"data/{key}": data for key, data in files.items()}
    members = {"data.pkl": pickle, **storages, "byteorder": b"little", "version": b"3\n", **extra}
    with zipfile.ZipFile(path, "w") as made:
        for name, data in members.items():
            made.writestr(zipfile.ZipInfo(f"model/{name}"), data)  # without the time of day
    return path


def saved(path: Path, tensors: Mapping[str, np.ndarray]) -> Path:
    """`tensors` as torch.save of their dict."""
    items, files = {}, {}
    for i, (name, array) in enumerate(tensors.items()):
        kind = KINDS[str(array.dtype)]
        items[name] = rebuilt(storage(kind, str(i), array.size), array.shape)
        files[str(i)] = array.tobytes()
    return archive(path, pickled(items), files)
