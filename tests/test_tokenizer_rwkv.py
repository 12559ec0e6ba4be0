"""RWKV's tokenizer against the longest match by search, and its file against what it may hold."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import UserError
from runtime.manifest import FileRef
from runtime.tokenizer import Tokenizer, load
from runtime.tokenizer_rwkv import FILE_NAME, WorldTokenizer

# Tokens that are no characters, with either quote in them, and longer ones without the shorter.
LONG = [
    b"ab", b"abcd", b"abcde", b"bc", b"'", b'"', b"it's", b'say "', b"'\"", b"\r\n", b"\n\n",
    "日".encode(), "日本".encode(), "日".encode()[:2], "本".encode()[1:] + b"a", b"\xff\xfe",
    b" the", b"\\x", "\u2028".encode() + b" ", "é".encode(), "🦜".encode()[:3], b"x" * 120,
]  # fmt: skip
END = {"0": {"content": "<|end|>", "special": True}}


def vocabulary(tokens: Sequence[bytes]) -> str:
    """The file: text literals where the bytes are text, as in the published one."""
    lines = []
    for i, token in enumerate([bytes([byte]) for byte in range(256)] + list(tokens), 1):
        try:
            literal = repr(token.decode())
        except UnicodeDecodeError:
            literal = repr(token)
        lines.append(f"{i} {literal} {len(token)}\n")
    return "".join(lines)


@cache
def small() -> WorldTokenizer:
    return WorldTokenizer(
        vocabulary([t for t in LONG if len(t) > 1]), json.dumps({"added_tokens_decoder": END})
    )


def by_search(words: Sequence[bytes], data: bytes) -> list[bytes]:
    """The longest of `words` that `data` begins with, again and again."""
    found = []
    while data:
        found.append(max((w for w in words if data.startswith(w)), key=len))
        data = data[len(found[-1]) :]
    return found


pieces = st.lists(st.sampled_from("ab日".encode()), min_size=2, max_size=5).map(bytes)
tokens = st.lists(pieces | st.sampled_from(LONG), unique=True, max_size=8)


@settings(max_examples=200, deadline=None)
@given(tokens, st.text("ab日本cde'\"\r\n x", max_size=30))
def test_it_takes_the_longest_match(tokens: list[bytes], text: str) -> None:
    tokens = [t for t in tokens if len(t) > 1]
    tokenizer = WorldTokenizer(vocabulary(tokens))
    ids = tokenizer.encode(text)
    words = [bytes([byte]) for byte in range(256)] + tokens
    assert [words[i - 1] for i in ids] == by_search(words, text.encode())
    assert tokenizer.decode(ids) == text


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40))
def test_any_text_comes_back(text: str) -> None:
    tokenizer = small()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text.replace("<|end|>", "")
    stream = tokenizer.stream()
    assert "".join(map(stream.push, ids)) + stream.finish() == tokenizer.decode(ids)


def test_names_and_pieces() -> None:
    tokenizer = small()
    assert tokenizer.size == len(tokenizer.pieces) == 257 + len([t for t in LONG if len(t) > 1])
    assert tokenizer.label(1 + ord("a")) == ("a", b"a")
    assert tokenizer.label(0) == ("<|end|>", None)
    assert tokenizer.label(10_000) == ("token_id:10000", None)
    assert tokenizer.label(1 + 0xFF) == ("bytes:\\xff", b"\xff")
    assert WorldTokenizer(vocabulary([])).label(0) == ("token_id:0", None)
    assert tokenizer.decode([0, 1 + ord("a"), 0, 9999, 1 + ord("b")]) == "ab"
    assert tokenizer.decode([1 + 0xE6]) == "\ufffd"


def test_added_tokens_are_cut_out_longest_first() -> None:
    listed = {**END, "3": {"content": "\x02"}, "300": {"content": "<|end|>>"}}
    config = {"added_tokens_decoder": listed, "add_bos_token": True, "bos_token": "<|end|>"}
    tokenizer = WorldTokenizer(vocabulary([]), json.dumps(config))
    a = 1 + ord("a")
    assert tokenizer.encode("a<|end|>>a<|end|>a\x02") == [0, a, 300, a, 0, a, 3]
    assert tokenizer.encode("a", special=False) == [a]
    assert tokenizer.size == 301 and tokenizer.decode([0, 300, a]) == "<|end|>>a"
    assert tokenizer.encode("") == [0]


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(UserError, match="prompt: not UTF-8 at character 2"):
        small().encode("ab\udcff")


def test_line_ends_of_another_system_are_no_matter() -> None:
    text = vocabulary(LONG[:3])
    assert WorldTokenizer(text.replace("\n", "\r\n")).encode("abcd") == [258]


def test_a_long_text_takes_time_by_its_length() -> None:
    def seconds(text: str) -> float:
        start = time.perf_counter()
        assert small().decode(small().encode(text)) == text
        return time.perf_counter() - start

    text = "the the a 日本語です。\nz🦜"
    once = min(seconds(text * 400) for _ in range(3))
    assert seconds(text * 4000) < max(40 * once, 1.0)
    assert seconds("x" * 100_000) < 4


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("257 ab 2", "found '257 ab 2', expected an id"),
        ("257 'ab'", "expected an id"),
        ("257 'ab' 2 ", "expected an id"),
        ("-1 'ab' 2", "expected an id"),
        ("257  'ab' 2", "expected an id"),
        ("257 '' 0", "expected an id"),
        ("257 'a' 'b' 2", "expected an id"),
        ("257 __import__('os').system('x') 2", "expected an id"),
        ("257 f'{1}' 2", "expected an id"),
        ("257 '\\ud800' 3", "expected an id"),
        ("257 '\\q' 2", "expected an id"),
        ("257 b'日' 3", "expected an id"),
        ("99999999 'ab' 2", "expected an id"),
        ("257 'ab' 3", r"length 3, but b'ab' has 2 bytes"),
        ("257 '日' 1", "length 1, but"),
        ("0 'ab' 2", "id 0 ends a text"),
        ("98 'ab' 2", "id 98 is that of b'a' too"),
        ("257 'a' 1", "token b'a' is on line 98 already"),
        ("", "found '', expected an id"),
    ],
)
def test_malformed_lines_are_named(line: str, words: str) -> None:
    with pytest.raises(UserError, match=r"^here/rwkv_vocab_v20230424\.txt:257: ") as caught:
        WorldTokenizer(f"{vocabulary([])}{line}\n", path=Path("here") / FILE_NAME)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_byte_without_a_token_is_refused() -> None:
    with pytest.raises(UserError, match=r"no token of the byte 0x61 \(1 of 256 are missing\)"):
        WorldTokenizer(vocabulary([]).replace("98 'a' 1\n", ""))
    without = vocabulary([]).replace("256 b'\\xff' 1\n", "")
    assert WorldTokenizer(without).size == 256


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder is [1], not an object"),
        ({"added_tokens_decoder": {"x": {"content": "<s>"}}}, "found 'x': "),
        ({"added_tokens_decoder": {"1": {"content": 5}}}, "found '1': "),
        ({"added_tokens_decoder": {"98": {"content": "<s>"}}}, "'<s>' the id 98, which is b'a'"),
        (
            {"added_tokens_decoder": {"300": {"content": "<s>"}, "301": {"content": "<s>"}}},
            "'<s>' the id 301, which is '<s>' in",
        ),
        ({"added_tokens_decoder": {"300": {"content": "<s>", "lstrip": True}}}, "sets lstrip, not"),
        ({"add_bos_token": "yes"}, "add_bos_token is 'yes', expected a bool"),
        ({"add_bos_token": True, "bos_token": "<s>"}, "bos_token '<s>' is not in"),
    ],
)
def test_a_contradicting_config_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=r"^tokenizer_config\.json: ") as caught:
        WorldTokenizer(vocabulary([]), json.dumps(config))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_bundle_with_it_is_read_by_it(tmp_path: Path) -> None:
    def found() -> Tokenizer | None:
        refs = [
            FileRef(p.name, hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_size)
            for p in sorted(tmp_path.iterdir())
        ]
        return load(tmp_path, refs)

    (tmp_path / FILE_NAME).write_bytes(vocabulary([b"ab"]).encode())
    assert isinstance(tokenizer := found(), WorldTokenizer) and tokenizer.encode("ab") == [257]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": END}))
    assert isinstance(tokenizer := found(), WorldTokenizer) and tokenizer.encode("<|end|>") == [0]


@pytest.mark.oracle
def test_the_published_vocabulary_cuts_as_its_author_s_reader() -> None:
    import rwkv
    from rwkv.rwkv_tokenizer import TRIE_TOKENIZER

    path = Path(rwkv.__file__).parent / FILE_NAME
    tokenizer, theirs = WorldTokenizer(path.read_text("utf-8")), TRIE_TOKENIZER(str(path))
    assert tokenizer.size == 65530
    assert {i: tokenizer.piece(i) for i in theirs.idx2token} == theirs.idx2token
    rng = random.Random(0)
    words = list(theirs.idx2token.values())
    for _ in range(2000):
        data = b"".join(rng.choices(words, k=rng.randint(0, 12)))
        data += bytes(rng.choices(range(256), k=rng.randint(0, 20)))
        assert tokenizer._longest(data) == theirs.encodeBytes(data)
        text = data.decode("utf-8", "ignore")
        assert tokenizer.encode(text) == theirs.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
