"""How much longer a tokenizer.json can make a text: hardly, or the file is refused.

Its stages run one after another within the library, which ends the process when memory does. Forty
replacements that each double a text are a file of two kilobytes.
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
from typing import Any

MOST = 1024  # times the bytes of a text; common files stay below 200
MOST_SPECIAL = 1000  # tokens that may be put around a text
_BYTE_LEVEL = 3  # a byte as a character of two, and a space before it


def check(tokenizer: Any) -> None:
    """Raise ValueError, naming the field, for a `tokenizers.Tokenizer` whose texts may explode."""
    stages = {name: _state(getattr(tokenizer, name)) for name in ("normalizer", "pre_tokenizer")}
    longer = {name: _growth(state) for name, state in stages.items()}
    longer["decoder"] = _growth(_state(tokenizer.decoder))
    for name, times in longer.items():
        if times > MOST:
            raise ValueError(f"{name}: may make a text {times:.3g} times as long, more than {MOST}")
    special = _special(_state(tokenizer.post_processor))
    if special > MOST_SPECIAL:
        raise ValueError(
            f"post_processor: puts {special} tokens around a text, more than {MOST_SPECIAL}"
        )
    for field in ("continuing_subword_prefix", "end_of_word_suffix", "prefix"):
        word = getattr(tokenizer.model, field, None) or ""
        if len(word) > MOST:
            raise ValueError(f"model.{field}: {len(word)} characters, more than {MOST}")


def _state(stage: Any) -> dict[str, Any]:
    return {} if stage is None else json.loads(stage.__getstate__())


def _growth(stage: dict[str, Any]) -> float:
    """How many bytes a byte may become. What only maps characters to such as Unicode says it (case,
    compatibility forms) does so once, however often it is told to, and does not count."""
    kind = stage.get("type")
    if kind == "Sequence":
        times = 1.0
        for key in ("normalizers", "pretokenizers", "decoders"):
            for part in stage.get(key, ()):
                times = min(times * _growth(part), 1e300)
        return times
    if kind == "Replace":
        pattern, new = stage["pattern"], len(stage["content"].encode())
        old = len(pattern["String"].encode()) if "String" in pattern else 0
        return max(1.0, new / old) if old else 1.0 + new  # an expression may match nothing
    if kind == "Prepend":
        return 1.0 + len(stage["prepend"].encode())
    if kind == "Metaspace":
        return 1.0 + len(stage["replacement"].encode())
    if kind == "Precompiled":
        return _longest(stage["precompiled_charsmap"] or "")
    return float(_BYTE_LEVEL) if kind == "ByteLevel" else 1.0


def _longest(charsmap: str) -> float:
    """Bytes of the longest replacement of a sentencepiece map: a trie, then texts that end in 0."""
    try:
        data = base64.b64decode(charsmap)
        (size,) = struct.unpack_from("<I", data)
    except (binascii.Error, ValueError, struct.error):
        return 1.0
    return max(1.0, *(float(len(text)) for text in data[4 + size :].split(b"\0")))


def _special(stage: dict[str, Any]) -> int:
    """How many tokens a post-processor adds to one text."""
    if stage.get("type") == "Sequence":
        return sum(_special(part) for part in stage.get("processors", ()))
    if stage.get("type") != "TemplateProcessing":
        return 4
    ids = {name: len(token["ids"]) for name, token in stage["special_tokens"].items()}
    pieces = (piece.get("SpecialToken", {}).get("id") for piece in stage["single"])
    return sum(ids.get(name, 0) for name in pieces if name is not None)
