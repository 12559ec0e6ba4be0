"""Bodies of requests that are good, nearly good, or nothing at all: a Hypothesis strategy."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

GOOD = [
    {"prompt": "the cat", "temperature": 0.7, "stop": ["a", "b"], "logit_bias": {"3": 1}},
    {"prompt": [[1, 2], [3]], "n": 2, "logprobs": 3, "echo": True, "stream": True, "seed": 3},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant"},
        ],
        "logprobs": True,
        "top_logprobs": 2,
        "stream_options": {"include_usage": True},
        "stream": True,
        "dry_multiplier": 1.0,
        "chat_template_kwargs": {"a": 1},
    },
]
ODD = [
    None, True, False, 0, 1, -1, 2**31, 2**63, -(2**64), 10**400, 0.5, -0.0, 1e308, "", "a", "é\n",
    "\ud800", "NaN", [], {}, [[]], [None], [True], ["a"], [1], [[1]], [1e3], {"a": 1},
    {"type": "text"}, "x" * 3000, [0] * 300, {"": {"": []}},
]  # fmt: skip
NAMES = (
    "model prompt messages max_tokens max_completion_tokens n best_of stop logprobs top_logprobs"
    " echo seed stream stream_options temperature top_p top_k min_p repetition_penalty"
    " frequency_penalty presence_penalty dry_multiplier dry_base dry_allowed_length"
    " dry_penalty_last_n dry_sequence_breakers logit_bias ignore_eos user priority suffix tools"
    " response_format chat_template_kwargs add_generation_prompt return_token_ids min_tokens"
).split()


def places(value: Any, at: tuple = ()) -> list[tuple]:
    """Paths of every value inside a JSON value."""
    if not isinstance(value, (dict, list)):
        return [at]
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [at, *(place for key, inner in items for place in places(inner, (*at, key)))]


def changed(value: Any, at: tuple, new: Any) -> Any:
    if not at:
        return new
    copy = value.copy()
    copy[at[0]] = changed(copy[at[0]], at[1:], new)
    return copy


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A good body with up to three changes in its fields and up to two in its bytes."""
    value: Any = draw(st.sampled_from(GOOD))
    for _ in range(draw(st.integers(0, 3))):
        odd = draw(st.sampled_from(ODD) | st.floats(allow_nan=False) | st.integers() | st.text())
        if isinstance(value, dict) and draw(st.booleans()):
            value = {**value, draw(st.sampled_from(NAMES)): odd}
        else:
            value = changed(value, draw(st.sampled_from(places(value))), odd)
    data = bytearray(json.dumps(value).encode())
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 2))] = draw(st.binary(max_size=2))
    return bytes(data)
