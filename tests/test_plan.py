"""`doit plan` and the estimates: what would run, why and how long, with nothing run or written."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import building
import pytest
from building import Place

from artifacts.estimate import RULES, rule_of
from artifacts.looking import Looking
from artifacts.plan import ORDER
from emit.count import count
from recipes.resolve import resolve_model

pytestmark = pytest.mark.iree
BUILT = "target=cuda-sm90"


def seen(home: Path) -> dict[str, tuple[int, int]]:
    """Every path under the working directory and the cache, with its size and mtime."""
    roots = [home / "work", home / "cache"]
    paths = [path for root in roots if root.exists() for path in [root, *root.rglob("*")]]
    return {str(p): (p.lstat().st_size, p.lstat().st_mtime_ns) for p in paths}


def planned(place: Place, *words: str, env: dict[str, str] | None = None) -> list[str]:
    """The lines of `doit plan`, which must leave everything as it is."""
    before = seen(place.home)
    done = place.doit("plan", *words, env=env)
    assert done.code == 0, done.err
    assert seen(place.home) == before
    assert not [argv for argv in done.started if "emit.count" not in argv], done.started
    return done.out.splitlines()


def stages(lines: list[str]) -> dict[str, str]:
    """Stage → what is said of it."""
    pairs = [re.match(r"([a-z-]+)(?: \([^)]*\))?: (.*)", line) for line in lines]
    return {match[1]: match[2] for match in pairs if match}


def test_before_the_first_build_it_counts_parameters(tmp_path: Path) -> None:
    place = Place.new(tmp_path / "place")
    lines = planned(place)
    assert not place.cache.exists() and not place.build.exists()
    said = stages(lines)
    assert said["fetch"] == "done" and said["convert"].startswith("will run after weight-type")
    assert set(ORDER) | {"objects"} < said.keys()
    config = json.loads((place.work / "tiny" / "config.json").read_text())
    config["time_step_limit"] = [0.0, float("inf")]
    counts = count(config)
    numbers = counts["matrix"] + counts["other"]
    assert f"(from {numbers:,} parameters, 0.3 MB)" in lines[lines.index(
        "compile: will run after weight-type, whose result it needs") + 1]  # fmt: skip
    assert re.fullmatch(r"total: 8 stages, about [\d.]+ MB, [\d.]+ s", lines[-1]), lines[-1]


def test_of_what_is_not_part_of_the_build_and_what_is_not_known(tmp_path: Path) -> None:
    place = Place.new(tmp_path / "place")
    words = ("model=mamba2-2.7b", "target=cuda-sm90", "params=none", "shape=b1-p32+256")
    said = stages(planned(place, *words))
    assert said["convert"] == "done" and said["expect"].startswith("not part of this build")
    assert said["total"].startswith("3 stages, ")
    lines = planned(place, "target=cuda-sm80,cuda-sm89")
    heads = [line.split()[1] for line in lines if line.startswith("model=")]
    assert heads == ["target=cuda-sm80", "target=cuda-sm89"]
    assert sum(line.startswith("total: ") for line in lines) == 2
    assert lines[-1].startswith("what several targets have in common runs once; ")
    said = stages(planned(place, "model=hf:no/where", "shape=b1-p8"))
    assert said["compile"] == "will run after fetch, whose result it needs"
    assert said["total"].endswith("and 8 of which nothing is known yet")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A place with one build, of a target that is not run here; to be copied only."""
    place = Place.new(tmp_path_factory.mktemp("built") / "place")
    done = place.built(BUILT)
    assert "cached: " not in done.err
    return place


def test_after_a_build_it_says_why_and_takes_the_log(built: Place, tmp_path: Path) -> None:
    place = built.copy(tmp_path / "place")
    lines = planned(place, BUILT)
    assert lines[-1] == "total: nothing to run, all of it is cached"
    assert place.built(BUILT).err.count("cached: no input changed") == 1

    # Another target: the key field, and the time that compiling took for the first.
    lines = planned(place, "target=cuda-sm80")
    at = next(i for i, line in enumerate(lines) if line.startswith("compile ("))
    assert "will run, 1 of its inputs differ from the last cached compile" in lines[at]
    assert lines[at + 1].endswith('"--iree-cuda-target=sm_89" -> "--iree-cuda-target=sm_80"')
    bundle = place.build / "tiny" / "cuda-sm90" / building.SHAPE
    took = {row["stage"]: row for row in building.log_rows(bundle) if not row["cached"]}
    seconds = took["compile"]["seconds"]
    assert lines[at + 2].endswith(f", {seconds:.1f} s (log of tiny/cuda-sm90/{building.SHAPE})")
    said = stages(lines)
    assert said["emit"] == "done" and said["proof"].startswith("not part of this build, no cuda")
    assert said["total"].startswith("2 stages, ")  # and the bundle

    # Another weight type: scaled by the bytes of parameters, half as many in all matrices.
    lines = planned(place, BUILT, "weights=bf16")
    at = next(i for i, line in enumerate(lines) if line.startswith("convert ("))
    assert lines[at + 1].split() == ["weights", '"f32"', "->", '"bf16"']
    size = sum(took["convert"]["outputs"].values()) / 1e3
    found = re.match(r"  about ([\d.]+) kB, .* \(log of .*, scaled by", lines[at + 2])
    assert found and 0.45 * size < float(found[1]) < 0.6 * size, lines[at : at + 3]

    # Without build/ the sizes are those of the results, the times a rule's.
    shutil.rmtree(place.build)
    lines = planned(place, BUILT, "weights=bf16")
    at = next(i for i, line in enumerate(lines) if line.startswith("convert ("))
    assert "(size of the last result, time from " in lines[at + 2]


def test_what_the_remote_cache_has_is_told(built: Place, tmp_path: Path) -> None:
    place, remote = built.copy(tmp_path / "place", build=False), tmp_path / "remote"
    remote.mkdir()
    settings = {"SCANWRIGHT_REMOTE": str(remote), "SCANWRIGHT_REMOTE_WRITE": "1"}
    shutil.rmtree(place.cache)
    assert place.doit("emit", BUILT, env=settings).code == 0
    shutil.rmtree(place.cache)
    said = stages(planned(place, BUILT, env=settings))
    assert not place.cache.exists()
    assert said["emit"] == "done, in the remote cache", said
    assert said["compile"].startswith("will run, no compile is in the cache yet")


def test_of_a_store_that_is_looked_at_nothing_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"bytes")
    with Looking(tmp_path / "cache") as cache:
        assert cache.put_bytes(b"bytes") == cache.put_file(tmp_path / "file")
        assert not cache.verify(cache.put_bytes(b"bytes"))
    assert not (tmp_path / "cache").exists()


def test_a_damaged_log_is_no_trouble(built: Place, tmp_path: Path) -> None:
    place = built.copy(tmp_path / "place")
    log = place.build / "tiny" / "cuda-sm90" / building.SHAPE / "build.log.jsonl"
    log.write_text('{"stage": "compile"}\n[1]\nnull\n{"stage": 1, "cached": false, "seconds": "x"')
    lines = planned(place, "target=cuda-sm80")
    assert lines[-1].startswith("total: 2 stages") and not [x for x in lines if "(log of" in x]


def test_rules_grow_with_the_model() -> None:
    for stage in ORDER:
        small, large = rule_of(stage, 10**6), rule_of(stage, 10**10)
        assert stage in RULES and small[0] <= large[0] and small[1] <= large[1]


def test_parameters_are_counted_from_the_config_alone() -> None:
    config = resolve_model("mamba2-130m").config
    assert config is not None
    counts = count(config)
    assert counts["matrix"] + counts["other"] == 128_989_632  # as published: 129 M
