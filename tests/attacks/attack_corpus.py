"""Whole files, small ones, of every kind that is read, for `attack_mutate` to change."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attack_mutate as mutate
import attack_transport
import ml_dtypes
import numpy as np
import pth_files
from attack_mutate import Mutator
from attack_parsers import IRPA, MANIFEST
from gguf_vocabularies import CONTROL, NORMAL, byte_pairs, pieces
from gguf_vocabularies import write as write_gguf
from safetensors.numpy import save
from tokenizers import Tokenizer as Inner

from emit import irpa
from runtime import manifest, saved

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"


@dataclass(frozen=True)
class Seed:
    """Files of one directory, of which `name` is changed by `mutator` and read by `parser`.

    `share` is how many of all inputs are of it, relative to the others.
    """

    parser: str
    files: Mapping[str, bytes]
    name: str
    mutator: Mutator
    share: int = 4


def _checkpoint_files() -> dict[str, bytes]:
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b.weight": np.ones((4,), ml_dtypes.bfloat16).view(np.uint16),
        "c": np.zeros((0, 2), np.int32),
    }
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model-1.safetensors")}
    return {
        "config.json": json.dumps({"model_type": "mamba2"}).encode(),
        "generation_config.json": b'{"eos_token_id": 0}',
        "model-1.safetensors": save(tensors, {"format": "pt"}),
        "model.safetensors.index.json": json.dumps(index).encode(),
    }


def _checkpoints() -> Iterator[Seed]:
    files = _checkpoint_files()
    yield Seed("checkpoint", files, "model-1.safetensors", mutate.in_safetensors, 16)
    yield Seed("checkpoint", files, "model.safetensors.index.json", mutate.in_json_text, 8)
    yield Seed("checkpoint", files, "config.json", mutate.in_json_text, 2)
    for path in sorted(DATA.glob("*/checkpoint/config.json")):
        config = {"config.json": path.read_bytes()}
        yield Seed("config", config, "config.json", mutate.in_json_text, 2)


def _ggufs() -> Iterator[Seed]:
    for path in sorted(DATA.glob("gguf/*.gguf")):
        if path.stat().st_size < 200_000:
            head = mutate.in_head(6000)
            yield Seed("gguf", {"model.gguf": path.read_bytes()}, "model.gguf", head, 1)
    inner = Inner.from_file(str(DATA / "mamba" / "checkpoint" / "tokenizer.json"))
    scored = [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    scored = [("<s>", 0.0, CONTROL), *scored, ("a", -2.0, NORMAL), ("aa", -1.0, NORMAL)]
    with TemporaryDirectory() as place:
        for keys in (byte_pairs(inner, "gpt-2", bos_token_id=0), pieces(scored, bos_token_id=0)):
            data = write_gguf(Path(place) / "x.gguf", keys).read_bytes()
            yield Seed("gguf tokenizer", {"model.gguf": data}, "model.gguf", mutate.in_bytes, 3)


def _pths() -> Iterator[Seed]:
    made = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, ml_dtypes.bfloat16)}
    with TemporaryDirectory() as place:
        data = pth_files.saved(Path(place) / "model.pth", made).read_bytes()
        archive = Path(place) / "params.irpa"
        irpa.write(archive, IRPA, [np.ones((3, 5), np.float32), np.ones(7, ml_dtypes.bfloat16)])
        params = archive.read_bytes()
        talk = Path(place) / "talk"
        state = {"h": np.ones((1, 8), np.float32)}
        saved.save(saved.Saved(MANIFEST.digest, (1, 2, 3), 2, 2, 7, 0, state), MANIFEST, talk)
        conversation = talk.read_bytes()
    yield Seed("pth", {"model.pth": data}, "model.pth", mutate.in_zip, 16)
    yield Seed("pth of RWKV-7", {"model.pth": data}, "model.pth", mutate.in_zip, 2)
    yield Seed("irpa", {"params.irpa": params}, "params.irpa", mutate.in_head(300), 10)
    yield Seed("conversation", {"talk": conversation}, "talk", mutate.in_safetensors, 10)


def _jsons() -> Iterator[Seed]:
    text = manifest.dumps(MANIFEST).encode()
    plain = json.loads(text)
    keys = ("functions", "state", "params", "numerics")
    interface = {key: plain[key] for key in keys} | {
        "family": "toy", "num_layers": 1, "vocab_size": 16, "context": None,
        "eos_token_ids": [0], "bos_token_id": None,
    }  # fmt: skip
    reference = (DATA / "mamba" / "reference.json").read_bytes()
    entry = {"sha256": "a" * 64, "size": 5}
    lock = {
        "schema": 1, "source": "hf:o/n", "revision": "main", "commit": "b" * 40,
        "files": {"config.json": entry, "model.safetensors": entry},
    }  # fmt: skip
    for parser, name, data in (
        ("manifest", "manifest.json", text),
        ("interface", "interface.json", json.dumps(interface).encode()),
        ("reference", "reference.json", reference),
        ("lock", "mine.lock.json", json.dumps(lock).encode()),
    ):
        yield Seed(parser, {name: data}, name, mutate.in_json_text, 8)


def _recipes() -> Iterator[Seed]:
    model = (ROOT / "recipes" / "models" / "mamba2-130m.yaml").read_bytes()
    target = (ROOT / "recipes" / "targets" / "cpu.yaml").read_bytes()
    yield Seed("model recipe", {"mine.yaml": model}, "mine.yaml", mutate.in_lines, 4)
    yield Seed("target recipe", {"mine.yaml": target}, "mine.yaml", mutate.in_lines, 4)


def world_vocabulary() -> bytes:
    """Every byte, and two longer tokens."""
    words = [bytes([byte]) for byte in range(256)] + [b" the", "日".encode()]
    return "".join(f"{i} {word!r} {len(word)}\n" for i, word in enumerate(words, 1)).encode()


def plamo_vocabulary() -> bytes:
    """Every byte, and three pieces."""
    rows = [["<|plamo:unk|>", 0.0, "UNKNOWN"], ["<|plamo:bos|>", 0.0, "CONTROL"]]
    rows += [[f"<0x{byte:02X}>", -10.0, "BYTE"] for byte in range(256)]
    rows += [["a", -1.0, "NORMAL"], ["ab", -0.5, "NORMAL"], ["日", -3.0, "NORMAL"]]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def ranks() -> bytes:
    """Every byte, and two pairs."""
    words = [bytes([byte]) for byte in range(256)] + [b"ab", b"th"]
    lines = (f"{base64.b64encode(word).decode()} {i}\n" for i, word in enumerate(words))
    return "".join(lines).encode()


def _tokenizers() -> Iterator[Seed]:
    checkpoint = DATA / "mamba" / "checkpoint"
    tokens = (checkpoint / "tokenizer.json").read_bytes()
    config = json.loads((checkpoint / "tokenizer_config.json").read_bytes())
    added = {"0": {"content": "<|x|>", "special": True}}
    settings = json.dumps({**config, "add_bos_token": True, "bos_token": "<|x|>",
                           "added_tokens_decoder": added}).encode()  # fmt: skip
    plamo = json.dumps({"add_bos_token": True, "bos_token": "<|plamo:bos|>"}).encode()
    special = {"256": {"content": "[BOS]", "special": True}}
    tiktoken = json.dumps({"added_tokens_decoder": special | {"259": "<|x|>"}}).encode()
    for parser, name, data, words, mutator in (
        ("tokenizer.json", "tokenizer.json", tokens, settings, mutate.in_json_text),
        ("rwkv vocabulary", "rwkv_vocab_v20230424.txt", world_vocabulary(), settings,
         mutate.in_lines),
        ("tokenizer.jsonl", "tokenizer.jsonl", plamo_vocabulary(), plamo, mutate.in_json_lines),
        ("tiktoken.model", "tiktoken.model", ranks(), tiktoken, mutate.in_lines),
    ):  # fmt: skip
        files = {name: data, "tokenizer_config.json": words}
        yield Seed(parser, files, name, mutator, 4)
        yield Seed(parser, files, "tokenizer_config.json", mutate.in_json_text, 3)


def _transport() -> Iterator[Seed]:
    name = manifest.FILE_NAME
    code = attack_transport.CODE
    files = {name: attack_transport.listing(), "model.vmfb": code}
    signed = attack_transport.sealed(attack_transport.statement()).encode()
    image = {"schemaVersion": 2, "layers": [attack_transport.layer(name) for name in files]}
    build = attack_transport.BUILD | attack_transport.packages("numpy", version=np.__version__)

    def built(plain: dict[str, Any]) -> None:
        plain["build"], plain["target"]["recipe"] = build, attack_transport.RECIPE

    again = attack_transport.relisted(built).encode()
    for parser, path, data, mutator, share in (
        ("tar", "b.tar", attack_transport.packed(), mutate.in_head(9000), 1),
        ("image manifest", "image.json", json.dumps(image).encode(), mutate.in_json_text, 2),
        ("signature", "model.sig", signed, mutate.in_json_text, 1),
        ("reproduced", name, again, mutate.in_json_text, 4),
    ):
        yield Seed(parser, {**files, path: data}, path, mutator, share)


TEMPLATE = b"""{% macro part(m, n=2) %}{{ '[' ~ m.role | upper ~ ']' * n }}{% endmacro %}
{%- set ns = namespace(text='') %}
{%- for message in messages %}
{%- if loop.first and message.content | length > 3 %}{% set ns.text = ns.text + 'x' %}{% endif %}
{{- part(message) + message['content'].strip()[:9] | tojson }}
{%- for i in range(3) %}{{ '%3d' % i }}{{ message.content.replace('l', 'LL') }}{% endfor %}
{%- endfor %}{{ bos_token }}{{ ns.text }}{{ '{:>5}'.format(1) }}"""


def seeds() -> list[Seed]:
    """All of them."""
    found = [*_checkpoints(), *_ggufs(), *_pths(), *_jsons(), *_recipes(), *_tokenizers()]
    found += _transport()
    name = "chat_template.jinja"
    return [*found, Seed("chat template", {name: TEMPLATE}, name, mutate.in_bytes, 6)]
