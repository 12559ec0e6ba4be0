"""Fields that only chats have: messages, their parts, and what reaches the template."""

from __future__ import annotations

import json
from typing import Any

import api_model
import pytest
from api_model import body
from test_server_fields import MESSAGES, chat, refused

from runtime.server.chat import parse_chat
from runtime.server.model import Limits

TEXT_PART = {"type": "text", "text": "a"}
IMAGE_PART = {"type": "image_url", "image_url": {"url": "data:"}}


def test_max_tokens_by_either_name() -> None:
    assert chat(max_completion_tokens=5).requests[0].max_tokens == 5
    assert chat(max_completion_tokens=5, max_tokens=5).requests[0].max_tokens == 5
    error = refused(parse_chat, body(messages=MESSAGES, max_tokens=4, max_completion_tokens=5))
    assert error.param == "max_tokens"


def test_messages_are_plain_text_for_the_template() -> None:
    template = "{{ messages | tojson }}"
    model = api_model.model(Limits(), template=template)
    parts = [TEXT_PART, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "be brief", "name": "x", "extra": 1},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": None, "refusal": None},
        {"role": "tool", "content": "42", "tool_call_id": "7"},
    ]
    call = parse_chat(body(messages=messages), model)
    assert json.loads(api_model.tokenizer().decode(call.requests[0].prompt)) == [
        {"role": "system", "content": "be brief", "name": "x"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "42", "tool_call_id": "7"},
    ]
    model = api_model.model(Limits(), template="{# developer #}" + template)
    call = parse_chat(body(messages=messages), model)
    assert "developer" in api_model.tokenizer().decode(call.requests[0].prompt)


def test_variables_of_the_template() -> None:
    model = api_model.model(template="{{ style }}{{ add_generation_prompt }}")

    def text(**fields: Any) -> str:
        call = parse_chat(body(messages=MESSAGES, **fields), model)
        return api_model.tokenizer().decode(call.requests[0].prompt)

    kwargs = {"style": "brief"}
    assert text(chat_template_kwargs=kwargs) == "briefTrue"
    assert text(chat_template_kwargs=kwargs, add_generation_prompt=False) == "briefFalse"
    for name in ("messages", "range", "raise_exception"):
        data = body(messages=MESSAGES, chat_template_kwargs={name: 1})
        assert refused(parse_chat, data, model).param == "chat_template_kwargs"


def in_message(**fields: Any) -> dict[str, Any]:
    return {"messages": [*MESSAGES, {"role": "user", "content": "b", **fields}]}


CHAT: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "a"}]}, "messages[0].role"),
    (in_message(role="king"), "messages[1].role"),
    (in_message(role=1), "messages[1].role"),
    (in_message(content=None), "messages[1].content"),
    (in_message(content=1), "messages[1].content"),
    (in_message(content="\ud800"), "messages[1].content"),
    (in_message(content=[]), "messages[1].content"),
    (in_message(content=["a"]), "messages[1].content[0]"),
    (in_message(content=[TEXT_PART, IMAGE_PART]), "messages[1].content[1].type"),
    (in_message(content=[{"type": "text"}]), "messages[1].content[0].text"),
    (in_message(content=[{"text": "a"}]), "messages[1].content[0].type"),
    (in_message(name=3), "messages[1].name"),
    (in_message(tool_calls=[{}]), "messages[1].tool_calls"),
    (in_message(audio={"id": "a"}), "messages[1].audio"),
    (in_message(content="cat " * 100), "messages"),
    ({"messages": MESSAGES, "max_tokens": 0}, "max_tokens"),
    ({"messages": MESSAGES, "max_completion_tokens": "3"}, "max_completion_tokens"),
    ({"messages": MESSAGES, "logprobs": 1}, "logprobs"),
    ({"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": MESSAGES, "top_logprobs": 1}, "top_logprobs"),
    ({"messages": MESSAGES, "functions": [{}]}, "functions"),
    ({"messages": MESSAGES, "tool_choice": "required"}, "tool_choice"),
    ({"messages": MESSAGES, "chat_template": "x"}, "chat_template"),
    ({"messages": MESSAGES, "chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"messages": MESSAGES, "add_generation_prompt": 1}, "add_generation_prompt"),
]


@pytest.mark.parametrize(("fields", "param"), CHAT, ids=lambda v: json.dumps(v)[:40])
def test_fields_of_chat(fields: dict, param: str) -> None:
    error = refused(parse_chat, body(**fields))
    assert error.param == param and error.message.startswith(f"{param}: found")
