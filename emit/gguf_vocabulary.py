"""The vocabulary in a GGUF file's metadata (`tokenizer.ggml.…`), read strictly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from emit.errors import EmitError
from emit.gguf_file import Gguf

PREFIX = "tokenizer.ggml."
FIX = "convert the file again, or put the model's tokenizer.json beside it"
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type
# Role of a token in tokenizer_config.json -> the key of its id.
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding"}


class Unknown(Exception):
    """Why no tokenizer can be made of a file that is not malformed."""


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id, without those that only fill up the embedding's rows at the end.

    `kinds` are NORMAL … BYTE; `scores` are there for some models; `roles` are ids by name.
    """

    path: Path
    tokens: list[str]
    kinds: list[int]
    scores: list[float] | None
    roles: Mapping[str, int]
    metadata: Mapping[str, Any]

    def bad(self, key: str, message: str) -> EmitError:
        """An error that begins with the file and the key `tokenizer.ggml.<key>`."""
        return EmitError(" ".join(f"{self.path}: {PREFIX}{key}: {message}; {FIX}".split()))

    @cached_property
    def ids(self) -> dict[str, int]:
        """Token -> id. EmitError if two are the same."""
        ids: dict[str, int] = {}
        for i, token in enumerate(self.tokens):
            if ids.setdefault(token, i) != i:
                raise self.bad("tokens", f"{ascii(token)[:80]} is both {ids[token]} and {i}")
        return ids

    def flag(self, key: str, default: bool) -> bool:
        """A key that is true or false."""
        found = self.metadata.get(PREFIX + key, default)
        if not isinstance(found, bool):
            raise self.bad(key, f"found {ascii(found)[:80]}, expected true or false")
        return found

    def text(self, key: str) -> str | None:
        """A key that is a string; None if it is missing."""
        found = self.metadata.get(PREFIX + key)
        if found is not None and not isinstance(found, str):
            raise self.bad(key, f"found {ascii(found)[:80]}, expected a string")
        return found

    def strings(self, key: str) -> list[str]:
        """A key that is an array of strings in UTF-8."""
        found = self.metadata.get(PREFIX + key)
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            raise self.bad(key, f"found {ascii(found)[:80]}, expected an array of strings")
        for i, each in enumerate(found):
            try:
                each.encode()
            except UnicodeEncodeError:
                raw = each.encode("utf-8", "surrogateescape")
                raise self.bad(key, f"element {i} is not UTF-8: {raw[:40]!r}") from None
        return found

    def numbers(self, key: str, count: int, kind: type | tuple[type, ...]) -> list[Any]:
        """A key that is an array of `count` numbers."""
        found = self.metadata.get(PREFIX + key)
        if not isinstance(found, list) or not all(isinstance(each, kind) for each in found):
            raise self.bad(key, f"found {ascii(found)[:80]}, expected an array of numbers")
        if len(found) != count:
            raise self.bad(key, f"{len(found)} elements, expected {count}, one for each token")
        return found


def read(file: Gguf) -> Vocabulary:
    """The vocabulary of `file`. Raises EmitError, one line naming file and key."""
    empty = Vocabulary(file.path, [], [], None, {}, file.metadata)
    tokens = empty.strings("tokens")
    count = len(tokens)
    kinds = empty.numbers("token_type", count, int)
    for i, kind in enumerate(kinds):
        if not NORMAL <= kind <= BYTE:
            raise empty.bad("token_type", f"element {i} is {kind}, expected 1 to 6")
    scores = None
    if PREFIX + "scores" in file.metadata:
        scores = empty.numbers("scores", count, (int, float))
    # Conversion has called a row without a token so, of the kind USER in its early versions.
    kinds = [UNUSED if tokens[i] == f"[PAD{i}]" else kind for i, kind in enumerate(kinds)]
    while count and kinds[count - 1] == UNUSED:
        count -= 1
    embedding = file.tensors.get("token_embd.weight")
    rows = embedding.shape[0] if embedding else count
    if not 0 < count <= rows:
        raise empty.bad("tokens", f"{count} are in use, expected 1 to {rows}, as"
                        " token_embd.weight has rows")  # fmt: skip
    for i, token in enumerate(tokens[:count]):
        if not token:
            raise empty.bad("tokens", f"element {i} is empty")
    scores = scores and scores[:count]
    return Vocabulary(
        file.path, tokens[:count], kinds[:count], scores, _roles(empty, kinds), file.metadata
    )


def _roles(empty: Vocabulary, kinds: list[int]) -> dict[str, int]:
    """The ids of ROLES that the file names, of tokens that are in use."""
    roles = {}
    for role, word in ROLES.items():
        key = f"{word}_token_id"
        found = empty.metadata.get(PREFIX + key)
        if found is None:
            continue
        if type(found) is not int or not 0 <= found < len(kinds):
            raise empty.bad(key, f"found {ascii(found)[:80]}, expected an id below {len(kinds)}")
        if kinds[found] != UNUSED:
            roles[role] = found
    return roles
