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
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import toy
import yaml
from safetensors.numpy import save_file

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
        if str(BENCHMARKS) not in sys.path:
            sys.path.append(str(BENCHMARKS))  # scripts import each other by name
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
    files = mf.Files(mf.FileRef("m", "0" * 64, 1), None, None, (), None, ())
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


def measured() -> dict:
    """What peers.py writes, with figures that can be done by hand: a step moves 1 GB in 0.1 s."""
    facts = {"weights": 9e8, "state": 1e8, "file": 9e8}
    one = {"ours bf16": [0.1] * 3, "llama.cpp bf16": [0.2, 0.15, 0.1], "torch bf16": [1.0] * 3}
    eight = {"ours bf16": [0.17] * 3, "llama.cpp bf16": [0.34] * 3, "torch bf16": [8.0] * 3}
    model = {
        "multiplied": 1_000_000_000,
        "facts": {"ours bf16": facts, "llama.cpp bf16": {"system": "AVX512 = 1"}},
        "decode": {
            "1": one | {"ours int4": [0.05] * 3, "llama.cpp q4_K": [0.06] * 3},
            "8": eight,
        },
        "prefill": {"256": {"ours bf16": [2.56], "llama.cpp bf16": [5.12]}},
        "open": {"bf16": {"imports": [0.1], "open": [0.01], "mapped": [9e8], "anonymous": [1e8]}},
    }
    model["facts"]["ours int4"] = {"weights": 2e8, "state": 1e8, "file": 2e8}
    return {
        "machine": {
            "cpu": "a CPU", "cores": 2, "memory_bytes": 1 << 30, "system": "s", "python": "3",
            "packages": {}, "load_average": 0.0,
        },
        "load": [[0.0, 2.0]],
        "check": {"m": {"ours f32": 1e-6}},
        "rates": [{"read": 1.25e10, "numpy f32": 4e11, "torch bf16": 2.5e11}],
        "models": {"m": model},
        "compile": {"bf16": {"seconds": 20.0, "kernels": 3.0, "bytes": 2e8}},
    }  # fmt: skip


def test_a_peer_table_can_be_done_by_hand():
    report, found = script("peer_report.py"), measured()
    bf16, int4, second = report.decode_rows(found, "m")
    assert (bf16["type"], bf16["MB moved"], bf16["ms"]) == ("bf16", "1000", "100 (100-100)")
    assert bf16["of the read limit"] == "0.8 (0.8-0.8), goal 0.85"
    assert bf16["llama.cpp"] == "bf16 150 (125-175)"
    assert bf16["times its speed"] == "1.5 (1.25-1.75), goal 1.0"
    assert bf16["times torch"] == "10 (10-10)"
    assert (int4["llama.cpp"], int4["torch ms"]) == ("q4_0 -", "-")
    assert second["llama.cpp"] == "q4_K 60 (60-60)" and "goal" not in second["times its speed"]
    (eight,) = report.batch_rows(found, "m")
    assert eight["a row more"] == "10 (10-10) %" and eight["tokens/s"] == "47.1 (47.1-47.1)"
    assert eight["times its speed"] == "2 (2-2)"
    (prompt,) = report.prefill_rows(found, "m")
    assert (prompt["tokens/s"], prompt["of the product"]) == ("100", "0.8")
    assert (prompt["llama.cpp"], prompt["times its speed"]) == ("bf16 50", "2")
    text = report.render(found)
    assert "load average of each run: 0.0 to 2.0" in text and "reads 12.5 GB/s" in text
    assert (
        "| bf16 | 100        | 10      | 900 " in text
        and "| bf16 | 20.0 | 3.0         | 200 " in text
    )


def test_int_weights_are_set_against_float32_products():
    report, found = script("peer_report.py"), measured()
    assert report.product_rate(found, "bf16") == 2.5e11
    assert report.product_rate(found, "int8") == report.product_rate(found, "f32") == 4e11
    del found["rates"][0]["torch bf16"]
    assert report.product_rate(found, "bf16") == 4e11


def test_bars_are_as_high_as_their_rates():
    plot, found = script("plot.py"), measured()
    made = plot.pictures(found)
    assert set(made) == {"decode-m.svg", "prefill-m.svg"}
    root = ElementTree.fromstring(made["decode-m.svg"])
    name = "{http://www.w3.org/2000/svg}rect"
    bars = [r for r in root.iter(name) if float(r.get("width", 0)) not in (800, 11)]
    colors = {color: [b for b in bars if b.get("fill") == color] for color in plot.SERIES.values()}
    ours = [float(bar.get("height", 0)) for bar in colors[plot.SERIES["Scanwright"]]]
    space = plot.HEIGHT - plot.TOP - plot.BOTTOM
    assert ours == pytest.approx([10 / 20 * space, 20 / 20 * space, 8 / 0.17 / 60 * space], abs=0.1)
    assert len(colors[plot.SERIES["torch"]]) == 2  # int4 has none
    for bar in bars:
        assert float(bar.get("y", 0)) + float(bar.get("height", 0)) == pytest.approx(
            plot.HEIGHT - plot.BOTTOM, abs=0.2
        )
    words = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"bf16", "int4", "1 sequence", "8 sequences", "47", "1.0"} <= set(words)
    assert plot.svg("a < b", {"p": {"f32": {"torch": [1.0]}}}).count("a &lt; b") == 2
    ceilings = [plot.ceiling(v) for v in (0.5, 1, 47.1, 99, 101)]
    assert ceilings == pytest.approx([0.6, 1, 60, 100, 200])


def test_the_readme_gets_its_plots_between_the_markers():
    shown, found = script("plot.py").shown, measured()
    words = script("peer_report.py").summary(found)
    assert words.endswith("times llama.cpp's speed: m: bf16 1.50.")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    text = shown(readme, ["decode-m.svg", "prefill-m.svg"], words)
    assert text.count("![decode-m](benchmarks/plots/decode-m.svg)\n![prefill-m](") == 1
    assert shown(text, ["decode-m.svg", "prefill-m.svg"], words) == text
    lines = set(readme.partition("<!-- plots:begin -->")[0].splitlines())
    assert lines < set(text.splitlines()) and "## Serve" in text


def test_nobody_always_follows_the_same_side():
    peers = script("peers.py")
    orders = [peers.turned(list("abcde"), number) for number in range(6)]
    assert all(sorted(order) == list("abcde") for order in orders)
    before = {order[order.index("c") - 1] for order in orders if order.index("c")}
    assert len(before) > 1 and len({order[0] for order in orders}) > 2


def test_what_llama_cpp_needs_is_said(tmp_path):
    llama = script("peer_llama.py")
    with pytest.raises(llama.NoPeer, match=r"no source tree at .*source"):
        llama.check(tmp_path)
    (tmp_path / "source" / "conversion").mkdir(parents=True)
    with pytest.raises(llama.NoPeer, match=r"no libraries at .*lib"):
        llama.check(tmp_path)
    (tmp_path / "lib").mkdir()
    for name in ("libllama.so", "libllama-common.so", "libggml.v1.so", "libggml-base.so"):
        (tmp_path / "lib" / name).touch()
    found = [path.name for path in llama.libraries(tmp_path)]
    assert found == ["libggml-base.so", "libggml.v1.so", "libllama.so"]


def test_shapes_of_peers_are_those_of_recipes():
    models = script("peer_models.py").MODELS
    config = models["qwen3-next-4-layers"].config
    assert (config["num_hidden_layers"], config["hidden_size"]) == (4, 2048)
    for model in models.values():
        for slots, name in model.shapes.items():
            shape = Shape.parse(name)
            assert shape.slots == slots and model.length == (shape.context or model.length)


def test_matrices_of_layers_are_counted(tmp_path):
    arrays = {
        "embeddings.weight": np.zeros((9, 4)), "lm_head.weight": np.zeros((9, 4)),
        "a.weight": np.zeros((3, 4)), "b.weight": np.zeros((2, 4)), "conv": np.zeros((4, 1, 4)),
    }  # fmt: skip
    save_file(arrays, tmp_path / "model.safetensors")
    assert script("peer_models.py").multiplied(tmp_path) == 20


def test_a_step_reads_chosen_experts_and_one_row_of_untied_embeddings():
    read_bytes = script("peer_sides.py").read_bytes

    def params(*named: tuple[str, Any, tuple[int, ...]]) -> list[mf.ParamSpec]:
        return [mf.ParamSpec(name, dtype, shape, 0.0, 1.0) for name, dtype, shape in named]

    experts = params(
        ("mlp.experts.up.weight.codes", "i8", (8, 4, 2)),
        ("mlp.experts.up.weight.scales", "bf16", (8, 4, 1)),
        ("mlp.shared_expert.up.weight", "bf16", (8, 4)),
        ("mlp.gate.weight", "f32", (8, 4)),
    )
    config = {"num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 100}
    assert read_bytes(experts, config) == 2 * (8 + 8) + 64 + 128
    table = params(
        ("embed.weight.codes", "i8", (100, 64)), ("embed.weight.scales", "bf16", (100, 1))
    )
    head = params(("lm_head.weight", "bf16", (100, 64)))
    assert read_bytes(table, {"vocab_size": 100}) == 6400 + 200  # tied
    assert read_bytes([*table, *head], {"vocab_size": 100}) == 64 + 2 + 12800
