"""RWKV's "world" tokenizer: a text file of byte strings, the longest that fits taken each time.

Each line of rwkv_vocab_v20230424.txt is `<id> <literal> <length>`: the id, the token as a Python
string or bytes literal, its length in bytes (https://github.com/BlinkDL/RWKV-LM, whose own reader
evaluates the literal as code; here it has to be one literal, and nothing is evaluated). Id 0 is in
no line: it ends a text, and has no text of its own.

tokenizer_config.json may name more tokens (`added_tokens_decoder`), which are cut out of a text
before, leftmost and longest first; the special ones have no text when decoded. With
`add_bos_token`, `bos_token` goes before a sequence.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime.errors import UserError
from runtime.text import Detokenizer, PieceDetokenizer
from runtime.tokenizer import CONFIG_NAME, Tokenizer, named, parse_object

FILE_NAME = "rwkv_vocab_v20230424.txt"
END_OF_TEXT = 0
_LINE = re.compile(r"""(\d{1,7}) (b?(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")) (\d{1,9})""", re.ASCII)
_NEVER = {0xC0, 0xC1, *range(0xF5, 0x100)}  # in no UTF-8 text, so their tokens may be missing


class WorldTokenizer(Tokenizer):
    """Text to ids and back. `path` only names the vocabulary in messages."""

    def __init__(self, text: str, config: str = "{}", path: Path = Path(FILE_NAME)) -> None:
        config_path = path.with_name(CONFIG_NAME)
        self._words = _read(text, path)
        self._ids = {word: token for token, word in self._words.items()}
        self._size = max(self._words) + 1
        lengths: dict[bytes, set[int]] = {}
        for word in self._ids:
            lengths.setdefault(word[:2], set()).add(len(word))
        self._lengths = {start: sorted(each, reverse=True) for start, each in lengths.items()}
        read = parse_object(config, config_path)
        self._added, silent = _added(read, self._words, config_path)
        self._silent = frozenset({END_OF_TEXT, *silent})
        self._names = {token: word for word, token in self._added.items()}
        words = sorted(self._added, key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, words)) + ")") if words else None
        self._before = _before(read, self._added, config_path)

    @property
    def size(self) -> int:
        """Number of tokens, that of id 0 and added ones included."""
        return max([self._size, *(token + 1 for token in self._names)])

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids of `text`; with `special`, also the token the config puts before a sequence.

        Raises UserError if the text is not Unicode (lone surrogates).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"prompt: not UTF-8 at character {error.start}, expected UTF-8 text"
            ) from error
        ids = list(self._before) if special else []
        for part in self._pattern.split(text) if self._pattern else [text]:
            if part in self._added:
                ids.append(self._added[part])
            else:
                ids += self._longest(part.encode())
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of all of `ids` at once, special tokens left out."""
        return b"".join(map(self.piece, ids)).decode("utf-8", "replace")

    def stream(self, prompt: Sequence[int] = ()) -> Detokenizer:
        """A detokenizer for text that continues `prompt`."""
        return PieceDetokenizer(self.piece, prompt)

    def piece(self, token: int) -> bytes:
        """Bytes that `token` stands for; none for special or unknown ids."""
        if token in self._silent:
            return b""
        if token in self._names:
            return self._names[token].encode()
        return self._words.get(token, b"")

    def _label(self, token: int) -> tuple[str, bytes | None]:
        data = self.piece(token)
        if token in self._silent or not data:
            return self._names.get(token, f"token_id:{token}"), None
        return named(data), data

    def _longest(self, data: bytes) -> list[int]:
        """Ids of a text without added tokens."""
        ids, at, size = [], 0, len(data)
        while at < size:
            # A token of one byte is its own start, one of more is found by its first two.
            for length in (*self._lengths.get(data[at : at + 2], ()), 1):
                token = self._ids.get(data[at : at + length])
                if token is not None and at + length <= size:
                    ids.append(token)
                    at += length
                    break
            else:  # no UTF-8 text has such a byte
                raise AssertionError(f"no token begins with {data[at : at + 1]!r}")
        return ids


def _read(text: str, path: Path) -> dict[int, bytes]:
    """Id → bytes. Raises UserError that names the line."""
    words: dict[int, bytes] = {}
    lines: dict[bytes, int] = {}
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        match = _LINE.fullmatch(line.removesuffix("\r"))
        word = _literal(match[2]) if match else None
        if match is None or not word:
            raise UserError(
                f"{path}:{number}: found {line[:80]!r}, expected an id, a string or bytes literal"
                " and its length in bytes, a space between them"
            )
        token, length = int(match[1]), int(match[3])
        if length != len(word):
            raise UserError(f"{path}:{number}: length {length}, but {word!r} has {len(word)} bytes")
        if token == END_OF_TEXT or token in words:
            found = "ends a text" if token == END_OF_TEXT else f"is that of {words[token]!r} too"
            raise UserError(f"{path}:{number}: id {token} {found}, expected one for each token")
        if word in lines:
            raise UserError(f"{path}:{number}: token {word!r} is on line {lines[word]} already")
        words[token], lines[word] = word, number
    missing = [byte for byte in range(256) if bytes([byte]) not in lines and byte not in _NEVER]
    if missing:
        raise UserError(
            f"{path}: no token of the byte 0x{missing[0]:02X} ({len(missing)} of 256 are missing),"
            " so some text has no tokens"
        )
    return words


def _literal(text: str) -> bytes | None:
    """The bytes of one string or bytes literal; None if it is malformed."""
    if "\\" not in text and text[0] != "b":
        return text[1:-1].encode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of an escape that Python does not know
            value = ast.literal_eval(text)
        return value if isinstance(value, bytes) else value.encode()
    except (ValueError, SyntaxError):  # a bad escape, a lone surrogate
        return None


def _added(
    config: Mapping[str, Any], words: Mapping[int, bytes], path: Path
) -> tuple[dict[str, int], set[int]]:
    """The tokens of `added_tokens_decoder` with their ids, and which ids are special."""
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict):
        raise UserError(f"{path}: added_tokens_decoder is {json.dumps(listed)[:80]}, not an object")
    added, silent = {}, set()
    for key, fields in listed.items():
        word = fields.get("content") if isinstance(fields, dict) else fields
        text = word if isinstance(word, str) and not re.search("[\ud800-\udfff]", word) else ""
        if not text or not re.fullmatch(r"[0-9]{1,7}", key):
            raise UserError(
                f"{path}: added_tokens_decoder: found {key!r}: {json.dumps(fields)[:80]},"
                " expected an id and a token"
            )
        token, flags = int(key), fields if isinstance(fields, dict) else {}
        for name in ("lstrip", "rstrip", "single_word"):
            if flags.get(name):
                raise UserError(
                    f"{path}: added_tokens_decoder: {word!r} sets {name}, not supported"
                )
        if text in added or words.get(token, text.encode()) != text.encode():
            raise UserError(
                f"{path}: added_tokens_decoder gives {text!r} the id {key}, which is"
                f" {words.get(token, text)!r} in {FILE_NAME} or here"
            )
        added[text] = token
        silent |= {token} if flags.get("special") else set()
    return added, silent


def _before(config: Mapping[str, Any], added: Mapping[str, int], path: Path) -> tuple[int, ...]:
    """The token that `add_bos_token` puts before a sequence. Raises UserError."""
    if config.get("add_bos_token") not in (True, False, None):
        raise UserError(f"{path}: add_bos_token is {config['add_bos_token']!r}, expected a bool")
    if not config.get("add_bos_token"):
        return ()
    word = config.get("bos_token")
    word = word.get("content") if isinstance(word, dict) else word
    if not isinstance(word, str) or word not in added:
        raise UserError(
            f"{path}: add_bos_token is true, but bos_token {word!r} is not in added_tokens_decoder"
        )
    return (added[word],)
