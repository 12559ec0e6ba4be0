"""Encoding and streaming decoding against the tokenizers library's own one-shot decode."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from runtime.errors import UserError
from runtime.manifest import FileRef
from runtime.text import PieceDetokenizer, WindowDetokenizer
from runtime.tokenizer import Tokenizer, load

TEXT = "the cat sat on the mat; the  crème brûlée, 語学 🦜\n"
SPECIAL = ["<s>", "</s>"]


@cache
def byte_level() -> str:
    """GPT-NeoX style: byte-level BPE, special tokens, and an added token of several spaces."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([TEXT] * 4, trainer)
    inner.add_tokens([tokenizers.AddedToken("   ", normalized=False)])
    return inner.to_str()


def sentencepiece(decoder: Any = None) -> str:
    """Llama style: metaspace words, characters outside the vocabulary as <0xHH> tokens."""
    vocab = {word: i for i, word in enumerate(["<unk>", *SPECIAL])}
    for word in [f"<0x{b:02X}>" for b in range(256)] + list("▁thecasonm;") + ["▁t", "▁th", "▁the"]:
        vocab[word] = len(vocab)
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e")]
    inner = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>")
    )
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    inner.decoder = decoder or decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    inner.add_special_tokens(["<unk>", *SPECIAL])
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return inner.to_str()


@cache
def word_piece() -> str:
    """A decoder in which tokens do not stand alone."""
    words = ["[UNK]", *SPECIAL, "the", "cat", "##s", "##at", "s", ",", "é", "語"]
    inner = tokenizers.Tokenizer(
        models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]")
    )
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    inner.add_special_tokens(SPECIAL)
    return inner.to_str()


def streamed(tokenizer: Tokenizer, ids: list[int], prompt: list[int]) -> list[str]:
    stream = tokenizer.stream(prompt)
    return [*(stream.push(i) for i in ids), stream.finish()]


@settings(max_examples=200, deadline=None)
@given(st.text("thecat 語é🦜\n", max_size=24), st.integers(0, 24), st.sampled_from("bsmw"))
def test_streamed_text_continues_the_prompt(text: str, cut: int, kind: str) -> None:
    meta = decoders.Metaspace()
    table = {"b": byte_level, "w": word_piece, "s": sentencepiece}
    tokenizer = Tokenizer(sentencepiece(meta) if kind == "m" else table[kind]())
    if kind == "m":  # has no byte fallback in its decoder
        text = "".join(c for c in text if c in "thecas ")
    ids = tokenizer.encode("the cat" + text)
    start = len(tokenizer.encode("the cat"))
    cut = max(start, min(start + cut, len(ids)))
    if "\ufffd" in tokenizer.decode(ids[:cut]):
        cut = len(ids)
    prompt, rest = ids[:cut], ids[cut:]
    shown = streamed(tokenizer, rest, prompt)
    assert tokenizer.decode(prompt) + "".join(shown) == tokenizer.decode(ids)
    assert not any("\ufffd" in part for part in shown)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 330), max_size=30))
def test_any_byte_level_ids_give_the_text_of_one_decode(ids: list[int]) -> None:
    tokenizer = Tokenizer(byte_level())
    want = tokenizer.decode([i for i in ids if i < tokenizer.size])
    got = "".join(streamed(tokenizer, ids, []))
    assert want.startswith(got) and set(want[len(got) :]) <= {"\ufffd"}


def test_the_kinds_of_decoder_are_told_apart() -> None:
    for text, kind in (
        (byte_level(), PieceDetokenizer),
        (sentencepiece(), PieceDetokenizer),
        (sentencepiece(decoders.Metaspace()), PieceDetokenizer),
        (
            sentencepiece(decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])),
            PieceDetokenizer,
        ),
        (word_piece(), WindowDetokenizer),
        (sentencepiece(decoders.CTC()), WindowDetokenizer),
    ):
        assert type(Tokenizer(text).stream()) is kind


def test_pieces() -> None:
    tokenizer = Tokenizer(byte_level())
    ids = tokenizer.encode("é   the")
    assert b"".join(map(tokenizer.piece, ids)) == "é   the".encode()
    assert tokenizer.piece(0) == b"" and tokenizer.piece(10**6) == b""
    tokenizer = Tokenizer(sentencepiece())
    ids = tokenizer.encode("the é")
    assert ids[0] == 1 and tokenizer.piece(1) == b""
    assert [tokenizer.piece(i) for i in ids[1:]] == [b" the", b" ", b"\xc3", b"\xa9"]


def test_the_post_processor_puts_the_begin_token() -> None:
    for config in ("{}", '{"bos_token": "<s>", "add_bos_token": false, "add_eos_token": true}'):
        assert Tokenizer(sentencepiece(), config).encode("the") == [1, 272]
        assert Tokenizer(byte_level(), config).encode("a")[0] > 1


@pytest.mark.oracle
@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_eos_token": True}])
@pytest.mark.parametrize("kind", [byte_level, sentencepiece])
def test_encoding_matches_transformers(tmp_path: Path, config: dict, kind: Any) -> None:
    import transformers

    full = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        **config,
    }
    (tmp_path / "tokenizer.json").write_text(kind(), "utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(full))
    oracle = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer = Tokenizer(kind(), json.dumps(full))
    for text in ("the cat", "語 🦜  é\n", "<s>the</s>"):
        ids = oracle(text)["input_ids"]
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


def test_a_prompt_is_never_truncated_or_padded() -> None:
    inner = tokenizers.Tokenizer.from_str(byte_level())
    inner.enable_truncation(3)
    inner.enable_padding(length=64)
    assert len(Tokenizer(inner.to_str()).encode("zq" * 10)) == 20


def test_tokens_that_only_the_config_lists_are_added() -> None:
    size = Tokenizer(byte_level()).size
    listed = {str(size): {"content": "<end>", "special": True}, "0": {"content": "<s>"}}
    config = json.dumps({"added_tokens_decoder": listed})
    tokenizer = Tokenizer(byte_level(), config)
    assert tokenizer.encode("<end>") == [size] and tokenizer.piece(size) == b""


@pytest.mark.parametrize(
    ("listed", "line"),
    [
        ({"9999": {"content": "<end>"}}, "'<end>' the id 9999, expected \\d+"),
        ({"0": {"content": "</s>"}}, "'</s>' the id 0, expected 1"),
        ({"x": {"content": "</s>"}}, "malformed"),
        ({"0": {}}, "malformed"),
        ([1], "malformed"),
    ],
)
def test_a_contradicting_config_is_refused(listed: Any, line: str) -> None:
    with pytest.raises(UserError, match=f"tokenizer_config.json: added_tokens_decoder.*{line}"):
        Tokenizer(byte_level(), json.dumps({"added_tokens_decoder": listed}))


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(UserError, match="prompt: not UTF-8 at character 2"):
        Tokenizer(byte_level()).encode("ab\udcff")


def refs(bundle: Path) -> list[FileRef]:
    found = sorted(bundle.iterdir())
    return [
        FileRef(p.name, hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_size) for p in found
    ]


def test_load(tmp_path: Path) -> None:
    assert load(tmp_path, []) is None
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": true, "bos_token": "<s>"}')
    assert load(tmp_path, refs(tmp_path)) is None
    (tmp_path / "tokenizer.json").write_text(byte_level(), "utf-8")
    tokenizer = load(tmp_path, refs(tmp_path))
    assert tokenizer is not None and tokenizer.encode("<s>") == [0]


@pytest.mark.parametrize(
    ("name", "data", "line"),
    [
        ("tokenizer.json", b"{", "expected a tokenizer.json"),
        ("tokenizer.json", b'{"version": "1.0"}', "Model missing"),
        ("tokenizer.json", b"\xff{}", "not UTF-8 at byte 0"),
        ("tokenizer_config.json", b"[]", "found list, expected a JSON object"),
        ("tokenizer_config.json", b"{", "not JSON"),
    ],
)
def test_unreadable_files_are_named(tmp_path: Path, name: str, data: bytes, line: str) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_level(), "utf-8")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=line) as caught:
        load(tmp_path, refs(tmp_path))
    assert f"{tmp_path / name}: " in str(caught.value) and "\n" not in str(caught.value)


def test_a_changed_or_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(byte_level(), "utf-8")
    good = refs(tmp_path)
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(UserError, match=r"tokenizer\.json: sha256 .* as in manifest\.json"):
        load(tmp_path, good)
    path.unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json: No such file"):
        load(tmp_path, good)
