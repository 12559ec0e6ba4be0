"""`/v1/chat/completions`: a body to a `Call`, through the model's chat template.

Content in parts is joined with newlines; only text parts are taken. `developer` becomes `system`
for a template that does not know it.
"""

from __future__ import annotations

from typing import Any

from runtime.errors import UserError
from runtime.server.calls import (
    Call,
    build,
    check_model,
    check_prompt,
    read_max_tokens,
    refuse_unknown_meanings,
)
from runtime.server.fields import ApiError, Fields, checked_text, read_object, show, wrong
from runtime.server.model import Model
from runtime.server.template import RESERVED, ChatTemplate

ROLES = ("system", "developer", "user", "assistant", "tool")
_PASSED = ("name", "tool_call_id", "reasoning_content")  # text that templates may look at
_REFUSED: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (False,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
}


def parse_chat(body: bytes, model: Model) -> Call:
    """What the client asks for. Raises ApiError that names the field, and nothing else."""
    fields = Fields(read_object(body))
    check_model(fields, model)
    refuse_unknown_meanings(fields)
    for name, neutral in _REFUSED.items():
        fields.only(name, neutral, "expected it left out: this server does not carry it out")
    messages = read_messages(fields, model)
    max_tokens, logprobs = _max_tokens(fields, model), _logprobs(fields, model)
    prompt = _prompt(fields, messages, model)
    return build(fields, model, [prompt], max_tokens, logprobs, chat=True)


def read_messages(fields: Fields, model: Model) -> list[dict[str, Any]]:
    """The conversation as templates expect it: role, content (a string), and a few texts."""
    value = fields.get("messages")
    if value is None or not isinstance(value, list) or not value:
        wrong("messages", value, "a list of at least one message")
    found = []
    for place, item in enumerate(value):
        name = f"messages[{place}]"
        if not isinstance(item, dict):
            wrong(name, item, "an object with role and content")
        found.append(_message(Fields(item, name)))
    if model.template is not None and not model.template.mentions("developer"):
        for message in found:
            if message["role"] == "developer":
                message["role"] = "system"
    return found


def _message(fields: Fields) -> dict[str, Any]:
    role = fields.text("role")
    if role not in ROLES:
        wrong(fields.name("role"), role, f"one of {', '.join(ROLES)}")
    for name, neutral in (("tool_calls", ([],)), ("function_call", ()), ("audio", ())):
        fields.only(name, neutral, "expected it left out: this server takes text only")
    message: dict[str, Any] = {"role": role, "content": _content(fields, role)}
    for name in _PASSED:
        if (text := fields.text(name)) is not None:
            message[name] = text
    return message


def _content(fields: Fields, role: str) -> str:
    value, name = fields.get("content"), fields.name("content")
    if value is None and role == "assistant":
        return ""
    if not isinstance(value, list):
        return checked_text(name, value)
    if not value:
        wrong(name, value, "text or at least one text part")
    return "\n".join(_part(f"{name}[{place}]", part) for place, part in enumerate(value))


def _part(name: str, value: Any) -> str:
    if not isinstance(value, dict):
        wrong(name, value, "an object with type and text")
    part = Fields(value, name)
    kind = part.text("type")
    if kind != "text":
        wrong(part.name("type"), kind, '"text": this model reads nothing else')
    return checked_text(part.name("text"), part.get("text"))


def _max_tokens(fields: Fields, model: Model) -> int | None:
    old = read_max_tokens(fields, "max_tokens", 1, model)
    new = read_max_tokens(fields, "max_completion_tokens", 1, model)
    if old is not None and new is not None and old != new:
        wrong("max_tokens", old, f"{new} as in max_completion_tokens, or only one of the two")
    return old if new is None else new


def _logprobs(fields: Fields, model: Model) -> int | None:
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", 0, model.limits.logprobs)
    if top and not wanted:
        wrong("top_logprobs", top, "it only together with logprobs: true")
    return (top or 0) if wanted else None


def _prompt(fields: Fields, messages: list[dict[str, Any]], model: Model) -> tuple[int, ...]:
    template, tokenizer = model.template, model.tokenizer
    if template is None or tokenizer is None:
        raise ApiError(
            400,
            f"messages: the model {model.name!r} has no chat template, expected a prompt on"
            " /v1/completions",
            "messages",
        )
    text = template.render(
        messages, fields.boolean("add_generation_prompt", True), _variables(fields, template)
    )
    try:
        ids = tokenizer.encode(text, special=False)
    except UserError as error:  # a template can cut a character in two
        raise ApiError.of(error, "messages") from error
    return check_prompt("messages", ids, model, text)


def _variables(fields: Fields, template: ChatTemplate) -> dict[str, Any]:
    """`chat_template_kwargs`: variables for the template beside those every template gets."""
    found = fields.object("chat_template_kwargs")
    if found is None:
        return {}
    values = fields.get("chat_template_kwargs")
    for name in values:
        if name in RESERVED or name in template.special_tokens:
            raise ApiError(
                400,
                f"chat_template_kwargs: found {show(name)}, expected names that the server does"
                " not set itself",
                "chat_template_kwargs",
            )
    return dict(values)
