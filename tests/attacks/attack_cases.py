"""Hostile files, one by one: what each is, who reads it, and what the user must see.

A case of `said` None may be read as well as refused: it is there for what must not happen besides.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pth_files
from attack_corpus import plamo_vocabulary, ranks, world_vocabulary
from attack_parsers import MANIFEST

from runtime import manifest
from runtime.manifest import FileRef

DEEP = "[" * 100_000 + "]" * 100_000
OUTSIDE = "../outside"  # a directory beside that of the case, which no parser may look into


@dataclass(frozen=True)
class Case:
    """`make` writes the files into an empty directory; the message must hold `said`."""

    name: str
    parser: str
    make: Callable[[Path], object]
    said: str | None


def text(name: str, content: str | bytes) -> Callable[[Path], object]:
    """A maker of one file."""
    data = content.encode(errors="surrogatepass") if isinstance(content, str) else content
    return lambda root: (root / name).write_bytes(data)


def sparse(name: str, head: bytes, size: int) -> Callable[[Path], object]:
    """A maker of a file of `size` bytes, most of which take no place on the disk."""

    def make(root: Path) -> None:
        (root / name).write_bytes(head)
        os.truncate(root / name, size)

    return make


def both(*makers: Callable[[Path], object]) -> Callable[[Path], object]:
    """A maker of several files."""
    return lambda root: [make(root) for make in makers]


# --- checkpoints -------------------------------------------------------------------------------

CONFIG = text("config.json", '{"model_type": "mamba2"}')


def safetensors(header: Any, body: bytes = b"", lie: int = 0) -> Callable[[Path], object]:
    """model.safetensors with any header, beside a config."""
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    return both(CONFIG, text("model.safetensors", struct.pack("<Q", len(data) + lie) + data + body))


def entry(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def link(name: str, to: str) -> Callable[[Path], object]:
    return lambda root: (root / name).symlink_to(to)


def index(weight_map: Any) -> Callable[[Path], object]:
    content = json.dumps({"weight_map": weight_map})
    return both(CONFIG, text("model.safetensors.index.json", content))


def deep(value: str, depth: int = 940) -> str:
    """`value` in lists, about as deep as Python's reader of JSON goes."""
    return "[" * depth + value + "]" * depth


CHECKPOINTS = [
    Case("a header longer than the file", "checkpoint", safetensors({}, lie=1 << 30), "header"),
    Case("a header of 2^64 - 1", "checkpoint",
         both(CONFIG, text("model.safetensors", b"\xff" * 64)), "header length"),
    Case("a terabyte of nothing", "checkpoint",
         both(CONFIG, sparse("model.safetensors", struct.pack("<Q", 2) + b"{}", 1 << 40)),
         "cannot be mapped"),
    Case("a tensor of 2^93 elements", "checkpoint",
         safetensors({"a": entry("F32", [2**31, 2**31, 2**31], [0, 4])}, b"1234"), "no machine"),
    Case("sizes whose product wraps to 4", "checkpoint",
         safetensors({"a": entry("U8", [2**62, 4, 1], [0, 4])}, b"1234"), "shape"),
    Case("a dtype nested to the limit", "checkpoint",
         safetensors(('{"a": {"dtype": ' + deep("1") + ', "shape": [4], "data_offsets": [0, 4]}}')
                     .encode(), b"1234"), "tensor 'a': dtype"),
    Case("a header nested beyond it", "checkpoint",
         safetensors(b'{"a": ' + DEEP.encode() + b"}"), "model.safetensors: header"),
    Case("a dtype of a megabyte", "checkpoint",
         safetensors({"a": entry("F" * 1_000_000)}, b"1234"), "dtype: found 'FFF"),
    Case("a name that moves the cursor", "checkpoint",
         safetensors({"\x1b[2J\x1b]0;owned\x07": entry("F8")}, b"1234"), r"\x1b[2J"),
    Case("an integer of 5000 digits", "checkpoint",
         safetensors(b'{"a": {"dtype": "U8", "shape": [' + b"9" * 5000 + b"]}}"), "digits"),
    Case("weights that are a link outside", "checkpoint",
         both(CONFIG, link("model.safetensors", f"{OUTSIDE}/secret")), "link out"),
    Case("a config that is a link to an endless device", "config",
         link("config.json", "/dev/zero"), "not a regular file"),
    Case("a config that is a pipe", "config",
         lambda root: os.mkfifo(root / "config.json"), "not a regular file"),
    Case("an index that climbs", "checkpoint", index({"a": f"{OUTSIDE}/secret"}), OUTSIDE),
    Case("an index with a NUL", "checkpoint", index({"a": "a\0.safetensors"}), "weight_map"),
    Case("an index with an absolute name", "checkpoint",
         index({"a": "/proc/self/mem.safetensors"}), "/proc/self/mem"),
    Case("an index of 200,000 shards", "checkpoint",
         index({str(i): f"{i}.safetensors" for i in range(200_000)}), "0.safetensors"),
    Case("a config of a million layers", "config",
         text("config.json", json.dumps({"model_type": "mamba2", "num_hidden_layers": 10**6})),
         "num_hidden_layers = 1000000, expected 1000 at most"),
    Case("a config that names a module", "config",
         text("config.json", json.dumps({"model_type": "../../os", "auto_map": {"x": "y.py"}})),
         "model_type"),
    Case("a config that names a private module", "config",
         text("config.json", '{"model_type": "__init__"}'), "model_type"),
    Case("a config nested without end", "config",
         text("config.json", '{"model_type": ' + DEEP + "}"), "config.json"),
    Case("a config of 100 MB", "config", sparse("config.json", b"{", 100 << 20), "67108864 bytes"),
]  # fmt: skip


# --- GGUF ----------------------------------------------------------------------------------------


def key(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


def words(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def gguf(*keys: bytes, tensors: int = 0, rest: bytes = b"", count: int | None = None):
    """A file of `keys` that says it has `count` of them, and what is behind them."""
    number = len(keys) if count is None else count
    head = b"GGUF" + struct.pack("<IQQ", 3, tensors, number)
    return text("model.gguf", head + b"".join(keys) + rest)


def described(name: str, sizes: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    body = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return words(name) + body + struct.pack("<IQ", kind, offset)


ARCH = key("general.architecture", 8, words("nemotron_h_moe"))


def many_experts(root: Path) -> None:
    """Numbers of layers and experts that no file of 200 KB can hold."""
    source = Path(__file__).resolve().parents[1] / "data/gguf/qwen3_next-plain.gguf"
    data = source.read_bytes()
    for name, number in ((b"qwen3next.expert_count", 2**31 - 1),):
        at = data.index(name) + len(name)
        assert data[at : at + 4] == struct.pack("<I", 4)
        data = data[: at + 4] + struct.pack("<I", number) + data[at + 8 :]
    (root / "model.gguf").write_bytes(data)


GGUFS = [
    Case("2^63 keys", "gguf", gguf(ARCH, count=2**63), "cannot hold"),
    Case("2^40 tensors", "gguf", gguf(ARCH, tensors=2**40), "cannot hold"),
    Case("an array of 2^62 numbers", "gguf",
         gguf(key("a", 9, struct.pack("<IQ", 4, 2**62))), "elements"),
    Case("an array of 4 million strings in 40 bytes", "gguf",
         gguf(key("a", 9, struct.pack("<IQ", 8, 1 << 22) + b"\0" * 40)), "too few"),
    Case("a string of 2^64 - 1", "gguf", gguf(key("a", 8, b"\xff" * 8)), "too few"),
    Case("arrays in arrays", "gguf",
         gguf(key("a", 9, struct.pack("<IQ", 9, 1 << 20) * 1000)), "array of type 9"),
    Case("a tensor larger than the file", "gguf",
         gguf(ARCH, tensors=1, rest=described("t", (2**31, 2**31))), "cannot hold"),
    Case("a tensor whose size wraps", "gguf",
         gguf(ARCH, tensors=1, rest=described("t", (2**32, 2**32, 1, 1))), "cannot hold"),
    Case("a tensor that lies beyond the file", "gguf",
         gguf(ARCH, tensors=1, rest=described("t", (8,), offset=2**60)), "begins at byte"),
    Case("an alignment of 2^31", "gguf",
         gguf(key("general.alignment", 4, struct.pack("<I", 1 << 31)), tensors=1,
              rest=described("t", (8,))), "truncated"),
    Case("two thousand million experts", "gguf", many_experts, "524288 matrices"),
    Case("a name that moves the cursor in GGUF", "gguf",
         gguf(ARCH, tensors=1, rest=described("\x1b[2J", (8,), kind=99)), r"\x1b[2J"),
    Case("a split file that counts 99999 parts", "gguf",
         both(gguf(ARCH, key("split.count", 2, b"\xff\xff"))), "split.no and split.count"),
    Case("a chat template that is no text", "gguf tokenizer",
         gguf(key("tokenizer.chat_template", 4, b"\0" * 4)), None),
    Case("tokens that are numbers", "gguf tokenizer",
         gguf(ARCH, key("tokenizer.ggml.model", 8, words("gpt2")),
              key("tokenizer.ggml.tokens", 9, struct.pack("<IQI", 4, 1, 7))), "tokens"),
]  # fmt: skip


# --- .pth and .irpa ------------------------------------------------------------------------------


def pickle(data: bytes) -> Callable[[Path], object]:
    return lambda root: pth_files.archive(root / "model.pth", data, {"0": b"\0" * 64})


def calls(module: str, name: str, argument: str) -> bytes:
    """A pickle that runs a function when it is loaded."""
    return b"\x80\x02" + f"c{module}\n{name}\n(X".encode() + struct.pack("<I", len(argument)) + (
        argument.encode() + b"tR.")  # fmt: skip


def short_storage(root: Path) -> None:
    """A tensor of 1000 numbers; the directory says they are there, the archive ends after 16."""
    storage = pth_files.storage(b"FloatStorage", "0", 1000)
    made = pth_files.pickled({"a": pth_files.rebuilt(storage, (1000,))})
    path = pth_files.archive(root / "model.pth", made, {"0": b"\x11" * 16})
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        names = [info.filename for info in archive.infolist()]
    at = data.index(b"PK\x01\x02")
    while data[at + 46 : at + 46 + len("model/data/0")] != b"model/data/0":
        at = data.index(b"PK\x01\x02", at + 4)
    assert "model/data/0" in names
    struct.pack_into("<I", data, at + 24, 4000)  # file size, not that of what is stored
    path.write_bytes(data)


def uneven_storage(root: Path) -> None:
    """A storage of floats of 17 bytes."""
    storage = pth_files.storage(b"FloatStorage", "0", 4)
    made = pth_files.pickled({"a": pth_files.rebuilt(storage, (4,))})
    pth_files.archive(root / "model.pth", made, {"0": b"\x11" * 17})


def irpa_of(count: int, name_length: int, size: int) -> bytes:
    """An archive of `count` entries, all named by the same `name_length` bytes."""
    stride, entries_at = 80, 96
    data = bytearray(size) + b"a" * name_length
    struct.pack_into("<4sHHQQQ", data, 0, b"IRPA", 0, 0, 88, 0, 0)
    struct.pack_into("<QQQQQQQ", data, 32, count, entries_at, 0, 0, 0, 0, 0)
    for i in range((size - entries_at) // stride):
        struct.pack_into("<QIQQQQQQQQ", data, entries_at + i * stride,
                         76, 2, 0, size, name_length, 0, 0, 64, 0, 0)  # fmt: skip
    return bytes(data)


PTHS = [
    Case("a pickle that runs a command", "pth", pickle(calls("os", "system", "touch owned")),
         "os.system"),
    Case("a pickle that imports by a name on the stack", "pth",
         pickle(b"\x80\x04\x8c\x08builtins\x8c\x04exec\x93\x8c\x011\x85R."), "builtins.exec"),
    Case("a pickle of ten million dicts", "pth", pickle(b"\x80\x02" + b"}" * 10_000_000 + b"."),
         "1048576 instructions"),
    Case("tuples that double thirty times", "pth",
         pickle(b"\x80\x02N" + b"q\0h\0\x86" * 30 + b"."), "expected tensors"),
    Case("a string of 2 GB", "pth", pickle(b"\x80\x02X" + b"\xff\xff\xff\x7f" + b"."), "damaged"),
    Case("less in the archive than it says", "pth", short_storage, "16 bytes, expected 4000"),
    Case("half a number", "pth", uneven_storage, None),
    Case("a storage that climbs", "pth",
         pickle(pth_files.pickled({"a": pth_files.rebuilt(
             pth_files.storage(b"FloatStorage", "../../x", 4), (4,))})), "refers to the storage"),
    Case("a tensor of 2^47 numbers by strides of 0", "pth",
         pickle(pth_files.pickled({"a": pth_files.rebuilt(
             pth_files.storage(b"FloatStorage", "0", 4), (2**30, 2**17), 0, (0, 0))})), "shape"),
    Case("no RWKV, and a directory to write", "pth of RWKV-7",
         pickle(pth_files.pickled({})), "RWKV"),
    Case("names that are the whole file again and again", "irpa",
         text("params.irpa", irpa_of(2**63, 1 << 20, 2 << 20)), "names of"),
    Case("2^63 entries", "irpa", text("params.irpa", irpa_of(2**63, 3, 4096)), "not an IREE"),
]  # fmt: skip


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

TOKENIZERS = [
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


def cases() -> Iterator[Case]:
    """Every recorded attack on files."""
    yield from (*CHECKPOINTS, *GGUFS, *PTHS, *JSONS, *RECIPES, *TOKENIZERS, *TEMPLATES)
