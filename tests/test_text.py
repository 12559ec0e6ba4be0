"""Streaming text: whole characters, and stop strings that never leak a byte."""

from __future__ import annotations

import codecs
import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtime.errors import UserError
from runtime.text import PieceDetokenizer, StopStrings, TextStream, WindowDetokenizer

ALPHABET = "abé語🦜\u0301 "
texts = st.text(ALPHABET, max_size=30)
stop_lists = st.lists(st.text("abé🦜", min_size=1, max_size=4), max_size=4)


def split(data: bytes | str, cuts: list[int]) -> list:
    """`data` cut at the given places (any order, any range)."""
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


def run(pieces: list[bytes], stops: list[str]) -> tuple[list[str], bool]:
    """Increments of a stream of byte pieces, and whether a stop ended it."""
    stream = TextStream(PieceDetokenizer(lambda i: pieces[i]), stops)
    shown = []
    for i in range(len(pieces)):
        shown.append(stream.push(i))
        if stream.stopped:
            return shown, True
    shown.append(stream.finish())
    return shown, stream.stopped


def cut_at_stop(text: str, stops: list[str]) -> str:
    """The definition: everything before the earliest start of any stop."""
    return text[: min((text.find(s) for s in stops if s in text), default=len(text))]


@settings(max_examples=500, deadline=None)
@given(texts, stop_lists, st.lists(st.integers(0, 200), max_size=40))
@example("xabcdx", ["c", "bcde"], [1, 2, 3, 4, 5])
@example("xabcde", ["c", "bcde"], [1, 2, 3, 4, 5])
@example("aab", ["ab"], [1, 2])
@example("é", ["é"], [1])
def test_any_split_shows_exactly_the_text_before_the_first_stop(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    shown, stopped = run(split(text.encode(), cuts), stops)
    assert stopped == any(stop in text for stop in stops)
    assert "".join(shown) == cut_at_stop(text, stops)
    assert not any("\ufffd" in part for part in shown)


@settings(max_examples=300, deadline=None)
@given(texts, stop_lists, st.lists(st.integers(0, 200), max_size=40))
def test_nothing_of_a_stop_is_ever_shown_early(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    """At every moment the shown text is before any stop that some continuation could complete."""
    pieces = split(text, cuts)
    machine = StopStrings(stops)
    seen = shown = ""
    for piece in pieces:
        seen += piece
        shown += machine.push(piece)
        for stop in stops:
            for keep in range(1, len(stop)):
                if seen.endswith(stop[:keep]) and not machine.stopped:
                    assert len(shown) <= len(seen) - keep
        if machine.stopped:
            break
        longest = max(map(len, stops), default=1)
        assert len(seen) - len(shown) < longest or any(s in seen for s in stops)


def test_an_earlier_stop_that_may_still_complete_is_waited_for() -> None:
    machine = StopStrings(["c", "bcd"])
    assert [machine.push("a"), machine.push("bc")] == ["a", ""]
    assert not machine.stopped
    assert machine.push("d") == "" and machine.stopped
    machine = StopStrings(["c", "bcd"])
    assert [machine.push("abc"), machine.push("x")] == ["a", "b"]
    assert machine.stopped
    machine = StopStrings(["c", "bcd"])
    assert [machine.push("abc"), machine.finish()] == ["a", "b"]
    assert machine.stopped


def test_text_without_a_stop_in_sight_is_not_delayed() -> None:
    machine = StopStrings(["END"])
    assert [machine.push(t) for t in ("hello", " E", "NT", "EN", "")] == [
        "hello",
        " ",
        "ENT",
        "",
        "",
    ]
    assert machine.finish() == "EN"
    assert machine.push("") == ""


def test_nothing_comes_after_a_stop() -> None:
    machine = StopStrings(["s"])
    assert machine.push("as b") == "a"
    assert machine.push("more") == "" and machine.finish() == ""


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(UserError, match="stop: found an empty string"):
        StopStrings(["a", ""])


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=24), st.lists(st.integers(0, 24), max_size=24))
@example(b"\xf0\x9f\xa6", [1, 2])
@example(b"\xed\xa0\x80\xf4\x90\x80\x80", [1, 2, 3, 4])
def test_broken_bytes_never_depend_on_the_split(data: bytes, cuts: list[int]) -> None:
    shown, _ = run(split(data, cuts), [])
    want = codecs.getincrementaldecoder("utf-8")("replace").decode(data)
    assert "".join(shown) == want
    whole = data.decode("utf-8", "replace")
    assert whole.startswith(want) and set(whole[len(want) :]) <= {"\ufffd"}


def test_a_character_comes_out_whole_or_not_at_all() -> None:
    pieces = [bytes([b]) for b in "a🦜é".encode()]
    stream = PieceDetokenizer(lambda i: pieces[i])
    assert [stream.push(i) for i in range(len(pieces))] == ["a", "", "", "", "🦜", "", "é"]
    stream = PieceDetokenizer(lambda i: pieces[i])
    assert [stream.push(i) for i in range(3)] + [stream.finish()] == ["a", "", "", ""]


@settings(max_examples=300, deadline=None)
@given(texts, texts, st.lists(st.integers(0, 200), max_size=60))
def test_a_window_gives_the_same_text_as_one_decode(
    prompt: str, text: str, cuts: list[int]
) -> None:
    before = split(prompt.encode(), cuts)
    pieces = before + split(text.encode(), cuts)
    ids = range(len(pieces))

    def decode(window: list[int]) -> str:
        return b"".join(pieces[i] for i in window).decode("utf-8", "replace")

    stream = WindowDetokenizer(decode, ids[: len(before)])
    shown = [stream.push(i) for i in ids[len(before) :]]
    assert not any("\ufffd" in part for part in shown)
    assert "".join(shown) + stream.finish() == text


def test_a_window_does_not_wait_for_ever_on_broken_bytes() -> None:
    stream = WindowDetokenizer(lambda ids: b"\xff".decode("utf-8", "replace") * len(ids), [])
    shown = [stream.push(0) for _ in range(40)]
    assert sum(map(len, shown)) >= 32
    assert stream.finish() == ""


def test_a_character_that_the_prompt_left_unfinished_comes_out_whole() -> None:
    smile = "\U0001f600".encode()
    for known in range(4):
        prompt = [*b"ab", *smile[:known]]
        stream = PieceDetokenizer(lambda i: bytes([i]), prompt)
        assert "".join(map(stream.push, [*smile[known:], *b"c"])) == "\U0001f600c"
    stream = PieceDetokenizer(lambda i: bytes([i]), smile[1:])  # not a character's start
    assert stream.push(ord("c")) == "c"
