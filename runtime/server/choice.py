"""One choice of an answer while it is generated: its text, and the tokens that made it.

A token is shown once all text it had a part in is out, so a stop string leaks neither as text nor
as a token: tokens behind the cut are dropped and the one that is cut keeps only the bytes before
it. Without a stop, the bytes of all shown tokens in a row are the bytes of the text.
"""

from __future__ import annotations

import codecs
from collections import deque
from dataclasses import dataclass, field, replace

from runtime.request import Choice, Ending
from runtime.sampling import Logprobs, logprobs
from runtime.server.calls import Call
from runtime.text import Detokenizer, StopStrings
from runtime.tokenizer import Tokenizer, named

LOWEST = -9999.0  # stands for the logarithm of 0, which JSON has no number for


@dataclass(frozen=True)
class Entry:
    """A token of the answer. `name` is how clients see it; `data` its bytes, None if it has none.

    `offset` counts characters from the start of the choice's text, a repeated prompt included.
    `logprob` is None if it was not asked for or nothing predicts the token; `top` holds the
    likeliest tokens, best first, as (name, bytes, logprob).
    """

    token: int
    name: str
    data: bytes | None
    offset: int
    logprob: float | None = None
    top: tuple[tuple[str, bytes | None, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """What may be shown now; false if that is nothing."""

    text: str = ""
    entries: tuple[Entry, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.entries)


@dataclass
class _Held:
    """A token, the text it completed, and where the text it has a part in ends, once known."""

    entry: Entry
    text: str
    tail: bytes  # the start of a character that a later token ends
    end: int | None = None


@dataclass
class _Row:
    """Tokens in order that are not shown yet, from character `offset` on."""

    offset: int = 0
    held: deque[_Held] = field(default_factory=deque)
    _utf8: codecs.IncrementalDecoder = field(default_factory=codecs.getincrementaldecoder("utf-8"))

    def __post_init__(self) -> None:
        self._utf8.errors = "replace"

    def add(self, entry: Entry, text: str) -> None:
        """One more token and the text that it completed."""
        self._utf8.decode(entry.data or b"")
        tail = self._utf8.getstate()[0]
        self.held.append(_Held(replace(entry, offset=self.offset), text, tail))
        self.offset += len(text)
        waits = tail or (entry.data and not text)
        if not waits and (text or not self._open(len(self.held) - 2)):
            self.close()

    def close(self) -> None:
        """The text of all tokens so far is complete."""
        for held in reversed(self.held):
            if held.end is not None:
                break
            held.end = self.offset

    def take(self, shown: int) -> tuple[Entry, ...]:
        """Tokens whose text is all within the first `shown` characters."""
        found = []
        while self.held and (end := self.held[0].end) is not None and end <= shown:
            found.append(self.held.popleft().entry)
        return tuple(found)

    def cut(self, at: int) -> tuple[Entry, ...]:
        """The rest of the tokens when the text ends at character `at`."""
        found = tuple(_trimmed(held, at) for held in self.held if held.entry.offset < at)
        self.held.clear()
        return found

    def _open(self, place: int) -> bool:
        return place >= 0 and self.held[place].end is None


class ChoiceText:
    """Text and tokens of choice `index` of a call. One thread at a time.

    `stopped`: a stop string is complete. `finish_reason`, after `finish`: stop or length, None if
    the choice did not come to its end. Any token will do; `push` raises UserError only for logits
    with NaN or +inf when logprobs are wanted.
    """

    def __init__(self, call: Call, index: int) -> None:
        request = call.requests[index]
        self.finish_reason: str | None = None
        self._tokenizer = call.model.tokenizer
        self._count = call.logprobs
        self._tracked = call.logprobs is not None or call.token_ids
        self._echo = call.echo[index // call.n] if call.echo is not None else ""
        self._echoed = call.echo is None
        self._stops = StopStrings(call.stops)
        self._shown = len(self._echo)
        self._row = _Row(self._shown)
        self._decoder = _stream(self._tokenizer, request.prompt)
        self._prompt = _Row()
        self._prompt_decoder = _stream(self._tokenizer, ())

    @property
    def stopped(self) -> bool:
        """Whether the text has met a stop string."""
        return self._stops.stopped

    def push(self, choice: Choice) -> Piece:
        """What may be shown after one more token."""
        if choice.prompt:
            if self._tracked and not self._echoed:
                text = _push(self._prompt_decoder, choice.token)
                self._prompt.add(self._entry(choice), text)
            return Piece()
        if self.stopped:
            return Piece()
        text = "" if choice.eos else _push(self._decoder, choice.token)
        out = self._stops.push(text)
        if self._tracked:
            self._row.add(self._entry(choice), text)
        return self._piece(out)

    def finish(self, ending: Ending) -> Piece:
        """What was held back until no more tokens come."""
        rest = self._decoder.finish() if self._decoder is not None and not self.stopped else ""
        out = self._stops.push(rest) + self._stops.finish()
        self._row.close()
        piece = self._piece(out)
        if ending.reason in ("stop", "length"):
            self.finish_reason = "stop" if self.stopped else ending.reason
        return piece

    def _piece(self, out: str) -> Piece:
        self._shown += len(out)
        entries = self._row.take(self._shown)
        if self.stopped:
            entries += self._row.cut(self._shown)
        if self._echoed:
            return Piece(out, entries)
        self._echoed = True
        return Piece(self._echo + out, self._repeated() + entries)

    def _repeated(self) -> tuple[Entry, ...]:
        """The prompt's tokens, placed so that they end where the prompt's text ends: a tokenizer
        may have put a space before it."""
        if self._prompt_decoder is not None:
            self._prompt.offset += len(self._prompt_decoder.finish())
        self._prompt.close()
        shift = len(self._echo) - self._prompt.offset
        found = self._prompt.take(self._prompt.offset)
        return tuple(
            replace(e, offset=min(max(e.offset + shift, 0), len(self._echo))) for e in found
        )

    def _entry(self, choice: Choice) -> Entry:
        name, data = self._label(choice.token)
        data = None if choice.eos else data
        if self._count is None or choice.logits is None:
            return Entry(choice.token, name, data, 0)
        found: Logprobs = logprobs(choice.logits, choice.token, self._count)
        top = tuple((*self._label(token), max(value, LOWEST)) for token, value in found.top)
        return Entry(choice.token, name, data, 0, max(found.logprob, LOWEST), top)

    def _label(self, token: int) -> tuple[str, bytes | None]:
        if self._tokenizer is None:
            return f"token_id:{token}", None
        return self._tokenizer.label(token)


def _stream(tokenizer: Tokenizer | None, prompt: tuple[int, ...]) -> Detokenizer | None:
    return None if tokenizer is None else tokenizer.stream(prompt)


def _push(decoder: Detokenizer | None, token: int) -> str:
    return "" if decoder is None else decoder.push(token)


def _trimmed(held: _Held, at: int) -> Entry:
    """The token without its bytes from character `at` on."""
    entry, end = held.entry, held.entry.offset + len(held.text)
    if entry.data is None or not held.text or end < at or (end == at and not held.tail):
        return entry
    behind = held.text[at - entry.offset :].encode() + held.tail
    data = entry.data[: max(0, len(entry.data) - len(behind))]
    return replace(entry, data=data, name=named(data))
