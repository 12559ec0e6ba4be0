"""GGUF metadata of which no tokenizer can be made, and metadata that is wrong."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from gguf_vocabularies import (
    BYTE,
    CONTROL,
    NORMAL,
    PADDING,
    UNUSED,
    byte_pairs,
    made,
    padded,
    pieces,
    write,
)
from test_gguf_tokenizer import gpt2, scored

from emit.errors import EmitError
from runtime.tokenizer import Tokenizer


def small(**changes: Any) -> dict[str, Any]:
    """The keys of a byte-level vocabulary; `changes` by names without `ggml.`."""
    keys = byte_pairs(gpt2(), "gpt-2", bos_token_id=0)
    return keys | {f"ggml.{name}": value for name, value in changes.items()}


def spm(**changes: Any) -> dict[str, Any]:
    return pieces(scored(), bos_token_id=1) | {f"ggml.{k}": v for k, v in changes.items()}


def flat() -> list[float]:
    return [-1000.0] * (len(scored()) + PADDING)


UNSAID: list[tuple[dict[str, Any], str]] = [
    ({}, "it holds no tokenizer"),
    ({"ggml.model": "none"}, "it holds no tokenizer"),
    ({"ggml.model": "t5"}, "tokenizer.ggml.model = 't5' is none of gpt2, llama, plamo2, rwkv"),
    (small(pre=None), "tokenizer.ggml.pre is missing"),
    (small(pre="jina-v2-de"), "tokenizer.ggml.pre = 'jina-v2-de' cuts a text is not known"),
    (small(add_space_prefix=True), "add_space_prefix of a gpt2 tokenizer is not supported"),
    (spm(scores=flat()), "scores are all the same: conversion from tokenizer.json has lost"),
    (
        pieces([(w, -1000, NORMAL) for w in ("a", "b", "ab", "abb")] + [("ba", 0, CONTROL)]),
        "scores are all the same",
    ),
    (spm(scores=[s - 0.5 for s in flat()]), "those of a unigram model"),
    (spm(remove_extra_whitespaces=True), "remove_extra_whitespaces is not supported"),
    ({"ggml.model": "rwkv", **padded(["a"], [NORMAL])}, "whose id 0 does not end a text"),
    (small(pre="kimi-k2", add_bos_token=True), "puts tokens around a text is not supported"),
    (small(pre="kimi-k2"), "other than control tokens"),
]


@pytest.mark.parametrize(("keys", "reason"), UNSAID, ids=[r for _, r in UNSAID])
def test_what_is_not_said_gives_no_tokenizer(
    keys: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    files, notes = made(write(tmp_path / "x.gguf", keys))
    assert files == {} and len(notes) == 1 and "\n" not in notes[0]
    assert reason in notes[0] and notes[0].startswith(f"{tmp_path / 'x.gguf'}: ")
    assert "takes token ids only: put the model's own tokenizer files beside" in notes[0]


def tokens_of(keys: dict[str, Any], **changed: Any) -> list[Any]:
    """The tokens of `keys` with others at some ids, given as `t<id>`."""
    tokens = list(keys["ggml.tokens"])
    for name, token in changed.items():
        tokens[int(name[1:])] = token
    return tokens


SMALL = small()
SIZE = len(SMALL["ggml.tokens"])
HOSTILE: list[tuple[dict[str, Any], str]] = [
    (small(tokens=None), "tokens: found None, expected an array of strings"),
    (small(tokens=[1, 2]), "tokens: found .* expected an array of strings"),
    (small(tokens=tokens_of(SMALL, t7=b"a\xff")), r"tokens: element 7 is not UTF-8: b'a\\xff'"),
    (small(tokens=tokens_of(SMALL, t7="")), "tokens: element 7 is empty"),
    (small(tokens=tokens_of(SMALL, t7=SMALL["ggml.tokens"][9])), "tokens: .* is both 7 and 9"),
    (small(token_type=[1]), f"token_type: 1 elements, expected {SIZE}, one for each token"),
    (small(token_type=[9] * SIZE), "token_type: element 0 is 9, expected 1 to 6"),
    (small(token_type=[UNUSED] * SIZE), "tokens: 0 are in use"),
    (small(token_type="x"), "token_type: found 'x', expected an array of numbers"),
    (small(merges=None), "merges: found None, expected an array of strings"),
    (small(merges=["a b"]), "merges: element 0 is 'a b', expected two tokens that"),
    (small(merges=["a zzzz"]), "merges: element 0 is 'a zzzz', expected two tokens"),
    (small(merges=["a"]), "merges: element 0 is 'a', expected two tokens"),
    (small(merges=[b"a \xff"]), "merges: element 0 is not UTF-8"),
    (small(pre=7), "pre: found 7, expected a string"),
    (small(bos_token_id=SIZE), f"bos_token_id: found {SIZE}, expected an id below {SIZE}"),
    (small(bos_token_id=True), "bos_token_id: found True, expected an id"),
    (small(add_bos_token=3), "add_bos_token: found 3, expected true or false"),
    (small(add_eos_token=True), "add_eos_token: is true, but eos_token_id is missing"),
    (small() | {"chat_template": 5}, "tokenizer.chat_template: found 5, expected text"),
    (spm(scores=None), "scores: missing, expected one for each token"),
    (spm(scores=[1.0]), "scores: 1 elements, expected"),
    (spm(tokens=tokens_of(spm(), t5="x" * 600)), "byte 5 is 'xxx.*, expected <0x00>"),
    (spm(tokens=tokens_of(spm(), t300="x" * 600)), "element 300 has 600 characters"),
    (pieces([("<0x00>", 0, BYTE), ("a", 0, NORMAL)]), "1 bytes, expected all 256 or none"),
    (
        {"ggml.model": "rwkv", **padded(["<s>", "\\q"], [CONTROL, NORMAL])},
        r"tokens: element 1 is b'\\\\q', expected bytes as Python shows them",
    ),
    (
        {"ggml.model": "rwkv", **padded(["<s>", "a", "\\x61"], [CONTROL, NORMAL, NORMAL])},
        "tokens: b'a' is both 1 and 2",
    ),
    (
        {"ggml.model": "rwkv", **padded(["<s>", "a"], [CONTROL, NORMAL])},
        "tokens: no token of the byte 0x00",
    ),
    (pieces([("a", 0, NORMAL)]) | {"ggml.model": "plamo2"}, "tokens: no bytes <0x00> to <0xFF>"),
    (
        spm(scores=[-2000.0] * len(flat())) | {"ggml.model": "plamo2"},
        "scores: element 0 is -2000.0, expected a size below 1000",
    ),
    (
        {"ggml.model": "gpt2", "ggml.pre": "kimi-k2", **padded(["語"], [NORMAL])},
        "tokens: element 0 is '.u8a9e', and '語' is no byte in GPT-2's alphabet",
    ),
    (
        {"ggml.model": "gpt2", "ggml.pre": "kimi-k2", **padded(["a"], [NORMAL])},
        "tokens: no token of the byte 0x21",
    ),
]


@pytest.mark.parametrize(("keys", "message"), HOSTILE, ids=[m for _, m in HOSTILE])
def test_what_is_wrong_is_refused_in_one_line(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.gguf"
    with pytest.raises(EmitError, match=message) as caught:
        made(write(path, keys))
    assert str(caught.value).startswith(f"{path}: tokenizer.") and "\n" not in str(caught.value)


def test_large_vocabularies_take_seconds(tmp_path: Path) -> None:
    """A quarter of a million tokens by merges, and by scores."""
    letters = [chr(0x4E00 + i) for i in range(500)]
    words = [*letters, *(a + b for a in letters for b in letters)]
    scores = [-float(i) for i in range(len(words))]
    started = time.monotonic()
    keys = pieces([(w, s, NORMAL) for w, s in zip(words, scores, strict=True)])
    files, _ = made(write(tmp_path / "scores.gguf", keys | {"ggml.add_bos_token": False}))
    assert Tokenizer(files["tokenizer.json"]).size == len(words)
    keys = {"ggml.model": "gpt2", "ggml.pre": "gpt-2", **padded(words, [NORMAL] * len(words))}
    keys["ggml.merges"] = [" ".join(word) for word in words[500:]]
    files, _ = made(write(tmp_path / "merges.gguf", keys))
    assert Tokenizer(files["tokenizer.json"]).size == len(words)
    assert time.monotonic() - started < 60  # 7 s on two cores, writing the files included
