"""The generation loop: what ends it, what is reported, what crosses to the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import fake_device
import pytest
from fake_device import EOS, FakeDevice, V, following

from runtime.engine import Engine
from runtime.errors import UserError
from runtime.generate import Result, generate
from runtime.request import Request
from runtime.sampling import SamplingParams, candidates
from runtime.text import PieceDetokenizer, TextStream


def device(rule: fake_device.Rule, context: int | None = fake_device.CONTEXT) -> FakeDevice:
    return FakeDevice(fake_device.manifest(slots=2, context=context), rule)


def stream(pieces: Sequence[bytes], *stops: str) -> TextStream:
    return TextStream(PieceDetokenizer(lambda i: pieces[i]), stops)


def run(
    fake: FakeDevice, request: Request, text: TextStream | None = None, top: int = 0
) -> tuple[Result, list[tuple[int | None, str]]]:
    shown: list[tuple[int | None, str]] = []
    show = lambda token, part: shown.append((token, part))  # noqa: E731
    engine = Engine(fake.session(), fake.manifest)
    return generate(engine, request, text, show, top), shown


def history(fake: FakeDevice) -> list[int]:
    """Ids read, in order of position."""
    return [token for _, token in sorted(fake.fed)]


def test_greedy_reads_only_the_argmax() -> None:
    fake = device(following(5, 6, 7, 8))
    result, _ = run(fake, Request((1, 2), 4))
    assert result.tokens == [5, 6, 7, 8] and result.finish_reason == "length"
    assert fake.calls == ["prefill_4", "seed", "decode", "decode", "decode", "seed"]
    assert fake.read == ["argmax"] * 4  # the logits never cross
    assert history(fake) == [1, 2, 5, 6, 7]


def test_the_first_token_comes_from_the_prefill() -> None:
    fake = device(following(9))
    result, _ = run(fake, Request((1, 2), 1))
    assert result.tokens == [9] and fake.calls == ["prefill_4"]


def test_no_tokens_may_be_asked_for() -> None:
    fake = device(following(9))
    result, shown = run(fake, Request((1, 2), 0, logits=True), stream([]), top=2)
    assert (result.tokens, result.text, result.finish_reason) == ([], "", "length")
    assert result.top_logits == [] and fake.calls == ["prefill_4"]
    assert "".join(part for _, part in shown) == ""
    assert result.prefill_s > 0 and result.to_json(0.0)["timings"]["decode_tokens_per_s"] == 0


def test_the_end_token_is_the_last_and_has_no_text() -> None:
    pieces = [b"x"] * V
    result, _ = run(device(following(5, EOS, 6)), Request((1, 2), 9), stream(pieces))
    assert (result.tokens, result.text, result.finish_reason) == ([5, EOS], "x", "stop")
    result, _ = run(device(following(EOS)), Request((1, 2), 9), stream(pieces))
    assert (result.tokens, result.text, result.finish_reason) == ([EOS], "", "stop")


def test_the_end_token_can_be_ignored() -> None:
    fake = device(following(5, EOS, 6))
    result, _ = run(fake, Request((1, 2), 3, ignore_eos=True))
    assert result.tokens == [5, EOS, 6] and result.finish_reason == "length"


def test_a_stop_ends_text_before_it_and_keeps_its_tokens() -> None:
    pieces = {5: b"a", 6: b"\xc3", 7: b"\xa9", 8: b"zz", 9: b"b"}
    for stop, text, count in (("é", "a", 3), ("éz", "a", 4), ("zzb", "aé", 5), ("aéq", "aézzb", 5)):
        fake = device(following(5, 6, 7, 8, 9))
        table = [pieces.get(i, b"") for i in range(V)]
        result, shown = run(fake, Request((1, 2), 5), stream(table, stop))
        assert (result.text, len(result.tokens)) == (text, count)
        assert "".join(part for _, part in shown) == text
        assert result.finish_reason == ("length" if stop == "aéq" else "stop")


def test_a_stop_that_was_waiting_counts_at_the_end() -> None:
    table = [bytes([64 + i]) for i in range(V)]  # 1 is A
    fake = device(following(1, 2, 3))
    result, shown = run(fake, Request((1, 2), 3), stream(table, "C", "BCD"))
    assert (result.text, result.finish_reason) == ("AB", "stop")
    assert [part for _, part in shown] == ["A", "", "", "B"]


def test_text_is_shown_as_it_comes() -> None:
    table = [bytes([64 + i]) for i in range(V)]
    _, shown = run(device(following(1, 2, 3)), Request((1, 2), 3), stream(table))
    assert shown == [(1, "A"), (2, "B"), (3, "C"), (None, "")]
    _, shown = run(device(following(1, 2)), Request((1, 2), 2))
    assert shown == [(1, ""), (2, "")]


def test_half_a_character_at_the_end_is_not_shown() -> None:
    table = [b"\xf0\x9f"] * V
    result, _ = run(device(following(5)), Request((1, 2), 1), stream(table))
    assert (result.tokens, result.text) == ([5], "")


def test_top_logits_are_raw_whatever_the_sampling() -> None:
    for sampling in (SamplingParams(), SamplingParams(1.5, top_k=2, seed=1)):
        fake = device(following(5, 6, 7))
        result, _ = run(fake, Request((1, 2), 3, sampling, logits=True), top=V + 9)
        assert result.top_logits is not None and len(result.top_logits) == 3
        for row, best in zip(result.top_logits, (5, 6, 7), strict=True):
            assert row[0] == (best, 2.0) and len(row) == V
            assert [x for _, x in row] == sorted((x for _, x in row), reverse=True)
        assert fake.read.count("logits[0]") == 3


def test_sampling_draws_from_the_logits_with_its_seed() -> None:
    sampling = SamplingParams(2.0, top_k=6, seed=5)
    runs = []
    for seed in (5, 5, 6):
        fake = device(following(*range(24)))
        params = dataclasses.replace(sampling, seed=seed)
        runs.append(run(fake, Request((1, 2), 24, params, ignore_eos=True))[0].tokens)
        assert fake.read == ["logits[0]"] * 24
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] in candidates(following(*range(24))([1, 2]), sampling)[0]


@pytest.mark.parametrize(
    ("prompt", "ask", "count", "decodes"), [(2, 9, 3, 2), (4, 9, 1, 0), (3, 2, 2, 1)]
)
def test_the_context_limits_the_tokens(prompt: int, ask: int, count: int, decodes: int) -> None:
    fake = device(fake_device.spread, context=4)
    result, _ = run(fake, Request(tuple(range(prompt)), ask, ignore_eos=True))
    assert len(result.tokens) == count and result.finish_reason == "length"
    assert fake.calls.count("decode") == decodes
    assert len(history(fake)) <= 4


@pytest.mark.parametrize(
    ("prompt", "context", "line"),
    [
        ((1, V), None, f"prompt: found token id {V} at place 1, expected 0 to {V - 1}"),
        ((-1,), None, "prompt: found token id -1 at place 0"),
        ((1, 2, 3), 2, "prompt: found 3 tokens, expected at most 2 .the context of shape b2"),
    ],
)
def test_a_prompt_the_model_cannot_take(prompt: tuple, context: int | None, line: str) -> None:
    fake = device(following(1), context)
    with pytest.raises(UserError, match=line):
        run(fake, Request(prompt, 1))
    assert fake.calls == []


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"prompt": ()}, "prompt: found no tokens"),
        ({"max_tokens": -1}, "max-tokens: found -1"),
        ({"deadline_s": 0.0}, "deadline: found 0.0"),
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
