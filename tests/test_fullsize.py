"""Full-size models compile from their shapes alone, and what a compile costs grows with depth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bundles
import pytest
import yaml

from artifacts.compile import dump_ptx
from artifacts.link import link
from emit.entry import Model, entries, param_structs
from emit.shape import Shape
from emit.stablehlo import lower
from recipes.resolve import resolve_target
from runtime import manifest as manifests

ROOT = Path(__file__).resolve().parent.parent
LIMIT_BYTES = 4e9  # of the emitting process and of the compiler
# The largest published model of each family and its parameters. Slow tests compile some of them for
# one target, thorough ones all for both. One chunk size, as each is a graph of its own; what the
# recipes' shapes cost is in benchmarks/NOTES.md.
MODELS = {
    "mamba-codestral-7b": (7.3e9, None),
    "falcon-mamba-7b": (7.27e9, None),
    "nemotron-3-super-120b-a12b": (120.7e9, None),
    "jamba-1.7-large": (398.6e9, None),
    "falcon-h1-34b": (33.6e9, None),
    "plamo-2-8b": (9.53e9, None),
    "qwen3-next-80b-a3b-instruct": (79.67e9, None),
    "kimi-linear-48b-a3b-instruct": (49.12e9, "cpu"),
    "rwkv7-g1g-13.3b": (13.27e9, None),
    "recurrentgemma-9b": (8.58e9, None),
}
BUILDS = [
    pytest.param(name, t, marks=pytest.mark.slow if t == often else pytest.mark.thorough)
    for name, (_, often) in MODELS.items()
    for t in ("cuda-sm121", "cpu")
]


def rows(bundle: Path, stage: str) -> list[dict[str, Any]]:
    """What the build log says of a stage that ran."""
    lines = (bundle / "build.log.jsonl").read_text().splitlines()
    found = [row for row in map(json.loads, lines) if row["stage"] == stage]
    return [row for row in found if not row["cached"]]


@pytest.mark.iree
@pytest.mark.parametrize(("model", "target"), BUILDS)
def test_full_size_models_compile_from_their_shapes(model, target, tmp_path):
    words = [f"model={model}", f"target={target}", "shape=b1-p32", "weights=bf16", "params=none"]
    done = bundles.doit(["build", *words], tmp_path, tmp_path / "cache")
    bundle = bundles.built(done, tmp_path)
    manifest = manifests.load(bundle)
    assert manifest.files.params is None and manifest.numerics.weights == "bf16"
    elements = sum(p.nbytes // manifests.DTYPE_BYTES[p.dtype] for p in manifest.params)
    assert elements == pytest.approx(MODELS[model][0], rel=0.02)
    (emit,), (compiled,) = rows(bundle, "emit"), rows(bundle, "compile")
    module = (bundle / "model.vmfb").stat().st_size
    assert compiled["outputs"] == {"model.vmfb": module} and module < 20e6
    assert compiled["seconds"] > 0 and emit["process_seconds"] > 0
    for row in (emit, compiled):  # the compiler maps 100 MB of itself, Python with JAX as much
        assert 50e6 < row["peak_rss_bytes"] < LIMIT_BYTES


def linked(layers: int) -> str:
    """The 130m model with other layers, linked; small in width so that it compiles fast."""
    recipe = yaml.safe_load((ROOT / "recipes" / "models" / "mamba2-130m.yaml").read_text())
    changed = {"num_hidden_layers": layers, "hidden_size": 64, "num_heads": 8, "head_dim": 16}
    changed |= {"state_size": 16, "vocab_size": 256}
    model = Model.of({"model_type": recipe["family"], **recipe["config"], **changed})
    found = entries(model, Shape.parse("b2-p32"))
    structs = param_structs(model, model.storage("bf16"))
    return link([(entry.name, lower(entry, structs)) for entry in found])


def kernels(layers: int, out: Path) -> int:
    """How many different kernels the module of a model so deep has."""
    files = dump_ptx(linked(layers), resolve_target("cuda-sm121").flags, out)
    return sum(path.read_text().count(".visible .entry") for path in files)


@pytest.mark.iree
def test_layers_share_their_kernels(tmp_path):
    """The time of a compile is that of its kernels; layers of one kind must not add any."""
    few, more = kernels(3, tmp_path / "3"), kernels(6, tmp_path / "6")
    assert few == more and few > 20


def test_text_grows_by_a_constant_a_layer():
    """No unrolled loop over the layers squares anything."""
    sizes = [len(linked(layers)) for layers in (4, 8, 16)]
    first, second = sizes[1] - sizes[0], sizes[2] - sizes[1]
    assert second == pytest.approx(2 * first, rel=0.05)
