"""One call of a client: the requests it stands for and how its answer is to be written.

Fields that both endpoints share are read here. Fields known from OpenAI's, vLLM's and llama.cpp's
servers that would change the answer but are not carried out here are refused by name; other
unknown fields are ignored, as clients expect.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from runtime.dry import DEFAULT_BREAKERS
from runtime.errors import UserError
from runtime.request import Request, check_tokens
from runtime.sampling import SamplingParams
from runtime.server.fields import ApiError, Fields, checked_number, show, wrong
from runtime.server.model import Model

MAX_BIAS = 1024  # entries of logit_bias
MAX_PENALTY = 2.0  # OpenAI's range of frequency_penalty and presence_penalty
MAX_BREAKERS, MAX_BREAKER_CHARS = 16, 40
_PRIORITIES = 1000
_ID = re.compile(r"0|[1-9][0-9]{0,9}")

# Field, the values that change nothing. Everything else is refused.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "cfg_scale": (1, 1.0),
    "dynatemp_range": (0, 0.0),
    "grammar": ("",),
    "guided_choice": ([],),
    "guided_grammar": ("",),
    "guided_json": (),
    "guided_regex": ("",),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "min_tokens": (0,),
    "mirostat": (0,),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_logprobs": (),
    "n_predict": (),
    "repeat_last_n": (),
    "repeat_penalty": (1, 1.0),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "tools": ([],),
    "top_n_sigma": (-1, -1.0, 0, 0.0),
    "truncate_prompt_tokens": (),
    "typical_p": (1, 1.0),
    "use_beam_search": (False,),
    "xtc_probability": (0, 0.0),
}


@dataclass(frozen=True)
class Call:
    """What a client asked for. Choice i is `requests[i]`: the `n` of the first prompt come first.

    `logprobs` is the number of likeliest tokens to list, None if no logprobs were asked for;
    `echo` holds the text of each prompt if it is to be repeated; with `token_ids` every choice
    lists its ids. `id` and `created` (seconds since 1970) go into every object of the answer.
    """

    chat: bool
    model: Model
    requests: tuple[Request, ...]
    n: int
    stream: bool = False
    include_usage: bool = False
    stops: tuple[str, ...] = ()
    logprobs: int | None = None
    echo: tuple[str, ...] | None = None
    token_ids: bool = False
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        if not self.id:
            kind = "chatcmpl" if self.chat else "cmpl"
            object.__setattr__(self, "id", f"{kind}-{secrets.token_hex(12)}")

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(request.prompt) for request in self.requests[:: self.n])


def refuse_unknown_meanings(fields: Fields) -> None:
    """Raise ApiError for a known field that this server does not carry out."""
    for name, neutral in _REFUSED.items():
        fields.only(name, neutral, "expected it left out: this server does not carry it out")


def check_model(fields: Fields, model: Model) -> None:
    """Raise ApiError 404 unless `model` is the one served or not given."""
    name = fields.text("model")
    if name is not None and name != model.name:
        raise ApiError(
            404,
            f"model: found {show(name)}, expected {show(model.name)}, the one this server has",
            "model",
            "model_not_found",
        )


def build(
    fields: Fields,
    model: Model,
    prompts: Sequence[tuple[int, ...]],
    max_tokens: int | None,
    logprobs: int | None,
    chat: bool,
    echo: tuple[str, ...] | None = None,
) -> Call:
    """The call whose prompts, limit and logprobs an endpoint has read. Raises ApiError."""
    n = fields.integer("n", 1, model.limits.n) or 1
    if n * len(prompts) > model.limits.choices:
        raise ApiError(
            400,
            f"n: found {n} choices for each of {len(prompts)} prompts, expected at most"
            f" {model.limits.choices} in all",
            "n",
        )
    fields.text("user")
    stream, include_usage = _stream(fields)
    sampling = read_sampling(fields, model)
    request = Request(
        prompts[0],
        model.limits.completion_tokens if max_tokens is None else max_tokens,
        ignore_eos=fields.boolean("ignore_eos"),
        logits=logprobs is not None,
        score_prompt=echo is not None and logprobs is not None,
        priority=_priority(fields, model),
        deadline_s=model.limits.deadline_s,
    )
    if logprobs is not None:
        scored = sum(map(len, prompts)) if request.score_prompt else 0
        entries = n * (scored + len(prompts) * request.max_tokens) * (logprobs + 1)
        if entries > model.limits.entries:
            raise ApiError(
                400,
                f"logprobs: found {entries} of them to list (choices, times tokens, times logprobs"
                f" and 1), expected at most {model.limits.entries}; lower max_tokens or n",
                "logprobs",
            )
    each = [_seeded(sampling, place) for place in range(n)]
    return Call(
        chat=chat,
        model=model,
        requests=tuple(replace(request, prompt=p, sampling=s) for p in prompts for s in each),
        n=n,
        stream=stream,
        include_usage=include_usage,
        stops=read_stops(fields, model),
        logprobs=logprobs,
        echo=echo,
        token_ids=fields.boolean("return_token_ids") or model.tokenizer is None,
    )


def read_max_tokens(fields: Fields, key: str, low: int, model: Model) -> int | None:
    """A limit on generated tokens."""
    return fields.integer(key, low, model.limits.completion_tokens)


def read_stops(fields: Fields, model: Model) -> tuple[str, ...]:
    """Stop strings."""
    stops = fields.strings("stop", model.limits.stops, model.limits.stop_chars) or ()
    if stops and model.tokenizer is None:
        wrong("stop", fields.get("stop"), "none: this model has no tokenizer, so no text to match")
    return stops


def read_sampling(fields: Fields, model: Model) -> SamplingParams:
    """How tokens are picked; OpenAI's defaults (temperature and top_p 1)."""
    top_k = fields.integer("top_k", -1)
    seed = fields.integer("seed", 0)
    found: dict[str, Any] = {
        "temperature": fields.number("temperature", 0),
        "top_k": None if top_k is None else max(top_k, 0),
        "top_p": fields.number("top_p", 0, 1),
        "min_p": fields.number("min_p", 0, 1),
        "seed": seed,
        "repetition_penalty": fields.number("repetition_penalty", 0),
        "frequency_penalty": fields.number("frequency_penalty", -MAX_PENALTY, MAX_PENALTY),
        "presence_penalty": fields.number("presence_penalty", -MAX_PENALTY, MAX_PENALTY),
        "dry_multiplier": fields.number("dry_multiplier", 0),
        "dry_base": fields.number("dry_base", 0),
        "dry_allowed_length": fields.integer("dry_allowed_length", 0),
        "dry_penalty_last_n": fields.integer("dry_penalty_last_n", -1),
        "logit_bias": _logit_bias(fields, model),
    }
    breakers = fields.strings("dry_sequence_breakers", MAX_BREAKERS, MAX_BREAKER_CHARS)
    if breakers and model.tokenizer is None:
        wrong(
            "dry_sequence_breakers",
            fields.get("dry_sequence_breakers"),
            "none: this model has no tokenizer, so no text to break at",
        )
    if found["dry_multiplier"] and model.tokenizer is not None:
        words = DEFAULT_BREAKERS if breakers is None else breakers
        found["dry_breakers"] = model.breakers(words)
    given = {"temperature": 1.0, **{k: v for k, v in found.items() if v is not None}}
    try:
        return SamplingParams(**given)
    except UserError as error:
        raise _named(error, given) from error


def check_prompt(
    name: str, tokens: Sequence[int], model: Model, text: str | None = None
) -> tuple[int, ...]:
    """A prompt's ids, if this model can read them. Raises ApiError 400 naming `name`."""
    if not tokens:
        what = "an empty list" if text is None else f"{show(text)}, which has no tokens"
        raise ApiError(400, f"{name}: found {what}, expected at least one token", name)
    context = model.manifest.shape.context
    limit = min(model.limits.prompt_tokens, context or model.limits.prompt_tokens)
    if len(tokens) > limit:
        whose = "the context of this model" if limit == context else "the limit of this server"
        raise ApiError(
            400,
            f"{name}: found {len(tokens)} tokens, expected at most {limit} ({whose})",
            name,
            "context_length_exceeded",
        )
    try:
        check_tokens(tokens, model.manifest)
    except UserError as error:
        words = str(error).removeprefix("prompt: ")
        raise ApiError(400, f"{name}: {words}", name) from error
    return tuple(tokens)


def _stream(fields: Fields) -> tuple[bool, bool]:
    stream = fields.boolean("stream")
    options = fields.object("stream_options")
    if options is None:
        return stream, False
    include_usage = options.boolean("include_usage")
    if not stream:
        wrong("stream_options", fields.get("stream_options"), "it only together with stream: true")
    return stream, include_usage


def _priority(fields: Fields, model: Model) -> int:
    """vLLM's meaning: lower goes first."""
    value = fields.integer("priority", -_PRIORITIES, _PRIORITIES) or 0
    if value and not model.limits.priority:
        wrong("priority", value, "0: this server was started without --priorities")
    return -value


def _logit_bias(fields: Fields, model: Model) -> tuple[tuple[int, float], ...] | None:
    value = fields.get("logit_bias")
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > MAX_BIAS:
        wrong("logit_bias", value, f"an object of at most {MAX_BIAS} entries, id: number")
    last = model.manifest.model.vocab_size - 1
    found = []
    for key, bias in value.items():
        if not _ID.fullmatch(key) or int(key) > last:
            wrong("logit_bias", key, f"token ids from 0 to {last} as keys")
        found.append((int(key), checked_number(f"logit_bias.{key}", bias, -100, 100)))
    return tuple(sorted(found))


def _seeded(sampling: SamplingParams, place: int) -> SamplingParams:
    """Choice `place` of a prompt has its own stream: seed + place, or one from the system."""
    if sampling.seed is None:
        return sampling
    return replace(sampling, seed=sampling.seed + place)


def _named(error: UserError, given: dict[str, Any]) -> ApiError:
    """The field that a UserError of SamplingParams starts with, in this API's spelling."""
    head, _, rest = str(error).partition(":")
    name = head.replace("-", "_")
    if name not in given:
        return ApiError.of(error)
    return ApiError(400, f"{name}:{rest}", name)
