"""Strict JSON <-> frozen dataclasses: an unknown, repeated or mistyped key fails, and a missing one
unless its field has a default."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from runtime.errors import UserError

T = TypeVar("T")
MAX_JSON_BYTES = 256 << 20


class _Mismatch(Exception):
    """Where (dotted path) and what; `read` turns it into a UserError with the file's name."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}" if where else problem)


def read(cls: type[T], path: Path, advice: str) -> T:
    """Read `path` as JSON and return it as the dataclass `cls`.

    `advice` ends every message: what the user should do about a bad file.
    Raises UserError naming the file, the field, what was found and what was expected.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise UserError(f"{path}: larger than {MAX_JSON_BYTES} bytes; {advice}")
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {advice}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason}); {advice}") from error
    return parse(cls, text, str(path), advice)


def parse(cls: type[T], text: str, name: str, advice: str) -> T:
    """As `read`, of a string; `name` stands for the file in messages."""
    try:
        value = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constants)
        return decode(cls, value, "")
    except json.JSONDecodeError as error:
        raise UserError(f"{name}: line {error.lineno}: not JSON ({error.msg}); {advice}") from error
    except RecursionError as error:
        raise UserError(f"{name}: nested too deeply to be real; {advice}") from error
    except (_Mismatch, ValueError) as error:
        raise UserError(f"{name}: {error}; {advice}") from error


def dumps(value: Any) -> str:
    """Canonical JSON of a dataclass: sorted keys, indent 1, ASCII, trailing newline."""
    plain = dataclasses.asdict(value)
    return json.dumps(plain, sort_keys=True, indent=1, ensure_ascii=True, allow_nan=False) + "\n"


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Mismatch(key, "key appears twice")
        found[key] = value
    return found


def _no_constants(word: str) -> Any:
    raise _Mismatch("", f"found {word}, expected finite numbers only")


def decode(kind: Any, value: Any, where: str) -> Any:
    """Return `value` (parsed JSON) as `kind`: a scalar type, Literal, X | None, tuple, dict or
    dataclass, nested freely. Raises ValueError-like mismatch with the dotted path."""
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, value, where)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        (inner,) = [k for k in typing.get_args(kind) if k is not type(None)]
        return decode(inner, value, where)
    if origin is typing.Literal:
        options = typing.get_args(kind)
        if type(value) not in {type(o) for o in options} or value not in options:
            raise _wrong(where, value, " or ".join(json.dumps(o) for o in options))
        return value
    if origin is tuple:
        return _decode_tuple(typing.get_args(kind), value, where)
    if origin is dict:
        if not isinstance(value, dict):
            raise _wrong(where, value, "an object")
        inner = typing.get_args(kind)[1]
        return {k: decode(inner, v, f"{where}.{k}" if where else k) for k, v in value.items()}
    return _decode_scalar(kind, value, where)


def _decode_scalar(kind: Any, value: Any, where: str) -> Any:
    words = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}
    if kind is float and type(value) is int:
        value = float(value) if abs(value) < 1e300 else value
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise _wrong(where, value, words[kind])
    return value


def _decode_tuple(kinds: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _wrong(where, value, "a list")
    if kinds[-1] is Ellipsis:
        return tuple(decode(kinds[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if len(value) != len(kinds):
        raise _wrong(where, value, f"a list of {len(kinds)}")
    pairs = zip(kinds, value, strict=True)
    return tuple(decode(k, v, f"{where}[{i}]") for i, (k, v) in enumerate(pairs))


def _decode_dataclass(cls: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise _wrong(where, value, "an object")
    hints = _hints(cls)
    optional = {f.name for f in dataclasses.fields(cls) if f.default is not dataclasses.MISSING}
    missing = sorted(set(hints) - set(value) - optional)
    unknown = sorted(set(value) - set(hints))
    if missing or unknown:
        parts = [f"missing key {', '.join(missing)}"] if missing else []
        parts += [f"unknown key {', '.join(unknown)}"] if unknown else []
        raise _Mismatch(where, "; ".join(parts))
    prefix = f"{where}." if where else ""
    given = {k: kind for k, kind in hints.items() if k in value}
    fields = {k: decode(kind, value[k], prefix + k) for k, kind in given.items()}
    try:
        return cls(**fields)
    except ValueError as error:
        raise _Mismatch(where, str(error)) from error


_HINTS: dict[type, dict[str, Any]] = {}


def _hints(cls: type) -> dict[str, Any]:
    """Field types of a dataclass, remembered (resolving them is slow and they never change)."""
    if cls not in _HINTS:
        resolved = typing.get_type_hints(cls)
        _HINTS[cls] = {f.name: resolved[f.name] for f in dataclasses.fields(cls)}
    return _HINTS[cls]


def _wrong(where: str, value: Any, expected: str) -> _Mismatch:
    shown = json.dumps(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return _Mismatch(where, f"found {shown}, expected {expected}")
