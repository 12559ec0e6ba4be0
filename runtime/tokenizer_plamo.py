"""PLaMo 2's own tokenizer: tokenizer.jsonl, pieces with scores, and bytes for all other characters.

Each line is `[piece, score, type, …]`, its number the id. A text is cut into the pieces whose
scores sum highest; a character that no piece covers costs 1000 and becomes the BYTE tokens
`<0xHH>` of its UTF-8. Sums are of integers, score × 10000 rounded half to even, from the end of the
text, and of equal sums the longest first piece wins: the rule of the vendor's tokenization_plamo.py
and of llama.cpp's `plamo2` (which besides drops a U+FEFF at the start of a text; the vendor keeps
it, and so does this).

Control tokens are pieces as all others: a text that holds `<|plamo:op|>` gives its id. Those that
tokenizer_config.json declares special (unk_token, bos_token, eos_token, pad_token …,
additional_special_tokens) and the tokens of added_tokens_decoder are cut out before, leftmost and
longest first; the special ones have no text when decoded. `add_bos_token` and `add_eos_token` there
put the tokens around a sequence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from runtime.errors import UserError
from runtime.text import Detokenizer, PieceDetokenizer
from runtime.tokenizer import CONFIG_NAME, Tokenizer, named, parse_object

FILE_NAME = "tokenizer.jsonl"
_SCALE = 10_000  # the integer unit of scores
_UNKNOWN = 10_000_000  # what a character costs that is spelled in bytes
_LIMIT = 1000  # of a score's size: at -1000 the vendor's table ends a list of pieces
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NEVER = {0xC0, 0xC1, *range(0xF5, 0x100)}  # in no UTF-8 text, so their tokens may be missing
_NAMES = (
    "unk_token",
    "bos_token",
    "eos_token",
    "pad_token",
    "cls_token",
    "sep_token",
    "mask_token",
)
_DEFAULTS = {
    "unk_token": "<|plamo:unk|>",
    "bos_token": "<|plamo:bos|>",
    "eos_token": "<|plamo:eos|>",
    "pad_token": "<|plamo:pad|>",
}


class PlamoTokenizer(Tokenizer):
    """Text to ids and back. `path` only names tokenizer.jsonl in messages."""

    def __init__(self, text: str, config: str = "{}", path: Path = Path(FILE_NAME)) -> None:
        config_path = path.with_name(CONFIG_NAME)
        self._words, self._bytes, self._costs = _read(text, path)
        self._ids = {word: i for i, word in enumerate(self._words)}
        self._byte_of = {token: byte for byte, token in self._bytes.items()}
        lengths: dict[str, set[int]] = {}
        for word in self._costs:
            lengths.setdefault(word[0], set()).add(len(word))
        self._lengths = {first: sorted(each, reverse=True) for first, each in lengths.items()}
        self._special = _Special.read(parse_object(config, config_path), self._ids, config_path)

    @property
    def size(self) -> int:
        """Number of tokens."""
        return len(self._words)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids of `text`; with `special`, also the tokens the config puts around a sequence.

        Raises UserError if the text is not Unicode (lone surrogates).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"prompt: not UTF-8 at character {error.start}, expected UTF-8 text"
            ) from error
        ids = list(self._special.before) if special else []
        for part in self._special.split(text):
            if part in self._special.cut:
                ids.append(self._special.cut[part])
            else:
                ids += self._pieces_of(part)
        return ids + list(self._special.after) if special else ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of all of `ids` at once, special tokens left out."""
        return b"".join(map(self.piece, ids)).decode("utf-8", "replace")

    def stream(self, prompt: Sequence[int] = ()) -> Detokenizer:
        """A detokenizer for text that continues `prompt`."""
        return PieceDetokenizer(self.piece, prompt)

    def piece(self, token: int) -> bytes:
        """Bytes that `token` stands for; none for special or unknown ids."""
        if not 0 <= token < len(self._words) or token in self._special.silent:
            return b""
        if token in self._byte_of:
            return bytes([self._byte_of[token]])
        return self._words[token].encode()

    def _label(self, token: int) -> tuple[str, bytes | None]:
        if not 0 <= token < len(self._words):
            return f"token_id:{token}", None
        if token in self._special.silent:
            return self._words[token], None
        return named(data := self.piece(token)), data

    def _pieces_of(self, text: str) -> list[int]:
        """Ids of a text without special tokens: the cheapest cut, found from its end."""
        costs, lengths, size = self._costs, self._lengths, len(text)
        best = [0] * (size + 1)  # the cost from each character to the end
        taken = [0] * size  # the length of the first piece there; 0 for bytes
        for i in range(size - 1, -1, -1):
            least, length = None, 0
            for each in lengths.get(text[i], ()):
                if i + each > size:
                    continue
                cost = costs.get(text[i : i + each])
                if cost is not None and (least is None or cost + best[i + each] < least):
                    least, length = cost + best[i + each], each
            if least is None or _UNKNOWN + best[i + 1] < least:
                least, length = _UNKNOWN + best[i + 1], 0
            best[i], taken[i] = least, length
        ids, i = [], 0
        while i < size:
            length = taken[i]
            if length:
                ids.append(self._ids[text[i : i + length]])
            else:
                ids += [self._bytes[byte] for byte in text[i].encode()]
            i += length or 1
        return ids


def _read(text: str, path: Path) -> tuple[list[str], dict[int, int], dict[str, int]]:
    """The pieces by id, the token of each byte, and the costs of what text is cut into."""
    words: list[str] = []
    lines: dict[str, int] = {}
    bytes_: dict[int, int] = {}
    costs: dict[str, int] = {}
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        try:
            word, score, kind = _row(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{path}:{number}: {error}; expected [piece, score, type] as JSON"
            ) from error
        if word in lines:
            raise UserError(f"{path}:{number}: piece {word!r} is on line {lines[word]} already")
        lines[word] = number
        if kind == "BYTE":
            match = _BYTE.fullmatch(word)
            if match is None:
                raise UserError(f"{path}:{number}: BYTE piece {word!r}, expected <0x00> to <0xFF>")
            bytes_[int(match[1], 16)] = len(words)
        else:
            costs[word] = -round(score * _SCALE)
        words.append(word)
    missing = sorted(set(range(256)) - set(bytes_) - _NEVER)
    if missing:
        raise UserError(
            f"{path}: no BYTE piece <0x{missing[0]:02X}> ({len(missing)} of 256 are missing),"
            " so some text has no tokens"
        )
    return words, bytes_, costs


def _row(row: Any) -> tuple[str, float, str]:
    """The piece, score and type of one line. Raises ValueError that says what is wrong."""
    if not isinstance(row, list) or len(row) < 2:
        raise ValueError(f"found {json.dumps(row)[:80]}")
    word, score, kind = row[0], row[1], row[2] if len(row) > 2 else "NORMAL"
    if not isinstance(word, str) or not word:
        raise ValueError(f"piece is {json.dumps(word)[:80]}")
    try:
        word.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"piece {json.dumps(word)[:80]} is not Unicode text") from error
    if isinstance(score, bool) or not isinstance(score, (int, float)) or not abs(score) < _LIMIT:
        raise ValueError(f"score is {json.dumps(score)[:80]}, of a size below {_LIMIT} if usable")
    if not isinstance(kind, str):
        raise ValueError(f"type is {json.dumps(kind)[:80]}")
    return word, score, kind


@dataclass(frozen=True)
class _Special:
    """What tokenizer_config.json says: tokens to `cut` out of a text and their ids, the `silent`
    ids, which have no text, and the ids `before` and `after` a sequence."""

    cut: Mapping[str, int]
    silent: frozenset[int]
    before: tuple[int, ...]
    after: tuple[int, ...]

    @classmethod
    def read(cls, config: Mapping[str, Any], ids: Mapping[str, int], path: Path) -> _Special:
        """Raises UserError that names `path` if the config contradicts the pieces."""
        named_: dict[str, Any] = {name: _content(config.get(name)) for name in _NAMES}
        for name, word in _DEFAULTS.items():
            if name not in config and word in ids:
                named_[name] = word
        words = [word for word in named_.values() if word is not None]
        for key in ("additional_special_tokens", "extra_special_tokens"):
            words += map(_content, _typed(config, key, list, path) or ())
        for word in words:
            if not isinstance(word, str) or word not in ids:
                raise UserError(f"{path}: special token {word!r} is not in {FILE_NAME}")
        cut = {word: ids[word] for word in words}
        silent = set(cut.values())
        for key, token in (_typed(config, "added_tokens_decoder", dict, path) or {}).items():
            word, silences = _added(key, token, ids, path)
            cut[word] = ids[word]
            silent |= {ids[word]} if silences else set()
        before, after = (_edge(config, named_, name, ids, path) for name in ("bos", "eos"))
        return cls(cut, frozenset(silent), before, after)

    def split(self, text: str) -> list[str]:
        """`text` in parts, each of them in `cut` or without any that is."""
        return self._pattern.split(text) if self.cut else [text]

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        words = sorted(self.cut, key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, words)) + ")")


def _typed(config: Mapping[str, Any], key: str, kind: type, path: Path) -> Any:
    """`config[key]`, None or of the given type. Raises UserError."""
    value = config.get(key)
    if value is not None and not isinstance(value, kind):
        raise UserError(f"{path}: {key} is {json.dumps(value)[:80]}, expected a {kind.__name__}")
    return value


def _content(token: Any) -> Any:
    """The text of a token in tokenizer_config.json: a string, or an object's `content`."""
    return token.get("content") if isinstance(token, dict) else token


def _added(key: str, token: Any, ids: Mapping[str, int], path: Path) -> tuple[str, bool]:
    """The text of a row of added_tokens_decoder, and whether it is special. Raises UserError."""
    word = _content(token)
    if not isinstance(word, str) or str(ids.get(word)) != key:
        found = ids.get(word) if isinstance(word, str) else None
        raise UserError(
            f"{path}: added_tokens_decoder gives {word!r} the id {key}, expected {found} as in"
            f" {FILE_NAME}; fix the checkpoint's tokenizer and rebuild"
        )
    flags = token if isinstance(token, dict) else {}
    for name in ("lstrip", "rstrip", "single_word"):
        if flags.get(name):
            raise UserError(f"{path}: added_tokens_decoder: {word!r} sets {name}, not supported")
    return word, bool(flags.get("special"))


def _edge(
    config: Mapping[str, Any],
    words: Mapping[str, Any],
    name: str,
    ids: Mapping[str, int],
    path: Path,
) -> tuple[int, ...]:
    """The token that add_<name>_token puts at an end of a sequence. Raises UserError."""
    key = f"add_{name}_token"
    if not _typed(config, key, bool, path):
        return ()
    word = words.get(f"{name}_token")
    if word is None:
        raise UserError(f"{path}: {key} is true, but there is no {name}_token in {FILE_NAME}")
    return (ids[word],)
