"""From token ids to text while it is being generated: whole characters only, stops never leaked.

A character whose bytes are spread over several tokens comes out with the last of them; bytes that
can never become a character come out as U+FFFD, one for each maximal ill-formed run (Unicode 16,
section 3.9). Text that may still turn out to be the start of a stop string is held back.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

from runtime.errors import UserError

_REPLACEMENT = "\ufffd"
_CONTEXT = 8  # prompt tokens a window starts with, enough for the rules of any known decoder
_PENDING = 8  # tokens held back at most: a character has four bytes


class Detokenizer(Protocol):
    """Turns ids into text, one at a time."""

    def push(self, token: int) -> str:
        """Text that `token` completes, maybe empty."""
        ...

    def finish(self) -> str:
        """Whole characters still held back; bytes of an unfinished one are dropped."""
        ...


class PieceDetokenizer:
    """For tokenizers in which every token stands for fixed bytes (`piece(id)`).

    A character that `prompt` leaves unfinished comes out whole with its last byte.
    """

    def __init__(self, piece: Callable[[int], bytes], prompt: Sequence[int] = ()) -> None:
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(b"".join(map(piece, prompt[-4:])))

    def push(self, token: int) -> str:
        """Text that `token` completes, maybe empty."""
        return self._decoder.decode(self._piece(token))

    def finish(self) -> str:
        """Nothing: only bytes of an unfinished character can be left."""
        self._decoder.reset()
        return ""


class WindowDetokenizer:
    """For any other tokenizer: the difference between the decoded ids with and without the new.

    `decode` maps ids to text; `prompt` is what the generated text continues.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int]) -> None:
        self._decode = decode
        self._ids = list(prompt[-_CONTEXT:])
        self._shown = len(self._ids)  # ids whose text is out

    def push(self, token: int) -> str:
        """Text that `token` completes, maybe empty."""
        self._ids.append(token)
        fresh = self._fresh()
        if fresh.endswith(_REPLACEMENT) and len(self._ids) - self._shown < _PENDING:
            return ""
        self._ids = self._ids[-_CONTEXT:]
        self._shown = len(self._ids)
        return fresh

    def finish(self) -> str:
        """Whole characters still held back."""
        fresh = self._fresh().rstrip(_REPLACEMENT)
        self._shown = len(self._ids)
        return fresh

    def _fresh(self) -> str:
        return self._decode(self._ids)[len(self._decode(self._ids[: self._shown])) :]


class StopStrings:
    """Cuts a stream of text before the stop string that starts first.

    What comes out does not depend on how the text is split: it is the text up to the earliest
    start of any stop in the text seen until that start was certain.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise UserError("stop: found an empty string, expected at least one character")
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Text that is certainly before any stop; sets `stopped` once a stop is complete."""
        if self.stopped:
            return ""
        self._held += text
        match, pending = self._match(), self._pending()
        if match < len(self._held) and match <= pending:
            return self._stop(match)
        out, self._held = self._held[:pending], self._held[pending:]
        return out

    def finish(self) -> str:
        """The rest, when no more text comes: up to a complete stop, if one was waiting."""
        if not self.stopped and self._match() < len(self._held):
            return self._stop(self._match())
        out, self._held = self._held, ""
        return out

    def _stop(self, at: int) -> str:
        self.stopped = True
        out, self._held = self._held[:at], ""
        return out

    def _match(self) -> int:
        """Where the first complete stop starts; the length of the text if there is none."""
        found = (self._held.find(stop) for stop in self._stops)
        return min((at for at in found if at >= 0), default=len(self._held))

    def _pending(self) -> int:
        """Where the first unfinished stop starts; the length of the text if there is none."""
        end = len(self._held)
        for at in range(max(0, end - self._longest + 1), end):
            tail = self._held[at:]
            if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops):
                return at
        return end


class TextStream:
    """A detokenizer and stop strings in a row: what a client may see after each token."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was met."""
        return self._stops.stopped

    def push(self, token: int) -> str:
        """Text to show after `token`."""
        return self._stops.push(self._detokenizer.push(token))

    def finish(self) -> str:
        """Text to show when no more tokens come; may meet a stop that was waiting."""
        return self._stops.push(self._detokenizer.finish()) + self._stops.finish()
