"""The benchmark scripts: figures that can be done by hand, and steps that go wrong."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import toy
import yaml

from emit.entry import Model, interface
from emit.shape import Shape
from runtime import bench
from runtime import manifest as mf

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"


def script(path: str) -> ModuleType:
    """A script of benchmarks/ as a module."""
    name = f"benchmarks_{Path(path).stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def published(name: str, weights: str, shape: str, tmp_path: Path) -> mf.Manifest:
    """A manifest with the parameters and states of a recipe's model, as emitted."""
    recipe = yaml.safe_load((ROOT / "recipes" / "models" / f"{name}.yaml").read_text())
    config = {"model_type": recipe["family"], **recipe["config"]}
    model = Model.of(config)
    content = interface(model, Shape.parse(shape), model.storage(weights), ())
    (tmp_path / "interface.json").write_text(json.dumps(content))
    read = mf.load_interface(tmp_path / "interface.json")
    files = mf.Files(mf.FileRef("m", "0" * 64, 1), None, None, ())
    plain = toy.make_manifest("local", (), files, "0.0")
    parsed = Shape.parse(shape)
    return dataclasses.replace(
        plain,
        model=dataclasses.replace(plain.model, vocab_size=read.vocab_size),
        shape=mf.ShapeInfo(parsed.name, parsed.slots, parsed.chunks, parsed.context),
        functions=read.functions,
        state=read.state,
        params=read.params,
    )


@pytest.mark.parametrize(("weights", "size"), [("f32", 4), ("bf16", 2), ("f16", 2)])
def test_bytes_of_a_token_of_the_130m_model(weights, size, tmp_path):
    """24 layers of width 768: 24 heads of 64 channels, state 128, one group, kernel 4; tied."""
    manifest = published("mamba2-130m", weights, "b1-p32+256", tmp_path)
    inner, vocab = 2 * 768, 50288
    conv = inner + 2 * 128
    projections = (inner + conv + 24) * 768 + inner * 768
    vectors = 4 * conv + conv + 3 * 24 + 768 + inner  # conv and its bias; dt, A, D; two norms
    want = size * (24 * projections + vocab * 768) + 4 * (24 * vectors + 768)
    assert bench.weight_bytes_per_step(manifest) == want
    assert want == {4: 515_958_528, 2: 258_524_928}[size]
    state = 24 * 4 * (3 * conv + 24 * 64 * 128)
    assert 2 * manifest.state_bytes_per_slot == 2 * state == 38_780_928


def test_an_untied_table_counts_one_row_a_slot(tmp_path):
    """The 7B model: 32768 rows of 4096 looked up, as many read by the output layer."""
    one, four = (
        bench.weight_bytes_per_step(published("mamba-codestral-7b", "bf16", shape, tmp_path))
        for shape in ("b1-p32", "b4-p32")
    )
    assert four - one == 3 * 4096 * 2
    whole = published("mamba-codestral-7b", "bf16", "b1-p32", tmp_path)
    assert sum(p.nbytes for p in whole.params) - one == (32768 - 1) * 4096 * 2


def record(kind: int, start: int, end: int, name: bytes | None = None, moved: int = 0):
    """(memory to keep, address) of a CUPTI record."""
    room, text = ctypes.create_string_buffer(208), ctypes.c_char_p(name)
    address = ctypes.addressof(room)
    ctypes.c_uint32.from_address(address).value = kind
    ctypes.c_uint64.from_address(address + 16).value = start
    ctypes.c_uint64.from_address(address + 24).value = end
    if name is None:
        ctypes.c_uint64.from_address(address + 8).value = moved
    else:
        pointer = ctypes.cast(text, ctypes.c_void_p).value or 0
        ctypes.c_uint64.from_address(address + 104).value = pointer
    return (room, text, name), address


def test_kernel_records_are_read_and_overlaps_count_once():
    kernels = script("gpu/kernels.py")
    rows = [
        record(kernels.KERNEL, 100, 150, b"decode_dispatch_0"),
        record(kernels.KERNEL, 140, 160, b"decode_dispatch_1"),
        record(kernels.COPY, 150, 155, moved=4096),
        record(kernels.FILL, 200, 210, moved=64),
    ]
    found = [kernels.read(address) for _, address in rows]
    assert [(a.name, a.end - a.start, a.bytes) for a in found] == [
        ("decode_dispatch_0", 50, 0),
        ("decode_dispatch_1", 20, 0),
        ("(copy)", 5, 4096),
        ("(fill)", 10, 64),
    ]
    assert kernels.busy_ns(found) == 60 + 10
    _, address = record(99, 1, 2)
    assert kernels.read(address) is None


def test_without_the_library_there_is_no_profiler(tmp_path, monkeypatch):
    kernels = script("gpu/kernels.py")
    (tmp_path / "not.so").write_text("not a library")
    monkeypatch.setattr(kernels, "find_library", lambda own: [own / "absent.so", own / "not.so"])
    with pytest.raises(kernels.NoProfiler, match=r"not\.so"):
        kernels.Profiler(tmp_path)


def run_of(seconds: float):
    """A Run that must end in `seconds`."""
    return script("gpu/drive.py").Run(time.monotonic() + seconds, ROOT, dict(os.environ))


def test_a_step_that_fails_or_hangs_is_a_failure_and_the_rest_goes_on(capsys, monkeypatch):
    drive = script("gpu/drive.py")
    monkeypatch.setitem(drive.LIMITS, "bench", 0.5)
    run = run_of(60)
    code = "import sys; print('error: broken', file=sys.stderr); sys.exit(3)"
    assert run.measure("verify x", [sys.executable, "-c", code]) is None
    start = time.monotonic()
    child = "import subprocess; subprocess.run(['sleep', '60'])"
    assert run.measure("bench x", [sys.executable, "-c", child]) is None
    assert time.monotonic() - start < 20
    assert run.measure("copy", [sys.executable, "-c", "print('{\"a\": 1}')"]) == {"a": 1}
    assert run.step("driver", ["./no-such-program"]) is None
    assert run.results == {"copy": {"a": 1}}
    assert [line.partition(": ")[0] for line in run.failures] == ["verify x", "bench x", "driver"]
    assert run.failures[2] == "driver: ./no-such-program: No such file or directory"
    assert "exit code 3: error: broken" in run.failures[0] and "killed" in run.failures[1]
    assert "FAIL  bench x: killed after" in capsys.readouterr().out


def test_no_step_starts_without_time(capsys):
    run = run_of(2)
    assert run.step("verify x", [sys.executable, "-c", "print(1)"]) is None
    assert run.failures == ["verify x: not run: no time left"]


def test_a_pack_for_another_python_is_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"made for Python 3\.2, .*prepare\.py --python"):
        script("gpu/drive.py").unpack(tmp_path, "3.2")


def test_rates_are_set_against_the_copy_rate():
    bench_row = {
        "open_s": 1.5,
        "first_token_s": 0.01,
        "prefill_tokens_per_s": 1000.0,
        "decode_tokens_per_s": 100.0,
        "decode_bytes_per_s": 3e12,
        "weight_bytes_per_token": 2.9e10,
        "state_bytes_per_token": 1e9,
        "batch": 1,
    }
    row = {"name": "decode_dispatch_0", "calls": 64, "ms": 6.0, "bytes": 0}
    kernels = {"wall_ms": 10.0, "busy_ms": 8.0, "calls": 65, "kinds": 2, "top": [row]}
    parts = ("decode_call_ms", "inputs_to_device_ms", "tokens_to_host_ms", "prefill_call_ms")
    steps = {"batch": 1, "chunk": 256, "profiler": "p", "parts": dict.fromkeys(parts, 1.0)}
    results = {
        "copy": {"bytes": 1 << 31, "bytes_per_s": 4e12, "spread": [3.9e12, 4.1e12]},
        "bench a": bench_row,
        "steps a": steps | {"kernels": {"decode": kernels}},
    }
    text = script("gpu/drive.py").report(results, ["a", "b"])
    assert "2048 MiB, read + written): 4,000.0 GB/s (3,900.0 … 4,100.0)" in text
    assert "3,000.0      75%" in text and "b                     not measured" in text
    assert "moves 30,000.0 MB: 7.500 ms at the copy rate" in text
    assert "65 launches of 2 kinds: busy 8.000 ms, idle 2.000 ms of 10.000" in text
    assert "75.0%    6.0000 ms     64x decode_dispatch_0" in text


def test_table():
    rows = [{"a": "1", "bb": "x"}, {"a": "22", "bb": ""}]
    assert script("builds.py").table(rows) == "| a  | bb |\n| -- | -- |\n| 1  | x  |\n| 22 |    |"
