"""The generation loop: what ends it, what is reported, what crosses to the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from runtime.errors import UserError
from runtime.generate import Request, Result, generate
from runtime.manifest import Manifest
from runtime.sampling import SamplingParams, candidates
from runtime.text import PieceDetokenizer, TextStream

V, EOS = 32, 31


class Counting:
    """A two-slot session whose rule picks the next token from the history, and its host."""

    def __init__(self, rule: Callable[[list[int]], int]) -> None:
        self.rule = rule
        self.history: list[int] = []
        self.calls: list[str] = []
        self.read: list[str] = []

    def _outputs(self, rows: int) -> tuple[Any, Any]:
        logits = np.full((rows, V), -1.0, np.float32)
        logits[1:] = np.nan
        logits[0] += np.sin(np.arange(V) + len(self.history)).astype(np.float32) * 0.5
        token = self.rule(self.history)
        logits[0, token] = 2.0
        return ("logits", logits), ("argmax", np.array([token] + [-1] * (rows - 1), np.int32))

    def prefill(self, tokens: Sequence[int]) -> tuple[Any, Any]:
        self.calls.append("prefill")
        self.history = list(tokens)
        return self._outputs(1)

    def admit(self, slot: int) -> None:
        self.calls.append(f"admit {slot}")

    def decode(self, tokens: Any, positions: Any, active: Any) -> tuple[Any, Any]:
        self.calls.append("decode")
        for rows in (tokens, positions, active):
            assert rows.dtype == np.int32 and rows.shape == (2,)
        assert active.tolist() == [1, 0]
        assert positions[0] == len(self.history)
        self.history.append(int(tokens[0]))
        return self._outputs(2)

    def to_host(self, buffer: Any) -> Any:
        self.read.append(buffer[0])
        return buffer[1]


def manifest(context: int | None = None) -> Manifest:
    model = SimpleNamespace(vocab_size=V, eos_token_ids=(EOS,), name="toy")
    shape = SimpleNamespace(slots=2, context=context, name="b2-p4")
    return cast(Manifest, SimpleNamespace(model=model, shape=shape))


def following(*tokens: int) -> Callable[[list[int]], int]:
    """A rule that gives `tokens` in turn after a prompt of two tokens."""
    return lambda history: tokens[len(history) - 2]


def stream(pieces: Sequence[bytes], *stops: str) -> TextStream:
    return TextStream(PieceDetokenizer(lambda i: pieces[i]), stops)


def run(
    session: Counting, request: Request, text: TextStream | None = None, context: int | None = None
) -> tuple[Result, list[tuple[int | None, str]]]:
    shown: list[tuple[int | None, str]] = []
    show = lambda token, part: shown.append((token, part))  # noqa: E731
    return generate(session, session, manifest(context), request, text, show), shown


def test_greedy_reads_only_the_argmax() -> None:
    session = Counting(following(5, 6, 7, 8))
    result, _ = run(session, Request((1, 2), 4))
    assert result.tokens == [5, 6, 7, 8] and result.finish_reason == "length"
    assert session.calls == ["prefill", "admit 0", "decode", "decode", "decode"]
    assert session.read == ["argmax"] * 4
    assert session.history == [1, 2, 5, 6, 7]


def test_the_first_token_comes_from_the_prefill() -> None:
    session = Counting(following(9))
    result, _ = run(session, Request((1, 2), 1))
    assert result.tokens == [9] and session.calls == ["prefill"]


def test_no_tokens_may_be_asked_for() -> None:
    session = Counting(following(9))
    result, shown = run(session, Request((1, 2), 0, top_logits=2), stream([]))
    assert (result.tokens, result.text, result.finish_reason) == ([], "", "length")
    assert result.top_logits == [] and session.calls == ["prefill"]
    assert "".join(part for _, part in shown) == ""
    assert result.prefill_s > 0 and result.to_json(0.0)["timings"]["decode_tokens_per_s"] == 0


def test_the_end_token_is_the_last_and_has_no_text() -> None:
    pieces = [b"x"] * V
    result, _ = run(Counting(following(5, EOS, 6)), Request((1, 2), 9), stream(pieces))
    assert (result.tokens, result.text, result.finish_reason) == ([5, EOS], "x", "stop")
    result, _ = run(Counting(following(EOS)), Request((1, 2), 9), stream(pieces))
    assert (result.tokens, result.text, result.finish_reason) == ([EOS], "", "stop")


def test_the_end_token_can_be_ignored() -> None:
    session = Counting(following(5, EOS, 6))
    result, _ = run(session, Request((1, 2), 3, ignore_eos=True))
    assert result.tokens == [5, EOS, 6] and result.finish_reason == "length"


def test_a_stop_ends_text_before_it_and_keeps_its_tokens() -> None:
    pieces = {5: b"a", 6: b"\xc3", 7: b"\xa9", 8: b"zz", 9: b"b"}
    for stop, text, count in (("é", "a", 3), ("éz", "a", 4), ("zzb", "aé", 5), ("aéq", "aézzb", 5)):
        session = Counting(following(5, 6, 7, 8, 9))
        table = [pieces.get(i, b"") for i in range(V)]
        result, shown = run(session, Request((1, 2), 5), stream(table, stop))
        assert (result.text, len(result.tokens)) == (text, count)
        assert "".join(part for _, part in shown) == text
        assert result.finish_reason == ("length" if stop == "aéq" else "stop")


def test_a_stop_that_was_waiting_counts_at_the_end() -> None:
    table = [bytes([64 + i]) for i in range(V)]  # 1 is A
    session = Counting(following(1, 2, 3))
    result, shown = run(session, Request((1, 2), 3), stream(table, "C", "BCD"))
    assert (result.text, result.finish_reason) == ("AB", "stop")
    assert [part for _, part in shown] == ["A", "", "", "B"]


def test_text_is_shown_as_it_comes() -> None:
    table = [bytes([64 + i]) for i in range(V)]
    _, shown = run(Counting(following(1, 2, 3)), Request((1, 2), 3), stream(table))
    assert shown == [(1, "A"), (2, "B"), (3, "C"), (None, "")]
    _, shown = run(Counting(following(1, 2)), Request((1, 2), 2))
    assert shown == [(1, ""), (2, "")]


def test_half_a_character_at_the_end_is_not_shown() -> None:
    table = [b"\xf0\x9f"] * V
    result, _ = run(Counting(following(5)), Request((1, 2), 1), stream(table))
    assert (result.tokens, result.text) == ([5], "")


def test_top_logits_are_raw_whatever_the_sampling() -> None:
    for sampling in (SamplingParams(), SamplingParams(1.5, top_k=2, seed=1)):
        session = Counting(following(5, 6, 7))
        result, _ = run(session, Request((1, 2), 3, sampling, top_logits=V + 9))
        assert result.top_logits is not None and len(result.top_logits) == 3
        for row, best in zip(result.top_logits, (5, 6, 7), strict=True):
            assert row[0] == (best, 2.0) and len(row) == V
            assert [x for _, x in row] == sorted((x for _, x in row), reverse=True)
        assert session.read.count("logits") == 3


def test_sampling_draws_from_the_logits_with_its_seed() -> None:
    sampling = SamplingParams(2.0, top_k=6, seed=5)
    runs = []
    for seed in (5, 5, 6):
        session = Counting(following(*range(24)))
        params = dataclasses.replace(sampling, seed=seed)
        runs.append(run(session, Request((1, 2), 24, params, ignore_eos=True))[0].tokens)
        assert session.read == ["logits"] * 24
    assert runs[0] == runs[1] != runs[2]
    session = Counting(following(*range(24)))
    (_, logits), _ = session.prefill((1, 2))
    assert runs[0][0] in candidates(logits[0], sampling)[0]


@pytest.mark.parametrize(
    ("prompt", "ask", "count", "calls"), [(2, 9, 3, 4), (4, 9, 1, 1), (3, 2, 2, 3)]
)
def test_the_context_limits_the_tokens(prompt: int, ask: int, count: int, calls: int) -> None:
    session = Counting(lambda history: len(history))
    result, _ = run(session, Request(tuple(range(prompt)), ask), context=4)
    assert len(result.tokens) == count and result.finish_reason == "length"
    assert len(session.calls) == calls
    assert len(session.history) <= 4


@pytest.mark.parametrize(
    ("prompt", "context", "line"),
    [
        ((1, V), None, f"prompt: found token id {V} at place 1, expected 0 to {V - 1}"),
        ((-1,), None, "prompt: found token id -1 at place 0"),
        ((1, 2, 3), 2, "prompt: found 3 tokens, expected at most 2 .the context of shape b2-p4"),
    ],
)
def test_a_prompt_the_model_cannot_take(prompt: tuple, context: int | None, line: str) -> None:
    session = Counting(following(1))
    with pytest.raises(UserError, match=line):
        run(session, Request(prompt, 1), context=context)
    assert session.calls == []


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"prompt": ()}, "prompt: found no tokens"),
        ({"max_tokens": -1}, "max-tokens: found -1"),
        ({"top_logits": -1}, "top-logits: found -1"),
    ],
)
def test_bad_requests_name_the_field(fields: dict, line: str) -> None:
    with pytest.raises(UserError, match=line):
        Request(**{"prompt": (1,), "max_tokens": 1, **fields})


def test_the_json_object() -> None:
    result = Result((1, 2, 3), [4, 5, 6], "xyz", "stop", prefill_s=0.5, decode_s=0.25)
    assert result.to_json(0.125) == {
        "prompt_tokens": [1, 2, 3],
        "tokens": [4, 5, 6],
        "text": "xyz",
        "finish_reason": "stop",
        "timings": {
            "open_s": 0.125,
            "prefill_s": 0.5,
            "decode_s": 0.25,
            "prefill_tokens_per_s": 6.0,
            "decode_tokens_per_s": 8.0,
        },
    }
    result.top_logits = [[(4, 1.5)]]
    assert result.to_json(0.0)["top_logits"] == [[(4, 1.5)]]
