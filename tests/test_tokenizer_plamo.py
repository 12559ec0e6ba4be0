"""PLaMo 2's tokenizer against all cuts of short texts, and its files against what they may hold."""

from __future__ import annotations

import hashlib
import json
import time
from functools import cache
from pathlib import Path
from typing import Any

import cases
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import UserError
from runtime.manifest import FileRef
from runtime.text import PieceDetokenizer
from runtime.tokenizer import Tokenizer, load
from runtime.tokenizer_plamo import PlamoTokenizer

HANDED = cases.HANDED / "plamo2" / "checkpoint"
CONTROL = ("<|plamo:bos|>", "<|plamo:eos|>", "<|plamo:pad|>", "<|plamo:op|>")
BYTES = [[f"<0x{byte:02X}>", -10.0, "BYTE"] for byte in range(256)]
PIECES = {
    "a": -5.0, "b": -5.5, "ab": -9.0, "abc": -12.0, "bc": -7.0, " ": -2.0, "  ": -3.0, "\n": -2.5,
    "日": -6.0, "本": -6.1, "日本": -8.0, "日本語": -8.5, "語": -6.2, "です": -7.0, "。": -4.0,
    "é": -5.0, "the": -4.0, " the": -4.5, "🦜": -9.0, "\ufeff": -9.0, "\u3000": -3.0,
}  # fmt: skip
Row = list[Any]


def lines(rows: list[Row]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def rows_of(pieces: dict[str, float]) -> list[Row]:
    control = [["<|plamo:unk|>", 0.0, "UNKNOWN"], *([word, 0.0, "CONTROL"] for word in CONTROL)]
    return [*control, *BYTES, *([word, score, "NORMAL"] for word, score in pieces.items())]


@cache
def small() -> PlamoTokenizer:
    return PlamoTokenizer(lines(rows_of(PIECES)))


def words(tokenizer: PlamoTokenizer, text: str, special: bool = True) -> list[str]:
    return [tokenizer.label(i)[0] for i in tokenizer.encode(text, special)]


def brute_force(pieces: dict[str, float], text: str) -> list[str]:
    """Of all cuts of `text` the one with the least cost; of equals, the longest first pieces."""
    if not text:
        return []
    cuts: list[tuple[int, list[int], list[str]]] = []

    def cut(rest: str, cost: int, lengths: list[int], found: list[str]) -> None:
        if not rest:
            cuts.append((cost, [-n for n in lengths], found))
            return
        cut(rest[1:], cost + 10_000_000, [*lengths, 1], [*found, rest[0]])
        for word, score in pieces.items():
            if rest.startswith(word):
                spent = cost - round(score * 1e4)
                cut(rest[len(word) :], spent, [*lengths, len(word)], [*found, word])

    cut(text, 0, [], [])
    return min(cuts)[2]


vocabularies = st.dictionaries(
    st.text("ab日🦜", min_size=1, max_size=4),
    # few values and sums that meet, so that many cuts cost the same
    st.sampled_from([-1.0, -2.0, -3.0, -4.0, -0.00004, 1.0, -999.9]),
    max_size=9,
)


@settings(max_examples=300, deadline=None)
@given(vocabularies, st.text("ab日🦜", max_size=9))
def test_the_cut_is_the_best_of_all(pieces: dict[str, float], text: str) -> None:
    tokenizer = PlamoTokenizer(lines(rows_of(pieces)))
    want: list[bytes] = []
    for word in brute_force(pieces, text):
        want += [word.encode()] if word in pieces else [bytes([b]) for b in word.encode()]
    assert [tokenizer.piece(i) for i in tokenizer.encode(text)] == want


def test_scores_are_rounded_half_to_even_at_four_places() -> None:
    """-2.5 units are -2: two of them cost less than -5, where halves rounded up would cost more."""
    tokenizer = PlamoTokenizer(lines(rows_of({"a": -0.00025, "aa": -0.0005})))
    assert [tokenizer.piece(i) for i in tokenizer.encode("aa")] == [b"a", b"a"]
    tokenizer = PlamoTokenizer(lines(rows_of({"a": -0.00025, "aa": -0.0004})))
    assert [tokenizer.piece(i) for i in tokenizer.encode("aa")] == [b"aa"]  # equal: the longest


def test_japanese_whitespace_and_marks() -> None:
    assert words(small(), "日本語です。") == ["日本語", "です", "。"]
    assert words(small(), "   the\n\u3000") == ["  ", " the", "\n", "\u3000"]
    assert words(small(), "\ufeffa") == ["\ufeff", "a"]  # also at the start of a text
    assert small().encode("") == []


def test_characters_outside_the_vocabulary_become_bytes() -> None:
    for text in ("z", "ß", "語ö語", "\U0010ffff", "\0", "\r\n"):
        ids = small().encode(text)
        assert b"".join(map(small().piece, ids)) == text.encode()
    assert words(small(), "ß") == ["bytes:\\xc3", "bytes:\\x9f"]


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_comes_back(text: str) -> None:
    tokenizer = small()
    ids = tokenizer.encode(text)
    if not any(word in text for word in ("<|plamo:unk|>", *CONTROL)):
        assert tokenizer.decode(ids) == text
    stream = tokenizer.stream()
    assert "".join(map(stream.push, ids)) + stream.finish() == tokenizer.decode(ids)


@pytest.mark.parametrize("plane", range(17))
def test_every_plane_comes_back(plane: int) -> None:
    text = "".join(
        chr(c) for c in range(plane << 16, (plane + 1) << 16, 7) if not 0xD800 <= c < 0xE000
    )
    assert small().decode(small().encode(text)) == text


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(-2, 300), max_size=30), st.integers(0, 30))
def test_any_ids_stream_to_their_text(ids: list[int], cut: int) -> None:
    """Also bytes that are no UTF-8, ids of nothing, and a character cut off by the prompt's end."""
    tokenizer = small()
    stream = tokenizer.stream()
    got = "".join(map(stream.push, ids)) + stream.finish()
    want = b"".join(map(tokenizer.piece, ids)).decode("utf-8", "replace")
    assert tokenizer.decode(ids) == want
    assert want.startswith(got) and set(want[len(got) :]) <= {"\ufffd"}
    text = "é日🦜" * 3
    ids = tokenizer.encode("ßöü") + tokenizer.encode(text)
    continued = tokenizer.stream(ids[: cut % len(ids)])
    shown = "".join(map(continued.push, ids[cut % len(ids) :]))
    assert ("ßöü" + text).endswith(shown) and "\ufffd" not in shown


def test_control_tokens_are_pieces_and_special_tokens_are_cut_out_first() -> None:
    """`<|plamo:op|>` is not special by default: it has text, so that a stop string can meet it."""
    plain = small()
    assert plain.encode("a<|plamo:op|>b") == [*plain.encode("a"), 4, *plain.encode("b")]
    assert plain.piece(4) == b"<|plamo:op|>"
    assert plain.encode("<|plamo:bos|>") == [1] and plain.piece(1) == b""
    assert plain.label(1) == ("<|plamo:bos|>", None)
    # A piece that would win over the special token's parts does not get its characters.
    rows = rows_of({**PIECES, "x<|plamo:bos|>": 900.0, "<|plamo:op|>the": 900.0})
    assert words(PlamoTokenizer(lines(rows)), "x<|plamo:bos|>") == ["x", "<|plamo:bos|>"]
    assert words(PlamoTokenizer(lines(rows)), "<|plamo:op|>the") == ["<|plamo:op|>the"]
    config = {"additional_special_tokens": ["<|plamo:op|>"]}
    declared = PlamoTokenizer(lines(rows), json.dumps(config))
    assert words(declared, "<|plamo:op|>the") == ["<|plamo:op|>", "the"]
    assert declared.piece(4) == b""


def test_added_tokens_are_cut_out_and_special_only_if_they_say_so() -> None:
    rows = rows_of({**PIECES, "ab<|plamo:op|>": 900.0, "the a": 900.0})
    listed = {"4": {"content": "<|plamo:op|>", "special": False, "lstrip": False}}
    tokenizer = PlamoTokenizer(lines(rows), json.dumps({"added_tokens_decoder": listed}))
    assert words(tokenizer, "ab<|plamo:op|>") == ["ab", "<|plamo:op|>"]
    assert tokenizer.piece(4) == b"<|plamo:op|>"


@pytest.mark.parametrize(
    ("config", "want"),
    [
        ({}, ["a"]),
        ({"add_bos_token": True}, ["<|plamo:bos|>", "a"]),
        ({"add_eos_token": True}, ["a", "<|plamo:eos|>"]),
        (
            {"add_bos_token": True, "add_eos_token": True, "eos_token": "<|plamo:bos|>"},
            ["<|plamo:bos|>", "a", "<|plamo:bos|>"],
        ),
        ({"add_bos_token": True, "bos_token": {"content": "<|plamo:op|>"}}, ["<|plamo:op|>", "a"]),
    ],
)
def test_the_config_puts_tokens_around_a_sequence(config: dict[str, Any], want: list[str]) -> None:
    tokenizer = PlamoTokenizer(lines(rows_of(PIECES)), json.dumps(config))
    assert words(tokenizer, "a") == want
    assert words(tokenizer, "a", special=False) == ["a"]


def test_what_the_rest_of_the_runtime_asks_for() -> None:
    tokenizer = small()
    assert isinstance(tokenizer.stream(), PieceDetokenizer)
    assert tokenizer.size == len(rows_of(PIECES)) == len(tokenizer.pieces)
    assert tokenizer.label(tokenizer.size) == (f"token_id:{tokenizer.size}", None)
    assert tokenizer.piece(-1) == tokenizer.piece(10**9) == b""
    assert tokenizer.breakers(["\n", "日本"]) is not None
    with pytest.raises(UserError, match="prompt: not UTF-8 at character 2"):
        tokenizer.encode("ab\udcff")


def test_a_long_text_takes_time_by_its_length() -> None:
    rows = rows_of({**PIECES, **{"the " * n: -4.0 - n for n in range(1, 13)}})
    tokenizer = PlamoTokenizer(lines(rows))

    def seconds(text: str) -> float:
        start = time.perf_counter()
        assert tokenizer.decode(tokenizer.encode(text)) == text
        return time.perf_counter() - start

    text = "the the a 日本語です。\nz🦜"
    once = min(seconds(text * 400) for _ in range(3))
    assert seconds(text * 4000) < max(40 * once, 1.0)
    assert seconds("the " * 25_000) < 4  # 100 kB


def test_the_handed_checkpoint_has_all_bytes_that_text_can_hold() -> None:
    config = (HANDED / "tokenizer_config.json").read_text("utf-8")
    tokenizer = PlamoTokenizer((HANDED / "tokenizer.jsonl").read_text("utf-8"), config)
    assert tokenizer.size == 256 and tokenizer.decode(tokenizer.encode("日本 🦜")) == "日本 🦜"
    assert tokenizer.encode("<|plamo:eos|>A") == [2, 5 + ord("A")]


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (lambda rows: rows[7].clear(), r":8: found \[\]; expected \[piece, score, type\]"),
        (lambda rows: rows.__setitem__(7, {"a": 1}), r':8: found {"a": 1}'),
        (lambda rows: rows[7].__setitem__(0, 5), ":8: piece is 5"),
        (lambda rows: rows[-1].__setitem__(0, ""), ':282: piece is ""'),
        (lambda rows: rows[-1].__setitem__(1, "x"), ':282: score is "x"'),
        (lambda rows: rows[-1].__setitem__(1, True), ":282: score is true"),
        (lambda rows: rows[-1].__setitem__(1, float("nan")), ":282: score is NaN"),
        (lambda rows: rows[-1].__setitem__(1, -1000.0), ":282: score is -1000.0, of a size below"),
        (lambda rows: rows[-1].__setitem__(2, 3), ":282: type is 3"),
        (lambda rows: rows[-1].__setitem__(0, "the"), ":282: piece 'the' is on line 278 already"),
        (lambda rows: rows[7].__setitem__(0, "<0xZZ>"), ":8: BYTE piece '<0xZZ>', expected"),
        (lambda rows: rows[-1].__setitem__(2, "BYTE"), ":282: BYTE piece"),
        (lambda rows: rows.pop(5 + 0x7F), r"no BYTE piece <0x7F> \(1 of 256 are missing\)"),
        (lambda rows: rows.clear(), r":1: .*expected \[piece, score, type\] as JSON"),
    ],
)
def test_malformed_lines_are_named(spoil: Any, line: str) -> None:
    rows = [list(row) for row in rows_of(PIECES)]
    spoil(rows)
    with pytest.raises(UserError, match=rf"^here/tokenizer\.jsonl.*{line}") as caught:
        PlamoTokenizer(lines(rows), path=Path("here/tokenizer.jsonl"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[", "[" * 200_000, "\n", '["\\ud800", 0.0]', "[1e999999]"])
def test_text_that_is_no_rows_is_refused(text: str) -> None:
    good = lines(rows_of(PIECES))
    with pytest.raises(UserError, match=r"tokenizer\.jsonl:283: .*expected \[piece, score, type\]"):
        PlamoTokenizer(f"{good}{text}\n")


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"bos_token": "<s>"}, r"special token '<s>' is not in tokenizer\.jsonl"),
        ({"bos_token": 7}, "special token 7 is not in"),
        ({"additional_special_tokens": ["<s>"]}, "special token '<s>' is not in"),
        ({"additional_special_tokens": "<s>"}, 'additional_special_tokens is "<s>", expected'),
        ({"additional_special_tokens": [[]]}, r"special token \[\] is not in"),
        ({"added_tokens_decoder": []}, r"added_tokens_decoder is \[\], expected a dict"),
        ({"added_tokens_decoder": {"9": {"content": "the"}}}, "'the' the id 9, expected 277"),
        ({"added_tokens_decoder": {"9": 5}}, "5 the id 9, expected None"),
        (
            {"added_tokens_decoder": {"277": {"content": "the", "rstrip": True}}},
            "'the' sets rstrip, not supported",
        ),
        ({"add_bos_token": "yes"}, 'add_bos_token is "yes", expected a bool'),
        ({"add_bos_token": True, "bos_token": None}, "is true, but there is no bos_token"),
    ],
)
def test_a_contradicting_config_is_refused(config: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=rf"^tokenizer_config\.json: .*{line}"):
        PlamoTokenizer(lines(rows_of(PIECES)), json.dumps(config))


def test_a_bundle_with_it_is_read_by_it(tmp_path: Path) -> None:
    """tokenizer.json of another kind may lie beside it, as in the handed checkpoint."""
    for path in HANDED.glob("tokenizer*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())

    def found() -> Tokenizer | None:
        refs = [
            FileRef(p.name, hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_size)
            for p in sorted(tmp_path.iterdir())
        ]
        return load(tmp_path, refs)

    assert isinstance(found(), PlamoTokenizer)
    (tmp_path / "tokenizer.jsonl").write_text("[]\n")
    with pytest.raises(UserError, match=rf"^{tmp_path}/tokenizer\.jsonl:1: found \[\]"):
        found()
    (tmp_path / "tokenizer.jsonl").unlink()
    assert type(found()) is Tokenizer
