"""Which files of a model repository are used, and the lock that pins every one of them.

The lock is canonical JSON, made to be committed:

    {"schema": 1, "source": "hf:org/name", "revision": "main", "commit": "<40 hex>",
     "files": {"config.json": {"sha256": "<64 hex>", "size": 1234}, …}}

`revision` is the word that was asked for, `commit` what it named when the lock was written.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from artifacts.disk import explained, write_new
from runtime.errors import UserError

SCHEMA = 1
CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_INDEX = 64 << 20  # bytes

_METADATA = (
    CONFIG, "hf_quant_config.json", "generation_config.json",
    "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.json", "chat_template.jinja",
    "vocab.json", "*vocab*.txt", "merges.txt", "tokenizer.model*", "tokenizer*.jsonl",
    "tiktoken.model", "*.tiktoken",
)  # fmt: skip
_NEVER = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".gguf", ".onnx", ".h5", ".msgpack")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}")

Digest = tuple[str, int]  # (sha256 hex, size in bytes)


def plain_name(name: object) -> bool:
    """True for a file name without directories, of letters, digits and `_.+-`."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def is_metadata(name: str) -> bool:
    """True for a file of the configuration or the tokenizer."""
    return (
        plain_name(name)
        and not name.endswith(_NEVER)
        and any(fnmatchcase(name, pattern) for pattern in _METADATA)
    )


def is_weights(name: str) -> bool:
    """True for a file that holds tensors."""
    return plain_name(name) and name.endswith(".safetensors")


def select(where: str, names: Iterable[str], read_index: Callable[[], bytes]) -> list[str]:
    """The files of a repository or directory that are used, sorted.

    Weights are `model.safetensors` unless the index lists it among others, else the shards that the
    index names: nothing else, so a second copy such as `consolidated.safetensors` is left alone.
    `read_index` is called when there is an index. Raises UserError (beginning with `where`) when
    there is no configuration, no usable weights, or the index cannot be used.
    """
    present = set(names)
    if CONFIG not in present:
        raise UserError(
            f"{where}: no {CONFIG}; expected a checkpoint in transformers layout{_rwkv(present)}"
        )
    metadata = {name for name in present if is_metadata(name)}
    if INDEX in present:
        shards = _shards(f"{where}/{INDEX}", read_index())
        if SINGLE in shards or SINGLE not in present:
            if absent := sorted(shards - present):
                raise UserError(
                    f"{where}/{INDEX}: names {', '.join(absent[:5])}, which "
                    "is not there; the checkpoint is incomplete: use another revision or copy"
                )
            return sorted({*metadata, INDEX, *shards})
    if SINGLE in present:
        return sorted({*metadata, SINGLE})
    raise UserError(f"{where}: {_no_weights(present)}")


def _rwkv(present: set[str]) -> str:
    """What to do with a .pth file, where there is one, to end an error with."""
    if not any(name.endswith(".pth") for name in present):
        return ""
    return "; RWKV-7's own .pth: python -m emit pth FILE --out DIRECTORY, which runs nothing"


def _no_weights(present: set[str]) -> str:
    pickles = sorted(name for name in present if name.endswith(_PICKLES))
    if pickles:
        return (
            f"only pickle files ({', '.join(pickles[:3])}), refused because reading a pickle can "
            "run any code its author put there; expected safetensors: use a repository or revision "
            "that has them, or convert it where you trust it (save_pretrained)" + _rwkv(present)
        )
    others = sorted(n for n in present if n.endswith((".safetensors", ".gguf", ".onnx", ".h5")))
    found = f"only {', '.join(others[:3])}" if others else "no weights"
    return f"{found}; expected {SINGLE} or {INDEX}: use a checkpoint in transformers layout"


def _shards(where: str, raw: bytes) -> set[str]:
    try:
        weight_map = json.loads(raw.decode("utf-8"))["weight_map"]
        shards = list(weight_map.values())
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"{where}: weight_map: expected an object of tensor name to file name; get the "
            "checkpoint again"
        ) from None
    for name in shards:
        if not (isinstance(name, str) and is_weights(name)):
            raise UserError(
                f"{where}: weight_map: found {ascii(name)[:80]}, expected the plain name of a "
                ".safetensors file; do not use this checkpoint unless you know who made it"
            )
    return set(shards)


@dataclass(frozen=True)
class Lock:
    """What a source was when it was first fetched."""

    source: str
    revision: str
    commit: str
    files: dict[str, Digest]

    @classmethod
    def load(cls, path: Path) -> Lock | None:
        """The lock at `path`, or None if there is none. Raises UserError if it is malformed."""
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from error
        try:
            return cls._checked(json.loads(raw.decode("utf-8")))
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{path}: not a lock file: {error}; restore it from version control, or delete it "
                "to pin the source anew"
            ) from None

    @classmethod
    def _checked(cls, data: Any) -> Lock:
        _keys(data, "file", {"schema", "source", "revision", "commit", "files"})
        if type(data["schema"]) is not int or data["schema"] != SCHEMA:
            raise ValueError(f"schema: found {ascii(data['schema'])[:80]}, expected {SCHEMA}")
        for key in ("source", "revision"):
            if not isinstance(data[key], str):
                raise ValueError(f"{key}: expected a string")
        if not is_commit(data["commit"]):
            raise ValueError(f"commit: found {ascii(data['commit'])[:80]}, expected 40 hex digits")
        if not isinstance(data["files"], dict) or CONFIG not in data["files"]:
            raise ValueError(f"files: expected an object with {CONFIG}")
        files = {name: _digest(name, entry) for name, entry in data["files"].items()}
        return cls(data["source"], data["revision"], data["commit"], files)

    def dumps(self) -> bytes:
        """The file's bytes: the same lock gives the same bytes."""
        files = {name: {"sha256": sha, "size": size} for name, (sha, size) in self.files.items()}
        data = {"schema": SCHEMA, "source": self.source, "revision": self.revision,
                "commit": self.commit, "files": files}  # fmt: skip
        return (json.dumps(data, indent=1, sort_keys=True, ensure_ascii=True) + "\n").encode()

    def save(self, path: Path) -> None:
        """Write the lock to `path`, whole or not at all. Raises UserError."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.unlink(missing_ok=True)
            write_new(temporary, self.dumps())
            temporary.replace(path)


def is_commit(word: object) -> bool:
    """True for 40 lower-case hex digits."""
    return isinstance(word, str) and re.fullmatch(r"[0-9a-f]{40}", word) is not None


def _digest(name: str, entry: Any) -> Digest:
    if not (is_metadata(name) or is_weights(name) or name == INDEX):
        raise ValueError(f"files: found {ascii(name)[:80]}, expected the name of a model file")
    _keys(entry, name, {"sha256", "size"})
    sha, size = entry["sha256"], entry["size"]
    if not (isinstance(sha, str) and re.fullmatch(r"[0-9a-f]{64}", sha)):
        raise ValueError(f"{name}: sha256: found {ascii(sha)[:80]}, expected 64 hex digits")
    if type(size) is not int or size < 0:
        raise ValueError(f"{name}: size: found {ascii(size)[:80]}, expected bytes ≥ 0")
    return sha, size


def _keys(data: Any, where: str, expected: set[str]) -> None:
    if not isinstance(data, dict) or data.keys() != expected:
        found = ", ".join(map(ascii, data)) if isinstance(data, dict) else type(data).__name__
        raise ValueError(
            f"{where}: found {found[:200]}, expected the keys {', '.join(sorted(expected))}"
        )
