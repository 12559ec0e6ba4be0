"""Repeated prompts and scores of tokens, in the shape of the older endpoint."""

from __future__ import annotations

import api_model
import numpy as np
import pytest
import tokenizers
from test_server_objects import EOS, completion, encode, log_softmax, of_pieces, row, run, scored
from tokenizers import decoders, models

from runtime.request import Choice
from runtime.server import objects
from runtime.server.calls import Call
from runtime.server.model import Limits, Model
from runtime.server.objects import Answer
from runtime.tokenizer import Tokenizer


def test_echo_comes_first_with_or_without_scores() -> None:
    call = completion(prompt="the cat", echo=True)
    ids = encode(" sat")
    shown, text = run(call, [Choice(i) for i in ids])
    assert shown[0].text.startswith("the cat") and not shown[0].entries
    assert Answer.join(shown, None).text == "the cat sat"
    shown, text = run(completion(prompt="the cat", echo=True, max_tokens=0), [])
    assert [piece.text for piece in shown] == ["the cat"] and text.finish_reason == "length"
    shown, _ = run(completion(prompt="the cat", echo=True, stop="cat"), [Choice(i) for i in ids])
    assert Answer.join(shown, None).text == "the cat sat"  # a stop in the prompt counts for nothing


def read_prompt(call: Call, index: int = 0) -> list[Choice]:
    prompt = call.requests[index].prompt
    return [
        Choice(token, row(100 + place) if place else None, prompt=True)
        for place, token in enumerate(prompt)
    ]


def test_every_choice_repeats_its_own_prompt() -> None:
    call = completion(prompt=["the cat", "a dog"], n=2, echo=True)
    found = [Answer.join(run(call, [], index=i)[0], None).text for i in range(4)]
    assert found == ["the cat", "the cat", "a dog", "a dog"]


def test_echo_with_scores_is_what_a_harness_sums() -> None:
    """Log-likelihood of a continuation: scores of the tokens after the context, the generated one
    left out; greedy if each is the largest."""
    ids = encode("the crème 🦜 brûlée")
    call = completion(prompt=ids, echo=True, logprobs=1, max_tokens=1)
    shown, text = run(call, [*read_prompt(call), *scored([EOS], eos=True)])
    (choice,) = objects.whole(call, [Answer.join(shown, text.finish_reason)], {})["choices"]
    found = choice["logprobs"]
    assert choice["text"] == "the crème 🦜 brûlée"
    assert all(len(found[name]) == len(ids) + 1 for name in found)
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    for place, token in enumerate(ids[1:], 1):
        scores = log_softmax(row(100 + place))
        assert found["token_logprobs"][place] == pytest.approx(scores[token], abs=1e-9)
        top = found["top_logprobs"][place]
        assert max(top.values()) == pytest.approx(scores.max(), abs=1e-9)
        assert top[found["tokens"][place]] == found["token_logprobs"][place]
    assert found["text_offset"] == sorted(found["text_offset"])
    whole = [place for place, name in enumerate(found["tokens"]) if not name.startswith("bytes:")]
    for place in whole[:-1]:
        at = found["text_offset"][place]
        assert choice["text"][at:].startswith(found["tokens"][place])
    assert found["tokens"][-1] == "<|endoftext|>"


def test_a_prompt_that_the_tokenizer_puts_a_space_before() -> None:
    words = {"<unk>": 0, "▁a": 1, "b": 2, "▁": 3}
    inner = tokenizers.Tokenizer(models.BPE(vocab=words, merges=[], unk_token="<unk>"))
    inner.decoder = decoders.Metaspace()
    model = Model(api_model.manifest(), Tokenizer(inner.to_str()), None, Limits())
    call = completion(model, prompt=[1, 2], echo=True, logprobs=0)
    shown, _ = run(call, [*read_prompt(call), *scored([1])])
    answer = Answer.join(shown, None)
    assert answer.text == "ab a"
    assert [entry.offset for entry in answer.entries] == [0, 1, 2]


def test_tokens_of_one_name_keep_the_best_score() -> None:
    words = {"<unk>": 0, "▁a": 1, " a": 2}
    inner = tokenizers.Tokenizer(models.BPE(vocab=words, merges=[], unk_token="<unk>"))
    inner.decoder = decoders.Metaspace()
    model = Model(api_model.manifest(vocab=3), Tokenizer(inner.to_str()), None, Limits())
    values = np.array([0.0, 1.0, 2.0], np.float32)
    call = completion(model, prompt=[1], logprobs=3)
    shown, _ = run(call, [Choice(1, values)])
    (choice,) = objects.whole(call, [Answer.join(shown, None)], {})["choices"]
    (top,) = choice["logprobs"]["top_logprobs"]
    assert top == {" a": pytest.approx(log_softmax(values)[2]), "<unk>": pytest.approx(-2.4076059)}
    assert choice["logprobs"]["token_logprobs"] == [pytest.approx(log_softmax(values)[1])]


def test_the_logarithm_of_zero_is_a_number() -> None:
    unique = [b"a", b"\xf0", b"\xf1"]
    model = Model(api_model.manifest(vocab=4), of_pieces(unique), None, Limits())
    values = np.array([-np.inf, 1.0, 2.0, 0.0], np.float32)
    call = completion(model, prompt=[1], logprobs=4)
    shown, _ = run(call, [Choice(0, values)])
    (choice,) = objects.whole(call, [Answer.join(shown, None)], {})["choices"]
    (top,) = choice["logprobs"]["top_logprobs"]
    assert list(top) == ["bytes:\\xf1", "bytes:\\xf0", "token_id:3", "a"]
    assert top["a"] == -9999.0 and top["bytes:\\xf1"] == pytest.approx(log_softmax(values[1:])[1])
    objects.encode(choice)
