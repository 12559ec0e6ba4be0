"""Reads a torch .pth file without running anything in it.

A .pth file is a zip archive of a pickle and one file of raw numbers for each storage
(https://pytorch.org/docs/stable/notes/serialization.html). A pickle is a program. `_Machine` reads
its instructions one by one, knows only those that make dicts, tuples, numbers and strings, and
instead of calling anything takes note of tensors; whatever else stands there ends the reading.
"""

from __future__ import annotations

import math
import pickletools
import re
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from emit.errors import EmitError, shallow

MAX_PICKLE = 64 << 20  # bytes
MAX_STEPS = 1 << 20  # instructions of a pickle; a tensor takes about forty
MAX_RANK = 8
STORAGES = {
    "torch.FloatStorage": ("F32", np.dtype("<f4")),
    "torch.HalfStorage": ("F16", np.dtype("<f2")),
    "torch.BFloat16Storage": ("BF16", np.dtype(ml_dtypes.bfloat16)),
}
# What zipfile raises for archives that are damaged or made to be.
_DAMAGED = (
    zipfile.BadZipFile, NotImplementedError, UnicodeError, OSError, ValueError, EOFError,
    RuntimeError, struct.error,
)  # fmt: skip
WORDS = {dtype: word for word, dtype in STORAGES.values()}


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies: elements of the archive's file `key`, `offset` and strides of them."""

    dtype: np.dtype
    key: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class _Storage:
    dtype: np.dtype
    key: str
    count: int


@dataclass(frozen=True)
class _Name:
    """What a pickle would import."""

    name: str


class _Refused(Exception):
    """What a pickle holds that is not read."""


class Pth:
    """An opened file: `tensors` by name. Raises EmitError for anything that is not understood."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._archive = zipfile.ZipFile(path)
        except FileNotFoundError:
            raise bad(path, "no such file") from None
        except _DAMAGED as error:
            raise bad(
                path, f"not a zip archive ({error}); expected a file of torch 1.6 or later"
            ) from None
        pickles = [n for n in self._archive.namelist() if re.fullmatch(r"[^/]+/data\.pkl", n)]
        if len(pickles) != 1:
            raise bad(path, f"{len(pickles)} files are called <name>/data.pkl, expected 1")
        self._base = pickles[0].removesuffix("data.pkl")
        names = set(self._archive.namelist())
        order = f"{self._base}byteorder"
        if order in names and self._member(order, 16) != b"little":
            raise bad(path, "byteorder is not little, which alone is read")
        try:
            self.tensors = _tensors(_Machine().run(self._member(pickles[0], MAX_PICKLE)))
        except _Refused as error:
            raise bad(path, f"data.pkl {error}; do not load this file elsewhere") from None
        for name, tensor in self.tensors.items():
            self._check(name, tensor)

    def read(self, name: str) -> np.ndarray:
        """The tensor `name`, in its own type."""
        tensor = self.tensors[name]
        member = f"{self._base}data/{tensor.key}"
        data = self._member(member, None)
        whole = len(data) // tensor.dtype.itemsize
        flat = np.frombuffer(data, tensor.dtype, whole)[tensor.offset :]
        strides = [stride * tensor.dtype.itemsize for stride in tensor.strides]
        view = np.lib.stride_tricks.as_strided(flat, tensor.shape, strides, writeable=False)
        return np.ascontiguousarray(view)

    def _member(self, name: str, limit: int | None) -> bytes:
        """A file of the archive, its checksum proven."""
        try:
            info = self._archive.getinfo(name)
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                raise bad(self.path, f"{name} is compressed or encrypted, which torch never does")
            if limit is not None and info.file_size > limit:
                raise bad(self.path, f"{name}: {info.file_size} bytes, expected at most {limit}")
            data = self._archive.read(info)
            if len(data) != info.file_size:  # what the directory says is what was checked
                raise ValueError(f"{len(data)} bytes, expected {info.file_size}")
            return data
        except (KeyError, *_DAMAGED) as error:
            raise bad(self.path, f"{name}: {error}; download the file again") from None

    def _check(self, name: str, tensor: Tensor) -> None:
        """EmitError unless all of the tensor lies in its file."""
        try:
            size = self._archive.getinfo(f"{self._base}data/{tensor.key}").file_size
        except KeyError:
            raise bad(self.path, f"{name}: no file data/{tensor.key} in the archive") from None
        steps = ((n - 1) * stride for n, stride in zip(tensor.shape, tensor.strides, strict=True))
        last = tensor.offset + sum(steps)
        if last >= size // tensor.dtype.itemsize:
            raise bad(
                self.path,
                f"{name}: element {last} of data/{tensor.key}, which holds"
                f" {size // tensor.dtype.itemsize}; download the file again",
            )
        if math.prod(tensor.shape) > size // tensor.dtype.itemsize:  # strides of 0
            raise bad(
                self.path,
                f"{name}: shape {list(tensor.shape)} of the {size // tensor.dtype.itemsize}"
                f" elements of data/{tensor.key}, expected each once",
            )


# --- the pickle ------------------------------------------------------------------------------

_MARK = object()


class _Machine:
    """Reads a pickle's instructions as the pickle module's documentation describes them."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        """What the pickle stands for. Raises _Refused for what is not known."""
        try:
            for step, (opcode, argument, _) in enumerate(pickletools.genops(data)):
                if step == MAX_STEPS:
                    raise _Refused(f"has more than {MAX_STEPS} instructions")
                if opcode.name == "STOP":
                    return self.stack.pop()
                self._do(opcode.name, argument)
        except (ValueError, LookupError, TypeError, RecursionError, struct.error) as error:
            raise _Refused(f"is damaged ({type(error).__name__}: {error})") from None
        raise _Refused("does not end")

    def _do(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in ("PROTO", "FRAME"):
            return
        if name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name in ("BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"):
            stack.append(argument)
        elif name in ("BINPUT", "LONG_BINPUT"):
            self.memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif name == "GLOBAL":
            stack.append(_Name(argument.replace(" ", ".")))
        elif name == "STACK_GLOBAL":
            module, member = self._pop(2)
            if not isinstance(module, str) or not isinstance(member, str):
                raise _Refused("names what to import by what is not a text")
            stack.append(_Name(f"{module}.{member}"))
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            stack.append(tuple(self._pop(int(name[-1]))))
        elif name == "TUPLE":
            stack.append(tuple(self._to_mark()))
        elif name in ("SETITEM", "SETITEMS"):
            items = self._pop(2) if name == "SETITEM" else self._to_mark()
            if not isinstance(stack[-1], dict) or not all(type(k) is str for k in items[::2]):
                raise _Refused("sets items of what is not a dict of names")
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif name == "BINPERSID":
            stack.append(_storage(stack.pop()))
        elif name == "REDUCE":
            function, arguments = self._pop(2)
            stack.append(_made(function, arguments))
        elif name == "BUILD":  # attributes of a dict: torch's `_metadata`, versions of modules
            stack.pop()
            if not isinstance(stack[-1], dict):
                raise _Refused("sets attributes of what is not a dict")
        else:
            raise _Refused(f"holds the instruction {name}, which no file of tensors needs")

    def _pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise _Refused("takes more than it has")
        found = self.stack[-count:]
        del self.stack[-count:]
        return found

    def _to_mark(self) -> list[Any]:
        found: list[Any] = []
        while (value := self.stack.pop()) is not _MARK:
            found.append(value)
        return found[::-1]


_CONSTANTS: dict[str, Callable[[], Any]] = {
    "MARK": lambda: _MARK,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
}


def _storage(reference: Any) -> _Storage:
    """("storage", type, key, place, count) as torch refers to the numbers beside a pickle."""
    if not isinstance(reference, tuple) or len(reference) != 5 or reference[0] != "storage":
        raise _Refused(f"refers to {_show(reference)}, expected a storage")
    _, kind, key, _, count = reference
    if not isinstance(kind, _Name) or kind.name not in STORAGES:
        found = kind.name if isinstance(kind, _Name) else kind
        raise _Refused(f"holds a {_show(found)}, expected one of {', '.join(STORAGES)}")
    if not isinstance(key, str) or not re.fullmatch(r"[0-9A-Za-z_]{1,64}", key):
        raise _Refused(f"refers to the storage {_show(key)}, expected a number")
    if not _sizes((count,)):
        raise _Refused(f"has a storage of {_show(count)} elements")
    return _Storage(STORAGES[kind.name][1], key, count)


def _made(function: Any, arguments: Any) -> Any:
    """What the call of `function` would make, of the three that files of tensors hold."""
    name = function.name if isinstance(function, _Name) else None
    if name == "collections.OrderedDict" and arguments == ():
        return {}
    if name == "torch._utils._rebuild_parameter" and isinstance(arguments, tuple):
        if arguments and isinstance(arguments[0], Tensor):
            return arguments[0]
    if name == "torch._utils._rebuild_tensor_v2" and isinstance(arguments, tuple):
        if len(arguments) in (6, 7) and isinstance(arguments[0], _Storage):
            storage, offset, shape, strides = arguments[:4]
            if _sizes((offset,)) and _sizes(shape) and _sizes(strides):
                if len(shape) == len(strides) <= MAX_RANK and 0 not in shape:
                    return Tensor(storage.dtype, storage.key, offset, shape, strides)
    raise _Refused(f"calls {_show(name or function)} with {_show(arguments)}, refused")


def _sizes(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(n) is int and 0 <= n < 2**48 for n in value)


def _tensors(content: Any) -> dict[str, Tensor]:
    if not isinstance(content, dict):
        raise _Refused(f"holds {_show(content)}, expected tensors by name")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise _Refused(f"holds {_show(name)}: {_show(value)}, expected a tensor")
    return content


# --- messages -------------------------------------------------------------------------------


def _show(value: Any) -> str:
    """`value` in ASCII on one line, at most about 80 characters, however deep it is."""
    text = shallow(value)
    return text if len(text) <= 80 else text[:77] + "…"


def bad(path: Path, message: str) -> EmitError:
    """An error of one line about the file."""
    return EmitError(" ".join(f"{path}: {message}".split()))
