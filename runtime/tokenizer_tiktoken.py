"""Kimi's tokenizer: tiktoken.model, byte pairs by rank, and special tokens by number.

Each line is a token's bytes in base64 and its number, which is its rank too: text is cut by
`PATTERN`, and in each part the two neighbours of the lowest joint rank, the first of equals, become
one token until none are left. The 256 numbers behind the ranks are special tokens, with the names
that `added_tokens_decoder` of tokenizer_config.json gives them, or `<|reserved_token_N|>`; they are
cut out of a text first, leftmost and longest first. No token is put around a sequence.

This is the rule of the vendor's tokenization_kimi.py and of the package `tiktoken` (which is not
needed). Of a text with 25,000 characters in a row that are all white space, or none, the vendor
encodes the pieces by themselves, and so does this. Its two special tokens past the model's
vocabulary are left out.
"""

from __future__ import annotations

import base64
import binascii
import heapq
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from runtime.errors import UserError
from runtime.text import Detokenizer, PieceDetokenizer
from runtime.tokenizer import CONFIG_NAME, Tokenizer, named, parse_object

FILE_NAME = "tiktoken.model"
CLASS = "TikTokenTokenizer"  # what tokenizer_config.json says of files that PATTERN is for
RESERVED = 256  # numbers of special tokens
PIECE, RUN = 400_000, 25_000  # characters that are encoded at once, and of one kind in a row
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_WORD = r"[^\r\n\p{L}\p{N}]?%s(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        _WORD % f"{_UPPER}*{_LOWER}+",
        _WORD % f"{_UPPER}+{_LOWER}*",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


class TiktokenTokenizer(Tokenizer):
    """Text to ids and back. `path` only names tiktoken.model in messages."""

    def __init__(self, text: str, config: str = "{}", path: Path = Path(FILE_NAME)) -> None:
        import tokenizers

        config_path = path.with_name(CONFIG_NAME)
        self._ranks = _read(text, path)
        self._words = list(self._ranks)
        parsed = parse_object(config, config_path)
        specials, silent = _specials(parsed, len(self._words), config_path)
        self._special = {word: len(self._words) + i for i, word in enumerate(specials)}
        self._words += [word.encode() for word in specials]
        self._silent = silent
        longest = sorted(self._special, key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, longest)) + ")")
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated")
        self._parts = split.pre_tokenize_str
        self._ids_of = lru_cache(1 << 16)(self._merged)

    @property
    def size(self) -> int:
        """Number of tokens, special ones included."""
        return len(self._words)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids of `text`. This tokenizer puts nothing around a sequence, whatever `special`.

        Raises UserError if the text is not Unicode (lone surrogates).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"prompt: not UTF-8 at character {error.start}, expected UTF-8 text"
            ) from error
        ids: list[int] = []
        for piece in _pieces(text):
            for i, part in enumerate(self._cut.split(piece)):
                if i % 2:
                    ids.append(self._special[part])
                elif part:
                    for word, _ in self._parts(part):
                        ids += self._ids_of(word)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of all of `ids` at once, special tokens left out."""
        return b"".join(map(self.piece, ids)).decode("utf-8", "replace")

    def stream(self, prompt: Sequence[int] = ()) -> Detokenizer:
        """A detokenizer for text that continues `prompt`."""
        return PieceDetokenizer(self.piece, prompt)

    def piece(self, token: int) -> bytes:
        """Bytes that `token` stands for; none for special or unknown ids."""
        if not 0 <= token < len(self._words) or token in self._silent:
            return b""
        return self._words[token]

    def _label(self, token: int) -> tuple[str, bytes | None]:
        if not 0 <= token < len(self._words):
            return f"token_id:{token}", None
        if token in self._silent:
            return self._words[token].decode(), None
        return named(data := self._words[token]), data

    def _merged(self, word: str) -> tuple[int, ...]:
        """Ids of one part of a text.

        `ends[i]` is where the token that begins at byte i ends, 0 if none does; `before[i]` is
        where the token before it begins. Entries of the heap that an earlier merge has overtaken
        are passed over.
        """
        ranks, data = self._ranks, word.encode()
        if data in ranks:
            return (ranks[data],)
        size = len(data)
        ends, before = list(range(1, size + 1)), list(range(-1, size))
        heap = [
            (rank, i, i + 2)
            for i in range(size - 1)
            if (rank := ranks.get(data[i : i + 2])) is not None
        ]
        heapq.heapify(heap)

        def offer(i: int) -> None:
            j = ends[i]
            if j < size and (rank := ranks.get(data[i : ends[j]])) is not None:
                heapq.heappush(heap, (rank, i, ends[j]))

        while heap:
            _, i, end = heapq.heappop(heap)
            second = ends[i]
            if not second or second >= size or ends[second] != end:
                continue
            ends[i], ends[second] = end, 0
            before[end] = i
            offer(i)
            if i:
                offer(before[i])
        ids, i = [], 0
        while i < size:
            ids.append(ranks[data[i : ends[i]]])
            i = ends[i]
        return tuple(ids)


def _pieces(text: str) -> Iterator[str]:
    """`text` cut so that none is longer than PIECE or has a run of one kind above RUN."""
    for start in range(0, len(text), PIECE):
        part, at = text[start : start + PIECE], 0
        for match in _RUNS.finditer(part):
            for cut in range(match.start() + RUN, match.end(), RUN):
                yield part[at:cut]
                at = cut
        yield part[at:]


_RUNS = re.compile(rf"\s{{{RUN + 1},}}|\S{{{RUN + 1},}}")


def _read(text: str, path: Path) -> dict[bytes, int]:
    """The tokens by rank. Raises UserError that names the line."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        word, _, rank = line.partition(" ")
        try:
            data = base64.b64decode(word, validate=True)
        except (binascii.Error, ValueError):
            data = b""
        if not data or rank.strip() != str(number - 1):
            raise UserError(
                f"{path}:{number}: found {line[:80]!r}, expected a token in base64 and its rank"
                f" {number - 1}"
            )
        if data in ranks:
            raise UserError(f"{path}:{number}: token {data!r} is on line {ranks[data] + 1} already")
        ranks[data] = number - 1
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise UserError(
            f"{path}: no token for byte 0x{missing[0]:02X} ({len(missing)} of 256 are missing), so"
            " some text has no tokens"
        )
    return ranks


def _specials(config: Mapping[str, Any], base: int, path: Path) -> tuple[list[str], frozenset[int]]:
    """The special tokens from number `base` on, and the numbers of those without text.

    Raises UserError that names `path`.
    """
    kind = config.get("tokenizer_class", CLASS)
    if kind != CLASS:
        raise UserError(
            f"{path}: tokenizer_class is {json.dumps(kind)[:80]}, expected {CLASS!r}: how"
            f" {FILE_NAME} of another class cuts a text is not known"
        )
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict):
        raise UserError(
            f"{path}: added_tokens_decoder is {json.dumps(listed)[:80]}, expected an object"
        )
    names = {i: f"<|reserved_token_{i}|>" for i in range(base, base + RESERVED)}
    silent = set(names)
    for key, token in listed.items():
        number, word, spoken = _added(key, token, base, path)
        names[number] = word
        if spoken:
            silent.discard(number)
    words = list(names.values())
    for role in _ROLES:
        word = config.get(role)
        word = word.get("content") if isinstance(word, dict) else word
        if word is not None and word not in words:
            raise UserError(
                f"{path}: {role} is {json.dumps(word)[:80]}, which is none of the special tokens"
            )
        if word is not None:
            silent.add(base + words.index(word))
    if len(set(words)) != len(words):
        twice = next(word for word in words if words.count(word) > 1)
        raise UserError(f"{path}: added_tokens_decoder has {twice!r} twice")
    return words, frozenset(silent)


def _added(key: str, token: Any, base: int, path: Path) -> tuple[int, str, bool]:
    """One row of added_tokens_decoder: number, name, and whether it has text."""
    word = token.get("content") if isinstance(token, dict) else token
    number = int(key) if re.fullmatch("[0-9]{1,9}", key) else -1
    if not base <= number < base + RESERVED:
        raise UserError(
            f"{path}: added_tokens_decoder has the number {key!r}, expected {base} to"
            f" {base + RESERVED - 1}, which follow the ranks of {FILE_NAME}"
        )
    if not isinstance(word, str) or not word or not word.isprintable():
        raise UserError(
            f"{path}: added_tokens_decoder gives {key} the name {json.dumps(word)[:80]},"
            " expected a text"
        )
    flags = token if isinstance(token, dict) else {}
    for name in ("lstrip", "rstrip", "single_word"):
        if flags.get(name):
            raise UserError(f"{path}: added_tokens_decoder: {word!r} sets {name}, not supported")
    return number, word, not flags.get("special", True)
