"""Strict JSON <-> frozen dataclasses: an unknown, repeated or mistyped key fails, and a missing one
unless its field has a default. A class's own `check_first(object)` comes before its keys."""

from __future__ import annotations

import dataclasses
import json
import math
import stat
import types
import typing
from collections.abc import Callable, Collection, Iterable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from runtime.errors import UserError
from runtime.uncollected import UNCOLLECTED

T = TypeVar("T")
Decoder = Callable[[Any], Any]
MAX_JSON_BYTES = 32 << 20  # in memory, JSON may be 25 times as large


class _Mismatch(Exception):
    """What is wrong, and where (dotted path); `parse` tells it with the file's name."""

    def __init__(self, problem: str, where: str = "") -> None:
        super().__init__(problem)
        self.problem, self.where = problem, where

    def under(self, part: str) -> _Mismatch:
        """The same, seen from the value of which `part` (a key, or [index]) is a part."""
        dot = "." if self.where and not self.where.startswith("[") else ""
        return _Mismatch(self.problem, part + dot + self.where)

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}" if self.where else self.problem


def read(cls: type[T], path: Path, advice: str) -> T:
    """Read `path` as JSON and return it as the dataclass `cls`.

    `advice` ends every message: what the user should do about a bad file.
    Raises UserError naming the file, the field, what was found and what was expected.
    """
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):
            raise UserError(f"{path}: not a regular file; {advice}")
        if facts.st_size > MAX_JSON_BYTES:
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
        with UNCOLLECTED:
            value = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constants)
            return _decoder(cls)(value)
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
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        raise _Mismatch("key appears twice", next(k for k, _ in pairs if k in seen or seen.add(k)))
    return found


def _no_constants(word: str) -> Any:
    raise _Mismatch(f"found {word}, expected finite numbers only")


@cache
def _decoder(kind: Any) -> Decoder:
    """What makes a `kind` of parsed JSON, or raises _Mismatch.

    Scalar types, Literal, X | None, tuples, dicts and dataclasses, nested freely. A manifest has
    thousands of values, so types are looked at once.
    """
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind)
    if origin in (typing.Union, types.UnionType):
        (inner,) = [k for k in typing.get_args(kind) if k is not type(None)]
        decode = _decoder(inner)
        return lambda value: None if value is None else decode(value)
    if origin is typing.Literal:
        return _literal(typing.get_args(kind))
    if origin is tuple:
        return _tuple(typing.get_args(kind))
    if origin is dict:
        return _dict(typing.get_args(kind)[1])
    return _scalar(kind)


def _scalar(kind: type) -> Decoder:
    words = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}[kind]

    def decode(value: Any) -> Any:
        if kind is float and type(value) is int:
            value = float(value) if abs(value) < 1e300 else value
        if type(value) is not kind or (kind is float and not math.isfinite(value)):
            raise _wrong(value, words)
        return value

    return decode


def _literal(options: tuple[Any, ...]) -> Decoder:
    kinds = {type(option) for option in options}

    def decode(value: Any) -> Any:
        if type(value) not in kinds or value not in options:
            raise _wrong(value, " or ".join(json.dumps(option) for option in options))
        return value

    return decode


def _tuple(kinds: tuple[Any, ...]) -> Decoder:
    repeated = kinds[-1] is Ellipsis
    decoders = [_decoder(kind) for kind in kinds if kind is not Ellipsis]
    plain = {kinds[0]} if repeated and kinds[0] in (int, str) else None

    def decode(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _wrong(value, "a list")
        if not repeated and len(value) != len(kinds):
            raise _wrong(value, f"a list of {len(kinds)}")
        if plain is not None and set(map(type, value)) == plain:
            return tuple(value)
        found: list[Any] = []
        each = decoders * len(value) if repeated else decoders
        try:
            for one, part in zip(each, value, strict=True):
                found.append(one(part))
        except _Mismatch as error:
            raise error.under(f"[{len(found)}]") from None
        return tuple(found)

    return decode


def _dict(kind: Any) -> Decoder:
    one = _decoder(kind)

    def decode(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _wrong(value, "an object")
        return _parts(value, ((key, one) for key in value))

    return decode


def _dataclass(cls: Any) -> Decoder:
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(cls)
    decoders = {field.name: _decoder(hints[field.name]) for field in fields}
    needed = {f.name for f in fields if f.default is dataclasses.MISSING}
    first: Callable[[dict[str, Any]], None] | None = getattr(cls, "check_first", None)

    def decode(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _wrong(value, "an object")
        if first is not None:
            first(value)
        if value.keys() != decoders.keys():
            _check_keys(value, needed, decoders)
        found = _parts(value, ((k, one) for k, one in decoders.items() if k in value))
        try:
            return cls(**found)
        except ValueError as error:
            raise _Mismatch(str(error)) from error

    return decode


def _check_keys(value: dict[str, Any], needed: set[str], known: Collection[str]) -> None:
    missing, unknown = sorted(needed - value.keys()), sorted(value.keys() - set(known))
    parts = [f"missing key {', '.join(missing)}"] if missing else []
    parts += [f"unknown key {', '.join(unknown)}"] if unknown else []
    if parts:
        raise _Mismatch("; ".join(parts))


def _parts(value: dict[str, Any], decoders: Iterable[tuple[str, Decoder]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    key = ""
    try:
        for key, one in decoders:
            found[key] = one(value[key])
    except _Mismatch as error:
        raise error.under(key) from None
    return found


def _wrong(value: Any, expected: str) -> _Mismatch:
    shown = json.dumps(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return _Mismatch(f"found {shown}, expected {expected}")
