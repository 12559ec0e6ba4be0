"""The tokenizer of a GGUF file whose `tokenizer.ggml.model` is `gpt2`: byte pairs by merges.

`tokenizer.ggml.pre` names how a text is cut before its bytes are merged. Cuts and normalization are
those of the published tokenizers that llama.cpp's conversion gives the name to; its own reader
leaves out NFC, and matches some classes of characters more coarsely.

It becomes tokenizer.json, but Kimi's its own tiktoken.model: there ids are ranks, and any pair that
makes a token is merged, while conversion keeps one pair for each.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

from emit.gguf_vocabulary import CONTROL, NORMAL, UNKNOWN, UNUSED, USER, Unknown, Vocabulary

KIMI = "kimi-k2"
TIKTOKEN_CLASS = "TikTokenTokenizer"  # as tokenizer_config.json of Kimi's tiktoken.model says
RESERVED = 256  # special tokens there, behind the ranks

_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _ENDING + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _ENDING + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_QWEN35 = (
    _ENDING + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}" + _REST.replace(r"\p{L}", r"\p{L}\p{M}")
)


# Words that begin in capitals or end in small letters, after one other character or none.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    + _REST.replace(r"[\r\n]*", r"[\r\n/]*")
)


def _split(regex: str) -> dict[str, Any]:
    pattern = {"Regex": regex}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def _bytes(regex: bool) -> dict[str, Any]:
    """To the alphabet of bytes; with `regex`, cut as GPT-2 does before."""
    return {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": regex
    }  # fmt: skip


@dataclass(frozen=True)
class Pre:
    """One value of `tokenizer.ggml.pre`: `cuts` in their order, and whether NFC goes before.

    With `whole`, a part that is a token is taken as it is, whatever the merges would make of it.
    """

    cuts: tuple[dict[str, Any], ...]
    nfc: bool = False
    whole: bool = False


_NEOX = Pre((_bytes(True),), nfc=True)
_LLAMA = Pre((_split(_LLAMA3), _bytes(False)), whole=True)
PRES = {
    "default": Pre(
        (
            _split(r"[\p{P}\$\+<=>\^~\|]+"), _split(_GPT2), _split(r"\p{N}+"),
            _split("[0-9][0-9][0-9]"), _bytes(False),
        )
    ),
    "gpt-2": Pre((_bytes(True),)),
    "mpt": _NEOX,
    "olmo": _NEOX,
    "falcon": Pre(
        (
            {"type": "Punctuation", "behavior": "Contiguous"}, _bytes(True),
            {"type": "Digits", "individual_digits": False}, _split("[0-9][0-9][0-9]"),
        )
    ),
    "falcon-h1": Pre(
        (_split(_QWEN2), {"type": "Digits", "individual_digits": True}, _bytes(False)), whole=True
    ),
    "llama-bpe": _LLAMA,
    "llama-v3": _LLAMA,
    "llama3": _LLAMA,
    "qwen2": Pre((_split(_QWEN2), _bytes(False)), nfc=True),
    "qwen35": Pre((_split(_QWEN35), _bytes(False)), nfc=True),
    "tekken": Pre((_split(_TEKKEN), _bytes(False)), whole=True),
}  # fmt: skip


def tokenizer_json(found: Vocabulary) -> dict[str, Any]:
    """The content of tokenizer.json. Raises Unknown for a `pre` not in PRES, and EmitError."""
    name = found.text("pre")
    if name is None:
        raise Unknown("tokenizer.ggml.pre is missing, so how its tokenizer cuts a text is not said")
    if name not in PRES:
        raise Unknown(f"how a tokenizer with tokenizer.ggml.pre = {name[:80]!a} cuts a text is not"
                      " known here")  # fmt: skip
    if found.flag("add_space_prefix", False):
        raise Unknown("tokenizer.ggml.add_space_prefix of a gpt2 tokenizer is not supported")
    pre = PRES[name]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens(found),
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(pre.cuts)},
        "post_processor": around(found, begins=False),
        "decoder": _bytes(True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.whole,
            "vocab": found.ids,
            "merges": _merges(found),
        },
    }


def _merges(found: Vocabulary) -> list[tuple[str, str]]:
    """The pairs in the order in which they are merged."""
    pairs, ids = [], found.ids
    for i, each in enumerate(found.strings("merges")):
        at = each.find(" ", 1)
        pair = (each[:at], each[at + 1 :]) if at > 0 else (each, "")
        if pair[0] not in ids or pair[1] not in ids or "".join(pair) not in ids:
            raise found.bad("merges", f"element {i} is {ascii(each)[:80]}, expected two tokens that"
                            " make a third")  # fmt: skip
        pairs.append(pair)
    return pairs


def added_tokens(found: Vocabulary) -> list[dict[str, Any]]:
    """The tokens that are cut out of a text before all else; the special ones have no text."""
    return [
        {
            "id": i,
            "content": found.tokens[i],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != USER,
        }
        for i, kind in enumerate(found.kinds)
        if kind in (UNKNOWN, CONTROL, USER)
    ]


def around(found: Vocabulary, begins: bool) -> dict[str, Any] | None:
    """The post-processor: the tokens that add_bos_token and add_eos_token put around a sequence.

    `begins`: whether a begin token comes first where the file has one and does not say.
    """
    roles = found.roles
    before = found.flag("add_bos_token", begins and "bos" in roles)
    after = found.flag("add_eos_token", False)
    ids = {}
    for role, wanted in (("bos", before), ("eos", after)):
        if wanted and role not in roles:
            raise found.bad(f"add_{role}_token", f"is true, but {role}_token_id is missing")
        ids |= {role: roles[role]} if wanted else {}
    if not ids:
        return None
    words = {role: found.tokens[i] for role, i in ids.items()}

    def template(*sequences: str) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        for number, name in enumerate(sequences):
            parts += [_piece("SpecialToken", words["bos"], number)] if before else []
            parts.append(_piece("Sequence", name, number))
            parts += [_piece("SpecialToken", words["eos"], number)] if after else []
        return parts

    return {
        "type": "TemplateProcessing",
        "single": template("A"),
        "pair": template("A", "B"),
        "special_tokens": {
            word: {"id": word, "ids": [ids[role]], "tokens": [word]} for role, word in words.items()
        },
    }


def _piece(kind: str, name: str, number: int) -> dict[str, Any]:
    return {kind: {"id": name, "type_id": number}}


def tiktoken_model(found: Vocabulary) -> tuple[str, dict[str, Any]]:
    """The text of tiktoken.model, and of the special tokens the content of tokenizer_config.json.

    Raises Unknown, and EmitError.
    """
    if found.flag("add_bos_token", False) or found.flag("add_eos_token", False):
        raise Unknown("a kimi-k2 tokenizer that puts tokens around a text is not supported")
    base = next((i for i, kind in enumerate(found.kinds) if kind != NORMAL), len(found.kinds))
    others = found.kinds[base:]
    if len(others) > RESERVED or not set(others) <= {CONTROL, UNUSED}:
        raise Unknown(f"a kimi-k2 tokenizer with more than {RESERVED} tokens behind its ranks, or"
                      " other than control tokens, is not supported")  # fmt: skip
    alphabet, lines = _alphabet(), []
    for i, token in enumerate(found.tokens[:base]):
        try:
            word = bytes(alphabet[char] for char in token)
        except KeyError as error:
            raise found.bad("tokens", f"element {i} is {ascii(token)[:80]}, and {error} is no byte"
                            " in GPT-2's alphabet") from None  # fmt: skip
        lines.append(f"{base64.b64encode(word).decode()} {i}")
    for char, byte in alphabet.items():
        if char not in found.ids:
            raise found.bad("tokens", f"no token of the byte 0x{byte:02X}, so some text has none")
    listed = {
        str(i): {"content": found.tokens[i], "special": True}
        for i in range(base, len(found.tokens))
        if found.kinds[i] == CONTROL
    }
    roles = {f"{role}_token": found.tokens[i] for role, i in found.roles.items() if i >= base}
    config = {"tokenizer_class": TIKTOKEN_CLASS, "added_tokens_decoder": listed, **roles}
    return "\n".join(lines) + "\n", config


def _alphabet() -> dict[str, int]:
    """Character -> byte: what is printable in Latin-1 stands for itself, and the other bytes for
    U+0100 upwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}
