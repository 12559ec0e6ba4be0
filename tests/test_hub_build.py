"""A build from a hub repository: the real client, a hub on this machine, then no hub at all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from building import CHECKPOINT, SHAPE, Place
from hub_server import HubServer

pytestmark = pytest.mark.iree
RECIPE = """about: a tiny model on a hub
family: mamba2
source: hf:org/tiny
revision: main
weights: f32
shapes: [b2-p8]
config: {CONFIG}
"""
CONFIG = (
    "{vocab_size: 256, hidden_size: 64, num_hidden_layers: 3, num_heads: 8, head_dim: 16, "
    "expand: 2, state_size: 16, n_groups: HERE, conv_kernel: 4, layer_norm_epsilon: 1.0e-5, "
    "tie_word_embeddings: false}"
)


def files() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in CHECKPOINT.iterdir()}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """No checkpoint directory: a recipe that names the hub, in a YAML file."""
    place = Place.new(tmp_path / "place")
    shutil.rmtree(place.work / "tiny")
    recipe(place, n_groups=2)
    return place


def recipe(place: Place, n_groups: int) -> None:
    text = RECIPE.replace("{CONFIG}", CONFIG.replace("HERE", str(n_groups)))
    (place.work / "tiny.yaml").write_text(text)


def test_build_downloads_once_and_then_needs_no_hub(place: Place) -> None:
    with HubServer() as hub:
        hub.add("org/tiny", files())
        online = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        place.built("model=tiny.yaml", env=online)
        assert hub.downloads().count("model.safetensors") == 1
    manifest = (place.bundle / "manifest.json").read_text()
    assert '"source": "hf:org/tiny"' in manifest and '"status": "passed"' in manifest
    assert (place.work / "tiny.lock.json").is_file()
    shutil.rmtree(place.build)
    again = place.built("model=tiny.yaml", env={"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert again.ran == {"bundle", "build"}
    assert (place.bundle / "manifest.json").read_text() == manifest


def test_config_that_is_not_the_recipes_is_refused(place: Place) -> None:
    recipe(place, n_groups=4)
    with HubServer() as hub:
        hub.add("org/tiny", files())
        online = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        done = place.doit("build", "model=tiny.yaml", env=online)
    assert done.code != 0 and len(done.errors) == 1
    assert "n_groups = 2 (recipe: 4)" in done.errors[0]
    assert not place.build.exists()


def test_without_a_hub_the_weight_free_build_is_named_and_works(place: Place) -> None:
    offline = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    done = place.doit("build", "model=tiny.yaml", env=offline)
    assert done.code != 0 and len(done.errors) == 1 and "params=none" in done.errors[0]
    assert not place.build.exists()
    free = place.built("model=tiny.yaml", "params=none", "weights=bf16", env=offline)
    assert "fetch" not in free.ran
    bundle = place.build / "tiny" / "cpu" / SHAPE
    assert not (bundle / "params.irpa").exists()
    assert '"weights": "bf16"' in (bundle / "manifest.json").read_text()
    verified = place.scanwright("verify", bundle)
    assert verified.code == 0, verified.out + verified.err
