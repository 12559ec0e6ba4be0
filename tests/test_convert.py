"""Conversion in pieces and in bounded memory, and gone on with after a kill."""

from __future__ import annotations

import json
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import building
import cases
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import quantised

from emit import convert, expect, irpa
from emit.checkpoint import TensorInfo, open_checkpoint
from emit.dequant import dequantized, scheme
from emit.entry import Model
from emit.errors import EmitError
from emit.forms import Divided, Form, copy, first_half, minus_one, second_half
from emit.packed import Packed
from emit.storage import plan as convert_plan

ROOT = Path(__file__).parents[1]
E4M3 = ml_dtypes.float8_e4m3fn


@dataclass(frozen=True)
class Arrays:
    """A checkpoint of arrays in memory."""

    arrays: Mapping[str, np.ndarray]
    types: Mapping[str, str]
    dir = Path("checkpoint")

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Names, words and shapes; a type of blocks counts its 256 numbers, not their bytes."""
        found = {}
        for name, array in self.arrays.items():
            shape = array.shape
            if self.types[name] == "q4_k":
                shape = (*shape[:-1], shape[-1] // 144 * 256)
            found[name] = TensorInfo(self.dir, self.types[name], shape, 0, 0)
        return found

    def read(self, name: str) -> np.ndarray:
        """The array."""
        return self.arrays[name]

    def release(self) -> None:
        """Nothing was read."""


RNG = np.random.default_rng(5)


def u8(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def u32(*shape: int) -> np.ndarray:
    return RNG.integers(0, 1 << 32, shape, dtype=np.uint32)


def f32(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32)


def mlx(words: np.ndarray, scales: np.ndarray, beside: np.ndarray, **keys: Any) -> Any:
    """The config and the tensors of one module."""
    word = "biases" if keys.get("mode") is None else "global_scale"
    parts = {"x.weight": words, "x.scales": scales, f"x.{word}": beside}
    return {"quantization": keys}, parts


def other(method: str, parts: dict[str, np.ndarray], **keys: Any) -> Any:
    return {"quantization_config": {"quant_method": method, **keys}}, parts


SMALL = u8(6, 300, 64) & 0x77  # e4m3 of no NaN
FP8: dict[str, Any] = {"weight_block_size": [128, 128]}
CODED = {
    "mlx-matrix": mlx(u32(10, 8), f32(10, 1), f32(10, 1), bits=4, group_size=64),
    "mlx-stack": mlx(u32(6, 10, 8), f32(6, 10, 2), f32(6, 10, 2), bits=4, group_size=32),
    "nvfp4-matrix": mlx(u32(10, 8), SMALL[0, :10, :4], f32(), mode="nvfp4", global_scale=True),
    "nvfp4-stack": mlx(u32(6, 10, 8), SMALL[:, :10, :4], f32(6), mode="nvfp4", global_scale=True),
    "mxfp4": other("mxfp4", {"x_blocks": u8(6, 4, 2, 16), "x_scales": SMALL[:, :4, :2]}),
    "fp8-blocks": other(
        "fp8", {"x.weight": SMALL[0].view(E4M3), "x.weight_scale_inv": f32(3, 1)}, **FP8
    ),
    "fp8-stack": other(
        "fp8", {"x.weight": SMALL.view(E4M3), "x.weight_scale_inv": f32(6, 3, 1)}, **FP8
    ),
    "fp8-one": other(
        "fp8",
        {"x.weight": SMALL[0].view(E4M3), "x.weight_scale_inv": f32()},
        weight_block_size=None,
    ),
    "fp8-rows": other("fp8", {"x.weight": SMALL[0].view(E4M3), "x.weight_scale": f32(300, 1)}),
    "fp8-row": other("fp8", {"x.weight": SMALL[0].view(E4M3), "x.weight_scale": f32(1)}),
    "fp4-halves": other(
        "fp8",
        {"x.weight": u8(10, 32).view(np.int8), "x.weight_scale_inv": f32(10, 2)},
        expert_dtype="fp4",
    ),
    "gguf": other("gguf", {"x": SMALL.reshape(-1)[: 6 * 5 * 288].reshape(6, 5, 288)}),
}
WORDS = {"uint8": "u8", "uint32": "u32", "float32": "f32", "int8": "i8", "float8_e4m3fn": "f8_e4m3"}


@pytest.mark.parametrize("name", CODED)
def test_pieces_of_codes_are_pieces_of_the_tensor(name: str) -> None:
    config, arrays = CODED[name]
    types = {key: "q4_k" if key == "x" else WORDS[a.dtype.name] for key, a in arrays.items()}
    source, found = Arrays(arrays, types), scheme(config)
    assert found is not None
    (tensor,) = found.coded(source).values()
    parts = [source.read(part) for part in tensor.parts]
    whole, rows = tensor.widen(*parts), tensor.shape[0]
    assert tensor.step == (128 if name == "fp8-blocks" else 1) and np.abs(whole).max() > 0
    for step in (tensor.step, 4 * tensor.step):
        cuts = [(at, min(at + step, rows)) for at in range(0, rows, step)]
        pieces = [tensor.widen(*tensor.cut(parts, *cut)) for cut in cuts]
        np.testing.assert_array_equal(np.concatenate(pieces), whole)
        if tensor.pack is not None:
            packed = [tensor.pack(*tensor.cut(parts, *cut)) for cut in cuts]
            for got, want in zip(joined(packed), joined([tensor.pack(*parts)]), strict=True):
                np.testing.assert_array_equal(got, want)


def joined(packed: list[Packed]) -> list[np.ndarray]:
    codes, scales = [p.codes for p in packed], [p.scales for p in packed]
    offsets = [p.offsets for p in packed if p.offsets is not None]
    return [np.concatenate(arrays) for arrays in (codes, scales, offsets) if arrays]


def test_pieces_of_forms() -> None:
    stack, matrix = f32(6, 8, 4), f32(12, 4)
    divided = Divided((2.0, 0.0, 4.0), (3, 4, 5))
    for transform, tensor in (
        (copy, stack), (copy, matrix), (first_half, stack), (second_half, stack), (divided, matrix)
    ):  # fmt: skip
        form = Form(("x",), tensor.shape, transform)
        assert form.cuttable
        whole = transform(tensor)
        for begin, end in ((0, 2), (2, 5), (5, len(tensor))):
            got = form.cut(begin, end).transform(tensor[begin:end])
            np.testing.assert_array_equal(got, whole[begin:end])
    for transform, tensor in ((first_half, matrix), (minus_one, matrix), (divided, stack)):
        assert not Form(("x",), tensor.shape, transform).cuttable


def affine(weight: np.ndarray) -> tuple[quantised.Parts, np.ndarray]:
    """A projection as MLX's four bits; what they stand for is not asked for."""
    outputs, inputs = weight.shape
    scales = f32(outputs, inputs // 64)
    return {"weight": u32(outputs, inputs // 8), "scales": scales, "biases": -scales}, weight


def mlx_checkpoint(directory: Path) -> Path:
    quantised.quantise(quantised.plain(directory), None, affine)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config | {"quantization": {"bits": 4, "group_size": 64}}))
    return directory


def case_checkpoint(name: str) -> Callable[[Path], Path]:
    return lambda directory: cases.build(cases.find(name), directory)


CHECKPOINTS = {
    "mlx": mlx_checkpoint,
    "experts": case_checkpoint("qwen3_next/plain"),
    "tied": case_checkpoint("falcon_h1/gate_alone_tied"),
}


def archive(directory: Path, out: Path, kind: str, key: str | None = None) -> bytes:
    opened = open_checkpoint(directory)
    model, source = Model.of(opened.config), dequantized(opened, opened.config)
    chosen = convert.resolve(model.weight_map, source)
    storage = convert_plan(model.weight_map, kind, source, chosen)
    out.mkdir(exist_ok=True)
    convert.convert(model.weight_map, source, storage, out, key)
    return (out / "params.irpa").read_bytes()


@pytest.mark.parametrize("kind", ["f32", "f16", "int8", "int4"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_size_of_pieces_changes_nothing(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = CHECKPOINTS[name](tmp_path / "checkpoint")
    whole = archive(directory, tmp_path / "whole", kind)
    if (name, kind) == ("mlx", "int4"):  # whose bytes are laid out as those of a bundle
        words = open_checkpoint(directory).read(f"{quantised.MODULES[0]}.weight")
        assert words.dtype == np.uint32 and words.tobytes() in whole
    for size in (1, 1000):
        monkeypatch.setattr(convert, "PIECE", size)
        assert archive(directory, tmp_path / str(size), kind) == whole


def test_a_tied_head_is_compared_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "PIECE", 1)
    tied = cases.find("mamba2/groups4_tied_no_conv_bias")
    tensors = cases.tensors(tied)
    table = tensors["backbone.embeddings.weight"]
    for change in (0.0, 1.0):
        head = table.copy()
        head[-1, -1] += change
        directory = cases.build(tied, tmp_path / str(change))
        cases.write_tensors(directory, tensors | {"lm_head.weight": head})
        if change:
            with pytest.raises(EmitError, match=r"lm_head\.weight differs"):
                archive(directory, tmp_path / "no", "f32")
        else:
            archive(directory, tmp_path / "yes", "f32")


def test_jax_uses_the_archive_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a model need not fit in memory to be compared with."""
    opened = open_checkpoint(cases.build(cases.find("mamba2/plain"), tmp_path / "checkpoint"))
    model, read, views = Model.of(opened.config), irpa.read, {}
    storage = model.storage("bf16")
    convert.convert(model.weight_map, opened, storage, tmp_path)

    def kept(path: Path, specs: list[irpa.Tensor]) -> Mapping[str, np.ndarray]:
        views.update(read(path, specs))
        return views

    monkeypatch.setattr(irpa, "read", kept)
    params = expect.load_params(model, storage, tmp_path / "params.irpa")
    assert len(params) == len(views) > 10
    for name, param in params.items():
        assert param.unsafe_buffer_pointer() == views[name].ctypes.data, name


@pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
def test_jax_widens_a_small_model_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_checkpoint(cases.build(cases.find("mamba2/plain"), tmp_path / "checkpoint"))
    model = Model.of(opened.config)
    storage = model.storage(kind)
    convert.convert(model.weight_map, opened, storage, tmp_path)
    stored = expect.load_params(model, storage, tmp_path / "params.irpa")
    wide = expect.widened(stored)
    assert {str(param.dtype) for param in wide.values()} == {"float32"}
    for name, param in stored.items():
        np.testing.assert_array_equal(param.astype(jnp.float32), wide[name])
    one, other = (expect.generate(model, params, [[3], [5, 7]], 6) for params in (wide, stored))
    assert [row["generated"] for row in one] == [row["generated"] for row in other]
    monkeypatch.setattr(expect, "WIDE_BYTES", 0)
    assert expect.widened(stored) is stored


# Large ones


def sparse_checkpoint(directory: Path, layers: int, vocabulary: int) -> tuple[Path, int]:
    """A mamba2 of zeros in bf16, in a file without blocks on the disk; and its bytes."""
    case = cases.find("mamba2/f16")
    sizes = {"hidden_size": 1024, "num_heads": 32, "head_dim": 64, "expand": 2}
    config = cases.full_config(case) | sizes
    config |= {"num_hidden_layers": layers, "vocab_size": vocabulary, "dtype": "bfloat16"}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    table, end = {}, 0
    for param in Model.of(config).weight_map.params:
        (name,), shape = param.forms[0].names, list(param.forms[0].shape)
        size = 2 * int(np.prod(shape))
        table[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    header = json.dumps(table).encode()
    with (directory / "model.safetensors").open("wb") as out:
        out.write(struct.pack("<Q", len(header)) + header)
        out.truncate(8 + len(header) + end)
    return directory, end


MEASURED = """
import resource, sys
from pathlib import Path
from emit import convert, irpa
from emit.__main__ import main
from emit.entry import Model
import emit.families.mamba2
def field(name):
    lines = dict(row.split(":") for row in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024
convert.PIECE, convert.MAPPED = 1 << 21, 1 << 23
before = field("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak is that of what follows
main(["convert", sys.argv[1], "--weights", sys.argv[2], "--out", sys.argv[3]])
print(field("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_a_large_checkpoint_takes_little_memory(kind: str, tmp_path: Path) -> None:
    """Nothing of it stays in memory: neither what was made, nor the pages of its file."""
    directory, size = sparse_checkpoint(tmp_path / "checkpoint", 12, 65536)
    command = [sys.executable, "-c", MEASURED, str(directory), kind, str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    bound = 100 << 20
    assert size > 2.5 * bound
    assert int(done.stdout) < bound


KILLED = """
import os, signal, sys
from emit import irpa
from emit.__main__ import main
left, write = int(sys.argv[1]), os.write
def killed(descriptor, data):
    global left
    left -= len(data)
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(descriptor, data)
os.write = killed
irpa.BLOCK = 10000
main(sys.argv[2:])
print(left)
"""


def test_a_killed_conversion_is_continued(tmp_path: Path) -> None:
    """By the same command; and the same bytes come of it, of each written once."""
    directory = mlx_checkpoint(tmp_path / "checkpoint")

    def run(out: str, room: int, key: str) -> subprocess.CompletedProcess[str]:
        words = ["convert", str(directory), "--weights", "int4", "--out", str(tmp_path / out)]
        command = [sys.executable, "-c", KILLED, str(room), *words, "--key", key]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    most = 1 << 30
    whole = most - int(run("whole", most, "key").stdout)
    for room in (whole // 3, whole // 2):
        assert run("out", room, "key").returncode == -signal.SIGKILL
        assert not (tmp_path / "out" / "params.irpa").exists()
    assert most - int(run("out", most, "key").stdout) < whole // 2
    for name in ("params.irpa", "params.json"):
        found = (tmp_path / "out" / name).read_bytes()
        assert found == (tmp_path / "whole" / name).read_bytes()


def test_it_is_continued_at_any_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also between the codes of a parameter and their scales."""
    directory = mlx_checkpoint(tmp_path / "checkpoint")
    whole = archive(directory, tmp_path / "whole", "int4")
    completed, count = irpa.Writer._complete, 0

    def stops(writer: irpa.Writer) -> None:
        nonlocal count
        completed(writer)
        count += 1
        if count == stop:
            raise KeyboardInterrupt

    monkeypatch.setattr(irpa.Writer, "_complete", stops)
    for stop in range(1, 99):
        count = 0
        try:
            archive(directory, tmp_path / str(stop), "int4", "key")
        except KeyboardInterrupt:
            count = 100
            assert archive(directory, tmp_path / str(stop), "int4", "key") == whole
        else:
            assert stop > 20
            break


COUNTED = """
import os, signal
os.environ.setdefault("TEST_FIRST", str(os.getpid()))
room, count, write = int(os.environ.get("TEST_ROOM", 1 << 40)), 0, os.write
def counted(descriptor, data):
    global count
    if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".irpa.partial"):
        count += len(data)
        if count > room:
            alone = os.environ["TEST_VICTIM"] != "build"
            os.kill(os.getpid() if alone else int(os.environ["TEST_FIRST"]), signal.SIGKILL)
            signal.pause()
        with open(os.environ["TEST_COUNT"], "a") as out:
            out.write(f"{len(data)}\\n")
    return write(descriptor, data)
os.write = counted
"""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux's /proc")
def test_a_killed_build_is_continued(tmp_path: Path) -> None:
    """Whether all of it is killed or only the process that converts, and by the same words."""
    place = building.Place.new(tmp_path / "place")
    with (place.home / "audit" / "sitecustomize.py").open("a") as audit:
        audit.write(COUNTED)
    (tmp_path / "own").mkdir()
    right = archive(place.work / "tiny", tmp_path / "own", "f32")
    total = 0
    for victim, code, room in (("build", -signal.SIGKILL, 3), ("stage", 1, 2), ("none", 0, 0)):
        count = tmp_path / victim
        env = {"TEST_VICTIM": victim, "TEST_COUNT": str(count)}
        env |= {"TEST_ROOM": str((len(right) - total) // room)} if room else {}
        done = place.doit("convert", "weights=f32", env=env)
        assert done.code == code, done.err
        total += sum(map(int, count.read_text().split()))
        work = [path.name for path in (place.cache / "work").rglob("*") if path.is_file()]
        assert sorted(work) == (["params.irpa.journal", "params.irpa.partial"] if room else [])
    assert "killed, most likely out of memory" not in done.err
    assert len(right) <= total < 1.5 * len(right)
    assert place.blob("convert", "params").read_bytes() == right
    assert not list((place.cache / "work").iterdir())
