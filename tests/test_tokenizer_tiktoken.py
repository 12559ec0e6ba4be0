"""Kimi's tokenizer against a naive merge and against tiktoken, and its files."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from runtime import tokenizer_tiktoken
from runtime.errors import UserError
from runtime.manifest import FileRef
from runtime.text import PieceDetokenizer
from runtime.tokenizer import Tokenizer, load
from runtime.tokenizer_tiktoken import PATTERN, RESERVED, TiktokenTokenizer

TEXT = (
    "The cat sat on the mat; it's 12345 years old, ISN'T it? We'll SEE McDonald's\n"
    "    def main(argc):\n\t\treturn argc * 10007  # 語学 🦜\r\n"
    "crème brûlée, НАТО, ﷺ, 日本語です。漢字かな交じり文、中文English混合 〇々\u3000あ"
    "a  b   c    d     e  \n\n  \u200d👩\u200d🔬 ½ x² ① ǅ ʰ \x00\x7f\ufeff\U0010ffff "
)
ALPHABET = (
    "aAbé ÉǅʰかカAZz漢中〇々\u0301\u0e31 \n\r\t'sStTlLdDſ019½²٣"
    " ,.-_\u3000\u00a0\u200d🦜👩[]<|>im_end"
)
Ranks = dict[bytes, int]


def trained(count: int) -> Ranks:
    """Byte pairs of TEXT, the most frequent first, as a vendor trains them."""
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    counts = Counter(word for word, _ in split.pre_tokenize_str(TEXT))
    words = {word: [bytes([byte]) for byte in word.encode()] for word in counts}
    ranks = {bytes([byte]): byte for byte in range(256)}
    while len(ranks) < count:
        pairs: Counter[bytes] = Counter()
        for word, parts in words.items():
            for a, b in itertools.pairwise(parts):
                pairs[a + b] += counts[word]
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        ranks[best] = len(ranks)
        words = {word: naive(word.encode(), ranks) for word in words}
    return ranks


def naive(data: bytes, ranks: Ranks) -> list[bytes]:
    """The lowest rank first, the first of equals, looked for anew every time."""
    if data in ranks:
        return [data]
    parts = [bytes([byte]) for byte in data]
    while True:
        found = [
            (ranks[a + b], i)
            for i, (a, b) in enumerate(itertools.pairwise(parts))
            if a + b in ranks
        ]
        if not found:
            return parts
        _, i = min(found)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def lines(ranks: Ranks) -> str:
    return "".join(f"{base64.b64encode(word).decode()} {rank}\n" for word, rank in ranks.items())


def config(base: int, **changes: Any) -> dict[str, Any]:
    """As the vendor's: named tokens among the reserved, two of which are words of a text."""
    names = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 11: "<|tool|>", 12: "<|tool|>s"}
    added = {
        str(base + i): {"content": name, "special": i < 10, "lstrip": False}
        for i, name in names.items()
    }
    return {
        "added_tokens_decoder": added,
        "additional_special_tokens": ["<|im_end|>"],
        "bos_token": "[BOS]",
        "eos_token": {"content": "[EOS]", "special": True},
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        **changes,
    }


@cache
def ranks() -> Ranks:
    return trained(420)


@cache
def small() -> TiktokenTokenizer:
    return TiktokenTokenizer(lines(ranks()), json.dumps(config(len(ranks()))))


def words(tokenizer: TiktokenTokenizer, text: str) -> list[str]:
    return [tokenizer.label(i)[0] for i in tokenizer.encode(text)]


vocabularies = st.lists(st.text("abc", min_size=2, max_size=5), unique=True, max_size=12)


@settings(max_examples=400, deadline=None)
@given(vocabularies, st.text("abc", min_size=1, max_size=24))
def test_merges_are_those_of_the_naive_search(pieces: list[str], text: str) -> None:
    """Any ranks: also tokens that no merge of lower ranks makes, and words that are tokens."""
    found: Ranks = {bytes([byte]): byte for byte in range(256)}
    found |= {word.encode(): 256 + i for i, word in enumerate(pieces)}
    tokenizer = TiktokenTokenizer(lines(found))
    assert [tokenizer.piece(i) for i in tokenizer.encode(text)] == naive(text.encode(), found)


@pytest.mark.parametrize("char", [" ", "\n", "=", "a", "漢"])
def test_runs_of_one_character(char: str) -> None:
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    many = {char.encode() * n: 256 + i for i, n in enumerate((2, 3, 4, 8, 5, 16, 7))}
    found = {bytes([byte]): byte for byte in range(256)} | many
    tokenizer = TiktokenTokenizer(lines(found))
    for count in range(1, 60):
        parts = [word for word, _ in split.pre_tokenize_str(char * count)]
        want = [token for part in parts for token in naive(part.encode(), found)]
        assert [tokenizer.piece(i) for i in tokenizer.encode(char * count)] == want


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("中文English混合", ["中文", "English", "混合"]),
        ("北京市 Pascal〇々", ["北京市", " Pascal", "〇々"]),
        ("McDonald'S isn't'x", ["Mc", "Donald'S", " isn't", "'x"]),
        ("1234567", ["123", "456", "7"]),
        ("a  b \n\n c", ["a", " ", " b", " \n\n", " c"]),
        ("!?...\n\nx", ["!?...\n\n", "x"]),
        (" HTTPServer かな", [" HTTPServer", " かな"]),
        ("   ", ["   "]),
    ],
)
def test_how_a_text_is_cut(text: str, want: list[str]) -> None:
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    assert [word for word, _ in split.pre_tokenize_str(text)] == want


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_comes_back(text: str) -> None:
    ids = small().encode(text)
    assert small().decode(ids) == text or "reserved" in text
    stream = small().stream()
    assert "".join(map(stream.push, ids)) + stream.finish() == small().decode(ids)


@pytest.mark.parametrize("plane", range(17))
def test_every_plane_comes_back(plane: int) -> None:
    text = "".join(
        chr(c) for c in range(plane << 16, (plane + 1) << 16, 7) if not 0xD800 <= c < 0xE000
    )
    assert small().decode(small().encode(text)) == text


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-2, 420 + RESERVED), max_size=30))
def test_any_ids_stream_to_their_text(ids: list[int]) -> None:
    stream = small().stream()
    got = "".join(map(stream.push, ids)) + stream.finish()
    want = b"".join(map(small().piece, ids)).decode("utf-8", "replace")
    assert small().decode(ids) == want
    assert want.startswith(got) and set(want[len(got) :]) <= {"\ufffd"}


def test_special_tokens_are_cut_out_leftmost_and_longest_first() -> None:
    base = len(ranks())
    text = "[BOS]a<|im_end|><|tool|>s<|tool|>[EOS"
    assert words(small(), text)[:5] == ["[BOS]", "a", "<|im_end|>", "<|tool|>s", "<|tool|>"]
    assert small().encode(f"<|reserved_token_{base + 5}|>") == [base + 5]
    assert len(small().encode(f"<|reserved_token_{base + RESERVED}|>")) > 5  # there is none
    assert small().encode("a", special=True) == small().encode("a", special=False)
    assert small().encode("") == []


def test_special_tokens_have_no_text_unless_they_say_so() -> None:
    base = len(ranks())
    assert small().piece(base) == small().piece(base + 2) == small().piece(base + 5) == b""
    assert small().label(base + 2) == ("<|im_end|>", None)
    assert small().piece(base + 11) == b"<|tool|>"
    assert small().label(base + 11) == ("<|tool|>", b"<|tool|>")
    eos = config(base, eos_token="<|tool|>")  # what ends a text is none of it
    assert TiktokenTokenizer(lines(ranks()), json.dumps(eos)).piece(base + 11) == b""


def test_what_the_rest_of_the_runtime_asks_for() -> None:
    tokenizer = small()
    assert isinstance(tokenizer.stream(), PieceDetokenizer)
    assert tokenizer.size == 420 + RESERVED == len(tokenizer.pieces)
    assert tokenizer.label(tokenizer.size) == (f"token_id:{tokenizer.size}", None)
    assert tokenizer.piece(-1) == tokenizer.piece(10**9) == b""
    assert tokenizer.label(0xE6) == ("bytes:\\xe6", b"\xe6")
    assert tokenizer.breakers(["\n", "日本"]) is not None
    with pytest.raises(UserError, match="prompt: not UTF-8 at character 2"):
        tokenizer.encode("ab\udcff")


def vendor_pieces(text: str) -> list[str]:
    """Character by character, as the vendor cuts very long texts."""
    found = []
    for start in range(0, len(text), tokenizer_tiktoken.PIECE):
        found.append("")
        length, kind = 0, None
        for char in text[start : start + tokenizer_tiktoken.PIECE]:
            length = length + 1 if char.isspace() == kind else 1
            kind = char.isspace()
            if length > tokenizer_tiktoken.RUN:
                found.append("")
                length = 1
            found[-1] += char
    return found


@pytest.mark.parametrize(
    "text",
    [
        "a" * 25_000,
        "a" * 25_001,
        "ab " * 9 + "a" * 75_001 + " \n" * 25_000 + "é" * 24_999,
        "xyz " * 110_000,
        " " * 30_000 + "a" * 399_000,
    ],
)
def test_very_long_runs_are_cut(text: str) -> None:
    assert list(tokenizer_tiktoken._pieces(text)) == vendor_pieces(text)


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (lambda rows: rows.__setitem__(7, ""), r":8: found '', expected a token in base64 and its"),
        (lambda rows: rows.__setitem__(7, "!!!! 7"), ":8: found '!!!! 7'"),
        (lambda rows: rows.__setitem__(7, " 7"), ":8: found ' 7'"),
        (lambda rows: rows.__setitem__(7, rows[7] + "1"), r":8: .* and its rank 7"),
        (lambda rows: rows.pop(7), ":8: .* and its rank 7"),
        (lambda rows: rows.append("AA== 420"), r":421: token b'\\x00' is on line 1 already"),
        (lambda rows: rows.__setitem__(65, "YWJjZGVm 65"), ": no token for byte 0x41 .1 of 256"),
        (lambda rows: rows.clear(), ":1: found ''"),
    ],
)
def test_malformed_lines_are_named(spoil: Any, line: str) -> None:
    rows = lines(ranks()).splitlines()
    spoil(rows)
    with pytest.raises(UserError, match=rf"^here/tiktoken\.model{line}") as caught:
        TiktokenTokenizer("\n".join(rows), path=Path("here/tiktoken.model"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"tokenizer_class": "LlamaTokenizer"}, 'tokenizer_class is "LlamaTokenizer", expected'),
        ({"bos_token": "<s>"}, 'bos_token is "<s>", which is none of the special tokens'),
        ({"eos_token": 7}, "eos_token is 7, which is none of"),
        ({"added_tokens_decoder": []}, r"bos_token is \"\[BOS\]\", which is none"),
        ({"added_tokens_decoder": [1]}, r"added_tokens_decoder is \[1\], expected an object"),
        ({"added_tokens_decoder": {"5": "x"}}, "has the number '5', expected 420 to 675"),
        ({"added_tokens_decoder": {"676": "x"}}, "has the number '676', expected 420 to 675"),
        ({"added_tokens_decoder": {"x": "x"}}, "has the number 'x'"),
        ({"added_tokens_decoder": {"420": ""}}, 'gives 420 the name "", expected a text'),
        ({"added_tokens_decoder": {"420": {"content": 3}}}, "gives 420 the name 3"),
        ({"added_tokens_decoder": {"420": "\ud800"}}, r'gives 420 the name "\\ud800"'),
        (
            {"added_tokens_decoder": {"420": {"content": "x", "rstrip": True}}},
            "'x' sets rstrip, not supported",
        ),
        ({"added_tokens_decoder": {"420": "[BOS]", "421": "[BOS]"}}, r"'\[BOS\]' twice"),
    ],
)
def test_a_contradicting_config_is_refused(changes: dict[str, Any], line: str) -> None:
    given = config(len(ranks()), **changes)
    if "bos_token" not in changes and changes != {"added_tokens_decoder": []}:
        given.pop("bos_token")
    if "eos_token" not in changes:
        given.pop("eos_token")
    with pytest.raises(UserError, match=rf"^tokenizer_config\.json: .*{line}") as caught:
        TiktokenTokenizer(lines(ranks()), json.dumps(given))
    assert "\n" not in str(caught.value)


def test_a_bundle_with_it_is_read_by_it(tmp_path: Path) -> None:
    """tokenizer.json may lie beside it: a library that converts the file cuts text otherwise."""
    (tmp_path / "tiktoken.model").write_text(lines(ranks()))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config(len(ranks()))))
    (tmp_path / "tokenizer.json").write_text("{}")
    refs = [
        FileRef(p.name, hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_size)
        for p in sorted(tmp_path.iterdir())
    ]
    found = load(tmp_path, refs)
    assert isinstance(found, TiktokenTokenizer) and isinstance(found, Tokenizer)
    assert found.decode(found.encode(TEXT)) == TEXT


@pytest.mark.oracle
def test_ids_are_those_of_tiktoken() -> None:
    import random

    import tiktoken

    base = len(ranks())
    special = {small().label(i)[0]: i for i in range(base, base + RESERVED)}
    del special["<|tool|>s"]  # it begins with another, and tiktoken takes either
    reference = tiktoken.Encoding(
        "kimi", pat_str=PATTERN, mergeable_ranks=ranks(), special_tokens=special
    )

    def check(text: str) -> None:
        assert small().encode(text) == reference.encode(text, allowed_special="all"), repr(text)

    for start in range(0, 0x110000, 64):
        codes = [c for c in range(start, start + 64) if not 0xD800 <= c < 0xE000]
        check("".join(f"a{chr(c)}b 1" for c in codes))
    rng = random.Random(0)
    for _ in range(20_000):
        check("".join(rng.choice(ALPHABET) for _ in range(rng.randrange(1, 30))))
    for count in range(1, 300):
        for char in " \n-=a漢":
            check(char * count)
    check(TEXT * 20)
