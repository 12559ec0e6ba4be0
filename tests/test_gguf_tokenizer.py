"""Tokenizers made of GGUF metadata, id for id against those that the metadata was written of."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from gguf_vocabularies import (
    BYTE,
    CONTROL,
    NORMAL,
    PADDING,
    UNKNOWN,
    UNUSED,
    USER,
    byte_pairs,
    made,
    of_keys,
    padded,
    pieces,
    same,
    write,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tokenizer_kinds import TEXTS, falcon, falcon_h1, gpt_neox, tekken, trained
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Inner

from runtime.server.template import ChatTemplate, special_tokens
from runtime.tokenizer import Tokenizer

ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LETTERS = (
    "aThe t7²½語é\u0301e🦜ßЖञि한\n\r\t\u3000\u00a0 '.,;()[]<>|^$`~\x00sStTmMdDlLrReEvV0123456789"
)
WORDS = ["  ", "   ", "'ll", "'RE", "cat", "<s>", "</s>", "<|endoftext|>", "<|im_end|>", "<unk>",
         "<tool_call>", "[INST]", "12345", "isn't", "\r\n", "e\u0301", "नमस्ते", " //\n"]  # fmt: skip
texts = st.lists(st.sampled_from([*LETTERS, *WORDS]), max_size=25).map("".join)


def by_pattern(pattern: str, nfc: bool, whole: bool = False) -> Inner:
    """Byte-level with one pattern, as Qwen's and Llama 3's; one added token is no special one."""
    inner = Inner(models.BPE(ignore_merges=whole))
    if nfc:
        inner.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([split, last])
    inner.decoder = decoders.ByteLevel()
    trained(inner, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    inner.add_tokens([AddedToken("<tool_call>", normalized=False)])
    return inner


def gpt2() -> Inner:
    inner = gpt_neox()
    inner.normalizer = None  # pyright: ignore[reportAttributeAccessIssue]
    return inner


KINDS: dict[str, tuple[Callable[[], Inner], str]] = {
    "mamba": (gpt_neox, "olmo"),
    "mamba2": (gpt_neox, "mpt"),
    "gpt2": (gpt2, "gpt-2"),
    "falcon_mamba": (falcon, "falcon"),
    "falcon_h1": (falcon_h1, "falcon-h1"),
    "nemotron_h": (tekken, "tekken"),
    "qwen3_next": (
        lambda: by_pattern(ENDING + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + REST, nfc=True), "qwen2"
    ),
    "qwen3_5": (
        lambda: by_pattern(
            ENDING
            + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
            + REST.replace(r"\s\p{L}", r"\s\p{L}\p{M}"),
            nfc=True,
        ),
        "qwen35",
    ),
    "llama": (
        lambda: by_pattern(
            ENDING + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + REST, nfc=False, whole=True
        ),
        "llama-bpe",
    ),
}  # fmt: skip
every_kind = pytest.mark.parametrize("kind", KINDS)


@cache
def pair(kind: str) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizer of the file that was converted, and that of the GGUF file."""
    make, pre = KINDS[kind]
    inner = make()
    begin = {"bos_token_id": 1} if kind == "nemotron_h" else {}
    files = of_keys(byte_pairs(inner, pre, **begin))
    assert set(files) == {"tokenizer.json", "tokenizer_config.json"}
    return Tokenizer(inner.to_str()), Tokenizer(files["tokenizer.json"])


@every_kind
def test_a_vocabulary_is_the_same(kind: str) -> None:
    wanted, found = pair(kind)
    assert found.size == wanted.size and found.pieces == wanted.pieces
    assert [found.label(i) for i in range(found.size)] == [
        wanted.label(i) for i in range(found.size)
    ]
    for text in (*TEXTS, "cafe\u0301 A\u030a", "a //\r\n/\n  नमस्तेx"):
        same(wanted, found, text)


def test_a_token_that_no_merges_make_is_taken_whole_by_some_kinds() -> None:
    for pre, whole in (
        ("tekken", True),
        ("falcon-h1", True),
        ("llama-bpe", True),
        ("qwen2", False),
    ):
        keys = byte_pairs(gpt2(), pre)
        size = len(keys["ggml.tokens"]) - PADDING
        keys |= padded([*keys["ggml.tokens"][:size], "zqz"], [*keys["ggml.token_type"][:size], 1])
        ids = Tokenizer(of_keys(keys)["tokenizer.json"]).encode("zqz")
        assert (ids == [size]) is whole, pre


@pytest.mark.parametrize("kind", [UNUSED, USER])
def test_rows_without_a_token_are_none_and_play_no_role(kind: int) -> None:
    """Conversion has given them the kind USER in its early versions."""
    keys = byte_pairs(gpt2(), "gpt-2", bos_token_id=0)
    size = len(keys["ggml.tokens"]) - PADDING
    keys["ggml.token_type"] = [*keys["ggml.token_type"][:size], *[kind] * PADDING]
    files = of_keys(keys | {"ggml.padding_token_id": size + 1})
    found = Tokenizer(files["tokenizer.json"])
    assert found.size == size and len(found.encode(f"[PAD{size}]")) > 1
    assert "pad_token" not in json.loads(files["tokenizer_config.json"])


@every_kind
@settings(max_examples=300, deadline=None)
@given(texts)
def test_byte_pairs_are_those_of_the_original(kind: str, text: str) -> None:
    same(*pair(kind), text)


def test_a_pre_tokenizer_is_more_than_its_merges() -> None:
    """That the texts tell kinds apart: with the cuts of another kind ids differ."""
    for kind, other in (("qwen3_next", "tekken"), ("mamba", "gpt-2"), ("llama", "qwen2")):
        inner = KINDS[kind][0]()
        found = Tokenizer(of_keys(byte_pairs(inner, other))["tokenizer.json"])
        shown = ("isn'tHere x'LL e\u0301 12345", *TEXTS)
        assert any(found.encode(t) != pair(kind)[0].encode(t) for t in shown), (kind, other)


def test_the_default_cuts_digits_and_marks_apart() -> None:
    content = json.loads(of_keys(byte_pairs(gpt2(), "default"))["tokenizer.json"])
    cut = Inner.from_str(json.dumps(content)).pre_tokenizer
    parts = [part for part, _ in cut.pre_tokenize_str("a 12345, isn't+=x  y")]
    assert parts == ["a", "Ġ", "123", "45", ",", "Ġisn", "'", "t", "+=", "x", "Ġ", "Ġy"]


# --- SentencePiece ---

TRAIN = [*TEXTS[:4], *("the theory of the cat  and\tthe hat 1000 100 10",) * 3, "aaaa aaa aa"]


@cache
def scored() -> list[tuple[str, float, int]]:
    """Pieces by byte pairs of TRAIN, with the scores that a SentencePiece model gives them."""
    words = [list(text.replace(" ", "▁")) for text in TRAIN]
    chars = sorted({char for word in words for char in word if char not in "🦜ﷺ\n\t\r"})
    found: list[str] = []
    while len(found) < 110:
        counts: dict[str, int] = {}
        for word in words:
            for a, b in itertools.pairwise(word):
                if not set(a + b) <= set(chars):
                    continue  # as with the characters that a model does not cover
                counts[a + b] = counts.get(a + b, 0) + 1
        found.append(max(counts, key=lambda each: (counts[each], each)))
        words = [by_score(word, {p: -i for i, p in enumerate(found)}) for word in words]
    rows = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    rows += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    rows += [(word, -float(i), NORMAL) for i, word in enumerate(found)]
    rows += [(char, -float(len(found) + i), NORMAL) for i, char in enumerate(chars)]
    return [*rows, ("<tool>", -1000.0, USER)]


def by_score(parts: list[str], scores: dict[str, float]) -> list[str]:
    """Merge the two neighbours of the best joint score, the first of equals, while there are any.

    SentencePiece's rule for byte pairs."""
    parts = list(parts)
    while True:
        found = [
            (-scores[a + b], i)
            for i, (a, b) in enumerate(itertools.pairwise(parts))
            if a + b in scores
        ]
        if not found:
            return parts
        _, i = min(found)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@cache
def sentencepiece(prefix: bool) -> Tokenizer:
    keys = pieces(scored(), bos_token_id=1, eos_token_id=2, unknown_token_id=0)
    files = of_keys(keys | ({} if prefix else {"ggml.add_space_prefix": False}))
    return Tokenizer(files["tokenizer.json"])


@pytest.mark.parametrize("prefix", [True, False])
@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([*LETTERS, *"the a", "aaa", " the", "100"]), max_size=25))
def test_pieces_are_merged_by_their_scores(prefix: bool, parts: list[str]) -> None:
    text = "".join(parts)
    tokenizer = sentencepiece(prefix)
    rows = scored()
    ids = {word: i for i, (word, _, kind) in enumerate(rows) if kind in (NORMAL, BYTE)}
    scores = {word: score for word, score, kind in rows if kind == NORMAL}
    want = []
    for word in by_score(list(("▁" if prefix and text else "") + text.replace(" ", "▁")), scores):
        spelled = [f"<0x{byte:02X}>" for byte in word.encode()]
        want += [ids[each] for each in ([word] if word in ids else spelled)]
    assert tokenizer.encode(text, special=False) == want
    assert tokenizer.encode(text) == [1, *want]
    assert tokenizer.decode(want) == text


def test_sentencepiece_tokens_of_other_kinds() -> None:
    tokenizer = sentencepiece(True)
    assert tokenizer.size == len(scored())
    tool = len(scored()) - 1
    assert tokenizer.encode("<tool></s>", special=False) == [tool, 2]
    assert tokenizer.decode([tool, 2]) == "<tool>"


@pytest.mark.oracle
@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_model(prefix: bool) -> None:
    spm = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    lines = Path("runtime/perplexity.txt").read_text(encoding="utf-8").splitlines()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter([*TRAIN, *lines]), model_writer=model, model_type="bpe",
        vocab_size=1200, byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, add_dummy_prefix=prefix, minloglevel=2,
        unk_id=0, bos_id=1, eos_id=2, character_coverage=0.98,
    )  # fmt: skip
    theirs = spm.SentencePieceProcessor(model_proto=model.getvalue())
    kinds = [
        UNKNOWN if theirs.IsUnknown(i) else CONTROL if theirs.IsControl(i)
        else BYTE if theirs.IsByte(i) else NORMAL for i in range(1200)
    ]  # fmt: skip
    rows = [(theirs.IdToPiece(i), theirs.GetScore(i), kind) for i, kind in enumerate(kinds)]
    files = of_keys(pieces(rows, bos_token_id=1, add_space_prefix=prefix))
    found = Tokenizer(files["tokenizer.json"])
    for text in [*TRAIN, *lines[:200], *TEXTS[:4], "a  b   c", "🦜\t漢\n"]:
        assert found.encode(text) == [1, *theirs.encode(text)]
        assert found.decode(found.encode(text)) == theirs.decode(theirs.encode(text))


# --- what goes with the tokens ---


def test_the_chat_template_and_special_tokens() -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    keys = byte_pairs(tekken(), "tekken", bos_token_id=1, eos_token_id=2, add_eos_token=True)
    files = of_keys(keys | {"chat_template": template})
    config = json.loads(files["tokenizer_config.json"])
    assert config["bos_token"] == "<s>" and config["add_bos_token"] is True
    chat = ChatTemplate(config["chat_template"], special_tokens(config), Path("x"))
    assert chat.render([{"role": "user", "content": "é"}], True) == "<s>é</s>"
    found = Tokenizer(files["tokenizer.json"], files["tokenizer_config.json"])
    plain = found.encode("a", special=False)
    assert found.encode("a") == [1, *plain, 2]


def test_the_name_of_a_template_is_none(tmp_path: Path) -> None:
    keys = byte_pairs(gpt2(), "gpt-2") | {"chat_template": "rwkv-world"}
    files, notes = made(write(tmp_path / "x.gguf", keys))
    assert "chat_template" not in json.loads(files["tokenizer_config.json"])
    assert len(notes) == 1 and "chat_template = 'rwkv-world' is no template" in notes[0]


def test_a_begin_token_where_the_file_does_not_say() -> None:
    """As the originals: SentencePiece models put one, byte-level ones do not."""
    assert sentencepiece(True).encode("")[:1] == [1]
    files = of_keys(byte_pairs(gpt2(), "llama-bpe", bos_token_id=0))
    assert 0 not in Tokenizer(files["tokenizer.json"]).encode("a")
