"""Tokens back to text and to OpenAI's objects: what is streamed, and what never leaks."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import api_model
import numpy as np
import pytest
import tokenizers
from api_model import body
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_text import cut_at_stop, split, stop_lists, texts
from tokenizers import decoders, models

from runtime.request import Choice, Ending
from runtime.server import objects
from runtime.server.calls import Call
from runtime.server.chat import parse_chat
from runtime.server.choice import ChoiceText, Piece
from runtime.server.completions import parse_completion
from runtime.server.model import Limits, Model
from runtime.server.objects import Answer
from runtime.tokenizer import Tokenizer, _byte_alphabet

MODEL = api_model.model(Limits())
EOS = 0
LENGTH = Ending("length", prompt_tokens=2, generated=3)
CHARS = {byte: char for char, byte in _byte_alphabet().items()}


def of_pieces(pieces: Sequence[bytes]) -> Tokenizer:
    """A real byte-level tokenizer in which id i is `pieces[i]` (all different, none empty)."""
    vocab = {"".join(CHARS[byte] for byte in piece): i for i, piece in enumerate(pieces)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.decoder = decoders.ByteLevel()
    return Tokenizer(inner.to_str())


def row(seed: int, size: int = api_model.VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=size).astype(np.float32) * 3


def log_softmax(values: np.ndarray) -> np.ndarray:
    wide = values.astype(np.float64)
    return wide - math.log(sum(math.exp(x) for x in wide))


def completion(model: Model = MODEL, **fields: Any) -> Call:
    return parse_completion(body(**{"prompt": [5, 6], **fields}), model)


def chat(model: Model = MODEL, **fields: Any) -> Call:
    messages = [{"role": "user", "content": "hi"}]
    return parse_chat(body(messages=messages, **fields), model)


def run(
    call: Call, choices: Sequence[Choice], ending: Ending = LENGTH, index: int = 0
) -> tuple[list[Piece], ChoiceText]:
    """Pieces of a choice as an engine would make them, the one of `finish` last."""
    text = ChoiceText(call, index)
    pieces = []
    for choice in choices:
        pieces.append(text.push(choice))
        if text.stopped:
            ending = Ending("stop", generated=len(pieces))
            break
    pieces.append(text.finish(ending))
    return pieces, text


def scored(tokens: Sequence[int], **fields: Any) -> list[Choice]:
    return [Choice(token, row(i), **fields) for i, token in enumerate(tokens)]


@settings(max_examples=600, deadline=None)
@given(texts, stop_lists, st.lists(st.integers(0, 200), max_size=40))
@example("a🦜", ["🦜"], [1, 2, 3, 4])
@example("ab🦜", ["🦜"], [1, 3])
@example("a🦜é", ["é"], [2, 3])
@example("a🦜END", ["END"], [3])
@example("xabcdx", ["c", "bcde"], [1, 2, 3, 4, 5])
@example("xENDy", ["END"], [])
def test_text_and_tokens_match_and_no_byte_of_a_stop_leaks(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    pieces = [piece for piece in split(text.encode(), cuts) if piece]
    unique = list(dict.fromkeys([*pieces, b"?"]))
    model = Model(api_model.manifest(), of_pieces(unique), None, Limits())
    fields = {"stop": stops} if stops else {}
    call = completion(model, prompt=[len(unique) - 1], logprobs=0, **fields)
    shown, done = run(call, scored([unique.index(piece) for piece in pieces]))
    want = cut_at_stop(text, stops)
    seen_text, seen_bytes = "", b""
    for piece in shown:
        for entry in piece.entries:
            assert entry.data is not None and entry.logprob is not None
            assert entry.offset == len(seen_bytes.decode("utf-8", "ignore"))
            seen_bytes += entry.data
        seen_text += piece.text
        assert want.startswith(seen_text) and want.encode().startswith(seen_bytes)
        assert len(seen_bytes) <= len(seen_text.encode())
    assert seen_text == want and seen_bytes == want.encode()
    assert done.stopped == any(stop in text for stop in stops)
    assert done.finish_reason == ("stop" if done.stopped else "length")
    plain, _ = run(
        completion(model, prompt=[len(unique) - 1], **fields),
        [Choice(unique.index(piece)) for piece in pieces],
    )
    assert [p.text for p in plain] == [p.text for p in shown]
    assert not any(p.entries for p in plain)


@settings(max_examples=100, deadline=None)
@given(st.text("thecat éü🦜語\n", max_size=40), st.sampled_from([[], ["cat"], [" t", "é"], ["🦜"]]))
def test_the_real_tokenizer(text: str, stops: list[str]) -> None:
    ids = api_model.tokenizer().encode(text)
    call = completion(stop=stops, logprobs=2) if stops else completion(logprobs=2)
    shown, _ = run(call, scored(ids))
    answer = Answer.join(shown, None)
    assert answer.text == cut_at_stop(text, stops)
    assert b"".join(entry.data or b"" for entry in answer.entries) == answer.text.encode()


def test_a_token_is_shown_when_its_text_is() -> None:
    unique = [b"one", b" ", b"E", b"ND", b"\xf0\x9f", b"\xa6\x9c", b"EX"]
    model = Model(api_model.manifest(), of_pieces(unique), None, Limits())
    call = completion(model, stop="END", logprobs=0)

    def steps(*tokens: int) -> list[tuple[str, list[bytes | None]]]:
        shown, _ = run(call, scored(tokens))
        return [(piece.text, [entry.data for entry in piece.entries]) for piece in shown]

    assert steps(0, 1, 2, 1) == [
        ("one", [b"one"]),
        (" ", [b" "]),
        ("", []),
        ("E ", [b"E", b" "]),
        ("", []),
    ]
    assert steps(0, 2, 3) == [("one", [b"one"]), ("", []), ("", []), ("", [])]
    assert steps(4, 5, 2) == [
        ("", []),
        ("🦜", [b"\xf0\x9f", b"\xa6\x9c"]),
        ("", []),
        ("E", [b"E"]),
    ]
    assert steps(0, 4) == [("one", [b"one"]), ("", []), ("", [b"\xf0\x9f"])]
    assert steps(6)[0] == ("EX", [b"EX"])


def test_a_token_that_a_stop_cuts_keeps_what_is_before_it() -> None:
    unique = [b"\xf0\x9f", b"\xa6\x9cab", b"cd"]
    model = Model(api_model.manifest(), of_pieces(unique), None, Limits())
    shown, text = run(completion(model, stop="bc", logprobs=0), scored([0, 1, 2]))
    answer = Answer.join(shown, text.finish_reason)
    assert (answer.text, answer.finish_reason) == ("🦜a", "stop")
    assert [(e.name, e.data, e.offset) for e in answer.entries] == [
        ("bytes:\\xf0\\x9f", b"\xf0\x9f", 0),
        ("bytes:\\xa6\\x9c\\x61", b"\xa6\x9ca", 0),
    ]


def test_the_end_token_has_a_score_and_no_text() -> None:
    for fields in ({"eos": True}, {}):
        shown, text = run(
            completion(logprobs=1),
            [*scored([70]), Choice(EOS, row(9), **fields)],
            Ending("stop", generated=2),
        )
        answer = Answer.join(shown, text.finish_reason)
        assert answer.finish_reason == "stop" and answer.text == api_model.tokenizer().decode([70])
        last = answer.entries[-1]
        assert (last.name, last.data, last.offset) == ("<|endoftext|>", None, len(answer.text))
        assert last.logprob == pytest.approx(log_softmax(row(9))[EOS], abs=1e-9)
    text = ChoiceText(completion(logprobs=0), 0)
    piece = text.push(Choice(70, row(0), eos=True))  # an end id that is no special token
    assert piece.text == "" and [entry.data for entry in piece.entries] == [None]
    special, _ = run(completion(logprobs=0), scored([EOS, EOS, 70]))
    assert [len(piece.entries) for piece in special] == [1, 1, 1, 0]


def test_nothing_after_a_stop() -> None:
    text = ChoiceText(completion(stop="a", logprobs=0), 0)
    ids = api_model.tokenizer().encode("xa")
    for token in ids:
        text.push(Choice(token, row(0)))
    assert text.stopped and not text.push(Choice(70, row(0))) and not text.finish(LENGTH)
    assert text.finish_reason == "stop"


@pytest.mark.parametrize("reason", ["cancelled", "deadline", "error"])
def test_an_unfinished_choice_has_no_reason_but_an_error(reason: Any) -> None:
    ending = Ending(reason, "what happened")
    shown, text = run(completion(stop="END"), [Choice(i) for i in encode("E")], ending)
    assert Answer.join(shown, None).text == "E" and text.finish_reason is None
    error = objects.ending_error(ending)
    assert error is not None and error.status in (500, 503, 504)
    assert error.message == "what happened" and error.type == "server_error"
    assert objects.ending_error(LENGTH) is None


def encode(text: str) -> list[int]:
    return api_model.tokenizer().encode(text)


def test_a_window_tokenizer_keeps_text_and_tokens_together() -> None:
    vocab = {word: i for i, word in enumerate(["[UNK]", "cat", "##s", "dog", "!"])}
    inner = tokenizers.Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    inner.decoder = decoders.WordPiece(prefix="##")
    model = Model(api_model.manifest(), Tokenizer(inner.to_str()), None, Limits())
    call = completion(model, prompt=[1, 2], logprobs=0, stop="dogs", echo=True)
    read = [Choice(1, None, prompt=True), Choice(2, row(1), prompt=True)]
    shown, text = run(call, [*read, *scored([1, 2, 3, 4, 3, 2])])
    answer = Answer.join(shown, text.finish_reason)
    assert answer.text == "cats cats dog! " and text.stopped
    offsets = [entry.offset for entry in answer.entries]
    assert offsets == [0, 3, 4, 8, 9, 13, 14]


def test_a_window_tokenizer_holds_tokens_while_it_holds_text() -> None:
    words = ["<unk>", "a", "<0x80>", "<0xC3>", "<0xA9>", "x"]
    inner = tokenizers.Tokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>")
    )
    inner.add_special_tokens(["<s>"])
    stages = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 0, 1)]
    inner.decoder = decoders.Sequence(stages)
    model = Model(api_model.manifest(), Tokenizer(inner.to_str()), None, Limits())
    call = completion(model, prompt=[1], logprobs=0, stop="x")

    def steps(*tokens: int) -> list[tuple[str, list[str]]]:
        shown, _ = run(call, scored(tokens))
        return [(piece.text, [entry.name for entry in piece.entries]) for piece in shown]

    broken = "bytes:\\x80"
    assert steps(2, 6, 1) == [("", []), ("", []), ("\ufffda", [broken, "<s>", "a"]), ("", [])]
    assert steps(3, 6, 4, 5) == [
        ("", []),
        ("", []),
        ("é", ["bytes:\\xc3", "<s>", "bytes:\\xa9"]),
        ("", []),
        ("", []),
    ]
    assert steps(1, 2) == [("a", ["a"]), ("", []), ("", [broken])]


def test_a_bundle_without_tokenizer_gives_ids() -> None:
    call = completion(api_model.bare(), logprobs=1)
    shown, text = run(call, scored([7, 8]))
    answer = Answer.join(shown, text.finish_reason)
    (choice,) = objects.whole(call, [answer], {})["choices"]
    assert choice["text"] == "" and choice["token_ids"] == [7, 8]
    assert choice["logprobs"]["tokens"] == ["token_id:7", "token_id:8"]
    asked = completion(return_token_ids=True)
    shown, _ = run(asked, [Choice(7), Choice(8)])
    assert [objects.chunk(asked, 0, p)["choices"][0]["token_ids"] for p in shown if p] == [[7], [8]]
    assert "token_ids" not in objects.chunk(completion(), 0, Piece("a"))["choices"][0]


def test_chunks_make_the_same_text_and_scores_as_one_object() -> None:
    for call in (completion(stream=True, logprobs=2), chat(logprobs=True, top_logprobs=2)):
        shown, text = run(call, scored(encode("naïve 🦜 cats, END")))
        whole = objects.whole(call, [Answer.join(shown, text.finish_reason)], {})
        (choice,) = whole["choices"]
        parts = [objects.chunk(call, 0, piece)["choices"][0] for piece in shown if piece]
        if call.chat:
            assert (
                "".join(part["delta"]["content"] for part in parts)
                == (choice["message"]["content"])
            )
            content = [entry for part in parts for entry in part["logprobs"]["content"]]
            assert content == choice["logprobs"]["content"]
            assert (
                bytes(b for entry in content for b in entry["bytes"]).decode()
                == (choice["message"]["content"])
            )
            assert all(len(entry["top_logprobs"]) == 2 for entry in content)
        else:
            assert "".join(part["text"] for part in parts) == choice["text"]
            for name, values in choice["logprobs"].items():
                assert [v for part in parts for v in part["logprobs"][name]] == values
        assert all(part["finish_reason"] is None for part in parts)


def test_the_order_of_a_chat_stream() -> None:
    call = chat(stream=True, stream_options={"include_usage": True}, n=2)
    (first,) = objects.opening(call, 1)
    assert first["choices"] == [
        {
            "index": 1,
            "delta": {"role": "assistant", "content": "", "refusal": None},
            "logprobs": None,
            "finish_reason": None,
        }
    ]
    last = objects.closing(call, 1, "stop")
    assert last["choices"][0]["delta"] == {} and last["choices"][0]["finish_reason"] == "stop"
    total = objects.usage(call, [Ending("stop", generated=3), Ending("length", generated=4)])
    size = len(call.requests[0].prompt)
    assert total == {"prompt_tokens": size, "completion_tokens": 7, "total_tokens": size + 7}
    end = objects.usage_chunk(call, total)
    assert end["choices"] == [] and end["usage"] == total
    middle = objects.chunk(call, 1, Piece("a"))
    assert middle["usage"] is None and "usage" not in objects.chunk(chat(), 0, Piece("a"))
    heads = [{k: o[k] for k in ("id", "object", "created", "model")} for o in (first, middle, end)]
    assert heads[0] == heads[1] == heads[2] and heads[0]["object"] == "chat.completion.chunk"
    assert objects.opening(completion(), 0) == []


@pytest.mark.oracle
def test_the_client_library_reads_every_object() -> None:
    from openai.types import Completion
    from openai.types import Model as Card
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    def strict(cls: Any, value: Any) -> None:
        if cls is Completion:  # its chunks have the type of the whole, whose reason is never null
            value = {**value, "choices": [{**c, "finish_reason": "stop"} for c in value["choices"]]}
        found = cls.model_validate_json(objects.encode(value), strict=True)
        extra = {"token_ids", "max_model_len"}
        for name in value:
            assert name in cls.model_fields or name in extra
            assert getattr(found, name) is not None or value[name] is None

    total = objects.usage(completion(), [LENGTH])
    for call, one, part in (
        (completion(logprobs=2, echo=True), Completion, Completion),
        (completion(), Completion, Completion),
        (chat(logprobs=True, top_logprobs=1), ChatCompletion, ChatCompletionChunk),
        (chat(), ChatCompletion, ChatCompletionChunk),
    ):
        scores = scored(encode(" cats 🦜"))
        shown, text = run(call, scores, LENGTH)
        strict(one, objects.whole(call, [Answer.join(shown, text.finish_reason)], total))
        for piece in shown[:-2]:
            strict(part, objects.chunk(call, 0, piece))
        for value in (*objects.opening(call, 0), objects.usage_chunk(call, total)):
            strict(part, value)
    strict(ChatCompletionChunk, objects.closing(chat(), 0, "length"))
    strict(Card, objects.model_card(MODEL))


def test_models_and_fingerprint() -> None:
    (card,) = objects.models(MODEL)["data"]
    assert card["id"] == "mamba2" and card["object"] == "model" and card["max_model_len"] is None
    assert MODEL.fingerprint.startswith("fp_") and len(MODEL.fingerprint) == 15
    other = Model(api_model.manifest(context=9))
    assert other.fingerprint != MODEL.fingerprint and other.name == "mamba2"


def test_json_is_compact_text_without_nan() -> None:
    assert objects.encode({"a": ["é", 1]}) == '{"a":["é",1]}'.encode()
    with pytest.raises(ValueError, match="JSON"):
        objects.encode(math.nan)
    assert json.loads(objects.encode(objects.models(MODEL)))["object"] == "list"
