"""Recipes: strict files, words of the command line, and the README's table."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emit.entry import Model
from recipes import select, table
from recipes.resolve import (
    every_model,
    every_target,
    names,
    resolve_model,
    resolve_shape,
    resolve_target,
    resolve_weights,
)
from recipes.schema import WEIGHT_TYPES, Shape, load_model, load_target
from recipes.shape import ShapeError
from runtime.errors import UserError

ROOT = Path(__file__).resolve().parent.parent

MODEL = """\
about: a test
family: mamba2
source: hf:org/name
revision: main
weights: bf16
shapes: [b1-p32+256]
config:
  hidden_size: 64
  time_step_limit: [0.0, .inf]
  use_bias: false
"""
TARGET = """\
about: a test
device: cuda
uri: cuda
flags:
  - --iree-cuda-target=sm_80
safe_flags:
  - [--iree-opt-level=O0]
weights: [f32, f16, int8, int4]
substitute: {bf16: f16}
runs_here: never
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "x.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_targets_are_the_thirteen() -> None:
    assert set(names("targets")) == {
        *("cpu", "cpu-x86-64-v3", "cpu-x86-64-v4", "cpu-aarch64", "vulkan", "metal"),
        *("cuda-sm80", "cuda-sm89", "cuda-sm90", "cuda-sm120", "cuda-sm121"),
        *("rocm-gfx942", "rocm-gfx1100"),
    }
    arch = {t.name: [f for f in t.flags if "cuda-target" in f] for t in every_target()}
    assert arch["cuda-sm90"] == ["--iree-cuda-target=sm_89"]  # the compiler has no sm_90
    assert arch["cuda-sm121"] == ["--iree-cuda-target=sm_121"]


def test_no_flag_list_fuses_aggressively_or_repacks_parameters() -> None:
    for target in every_target():
        assert target.safe_flags
        for flags in (target.flags, *target.safe_flags):
            assert "--iree-dispatch-creation-enable-aggressive-fusion=false" in flags
            assert "--iree-opt-const-expr-hoisting=false" in flags
            assert not any("data-tiling" in flag for flag in flags)
            assert any(flag.startswith("--iree-hal-target-device=") for flag in flags)
        assert target.flags not in target.safe_flags


def test_a_gpu_architecture_is_the_same_in_every_flag_list() -> None:
    for target in every_target():
        chosen = [
            [flag for flag in flags if re.match("--iree-(cuda|rocm|metal|vulkan)-", flag)]
            for flags in (target.flags, *target.safe_flags)
        ]
        assert all(flags == chosen[0] for flags in chosen), target.name


# Parameters, in billions, as published with the models or counted from their files.
BILLIONS = {
    "falcon-h1-0.5b": 0.521, "falcon-h1-1.5b": 1.555, "falcon-h1-1.5b-deep": 1.555,
    "falcon-h1-3b": 3.149, "falcon-h1-7b": 7.586, "falcon-h1-34b": 33.6,
    "falcon-h1-tiny-90m": 0.091, "falcon-mamba-7b": 7.273, "falcon-mamba-7b-instruct": 7.273,
    "jamba-1.5-large": 398.6, "jamba-1.5-mini": 51.6, "jamba-1.6-large": 398.6,
    "jamba-1.6-mini": 51.6, "jamba-1.7-large": 398.6, "jamba-1.7-mini": 51.6,
    "jamba-reasoning-3b": 3.03, "jamba-v0.1": 51.6, "kimi-linear-48b-a3b-base": 49.123,
    "kimi-linear-48b-a3b-instruct": 49.123, "mamba-130m": 0.129, "mamba-370m": 0.372,
    "mamba-790m": 0.793, "mamba-1.4b": 1.372, "mamba-2.8b": 2.768, "mamba-codestral-7b": 7.285,
    "mamba2-130m": 0.129, "mamba2-370m": 0.368, "mamba2-780m": 0.78, "mamba2-1.3b": 1.344,
    "mamba2-2.7b": 2.703, "nemotron-3-nano-30b-a3b": 31.58, "nemotron-3-super-120b-a12b": 120.67,
    "nemotron-h-4b": 4.489, "nemotron-h-8b": 8.1, "nemotron-h-47b": 46.8, "nemotron-h-56b": 56.3,
    "nemotron-nano-9b-v2": 8.888, "nemotron-nano-12b-v2": 12.31, "plamo-2-1b": 1.291,
    "plamo-2-8b": 9.528, "plamo-2-translate": 9.528,
    "qwen3-coder-next": 79.67, "qwen3-next-80b-a3b-instruct": 79.67,
    "qwen3-next-80b-a3b-thinking": 79.67,
    "recurrentgemma-2b": 2.683, "recurrentgemma-2b-it": 2.683, "recurrentgemma-9b": 8.58,
    "recurrentgemma-9b-it": 8.58,
    "rwkv7-g0a-7.2b": 7.199, "rwkv7-g1d-0.1b": 0.191, "rwkv7-g1d-0.4b": 0.4508,
    "rwkv7-g1g-1.5b": 1.527, "rwkv7-g1g-13.3b": 13.269, "rwkv7-g1g-2.9b": 2.948,
    "rwkv7-g1g-7.2b": 7.199, "rwkv7-pile-1.47b": 1.465, "rwkv7-pile-168m": 0.1676,
    "rwkv7-pile-421m": 0.4196, "rwkv7-world-0.1b": 0.191, "rwkv7-world-0.4b": 0.4508,
    "rwkv7-world-1.5b": 1.527, "rwkv7-world-2.9b": 2.948,
}  # fmt: skip


def test_published_models_have_their_number_of_parameters() -> None:
    published = {model.name: model for model in every_model() if model.source.startswith("hf:")}
    assert published.keys() == BILLIONS.keys()
    for name, model in published.items():
        assert model.config is not None and model.config["model_type"] == model.family
        found = Model.of(model.config)
        count = sum(math.prod(param.shape) for param in found.weight_map.params)
        assert count / 1e9 == pytest.approx(BILLIONS[name], rel=0.005), name
        keeps_kv = any(spec.kind == "per_position" for spec in found.state)
        assert all(("-c" in shape) == keeps_kv for shape in model.shapes), name


@pytest.mark.parametrize("kind", ["models", "targets"])
def test_every_recipe_file_is_found_and_named_by_its_file(kind: str) -> None:
    files = [path.stem for path in (ROOT / "recipes" / kind).iterdir() if path.is_file()]
    assert sorted(files) == names(kind)
    resolve = resolve_model if kind == "models" else resolve_target
    assert [resolve(name).name for name in names(kind)] == names(kind)


def test_model_recipe_is_read_as_written(tmp_path: Path) -> None:
    model = load_model(write(tmp_path, MODEL))
    assert (model.name, model.source, model.revision) == ("x", "hf:org/name", "main")
    assert model.config == {
        "model_type": "mamba2",
        "hidden_size": 64,
        "time_step_limit": [0.0, math.inf],
        "use_bias": False,
    }
    assert model.location == "hf:org/name"
    assert model.lock == tmp_path / "x.lock.json"
    assert resolve_model("mamba2-130m").lock == ROOT / "recipes/locks/mamba2-130m.lock.json"


def test_directory_source_is_relative_to_the_recipe(tmp_path: Path) -> None:
    text = MODEL.replace("hf:org/name", "dir:ckpt/a").replace("revision: main\n", "")
    model = load_model(write(tmp_path, text))
    assert model.source == "dir:a"  # no absolute path: this reaches the manifest
    assert model.location == f"dir:{tmp_path}/ckpt/a"


def replaced(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new)


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("revision: main", "revison: main", 4, "unknown key 'revison': did you mean revision"),
        ("weights: bf16", "", 1, "missing key 'weights'"),
        ("weights: bf16", "weights: bf61", 5, "weights: 'bf61' is not known: did you mean bf16"),
        ("weights: bf16", "weights: int2", 5, "weights: 'int2' is not known"),
        ("weights: bf16", "weights: [bf16]", 5, "weights: expected text, found a list"),
        ("about: a test", "about: 3", 1, "about: expected text, found int 3"),
        ("about: a test", "about:", 1, "about: expected text, found nothing"),
        ("revision: main", "revision: 2024-01-02", 4, "reads as a YAML timestamp: quote it"),
        ("revision: main", "revision: 0123", 4, "reads as a YAML int: quote it"),
        ("use_bias: false", "use_bias: no", 10, "config.use_bias: 'no' reads as a YAML bool"),
        ("use_bias: false", "eps: 1e-5", 10, "config.eps: 1e-5 is text in YAML"),
        ("use_bias: false", "hidden_size: 65", 10, "'hidden_size' is given twice"),
        ("use_bias: false", "a: &x 1", 10, "aliases and anchors are not read"),
        ("use_bias: false", "a: !!str 1", 10, "is not read: remove it"),
        ("use_bias: false", "a: !!python/object:os.x {}", 10, "is not read: remove it"),
        ("use_bias: false", "a: [1", 11, "not YAML"),
        ("use_bias: false", "? [1]\n  : 2", 10, "expected a single value"),
        ("family: mamba2\n", "", 6, "config: needs the key family"),
        ("  hidden_size", "  model_type: llama\n  hidden_size", 7, "'llama' and family 'mamba2'"),
        ("hf:org/name", "org/name", 3, "source: 'org/name': expected hf:ORG/NAME or dir:PATH"),
        ("hf:org/name", "dir:name", 4, "revision: only a hf: source"),
        ("b1-p32+256", "b1-p32, b1p32", 6, "shapes[1]: shape 'b1p32': expected b<slots>"),
        ("b1-p32+256", "b1-p256+32", 6, "write it as 'b1-p32+256'"),
        ("b1-p32+256", "b1-p32, b1-p32", 6, "listed twice"),
        ("[b1-p32+256]", "[]", 6, "shapes: the list is empty"),
        ("[b1-p32+256]", "b1-p32+256", 6, "shapes: expected a list"),
    ],
)
def test_faulty_model_recipe_names_file_and_line(
    tmp_path: Path, old: str, new: str, line: int, words: str
) -> None:
    path = write(tmp_path, replaced(MODEL, old, new))
    with pytest.raises(UserError) as caught:
        load_model(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:{line}: "), message
    assert words in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("device: cuda", "device: cudda", 2, "device: 'cudda' is not known: did you mean cuda"),
        ("uri: cuda", "uri: vulkan", 3, "uri: 'vulkan' is no URI of device 'cuda'"),
        ("--iree-cuda-target=sm_80", "-O3", 5, "flags: '-O3': expected an iree-compile flag"),
        (
            "--iree-cuda-target=sm_80",
            "--iree-hal-preprocess-executables-with=touch",
            5,
            "expected a flag that names no file and no command",
        ),
        ("--iree-cuda-target=sm_80", "--iree-hal-target-device=hip", 5, "set by the keys device"),
        ("runs_here: never", "runs_here: nevr", 10, "did you mean never"),
        ("runs_here: never", "runs_here: never\ncpu: host", 11, "cpu: only for device local"),
        ("{bf16: f16}", "{}", 9, "substitute: bf16 must be in exactly one of"),
        ("{bf16: f16}", "{bf16: f16, f16: f32}", 9, "substitute: f16 must be in exactly one of"),
        ("{bf16: f16}", "{bf16: int2}", 9, "substitute: bf16: 'int2' is not one of"),
        ("{bf16: f16}", "{bf16: f16, int2: f32}", 9, "substitute: 'int2'"),
        ("[f32, f16, int8, int4]", "[f32, f32]", 8, "weights: expected distinct types"),
        ("cuda\nuri: cuda", "local\nuri: local-task", 1, "cpu: missing"),
        ("cuda\nuri: cuda", "local\ncpu: x86-64-v3\nuri: local-task", 1, "triple: missing"),
        ("cuda\nuri: cuda", "local\ncpu: host\ntriple: a-b\nuri: local-task", 4, "triple: only"),
    ],
)
def test_faulty_target_recipe_names_file_and_line(
    tmp_path: Path, old: str, new: str, line: int, words: str
) -> None:
    path = write(tmp_path, replaced(TARGET, old, new))
    with pytest.raises(UserError) as caught:
        load_target(path)
    assert str(caught.value).startswith(f"{path}:{line}: "), caught.value
    assert words in str(caught.value)


def test_target_recipe_is_read_as_written(tmp_path: Path) -> None:
    target = load_target(write(tmp_path, TARGET))
    assert target.flags == ("--iree-hal-target-device=cuda", "--iree-cuda-target=sm_80")
    assert target.safe_flags == (("--iree-hal-target-device=cuda", "--iree-opt-level=O0"),)
    assert resolve_target(str(tmp_path / "x.yaml")) == target


@pytest.mark.parametrize("text", ["", "- a\n", "just text\n", "\t"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match=r"x\.yaml:1: "):
        load_model(write(tmp_path, text))


def test_unreadable_bytes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"about: \xff\n")
    with pytest.raises(UserError, match="cannot be read as UTF-8"):
        load_model(tmp_path / "x.yaml")


def test_wrong_words_name_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model=mamba2-130: .*did you mean mamba2-130m"):
        resolve_model("mamba2-130")
    with pytest.raises(UserError, match=r"target=cuda-sm12: .*cuda-sm12[01], cuda-sm12"):
        resolve_target("cuda-sm12")
    with pytest.raises(UserError, match=r"target=zzz: .*expected one of cpu, "):
        resolve_target("zzz")
    with pytest.raises(UserError, match=r"shape=b1: .*mamba2 lists b4-p32\+256, b1-p32\+256"):
        resolve_shape("b1", resolve_model("mamba2"))
    with pytest.raises(UserError, match=r"weights=bf8: .*did you mean bf16"):
        resolve_weights("bf8", resolve_model("mamba2"), resolve_target("cpu"))
    with pytest.raises(UserError, match="no such file"):
        resolve_model(str(tmp_path / "gone.yaml"))
    with pytest.raises(UserError, match=r"config\.json is missing"):
        resolve_model(str(tmp_path))
    for word in ("", "hf:", "hf:x", "hf:a/b/c", "hf:a/b@", "hf:../b", "../mamba2", "mamba2.yaml"):
        with pytest.raises(UserError, match=r"^model="):
            resolve_model(word)


def test_hub_words_have_names_of_their_own() -> None:
    words = ["hf:a/b", "hf:c/b", "hf:a/b@v1", "hf:a/b@refs/pr/9"]
    models = [resolve_model(word) for word in words]
    assert [m.name for m in models] == ["a--b", "c--b", "a--b--v1", "a--b--refs-pr-9"]
    assert [m.revision for m in models] == [None, None, "v1", "refs/pr/9"]
    assert {m.source for m in models} == {"hf:a/b", "hf:c/b"}
    assert models[0].weights == "auto" and models[0].shapes == ("b1-p32+256",)


@pytest.mark.parametrize("name", ["plain", "with space", "mamba2", "ünïcode", "a:b"])
def test_checkpoint_directory_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    directory = tmp_path / name
    directory.mkdir()
    (directory / "config.json").write_text("{}", encoding="utf-8")
    full = resolve_model(str(directory))
    assert full.location == f"dir:{directory}"
    assert re.fullmatch(r"[A-Za-z0-9._-]+", full.name)
    assert str(tmp_path) not in full.source
    assert resolve_model(f"{directory}/") == full
    monkeypatch.chdir(directory)
    assert resolve_model(".") == full
    monkeypatch.chdir(tmp_path)
    assert resolve_model(f"./{name}") == full
    if name == "mamba2":  # a bare recipe name stays the recipe
        assert resolve_model(name).path == ROOT / "recipes/models/mamba2.yaml"


def test_defaults_are_the_model_in_the_repository_for_this_cpu() -> None:
    model = resolve_model(None)
    assert (model.name, resolve_target(None).name) == ("mamba2", "cpu")
    assert model.location == f"dir:{ROOT}/recipes/models/mamba2"
    assert resolve_shape(None, model).name == "b4-p32+256"


def test_missing_weight_types_are_substituted_by_name() -> None:
    model = resolve_model("mamba2")
    assert resolve_weights(None, model, resolve_target("cuda-sm121")) == ("bf16", None)
    used, notice = resolve_weights(None, model, resolve_target("vulkan"))
    assert (used, notice) == ("f32", "target vulkan has no bf16 weights: converting to f32 instead")
    assert resolve_weights("bf16", model, resolve_target("metal"))[0] == "f16"
    assert resolve_weights("f16", model, resolve_target("vulkan"))[0] == "f32"
    assert resolve_weights("f16", model, resolve_target("metal")) == ("f16", None)
    bare = resolve_model("hf:a/b")
    assert resolve_weights(None, bare, resolve_target("vulkan")) == ("auto", None)
    for target in every_target():
        for kind in WEIGHT_TYPES:
            used, notice = resolve_weights(kind, model, target)
            assert used in target.weights
            assert (used == kind) == (notice is None)


def test_triples_are_all_combinations_and_json() -> None:
    rows = json.loads(json.dumps(select.triples({})))
    assert len(rows) == sum(len(m.shapes) for m in every_model()) * len(names("targets"))
    assert {"model": "mamba2", "target": "cuda-sm121", "shape": "b4-p32+256"} in rows
    for row in rows:
        assert resolve_shape(row["shape"], resolve_model(row["model"])).name == row["shape"]


@given(
    st.integers(1, 9999),
    st.lists(st.integers(1, 99999), min_size=1, max_size=4),
    st.none() | st.integers(99999, 9999999),
)
def test_shape_names_round_trip(slots: int, chunks: list[int], context: int | None) -> None:
    tail = "" if context is None else f"-c{context}"
    shape = Shape.parse(f"b{slots}-p{'+'.join(map(str, chunks))}{tail}")
    assert shape == Shape(slots, tuple(sorted(set(chunks))), context)
    assert Shape.parse(shape.name) == shape


@pytest.mark.parametrize(
    "word",
    [
        *("", "b1", "b0-p1", "b1-p", "b1-p0", "b1-p01", "b1-p1+", "b1-p1-c", "b1-p1-c0", "B1-p1"),
        *("b1-p1 ", "b1-p1\n", "b-1-p1", "b1-p1-x2", "b1-p64-c32", "b1-c8-p1", "b٣-p1"),
    ],
)
def test_words_that_are_no_shape(word: str) -> None:
    with pytest.raises(ShapeError, match="shape"):
        Shape.parse(word)


def test_readme_carries_the_table_of_these_recipes() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert table.insert(text) == text, "run: python -m recipes.table README.md"


def test_table_command_rewrites_what_is_between_the_markers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"a\n{table.BEGIN}\nold\n{table.END}\nb\n", encoding="utf-8")
    assert table.main([str(readme)]) == 0
    text = readme.read_text(encoding="utf-8")
    assert text.startswith(f"a\n{table.BEGIN}\n") and text.endswith(f"\n{table.END}\nb\n")
    assert "old" not in text
    for name in names("models") + names("targets"):
        assert f"`{name}`" in text
    readme.write_text("no markers", encoding="utf-8")
    assert table.main([str(readme)]) == 1
    assert capsys.readouterr().err.startswith("error: README: markers")
