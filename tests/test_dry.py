"""DRY against its definition, spelled out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.dry import DEFAULT_BREAKERS, Breakers, Dry
from runtime.errors import UserError

Heads = dict[int, tuple[tuple[int, ...], ...]]


def reference(
    history: Sequence[int],
    multiplier: float,
    base: float,
    allowed: int,
    last_n: int,
    heads: Heads,
) -> dict[int, float]:
    """Token → penalty, by comparing every place with the end, token by token."""
    window = list(history if last_n < 0 else history[max(0, len(history) - last_n) :])
    size = len(window)
    if size <= allowed:
        return {}
    reach = size
    for begin in range(size - 1, -1, -1):  # the last place where a whole breaker begins
        fits = [t for t in heads.get(window[begin], ()) if begin + 1 + len(t) <= size]
        fits = [t for t in fits if tuple(window[begin + 1 : begin + 1 + len(t)]) == t]
        if fits:
            reach = size - 1 - begin - max(len(t) for t in fits)
            break
    longest: dict[int, int] = {}
    for j in range(size - 1):
        run = 0
        while run <= j and window[j - run] == window[size - 1 - run]:
            run += 1
        run = min(run, reach)
        if run >= allowed and reach >= allowed:
            longest[window[j + 1]] = max(run, longest.get(window[j + 1], 0))
    found = {}
    for token, run in longest.items():
        if () in heads.get(token, ()):
            continue
        exponent = run - allowed
        if base > 1.000001:
            exponent = min(exponent, int(88.7228391 / math.log(base)))
        found[token] = multiplier * base**exponent
    return found


def penalties(dry: Dry) -> dict[int, float]:
    tokens, amounts = dry.penalties()
    assert (np.diff(tokens) > 0).all()
    return dict(zip(tokens.tolist(), amounts.tolist(), strict=True))


def check(history: list[int], base: float, allowed: int, last_n: int, heads: Heads) -> None:
    """A history given whole, and one recorded token by token, against the reference."""
    breakers = Breakers((), heads)
    whole = Dry(0.8, base, allowed, last_n, breakers, history)
    want = reference(history, 0.8, base, allowed, last_n, heads)
    assert penalties(whole) == pytest.approx(want)
    stepped = Dry(0.8, base, allowed, last_n, breakers, history[:3])
    for size in range(4, len(history) + 1):
        stepped.record(history[size - 1])
        part = reference(history[:size], 0.8, base, allowed, last_n, heads)
        assert penalties(stepped) == pytest.approx(part)


HEADS = st.dictionaries(
    st.integers(0, 4), st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple)).map(tuple)
)


@settings(max_examples=300, deadline=None)
@given(
    history=st.lists(st.integers(0, 4), max_size=60),
    base=st.sampled_from([1.0, 1.2, 1.75, 3.0]),
    allowed=st.integers(0, 4),
    last_n=st.sampled_from([-1, -1, 1, 3, 10, 40]),
    heads=st.one_of(st.just({}), HEADS),
)
def test_penalties_match_the_definition(
    history: list[int], base: float, allowed: int, last_n: int, heads: Heads
) -> None:
    check(history, base, allowed, last_n, heads)


@pytest.mark.parametrize("period", [1, 2, 3, 7])
def test_long_repetitions_match_the_definition(period: int) -> None:
    history = [*range(period), 9] * 2 + list(range(period)) * (170 // period)
    for last_n in (-1, 50):
        check(history, 1.75, 2, last_n, {})
        check([*history[:60], 8, 5, *history[60:]], 1.75, 2, last_n, {8: ((5,),)})


def test_a_worked_example() -> None:
    # a b c c b c y a b c: c came after "a b c" (3 match), y after "b c" (2), b after c (1)
    a, b, c, y = 1, 2, 3, 4
    history = [a, b, c, c, b, c, y, a, b, c]
    assert penalties(Dry(1.0, 2.0, 2, -1, Breakers(), history)) == {c: 2.0, y: 1.0}
    assert penalties(Dry(1.0, 2.0, 1, -1, Breakers(), history)) == {b: 1.0, c: 4.0, y: 2.0}
    assert penalties(Dry(1.0, 2.0, 4, -1, Breakers(), history)) == {}
    # a breaker at the last y changes nothing; at the last a only two tokens count
    assert penalties(Dry(1.0, 2.0, 2, -1, Breakers((), {y: ((),)}), history)) == {c: 2.0}
    assert penalties(Dry(1.0, 2.0, 2, -1, Breakers((), {a: ((),)}), history)) == {c: 1.0, y: 1.0}
    # a breaker of a then b leaves one token
    assert penalties(Dry(1.0, 2.0, 2, -1, Breakers((), {a: ((b,),)}), history)) == {}


def test_the_longest_of_the_breakers_that_begin_at_a_token_counts() -> None:
    history = [5, 1, 2, 9, 8, 5, 1]
    assert penalties(Dry(1.0, 2.0, 2, -1, Breakers((), {8: ((),)}), history)) == {2: 1.0}
    for tails in (((), (5,)), ((5,), ())):
        assert penalties(Dry(1.0, 2.0, 2, -1, Breakers((), {8: tails}), history)) == {}
        check([*history, 2, 9, 8, 5, 1], 2.0, 1, -1, {8: tails})


def test_the_penalty_stays_finite() -> None:
    for base in (1.0, 1.0000001, 1.75, 1e6):
        dry = Dry(1e6, base, 2, -1, Breakers(), [7] * 3000)
        assert all(math.isfinite(amount) for amount in penalties(dry).values())
        assert penalties(dry) == pytest.approx(reference([7] * 3000, 1e6, base, 2, -1, {}))


def sequences(strings: Sequence[str], pieces: Sequence[bytes]) -> dict[int, set[tuple[int, ...]]]:
    """Breakers letter by letter; the rest is split into single bytes."""
    found: dict[int, set[tuple[int, ...]]] = {}
    for string in strings:
        text = string.encode()[:40]
        for token, piece in enumerate(pieces):
            for place in range(len(piece)):
                rest = list(text)
                for letter in piece[place:]:
                    if not rest or letter != rest.pop(0):
                        break
                else:
                    tail = tuple(pieces.index(bytes([letter])) for letter in rest)
                    if text not in piece:
                        found.setdefault(token, set()).add(tail[:20])
            if text in piece:
                found.setdefault(token, set()).add(())
    return found


LETTERS = [bytes([i]) for i in range(128)]


def spell(text: str) -> list[int]:
    return list(text.encode())


@settings(max_examples=200, deadline=None)
@given(
    strings=st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=3),
    words=st.lists(st.text("ab\n", min_size=2, max_size=6), max_size=20),
)
def test_breakers_are_every_overlap(strings: list[str], words: list[str]) -> None:
    pieces = LETTERS + [word.encode() for word in words]
    heads = Breakers.of(strings, pieces, spell).heads
    assert {token: set(tails) for token, tails in heads.items()} == sequences(strings, pieces)
    assert all(len(set(tails)) == len(tails) for tails in heads.values())


def test_default_breakers() -> None:
    pieces = [*LETTERS, b"then:", b'say "', b"word"]
    heads = Breakers.of(DEFAULT_BREAKERS, pieces, spell).heads
    assert heads == {10: ((),), 34: ((),), 42: ((),), 58: ((),), 128: ((),), 129: ((),)}


def test_what_a_tokenizer_puts_around_a_text_is_no_part_of_a_breaker() -> None:
    pieces = [*LETTERS, b"xa", b""]
    heads = Breakers.of(["ab"], pieces, lambda text: [129, *spell(text), 129]).heads
    assert heads == {ord("a"): ((ord("b"),),), 128: ((ord("b"),),)}


def test_a_breaker_that_begins_inside_a_character() -> None:
    pieces = [b"\xe2", b"\x80", b"\xa6", b"\x80\xa6", b"."]  # "…" is e2 80 a6
    heads = Breakers.of(["…."], pieces, lambda text: [4 for _ in text]).heads
    assert heads == {0: ((3, 4),)}
    assert Breakers.of(["…"], pieces[:1], spell).heads == {0: ((),)}


def test_long_breakers_are_cut() -> None:
    heads = Breakers.of(["a" + "b" * 60], LETTERS, spell).heads
    assert heads == {ord("a"): ((ord("b"),) * 20,)}
    pieces = [b"x" * 40, b"x" * 40 + b"yz", b"z"]
    assert Breakers.of(["x" * 40 + "yz"], pieces, lambda text: []).heads == {0: ((),), 1: ((),)}


@pytest.mark.parametrize(
    ("strings", "line"),
    [
        ([""], "dry-breakers: found ''"),
        ([3], "dry-breakers: found 3"),
        (["\ud800"], "dry-breakers: not UTF-8 at character 0"),
        (["a"] * 65, "dry-breakers: found 65 strings, expected at most 64"),
    ],
)
def test_bad_breakers_are_refused(strings: list, line: str) -> None:
    with pytest.raises(UserError, match=line):
        Breakers.of(strings, LETTERS, spell)


def test_breakers_are_values() -> None:
    one, two = Breakers.of(["a"], LETTERS, spell), Breakers.of(["a"], LETTERS, spell)
    assert one == two and hash(one) == hash(two)
    assert one != Breakers.of(["b"], LETTERS, spell)
