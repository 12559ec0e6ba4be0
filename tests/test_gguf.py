"""GGUF files against the checkpoints that they came from; hostile ones; how they are built."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import cases
import numpy as np
import pytest
from driver import Driver, relative
from gguf_files import DATA, FILES, canonical, case_id, driver

from artifacts.fetch import fetch
from emit.__main__ import main
from emit.checkpoint import open_checkpoint
from emit.errors import EmitError
from emit.gguf_checkpoint import open_gguf, opened
from emit.gguf_file import PLAIN, open_file
from recipes.resolve import resolve_model
from runtime.errors import UserError

# What a file does not say, so that it has the library's default; what has no meaning there; and
# multipliers, which are in the weights.
UNSAID = {
    "falcon_h1": {
        *"lm_head_multiplier embedding_multiplier key_multiplier mlp_multipliers".split(),
        *"attention_in_multiplier attention_out_multiplier ssm_in_multiplier".split(),
        *"ssm_out_multiplier ssm_multipliers".split(),
    },
    "jamba": {"attn_layer_period", "expert_layer_period", "expert_layer_offset", "hidden_act"},
    "nemotron_h": {"time_step_min", "intermediate_size"},
    "plamo2": {"attention_window_size", "full_attention_idx"},
}
LOGARITHM = 1e-6  # of A_log: it was an exponential in between
HALF = 3e-4  # and of a checkpoint in f16, whose exponential conversion takes in f16
ADDED = 1e-6  # of norms that a number was added to


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Path]:
    """File -> the checkpoint directory that it was converted from."""
    root = tmp_path_factory.mktemp("published")
    return {f: cases.build(cases.find(case_id(f)), root / f.stem) for f in FILES}


def test_there_is_a_file_for_each_family_that_llama_cpp_has() -> None:
    families = {case_id(file).split("/")[0] for file in FILES}
    assert families == set(cases.FAMILIES) - {"recurrent_gemma"}


@pytest.mark.parametrize("file", FILES, ids=case_id)
def test_parameters_are_those_of_the_checkpoint(file: Path, published: dict[Path, Path]) -> None:
    family = case_id(file).split("/")[0]
    theirs, wanted = canonical(open_checkpoint(published[file]))
    ours, found = canonical(open_gguf(file))
    different = {k for k, v in vars(theirs).items() if vars(ours)[k] != v}
    assert different - {"text_prefix"} <= UNSAID.get(family, set())
    assert found.keys() == wanted.keys()
    if family == "falcon_h1":
        return  # their multipliers are in ours: see the logits
    half = cases.find(case_id(file)).dtype == "f16"
    types = {tensor.dtype for tensor in open_file(file).tensors.values()}
    for name, array in wanted.items():
        if name.endswith("A_log"):
            assert relative(found[name], array) < (HALF if half else LOGARITHM), name
        elif "norm" in name and family in ("qwen3_next", "qwen3_5", "qwen3_5_moe", "plamo2"):
            assert relative(found[name], array) < ADDED, name
        else:
            # Matrices of a float32 checkpoint are rounded once where the file has another type.
            may = [array, *(array.astype(PLAIN[t]).astype(np.float32) for t in types)]
            assert any(np.array_equal(found[name], each) for each in may), name


def test_multipliers_in_the_weights_give_the_same_logits(published: dict[Path, Path]) -> None:
    file = DATA / "falcon_h1-gated_norm.gguf"
    tokens = [3, 14, 15, 92, 65, 35, 8, 9, 79]
    wanted, _ = Driver.load(published[file]).prefill(tokens, 16)
    found, _ = driver(open_gguf(file)).prefill(tokens, 16)
    assert relative(found, wanted) < 1e-5


def test_commands_read_a_file(tmp_path: Path) -> None:
    file = str(DATA / "mamba2-f16.gguf")
    assert main(["gguf", file, "--out", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "mamba2"
    assert main(["type", file, "--out", str(tmp_path)]) == 0
    assert (tmp_path / "type.txt").read_text() == "f16\n"
    assert main(["convert", file, "--weights", "f16", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "params.irpa").stat().st_size > 0


def test_model_words(tmp_path: Path) -> None:
    raw = (DATA / "mamba-plain.gguf").read_bytes()
    (tmp_path / "a.gguf").write_bytes(raw)
    (tmp_path / "tokenizer.json").write_text("{}")
    by_file, by_directory = (resolve_model(str(p)) for p in (tmp_path / "a.gguf", tmp_path))
    assert by_file == by_directory and by_file.name == "a" and by_file.source == "dir:a.gguf"
    got = fetch(by_file.location, None, tmp_path / "cache", None)
    assert got.place == tmp_path / "a.gguf" and set(got.files) == {"a.gguf", "tokenizer.json"}
    (tmp_path / "b.gguf").write_bytes(raw)
    with pytest.raises(UserError, match=r"holds a\.gguf, b\.gguf: give one"):
        resolve_model(str(tmp_path))
    with pytest.raises(UserError, match="no such file"):
        resolve_model(str(tmp_path / "c.gguf"))
    assert opened(tmp_path / "a.gguf").config["model_type"] == "mamba"


# --- hostile files ---


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", version, tensors, keys)


def tensor(name: str, sizes: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def array(kind: int, count: int) -> bytes:
    return text("k") + struct.pack("<IIQ", 9, kind, count)


U32 = text("k") + struct.pack("<II", 4, 7)
PAD = bytes(64)
REFUSED = [
    (b"", "expected at least the 24"),
    (b"PK" + bytes(30), "not a GGUF file"),
    (header(version=1), "version 1 is not supported"),
    (header(version=3 << 24), "is big-endian"),
    (header(keys=1 << 60), "cannot hold"),
    (header(tensors=1 << 60), "cannot hold"),
    (header(keys=2) + U32 + U32, "'k' is there twice"),
    (header(keys=1) + text("k") + struct.pack("<I", 99) + PAD, "unknown type 99"),
    (header(keys=1) + struct.pack("<Q", 1 << 62) + PAD, "ends in 'a key'"),
    (header(keys=1) + array(8, 1 << 62) + PAD, "elements, expected at most"),
    (header(keys=1) + array(8, 1 << 20) + PAD, "ends in 'k'"),
    (header(keys=1) + array(6, 1 << 20) + PAD, "ends in 'k'"),
    (header(keys=1) + array(9, 1) + PAD, "an array of type 9"),
    (header(tensors=1) + tensor("t", (2,), 99) + PAD, "has the type 99"),
    (header(tensors=1) + tensor("t", (2,), 28) + PAD, "has the type F64"),
    (header(tensors=1) + tensor("t", (1,) * 5) + PAD, "has 5 dimensions"),
    (header(tensors=1) + tensor("t", (0,)) + PAD, "cannot hold"),
    (header(tensors=1) + tensor("t", (1 << 40, 1 << 40)) + PAD, "cannot hold"),
    (header(tensors=1) + tensor("t", (40,), 8) + PAD, "expected a multiple of 32"),
    (header(tensors=1) + tensor("t", (60,)) + PAD, "truncated"),
    (header(tensors=1) + tensor("t", (2,), offset=32) + PAD, "begins at byte 32"),
    (header(tensors=1) + tensor("t", (2,), offset=(1 << 64) - 8) + PAD, "begins at byte"),
    (header(tensors=2) + tensor("t", (2,)) + tensor("u", (2,)) + PAD, "begins at byte 0"),
    (header(tensors=2) + tensor("t", (2,)) + tensor("t", (2,), 0, 32) + PAD, "is there twice"),
    (
        header(keys=1) + text("general.alignment") + struct.pack("<II", 4, 3) + PAD,
        "expected a power of 2",
    ),
    (header(keys=1) + text("split.count") + struct.pack("<II", 4, 9) + PAD, "part 0 of 9"),
]


@pytest.mark.parametrize(("raw", "words"), REFUSED)
def test_hostile_headers(raw: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(raw)
    with pytest.raises(EmitError) as error:
        open_file(path)
    assert words in str(error.value)
    assert "\n" not in str(error.value) and str(error.value).startswith(str(path))


def test_what_a_hostile_header_is_built_of_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(header(1, 1) + U32 + tensor("t", (2,)) + bytes(128))
    file = open_file(path)
    assert file.metadata == {"k": 7} and file.read("t").tolist() == [0, 0]


@pytest.mark.parametrize("name", ["jamba-bf16_sharded", "rwkv7-plain", "nemotron_h-all_kinds"])
def test_damaged_files_are_refused_or_read(name: str, tmp_path: Path) -> None:
    whole, rng = (DATA / f"{name}.gguf").read_bytes(), random.Random(name)
    path = tmp_path / "x.gguf"
    told = 0
    for _ in range(150):
        raw = bytearray(whole)
        for _ in range(rng.choice((1, 3, 10))):
            raw[rng.randrange(6000)] = rng.randrange(256)
        cut = rng.randrange(len(raw)) if rng.random() < 0.2 else len(raw)
        path.write_bytes(raw[:cut])
        try:
            canonical(open_gguf(path))
        except EmitError as error:
            assert "\n" not in str(error)
            told += 1
    assert told > 50


def test_a_key_that_nothing_reads_is_refused(tmp_path: Path) -> None:
    raw = (DATA / "mamba-plain.gguf").read_bytes()
    (tmp_path / "x.gguf").write_bytes(raw.replace(b"mamba.context_length", b"mamba.kontext_length"))
    with pytest.raises(EmitError, match=r"mamba\.kontext_length = 1048576 is not supported"):
        open_gguf(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b"mamba.block_count", b"mamba.block_kount", "mamba.block_count is missing"),
        (b"\x05\0\0\0\0\0\0\0mamba", b"\x05\0\0\0\0\0\0\0llama", "'llama' is not supported"),
        (b"blk.1.ssm_out.weight", b"blk.1.ssm_uot.weight", "blk.1.ssm_uot.weight is not a tensor"),
    ],
)
def test_damage_is_named(old: bytes, new: bytes, words: str, tmp_path: Path) -> None:
    raw = (DATA / "mamba-plain.gguf").read_bytes()
    assert old in raw
    (tmp_path / "x.gguf").write_bytes(raw.replace(old, new))
    with pytest.raises(EmitError) as error:
        canonical(open_gguf(tmp_path / "x.gguf"))
    assert words in str(error.value)
