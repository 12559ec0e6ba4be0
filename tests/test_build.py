"""`doit build` with its cache: what runs again and what does not, damage, races and kills."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import building
import pytest
from building import Done, Place, assert_no_leftovers, assert_right, contents, log_rows

pytestmark = pytest.mark.iree
STAGES = {"convert", "emit", "compile", "bundle"}


@pytest.fixture
def cold(tmp_path_factory: pytest.TempPathFactory) -> tuple[Place, Done]:
    """The one cold build of the session; read only."""
    return building.cold(tmp_path_factory.getbasetemp())


@pytest.fixture
def place(cold: tuple[Place, Done], tmp_path: Path) -> Place:
    """A copy of the place of the cold build, cache and bundle included."""
    return cold[0].copy(tmp_path / "place")


@pytest.fixture
def right(cold: tuple[Place, Done]) -> dict[str, str]:
    """The digests of the files of a right bundle."""
    return contents(cold[0].bundle)


def assert_ran(done: Done, stages: set[str]) -> None:
    assert done.ran - {"build"} == stages, done.err


def assert_from_cache(done: Done) -> None:
    """No process was started, and doit's own imported nothing heavy."""
    assert done.started == []
    (process,) = done.processes
    modules = set(process["modules"])
    assert "artifacts.store" in modules  # the audit sees what there is
    assert {m.partition(".")[0] for m in modules} & set(building.HEAVY) == set()
    ours = {m for m in modules if m.partition(".")[0] in ("runtime", "emit")}
    # what reads and writes a bundle's files, and what would tell of a download or a compile
    read = ("errors", "flags", "manifest", "origin", "strict", "uncollected", "vmfb", "progress")
    assert ours <= {"runtime", *(f"runtime.{name}" for name in read)}


# What runs ---------------------------------------------------------------------------------------


def test_a_cold_build_runs_every_stage_and_its_bundle_is_proven(cold: tuple[Place, Done]) -> None:
    place, done = cold
    assert_ran(done, {*STAGES})
    assert done.out == f"bundle: {place.bundle.relative_to(place.work)}\n"
    assert done.errors == []
    manifest = assert_right(place.bundle)
    assert set(manifest.functions) == set(building.ENTRIES)
    assert_no_leftovers(place)
    # The audit that the tests below rely on sees the programs and what they import.
    assert any("iree-compile" in line for line in done.started)
    assert any("-m emit graphs" in line for line in done.started)
    assert any("jax" in process["modules"] for process in done.processes)
    rows = {row["stage"]: row for row in log_rows(place.bundle) if not row.get("cached")}
    assert {"convert", "emit", "expect", "compile", "proof"} <= rows.keys()
    assert rows["compile"]["peak_rss_bytes"] > 0 and rows["compile"]["seconds"] > 0


def test_the_log_has_the_command_of_every_process(cold: tuple[Place, Done]) -> None:
    """Of all but the compiler's run that asks which CPU this is; and what the proof measured."""
    place, done = cold
    (build,) = (p for p in done.processes if p["argv"][1:] == place.argv("build")[3:])
    started = [argv for event, argv in build["started"] if event == "subprocess.Popen"]
    launched = [argv[7:] for argv in started if argv[1:4] == ["-I", "-S", "-c"]]
    rows = log_rows(place.bundle)
    logged = [command["command"] for row in rows for command in row.get("commands", ())]
    missing = [argv for argv in launched if shlex.join(argv) not in logged]
    assert len(launched) == len(started) == len(logged) + len(missing) > 6
    assert all("iree-compile" in argv[0] for argv in missing) and len(missing) <= 1
    (proof,) = (row for row in rows if row["stage"] == "proof")
    assert proof["compared"] > 20 and {"logits", "argmax"} < proof["worst"].keys()
    worst = proof["worst"]["logits"]
    assert 0 < worst["error"] < worst["tolerance"]


def test_the_report_of_builds(place: Place) -> None:
    """What it says of the bundle that is here now, after another was."""
    place.built("weights=f16")
    (row,) = (row for row in log_rows(place.bundle) if row["stage"] == "proof" and not row["cached"]
              and row["module"] == manifest_digest(place, "module"))  # fmt: skip
    done = place.doit("report")
    assert done.code == 0 and done.out == "build/report.html\n"
    page = (place.build / "report.html").read_text(encoding="utf-8")
    assert f"{row['worst']['logits']['error']:.1e}, " in page
    assert "tiny/cpu/b2-p8" in page and "max logit difference" in page and "iree-compile" in page
    modules = {m.partition(".")[0] for m in done.processes[-1]["modules"]}
    assert modules & {"jax", "iree"} == set()


def manifest_digest(place: Place, name: str) -> str:
    """The digest of a file of the place's bundle."""
    return json.loads((place.bundle / "manifest.json").read_text())["files"][name]["sha256"]


def test_a_second_build_runs_nothing(place: Place) -> None:
    def stamps() -> dict[str, tuple[int, int]]:
        return {str(p): (p.stat().st_ino, p.stat().st_mtime_ns) for p in place.build.rglob("*")}

    before, started = stamps(), time.perf_counter()
    done = place.built()
    print(f"warm build: {time.perf_counter() - started:.2f} s")
    assert_ran(done, set())
    assert_from_cache(done)
    assert stamps() == before


def test_what_a_build_takes_away_is_told(place: Place) -> None:
    """The weights of a bundle, or the bundle of another model in a directory of the same name."""
    done = place.built("params=none", "--no-proof")
    assert "replaced a bundle with weights by one without (params=none)" in done.err
    assert "replaced" not in place.built("params=none", "--no-proof").err
    config = place.work / "tiny" / "config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps(content | {"layer_norm_epsilon": 2e-5}))
    done = place.built("params=none", "--no-proof")
    assert "replaced the bundle of another model (mamba2)" in done.err


def test_a_deleted_bundle_comes_back_from_the_cache(place: Place, right: dict[str, str]) -> None:
    shutil.rmtree(place.build)
    done = place.built()
    assert_ran(done, {"bundle"})
    assert_from_cache(done)
    assert contents(place.bundle) == right
    files = [place.bundle / "params.irpa", place.bundle / "model.vmfb"]
    blobs = [place.blob("convert", "params"), place.blob("compile", "model.vmfb")]
    assert all(a.samefile(b) for a, b in zip(files, blobs, strict=True))  # links, not copies


def test_new_weights_compile_nothing(place: Place, right: dict[str, str]) -> None:
    place.scale_weights(1.01)
    lines = place.doit("explain").out.splitlines()
    kind = next(i for i, line in enumerate(lines) if line.startswith("weight-type (model=tiny"))
    assert "files.model.safetensors" in lines[kind + 1]
    lines = place.doit("explain", "weights=f32").out.splitlines()
    convert = next(i for i, line in enumerate(lines) if line.startswith("convert (model=tiny"))
    assert "files.model.safetensors" in lines[convert + 1]
    assert "emit: done" in lines
    before = len(log_rows(place.bundle))
    done = place.built()
    assert not any("iree-compile" in line for line in done.started)
    assert not any("emit graphs" in line for line in done.started)
    assert any("runtime.probe check" in line for line in done.started)  # but it is proven again
    now = contents(place.bundle)
    assert now["model.vmfb"] == right["model.vmfb"]
    assert now["params.irpa"] != right["params.irpa"]
    assert now["reference.json"] != right["reference.json"]
    assert_right(place.bundle)
    rows = log_rows(place.bundle)[before:]
    assert {row["cached"] for row in rows if row["stage"] == "compile" and "cached" in row} == {
        True
    }
    assert any(row["stage"] == "proof" and row.get("cached") is False for row in rows)


def test_without_proof_the_manifest_says_so(place: Place, right: dict[str, str]) -> None:
    for words in (["--no-proof"], ["proof=none"]):
        done = place.built(*words)
        assert_from_cache(done)
        proof = json.loads((place.bundle / "manifest.json").read_text())["proof"]
        assert (proof["status"], proof["reason"]) == ("disabled", "--no-proof")
        place.built()
        assert contents(place.bundle) == right


# Damage ------------------------------------------------------------------------------------------


def damage(path: Path, how: str) -> None:
    """Flip one bit in the middle, cut the last byte, or remove; the inode stays."""
    if how == "missing":
        path.unlink()
        return
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.write(data)
        if how == "truncated":
            file.truncate(len(data) - 1)


@pytest.mark.parametrize(
    ("stage", "name", "how", "again"),
    [
        ("compile", "model.vmfb", "flipped", "iree-compile"),
        ("convert", "params", "truncated", "emit convert"),
        ("emit", "prefill_8.mlir", "missing", "emit graphs"),
        ("emit", "interface.json", "flipped", "emit graphs"),
        ("expect", "reference.json", "missing", "emit expect"),
        pytest.param("expect", "decode.npz", "truncated", "emit expect", marks=pytest.mark.slow),
    ],
)
def test_a_damaged_blob_is_told_and_made_again(
    place: Place, right: dict[str, str], stage: str, name: str, how: str, again: str
) -> None:
    if how == "missing":  # else its damaged bytes are in the bundle too, by a link
        shutil.rmtree(place.build)
    path = place.blob(stage, name)
    damage(path, how)
    done = place.built()
    what = {"flipped": "does not match its sha256", "truncated": "has", "missing": "is missing"}
    told = [line for line in done.err.splitlines() if str(path) in line]
    assert len(told) == 1 and f"cached {name} {what[how]}" in told[0], done.err
    assert [line for line in done.started if again in line] != []
    assert path.exists()
    assert contents(place.bundle) == right
    assert_from_cache(place.built())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["flipped", "truncated", "missing"])
def test_all_blobs_damaged_at_once(place: Place, right: dict[str, str], how: str) -> None:
    blobs = [p for p in (place.cache / "blobs").glob("??/*") if p.suffix != ".stamp"]
    assert len(blobs) > 8
    for path in blobs:
        damage(path, how)
    place.built()
    assert contents(place.bundle) == right
    assert_from_cache(place.built())


@pytest.mark.parametrize("how", ["flipped", "truncated", "missing"])
@pytest.mark.parametrize("name", ["manifest.json", "model.vmfb", "params.irpa", "reference.json"])
def test_a_damaged_bundle_is_told_and_written_again(
    place: Place, right: dict[str, str], name: str, how: str
) -> None:
    path = place.bundle / name
    copy = path.with_name("copy")  # not the cache's own file: that is damage of a blob
    shutil.copyfile(path, copy)
    copy.replace(path)
    damage(path, how)
    done = place.built()
    assert f"{path.relative_to(place.work)}: " in done.err, done.err
    assert_from_cache(done)
    assert contents(place.bundle) == right


@pytest.mark.parametrize("what", [pytest.param("actions", marks=pytest.mark.slow), "cpu.json"])
def test_a_damaged_record_is_told_and_made_again(
    place: Place, right: dict[str, str], what: str
) -> None:
    if what == "cpu.json":
        damage(place.cache / what, "flipped")  # a feature's name may become another
        place.built()
    else:
        for path in (place.cache / "actions").iterdir():
            damage(path, "flipped")
        assert "broken record in the cache, building again" in place.built().err
    assert contents(place.bundle) == right
    assert_from_cache(place.built())


# Several builds at once --------------------------------------------------------------------------


def at_once(place: Place, count: int) -> list[tuple[int, str]]:
    builds = [place.start() for _ in range(count)]
    with ThreadPoolExecutor(count) as pool:
        outputs = list(pool.map(lambda p: p.communicate(timeout=600), builds))
    return [(p.returncode, err) for p, (_, err) in zip(builds, outputs, strict=True)]


def test_two_builds_at_once_compile_once_and_both_end_right(
    place: Place, right: dict[str, str]
) -> None:
    shutil.rmtree(place.build)
    for key in place.store.recent_keys():
        record = place.store.peek(key)
        if record is not None and record.stage in ("compile", "proof"):
            place.store.forget(key)
    (place.home / "audit.jsonl").unlink(missing_ok=True)
    for code, err in at_once(place, 2):
        assert code == 0, err
    assert contents(place.bundle) == right
    assert_no_leftovers(place)
    text = (place.home / "audit.jsonl").read_text()
    starts = [
        " ".join(argv) for line in text.splitlines() for _, argv in json.loads(line)["started"]
    ]
    assert sum("iree-compile" in line for line in starts) == 1
    assert sum("runtime.probe check" in line for line in starts) == 1


def test_five_builds_of_a_cached_bundle_at_once(place: Place, right: dict[str, str]) -> None:
    shutil.rmtree(place.build)
    for code, err in at_once(place, 5):
        assert code == 0, err
    assert contents(place.bundle) == right
    assert_no_leftovers(place)


@pytest.mark.slow
def test_two_cold_builds_at_once(tmp_path: Path, right: dict[str, str]) -> None:
    place = Place.new(tmp_path / "place")
    for code, err in at_once(place, 2):
        assert code == 0, err
    assert contents(place.bundle) == right
    assert_no_leftovers(place)


# kill -9 -----------------------------------------------------------------------------------------


def assert_none_wrong(place: Place, *allowed: dict[str, str]) -> None:
    """Whatever a killed build left under build/ and opens, hidden or not, is one of `allowed`."""
    for bundle in building.bundles(place.build):
        assert_right(bundle)
        assert contents(bundle) in allowed, bundle


def test_a_build_killed_before_any_of_its_writes_leaves_the_old_or_the_new_bundle(
    place: Place, right: dict[str, str]
) -> None:
    """All results are cached, for old and new weights: only the bundle is written, each time."""
    start = place.home / "start"
    shutil.copytree(place.build, start)
    place.scale_weights(1.01)
    place.built()
    new = contents(place.bundle)
    assert new["params.irpa"] != right["params.irpa"]
    kills = 0
    while True:
        shutil.rmtree(place.build)
        shutil.copytree(start, place.build)
        env = {"TEST_KILL_AT": str(kills + 1), "PYTHONDONTWRITEBYTECODE": "1"}
        done = place.doit("build", env=env)
        if done.code == 0:
            break
        assert done.code == -signal.SIGKILL, done.err
        kills += 1
        assert_none_wrong(place, right, new)
        assert kills < 200
    print(f"killed {kills} times")
    assert kills >= 12
    assert contents(place.bundle) == new
    place.built()
    assert_no_leftovers(place)


@pytest.mark.slow
def test_builds_killed_at_random_times(tmp_path: Path, right: dict[str, str]) -> None:
    """Six kills of cold and of resumed builds: of all their processes, or of doit alone."""
    rng = random.Random(7)
    place = Place.new(tmp_path / "place")
    started = time.perf_counter()
    place.built()
    whole = time.perf_counter() - started
    killed = 0
    for turn in range(200):
        if turn % 3 == 0:
            shutil.rmtree(place.cache, ignore_errors=True)
            shutil.rmtree(place.build, ignore_errors=True)
        build, began = place.start(), time.perf_counter()
        try:
            build.wait(rng.uniform(0.05, 0.8) * whole)
            if turn % 3 == 0:  # a cold build to its end: the machine is faster than it was
                whole = time.perf_counter() - began
        except subprocess.TimeoutExpired:
            killed += 1
            if turn % 2:
                os.killpg(build.pid, signal.SIGKILL)
                for pid in children(place.work):
                    os.kill(pid, signal.SIGKILL)
            else:
                build.kill()
        build.communicate()
        assert_none_wrong(place, right)
        if killed >= 6:
            break
    assert killed >= 6
    print(f"killed {killed} of {turn + 1} builds, a whole one takes {whole:.1f} s")
    deadline = time.monotonic() + 10
    while children(place.work) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert children(place.work) == []  # nothing outlives its build
    place.built()
    assert contents(place.bundle) == right
    assert_no_leftovers(place)


def children(work: Path) -> list[int]:
    """Living processes of builds in the place of `work`: by their cache, or where they run."""
    mark = f"SCANWRIGHT_CACHE={work.parent / 'cache'}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            inside = (path / "cwd").readlink().is_relative_to(work.parent)
            if inside or mark in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
        except OSError:
            continue
    return found


# The other tasks ---------------------------------------------------------------------------------


def test_explain_names_the_field_that_made_the_miss(place: Place) -> None:
    done = place.doit("explain")
    assert done.code == 0
    assert [line.split(": ")[1] for line in done.out.splitlines()] == ["done"] * 7
    config = place.work / "tiny" / "config.json"
    text = config.read_text().replace('"layer_norm_epsilon": 1e-05', '"layer_norm_epsilon": 1e-06')
    config.write_text(text)
    before = contents(place.cache / "actions")
    lines = place.doit("explain", "weights=f32").out.splitlines()
    assert contents(place.cache / "actions") == before
    convert = next(i for i, line in enumerate(lines) if line.startswith("convert (model=tiny"))
    assert "files.config.json" in lines[convert + 1] and "->" in lines[convert + 1]
    emit = next(i for i, line in enumerate(lines) if line.startswith("emit (model=tiny"))
    assert lines[emit + 1].split()[0] == "config"
    assert any(line.startswith("compile: will run after emit") for line in lines)

    target = place.work / "mine.yaml"
    text = (building.ROOT / "recipes" / "targets" / "cpu.yaml").read_text()
    target.write_text(text.replace("--iree-opt-level=O2", "--iree-opt-level=O1", 1))
    config.write_text((building.CHECKPOINT / "config.json").read_text())
    lines = place.doit("explain", f"target={target}").out.splitlines()
    compiling = next(i for i, line in enumerate(lines) if line.startswith("compile ("))
    assert lines[compiling + 1].startswith("  flags[")
    assert lines[compiling + 1].endswith('"--iree-opt-level=O2" -> "--iree-opt-level=O1"')


def test_explain_names_a_damaged_file_and_leaves_it(place: Place) -> None:
    path = place.blob("compile", "model.vmfb")
    damage(path, "flipped")
    for _ in range(2):
        out = place.doit("explain").out
        assert f"{path} does not match its sha256" in out, out
    assert path.exists()


def test_matrix_is_json_and_nothing_else(tmp_path: Path) -> None:
    place = Place.new(tmp_path / "place")
    done = place.run(place.argv("matrix")[:-3])  # without the words that are added to others
    rows = json.loads(done.out)
    assert done.code == 0 and {"model": "mamba2", "target": "cpu", "shape": "b4-p32+256"} in rows
    assert all(row.keys() == {"model", "target", "shape"} for row in rows)
    some = [row for row in rows if row["model"] == "mamba2" and row["target"].startswith("cuda")]
    words = ("model=mamba2,mamba2", "target=cuda-*", "shape=b*")
    assert json.loads(place.doit("matrix", *words).out) == some
    assert json.loads(place.doit("matrix").out) == [
        {"model": "tiny", "target": "cpu", "shape": building.SHAPE}
    ]
    done = place.doit("build", "model=mamba2-*")
    assert done.errors[0].startswith("error: model=mamba2-*: no recipe or directory of that name")
    done = place.doit("matrix", "model=mamba-9*")
    assert (done.code, done.out) == (1, "") and done.errors[0].startswith(
        "error: model=mamba-9*: matches no recipe: did you mean mamba"
    )
    assert not place.build.exists()


def test_gc_keeps_what_the_bundle_uses(place: Place, right: dict[str, str]) -> None:
    done = place.doit("gc", "max_size=10G")
    assert done.code == 0 and done.out.startswith("removed 0 results"), done.out
    unused = place.store.path(place.store.put_bytes(b"of no bundle"))
    done = place.doit("gc", "max_size=0")
    assert done.code == 0 and "used by bundles" in done.out
    assert not unused.exists()
    assert contents(place.bundle) == right
    assert_from_cache(place.built())  # nor what the next build looks up
    assert contents(place.bundle) == right
    shutil.rmtree(place.build)
    assert place.doit("gc", "max_size=0").code == 0
    assert list((place.cache / "blobs").glob("??/*")) == []
