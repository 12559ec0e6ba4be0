"""Opening modules: what is mapped, what is refused and how, and that calls are cheap."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import toy

from runtime import cpu, hal, vmfb
from runtime import manifest as mf
from runtime import params_random as pr
from runtime.errors import UserError
from runtime.module import Module, runtime_bytecode_version
from runtime.session import zero_state

pytestmark = pytest.mark.iree
ROOT = Path(__file__).parent.parent
VULKAN = pytest.param("vulkan", marks=pytest.mark.vulkan)


def python(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh process at the repository's root."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def change(bundle: Path, path: tuple[str, ...], value: object) -> None:
    """Change one field of a bundle's manifest."""
    file = bundle / mf.FILE_NAME
    data = json.loads(file.read_text())
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    file.write_text(json.dumps(data))


@pytest.fixture
def bundle(tmp_path):
    return toy.copy(toy.bundle(), tmp_path / "bundle")


def open_error(bundle: Path, **options) -> str:
    with pytest.raises(UserError) as caught:
        Module.open(bundle, mf.load(bundle), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


OPEN_AND_MEASURE = """
    import sys
    from pathlib import Path
    from runtime import manifest as mf
    from runtime.module import Module
    def anonymous():
        lines = open("/proc/self/smaps_rollup").read().splitlines()
        return next(int(l.split()[1]) for l in lines if l.startswith("Anonymous:"))
    small, big = map(Path, sys.argv[1:3])
    first = Module.open(small, mf.load(small))      # what any first opening costs
    before = anonymous()
    again = Module.open(big, mf.load(big))
    print(anonymous() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_parameters_are_mapped_not_copied():
    rows = 1 << 20  # 32 MiB of weights
    done = python(OPEN_AND_MEASURE, toy.bundle(), toy.bundle("local", rows))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1024, f"{done.stdout} KiB of anonymous memory for 32 MiB of weights"


@pytest.mark.parametrize("device", ["local", VULKAN])
def test_exit_is_clean_and_silent(device):
    """Buffers alive at exit must neither crash the interpreter nor print leak warnings."""
    code = """
        import sys
        from pathlib import Path
        from runtime import manifest as mf
        from runtime.module import Module
        from runtime.session import Session
        bundle = Path(sys.argv[1])
        manifest = mf.load(bundle)
        module = Module.open(bundle, manifest)
        session = Session(module, manifest)
        kept = session.prefill([1, 2, 3])
        host = module.to_host(kept[0])
    """
    done = python(code, toy.bundle(device))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("device", ["local-task", "local-sync", VULKAN])
def test_arrays_go_to_the_device_and_back(device):
    memory = hal.open_device(device)
    arrays = [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.arange(5).astype(ml_dtypes.bfloat16),
        np.arange(4).astype(ml_dtypes.bfloat16).reshape(2, 2).T,
        np.arange(3, dtype=np.int8),
        np.asarray(7, np.int32),
        np.arange(300_000, dtype=np.int32)[::3],
        np.ones((2, 3), np.float16).T,
    ]
    for array in arrays:
        found = memory.to_host(memory.to_device(array))
        assert found.dtype == array.dtype and found.shape == array.shape
        assert np.array_equal(found, array)
    for word, dtype in hal.DTYPES.items():
        found = memory.to_host(memory.zeros(word, (3, 1, 700)))
        assert found.dtype == dtype and found.shape == (3, 1, 700) and not found.any()
        room = memory.to_host(memory.empty(word, (3, 1, 700)))
        assert room.dtype == dtype and room.shape == (3, 1, 700)


def test_host_copies_are_independent():
    memory = hal.open_device("local-sync")
    buffer = memory.to_device(np.zeros(4, np.float32))
    memory.to_host(buffer)[:] = 1
    assert not memory.to_host(buffer).any()


@pytest.mark.parametrize("device", ["local", VULKAN])
def test_random_parameters_equal_the_archive_of_the_same_seed(device):
    bundle = toy.bundle(device)
    manifest = mf.load(bundle)
    rows = []
    for seed in (None, 7, 8):
        module = Module.open(bundle, manifest, random_params=seed)
        state = [module.zeros(s.dtype, s.batched(toy.SLOTS)) for s in manifest.state]
        storage = zero_state(module, manifest, toy.SLOTS)
        put = [module.to_device(np.array(v, np.int32)) for v in ([1, 2, 3], [0, 1, 2], [1, 1, 1])]
        rows.append(module.to_host(module.call("decode", [*put, *state, *storage])[0]))
    assert np.array_equal(rows[0], rows[1])
    assert not np.allclose(rows[0], rows[2], atol=0.1)


def test_random_values_are_normal_fixed_and_different_by_name():
    block = pr.normal_block(0)
    assert abs(float(block.mean())) < 2e-3 and abs(float(block.std()) - 1) < 2e-3
    assert [int(v * 65536) for v in block[:3]] == [-53946, 83576, 72990]
    specs = [mf.ParamSpec(n, "f32", (300, 70), 2.0, 0.5) for n in ("a", "b")]
    a, b = pr.random_values(specs, 0)
    assert abs(float(a.mean()) - 2) < 0.02 and abs(float(a.std()) - 0.5) < 0.02
    assert not np.array_equal(a, b)


@pytest.mark.skipif(not pr.can_map_blocks(), reason="needs memfd")
@pytest.mark.parametrize("dtype", sorted(mf.DTYPE_BYTES))
def test_mapped_blocks_hold_the_dense_values(dtype):
    spec = mf.ParamSpec("w", dtype, (3001, 3001), 0.5, 30.0)  # more than two blocks
    blocks = pr.MappedBlocks(3)
    assert np.array_equal(blocks.view(spec), pr.dense(spec, 3))
    blocks.close()


def test_archive_writer_command_line(tmp_path, monkeypatch, capsys):
    manifest = toy.bundle() / mf.FILE_NAME
    out = tmp_path / "p.irpa"
    assert pr.main([str(manifest), "--seed", "7", "--out", str(out)]) == 0
    assert out.read_bytes() == (toy.bundle() / "params.irpa").read_bytes()
    assert pr.main([str(manifest), "--out", str(tmp_path / "none" / "p.irpa")]) == 1
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 0))
    assert pr.main([str(manifest), "--out", str(tmp_path / "q.irpa")]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and "No such file" in errors[0] and "0 bytes free" in errors[1]
    assert [path.name for path in tmp_path.iterdir()] == ["p.irpa"]


def test_a_call_costs_little():
    """Everything around the compiled code of a one-row step: at most 50 µs (here: best of 5)."""
    bundle = toy.bundle()
    manifest = mf.load(bundle)
    module = Module.open(bundle, manifest, device="local-sync")
    state = [module.zeros(s.dtype, s.batched(toy.SLOTS)) for s in manifest.state]
    storage = zero_state(module, manifest, 1)
    slot = module.to_device(np.asarray(0, np.int32))
    best = 1.0
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(200):
            module.call("extract", [slot, *state, *storage])
        best = min(best, (time.perf_counter() - start) / 200)
    assert best < 50e-6


def test_state_is_written_to_the_storage_it_was_given():
    """And the state that was read stays as it was."""
    bundle = toy.bundle()
    manifest = mf.load(bundle)
    module = Module.open(bundle, manifest, device="local-sync")
    state = [module.zeros(s.dtype, s.batched(toy.SLOTS)) for s in manifest.state]
    put = module.to_device(np.ones(toy.SLOTS, np.int32))
    storage = zero_state(module, manifest, toy.SLOTS)
    out = module.call("decode", [put, put, put, *state, *storage])
    for before, kept, after in zip(state, storage, out[2:], strict=True):
        assert module.to_host(after).any() and not module.to_host(before).any()
        assert np.array_equal(module.to_host(kept), module.to_host(after))


def test_missing_device_lists_those_that_are_here(bundle):
    message = open_error(bundle, device="local-task://9")
    assert "local-sync" in message and "local-task" in message
    for uri in ("cuda://77", "nonsense"):
        with pytest.raises(UserError, match=f"device '{uri}' is not here.*available: .*local-task"):
            hal.open_device(uri)


def test_wrong_kind_of_device(bundle):
    message = open_error(bundle, device="vulkan")
    assert "compiled for local" in message and "--device" in message


def test_other_bytecode_version(bundle):
    code = bundle / "model.vmfb"
    own = runtime_bytecode_version(code)
    assert own == vmfb.bytecode_version(code)
    change(bundle, ("target", "bytecode_version"), "9.1")
    message = open_error(bundle)
    assert "version 9.1" in message and f"reads version {own}" in message
    assert "doit build model=toy target=cpu" in message


def test_module_really_of_another_version(bundle):
    code = bundle / "model.vmfb"
    own = runtime_bytecode_version(code)
    code.write_bytes(vmfb.with_version(code.read_bytes(), 12, 3))
    change(bundle, ("files", "module"), toy._ref(code).__dict__)
    change(bundle, ("target", "bytecode_version"), "12.3")
    message = open_error(bundle)
    assert "version 12.3" in message and f"reads version {own}" in message


def test_cpu_features(bundle, tmp_path):
    change(bundle, ("target", "features"), ["+sse4_2", "+amx_imaginary"])
    message = open_error(bundle)
    assert "lacks amx_imaginary," in message and "target=cpu" in message
    manifest = mf.load(bundle)
    info = tmp_path / "cpuinfo"
    for text in (
        "processor: 0\nflags\t\t: fpu sse4_2 amx_imaginary\n",
        "Features : sse4_2 asimd amx_imaginary\n",
        "processor : 0\n",
    ):
        info.write_text(text)
        cpu.check(manifest, info)
    cpu.check(manifest, tmp_path / "none")
    info.write_text("flags : fpu\n")
    with pytest.raises(UserError, match="lacks amx_imaginary, sse4_2,"):
        cpu.check(manifest, info)


def test_damaged_files(bundle):
    code, params = bundle / "model.vmfb", bundle / "params.irpa"
    data = bytearray(code.read_bytes())
    data[len(data) // 2] ^= 1
    code.write_bytes(data)
    message = open_error(bundle)
    assert "model.vmfb: sha256" in message and "rebuild: doit build model=toy" in message
    code.write_bytes(data[:-1])
    assert f"{len(data) - 1} bytes, expected {len(data)}" in open_error(bundle)
    code.unlink()
    assert "model.vmfb: missing" in open_error(bundle)
    params.write_bytes(params.read_bytes()[:-64])
    code.write_bytes((toy.bundle() / "model.vmfb").read_bytes())
    assert "params.irpa: " in open_error(bundle)
    params.unlink()
    assert "params.irpa: missing" in open_error(bundle)


@pytest.mark.parametrize("content", [b"", b"IREE", b"PK\x03\x04" + b"\xff" * 60, b"\0" * 4096])
def test_files_that_are_not_modules(bundle, content):
    code = bundle / "model.vmfb"
    code.write_bytes(content)
    change(bundle, ("files", "module"), toy._ref(code).__dict__)
    assert "not an IREE module" in open_error(bundle)


def test_not_an_archive_and_another_models_archive(bundle, tmp_path):
    params = bundle / "params.irpa"
    params.write_bytes(b"x" * 4096)
    change(bundle, ("files", "params"), toy._ref(params).__dict__)
    assert "not a parameter archive" in open_error(bundle)
    pr.write_archive(toy.param_specs("local", 16)[:2], 0, params)
    change(bundle, ("files", "params"), toy._ref(params).__dict__)
    assert "cannot be loaded" in open_error(bundle)


def test_weight_free_bundle_needs_random_parameters():
    bundle = toy.bundle("local", toy.V, True)
    assert "--random-params" in open_error(bundle)
    Module.open(bundle, mf.load(bundle), random_params=1)


def test_functions_are_looked_up_at_opening():
    code = toy.bundle() / "model.vmfb"
    params = toy.bundle() / "params.irpa"
    with pytest.raises(UserError, match="no function prefill_99"):
        Module.load(code, params, "local-sync", ["decode", "prefill_99"])


def test_a_failing_call_is_one_line():
    bundle = toy.bundle()
    module = Module.open(bundle, mf.load(bundle), device="local-sync")
    bad = module.zeros("f32", (5, 5))
    with pytest.raises(UserError, match="decode failed on device 'local-sync'"):
        module.call("decode", [bad] * 7)
