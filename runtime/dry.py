"""DRY ("don't repeat yourself"): a penalty on tokens that would continue a repetition.

The definition is that of llama.cpp's sampler of this name. Over the last n tokens h[0..n-1] of a
request, prompt included, let run(j) be the number of tokens before and at j that equal the end of
the history, h[j-i] = h[n-1-i] for i < run(j); runs may overlap the end and never look beyond the
last n. A sequence breaker ends all runs: with `reach` the number of tokens after the last complete
breaker (n if there is none), run(j) is at most reach, and nothing is penalised while reach is below
the allowed length. Token t then gets

    logit -= multiplier * base ** min(longest run(j) with h[j+1] = t, less allowed, cap)

if that run is at least `allowed` long; the cap keeps base ** cap below the largest f32. A token
that contains a breaker is never penalised.

run(j) for the history and one more token is run(j-1) + 1 where that token stands at j, and 0
elsewhere: one vectorised pass a token, whatever the history looks like.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from runtime.errors import UserError

DEFAULT_BREAKERS = ("\n", ":", '"', "*")
_LONGEST_STRING = 40  # bytes of a breaker that count
_LONGEST_TAIL = 20  # tokens of a breaker after its first
_MOST_STRINGS = 64
_LOG_F32_MAX = 88.7228391


@dataclass(frozen=True)
class Breakers:
    """Strings that end a repetition, as token sequences of one vocabulary.

    `heads` maps a token to the tails that make it a breaker. A token that contains a string is one
    alone: its tail is empty. A token that ends in the start of a string is one together with the
    tokens of the rest. Only the first 40 bytes of a string and 20 tokens of a tail count.
    """

    strings: tuple[str, ...] = ()
    heads: Mapping[int, tuple[tuple[int, ...], ...]] = field(
        default_factory=dict, hash=False, repr=False
    )

    @classmethod
    def of(
        cls,
        strings: Iterable[str],
        pieces: Sequence[bytes],
        encode: Callable[[str], Sequence[int]],
    ) -> Breakers:
        """Breakers of a vocabulary: `pieces[id]` are a token's bytes, `encode` splits a text.

        Ids without bytes in what `encode` returns are left out: a tokenizer may put a begin or an
        end token around a text. Where the rest of a string begins inside a character it is split
        into the longest pieces that fit. Raises UserError that names the field.
        """
        chosen = tuple(strings)
        if len(chosen) > _MOST_STRINGS:
            raise UserError(
                f"dry-breakers: found {len(chosen)} strings, expected at most {_MOST_STRINGS}"
            )
        heads: dict[int, dict[tuple[int, ...], None]] = {}
        for text in chosen:
            if not isinstance(text, str) or not text:
                raise UserError(f"dry-breakers: found {text!r}, expected strings of text")
            try:
                whole = text.encode()[:_LONGEST_STRING]
            except UnicodeEncodeError as error:
                raise UserError(
                    f"dry-breakers: not UTF-8 at character {error.start}, expected UTF-8 text"
                ) from error
            for token, tail in _overlaps(whole, pieces, encode):
                heads.setdefault(token, {})[tail] = None
        return cls(chosen, {token: tuple(tails) for token, tails in heads.items()})


def _overlaps(
    text: bytes, pieces: Sequence[bytes], encode: Callable[[str], Sequence[int]]
) -> Iterable[tuple[int, tuple[int, ...]]]:
    """(token, tail) of every way in which `text` can begin inside a token."""
    starts = [text[:size] for size in range(1, len(text))]
    any_start, first = tuple(starts), text[:1]
    tails: dict[int, tuple[int, ...]] = {}
    for token, piece in enumerate(pieces):
        if first not in piece:  # as with nearly every token
            continue
        if text in piece:
            yield token, ()
            continue
        if not piece.endswith(any_start):
            continue
        for start in starts:
            if piece.endswith(start):
                size = len(start)
                if size not in tails:
                    tails[size] = _split(text[size:], pieces, encode)
                yield token, tails[size]


def _split(
    rest: bytes, pieces: Sequence[bytes], encode: Callable[[str], Sequence[int]]
) -> tuple[int, ...]:
    """Tokens of the rest of a breaker, at most 20."""
    try:
        found = [i for i in encode(rest.decode()) if i < len(pieces) and pieces[i]]
    except UnicodeDecodeError:
        found = []
        while rest and len(found) < _LONGEST_TAIL:
            first = rest[:1]
            fits = [
                i for i, piece in enumerate(pieces) if piece[:1] == first and rest.startswith(piece)
            ]
            if not fits:
                break
            found.append(max(fits, key=lambda i: (len(pieces[i]), -i)))
            rest = rest[len(pieces[found[-1]]) :]
    return tuple(found[:_LONGEST_TAIL])


class Dry:
    """The history of one request and what DRY takes off the logits of the next token.

    `last_n` tokens count, -1 for all. A step costs O(history) in a few passes of integers.
    """

    def __init__(
        self,
        multiplier: float,
        base: float,
        allowed: int,
        last_n: int,
        breakers: Breakers,
        history: Sequence[int] = (),
    ) -> None:
        self._multiplier = multiplier
        self._base = base
        self._allowed = allowed
        self._last_n = last_n
        self._heads = breakers.heads
        cap = math.inf if base <= 1.000001 else int(_LOG_F32_MAX / math.log(base))
        self._cap = cap or math.inf
        self._size = len(history)
        self._tokens = np.empty(max(64, 2 * self._size), np.int32)
        self._tokens[: self._size] = history
        self._runs = np.zeros_like(self._tokens)  # run(j) for j < size - 1
        self._runs[: max(0, self._size - 1)] = _suffix_runs(list(history))[:-1]
        self._break = -1, 0  # where the last complete breaker begins, and the length of its tail
        self._find_breaker(self._size)

    def record(self, token: int) -> None:
        """Append one token to the history."""
        size = self._size
        if size == self._tokens.size:
            self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
            self._runs = np.concatenate([self._runs, np.zeros_like(self._runs)])
        runs = np.empty(size, np.int32)
        if size:
            runs[0] = 1
            np.add(self._runs[: size - 1], 1, out=runs[1:])
            runs *= self._tokens[:size] == token
        self._runs[:size] = runs
        self._tokens[size] = token
        self._size = size + 1
        self._find_breaker(_LONGEST_TAIL + 1)

    def penalties(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Token ids, ascending and each once, and what to take off the logit of each."""
        none = np.empty(0, np.int64), np.empty(0, np.float64)
        size, allowed = self._size, self._allowed
        window = size if self._last_n < 0 else min(size, self._last_n)
        head, tail = self._break
        reach = window if head < size - window else size - 1 - head - tail
        if window <= allowed or reach < allowed:
            return none
        first = size - window
        runs = np.minimum(self._runs[first : size - 1], reach)
        if first:  # a run begins inside the window
            runs = np.minimum(runs, np.arange(1, window, dtype=np.int32))
        ends = np.flatnonzero(runs >= allowed)
        if not ends.size:
            return none
        keys = self._tokens[first + 1 : size][ends].astype(np.int64)
        keys <<= 32
        keys |= runs[ends]
        keys.sort()
        tokens = keys >> 32
        longest = np.flatnonzero(np.append(tokens[1:] != tokens[:-1], True))
        tokens, runs = tokens[longest], keys[longest] & 0xFFFFFFFF
        free = [() not in self._heads.get(token, ()) for token in tokens.tolist()]
        tokens, runs = tokens[free], runs[free]
        return tokens, self._multiplier * self._base ** np.minimum(runs - allowed, self._cap)

    def _find_breaker(self, depth: int) -> None:
        """Look for a complete breaker that begins in the last `depth` tokens, the last first."""
        if not self._heads:
            return
        begin = max(0, self._size - depth)
        recent = self._tokens[begin : self._size].tolist()
        for place in range(len(recent) - 1, max(-1, self._break[0] - begin - 1), -1):
            tails = self._heads.get(recent[place], ())
            fits = [len(tail) for tail in tails if _follows(recent, place + 1, tail)]
            if fits:
                self._break = begin + place, max(fits)
                return


def _follows(tokens: list[int], place: int, tail: tuple[int, ...]) -> bool:
    return tuple(tokens[place : place + len(tail)]) == tail


def _suffix_runs(tokens: list[int]) -> list[int]:
    """run(j) of every j, in linear time: the Z-function of the reversed history, reversed."""
    text, size = tokens[::-1], len(tokens)
    runs = [size] * size
    left = right = 0  # the match with the start that reaches furthest: text[left:right]
    for i in range(1, size):
        run = min(right - i, runs[i - left]) if i < right else 0
        while i + run < size and text[run] == text[i + run]:
            run += 1
        runs[i] = run
        if i + run > right:
            left, right = i, i + run
    return runs[::-1]
