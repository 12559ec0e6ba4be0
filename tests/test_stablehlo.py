"""Emitted text: no custom calls, no weights, the same bytes wherever and whenever it is made."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import cases
import jax
import jax.numpy as jnp
import pytest

from emit.entry import Entry, Model, entries, param_structs
from emit.errors import EmitError
from emit.shape import Shape
from emit.stablehlo import lower

ROOT = Path(__file__).parents[1]
SHAPE = Shape.parse("b3-p8+32")
DTYPE = {"f32": "f32", "bf16": "bf16", "f16": "f16", "i32": "i32"}


@pytest.fixture(autouse=True)
def strict_promotion() -> Any:
    with jax.numpy_dtype_promotion("strict"):
        yield


HYBRID = "nemotron_h/all_kinds"


def texts(config: dict[str, Any], kind: str, shape: Shape = SHAPE) -> dict[str, str]:
    """Emitted text of every entry."""
    model = Model.of(config)
    params = param_structs(model, model.storage(kind))
    return {entry.name: lower(entry, params) for entry in entries(model, shape)}


def case_config(name: str, **changes: Any) -> dict[str, Any]:
    return {**cases.full_config(cases.find(name)), **changes}


def signature(text: str, name: str) -> tuple[list[str], list[str]]:
    """Tensor types of the public function's arguments and results."""
    line = next(line for line in text.split("\n") if f"func.func public @{name}(" in line)
    arguments, results = line.split(") -> ", 1)
    return re.findall(r"tensor<([^>]*)>", arguments), re.findall(r"tensor<([^>]*)>", results)


@pytest.mark.parametrize("name", ["mamba2/groups4_tied_no_conv_bias", "mamba2/odd_sizes", HYBRID])
@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_text_is_one_module_with_external_parameters(name: str, kind: str) -> None:
    config = case_config(name)
    model = Model.of(config)
    specs = {spec.name: spec for spec in model.storage(kind).specs(model.weight_map)}
    for entry, text in texts(config, kind).items():
        assert text.startswith(f"module @{entry} {{\n") and text.endswith("\n}\n")
        assert "custom_call" not in text and "loc(" not in text and str(ROOT) not in text
        assert text.count("func.func public") == 1
        functions = re.findall(r"func\.func \w+ @([\w.$-]+)\(", text)
        assert all(f == entry or f.startswith(entry + ".") for f in functions)
        assert set(re.findall(r"call @([\w.$-]+)\(", text)) <= set(functions)
        globals_ = re.findall(
            r'^  util\.global private @"([^"]+)" = #flow\.parameter\.named<"model"::"([^"]+)">'
            r" : tensor<([^>]*)>$",
            text,
            re.M,
        )
        used = specs if entry.startswith(("prefill", "decode")) else {}
        assert [g[0] for g in globals_] == sorted(used) and all(g[0] == g[1] for g in globals_)
        for name_, _, kind_ in globals_:
            sizes = "x".join(map(str, specs[name_].shape))
            assert kind_ == f"{sizes}x{DTYPE[specs[name_].dtype]}"
            assert text.count(f'util.global.load @"{name_}"') == 1


def test_globals_of_all_entries_are_the_same_lines() -> None:
    found = texts(case_config(HYBRID), "bf16")
    lines = [
        [line for line in text.split("\n") if line.startswith("  util.global private")]
        for name, text in found.items()
        if name.startswith(("prefill", "decode"))
    ]
    assert len(lines) == 3 and lines[0] and all(block == lines[0] for block in lines)


@pytest.mark.parametrize("name", ["mamba2/odd_sizes", HYBRID])
def test_signatures_are_the_declared_ones(name: str) -> None:
    config = case_config(name)
    model = Model.of(config)

    def kinds(rows: Any) -> list[str]:
        words = {jnp.dtype("float32"): "f32", jnp.dtype("int32"): "i32"}
        return ["x".join([*map(str, s.shape), words[s.dtype]]) for _, s in rows]

    for entry in entries(model, SHAPE):
        text = lower(entry, param_structs(model, model.storage("f32")))
        assert signature(text, entry.name) == (kinds(entry.arguments), kinds(entry.outputs))


@pytest.mark.parametrize("name", ["mamba2/plain", HYBRID])
def test_every_state_comes_back_in_place_or_in_storage_that_nothing_reads(name: str) -> None:
    model = Model.of(case_config(name))
    for entry in entries(model, SHAPE):
        text = lower(entry, param_structs(model, model.storage("f32")))
        line = next(line for line in text.split("\n") if "func.func public" in line)
        arguments = line.split(") -> ", 1)[0].split("%")[1:]
        assert len(arguments) == len(entry.inputs) + len(entry.storage) == len(entry.arguments)
        marks = [re.search(r"iree\.abi\.output = (\d+) : index", text) for text in arguments]
        assert not any(marks[: len(entry.inputs)])
        given = zip(entry.inputs, arguments, strict=False)
        consumed = {name for (name, _), text in given if "iree.abi.consume" in text}
        assert consumed == entry.consumed and line.count("iree.abi.consume") == len(consumed)
        stored = [int(mark[1]) for mark in marks[len(entry.inputs) :] if mark]
        assert [f"out.{entry.outputs[i][0]}" for i in stored] == [n for n, _ in entry.storage]
        assert {entry.outputs[i][0] for i in stored} == {s.name for s in model.state} - consumed
        assert text.count("%out0") == 1


def test_text_does_not_grow_with_the_weights() -> None:
    small = texts(case_config("mamba2/plain"), "f32")
    sizes = {"hidden_size": 4096, "num_heads": 128, "head_dim": 64, "vocab_size": 50288}
    large = texts(case_config("mamba2/plain", **sizes), "f32")
    for name in small:
        assert len(large[name]) < 1.3 * len(small[name]) and len(large[name]) < 400_000


def test_no_large_constant_is_in_the_text() -> None:
    for text in texts(case_config("mamba2/plain"), "f32", Shape.parse("b1-p256")).values():
        assert max(len(line) for line in text.split("\n")) < 20_000
        assert "dense_resource" not in text


def test_a_graph_that_needs_a_custom_call_is_refused() -> None:
    def solve(params: Any, a: Any, b: Any) -> Any:
        del params
        return (jax.lax.linalg.triangular_solve(a, b, left_side=True, lower=True),)

    square = ("a", jax.ShapeDtypeStruct((4, 4), jnp.float32))
    bad = Entry(
        "solve", solve, (square, ("b", square[1])), (("x", square[1]),), frozenset(), (), False
    )
    with pytest.raises(EmitError, match=r"^solve: lowers to custom_call"):
        lower(bad, {})


def graphs(out: Path, config: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`python -m emit graphs` in a process of its own, with its own hash seed."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": str(len(str(out)))}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "emit", "graphs", "--config", str(config), "--out", str(out)]
    return subprocess.run(
        [*command, *words], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def test_two_processes_in_two_directories_write_the_same_bytes(tmp_path: Path) -> None:
    case = cases.find("mamba2/groups2_biases")
    written = []
    for name in ("one", "another/and_deeper"):
        directory = tmp_path / name
        directory.mkdir(parents=True)
        cases.write_config(directory / "config.json", cases.full_config(case), case)
        out = directory / "out"
        config = Path("config.json") if name == "one" else directory / "config.json"
        done = graphs(out, config, directory, "--weights", "bf16", "--shape", "b2-p8")
        assert done.returncode == 0, done.stderr
        written.append({path.name: path.read_bytes() for path in sorted(out.iterdir())})
    assert written[0] == written[1]
    names = {"decode.mlir", "extract.mlir", "interface.json", "prefill_8.mlir", "seed.mlir"}
    assert written[0].keys() == names
    content = json.loads(written[0]["interface.json"])
    assert {f"{name}.mlir" for name in content["functions"]} == names - {"interface.json"}


def test_the_command_says_in_one_line_what_is_wrong(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(case_config("mamba2/odd_sizes", time_step_limit=[0, 1], window=3)))
    done = graphs(tmp_path / "out", config, tmp_path, "--weights", "f32", "--shape", "b1-p8")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "window = 3 is not a known key" in done.stderr
    assert not (tmp_path / "out").exists()
