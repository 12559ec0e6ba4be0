"""Bodies of requests: what is read from good ones, and the field that bad ones are refused for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import api_model
import pytest
from api_model import LIMITS, body
from body_mutations import mutated
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.dry import DEFAULT_BREAKERS
from runtime.errors import UserError
from runtime.server.calls import Call
from runtime.server.chat import parse_chat
from runtime.server.completions import parse_completion
from runtime.server.fields import ApiError, read_object
from runtime.server.model import Limits, Model

MODEL = api_model.model()
MESSAGES = [{"role": "user", "content": "hi"}]
Parse = Callable[[bytes, Model], Call]
BOTH = pytest.mark.parametrize(
    ("parse", "base"),
    [(parse_completion, {"prompt": "the cat"}), (parse_chat, {"messages": MESSAGES})],
    ids=["completions", "chat"],
)


def refused(parse: Parse, data: bytes, model: Model = MODEL, status: int = 400) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(data, model)
    error = caught.value
    assert error.status == status and error.type == "invalid_request_error"
    assert error.message and "\n" not in error.message and len(error.message) <= 500
    assert json.loads(json.dumps(error.body(), ensure_ascii=False).encode()) == {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }
    return error


def completion(**fields: Any) -> Call:
    return parse_completion(body(**{"prompt": "the cat", **fields}), MODEL)


def chat(**fields: Any) -> Call:
    return parse_chat(body(**{"messages": MESSAGES, **fields}), MODEL)


def test_defaults_of_a_completion() -> None:
    call = completion(model="mamba2")
    (request,) = call.requests
    assert list(request.prompt) == api_model.tokenizer().encode("the cat")
    assert request.max_tokens == 16 and not request.logits and not request.score_prompt
    assert request.sampling.temperature == 1 and request.sampling.top_p == 1
    assert request.sampling.top_k == 0 and request.sampling.seed is None
    assert not (request.ignore_eos or call.stream or call.include_usage or call.token_ids)
    assert (call.n, call.stops, call.logprobs, call.echo) == (1, (), None, None)
    assert call.id.startswith("cmpl-") and call.id != completion().id
    assert not call.chat and call.prompt_tokens == len(request.prompt)


def test_defaults_of_a_chat() -> None:
    call = chat()
    (request,) = call.requests
    text = "<|user|>hi\n<|assistant|>"
    assert list(request.prompt) == api_model.tokenizer().encode(text)
    assert request.max_tokens == LIMITS.completion_tokens and request.sampling.temperature == 1
    assert call.chat and call.id.startswith("chatcmpl-") and call.logprobs is None


@BOTH
def test_null_is_the_default(parse: Parse, base: dict) -> None:
    names = (
        "model max_tokens n stop logprobs seed stream stream_options temperature top_p top_k"
        " min_p repetition_penalty frequency_penalty presence_penalty dry_multiplier dry_base"
        " dry_allowed_length dry_penalty_last_n dry_sequence_breakers logit_bias ignore_eos user"
        " priority tools response_format suffix best_of echo top_logprobs max_completion_tokens"
        " chat_template_kwargs tool_choice modalities audio prediction functions"
    ).split()
    plain, nulls = (parse(body(**base, **extra), MODEL) for extra in ({}, dict.fromkeys(names)))
    assert plain.requests == nulls.requests
    assert (plain.n, plain.stops, plain.echo) == (nulls.n, nulls.stops, nulls.echo)


@BOTH
def test_every_field_arrives(parse: Parse, base: dict) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "seed": 7,
        "repetition_penalty": 1.1,
        "frequency_penalty": -0.5,
        "presence_penalty": 2,
        "dry_multiplier": 0.8,
        "dry_base": 1.5,
        "dry_allowed_length": 3,
        "dry_penalty_last_n": 100,
        "logit_bias": {"5": -100, "0": 1.5},
    }
    more = {"stop": ["a", "b"], "stream": True, "stream_options": {"include_usage": True}}
    more |= {"max_tokens": 9, "ignore_eos": True, "user": "someone", "priority": 0}
    call = parse(body(**base, **fields, **more, unheard_of={"a": [1]}), MODEL)
    (request,) = call.requests
    for name, value in fields.items():
        if name != "logit_bias":
            assert getattr(request.sampling, name) == value, name
    assert request.sampling.logit_bias == ((0, 1.5), (5, -100.0))
    assert request.max_tokens == 9 and request.ignore_eos
    assert call.stops == ("a", "b") and call.stream and call.include_usage


def test_dry_breakers_are_built_once_and_only_if_needed() -> None:
    model = api_model.model()

    def breakers(**fields: Any) -> Any:
        call = parse_completion(body(prompt="a", **fields), model)
        return call.requests[0].sampling.dry_breakers

    first = breakers(dry_multiplier=1)
    assert first is breakers(dry_multiplier=1) and first.strings == DEFAULT_BREAKERS
    (newline,) = api_model.tokenizer().encode("\n")
    assert first.heads[newline] == ((),)
    other = breakers(dry_multiplier=1, dry_sequence_breakers=["x"])
    assert other.strings == ("x",) and newline not in other.heads
    assert not breakers(dry_sequence_breakers=["x"]) and not breakers(dry_multiplier=0)
    for place in range(40):
        breakers(dry_multiplier=1, dry_sequence_breakers=[f"x{place}"])
    assert len(model._lists) <= 16


def test_prompts_in_every_form() -> None:
    encode = api_model.tokenizer().encode
    for value, want in [
        ("a b", [encode("a b")]),
        (["a b", "c"], [encode("a b"), encode("c")]),
        ([1, 2, 2047], [[1, 2, 2047]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ]:
        call = completion(prompt=value)
        assert [list(r.prompt) for r in call.requests] == want
        assert call.prompt_tokens == sum(map(len, want))


def test_choices_of_a_prompt_are_neighbours_with_seeds_of_their_own() -> None:
    call = completion(prompt=[[1], [2, 3]], n=3, seed=10)
    assert [r.prompt for r in call.requests] == [(1,)] * 3 + [(2, 3)] * 3
    assert [r.sampling.seed for r in call.requests] == [10, 11, 12] * 2
    assert call.prompt_tokens == 3
    assert [r.sampling.seed for r in completion(n=2).requests] == [None, None]


def test_echo_and_logprobs() -> None:
    call = completion(prompt=[[5, 6], [7]], echo=True)
    decode = api_model.tokenizer().decode
    assert call.echo == (decode([5, 6]), decode([7]))
    assert not call.requests[0].score_prompt
    call = completion(echo=True, logprobs=1, max_tokens=0)
    assert call.echo == ("the cat",) and call.logprobs == 1
    (request,) = call.requests
    assert request.logits and request.score_prompt and request.max_tokens == 0
    request = completion(logprobs=0).requests[0]
    assert request.logits and not request.score_prompt
    call = chat(logprobs=True, top_logprobs=20)
    assert call.logprobs == 20 and call.requests[0].logits
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=False, top_logprobs=0).logprobs is None


def test_the_context_and_the_deadline_come_from_the_server() -> None:
    model = api_model.model(Limits(deadline_s=2.5, priority=True), context=4)
    call = parse_completion(body(prompt=[1, 2, 3, 4], priority=-3), model)
    assert call.requests[0].deadline_s == 2.5 and call.requests[0].priority == 3
    error = refused(parse_completion, body(prompt=[1] * 5), model)
    assert error.param == "prompt" and error.code == "context_length_exceeded"
    assert "found 5 tokens, expected at most 4 (the context of this model)" in error.message
    small = api_model.model(Limits(completion_tokens=3))
    assert parse_completion(body(prompt="a"), small).requests[0].max_tokens == 3


def test_another_model_is_not_found() -> None:
    error = refused(parse_completion, body(model="gpt-4", prompt="a"), status=404)
    assert (error.param, error.code) == ("model", "model_not_found")
    assert '"gpt-4"' in error.message and '"mamba2"' in error.message
    assert refused(parse_chat, body(model="x", messages=MESSAGES), status=404).param == "model"


BAD_BODIES = [
    (b"", None, "not JSON"),
    (b"{", None, "not JSON at line 1"),
    (b"[]", None, "found a list of 0, expected a JSON object"),
    (b"null", None, "found null"),
    (b'"x"', None, 'found "x"'),
    (b'\xff{"prompt": "a"}', None, "not UTF-8 at byte 0"),
    ('{"prompt": "a"}'.encode("utf-16"), None, "not UTF-8"),
    (b'{"prompt": "a", "temperature": NaN}', None, "found NaN"),
    (b'{"prompt": "a", "unknown": -Infinity}', None, "found -Infinity"),
    (b'{"prompt": "a", "temperature": 1e999}', "temperature", "found Infinity"),
    (b'{"prompt": "a", "temperature": 1, "temperature": 2}', "temperature", "found twice"),
    (b'{"prompt": "a", "x": {"y": 1, "y": 1}}', "y", "found twice"),
    (b'{"prompt": "\\ud800"}', "prompt", "half of a surrogate pair at character 0"),
    (b'{"prompt": ["a", "b\\udc00"]}', "prompt[1]", "at character 1"),
    (b'{"prompt": "a", "stop": "\\udfff"}', "stop", "surrogate"),
    (b'{"\\ud800": 1, "\\ud800": 1}', "?", "found twice"),
    (b'{"prompt": "a", "model": "\\ud800"}', "model", "surrogate"),
    (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None, "nested too deeply"),
    (b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}", "prompt[0][0]", "a token id"),
    (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", None, "too many digits"),
    (b'{"prompt": "a", "seed": 1' + b"0" * 400 + b"}", "seed", "too many digits"),
    (b'{"prompt": "a", "top_p": 1' + b"0" * 400 + b"}", "top_p", "too many digits"),
]


@pytest.mark.parametrize(("data", "param", "line"), BAD_BODIES)
def test_bodies_that_are_no_good(data: bytes, param: str | None, line: str) -> None:
    error = refused(parse_completion, data)
    assert error.param == param and line in error.message


SHARED: list[tuple[dict[str, Any], str]] = [
    *(({name: "1"}, name) for name in ("temperature", "top_p", "min_p", "repetition_penalty")),
    *(({name: True}, name) for name in ("temperature", "top_k", "n", "seed", "max_tokens")),
    *(({name: 1.0}, name) for name in ("top_k", "n", "seed", "max_tokens", "dry_allowed_length")),
    *(({name: -1}, name) for name in ("temperature", "top_p", "n", "seed", "max_tokens", "min_p")),
    *(({name: 0}, name) for name in ("n", "repetition_penalty")),
    *(({name: [1]}, name) for name in ("frequency_penalty", "dry_base", "stream", "model")),
    *(({name: 2.5}, name) for name in ("frequency_penalty", "presence_penalty", "top_p")),
    *(({name: 1}, name) for name in ("stream", "ignore_eos", "stream_options", "user")),
    *(({name: 10**400}, name) for name in ("max_tokens", "temperature", "top_k", "logit_bias")),
    ({"temperature": 1e305}, "temperature"),
    ({"top_k": -2}, "top_k"),
    ({"n": 5}, "n"),
    ({"max_tokens": 101}, "max_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"dry_penalty_last_n": -2}, "dry_penalty_last_n"),
    ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers[0]"),
    ({"dry_sequence_breakers": ["a"] * 17}, "dry_sequence_breakers"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a", 1]}, "stop[1]"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop": list("abcde")}, "stop"),
    ({"stop": "a" * 17}, "stop"),
    ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"2048": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"01": 1}}, "logit_bias"),
    ({"logit_bias": {"٣": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": {"1": False}}, "logit_bias.1"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"priority": 1}, "priority"),
    ({"priority": 1e3}, "priority"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {}}, "audio"),
    ({"prediction": {"type": "content"}}, "prediction"),
    ({"stop_token_ids": [1]}, "stop_token_ids"),
    ({"min_tokens": 3}, "min_tokens"),
    ({"min_tokens": False}, "min_tokens"),
    ({"grammar": "root ::= x"}, "grammar"),
    ({"return_token_ids": 1}, "return_token_ids"),
]


@BOTH
@pytest.mark.parametrize(("fields", "param"), SHARED, ids=lambda v: json.dumps(v)[:40])
def test_fields_of_both_endpoints(parse: Parse, base: dict, fields: dict, param: str) -> None:
    error = refused(parse, body(**base, **fields))
    assert error.param == param and error.message.startswith(param.split("[")[0].split(".")[0])


@BOTH
def test_fields_that_change_nothing_are_let_through(parse: Parse, base: dict) -> None:
    neutral = {
        "tools": [],
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "tool_choice": "auto",
        "suffix": "",
        "min_tokens": 0,
        "store": True,
        "metadata": {"a": "b"},
        "top_k": -1,
    }
    assert parse(body(**base, **neutral), MODEL).requests == parse(body(**base), MODEL).requests


COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt[0]"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [1, True]}, "prompt[1]"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": ["a", 1]}, "prompt[1]"),
    ({"prompt": ["a", [1]]}, "prompt[1]"),
    ({"prompt": [[1], [1.0]]}, "prompt[1][0]"),
    ({"prompt": [None]}, "prompt[0]"),
    ({"prompt": [2048]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [[1], [10**400]]}, "prompt[1]"),
    ({"prompt": [1] * 65}, "prompt"),
    ({"prompt": "cat " * 100}, "prompt"),
    ({"prompt": ["a"] * 9}, "prompt"),
    ({"prompt": ["a"] * 3, "n": 4}, "n"),
    ({"prompt": "a", "suffix": "b"}, "suffix"),
    ({"prompt": "a", "best_of": 2}, "best_of"),
    ({"prompt": "a", "n": 2, "best_of": 1}, "best_of"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "logprobs": True}, "logprobs"),
    ({"prompt": "a", "echo": "yes"}, "echo"),
]


@pytest.mark.parametrize(("fields", "param"), COMPLETIONS, ids=lambda v: json.dumps(v)[:40])
def test_fields_of_completions(fields: dict, param: str) -> None:
    error = refused(parse_completion, body(**fields))
    assert error.param == param and error.message.startswith(f"{param}: found")


def test_a_model_without_tokenizer_or_template_says_so() -> None:
    bare = api_model.bare()
    call = parse_completion(body(prompt=[1, 2], echo=True, dry_multiplier=1), bare)
    assert call.token_ids and call.echo == ("",)
    for fields, param in [
        ({"prompt": "a"}, "prompt"),
        ({"prompt": [1], "stop": "a"}, "stop"),
        ({"prompt": [1], "dry_sequence_breakers": "a"}, "dry_sequence_breakers"),
    ]:
        error = refused(parse_completion, body(**fields), bare)
        assert error.param == param and "no tokenizer" in error.message
    for model in (bare, api_model.model(template=None)):
        error = refused(parse_chat, body(messages=MESSAGES), model)
        assert error.param == "messages" and "no chat template" in error.message


@pytest.mark.parametrize("name", ["prompt_tokens", "completion_tokens", "n", "choices"])
def test_limits_are_checked(name: str) -> None:
    with pytest.raises(UserError, match=f"{name}: found 0, expected 1 or more"):
        replace(Limits(), **{name: 0})


@settings(max_examples=1500, deadline=None)
@given(mutated())
def test_any_body_is_a_call_or_a_refusal(data: bytes) -> None:
    for parse in (parse_completion, parse_chat):
        try:
            call = parse(data, MODEL)
        except ApiError as error:
            assert error.status in (400, 404)
            json.dumps(error.body(), ensure_ascii=False).encode()
        else:
            for request in call.requests:
                request.check(MODEL.manifest)
            assert 1 <= len(call.requests) <= LIMITS.choices
            assert all(call.stops) and len(call.stops) <= LIMITS.stops


def test_bytes_of_any_kind_are_read_or_refused() -> None:
    assert read_object(b'{"a": 1}') == {"a": 1}

    @settings(max_examples=300, deadline=None)
    @given(st.binary(max_size=40))
    def check(data: bytes) -> None:
        try:
            read_object(data)
        except ApiError as error:
            assert error.status == 400

    check()


def test_a_repeated_key_among_very_many_is_named() -> None:
    """In one pass: as many passes as keys would not end."""
    many = ",".join(f'"k{i}":0' for i in range(200_000))
    assert refused(parse_completion, f'{{{many},"again":1,"again":2}}'.encode()).param == "again"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"repeat_penalty": 1.2}, "repeat_penalty"),
        ({"repeat_last_n": 64}, "repeat_last_n"),
        ({"n_predict": 5}, "n_predict"),
        ({"add_special_tokens": False}, "add_special_tokens"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 4, "n": 2, "max_tokens": 11}, "logprobs"),
        ({"logprobs": 4, "n": 2, "max_tokens": 10, "echo": True}, "logprobs"),
    ],
)
def test_other_servers_names_and_too_many_logprobs_are_refused(fields: dict, param: str) -> None:
    model = api_model.model(Limits(entries=100))
    assert refused(parse_completion, body(prompt=[1], **fields), model).param == param
    assert parse_completion(body(prompt=[1], logprobs=4, n=2, max_tokens=10), model).n == 2
