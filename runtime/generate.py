"""One sequence from one bundle, through the engine, to its end.

The end-of-sequence id that ends a generation is the last of `tokens`, as in transformers'
`generate`, and has no text. A stop string ends `text` before it; `tokens` keeps the ids that made
it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from runtime.engine import Engine
from runtime.errors import UserError
from runtime.request import Choice, Ending, Request
from runtime.sampling import top_logits
from runtime.saved import Saved
from runtime.text import TextStream

Show = Callable[[int | None, str], None]


@dataclass
class Result:
    """What came out. Times are seconds of wall clock; `prefill_s` ends with the first token."""

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = "length"
    prefill_s: float = 0.0
    decode_s: float = 0.0
    top_logits: list[list[tuple[int, float]]] | None = None
    saved: Saved | None = None

    def to_json(self, open_s: float) -> dict[str, Any]:
        """The object that `scanwright generate --json` prints."""
        steps = max(0, len(self.tokens) - 1)
        fields: dict[str, Any] = {
            "prompt_tokens": list(self.prompt),
            "tokens": self.tokens,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "timings": {
                "open_s": open_s,
                "prefill_s": self.prefill_s,
                "decode_s": self.decode_s,
                "prefill_tokens_per_s": _rate(len(self.prompt), self.prefill_s),
                "decode_tokens_per_s": _rate(steps, self.decode_s),
            },
        }
        if self.top_logits is not None:
            fields["top_logits"] = self.top_logits
        return fields


def generate(
    engine: Engine,
    request: Request,
    stream: TextStream | None = None,
    show: Show = lambda token, text: None,
    top: int = 0,
) -> Result:
    """Run `request` on an engine that nothing else uses and return all of it.

    `show(token, text)` is called for each token as it comes, and once more with None for text that
    was held back; `text` is what is safe to print, empty without `stream`. `top` largest logits of
    each step are reported if `request.logits` is set. Raises UserError for a request this model
    cannot run.
    """
    sink = _Collect(Result(request.prompt, top_logits=[] if top else None), stream, show, top)
    engine.submit(request, sink)
    while engine.step():
        pass
    ending = sink.ending
    assert ending is not None
    if sink.failure is not None:
        raise sink.failure
    if ending.reason == "error":
        raise UserError(ending.message)
    return sink.result


class _Collect:
    """The sink that fills a Result."""

    def __init__(self, result: Result, stream: TextStream | None, show: Show, top: int) -> None:
        self.result = result
        self.ending: Ending | None = None
        self.failure: Exception | None = None
        self._stream = stream
        self._show = show
        self._top = top

    def token(self, choice: Choice) -> bool:
        """See Sink.token."""
        result, stream = self.result, self._stream
        result.tokens.append(choice.token)
        if result.top_logits is not None and choice.logits is not None:
            result.top_logits.append(top_logits(choice.logits, self._top))
        self._add(choice.token, "" if choice.eos or not stream else stream.push(choice.token))
        return self.failure is not None or (stream is not None and stream.stopped)

    def finish(self, ending: Ending) -> None:
        """See Sink.finish."""
        self.ending = ending
        result = self.result
        result.finish_reason = ending.reason
        result.saved = ending.saved
        first = ending.ended if ending.first_token is None else ending.first_token
        result.prefill_s = first - (ending.started or first)
        result.decode_s = ending.ended - first
        if self._stream is not None and ending.reason != "error":
            self._add(None, self._stream.finish())
            if self._stream.stopped:
                result.finish_reason = "stop"

    def _add(self, token: int | None, text: str) -> None:
        self.result.text += text
        try:
            self._show(token, text)
        except Exception as error:  # a closed pipe, say: for the caller, not for the engine
            self.failure = self.failure or error


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
