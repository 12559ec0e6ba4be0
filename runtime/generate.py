"""One sequence from one bundle: prefill, seed slot 0, decode until something ends it.

The end-of-sequence id that ends a generation is the last of `tokens`, as in transformers'
`generate`, and has no text. A stop string ends `text` before it; `tokens` keeps the ids that made
it. Greedy decoding reads the device's argmax; logits cross to the host only when sampling or top
logits need them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.errors import UserError
from runtime.manifest import Manifest
from runtime.sampling import Sampler, SamplingParams, top_logits
from runtime.text import TextStream

Show = Callable[[int | None, str], None]


class Host(Protocol):
    """The part of a device that reads results back."""

    def to_host(self, buffer: Any) -> NDArray[Any]:
        """Copy a device buffer to a NumPy array."""
        ...


class Steps(Protocol):
    """The part of a session that generation drives; results are (logits, argmax) buffers."""

    def prefill(self, tokens: Sequence[int]) -> tuple[Any, Any]:
        """Run a prompt on a private state: logits f32[1,V], argmax i32[1]."""
        ...

    def admit(self, slot: int) -> None:
        """Move the private state into a slot."""
        ...

    def decode(
        self, tokens: NDArray[np.int32], positions: NDArray[np.int32], active: NDArray[np.int32]
    ) -> tuple[Any, Any]:
        """One step of all slots, i32[B] each: logits f32[B,V], argmax i32[B]."""
        ...


@dataclass(frozen=True)
class Request:
    """What to generate from `prompt` (token ids). Raises UserError that names the field."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    ignore_eos: bool = False
    top_logits: int = 0

    def __post_init__(self) -> None:
        if not self.prompt:
            raise UserError("prompt: found no tokens, expected at least one")
        if self.max_tokens < 0:
            raise UserError(f"max-tokens: found {self.max_tokens}, expected 0 or more")
        if self.top_logits < 0:
            raise UserError(f"top-logits: found {self.top_logits}, expected 0 (off) or more")

    def check(self, manifest: Manifest) -> None:
        """Raise UserError if this model cannot run the request."""
        vocab, context = manifest.model.vocab_size, manifest.shape.context
        for place, token in enumerate(self.prompt):
            if not 0 <= token < vocab:
                raise UserError(
                    f"prompt: found token id {token} at place {place}, expected 0 to {vocab - 1}"
                    f" (the vocabulary of {manifest.model.name})"
                )
        if context is not None and len(self.prompt) > context:
            raise UserError(
                f"prompt: found {len(self.prompt)} tokens, expected at most {context} (the context"
                f" of shape {manifest.shape.name}); shorten it or build a shape with a longer"
                " context"
            )

    def limit(self, manifest: Manifest) -> int:
        """Tokens that can be generated: the last one needs no room in the context."""
        context = manifest.shape.context
        if context is None:
            return self.max_tokens
        return min(self.max_tokens, context - len(self.prompt) + 1)


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
    session: Steps,
    host: Host,
    manifest: Manifest,
    request: Request,
    stream: TextStream | None = None,
    show: Show = lambda token, text: None,
) -> Result:
    """Run `request` and return all of it.

    `show(token, text)` is called for each token as it comes, and once more with None for text that
    was held back; `text` is what is safe to print, empty without `stream`. Raises UserError for a
    request this model cannot run.
    """
    request.check(manifest)
    result = Result(request.prompt, top_logits=[] if request.top_logits else None)
    picker = _Picker(host, request, result)
    limit = request.limit(manifest)
    begun = time.perf_counter()
    outputs = session.prefill(request.prompt)
    if limit == 0:
        host.to_host(outputs[1])
        result.prefill_s = time.perf_counter() - begun
        return result
    if limit > 1:
        session.admit(0)
    token = picker.pick(*outputs)
    started = time.perf_counter()
    result.prefill_s = started - begun
    ends = () if request.ignore_eos else manifest.model.eos_token_ids
    rows = _Rows(manifest.shape.slots, len(request.prompt))
    while not _accept(result, token, ends, stream, show) and len(result.tokens) < limit:
        token = picker.pick(*session.decode(*rows.next(token)))
    result.decode_s = time.perf_counter() - started
    if stream is not None:
        _add(result, None, stream.finish(), show)
        if stream.stopped:
            result.finish_reason = "stop"
    return result


class _Picker:
    """Chooses the next token from the outputs of a call, reading back as little as it can."""

    def __init__(self, host: Host, request: Request, result: Result) -> None:
        self._host = host
        self._sampler = None if request.sampling.greedy else Sampler(request.sampling)
        self._count = request.top_logits
        self._result = result

    def pick(self, logits: Any, argmax: Any) -> int:
        """The token of row 0; records its top logits if they were asked for."""
        row = None
        if self._sampler is not None or self._count:
            row = self._host.to_host(logits)[0]
        if self._result.top_logits is not None and row is not None:
            self._result.top_logits.append(top_logits(row, self._count))
        if self._sampler is not None and row is not None:
            return self._sampler.sample(row)
        return int(self._host.to_host(argmax)[0])


class _Rows:
    """Arguments of decode, i32[B] each, with only slot 0 active."""

    def __init__(self, slots: int, position: int) -> None:
        self._slots = slots
        self._position = position

    def next(self, token: int) -> tuple[NDArray[np.int32], ...]:
        """The arrays that feed `token` at the next position."""
        rows = np.zeros((3, self._slots), np.int32)
        rows[:, 0] = token, self._position, 1
        self._position += 1
        return tuple(rows)


def _accept(
    result: Result, token: int, ends: Sequence[int], stream: TextStream | None, show: Show
) -> bool:
    """Record `token`; whether it ends the sequence."""
    result.tokens.append(token)
    if token in ends:
        result.finish_reason = "stop"
        _add(result, token, "", show)
        return True
    _add(result, token, stream.push(token) if stream is not None else "", show)
    if stream is not None and stream.stopped:
        result.finish_reason = "stop"
        return True
    return False


def _add(result: Result, token: int | None, text: str, show: Show) -> None:
    result.text += text
    show(token, text)


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
