"""GGUF files with a vocabulary, written by the package `gguf` as llama.cpp's conversion does."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
from tokenizers import Tokenizer as Inner

from emit.gguf_file import open_file
from emit.gguf_tokenizer import tokenizer_of
from runtime.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
PADDING = 5  # rows of the embedding that have no token
Keys = Mapping[str, Any]


def write(path: Path, keys: Keys, arch: str = "mamba") -> Path:
    """A file with `tokenizer.…` keys alone: texts, numbers, truth values, and arrays of them."""
    writer = gguf.GGUFWriter(path, arch)
    add(writer, keys)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, keys: Keys) -> None:
    """Give `keys` to a writer, each by the name behind `tokenizer.`; None is left out."""
    for name, value in keys.items():
        if isinstance(value, bool):
            writer.add_bool(f"tokenizer.{name}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"tokenizer.{name}", value)
        elif isinstance(value, str):
            writer.add_string(f"tokenizer.{name}", value)
        elif value is not None:
            writer.add_array(f"tokenizer.{name}", value)


def made(path: Path) -> tuple[dict[str, str], list[str]]:
    """The tokenizer's files of the GGUF file `path`, and the lines about what is missing."""
    return tokenizer_of(open_file(path))


def of_keys(keys: dict[str, Any]) -> dict[str, str]:
    """The files made of a GGUF file with `keys`; nothing is left out."""
    with TemporaryDirectory() as place:
        files, notes = made(write(Path(place) / "x.gguf", keys))
    assert notes == []
    return files


def same(wanted: Tokenizer, found: Tokenizer, text: str) -> None:
    for special in (True, False):
        ids = found.encode(text, special)
        assert ids == wanted.encode(text, special)
    assert found.decode(ids) == wanted.decode(ids)


def padded(tokens: Sequence[Any], kinds: Sequence[int]) -> dict[str, Any]:
    """The keys of a vocabulary with PADDING unused rows behind it."""
    names = [f"[PAD{len(tokens) + i}]" for i in range(PADDING)]
    return {
        "ggml.tokens": [*tokens, *names],
        "ggml.token_type": [*kinds, *[UNUSED] * PADDING],
    }


def byte_pairs(inner: Inner, pre: str, **keys: Any) -> dict[str, Any]:
    """The keys of a byte-level tokenizer, as set_vocab_gpt2 writes them."""
    content = json.loads(inner.to_str())
    added = inner.get_added_tokens_decoder()
    words = {i: word for word, i in inner.get_vocab(with_added_tokens=True).items()}
    kinds = []
    for i in range(len(words)):
        word = words[i]
        looks = re.fullmatch(r"<\|.*\|>", word) is not None
        control = i in added and (added[i].special or looks)
        kinds.append(CONTROL if control else USER if i in added else NORMAL)
    template = content["post_processor"] or {}
    begins = {"ggml.add_bos_token": True} if template.get("type") == "TemplateProcessing" else {}
    return {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        **padded([words[i] for i in range(len(words))], kinds),
        "ggml.merges": [" ".join(pair) for pair in content["model"]["merges"]],
        **begins,
        **{f"ggml.{key}": value for key, value in keys.items()},
    }


def pieces(rows: Sequence[tuple[Any, float, int]], **keys: Any) -> dict[str, Any]:
    """The keys of a SentencePiece tokenizer of (piece, score, type), as set_vocab_sentencepiece."""
    tokens, scores, kinds = zip(*rows, strict=True)
    return {
        "ggml.model": "llama",
        "ggml.pre": "default",
        **padded(tokens, kinds),
        "ggml.scores": [*map(float, scores), *[-10000.0] * PADDING],
        **{f"ggml.{key}": value for key, value in keys.items()},
    }


def with_vocabulary(source: Path, path: Path, keys: Keys) -> Path:
    """The model in the GGUF file `source`, with other `tokenizer.…` keys."""
    reader = gguf.GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, arch)
    for name, field in reader.fields.items():
        if name.startswith(("GGUF.", "tokenizer.", "general.architecture")):
            continue
        inner = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(name, field.contents(), field.types[0], inner)
    add(writer, keys)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
