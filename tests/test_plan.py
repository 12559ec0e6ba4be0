"""`doit plan` and the estimates: what would run, why and how long, with nothing run or written."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import building
import pytest
from building import Place

from artifacts.estimate import RULES, rule_of
from artifacts.plan import ORDER
from emit.count import count
from recipes.resolve import resolve_model

pytestmark = pytest.mark.iree


def seen(home: Path) -> dict[str, tuple[int, int]]:
    """Every path under the working directory and the cache, with its size and mtime."""
    roots = [home / "work", home / "cache"]
    paths = [path for root in roots if root.exists() for path in [root, *root.rglob("*")]]
    return {str(p): (p.lstat().st_size, p.lstat().st_mtime_ns) for p in paths}


def planned(place: Place, *words: str) -> list[str]:
    """The lines of `doit plan`, which must leave everything as it is."""
    before = seen(place.home)
    done = place.doit("plan", *words)
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
    assert re.fullmatch(r"total: 9 stages, about [\d.]+ MB, [\d.]+ s", lines[-1]), lines[-1]


def test_of_what_is_not_part_of_the_build_and_what_is_not_known(tmp_path: Path) -> None:
    place = Place.new(tmp_path / "place")
    words = ("model=mamba2-2.7b", "target=cuda-sm90", "params=none", "shape=b1-p32+256")
    said = stages(planned(place, *words))
    assert said["convert"] == "done" and said["expect"].startswith("not part of this build")
    assert said["total"].startswith("3 stages, ")
    said = stages(planned(place, "model=hf:no/where", "shape=b1-p8"))
    assert said["compile"] == "will run after fetch, whose result it needs"
    assert said["total"].endswith("and 7 of which nothing is known yet")


def test_after_a_build_it_says_why_and_takes_the_log(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cold, _ = building.cold(tmp_path_factory.getbasetemp())
    place = cold.copy(tmp_path / "place")
    lines = planned(place)
    assert lines[-1] == "total: nothing to run, all of it is cached"
    assert place.built().err.count("cached: no input changed") == 1

    # Another target of the same model: the key field, and the time that compiling took.
    lines = planned(place, "target=cuda-sm90")
    said = stages(lines)
    assert said["emit"].startswith("will run, 1 of its inputs differ")
    assert lines[lines.index("  kernels  true -> false") + 1].endswith(
        f"(log of tiny/cpu/{building.SHAPE})"
    )
    took = {row["stage"]: row for row in building.log_rows(place.bundle) if not row["cached"]}
    estimate = lines[lines.index("compile: will run after emit, whose result it needs") + 1]
    assert f", {took['compile']['seconds']:.1f} s (log of tiny/cpu/" in estimate
    assert said["proof"].startswith("not part of this build, no cuda device")

    # Another weight type: scaled by the bytes of parameters, half as many in all matrices.
    lines = planned(place, "weights=bf16")
    convert = next(i for i, line in enumerate(lines) if line.startswith("convert ("))
    assert 'weights  "f32" -> "bf16"' in lines[convert + 1]
    size = sum(took["convert"]["outputs"].values()) / 1e3
    found = re.match(r"  about ([\d.]+) kB, .* \(log of .*, scaled by", lines[convert + 2])
    assert found and 0.45 * size < float(found[1]) < 0.6 * size, lines[convert : convert + 3]

    # Without build/ the sizes are those of the results, the times a rule's.
    shutil.rmtree(place.build)
    lines = planned(place, "weights=bf16")
    convert = next(i for i, line in enumerate(lines) if line.startswith("convert ("))
    assert "(size of the last result, time from " in lines[convert + 2]


def test_a_damaged_log_is_no_trouble(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cold, _ = building.cold(tmp_path_factory.getbasetemp())
    place = cold.copy(tmp_path / "place")
    log = place.bundle / "build.log.jsonl"
    log.write_text('{"stage": "compile"}\n[1]\nnull\n{"stage": 1, "cached": false, "seconds": "x"')
    lines = planned(place, "target=cuda-sm90")
    assert not [line for line in lines if "(log of" in line]


def test_rules_grow_with_the_model() -> None:
    for stage in ORDER:
        small, large = rule_of(stage, 10**6), rule_of(stage, 10**10)
        assert stage in RULES and small[0] <= large[0] and small[1] <= large[1]
    assert os.cpu_count()


def test_parameters_are_counted_from_the_config_alone() -> None:
    config = resolve_model("mamba2-130m").config
    assert config is not None
    counts = count(config)
    assert counts["matrix"] + counts["other"] == 128_989_632  # as published: 129 M
