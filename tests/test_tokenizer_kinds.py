"""The kinds of tokenizer.json that published checkpoints of each family have, built small.

Each is trained here with the normalizer, pre-tokenizer, post-processor and decoder of the real one,
so what the runtime makes of them is tested without files of others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Inner

from runtime.text import PieceDetokenizer
from runtime.tokenizer import Tokenizer

TEXTS = (
    "The cat sat on the mat; it's 12345 years old, isn't it?\n",
    "    def main(argc):\n\t\treturn argc * 10007  # 語学 🦜\r\n",
    "crème brûlée, НАТО, ﷺ, 日本語です。\u3000あ",
    "a  b   c    d     e",
    "<|im_start|>user\n{}<|im_end|>",
    "नमस्ते हिन्दी में, a/b //\n/\n",
    "\u200d👩\u200d🔬 ½ x² ①",
    "\x00\x7f\ufeff\U0010ffff",
    " leading and trailing ",
    "",
)


def trained(inner: Inner, special: list[str]) -> Inner:
    """With merges learned from TEXTS."""
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(TEXTS * 3, trainer)
    return inner


def gpt_neox() -> Inner:
    """Mamba, Mamba2: NFC, byte-level with GPT-2's split, and added runs of spaces."""
    inner = Inner(models.BPE())
    inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.ByteLevel(trim_offsets=True)
    trained(inner, ["<|endoftext|>", "<|padding|>"])
    inner.add_tokens([AddedToken(" " * n, normalized=True) for n in range(24, 1, -1)])
    return inner


def falcon() -> Inner:
    """Falcon, Falcon-Mamba: punctuation apart, byte-level, digits by three."""
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation(behavior="contiguous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), behavior="isolated"),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    return trained(inner, [">>TITLE<<", "<|endoftext|>"])


def falcon_h1() -> Inner:
    """Falcon-H1: single digits and marks apart, then byte-level without its own split."""
    inner = Inner(models.BPE(ignore_merges=True))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(
                    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
                    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
                ),
                behavior="isolated",
            ),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    trained(inner, ["<|pad|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"])
    inner.add_special_tokens([AddedToken("<|begin_of_text|>", normalized=False)])
    return inner


def tekken() -> Inner:
    """Nemotron-H: words by letter case and single digits, byte-level, a begin token."""
    letter = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
    small = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    word = rf"[^\r\n\p{{L}}\p{{N}}]?{letter}*{small}+|[^\r\n\p{{L}}\p{{N}}]?{letter}+{small}*"
    rest = r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    inner = Inner(models.BPE(ignore_merges=True))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(word + rest), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    trained(inner, ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"])
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return inner


def llama(strip: bool) -> Inner:
    """Jamba: spaces as ▁, one put before a text, characters outside the vocabulary as bytes."""
    words = ["<|pad|>", "<|startoftext|>", "<|endoftext|>", "<unk>"]
    words += [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "語", *map(chr, range(33, 127))]
    merges = [("T", "h"), ("Th", "e"), ("▁", "The"), ("a", "t"), ("c", "at"), ("▁", "cat")]
    merges += [("▁", "▁"), ("▁▁", "▁▁")]
    words += [a + b for a, b in merges]
    inner = Inner(
        models.BPE(
            vocab={word: i for i, word in enumerate(words)},
            merges=merges,
            byte_fallback=True,
            fuse_unk=True,
            unk_token="<unk>",
        )
    )
    inner.add_special_tokens(words[:4])
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    stages: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*stages, *([decoders.Strip(" ", 1, 0)] if strip else [])])
    inner.post_processor = processors.TemplateProcessing(
        single="<|startoftext|> $A", special_tokens=[("<|startoftext|>", 1)]
    )
    return inner


def metaspace() -> Inner:
    """Jamba 1.5 and later: the same through a Metaspace pre-tokenizer that puts nothing before."""
    inner = llama(strip=False)
    inner.normalizer = None  # pyright: ignore[reportAttributeAccessIssue]
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    return inner


KINDS: dict[str, Callable[[], Inner]] = {
    "mamba": gpt_neox,
    "falcon_mamba": falcon,
    "falcon_h1": falcon_h1,
    "nemotron_h": tekken,
    "jamba": lambda: llama(strip=True),
    "jamba_1_5": metaspace,
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@cache
def made(kind: str) -> tuple[Inner, Tokenizer]:
    """The library's tokenizer, and the runtime's of the same file."""
    text = KINDS[kind]().to_str()
    return Inner.from_str(text), Tokenizer(text)


def streamed(tokenizer: Tokenizer, ids: list[int], prompt: list[int]) -> str:
    stream = tokenizer.stream(prompt)
    assert isinstance(stream, PieceDetokenizer)  # no kind of these needs a window
    return "".join(map(stream.push, ids)) + stream.finish()


@every_kind
@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(kind: str, text: str) -> None:
    inner, tokenizer = made(kind)
    ids = tokenizer.encode(text)
    assert ids == inner.encode(text).ids
    silent = ("<|im_start|>", "<|im_end|>") if kind == "falcon_h1" else ()
    want = text
    for word in silent:
        want = want.replace(word, "")
    assert tokenizer.decode(ids) == want


@every_kind
@settings(max_examples=60, deadline=None)
@given(st.text("aTh 7語é🦜\n,\u3000", max_size=30), st.integers(1, 12))
def test_streamed_text_is_that_of_one_decode(kind: str, text: str, cut: int) -> None:
    _, tokenizer = made(kind)
    start = tokenizer.encode("The cat")
    ids = tokenizer.encode("The cat" + text)
    at = min(len(start) + cut, len(ids))
    prompt, rest = ids[:at], ids[at:]
    whole = tokenizer.decode(ids)
    shown = streamed(tokenizer, rest, prompt)
    # A character that the prompt leaves unfinished comes whole with the rest.
    before = b"".join(map(tokenizer.piece, prompt)).decode("utf-8", "ignore")
    assert before.removeprefix(" " if kind == "jamba" else "") + shown == whole


@every_kind
def test_digits_are_cut_as_the_kind_says(kind: str) -> None:
    _, tokenizer = made(kind)
    pieces = [tokenizer.piece(i).strip() for i in tokenizer.encode("12345", special=False)]
    digits = [piece for piece in pieces if piece]
    assert b"".join(digits) == b"12345"
    if kind in ("falcon_h1", "nemotron_h"):
        assert len(digits) == 5
    if kind == "falcon_mamba":
        assert all(len(piece) <= 3 for piece in digits)


@every_kind
def test_every_id_has_a_label_and_special_ones_no_bytes(kind: str) -> None:
    inner, tokenizer = made(kind)
    assert tokenizer.size == inner.get_vocab_size() == len(tokenizer.pieces)
    for i, token in inner.get_added_tokens_decoder().items():
        if token.special:
            assert tokenizer.label(i) == (token.content, None) and tokenizer.piece(i) == b""


def test_a_begin_token_is_put_where_the_file_says() -> None:
    for kind, first in (("nemotron_h", 1), ("jamba", 1), ("jamba_1_5", 1)):
        _, tokenizer = made(kind)
        assert tokenizer.encode("a")[0] == first != tokenizer.encode("a", special=False)[0]
    for kind in ("mamba", "falcon_mamba", "falcon_h1"):
        _, tokenizer = made(kind)
        assert tokenizer.encode("a") == tokenizer.encode("a", special=False)
