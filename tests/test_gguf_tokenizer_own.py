"""Tokenizers of GGUF files in the file formats of their own publishers: RWKV, PLaMo 2, Kimi."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import test_tokenizer_plamo as plamo
import test_tokenizer_rwkv as world
import test_tokenizer_tiktoken as kimi
from gguf_vocabularies import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    made,
    of_keys,
    padded,
    pieces,
    same,
    write,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tokenizer_kinds import TEXTS
from tokenizers import pre_tokenizers

from runtime.server.template import special_tokens
from runtime.tokenizer import Tokenizer
from runtime.tokenizer_plamo import PlamoTokenizer
from runtime.tokenizer_rwkv import WorldTokenizer
from runtime.tokenizer_tiktoken import TiktokenTokenizer


def test_rwkv() -> None:
    original = world.vocabulary([t for t in world.LONG if len(t) > 1])
    wanted = WorldTokenizer(original)
    words = [wanted.piece(i) for i in range(wanted.size)]
    names = ["<s>", *(repr(word)[2:-1] for word in words[1:])]
    kinds = [CONTROL, *[NORMAL] * (len(words) - 1)]
    keys = {"ggml.model": "rwkv", **padded([n.encode() for n in names], kinds)}
    files = of_keys(keys | {"ggml.bos_token_id": 0, "ggml.eos_token_id": 0})
    config = files["tokenizer_config.json"]
    found = WorldTokenizer(files["rwkv_vocab_v20230424.txt"], config)
    assert found.size == wanted.size and [found.piece(i) for i in range(found.size)] == words
    for text in (*TEXTS, "it's 'say \"日本<s>\\x\r\n\n\u2028 é", "\\n\\\\"):
        same(wanted, found, text)
    end = special_tokens(json.loads(config))["bos_token"]
    assert found.encode(f"{end}a") == [0, *wanted.encode("a")]


def test_plamo2() -> None:
    rows = plamo.rows_of(plamo.PIECES)
    roles = {"bos": "<|plamo:bos|>", "eos": "<|plamo:eos|>", "pad": "<|plamo:pad|>"}
    original = json.dumps({f"{role}_token": word for role, word in roles.items()})
    wanted = PlamoTokenizer(plamo.lines(rows), original)
    names = {"NORMAL": NORMAL, "CONTROL": CONTROL, "UNKNOWN": UNKNOWN, "BYTE": BYTE}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "padding_token_id": 3, "unknown_token_id": 0}
    keys = pieces([(w.encode(), score, names[kind]) for w, score, kind in rows], **ids)
    keys |= {"ggml.model": "plamo2", "ggml.add_space_prefix": False, "ggml.add_bos_token": False}
    files = of_keys(keys)
    found = PlamoTokenizer(files["tokenizer.jsonl"], files["tokenizer_config.json"])
    assert found.size == wanted.size
    for text in (*TEXTS, "日本語です。  the é", "<|plamo:op|>a<|plamo:eos|><|plamo:unk|>"):
        same(wanted, found, text)
    files = of_keys(keys | {"ggml.add_bos_token": True})
    found = PlamoTokenizer(files["tokenizer.jsonl"], files["tokenizer_config.json"])
    assert found.encode("a") == [1, *wanted.encode("a")]


def test_plamo2_whose_begin_token_is_not_told(tmp_path: Path) -> None:
    rows = [(w, score, BYTE if kind == "BYTE" else NORMAL) for w, score, kind in
            plamo.rows_of(plamo.PIECES)]  # fmt: skip
    keys = pieces(rows) | {"ggml.model": "plamo2"}
    files, notes = made(write(tmp_path / "x.gguf", keys))
    assert "tokenizer.jsonl" in files and len(notes) == 1
    assert "add_bos_token is missing, so no begin token is put before a text" in notes[0]


@cache
def kimis() -> tuple[Tokenizer, Tokenizer]:
    """With one merge for each token in the file, as conversion keeps it, which is not looked at."""
    ranks = kimi.trained(400)
    names = ["[BOS]", "[EOS]", "<|im_end|>"]
    base = len(ranks)
    listed = {str(base + i): {"content": n, "special": True} for i, n in enumerate(names)}
    config = {"added_tokens_decoder": listed, "eos_token": "[EOS]"}
    wanted = TiktokenTokenizer(kimi.lines(ranks), json.dumps(config))
    byte = pre_tokenizers.ByteLevel.alphabet()
    table = {
        bytes([b]): c for b, c in zip(sorted(range(256), key=order), sorted(byte), strict=True)
    }
    words = ["".join(table[bytes([b])] for b in word) for word in ranks]
    words += [*names, *(f"<|reserved_token_{i}|>" for i in range(base + 3, base + 256))]
    keys = {"ggml.model": "gpt2", "ggml.pre": "kimi-k2", "ggml.merges": ["a b"]}
    keys |= padded(words, [NORMAL] * base + [CONTROL] * 256) | {"ggml.eos_token_id": base + 1}
    files = of_keys(keys | {"ggml.bos_token_id": base})
    return wanted, TiktokenTokenizer(files["tiktoken.model"], files["tokenizer_config.json"])


def order(byte: int) -> int:
    """Where a byte's character stands in the byte-level alphabet."""
    shown = 0x21 <= byte < 0x7F or 0xA1 <= byte < 0xAD or byte >= 0xAE
    return byte if shown else 0x100 + byte


@settings(max_examples=200, deadline=None)
@given(st.text(kimi.ALPHABET, max_size=30))
def test_kimi(text: str) -> None:
    same(*kimis(), text)


def test_kimi_vocabulary() -> None:
    wanted, found = kimis()
    assert found.size == wanted.size and found.pieces == wanted.pieces
