"""Compiling for every target: right numbers, same bytes, honest CPU features, clean failures."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import graphs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from artifacts import cpu as cpus
from artifacts.compile import compile_module, dump_ptx, run_compiler
from artifacts.cpu import Cpu, host_cpu, host_features, host_has, resolve_cpu
from artifacts.link import link
from recipes.resolve import every_target, resolve_target
from recipes.schema import TargetRecipe
from runtime.errors import UserError
from runtime.vmfb import bytecode_version, with_version

FLOATS = ("f32", "f16", "bf16")  # types of the small graphs here
ENTRIES = {"prefill_8": 8, "decode": 1}
X86 = "x86_64-unknown-linux-gnu"
ON_X86 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="an x86-64 host's features")
pytestmark = pytest.mark.iree


@pytest.fixture(scope="session")
def cpu_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cpu") / "cpu.json"


@pytest.fixture(scope="session")
def entries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, Path]]]:
    """Weight type -> (entry name, text file) pairs."""
    home = tmp_path_factory.mktemp("mlir")
    made: dict[str, list[tuple[str, Path]]] = {}
    for weights in FLOATS:
        made[weights] = []
        for name, length in ENTRIES.items():
            path = home / f"{name}.{weights}.mlir"
            path.write_text(graphs.entry(name, length, weights), encoding="utf-8")
            made[weights].append((name, path))
    return made


def linked(entries: list[tuple[str, Path]]) -> str:
    return link([(name, path.read_text(encoding="utf-8")) for name, path in entries])


def cpu_flags(target: TargetRecipe, cache: Path) -> tuple[str, ...]:
    return resolve_cpu(target.cpu, target.triple, cache).flags if target.cpu else ()


def run(vmfb: Path, uri: str, weights: str, name: str, *inputs: np.ndarray) -> list[np.ndarray]:
    """The function's results by IREE, in this process, parameters given from memory."""
    import iree.runtime as rt

    index: Any = rt.ParameterIndex()
    for key, value in graphs.parameters(weights).items():
        index.add_buffer(key, value.tobytes())
    config = rt.Config(uri)
    instance = config.vm_instance
    io = rt.create_io_parameters_module(instance, index.create_provider("model"))
    module = rt.VmModule.copy_buffer(instance, vmfb.read_bytes())
    context = rt.SystemContext(vm_modules=[io, module], config=config)
    function: Any = context.modules.model[name]
    results: Any = function(*inputs)
    return [np.asarray(result.to_host()) for result in results]


SLOW = pytest.mark.slow
ALL_TYPES = [pytest.param(kind, marks=() if kind == "bf16" else SLOW) for kind in FLOATS]


@pytest.mark.parametrize(
    ("flag_list", "weights"),
    [
        *(("flags", kind) for kind in FLOATS),
        *(("safe-1", "bf16"), ("safe-2", "bf16")),
        *(pytest.param(f"safe-{n}", kind, marks=SLOW) for n in (1, 2) for kind in ("f32", "f16")),
    ],
)
def test_linked_module_computes_what_jax_does(
    tmp_path: Path, entries: dict, cpu_cache: Path, weights: str, flag_list: str
) -> None:
    target = resolve_target("cpu")
    flags = target.flags if flag_list == "flags" else target.safe_flags[int(flag_list[-1]) - 1]
    out = tmp_path / "model.vmfb"
    stats = compile_module(entries[weights], [*flags, *cpu_flags(target, cpu_cache)], out)
    assert stats.size == out.stat().st_size > 10_000
    assert 0.1 < stats.seconds < 120
    assert 30 << 20 < stats.peak_rss_bytes < 2 << 30
    random = np.random.default_rng(1)
    h = random.standard_normal((graphs.HEADS, graphs.HEAD_DIM, graphs.STATE)).astype(np.float32)
    for name, length in ENTRIES.items():
        tokens = random.integers(0, graphs.VOCAB, length).astype(np.int32)
        params = {k: jnp.asarray(v) for k, v in graphs.parameters(weights).items()}
        expected = jax.jit(graphs.forward)(params, jnp.asarray(tokens), jnp.asarray(h))
        got = run(out, "local-task", weights, name, tokens, h.copy())
        for have, want in zip(got, expected, strict=True):
            want = np.asarray(want)
            bound = {"f32": 1e-5, "f16": 4e-3, "bf16": 3e-2}[weights]
            assert np.abs(have - want).max() <= bound * max(np.abs(want).max(), 1e-3)
        assert np.abs(got[2] - h).max() > 0.1  # the state did move


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    "name",
    [
        *("cpu", "cuda-sm121"),
        *(pytest.param(name, marks=SLOW) for name in ("vulkan", "metal", "rocm-gfx1100")),
    ],
)
def test_same_text_and_flags_give_the_same_bytes_anywhere(
    tmp_path: Path,
    entries: dict,
    cpu_cache: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = resolve_target(name)
    flags = [*target.flags, *cpu_flags(target, cpu_cache)]
    places = [tmp_path / "a", tmp_path / "a longer name" / "deeper"]
    outs = []
    for place in places:
        place.mkdir(parents=True)
        moved = [(n, Path(shutil.copy(p, place / f"{n}.txt"))) for n, p in entries["f32"][1:]]
        monkeypatch.chdir(place)
        monkeypatch.setenv("SOME_VARIABLE", str(place))
        outs.append(place / f"{len(outs)}.vmfb")
        compile_module(moved, flags, outs[-1])
        assert sorted(p.name for p in place.iterdir()) == sorted(
            [outs[-1].name, *(p.name for _, p in moved)]
        )
    assert digest(outs[0]) == digest(outs[1])
    assert str(tmp_path).encode() not in outs[0].read_bytes()
    compile_module(entries["f16"][1:], flags, tmp_path / "other.vmfb")
    assert digest(tmp_path / "other.vmfb") != digest(outs[0])


@pytest.mark.parametrize("name", [t.name for t in every_target() if t.device != "cuda"])
def test_target_compiles(tmp_path: Path, entries: dict, cpu_cache: Path, name: str) -> None:
    """The cuda targets are compiled by test_ptx_assembles."""
    target, out = resolve_target(name), tmp_path / "model.vmfb"
    weights = target.substitute.get("bf16", "bf16")
    compile_module(entries[weights][1:], [*target.flags, *cpu_flags(target, cpu_cache)], out)
    assert out.stat().st_size > 10_000


@pytest.mark.thorough
def test_every_safe_flag_list_of_every_target_compiles(
    tmp_path: Path, entries: dict, cpu_cache: Path
) -> None:
    """With the narrowest type; the fast flags are those of every other test. It says the same again
    until recipes or the compiler change: for thorough runs."""
    out = tmp_path / "model.vmfb"
    for target in every_target():
        cpu = cpu_flags(target, cpu_cache)
        for flags in target.safe_flags:
            compile_module(
                entries[[kind for kind in FLOATS if kind in target.weights][-1]],
                [*flags, *cpu],
                out,
            )


def test_peak_memory_is_the_compilers_and_not_this_process(tmp_path: Path, entries: dict) -> None:
    ballast = bytearray(b"x") * (400 << 20)
    stats = compile_module(entries["f32"][1:], resolve_target("metal").flags, tmp_path / "m")
    assert 50 << 20 < stats.peak_rss_bytes < len(ballast)


# PTX ---------------------------------------------------------------------------------------------


def find_ptxas() -> str | None:
    """ptxas of the PATH, or of the PyPI package nvidia-cuda-nvcc."""
    found = shutil.which("ptxas")
    places = (Path(place) / "nvidia" for place in sys.path if place)
    packaged = (p for place in places for p in sorted(place.glob("*/bin/ptxas")))
    return found or next((str(path) for path in packaged), None)


@pytest.mark.parametrize("weights", ALL_TYPES)
@pytest.mark.parametrize("name", [t.name for t in every_target() if t.device == "cuda"])
def test_ptx_assembles(tmp_path: Path, entries: dict, name: str, weights: str) -> None:
    ptxas = find_ptxas()
    if ptxas is None:
        pytest.skip("no ptxas here (PATH, or pip install nvidia-cuda-nvcc)")
    flags = resolve_target(name).flags
    (arch,) = [flag.partition("=")[2] for flag in flags if "cuda-target" in flag]
    files = dump_ptx(linked(entries[weights]), flags, tmp_path / "ptx")
    own = name.replace("cuda-sm", "sm_")
    for ptx in files:
        assert f".target {arch}" in ptx.read_text(encoding="utf-8")
        for gpu in {arch, own}:  # sm_90 takes the PTX of sm_89, as its driver does
            command = [ptxas, f"-arch={gpu}", "-v", str(ptx), "-o", str(tmp_path / "out.cubin")]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            assert set(re.findall(r"(\d+) bytes spill stores", done.stderr)) == {"0"}
    broken = tmp_path / "broken.ptx"
    broken.write_text(files[0].read_text(encoding="utf-8").replace("ret;", "rett;"))
    command = [ptxas, f"-arch={arch}", str(broken), "-o", str(tmp_path / "out.cubin")]
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0


def test_ptx_of_another_target_is_an_error(tmp_path: Path, entries: dict, cpu_cache: Path) -> None:
    target = resolve_target("cpu")
    flags = [*target.flags, *cpu_flags(target, cpu_cache)]
    with pytest.raises(UserError, match="no flags of a cuda target"):
        dump_ptx(linked(entries["f32"][1:]), flags, tmp_path / "ptx")


# CPU features ------------------------------------------------------------------------------------


def machine_code(vmfb: Path) -> bytes:
    with zipfile.ZipFile(vmfb) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".so")]
        return archive.read(name)


def test_resolved_host_gives_the_code_that_host_would(
    tmp_path: Path, entries: dict, cpu_cache: Path
) -> None:
    target = resolve_target("cpu")
    decode = entries["bf16"][1:]
    compile_module(decode, [*target.flags, *host_cpu(cpu_cache).flags], tmp_path / "a")
    arguments = [*target.flags, "--iree-llvmcpu-target-cpu=host", "-o", "b"]
    run_compiler(linked(decode), arguments, tmp_path)
    assert machine_code(tmp_path / "a") == machine_code(tmp_path / "b")


def test_a_compile_for_the_word_host_is_refused(tmp_path: Path, entries: dict) -> None:
    flags = [*resolve_target("cpu").flags, "--iree-llvmcpu-target-cpu=host"]
    with pytest.raises(UserError, match="resolve it first"):
        compile_module(entries["f32"], flags, tmp_path / "out")


def test_host_has_what_its_own_resolution_requires(cpu_cache: Path) -> None:
    cpu = host_cpu(cpu_cache)
    assert host_has(cpu) and cpu.required
    assert all(feature.startswith("+") for feature in cpu.required)
    assert not host_has(Cpu(cpu.name, cpu.triple, (), (*cpu.required, "+nonsense")))
    assert cpu.name != "host"


def test_levels_require_what_they_are_named_for(cpu_cache: Path) -> None:
    v3 = resolve_cpu("x86-64-v3", X86, cpu_cache)
    v4 = resolve_cpu("x86-64-v4", X86, cpu_cache)
    five = {"+avx512f", "+avx512bw", "+avx512cd", "+avx512dq", "+avx512vl"}
    # the x86-64 psABI's lists, as /proc/cpuinfo spells them
    assert set(v3.required) == {
        *("+pni", "+ssse3", "+sse4_1", "+sse4_2", "+popcnt", "+cx16"),
        *("+avx", "+avx2", "+bmi1", "+bmi2", "+f16c", "+fma", "+abm", "+movbe"),
    }
    assert set(v4.required) == set(v3.required) | five
    arm = resolve_cpu("generic", "aarch64-unknown-linux-gnu", cpu_cache)
    assert arm.required == ("+asimd", "+fp")
    for cpu in (v3, v4, arm):
        assert cpu.features == () and "-features=" not in "".join(cpu.flags)


def test_a_feature_the_machine_lacks_is_switched_off_and_not_required() -> None:
    implied, machine = "+avx2,+amx-tile,+sse3", "+avx2,-amx-tile,+sse3,-xop,+avxvnni,+rtm"
    triple = "x86_64-unknown-unknown-eabi-elf"
    cpu = cpus._parse("host", "emeraldrapids", f"{implied},{machine}", triple)
    assert cpu.features == ("+avx2", "+avxvnni", "+sse3", "-amx-tile")
    assert cpu.required == ("+avx2", "+avx_vnni", "+pni")
    assert cpu.triple == X86


@ON_X86
def test_table_spells_features_as_this_machine_does() -> None:
    ours = {f for f in host_features() if f.startswith(("avx", "sse", "fma", "bmi", "f16c"))}
    assert ours - {"sse", "sse2", "avx512_vp2intersect"} <= set(cpus.CPUINFO["x86_64"].values())


def test_resolved_cpu_is_remembered_and_a_broken_memory_repaired(tmp_path: Path) -> None:
    cache = tmp_path / "sub" / "cpu.json"
    first = host_cpu(cache)
    code = (
        "import sys, pathlib; from artifacts.cpu import host_cpu;"
        "print(host_cpu(pathlib.Path(sys.argv[1])).flags);"
        "print('artifacts.compile' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(cache)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(first.flags), "False"]  # no compiler was asked
    good = cache.read_text(encoding="utf-8")
    for bad in ("", "[]", good[:40], good.replace('"triple"', '"tripel"')):
        cache.write_text(bad, encoding="utf-8")
        assert host_cpu(cache) == first
        assert json.loads(cache.read_text(encoding="utf-8"))


def test_an_unknown_cpu_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cpu nonsense: the compiler refuses it"):
        resolve_cpu("nonsense", X86, tmp_path / "cpu.json")
    assert not (tmp_path / "cpu.json").exists()


# the module file ---------------------------------------------------------------------------------


def test_bytecode_version_is_the_one_the_runtime_reads(tmp_path: Path, entries: dict) -> None:
    out = tmp_path / "model.vmfb"
    flags = resolve_target("vulkan").flags
    decode = entries["f32"][1:]
    compile_module(decode, flags, out)
    version = bytecode_version(out)
    compile_module(decode, [*flags, "--iree-vm-emit-polyglot-zip=false"], tmp_path / "b")
    assert bytecode_version(tmp_path / "b") == version  # the same without the zip wrapping
    out.write_bytes(with_version(out.read_bytes(), 12, 34))
    assert bytecode_version(out) == "12.34"


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"\x7fELF" + bytes(200), b"IREE" * 40])
def test_a_file_that_is_no_module_is_one_line(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.vmfb"
    path.write_bytes(data)
    with pytest.raises(UserError, match="not an IREE module"):
        bytecode_version(path)


# failures ----------------------------------------------------------------------------------------


def test_compile_error_is_one_line_and_keeps_the_text(
    tmp_path: Path, entries: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCANWRIGHT_CACHE", str(tmp_path / "a cache"))
    (tmp_path / "out").mkdir()
    name, path = entries["f32"][1]
    broken = tmp_path / "broken.mlir"
    text = path.read_text(encoding="utf-8")
    broken.write_text(text.replace("stablehlo.multiply", "stablehlo.multiplied", 1))
    with pytest.raises(UserError) as caught:
        compile_module([(name, broken)], resolve_target("vulkan").flags, tmp_path / "out" / "m")
    message = str(caught.value)
    assert "\n" not in message and "error:" in message and "stablehlo.multiplied" in message
    assert list((tmp_path / "out").iterdir()) == []
    (kept,) = (tmp_path / "a cache" / "failed").iterdir()
    graph = (kept / "model.mlir").read_text(encoding="utf-8")
    assert graph == link([(name, broken.read_text(encoding="utf-8"))])
    first = (kept / "error.txt").read_text(encoding="utf-8").strip()
    assert message.startswith(f"iree-compile: {first}; ")
    # What it says to paste, pasted: in another directory, with another environment.
    pasted = message.rpartition("to reproduce it: ")[2]
    done = subprocess.run(["bash", "-c", pasted], cwd="/", env={"PATH": "/usr/bin:/bin"},
                          capture_output=True, text=True, check=False)  # fmt: skip
    said = (kept / "compiler.log").read_text(encoding="utf-8")
    assert done.returncode == 1 and done.stderr == said and first in said
    # Once more is the same place; and it is the graph that is wrong: mended, it compiles there.
    with pytest.raises(UserError, match=re.escape(pasted)):
        compile_module([(name, broken)], resolve_target("vulkan").flags, tmp_path / "out" / "m")
    (kept / "model.mlir").write_text(link([(name, text)]), encoding="utf-8")
    done = subprocess.run(["bash", "-c", pasted], cwd="/", capture_output=True, check=False)
    assert done.returncode == 0 and (kept / "model.vmfb").stat().st_size > 10_000


def test_wrong_flag_is_one_line(tmp_path: Path, entries: dict) -> None:
    flags = ["--iree-hal-target-device=cuda", "--iree-cuda-target=sm_90"]
    with pytest.raises(UserError, match=r"iree-compile: .*error: missing GPU target"):
        compile_module(entries["f32"], flags, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def processes_in(directory: Path) -> list[int]:
    """Process ids whose working directory lies in `directory`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                place = (entry / "cwd").resolve(strict=True)
            except OSError:
                continue
            if place.is_relative_to(directory) and place != directory:
                found.append(int(entry.name))
    return found


def until(condition: Any, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def long_compile(tmp_path: Path, entries: dict) -> Iterator[subprocess.Popen]:
    """A process that compiles, for minutes, below tmp_path; its compiler is already running."""
    name, path = entries["f32"][0]
    text, mlir = path.read_text(encoding="utf-8"), []
    for i in range(100):
        copy = tmp_path / f"{i}.mlir"
        copy.write_text(text.replace(f"@{name}", f"@e{i}"), encoding="utf-8")
        mlir.append((f"e{i}", str(copy)))
    code = (
        "import json, pathlib, sys; from artifacts.compile import compile_module;"
        "mlir, flags, out = json.loads(sys.argv[1]);"
        "compile_module(mlir, flags, pathlib.Path(out))"
    )
    job = json.dumps([mlir, resolve_target("cuda-sm80").flags, str(tmp_path / "out.vmfb")])
    process = subprocess.Popen([sys.executable, "-c", code, job], stderr=subprocess.DEVNULL)
    try:
        assert until(lambda: len(processes_in(tmp_path)) == 2, 30)
        time.sleep(0.3)  # into the compiler
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_compiler_dies_with_the_process_that_started_it(
    tmp_path: Path, long_compile: subprocess.Popen, number: signal.Signals
) -> None:
    found = processes_in(tmp_path)
    assert len(found) == 2  # the launcher and the compiler
    programs = [Path(f"/proc/{pid}/cmdline").read_bytes().split(bytes(1))[0] for pid in found]
    assert any(program.endswith(b"/iree-compile") for program in programs)
    long_compile.send_signal(number)
    long_compile.wait(20)
    assert until(lambda: not processes_in(tmp_path), 10)
    assert not (tmp_path / "out.vmfb").exists()
    left = [path for path in tmp_path.iterdir() if path.name.startswith(".compile-")]
    assert (len(left) == 1) if number == signal.SIGKILL else (left == [])
