"""`/v1/completions`: a body to a `Call`."""

from __future__ import annotations

from typing import Any

from runtime.server.calls import (
    Call,
    build,
    check_model,
    check_prompt,
    read_max_tokens,
    refuse_unknown_meanings,
)
from runtime.server.fields import ApiError, Fields, checked_text, read_object, wrong
from runtime.server.model import Model

DEFAULT_MAX_TOKENS = 16  # OpenAI's


def parse_completion(body: bytes, model: Model) -> Call:
    """What the client asks for. Raises ApiError that names the field, and nothing else."""
    fields = Fields(read_object(body))
    check_model(fields, model)
    refuse_unknown_meanings(fields)
    fields.only("suffix", ("",), "expected it left out: this server does not insert text")
    fields.only("add_special_tokens", (True,), "expected it left out; send token ids instead")
    fields.only("max_completion_tokens", (), "expected max_tokens")
    fields.only("top_logprobs", (), "expected logprobs, a number")
    prompts, texts = _prompts(fields.get("prompt"), model)
    max_tokens = read_max_tokens(fields, "max_tokens", 0, model)
    call = build(
        fields,
        model,
        prompts,
        min(DEFAULT_MAX_TOKENS, model.limits.completion_tokens)
        if max_tokens is None
        else max_tokens,
        fields.integer("logprobs", 0, model.limits.logprobs),
        chat=False,
        echo=texts if fields.boolean("echo") else None,
    )
    best_of = fields.integer("best_of", 1)
    if best_of not in (None, call.n):
        wrong("best_of", best_of, f"{call.n}, as n: this server returns every choice")
    return call


def _prompts(value: Any, model: Model) -> tuple[list[tuple[int, ...]], tuple[str, ...]]:
    """Ids and text of every prompt."""
    if value is None:
        raise ApiError(
            400, "prompt: found nothing, expected text, token ids or a list of either", "prompt"
        )
    if isinstance(value, str):
        items: list[Any] = [value]
        names = ["prompt"]
    elif not isinstance(value, list):
        wrong("prompt", value, "text, token ids or a list of either")
    elif not value:
        wrong("prompt", value, "at least one prompt")
    elif type(value[0]) is int:
        items, names = [value], ["prompt"]
    else:
        items, names = value, [f"prompt[{place}]" for place in range(len(value))]
    if len(items) > model.limits.choices:
        wrong("prompt", value, f"at most {model.limits.choices} prompts")
    kind = type(items[0])
    for name, item in zip(names, items, strict=True):
        if type(item) is not kind or kind not in (str, list):
            wrong(name, item, "text or token ids, the same for all prompts")
    if kind is str:
        pairs = [_of_text(*pair, model) for pair in zip(names, items, strict=True)]
    else:
        pairs = [_of_ids(*pair, model) for pair in zip(names, items, strict=True)]
    return [ids for ids, _ in pairs], tuple(text for _, text in pairs)


def _of_text(name: str, value: str, model: Model) -> tuple[tuple[int, ...], str]:
    text = checked_text(name, value)
    if model.tokenizer is None:
        wrong(name, text, "token ids: this model has no tokenizer")
    return check_prompt(name, model.tokenizer.encode(text) if text else [], model, text), text


def _of_ids(name: str, value: list[Any], model: Model) -> tuple[tuple[int, ...], str]:
    for place, item in enumerate(value):
        if type(item) is not int:
            wrong(f"{name}[{place}]", item, "a token id")
    ids = check_prompt(name, value, model)
    return ids, model.tokenizer.decode(ids) if model.tokenizer is not None else ""
