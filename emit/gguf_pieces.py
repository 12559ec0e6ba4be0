"""Tokenizers of a GGUF file that cut a text into pieces: SentencePiece's, PLaMo 2's and RWKV's.

`llama` becomes tokenizer.json, with merges that follow from the scores; `plamo2` and `rwkv` the
files tokenizer.jsonl and rwkv_vocab_v20230424.txt of their own publishers.
"""

from __future__ import annotations

import json
import re
from typing import Any

from emit.gguf_bpe import added_tokens, around
from emit.gguf_vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER, Unknown, Vocabulary

SPACE = "\u2581"  # what SentencePiece writes for a space
LONGEST = 512  # characters of a piece that has merges
WORLD_END = "<|rwkv_tokenizer_end_of_text|>"  # id 0; conversion calls it <s>, which is HTML too
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_ESCAPE = re.compile(rb"\\(?:x([0-9a-f]{2})|(.))|[ -~]", re.DOTALL)
_ESCAPES = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"\\": b"\\", b"'": b"'", b'"': b'"'}


def tokenizer_json(found: Vocabulary) -> dict[str, Any]:
    """The content of tokenizer.json of a `llama` tokenizer. Raises Unknown, and EmitError."""
    if found.flag("remove_extra_whitespaces", False):
        raise Unknown("tokenizer.ggml.remove_extra_whitespaces is not supported")
    prefix = found.flag("add_space_prefix", True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    normalizers = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    unknown = [i for i, kind in enumerate(found.kinds) if kind == UNKNOWN]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens(found),
        "normalizer": {"type": "Sequence", "normalizers": [*normalizers, spaces]},
        "pre_tokenizer": None,
        "post_processor": around(found, begins=True),
        "decoder": {
            "type": "Sequence",
            "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": found.tokens[unknown[0]] if unknown else None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": bool(_byte_tokens(found)),
            "ignore_merges": False,
            "vocab": found.ids,
            "merges": _merges(found),
        },
    }


def _byte_tokens(found: Vocabulary) -> dict[int, int]:
    """Byte -> id, of all 256 or none."""
    tokens: dict[int, int] = {}
    for i, kind in enumerate(found.kinds):
        if kind == BYTE:
            match = _BYTE.fullmatch(found.tokens[i])
            if match is None:
                raise found.bad("tokens", f"byte {i} is {found.tokens[i]!a}, expected <0x00> to"
                                " <0xFF>")  # fmt: skip
            tokens[int(match[1], 16)] = i
    if tokens and len(tokens) < 256:
        raise found.bad("tokens", f"{len(tokens)} bytes, expected all 256 or none")
    return tokens


def _merges(found: Vocabulary) -> list[tuple[str, str]]:
    """The pairs that make a piece, the best score first; of one piece, the longest first part.

    Raises Unknown where the scores are not those of byte pairs.
    """
    scores, ids = _scores(found), found.ids
    rows: list[tuple[float, int, str, str]] = []
    made = set()
    for i, piece in enumerate(found.tokens):
        if len(piece) > LONGEST:
            raise found.bad("tokens", f"element {i} has {len(piece)} characters, expected at most"
                            f" {LONGEST}")  # fmt: skip
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in ids and right in ids:
                rows.append((-scores[i], -at, left, right))
                made |= {scores[i]} if found.kinds[i] == NORMAL else set()
    if any(not float(score).is_integer() for score in made):
        raise Unknown("tokenizer.ggml.scores are not whole numbers: those of a unigram model, which"
                      " the file does not hold in full")  # fmt: skip
    if len(made) < min(len(rows), 2):
        raise Unknown("tokenizer.ggml.scores are all the same: conversion from tokenizer.json has"
                      " lost in what order pieces are merged")  # fmt: skip
    rows.sort(key=lambda row: row[:2])
    return [(left, right) for _, _, left, right in rows]


def _scores(found: Vocabulary) -> list[float]:
    if found.scores is None:
        raise found.bad("scores", "missing, expected one for each token")
    return found.scores


def plamo_jsonl(found: Vocabulary) -> str:
    """The text of tokenizer.jsonl: a line `[piece, score, type]` for each id."""
    scores = _scores(found)
    names = {NORMAL: "NORMAL", UNKNOWN: "UNKNOWN", CONTROL: "CONTROL", BYTE: "BYTE"}
    if len(_byte_tokens(found)) < 256:
        raise found.bad("tokens", "no bytes <0x00> to <0xFF>, so some text has no tokens")
    lines = []
    for i, token in enumerate(found.tokens):
        if found.kinds[i] not in names:
            raise Unknown(f"a plamo2 tokenizer with a token of type {found.kinds[i]} is not"
                          " supported")  # fmt: skip
        if not abs(scores[i]) < 1000:
            raise found.bad("scores", f"element {i} is {scores[i]}, expected a size below 1000")
        row = [token, scores[i], names[found.kinds[i]]]
        lines.append(json.dumps(row, ensure_ascii=False))
    assert len(found.ids) == len(found.tokens)  # as duplicates are refused
    return "\n".join(lines) + "\n"


def world_text(found: Vocabulary) -> tuple[str, dict[str, dict[str, Any]]]:
    """The text of rwkv_vocab_v20230424.txt, and the `added_tokens_decoder` of what is not in it.

    A token in the file is what Python shows of its bytes, between the quotation marks.
    """
    if found.kinds[0] != CONTROL or UNKNOWN in found.kinds or BYTE in found.kinds:
        raise Unknown("an rwkv tokenizer whose id 0 does not end a text is not supported")
    if found.flag("add_bos_token", False) or found.flag("add_eos_token", False):
        raise Unknown("an rwkv tokenizer that puts tokens around a text is not supported")
    lines, added = [], {"0": {"content": WORLD_END, "special": True}}
    seen: dict[bytes, int] = {}
    for i, token in enumerate(found.tokens):
        kind = found.kinds[i]
        if i and kind in (CONTROL, USER):
            added[str(i)] = {"content": token, "special": kind == CONTROL}
        if not i or kind in (CONTROL, USER, UNUSED):
            continue
        word = _unescaped(found, i)
        if seen.setdefault(word, i) != i:
            raise found.bad("tokens", f"{word[:40]!r} is both {seen[word]} and {i}")
        lines.append(f"{i} {word!r} {len(word)}")
    missing = [b for b in range(0xF5) if bytes([b]) not in seen and b not in (0xC0, 0xC1)]
    if missing:  # others are in no UTF-8 text
        raise found.bad("tokens", f"no token of the byte 0x{missing[0]:02X}, so some text has none")
    return "\n".join(lines) + "\n", added


def _unescaped(found: Vocabulary, i: int) -> bytes:
    data, parts, at = found.tokens[i].encode(), [], 0
    while at < len(data):
        match = _ESCAPE.match(data, at)
        code, char = (match[1], match[2]) if match else (None, b"?")
        if match is None or (char is not None and char not in _ESCAPES):
            raise found.bad("tokens", f"element {i} is {data[:40]!r}, expected bytes as Python"
                            " shows them")  # fmt: skip
        plain = match[0] if char is None else _ESCAPES[char]
        parts.append(bytes([int(code, 16)]) if code else plain)
        at = match.end()
    return b"".join(parts)
