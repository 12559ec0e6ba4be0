"""Which modules the patterns of a config mean, in time bounded whatever the pattern says.

The libraries match such a pattern with Python's `re.match`: at the start of a module's name. That
can take for ever on a pattern made for it, so a pattern that repeats groups, or repeats often, is
matched here by sets of positions. The language is that of `re` without back references,
look-behind, possessive repetitions and flags.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from emit.errors import EmitError

MOST = 500  # characters of a pattern, and of a name it can match
DEEPEST = 20  # groups within groups
FEW = 2  # repetitions that `re` is quick with
MANY = 1000  # patterns of one config
STEPS = 10**8  # of one pattern over all names

Meaning = Callable[[str], Callable[[str], bool] | None]
Ends = frozenset[int]
NONE: Ends = frozenset()


@dataclass
class _Work:
    """What a pattern has cost."""

    steps: int = 0

    def add(self, steps: int) -> None:
        self.steps += steps
        if self.steps > STEPS:
            raise EmitError(f"a pattern takes more than {STEPS} steps; name the modules instead")


@dataclass
class _Text:
    """A name being matched, and where each part of the pattern ends from each start."""

    text: str
    work: _Work
    known: dict[tuple[int, int], Ends] = field(default_factory=dict)

    def ends(self, node: Node, start: int) -> Ends:
        key = (id(node), start)
        if key not in self.known:
            self.known[key] = node(self, start)
        return self.known[key]

    def all_ends(self, node: Node, starts: Ends) -> Ends:
        self.work.add(1 + len(starts))
        return frozenset(end for start in starts for end in self.ends(node, start))


Node = Callable[[_Text, int], Ends]


def pattern(source: str) -> Callable[[str], bool]:
    """Whether `re.match(source, name)` finds anything, as a function of the name.

    Raises EmitError for a pattern that is malformed, too long or not supported.
    """
    if len(source) > MOST:
        raise EmitError(f"the pattern {source[:60]!r}… has more than {MOST} characters")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            direct = re.compile(source)
        except (re.error, OverflowError, RecursionError) as error:
            raise EmitError(f"the pattern {source[:60]!r} is malformed: {error}") from None
        parser = _Parser(source)
        node = parser.alternatives(0)
    if parser.repeats <= FEW and not parser.nested:
        return lambda name: len(name) <= MOST and direct.match(name) is not None
    work = _Work()
    return lambda name: len(name) <= MOST and bool(_Text(name, work).ends(node, 0))


class _Parser:
    """Recursive descent over a pattern that `re` accepts."""

    def __init__(self, source: str) -> None:
        self.source, self.at = source, 0
        self.repeats, self.nested = 0, False

    def refuse(self, what: str) -> EmitError:
        return EmitError(f"the pattern {self.source[:60]!r}: {what} is not supported")

    def peek(self, word: str) -> bool:
        """Skip `word` if it is next."""
        if self.source.startswith(word, self.at):
            self.at += len(word)
            return True
        return False

    def alternatives(self, depth: int) -> Node:
        if depth > DEEPEST:
            raise self.refuse(f"more than {DEEPEST} groups within each other")
        choices = [self.sequence(depth)]
        while self.peek("|"):
            choices.append(self.sequence(depth))
        if len(choices) == 1:
            return choices[0]
        return lambda text, at: frozenset(end for node in choices for end in text.ends(node, at))

    def sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while self.at < len(self.source) and self.source[self.at] not in "|)":
            group = self.source[self.at] == "("
            parts.append(self.repeated(self.atom(depth), group))

        def run(text: _Text, at: int) -> Ends:
            ends: Ends = frozenset((at,))
            for part in parts:
                ends = text.all_ends(part, ends)
            return ends

        return run

    def repeated(self, node: Node, group: bool) -> Node:
        count = self.quantifier()
        if count is None:
            return node
        if not self.peek("?") and self.peek("+"):
            raise self.refuse("a possessive repetition")
        self.nested |= group
        self.repeats += count[1] > 1
        return _repeat(node, *count)

    def quantifier(self) -> tuple[int, int] | None:
        """The next quantifier as (least, most), MOST for no limit."""
        for word, count in {"*": (0, MOST), "+": (1, MOST), "?": (0, 1)}.items():
            if self.peek(word):
                return count
        found = re.compile(r"\{(\d*)(,?)(\d*)\}").match(self.source, self.at)
        if found is None or found.group() in ("{}", "{,}"):
            return None
        self.at = found.end()
        least = int(found[1] or 0)
        most = int(found[3]) if found[3] else MOST if found[2] else least
        return min(least, MOST + 1), min(most, MOST)

    def atom(self, depth: int) -> Node:
        if self.peek("("):
            return self.group(depth)
        if self.peek("^") or self.peek("\\A"):
            return lambda _, at: frozenset((at,)) if at == 0 else NONE
        if self.peek("$") or self.peek("\\Z"):
            return lambda text, at: frozenset((at,)) if at == len(text.text) else NONE
        return self.character()

    def group(self, depth: int) -> Node:
        kind = next((word for word in ("?:", "?=", "?!") if self.peek(word)), "")
        if not kind and self.source.startswith("?", self.at) and not self.peek_name():
            raise self.refuse(f"the group ({self.source[self.at : self.at + 3]}")
        node = self.alternatives(depth + 1)
        self.at += 1  # the closing bracket, which `re` has seen
        if kind in ("?=", "?!"):
            wanted = kind == "?="
            return lambda text, at: (
                frozenset((at,)) if bool(text.ends(node, at)) == wanted else NONE
            )
        return node

    def peek_name(self) -> bool:
        found = re.compile(r"\?P<\w+>").match(self.source, self.at)
        self.at = found.end() if found else self.at
        return found is not None

    def character(self) -> Node:
        """One character: itself, escaped, a class of the three letters d, w, s, or a set."""
        start = self.at
        if self.peek("["):
            self.peek("^")
            self.peek("]")
            while not self.peek("]"):
                self.at += 2 if self.source[self.at] == "\\" else 1
        elif self.peek("\\"):
            if self.source[self.at].isalnum() and self.source[self.at] not in "dDwWsStnr":
                raise self.refuse(f"\\{self.source[self.at]}")
            self.at += 1
        else:
            self.at += 1
        one = re.compile(self.source[start : self.at])

        def run(text: _Text, at: int) -> Ends:
            fits = at < len(text.text) and one.fullmatch(text.text[at])
            return frozenset((at + 1,)) if fits else NONE

        return run


def _repeat(node: Node, least: int, most: int) -> Node:
    def run(text: _Text, at: int) -> Ends:
        ends: Ends = frozenset((at,))
        for _ in range(least):
            ends = text.all_ends(node, ends)
            if not ends:
                return ends
        fresh = ends
        for _ in range(most - least):
            fresh = text.all_ends(node, fresh) - ends
            if not fresh:
                break
            ends |= fresh
        return ends

    return run


@dataclass(frozen=True)
class Names:
    """Module names and patterns, each with what is said of the modules that it means."""

    exact: Mapping[str, Any]
    patterns: tuple[tuple[Callable[[str], bool], Any], ...]

    @classmethod
    def of(cls, said: Mapping[str, Any], meant: Meaning) -> Names:
        """`meant` makes a pattern of a word, or None where it is a name. Raises EmitError."""
        exact: dict[str, Any] = {}
        patterns: list[tuple[Callable[[str], bool], Any]] = []
        for word, value in said.items():
            found = meant(word)
            if found is None:
                exact[word] = value
            else:
                patterns.append((found, value))
        if len(patterns) > MANY:
            raise EmitError(
                f"config.json: {len(patterns)} patterns of names, expected {MANY} at most"
            )
        return cls(exact, tuple(patterns))

    def get(self, name: str, default: Any = None) -> Any:
        """What is said of `name`, or else of the first pattern that means it."""
        if name in self.exact:
            return self.exact[name]
        return next((value for meant, value in self.patterns if meant(name)), default)


def marked(word: str) -> Callable[[str], bool] | None:
    """The pattern after `re:`; None for a plain name."""
    return pattern(word.removeprefix("re:")) if word.startswith("re:") else None


def wildcard(word: str) -> Callable[[str], bool] | None:
    """Whether a name is `word`, in which a * stands for any characters; None without a *."""
    if "*" not in word:
        return None
    first, *rest = word.split("*")

    def fits(name: str) -> bool:
        if not name.startswith(first):
            return False
        at = len(first)
        for piece in rest[:-1]:
            found = name.find(piece, at)
            if found < 0:
                return False
            at = found + len(piece)
        return len(name) - at >= len(rest[-1]) and name.endswith(rest[-1])

    return fits
