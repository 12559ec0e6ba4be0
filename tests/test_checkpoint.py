"""Checkpoints: the library's own files read back bit for bit, and every hostile file is refused."""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from emit.checkpoint import open_checkpoint, read_config
from emit.errors import EmitError

INDEX = "model.safetensors.index.json"
TWO = {
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "b": {"dtype": "I8", "shape": [3], "data_offsets": [8, 11]},
}


def pack(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file; `header` is JSON data or raw bytes, `length` is what it claims."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def checkpoint(directory: Path, **files: bytes | dict[str, Any]) -> Path:
    """A checkpoint directory; `a__b` in a keyword is the file name `a.b`."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in {"config__json": {"model_type": "mamba2"}, **files}.items():
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        (directory / name.replace("__", ".")).write_bytes(raw)
    return directory


def sharded(directory: Path, weight_map: dict[str, Any], shards: dict[str, bytes]) -> Path:
    checkpoint(directory)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for name, raw in shards.items():
        (directory / name).write_bytes(raw)
    return directory


def refused(directory: Path, *words: str) -> str:
    """Opening fails with one printable line that holds every one of `words`."""
    with pytest.raises(EmitError) as caught:
        open_checkpoint(directory)
    line = str(caught.value)
    assert "\n" not in line and line.isprintable()
    assert len(line) < 1000
    for word in words:
        assert word in line, line
    return line


def library_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "f32": rng.standard_normal((3, 5)).astype(np.float32),
        "f16": rng.standard_normal((2, 3, 4)).astype(np.float16),
        "bf16": rng.standard_normal((7,)).astype(ml_dtypes.bfloat16),
        "f8": rng.standard_normal((5,)).astype(ml_dtypes.float8_e4m3fn),
        "i8": rng.integers(-128, 128, (3,), dtype=np.int8),
        "i64": rng.integers(-9, 9, (2, 2)),
        "mask": np.array([True, False, True]),
        "scalar": np.array(2.5, dtype=np.float32),
        "empty": np.zeros((0, 4), dtype=np.float32),
        "empty.bf16": np.zeros((3, 0), dtype=ml_dtypes.bfloat16),
    }


def same_bits(got: np.ndarray, want: np.ndarray) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    assert got.tobytes() == want.tobytes()


# --- reading what the library writes ---------------------------------------------------------


def test_single_file_reads_back_bit_for_bit(tmp_path: Path) -> None:
    tensors = library_tensors()
    safetensors.numpy.save_file(tensors, checkpoint(tmp_path) / "model.safetensors")
    opened = open_checkpoint(tmp_path)
    assert list(opened.tensors) == sorted(tensors)
    for name, want in tensors.items():
        same_bits(opened.read(name), want)
    assert opened.tensors["bf16"].dtype == "bf16" and opened.tensors["f8"].dtype == "f8_e4m3"
    info = opened.tensors["f16"]
    assert info.file.read_bytes()[info.begin : info.end] == tensors["f16"].tobytes()


def test_shards_read_back_bit_for_bit(tmp_path: Path) -> None:
    tensors = library_tensors()
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(tensors)}
    sharded(tmp_path, files, {})
    for file in set(files.values()):
        part = {name: tensors[name] for name in tensors if files[name] == file}
        safetensors.numpy.save_file(part, tmp_path / file)
    opened = open_checkpoint(tmp_path)
    assert list(opened.tensors) == sorted(tensors)
    for name, want in tensors.items():
        same_bits(opened.read(name), want)
        assert opened.tensors[name].file.name == files[name]


def test_torch_layout_reads_back(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    save_file = pytest.importorskip("safetensors.torch").save_file
    weights = {"w": torch.arange(12, dtype=torch.float32).reshape(3, 4).to(torch.bfloat16)}
    save_file(weights, checkpoint(tmp_path) / "model.safetensors", metadata={"format": "pt"})
    got = open_checkpoint(tmp_path).read("w")
    assert got.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(
        got.astype(np.float32), np.arange(12, dtype=np.float32).reshape(3, 4)
    )


def test_tensors_are_views_of_the_file_and_read_only(tmp_path: Path) -> None:
    big = np.arange(1 << 20, dtype=np.float32)
    safetensors.numpy.save_file({"w": big}, checkpoint(tmp_path) / "model.safetensors")
    got = open_checkpoint(tmp_path).read("w")
    assert not got.flags.owndata and not got.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        got[0] = 1
    with (tmp_path / "model.safetensors").open("r+b") as file:  # a view sees the file change
        file.seek(-4, os.SEEK_END)
        file.write(struct.pack("<f", -7.0))
    assert got[-1] == -7.0 and got[-2] == big[-2]


def test_unknown_tensor_is_named(tmp_path: Path) -> None:
    checkpoint(tmp_path, model__safetensors=pack(TWO, bytes(11)))
    with pytest.raises(EmitError, match=r"no tensor 'c'; the checkpoint holds 'a', 'b'"):
        open_checkpoint(tmp_path).read("c")


@pytest.mark.parametrize(
    ("words", "own"),
    [(["F32", "I8"], "f32"), (["BF16", "BF16"], "bf16"), (["F16", "BF16"], "f32"), (["I8"], "f32")],
)
def test_own_dtype(tmp_path: Path, words: list[str], own: str) -> None:
    header = {
        f"t{i}": {"dtype": word, "shape": [0], "data_offsets": [0, 0]}
        for i, word in enumerate(words)
    }
    assert open_checkpoint(checkpoint(tmp_path, model__safetensors=pack(header))).own_dtype == own


def test_config_spellings_and_generation_config(tmp_path: Path) -> None:
    text = b'{"a": Infinity, "b": {"__float__": "-Infinity"}, "c": [{"__float__": "NaN"}], "d": {}}'
    checkpoint(tmp_path, config__json=text, model__safetensors=pack(TWO, bytes(11)))
    opened = open_checkpoint(tmp_path)
    assert opened.config["a"] == math.inf and opened.config["b"] == -math.inf
    assert math.isnan(opened.config["c"][0]) and opened.config["d"] == {}
    assert opened.generation_config is None
    checkpoint(tmp_path, config__json=text, generation_config__json={"eos_token_id": [0, 2]})
    assert open_checkpoint(tmp_path).generation_config == {"eos_token_id": [0, 2]}
    assert read_config(tmp_path)["b"] == -math.inf


def test_padded_header_and_metadata_are_fine(tmp_path: Path) -> None:
    raw = json.dumps({"__metadata__": {"format": "pt"}, **TWO}).encode() + b"     "
    checkpoint(tmp_path, model__safetensors=pack(raw, bytes(11)))
    assert list(open_checkpoint(tmp_path).tensors) == ["a", "b"]


def test_single_file_wins_over_an_index_that_does_not_name_it(tmp_path: Path) -> None:
    sharded(tmp_path, {"z": "x.safetensors"}, {"model.safetensors": pack(TWO, bytes(11))})
    assert list(open_checkpoint(tmp_path).tensors) == ["a", "b"]
    extra = pack({"z": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"\x07")
    both = {"a": "model.safetensors", "b": "model.safetensors", "z": "x.safetensors"}
    sharded(tmp_path, both, {"x.safetensors": extra})
    assert list(open_checkpoint(tmp_path).tensors) == ["a", "b", "z"]


def test_consolidated_copy_beside_shards_is_not_read(tmp_path: Path) -> None:
    sharded(
        tmp_path,
        dict.fromkeys(TWO, "model-1.safetensors"),
        {"model-1.safetensors": pack(TWO, bytes(11)), "consolidated.safetensors": b"not weights"},
    )
    assert list(open_checkpoint(tmp_path).tensors) == ["a", "b"]


# --- one hostile file ------------------------------------------------------------------------


def entry(**change: Any) -> dict[str, Any]:
    return {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **change}}


def deep(levels: int) -> bytes:
    return b'{"t":' + b"[" * levels + b"]" * levels + b"}"


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "truncated: 0 bytes"),
    "seven bytes": (b"\0" * 7, "truncated: 7 bytes"),
    "length past the end": (pack({}, length=3), "header length: found 3, but only 2"),
    "length of 2^63": (pack({}, length=2**63), "expected at most 100000000"),
    "length of 2^64-1": (pack({}, length=2**64 - 1), "expected at most 100000000"),
    "length over the limit": (pack({}, length=100_000_001), "expected at most 100000000"),
    "length at the limit": (pack({}, length=100_000_000), "but only 2 bytes follow"),
    "length too short": (pack(TWO, bytes(11), length=20), "header: not a JSON object"),
    "length 0": (pack(TWO, bytes(11), length=0), "header: expected a JSON object"),
    "length into the data": (pack(TWO, bytes(11), length=len(json.dumps(TWO)) + 4), "header"),
    "an array": (pack([]), "header: expected a JSON object"),
    "leading space": (pack(b" {}"), "header: expected a JSON object"),
    "byte-order mark": (pack(b"\xef\xbb\xbf{}"), "header: expected a JSON object"),
    "utf-16": (pack("{}".encode("utf-16-le")), "header: not a JSON object"),
    "invalid utf-8": (pack(b'{"\xff": 1}'), "header: not a JSON object"),
    "trailing bytes": (pack(b"{}x"), "header: not a JSON object"),
    "deep nesting": (pack(deep(200_000)), "header: not a JSON object"),
    "huge integer": (
        pack(b'{"t":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,1]}}'),
        "header: not a JSON object",
    ),
    "duplicate tensor": (
        pack(b'{"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
             b'"t":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}}', b"\0"),
        "repeated key 't'",
    ),
    "duplicate field": (
        pack(b'{"t":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', b"\0"),
        "repeated key 'dtype'",
    ),
    "NaN": (pack(b'{"t":NaN}'), "NaN is not JSON"),
    "metadata of numbers": (pack({"__metadata__": {"a": 1}}), "__metadata__"),
    "entry is a list": (pack({"t": []}), "tensor 't': expected exactly"),
    "missing field": (pack({"t": {"dtype": "U8", "shape": [1]}}), "tensor 't': expected exactly"),
    "extra field": (pack(entry(stride=[1]), bytes(8)), "tensor 't': expected exactly"),
    "unknown dtype": (pack(entry(dtype="F31"), bytes(8)), "dtype: found 'F31', expected one of"),
    "lower-case dtype": (pack(entry(dtype="f32"), bytes(8)), "dtype: found 'f32'"),
    "dtype is a number": (pack(entry(dtype=3), bytes(8)), "dtype: found 3"),
    "dtype is a list": (pack(entry(dtype=["F32"]), bytes(8)), "dtype: found ['F32']"),
    "shape is a number": (pack(entry(shape=2), bytes(8)), "shape: found 2"),
    "negative sizes": (pack(entry(shape=[-1, -2]), bytes(8)), "shape: found [-1, -2]"),
    "float size": (pack(entry(shape=[2.0]), bytes(8)), "shape: found [2.0]"),
    "true as size": (pack(entry(shape=[True, 2]), bytes(8)), "shape: found [True, 2]"),
    "rank 33": (pack(entry(shape=[1] * 32 + [2]), bytes(8)), "at most 32 sizes"),
    "product wraps": (pack(entry(shape=[2**62, 4, 2]), bytes(8)), "no machine can address"),
    "empty but huge": (
        pack(entry(shape=[0, 2**40, 2**40], data_offsets=[0, 0])), "no machine can address",
    ),
    "shape too big": (pack(entry(shape=[3]), bytes(8)), "span 8 bytes, but F32 [3] needs 12"),
    "shape too small": (pack(entry(shape=[1]), bytes(8)), "span 8 bytes, but F32 [1] needs 4"),
    "offsets reversed": (pack(entry(data_offsets=[8, 0]), bytes(8)), "data_offsets: found [8, 0]"),
    "negative offsets": (pack(entry(data_offsets=[-8, 0]), bytes(8)), "data_offsets: found [-8"),
    "three offsets": (pack(entry(data_offsets=[0, 8, 9]), bytes(8)), "data_offsets: found"),
    "offsets of text": (pack(entry(data_offsets=["0", "8"]), bytes(8)), "data_offsets: found"),
    "offset past 2^63": (pack(entry(data_offsets=[2**64, 2**64 + 8]), bytes(8)), "data_offsets"),
    "truncated data": (pack(entry(), bytes(7)), "truncated:"),
    "no data": (pack(entry()), "truncated:"),
    "bytes after the end": (pack(entry(), bytes(9)), "1 bytes after tensor 't'"),
    "only data": (pack({}, bytes(4)), "4 bytes after the header"),
    "gap at the start": (
        pack(entry(data_offsets=[4, 12]), bytes(12)), "leaves a gap after the header",
    ),
    "gap between": (
        pack({**TWO, "b": {**TWO["b"], "data_offsets": [9, 12]}}, bytes(12)),
        "tensor 'b': begins at byte",
    ),
    "overlap": (
        pack({**TWO, "b": {**TWO["b"], "data_offsets": [7, 10]}}, bytes(10)),
        "it overlaps tensor 'a'",
    ),
    "same bytes twice": (
        pack({"x": entry()["t"], "y": entry()["t"]}, bytes(8)), "it overlaps tensor 'x'",
    ),
    "hidden inside": (
        pack({**entry(), "u": {"dtype": "U8", "shape": [0], "data_offsets": [4, 4]}}, bytes(8)),
        "it overlaps",
    ),
    "control characters in a name": (
        pack({"a\n\x1b[31m\ud800": {"dtype": "?", "shape": [], "data_offsets": [0, 0]}}),
        r"tensor 'a\n\x1b[31m\ud800'",
    ),
    "long name": (pack({"n" * 100_000: 3}), "nnn…"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_refused(tmp_path: Path, case: str) -> None:
    raw, words = HOSTILE[case]
    line = refused(checkpoint(tmp_path, model__safetensors=raw), words)
    assert str(tmp_path / "model.safetensors") in line


def test_the_cases_start_from_a_file_that_opens(tmp_path: Path) -> None:
    """What the hostile cases change is the reason for their refusal."""
    for number, raw in enumerate([pack(TWO, bytes(11)), pack(entry(), bytes(8)), pack({})]):
        open_checkpoint(checkpoint(tmp_path / str(number), model__safetensors=raw))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_change_of_the_header_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Changed or cut files raise EmitError only, or open with tensors that lie inside the file."""
    raw = bytearray(pack(TWO, bytes(range(11))))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 12))] = data.draw(st.integers(0, 255))
    raw = raw[: len(raw) - data.draw(st.sampled_from([0, 0, 0, 1, 11, 40]))]
    directory = tmp_path_factory.getbasetemp() / "fuzz"
    checkpoint(directory, model__safetensors=bytes(raw))
    try:
        opened = open_checkpoint(directory)
    except EmitError as error:
        assert "\n" not in str(error)
        return
    covered = 0
    for name, info in opened.tensors.items():
        covered += opened.read(name).nbytes
        assert info.end <= len(raw)
    assert covered == 11


# --- the directory ---------------------------------------------------------------------------

TRICKS = [
    "../evil.safetensors", "/etc/evil.safetensors", "sub/evil.safetensors", "..\\evil.safetensors",
    "C:evil.safetensors", ".hidden.safetensors", "evil.safetensors/", "evil.bin", "", "..",
    "a\0.safetensors", "a\n.safetensors", 7, None, ["model.safetensors"], {"__float__": "NaN"},
]  # fmt: skip


@pytest.mark.parametrize("name", TRICKS, ids=repr)
def test_index_names_only_plain_files(tmp_path: Path, name: object) -> None:
    for place in (tmp_path / "evil.safetensors", tmp_path / "c" / "sub" / "evil.safetensors"):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(pack(TWO, bytes(11)))
    sharded(tmp_path / "c", dict.fromkeys(TWO, name), {})
    refused(tmp_path / "c", INDEX, "weight_map['a']", "expected the plain name")


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    one, two = "model-1.safetensors", "model-2.safetensors"
    other = pack({"c": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"\0")
    shards = {one: pack(TWO, bytes(11)), two: other}
    good = {"a": one, "b": one, "c": two}
    assert list(open_checkpoint(sharded(tmp_path / "0", good, shards)).tensors) == ["a", "b", "c"]
    wrong: list[tuple[dict[str, str], str]] = [
        ({**good, "d": two}, f"lists 'd' in {two}, which does not hold them"),
        ({"a": one, "c": two}, f"does not list 'b', which {one} holds"),
        ({**good, "a": two}, f"does not list 'a', which {one} holds"),
    ]
    for number, (weight_map, words) in enumerate(wrong, 1):
        refused(sharded(tmp_path / str(number), weight_map, shards), INDEX, words)
    (tmp_path / "0" / two).unlink()
    refused(tmp_path / "0", f"{two}: no such file")


def test_one_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    one, two = "model-1.safetensors", "model-2.safetensors"
    raw = pack({"a": TWO["a"]}, bytes(8))
    both = b'{"weight_map": {"a": "%s", "b": "%s"}}' % (one.encode(), two.encode())
    sharded(tmp_path, {}, {one: raw, two: pack(TWO, bytes(11)), INDEX: both})
    refused(tmp_path, f"{two}: holds 'a', which {one} holds too")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"[]", "expected a JSON object, found list"),
        (b"{}", "weight_map: expected an object"),
        (b'{"weight_map": {}}', "weight_map: expected an object"),
        (b'{"weight_map": ["model.safetensors"]}', "weight_map: expected an object"),
        (b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "repeated key 'a'"),
        (b"{", "not a JSON object"),
    ],
)
def test_bad_index_is_refused(tmp_path: Path, raw: bytes, words: str) -> None:
    checkpoint(tmp_path)
    (tmp_path / INDEX).write_bytes(raw)
    refused(tmp_path, INDEX, words)


def test_links_out_of_the_directory_are_refused(tmp_path: Path) -> None:
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes(pack(TWO, bytes(11)))
    inside = checkpoint(tmp_path / "c")
    (inside / "model.safetensors").symlink_to(outside)
    refused(inside, "model.safetensors: is a link out of the checkpoint directory")
    (inside / "model.safetensors").unlink()
    (inside / "real.safetensors").write_bytes(outside.read_bytes())
    (inside / "model.safetensors").symlink_to("real.safetensors")
    assert list(open_checkpoint(inside).tensors) == ["a", "b"]
    (tmp_path / "alias").symlink_to(inside)
    assert list(open_checkpoint(tmp_path / "alias").tensors) == ["a", "b"]


def test_hub_cache_layout_opens_and_other_blobs_do_not(tmp_path: Path) -> None:
    def snapshot(repo: Path, target: Callable[[Path], Path]) -> Path:
        for folder in (repo / "blobs" / "deep", repo / "snapshots" / "c0"):
            folder.mkdir(parents=True)
        for name, raw in {"config.json": b"{}", "model.safetensors": pack(TWO, bytes(11))}.items():
            place = target(repo) / name.replace(".", "_")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(raw)
            (repo / "snapshots" / "c0" / name).symlink_to(place)
        return repo / "snapshots" / "c0"

    good = snapshot(tmp_path / "good", lambda repo: repo / "blobs")
    assert list(open_checkpoint(good).tensors) == ["a", "b"]
    for name, place in {"deep": "blobs/deep", "refs": "refs", "up": "../blobs"}.items():
        bad = snapshot(tmp_path / name / "repo", lambda repo, place=place: repo / place)
        refused(bad, "config.json: is a link out of the checkpoint directory")


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    inside = checkpoint(tmp_path / "c")
    os.mkfifo(inside / "model.safetensors")
    refused(inside, "model.safetensors: not a regular file")
    (inside / "model.safetensors").unlink()
    (inside / "model.safetensors").mkdir()
    refused(inside, "model.safetensors: not a regular file")
    (inside / "model.safetensors").rmdir()
    (inside / "model.safetensors").symlink_to("model.safetensors")
    refused(inside, "model.safetensors: no such file")


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere: no such directory")
    (tmp_path / "none").mkdir()
    refused(tmp_path / "none", "config.json: no such file")
    refused(checkpoint(tmp_path / "bare"), "no model.safetensors and no model.safetensors.index")
    (tmp_path / "bare" / "pytorch_model.bin").write_bytes(b"PK")
    refused(tmp_path / "bare", "only pickle files ('pytorch_model.bin'), which can run code")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "not a JSON object"),
        (b"[1]", "expected a JSON object, found list"),
        (b'{"a": 1, "a": 2}', "repeated key 'a'"),
        (b'{"__float__": "Infinity"}', "expected a JSON object, found float"),
        (b'{"a": {"__float__": "1.5"}}', "__float__: found '1.5'"),
        (b'{"a": {"__float__": []}}', "__float__: found []"),
        (deep(200_000), "not a JSON object"),
    ],
)
def test_bad_config_is_refused(tmp_path: Path, raw: bytes, words: str) -> None:
    directory = checkpoint(tmp_path, config__json=raw, model__safetensors=pack(TWO, bytes(11)))
    assert re.search(r"config\.json: ", refused(directory, words))
