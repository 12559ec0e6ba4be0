"""Hostile checkpoints, GGUF files, .pth files and parameter archives: what each must end in."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pth_files
from attack_case import DEEP, OUTSIDE, Case, both, link, sparse, text

# --- checkpoints -------------------------------------------------------------------------------

CONFIG = text("config.json", '{"model_type": "mamba2"}')


def safetensors(header: Any, body: bytes = b"", lie: int = 0) -> Callable[[Path], object]:
    """model.safetensors with any header, beside a config."""
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    return both(CONFIG, text("model.safetensors", struct.pack("<Q", len(data) + lie) + data + body))


def entry(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


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
    Case("layers that are lists", "config", text("config.json", json.dumps(
        {"model_type": "nemotron_h", "layers_block_type": [["mamba"], {}]})), "layers_block_type"),
    Case("a config of 100 MB", "config", sparse("config.json", b"{", 100 << 20), "16777216 bytes"),
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
