"""The JSON objects of OpenAI's API: completions, chat completions, their chunks, models, usage."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.request import Ending
from runtime.server.calls import Call
from runtime.server.choice import Entry, Piece
from runtime.server.fields import ApiError
from runtime.server.model import Model

Object = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """All of one choice: its pieces joined."""

    text: str
    entries: tuple[Entry, ...]
    finish_reason: str | None

    @classmethod
    def join(cls, pieces: Iterable[Piece], finish_reason: str | None) -> Answer:
        """The answer that a stream of pieces makes."""
        kept = list(pieces)
        entries = tuple(entry for piece in kept for entry in piece.entries)
        return cls("".join(piece.text for piece in kept), entries, finish_reason)


def whole(call: Call, answers: Sequence[Answer], usage: Object) -> Object:
    """The answer in one object: choice i is `answers[i]`."""
    choices = []
    for index, answer in enumerate(answers):
        content: Object = {"text": answer.text}
        if call.chat:
            content = {"message": {"role": "assistant", "content": answer.text, "refusal": None}}
        choices.append(_choice(call, index, content, answer.entries, answer.finish_reason))
    kind = "chat.completion" if call.chat else "text_completion"
    return {**_head(call, kind), "choices": choices, "usage": usage}


def opening(call: Call, index: int) -> list[Object]:
    """What a stream starts a choice with: the role in a chat, nothing else."""
    if not call.chat:
        return []
    delta = {"role": "assistant", "content": "", "refusal": None}
    return [_chunk(call, [_choice(call, index, {"delta": delta}, (), None)])]


def chunk(call: Call, index: int, piece: Piece) -> Object:
    """One more piece of a choice."""
    content: Object = {"delta": {"content": piece.text}} if call.chat else {"text": piece.text}
    return _chunk(call, [_choice(call, index, content, piece.entries, None)])


def closing(call: Call, index: int, finish_reason: str | None) -> Object:
    """The end of a choice."""
    content: Object = {"delta": {}} if call.chat else {"text": ""}
    return _chunk(call, [_choice(call, index, content, (), finish_reason)])


def usage(call: Call, endings: Iterable[Ending]) -> Object:
    """Tokens read and generated; each prompt counts once, whatever n is."""
    generated = sum(ending.generated for ending in endings)
    return {
        "prompt_tokens": call.prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": call.prompt_tokens + generated,
    }


def usage_chunk(call: Call, usage: Object) -> Object:
    """The last chunk of a stream whose client asked for usage."""
    return {**_chunk(call, []), "usage": usage}


def models(model: Model) -> Object:
    """The list of models: the one that is served."""
    return {"object": "list", "data": [model_card(model)]}


def model_card(model: Model) -> Object:
    """One model; `max_model_len` (tokens) is null for a model without a bound on its context."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "scanwright",
        "max_model_len": model.manifest.shape.context,
    }


def ending_error(ending: Ending) -> ApiError | None:
    """What to answer for a choice that did not come to its end; None if it did."""
    if ending.reason in ("stop", "length"):
        return None
    message = ending.message or ending.reason
    if ending.reason == "deadline":
        return ApiError(504, message, code="timeout", type="server_error")
    if ending.reason == "cancelled":
        return ApiError(503, message, code="cancelled", type="server_error")
    return ApiError(500, message, code="internal_error", type="server_error")


def encode(value: Any) -> bytes:
    """Compact JSON in UTF-8. Raises ValueError for NaN and infinities."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode()


def _head(call: Call, kind: str) -> Object:
    return {
        "id": call.id,
        "object": kind,
        "created": call.created,
        "model": call.model.name,
        "system_fingerprint": call.model.fingerprint,
    }


def _chunk(call: Call, choices: list[Object]) -> Object:
    kind = "chat.completion.chunk" if call.chat else "text_completion"
    found = {**_head(call, kind), "choices": choices}
    return {**found, "usage": None} if call.include_usage else found


def _choice(
    call: Call, index: int, content: Object, entries: Sequence[Entry], finish_reason: str | None
) -> Object:
    scores = None
    if call.logprobs is not None and entries:
        scores = _chat_logprobs(entries) if call.chat else _logprobs(entries)
    found = {"index": index, **content, "logprobs": scores, "finish_reason": finish_reason}
    if call.token_ids:
        found["token_ids"] = [entry.token for entry in entries]
    return found


def _chat_logprobs(entries: Sequence[Entry]) -> Object:
    content = []
    for entry in entries:
        top = [_scored(name, data, value) for name, data, value in entry.top]
        scored = _scored(entry.name, entry.data, entry.logprob)
        content.append({**scored, "top_logprobs": top})
    return {"content": content, "refusal": None}


def _scored(name: str, data: bytes | None, logprob: float | None) -> Object:
    return {"token": name, "logprob": logprob, "bytes": None if data is None else list(data)}


def _logprobs(entries: Sequence[Entry]) -> Object:
    return {
        "tokens": [entry.name for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [_by_name(entry) for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


def _by_name(entry: Entry) -> dict[str, float] | None:
    """The likeliest tokens and the chosen one; of two with one name, the likelier."""
    if entry.logprob is None:
        return None
    found: dict[str, float] = {}
    for name, _, value in entry.top:
        found.setdefault(name, value)
    found.setdefault(entry.name, entry.logprob)
    return found
