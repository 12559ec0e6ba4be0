"""Result records of the action cache, their canonical JSON, and the keys they go by."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SCHEMA = 1
_HEX = frozenset("0123456789abcdef")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,127}")


def is_digest(word: object) -> bool:
    """True for 64 lower-case hex digits."""
    return isinstance(word, str) and len(word) == 64 and _HEX.issuperset(word)


def canonical(value: Any) -> bytes:
    """The one JSON text of `value`: sorted keys, no spaces, ASCII, no NaN or infinity.

    Raises ValueError that names the place of a value which JSON cannot carry unchanged.
    """
    _check_json(value, "value")
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode()


def _check_json(value: Any, where: str) -> None:
    if isinstance(value, Mapping):
        for name, item in value.items():
            if not isinstance(name, str):
                raise ValueError(f"{where}: key {name!r} is not a string")
            _check_json(item, f"{where}.{name}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_json(item, f"{where}[{index}]")
    elif isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise ValueError(f"{where}: {value} has no JSON form")
    elif value is not None and not isinstance(value, str | int):
        raise ValueError(f"{where}: {type(value).__name__} has no JSON form")


@dataclass(frozen=True)
class Blob:
    """Bytes in the store: their sha256 (64 hex digits) and their number."""

    sha256: str
    size: int


@dataclass(frozen=True)
class Record:
    """What an action gave. `about` (words such as model and target) is not part of the key."""

    key: str
    stage: str
    fields: dict[str, Any]
    about: dict[str, str]
    outputs: dict[str, Blob]
    meta: Any


def action_key(stage: str, fields: Mapping[str, Any]) -> str:
    """sha256 hex of the canonical JSON of {"stage", "fields"}."""
    return hashlib.sha256(canonical({"stage": stage, "fields": dict(fields)})).hexdigest()


def encode_record(record: Record) -> bytes:
    """Canonical JSON of a record with `sum`, the sha256 of the same JSON without it."""
    body = {
        "schema": SCHEMA,
        "key": record.key,
        "stage": record.stage,
        "fields": record.fields,
        "about": record.about,
        "outputs": {
            name: {"sha256": blob.sha256, "size": blob.size}
            for name, blob in record.outputs.items()
        },
        "meta": record.meta,
    }
    return canonical({**body, "sum": hashlib.sha256(canonical(body)).hexdigest()})


def decode_record(data: bytes, key: str) -> Record:
    """The record in `data`. Raises ValueError if it is not a whole record of `key`."""
    body = json.loads(data)
    if not isinstance(body, dict) or body.get("schema") != SCHEMA:
        raise ValueError(f"not a record of schema {SCHEMA}")
    total = body.pop("sum", None)
    if body.keys() != {"schema", "key", "stage", "fields", "about", "outputs", "meta"}:
        raise ValueError(f"has the keys {', '.join(sorted(body))[:200]}")
    if total != hashlib.sha256(canonical(body)).hexdigest():
        raise ValueError("does not match its own sum")
    if body["key"] != key or action_key(body["stage"], body["fields"]) != key:
        raise ValueError("is not the record of its key")
    outputs = {name: _blob(name, item) for name, item in body["outputs"].items()}
    return Record(key, body["stage"], body["fields"], body["about"], outputs, body["meta"])


def _blob(name: str, item: Any) -> Blob:
    """One output of a record: a file's plain name, a digest and a size, and nothing else."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"output {name[:80]!r} is not a file's name")
    if not isinstance(item, dict) or item.keys() != {"sha256", "size"}:
        raise ValueError(f"output {name}: found {str(item)[:80]!r}, expected sha256 and size")
    sha256, size = item["sha256"], item["size"]
    if not is_digest(sha256) or type(size) is not int or size < 0:
        raise ValueError(f"output {name}: found {str(item)[:80]!r}, expected a digest and bytes")
    return Blob(sha256, size)
