"""Bad input through the real commands: one line that says what to do, and nothing left behind."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import building
import numpy as np
import pytest
import safetensors.numpy
from building import Done, Place, assert_no_leftovers, contents

from runtime import manifest as manifest_file
from runtime import vmfb

ROOT = building.ROOT
GENERATE = ("generate", "--tokens", "1,2", "--max-tokens", "2")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """An empty cache, no build, the tiny checkpoint."""
    return Place.new(tmp_path / "place")


@pytest.fixture
def built(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Place:
    """A copy of the session's one cold build."""
    cold, _ = building.cold(tmp_path_factory.getbasetemp())
    return cold.copy(tmp_path / "place")


def assert_one_line(done: Done, *parts: str) -> None:
    """It failed with one `error:` line that holds all `parts`, and without a traceback."""
    assert done.code not in (0, None) and done.code > 0, done
    assert len(done.errors) == 1, done.err
    for part in parts:
        assert part in done.errors[0], (part, done.errors[0])
    everything = done.out + done.err
    assert "Traceback" not in everything and "  File " not in everything


def assert_refused(place: Place, done: Done, *parts: str) -> None:
    """As `assert_one_line`, with nothing under build/ and no half-made file in the cache."""
    assert_one_line(done, *parts)
    assert not place.build.exists() or list(place.build.rglob("*")) == []
    assert_no_leftovers(place)


# Words -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["model=mamab2"], ["model=mamab2", "did you mean mamba2", "checkpoint directory"]),
        (["model=nowhere.yaml"], ["model=nowhere.yaml", "no such file"]),
        (["target=cuda-sm12"], ["target=cuda-sm12", "cuda-sm120", "cuda-sm121"]),
        (["target=cpux"], ["target=cpux", "did you mean cpu"]),
        (["shape=b2-p8x"], ["shape=b2-p8x", "expected b<slots>-p<chunk>", "tiny lists"]),
        (["shape=b0-p8"], ["shape=b0-p8", "b0-p8"]),
        (["weights=f33"], ["weights=f33", "did you mean f32"]),
        (["modle=tiny"], ["modle=tiny", "did you mean model"]),
        (["params=no"], ["params=no", "expected none"]),
        (["proof=off"], ["proof=off", "expected none"]),
    ],
    ids=lambda value: value[0].partition("=")[2] if value[0].count("=") == 1 else None,
)
def test_wrong_words_are_refused_before_any_work(
    place: Place, words: list[str], parts: list[str]
) -> None:
    done = place.doit("build", *words)
    assert_refused(place, done, *parts)
    assert done.started == [] and done.ran == set()
    assert not place.cache.exists()


def test_a_wrong_size_for_gc(place: Place) -> None:
    done = place.doit("gc", "max_size=10Q")
    assert_one_line(done, "10Q", "such as 10G")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "about: x\nsource: dir:tiny\nweights: f32\nshapes: [b1-p8]\nchunk: 8\n",
            [":5: ", "chunk"],
        ),
        ("about: x\nsource: dir:tiny\nshapes: [b1-p8]\n", ["weights"]),
        ("about: x\nsource: dir:tiny\nweights: f31\nshapes: [b1-p8]\n", [":3: ", "f31", "f32"]),
        ("about: [\n", ["mine.yaml"]),
    ],
    ids=["unknown_key", "missing_key", "wrong_value", "not_yaml"],
)
def test_a_bad_recipe_is_named_with_its_line(place: Place, text: str, parts: list[str]) -> None:
    (place.work / "mine.yaml").write_text(text)
    done = place.doit("build", "model=mine.yaml")
    assert_refused(place, done, "mine.yaml", *parts)
    assert not place.cache.exists()


def test_a_bad_target_recipe_is_named_with_its_line(place: Place) -> None:
    text = (ROOT / "recipes" / "targets" / "cpu.yaml").read_text()
    (place.work / "mine.yaml").write_text(text.replace("runs_here:", "runs_her:"))
    assert_refused(place, place.doit("build", "target=mine.yaml"), "mine.yaml:", "runs_her")


def test_a_flag_the_compiler_does_not_know(built: Place) -> None:
    text = (ROOT / "recipes" / "targets" / "cpu.yaml").read_text()
    (built.work / "mine.yaml").write_text(text.replace("--iree-opt-level=O2", "--iree-no-such"))
    before = contents(built.build)
    done = built.doit("build", "target=mine.yaml")
    assert_one_line(done, "iree-compile", "--iree-no-such")
    assert contents(built.build) == before
    assert_no_leftovers(built)


# Checkpoints -------------------------------------------------------------------------------------


def edit_config(tiny: Path, **changes: Any) -> None:
    path = tiny / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def edit_tensors(tiny: Path) -> None:
    """One tensor missing, one too many, one transposed."""
    path = tiny / "model.safetensors"
    tensors = dict(safetensors.numpy.load_file(path))
    del tensors["backbone.layers.1.mixer.D"]
    tensors["backbone.layers.9.mixer.D"] = np.zeros(8, np.float32)
    name = "backbone.layers.0.mixer.in_proj.weight"
    tensors[name] = np.ascontiguousarray(tensors[name].T)
    safetensors.numpy.save_file(tensors, path)


def header(tiny: Path) -> tuple[dict[str, Any], bytes]:
    data = (tiny / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def write(tiny: Path, head: dict[str, Any], body: bytes, lie: int = 0) -> None:
    text = json.dumps(head).encode()
    (tiny / "model.safetensors").write_bytes(struct.pack("<Q", len(text) + lie) + text + body)


def overlap(tiny: Path) -> None:
    head, body = header(tiny)
    first, second = sorted(
        (name for name in head if name != "__metadata__"),
        key=lambda name: head[name]["data_offsets"][0],
    )[:2]
    begin, end = head[second]["data_offsets"]
    assert head[first]["data_offsets"][1] == begin
    head[second]["data_offsets"] = [begin - 4, end - 4]
    write(tiny, head, body)


def truncate(tiny: Path) -> None:
    path = tiny / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def indexed(name: str) -> Callable[[Path], None]:
    def make(tiny: Path) -> None:
        head, _ = header(tiny)
        (tiny / "model.safetensors").rename(tiny.parent / "outside.safetensors")
        names = {tensor: name for tensor in head if tensor != "__metadata__"}
        content = {"metadata": {}, "weight_map": names}
        (tiny / "model.safetensors.index.json").write_text(json.dumps(content))

    return make


def pickles(tiny: Path) -> None:
    (tiny / "model.safetensors").rename(tiny / "pytorch_model.bin")


CHECKPOINTS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "unsupported_config": (
        lambda tiny: edit_config(tiny, use_rope=True, hidden_act="tanh", sliding_window=7),
        ["config.json", "use_rope", "sliding_window"],
    ),
    "unsupported_value": (
        lambda tiny: edit_config(tiny, hidden_act="tanh", n_groups=3),
        ["config.json", "hidden_act", "tanh", "expected one of", "n_groups"],
    ),
    "unknown_family": (
        lambda tiny: edit_config(tiny, model_type="gpt2"),
        ["config.json", "model_type", "gpt2"],
    ),
    "no_family": (lambda tiny: edit_config(tiny, model_type=...), ["config.json", "model_type"]),
    "config_not_json": (
        lambda tiny: (tiny / "config.json").write_text('{"model_type": "mamba2",'),
        ["config.json"],
    ),
    "config_not_text": (
        lambda tiny: (tiny / "config.json").write_bytes(b"\xff\xfe{}"),
        ["config.json"],
    ),
    "config_is_a_list": (lambda tiny: (tiny / "config.json").write_text("[]"), ["config.json"]),
    "no_config": (lambda tiny: (tiny / "config.json").unlink(), ["config.json", "missing"]),
    "tensors": (
        edit_tensors,
        ["layers.1.mixer.D", "layers.9.mixer.D", "layers.0.mixer.in_proj.weight"],
    ),
    "truncated": (truncate, ["model.safetensors"]),
    "header_length_lies": (
        lambda tiny: write(tiny, *header(tiny), lie=1 << 40),
        ["model.safetensors", "header"],
    ),
    "overlapping": (overlap, ["model.safetensors", "overlap"]),
    "index_climbs": (indexed("../outside.safetensors"), ["index.json", "../outside.safetensors"]),
    "index_absolute": (indexed("/etc/passwd"), ["index.json", "/etc/passwd"]),
    "index_names_a_missing_shard": (indexed("model-1.safetensors"), ["model-1.safetensors"]),
    "pickles_only": (pickles, ["pytorch_model.bin", "safetensors"]),
    "generation_config_not_json": (
        lambda tiny: (tiny / "generation_config.json").write_bytes(b"\xff{"),
        ["generation_config.json"],
    ),
}
# Those that the build finds itself, before it starts a process; the others take seconds each.
FAST = {"no_config", "pickles_only", "index_climbs", "index_absolute", "config_not_json",
        "config_not_text", "config_is_a_list", "no_family", "unknown_family"}  # fmt: skip
DEFAULT = {*FAST, "tensors", "unsupported_config", "overlapping"}


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[] if c in DEFAULT else [pytest.mark.slow]) for c in CHECKPOINTS],
)
def test_a_bad_checkpoint_is_refused(place: Place, case: str) -> None:
    spoil, parts = CHECKPOINTS[case]
    spoil(place.work / "tiny")
    done = place.doit("build")
    assert_refused(place, done, *parts)
    assert not (place.cache / "actions").exists() or not any(
        record.stage in ("convert", "compile")
        for key in place.store.recent_keys()
        if (record := place.store.peek(key)) is not None
    )


@pytest.mark.iree
def test_a_checkpoint_spoilt_after_a_build_leaves_the_bundle(built: Place) -> None:
    before = contents(built.build)
    edit_tensors(built.work / "tiny")
    assert_one_line(built.doit("build"), "layers.1.mixer.D", "layers.9.mixer.D")
    assert contents(built.build) == before
    assert_no_leftovers(built)


# Bundles -----------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    """Change a byte in the middle, in a file of its own (links share it with the cache)."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40
    path.unlink()
    path.write_bytes(data)


@pytest.mark.iree
@pytest.mark.parametrize("name", ["model.vmfb", "params.irpa", "reference.json"])
def test_a_changed_byte_is_found_by_verify(built: Place, name: str) -> None:
    flip(built.bundle / name)
    done = built.scanwright("verify", built.bundle)
    assert done.code == 1 and done.errors == [] and "Traceback" not in done.err
    (bad,) = [line for line in done.out.splitlines() if line.lstrip().startswith("FAIL")]
    assert name in bad and "sha256" in bad and "expected" in bad
    command = "doit build model=tiny target=cpu shape=b2-p8"
    assert f"verify: FAILED: the bundle is damaged; rebuild it: {command}" in done.out + done.err


@pytest.mark.iree
def test_a_changed_module_is_not_run(built: Place) -> None:
    flip(built.bundle / "model.vmfb")
    done = built.scanwright(*GENERATE, built.bundle)
    assert_one_line(done, "model.vmfb", "damaged", "doit build model=tiny target=cpu shape=b2-p8")


@pytest.mark.iree
def test_changed_params_are_not_run(built: Place) -> None:
    flip(built.bundle / "params.irpa")
    done = built.scanwright(*GENERATE, built.bundle)
    assert_one_line(done, "params.irpa", "damaged", "doit build model=tiny target=cpu shape=b2-p8")


@pytest.mark.parametrize("task", ["build", "explain", "gc"])
def test_a_cache_that_is_a_file_is_one_line(tmp_path: Path, task: str) -> None:
    place = Place.new(tmp_path / "place")
    place.cache.write_text("not a directory")
    assert_one_line(place.doit(task), str(place.cache), "SCANWRIGHT_CACHE")


def test_a_changed_manifest_is_refused(built: Place) -> None:
    path = built.bundle / "manifest.json"
    path.write_text(path.read_text().replace('"schema": 4', '"schema": 4, "extra": 2'))
    done = built.scanwright(*GENERATE, built.bundle)
    assert_one_line(done, "manifest.json", "extra")


def edit_manifest(bundle: Path, **changes: Any) -> None:
    manifest = dataclasses.replace(manifest_file.load(bundle), **changes)
    path = bundle / "manifest.json"
    path.unlink()
    path.write_text(manifest_file.dumps(manifest))


@pytest.mark.iree
def test_another_bytecode_version_names_both_and_the_command(built: Place) -> None:
    path = built.bundle / "model.vmfb"
    data = vmfb.with_version(path.read_bytes(), 3, 1)
    path.unlink()
    path.write_bytes(data)
    manifest = manifest_file.load(built.bundle)
    own = manifest.target.bytecode_version
    module = dataclasses.replace(
        manifest.files.module, sha256=hashlib.sha256(data).hexdigest(), size=len(data)
    )
    edit_manifest(
        built.bundle,
        files=dataclasses.replace(manifest.files, module=module),
        target=dataclasses.replace(manifest.target, bytecode_version="3.1"),
    )
    for command in ([*GENERATE, built.bundle], ["verify", built.bundle]):
        done = built.scanwright(*command)
        assert_one_line(done, "3.1", own, "doit build model=tiny target=cpu shape=b2-p8")


@pytest.mark.iree
def test_a_device_that_is_not_there_lists_those_that_are(built: Place) -> None:
    target = manifest_file.load(built.bundle).target
    changed = dataclasses.replace(target, device="hip", uri="hip", features=())
    edit_manifest(built.bundle, target=changed)
    done = built.scanwright(*GENERATE, built.bundle)
    assert_one_line(done, "hip", "local-task")


@pytest.mark.iree
def test_a_program_behind_a_task_tells_its_error_once(built: Place) -> None:
    assert_one_line(built.doit("verify", "device=nosuch"), "device 'nosuch'", "local")


# No space ----------------------------------------------------------------------------------------


def on_small_disk(place: Place, where: Path, size: str, *words: str) -> tuple[Done, list[str]]:
    """`doit build` on a new disk of `size` at `where`, and what is under build/ then."""
    where.mkdir(parents=True, exist_ok=True)
    listing = place.home / "listing"
    script = (
        f'mount -t tmpfs -o size={size} none "{where}" || exit 99; "$@"; code=$?; '
        f'find "{place.build}" -type f ! -name .lock > "{listing}"; exit $code'
    )
    done = place.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", script, "sh",
         *place.argv("build", *words)]
    )  # fmt: skip
    if done.code == 99 or shutil.which("unshare") is None:
        pytest.skip("no right to mount a small disk here")
    return done, listing.read_text().splitlines()


@pytest.fixture(scope="session")
def mounts() -> None:
    """Skips where an unprivileged mount is not possible."""
    argv = ["unshare", "--mount", "--map-root-user", "mount", "-t", "tmpfs", "none", "/mnt"]
    if shutil.which("unshare") is None or subprocess.run(argv, capture_output=True).returncode:
        pytest.skip("no right to mount a small disk here")


@pytest.mark.usefixtures("mounts")
@pytest.mark.parametrize(
    "size", ["64k", pytest.param("640k", marks=pytest.mark.slow),
             pytest.param("1200k", marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_cache_without_space(place: Place, size: str) -> None:
    done, left = on_small_disk(place, place.cache, size, "weights=f32")
    assert_one_line(done, "no space to write", "SCANWRIGHT_CACHE")
    assert left == []


@pytest.mark.iree
@pytest.mark.usefixtures("mounts")
def test_a_build_directory_without_space(built: Place) -> None:
    shutil.rmtree(built.build)
    done, left = on_small_disk(built, built.build, "100k")
    assert_one_line(done, "no space to write", str(built.build.name))
    assert left == []
