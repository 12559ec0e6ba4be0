"""Hostile manifests, recipes, tokenizers and chat templates: what each must end in."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from attack_case import DEEP, Case, both, link, sparse, text
from attack_corpus import plamo_vocabulary, ranks, world_vocabulary
from attack_parsers import MANIFEST

from runtime import manifest
from runtime.manifest import FileRef

# --- JSON of bundles -----------------------------------------------------------------------------


def edited(**changes: Any) -> str:
    return json.dumps(json.loads(manifest.dumps(MANIFEST)) | changes)


def with_path(path: str) -> str:
    files = json.loads(manifest.dumps(MANIFEST))["files"]
    return edited(files=files | {"module": files["module"] | {"path": path}})


def bundle(name: str, maker: Callable[[Path], object], size: int, data: bytes | None = None):
    """A bundle whose manifest lists `name`, of `size` bytes, as its one tokenizer file."""
    digest = hashlib.sha256(data).hexdigest() if data is not None else "b" * 64
    files = replace(MANIFEST.files, tokenizer=(FileRef(name, digest, size),))
    return both(text("manifest.json", manifest.dumps(replace(MANIFEST, files=files))), maker)


JSONS = [
    *(Case(f"a module at {path!a}", "manifest", text("manifest.json", with_path(path)), "path")
      for path in ("../outside/secret", "/etc/passwd", "a/../../b", "a\\b", "c:x", "a\0b", ".",
                   "manifest.json")),
    Case("a manifest nested without end", "manifest", text("manifest.json", DEEP), "too deeply"),
    Case("a manifest of a key that fills the screen", "manifest",
         text("manifest.json", edited(**{"\x1b[2J" + "x" * 1_000_000: 1})), r"unknown key \x1b[2J"),
    Case("a manifest with an integer of a million digits", "manifest",
         text("manifest.json", '{"schema": ' + "9" * 1_000_000 + "}"), "digits"),
    Case("a terabyte of manifest", "manifest", sparse("manifest.json", b"{", 1 << 40), "larger"),
    Case("a shape of 10^18 bytes", "manifest",
         text("manifest.json", edited(params=[{"name": "a", "dtype": "f32", "shape": [2**60],
                                               "offset": 0.0, "scale": 1.0}])), None),
    Case("chunks without number", "manifest",
         text("manifest.json", edited(shape={"name": "x", "slots": 2**62, "context": None,
                                             "chunks": list(range(1, 10_000))})), "functions"),
    Case("an interface of infinite numbers", "interface",
         text("interface.json", '{"num_layers": Infinity}'), "finite"),
    Case("an interface that is a pipe", "interface",
         lambda root: os.mkfifo(root / "interface.json"), "not a regular file"),
    Case("a reference nested without end", "reference",
         text("reference.json", '{"prompts": ' + DEEP + "}"), "too deeply"),
    Case("a reference that is an endless device", "reference",
         link("reference.json", "/dev/zero"), "not a regular file"),
    Case("a lock that climbs", "lock",
         text("mine.lock.json", json.dumps({
             "schema": 1, "source": "hf:o/n", "revision": "main", "commit": "b" * 40,
             "files": {"../../x.safetensors": {"sha256": "a" * 64, "size": 1}}})), "files"),
    Case("a conversation with a header longer than the file", "conversation",
         text("talk", struct.pack("<Q", 1 << 40) + b"{}"), "not a whole saved conversation"),
    Case("a conversation of a terabyte", "conversation",
         sparse("talk", struct.pack("<Q", 2) + b"{}", 1 << 40), "not a whole saved conversation"),
    Case("a conversation whose facts are nested without end", "conversation",
         text("talk", (lambda h: struct.pack("<Q", len(h)) + h)(
             json.dumps({"__metadata__": {"scanwright": DEEP}}).encode())),
         "not a whole saved conversation"),
]  # fmt: skip


# --- recipes -------------------------------------------------------------------------------------

RECIPE = "about: x\nsource: dir:tiny\nweights: f32\nshapes: [b1-p8]\n"
LAUGHS = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 'lol'}]\n"
                 for i in range(12))  # fmt: skip
TAGS = ("!!python/object/apply:os.system ['touch owned']", "!!python/name:os.system",
        "!include /etc/passwd", "!!binary aGk=", "!<tag:yaml.org,2002:str> x")  # fmt: skip

RECIPES = [
    Case("a billion laughs", "model recipe", text("mine.yaml", LAUGHS), "aliases and anchors"),
    Case("an alias of itself", "model recipe", text("mine.yaml", "a: &a [*a]\n"), "aliases"),
    Case("a merge key", "model recipe", text("mine.yaml", RECIPE + "<<: {about: y}\n"), "quote"),
    *(Case(f"the tag {tag.split()[0]}", "model recipe", text("mine.yaml", f"about: {tag}\n"), "tag")
      for tag in TAGS),
    Case("a tag directive", "model recipe",
         text("mine.yaml", "%TAG !p! tag:yaml.org,2002:python/\n---\nabout: !p!name:os.system\n"),
         "tag"),
    Case("lists nested without end", "model recipe",
         text("mine.yaml", "about: " + "[" * 60_000), "nested more than 32"),
    Case("mappings nested without end", "target recipe",
         text("mine.yaml", "".join(" " * i + "a:\n" for i in range(400))), "nested more than 32"),
    Case("a terabyte of recipe", "model recipe", sparse("mine.yaml", b"#", 1 << 40), "no recipe"),
    Case("a million keys", "model recipe",
         text("mine.yaml", "".join(f"k{i}: 1\n" for i in range(1_000_000))), "no recipe"),
    Case("a number of 5000 digits", "model recipe",
         text("mine.yaml", RECIPE + "config: {a: " + "9" * 5000 + "}\n"), "no number"),
    Case("a recipe that moves the cursor", "model recipe",
         text("mine.yaml", RECIPE + '"\\e[2J": 1\n'), r"unknown key '\x1b[2J'"),
    Case("characters that no YAML has", "model recipe", text("mine.yaml", "a: \x07\n"), "not YAML"),
    Case("two documents", "model recipe", text("mine.yaml", RECIPE + "---\n" + RECIPE), "YAML"),
]  # fmt: skip


# --- tokenizers ----------------------------------------------------------------------------------


def tokenizer_json(**changes: Any) -> str:
    base = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0},
                                                             "merges": []}}  # fmt: skip
    return json.dumps(base | changes)


def huge_ids(token: int) -> str:
    return tokenizer_json(model={"type": "BPE", "vocab": {"a": token}, "merges": []})


BAD_WORD = json.dumps({"added_tokens_decoder": {"0": {"content": "\ud800", "special": True}}})
WORLD = "rwkv_vocab_v20230424.txt"

DOUBLE = {"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
              "use_regex": False}  # fmt: skip
CHARSMAP = base64.b64encode(struct.pack("<I", 0) + b"x" * 100_000 + b"\0").decode()
AROUND = {"type": "TemplateProcessing", "pair": [], "single": [
    {"SpecialToken": {"id": "x", "type_id": 0}}] * 2000, "special_tokens": {
        "x": {"id": "x", "ids": [0] * 2000, "tokens": ["x"] * 2000}}}  # fmt: skip
# What makes a text longer, step by step, or tokens of nothing; each of a few kilobytes.
GROWING: dict[str, dict[str, Any]] = {
    "a normalizer that doubles": {"normalizer": {
        "type": "Sequence", "normalizers": [DOUBLE] * 40}},
    "normalizers in normalizers": {"normalizer": {"type": "Sequence", "normalizers": [
        {"type": "Sequence", "normalizers": [DOUBLE] * 10}] * 10}},
    "a normalizer of nothing": {"normalizer": {"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": {"Regex": ""}, "content": "xx"}] * 40}},
    "a normalizer of bytes": {"normalizer": {
        "type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 40}},
    "a long replacement": {"normalizer": {**DOUBLE, "content": "e" * 100_000}},
    "a long beginning": {"normalizer": {"type": "Prepend", "prepend": "e" * 100_000}},
    "a map to long texts": {"normalizer": {
        "type": "Precompiled", "precompiled_charsmap": CHARSMAP}},
    "pre-tokenizers of bytes": {"pre_tokenizer": {
        "type": "Sequence", "pretokenizers": [BYTE_LEVEL] * 40}},
    "a decoder that doubles": {"decoder": {"type": "Sequence", "decoders": [
        {**DOUBLE, "pattern": {"String": "a"}, "content": "aa"}] * 40}},
    "4 million tokens around a text": {"post_processor": AROUND},
    "an expression that goes back and back": {"pre_tokenizer": {
        "type": "Split", "pattern": {"Regex": "(.+.+)+~"}, "behavior": "Isolated",
        "invert": False}},
}  # fmt: skip

TOKENIZERS = [
    *(Case(name, "tokenizer.json", text("tokenizer.json", tokenizer_json(**each)),
           None if "back" in name else f"{next(iter(each))}: ")
      for name, each in GROWING.items()),
    Case("a configuration of 20 MB", "tokenizer.json",
         both(text("tokenizer.json", tokenizer_json()),
              sparse("tokenizer_config.json", b"{", 20 << 20)), "16777216"),
    Case("a configuration of lists alone", "tokenizer.json",
         both(text("tokenizer.json", tokenizer_json()),
              text("tokenizer_config.json", '{"x": [' + "[]," * (5 << 20) + "[]]}")), None),
    Case("tokenizer.json nested without end", "tokenizer.json",
         text("tokenizer.json", DEEP), "tokenizer.json"),
    Case("a token of id 2^32 - 1", "tokenizer.json",
         text("tokenizer.json", huge_ids(2**32 - 1)), None),
    Case("merges of words that are not there", "tokenizer.json",
         text("tokenizer.json", tokenizer_json(model={"type": "BPE", "vocab": {"a": 0},
                                                      "merges": ["a b"]})), "out of vocabulary"),
    Case("a regular expression that is none", "tokenizer.json",
         text("tokenizer.json", tokenizer_json(pre_tokenizer={
             "type": "Split", "pattern": {"Regex": "(" * 5000}, "behavior": "Isolated",
             "invert": False})), "tokenizer.json"),
    Case("a config of half a character", "rwkv vocabulary",
         both(text(WORLD, world_vocabulary()), text("tokenizer_config.json", BAD_WORD)),
         "added_tokens_decoder"),
    Case("a line that is a call", "rwkv vocabulary",
         text(WORLD, "1 __import__('os').system('touch owned') 1\n"), "expected an id"),
    Case("a line that is nested", "rwkv vocabulary",
         text(WORLD, "1 " + "(" * 50_000 + "'a'" + ")" * 50_000 + " 1\n"), "expected an id"),
    Case("a line that is a formatted string", "rwkv vocabulary",
         text(WORLD, "1 f'{open(\"owned\", \"w\")}' 1\n"), "expected an id"),
    Case("backslashes without end", "rwkv vocabulary",
         text(WORLD, "1 '" + "\\" * 1_000_001 + "' 1\n"), "expected an id"),
    Case("an id of a million digits", "rwkv vocabulary",
         text(WORLD, "9" * 1_000_000 + " 'a' 1\n"), "expected an id"),
    Case("a piece nested without end", "tokenizer.jsonl",
         text("tokenizer.jsonl", plamo_vocabulary().decode() + DEEP + "\n"), "tokenizer.jsonl:262"),
    Case("a score of 10^400", "tokenizer.jsonl",
         text("tokenizer.jsonl", plamo_vocabulary().decode() + '["x", 1' + "0" * 400 + "]\n"),
         "score"),
    Case("a piece of a megabyte", "tokenizer.jsonl",
         text("tokenizer.jsonl", plamo_vocabulary().decode() + json.dumps(["y" * 10**6, 0.5]) +
              "\n"), None),
    Case("a rank of 5000 digits", "tiktoken.model",
         text("tiktoken.model", ranks().decode() + "YWJj " + "9" * 5000 + "\n"), "its rank 258"),
    Case("special tokens of 5000 digits", "tiktoken.model",
         both(text("tiktoken.model", ranks()), text("tokenizer_config.json", json.dumps(
             {"added_tokens_decoder": {"9" * 5000: "x"}}))), "added_tokens_decoder"),
    Case("a tokenizer of a terabyte, as the manifest says", "bundle's tokenizer",
         bundle("tokenizer.json", sparse("tokenizer.json", b"{", 1 << 40), 1 << 40), "at most"),
    Case("a tokenizer that is a pipe", "bundle's tokenizer",
         bundle("tokenizer.json", lambda root: os.mkfifo(root / "tokenizer.json"), 0, b""),
         "tokenizer.json"),
    Case("a tokenizer that is an endless device", "bundle's tokenizer",
         bundle("tokenizer.json", link("tokenizer.json", "/dev/zero"), 5), "tokenizer.json"),
]  # fmt: skip


# --- chat templates ------------------------------------------------------------------------------

LOOPS = "".join(f"{{% for {c} in s %}}" for c in "abcdefgh")
DOUBLED = (
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = #n.x# %}{% endfor %}done"
)
BRANCHES = (
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}"
)
ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('touch owned') }}",
    "{{ self._TemplateReference__context }}{{ joiner.__init__.__globals__ }}",
    "{{ ('%s' | attr('__class__')).mro() }}",
    "{{ '{0.__class__.__mro__}'.format(1) }}",
    "{{ raise_exception.__globals__ }}{{ strftime_now.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ ('x' | map(attribute='__class__') | list)[0].mro() }}",
)
TOO_MUCH = {
    "text doubled by +": DOUBLED.replace("#n.x#", "n.x + n.x"),
    "text doubled by ~": DOUBLED.replace("#n.x#", "n.x ~ n.x"),
    "text doubled by join": DOUBLED.replace("#n.x#", "[n.x, n.x] | join"),
    "text doubled by a call": DOUBLED.replace("#n.x#", "n.x.replace('b', 'bb')"),
    "text doubled by a filter": DOUBLED.replace("#n.x#", "n.x | replace('a', 'aab')"),
    "text doubled by format": DOUBLED.replace("#n.x#", "'{0}{0}'.format(n.x)"),
    "text doubled by %": DOUBLED.replace("#n.x#", "'%s%s' % (n.x, n.x)"),
    "text doubled by the filter format": DOUBLED.replace("#n.x#", "'%s%s' | format(n.x, n.x)"),
    "lists doubled": DOUBLED.replace("'ab'", "[0, 1]").replace("#n.x#", "n.x + n.x"),
    "lists in lists": DOUBLED.replace("#n.x#", "[n.x, n.x]").replace("done", "{{ n.x }}"),
    "a block set twice": DOUBLED.replace("{% set n.x = #n.x# %}",
                                         "{% set y %}{{ n.x }}{{ n.x }}{% endset %}"
                                         "{% set n.x = y %}"),
    "loops in loops": "{% set s = 'x' * 1000 %}" + LOOPS + "{% endfor %}" * 8,
    "a macro that calls itself twice": BRANCHES,
    "center": "{{ 'x'.center(10000000000) }}",
    "the filter center": "{{ 'x' | center(10000000000) }}",
    "a wide format": "{{ '{:>10000000000}'.format(1) }}",
    "the filter format": "{{ '%10000000000d' | format(1) }}",
    "zeros": "{{ '1'.zfill(10000000000) }}",
    "tabs": "{{ '\t'.expandtabs(10000000000) }}",
    "an indent": "{{ ('x\n' * 1000) | indent(100000000) }}",
    "json of an indent": "{{ messages | tojson(indent=1000000000) }}",
    "batches": "{{ [1] | batch(1000000000, 0) | list }}",
    "slices": "{{ [1] | slice(1000000000) | list }}",
    "a large power": "{{ 10 ** 1000 ** 2 }}",
    "a product of large numbers": "{% set n = namespace(x=999) %}{% for i in range(60) %}"
                                  "{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
    "a shift": "{{ (1).__lshift__(10000000000) }}",
    "sums of lists": "{{ ([[0] * 1000000] * 8) | sum(start=[]) | length }}",
    "translate": "{{ ('x' * 1000000).translate({120: 'y' * 1000000}) }}",
    "joined by much": "{{ ('y' * 1000000).join(['x'] * 1000000) }}",
    "wrapped by much": "{{ ('x ' * 100000) | wordwrap(1, true, 'y' * 1000000) }}",
    "replaced by much": "{{ ('x' * 1000000).replace('x', 'y' * 1000000) }}",
}  # fmt: skip

TEMPLATES = [
    *(Case(f"escape {i}", "chat template", text("chat_template.jinja", each), None)
      for i, each in enumerate(ESCAPES)),
    *(Case(name, "chat template", text("chat_template.jinja", each), "chat template refused")
      for name, each in TOO_MUCH.items()),
    Case("an include", "chat template",
         text("chat_template.jinja", "{% include '/etc/passwd' %}"), "no loader"),
    Case("an import", "chat template",
         text("chat_template.jinja", "{% import 'os' as os %}"), "no loader"),
    Case("blocks nested without end", "chat template",
         text("chat_template.jinja", "{% if x %}" * 5000), "chat template"),
    Case("brackets nested without end", "chat template",
         text("chat_template.jinja", "{{ " + "(" * 50_000 + " }}"), "chat template"),
    Case("operators without end", "chat template",
         text("chat_template.jinja", "{{ " + "-" * 50_000 + "1 }}"), "chat template"),
]  # fmt: skip
