"""Parameter archives: read by IREE's own reader and by ours, with the bytes that were written."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import iree.runtime as iree_runtime
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emit import irpa
from emit.errors import EmitError
from emit.state import DTYPES

NAMES = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=12)
TENSORS = st.lists(
    st.builds(
        irpa.Tensor,
        NAMES,
        st.sampled_from(sorted(DTYPES)),
        st.lists(st.integers(0, 9), max_size=3).map(tuple),
    ),
    max_size=9,
    unique_by=lambda tensor: tensor.name,
)


def drawn(specs: list[irpa.Tensor], seed: int = 0) -> list[np.ndarray]:
    """Random bytes in the shape and dtype of each spec."""
    rng = np.random.default_rng(seed)
    return [
        np.frombuffer(rng.bytes(spec.nbytes), DTYPES[spec.dtype]).reshape(spec.shape)
        for spec in specs
    ]


def iree_entries(path: Path) -> dict[str, bytes]:
    index = iree_runtime.ParameterIndex()
    index.load(str(path))
    return {key: bytes(entry.file_view) for key, entry in index.items()}


@settings(max_examples=60, deadline=None)
@given(TENSORS)
def test_what_is_written_is_what_both_readers_read(
    tmp_path_factory: pytest.TempPathFactory, specs: list[irpa.Tensor]
) -> None:
    path, arrays = tmp_path_factory.mktemp("irpa") / "params.irpa", drawn(specs)
    irpa.write(path, specs, arrays)
    ours = irpa.read(path, specs)
    assert list(ours) == [spec.name for spec in specs]
    want = {spec.name: array.tobytes() for spec, array in zip(specs, arrays, strict=True)}
    for spec in specs:
        got = ours[spec.name]
        assert got.dtype == DTYPES[spec.dtype] and got.shape == spec.shape
        assert got.tobytes() == want[spec.name]
        assert not got.flags.writeable
    assert iree_entries(path) == want


def test_layout_is_that_of_iree_with_aligned_storage(tmp_path: Path) -> None:
    """Same entries as IREE's own writer makes, each tensor on 64 bytes, storage on a page."""
    specs = [irpa.Tensor("a", "f32", (3, 5)), irpa.Tensor("b.c", "bf16", (7,))]
    arrays, path = drawn(specs), tmp_path / "params.irpa"
    irpa.write(path, specs, arrays)
    theirs = iree_runtime.ParameterIndex()
    for spec, array in zip(specs, arrays, strict=True):
        theirs.add_buffer(spec.name, array.tobytes())
    theirs.create_archive_file(str(tmp_path / "theirs.irpa"))
    assert iree_entries(path) == iree_entries(tmp_path / "theirs.irpa")
    raw = path.read_bytes()
    assert len(raw) % irpa.PAGE == 0 and len(raw) == 2 * irpa.PAGE
    assert raw[:4] == (tmp_path / "theirs.irpa").read_bytes()[:4]
    for array, offset in zip(arrays, (4096, 4096 + 64), strict=True):
        assert raw[offset : offset + array.nbytes] == array.tobytes()


def test_same_arrays_give_the_same_bytes(tmp_path: Path) -> None:
    specs = [irpa.Tensor(f"t{i}", "f16", (i, 3)) for i in range(5)]
    for name in ("a", "b"):
        irpa.write(tmp_path / name, specs, drawn(specs))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_arrays_of_any_memory_order_are_written_row_major(tmp_path: Path) -> None:
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    specs = [irpa.Tensor("t", "f32", (6, 4)), irpa.Tensor("s", "f32", (4, 3))]
    irpa.write(tmp_path / "x", specs, [base.T, base[:, ::2]])
    read = irpa.read(tmp_path / "x", specs)
    assert np.array_equal(read["t"], base.T) and np.array_equal(read["s"], base[:, ::2])


def test_one_tensor_at_a_time_is_asked_for(tmp_path: Path) -> None:
    specs = [irpa.Tensor(f"t{i}", "f32", (1024,)) for i in range(4)]
    written = []

    def arrays() -> Iterator[np.ndarray]:
        for i in range(4):
            written.append((tmp_path / "x.partial").stat().st_size)
            yield np.full(1024, i, np.float32)

    irpa.write(tmp_path / "x", specs, arrays())
    assert written == sorted(written) and written[-1] > written[0]


@pytest.mark.parametrize(
    "array", [np.zeros((2, 3), np.float32), np.zeros((3, 2), np.float16), np.zeros(6, np.float32)]
)
def test_an_array_unlike_its_spec_is_refused(array: np.ndarray, tmp_path: Path) -> None:
    with pytest.raises(EmitError, match=r"^w: made as .* declared as f32\[3, 2\]"):
        irpa.write(tmp_path / "x", [irpa.Tensor("w", "f32", (3, 2))], [array])


@pytest.mark.parametrize("count", [1, 3])
def test_as_many_arrays_as_specs(count: int, tmp_path: Path) -> None:
    specs = [irpa.Tensor("a", "f32", (1,)), irpa.Tensor("b", "f32", (1,))]
    with pytest.raises(ValueError, match="zip"):
        irpa.write(tmp_path / "x", specs, [np.zeros(1, np.float32)] * count)


def test_reading_checks_names_and_sizes(tmp_path: Path) -> None:
    path, specs = tmp_path / "x", [irpa.Tensor("a", "f32", (4,))]
    irpa.write(path, specs, drawn(specs))
    for wrong in (irpa.Tensor("b", "f32", (4,)), irpa.Tensor("a", "f32", (5,))):
        with pytest.raises(EmitError, match=f"{wrong.name}: found .* expected {wrong.nbytes}"):
            irpa.read(path, [wrong])
    assert irpa.read(path, [irpa.Tensor("a", "bf16", (8,))])["a"].nbytes == 16


def test_reading_is_mapped(tmp_path: Path) -> None:
    specs = [irpa.Tensor("a", "f32", (4,))]
    irpa.write(tmp_path / "x", specs, drawn(specs))
    view = irpa.read(tmp_path / "x", specs)["a"]
    assert isinstance(view, np.memmap) or isinstance(view.base, np.memmap)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_damaged_archive_is_refused_or_gives_views_in_the_file(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Truncated anywhere, or any header bytes changed: EmitError or tensors of the right size."""
    specs = [irpa.Tensor("a", "f32", (4,)), irpa.Tensor("bb", "i8", (3, 3))]
    path = tmp_path_factory.mktemp("irpa") / "x"
    irpa.write(path, specs, drawn(specs))
    raw = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw)))]
    else:
        at = data.draw(st.integers(0, 260))
        new = data.draw(st.binary(min_size=1, max_size=8))
        raw[at : at + len(new)] = new
    path.write_bytes(raw)
    try:
        views = irpa.read(path, specs)
    except EmitError as error:
        assert str(path) in str(error) and "\n" not in str(error)
    else:
        for spec in specs:
            assert views[spec.name].size == math.prod(spec.shape)


# Going on after a kill


FIVE = [irpa.Tensor(f"t{i}", "f32", (i, 40)) for i in range(4)] + [irpa.Tensor("s", "f16", ())]


def put_all(path: Path, key: str | None = "key", specs: list[irpa.Tensor] = FIVE) -> list[str]:
    """Write `specs`, or go on writing them; the names of those that were made for it."""
    made, arrays = [], drawn(specs)
    with irpa.Writer(path, specs, key) as writer:
        for spec, array in list(zip(specs, arrays, strict=True))[writer.done :]:
            made.append(spec.name)
            writer.put([array])
    return made


def stopped(path: Path, count: int, key: str = "key") -> None:
    """What a Writer leaves whose process ends after `count` tensors."""
    with pytest.raises(KeyboardInterrupt), irpa.Writer(path, FIVE, key) as writer:
        for array in drawn(FIVE)[:count]:
            writer.put([array])
        raise KeyboardInterrupt


@pytest.fixture
def right(tmp_path: Path) -> bytes:
    irpa.write(tmp_path / "right", FIVE, drawn(FIVE))
    return (tmp_path / "right").read_bytes()


@pytest.mark.parametrize("count", range(6))
def test_a_stopped_writer_is_continued(count: int, tmp_path: Path, right: bytes) -> None:
    stopped(tmp_path / "x", count)
    assert not (tmp_path / "x").exists()
    assert put_all(tmp_path / "x") == [spec.name for spec in FIVE[count:]]
    assert (tmp_path / "x").read_bytes() == right
    assert put_all(tmp_path / "x") == [], "what is finished is recognised"
    assert (tmp_path / "x").read_bytes() == right


def test_another_conversion_is_not_continued(tmp_path: Path, right: bytes) -> None:
    names = [spec.name for spec in FIVE]
    stopped(tmp_path / "x", 3)
    assert put_all(tmp_path / "x", "other") == names
    other = [*FIVE[:4], irpa.Tensor("s", "bf16", ())]  # of the same size
    stopped(tmp_path / "x", 3)
    assert put_all(tmp_path / "x", specs=other) == names
    stopped(tmp_path / "x", 3)
    with (tmp_path / "x.partial").open("ab") as longer:
        longer.write(bytes(9999))
    assert put_all(tmp_path / "x", None) == names
    assert (tmp_path / "x").read_bytes() == right


@pytest.mark.parametrize(
    ("place", "whole"), [(10, 0), (4097, 1), (4096 + 190, 2), (-1, 2), (None, 0)]
)
def test_what_is_damaged_is_written_again(
    place: int | None, whole: int, tmp_path: Path, right: bytes
) -> None:
    """A byte of the header, or of a tensor, of the padding after it; the file gone or cut."""
    stopped(tmp_path / "x", 3)
    partial = tmp_path / "x.partial"
    raw = bytearray(partial.read_bytes())
    if place is None:
        partial.unlink()
    elif place < 0:
        partial.write_bytes(raw[:place])
    else:
        raw[place] ^= 16
        partial.write_bytes(raw)
    assert put_all(tmp_path / "x") == [spec.name for spec in FIVE[whole:]]
    assert (tmp_path / "x").read_bytes() == right


@pytest.mark.parametrize("cut", [0, 1, 64, 65, 70, 76, 84])
def test_a_torn_journal_is_used_as_far_as_it_goes(cut: int, tmp_path: Path, right: bytes) -> None:
    stopped(tmp_path / "x", 3)
    journal = tmp_path / "x.journal"
    journal.write_bytes(journal.read_bytes()[:cut])
    whole = max(0, (cut - 65) // 9)
    assert put_all(tmp_path / "x") == [spec.name for spec in FIVE[whole:]]
    assert (tmp_path / "x").read_bytes() == right


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    stopped(tmp_path / "x", 2)
    short = pytest.raises(EmitError, match="t2: made 1 of 2")
    with short, irpa.Writer(tmp_path / "x", FIVE, "key") as writer:
        writer.put([np.zeros((1, 40), np.float32)])
    few = pytest.raises(ValueError, match="0 tensors were put, expected 5")
    with few, irpa.Writer(tmp_path / "x", FIVE, "key"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_pieces_follow_each_other(tmp_path: Path) -> None:
    specs, array = [irpa.Tensor("e", "f32", (5, 2, 3))], np.arange(30, dtype=np.float32)
    whole = array.reshape(5, 2, 3)
    told: list[int] = []
    with irpa.Writer(tmp_path / "x", specs, told=told.append) as writer:
        writer.put(piece for piece in (whole[:1], whole[1:1], whole[1:4], whole[4:]))
    assert np.array_equal(irpa.read(tmp_path / "x", specs)["e"], whole)
    assert sum(told) == irpa.size(specs) == (tmp_path / "x").stat().st_size
    with pytest.raises(EmitError, match="e: made as"), irpa.Writer(tmp_path / "x", specs) as writer:
        writer.put([whole, whole[:1]])


def test_two_writers_wait_for_each_other(tmp_path: Path, right: bytes) -> None:
    made: list[str] = []
    with irpa.Writer(tmp_path / "x", FIVE, "key") as writer:
        second = threading.Thread(target=lambda: made.extend(put_all(tmp_path / "x")))
        second.start()
        for array in drawn(FIVE):
            second.join(0.05)
            assert second.is_alive()
            writer.put([array])
    second.join()
    assert made == [] and (tmp_path / "x").read_bytes() == right


CALLS = frozenset("open write ftruncate lseek fsync rename flock close pread".split())


def kill_before_every_call(root: Path) -> int:
    """Write in forks, each killed before one more of its calls, then go on; counts the calls."""
    irpa.SYNC = 300
    irpa.write(root / "right", FIVE, drawn(FIVE))
    right = (root / "right").read_bytes()
    for step in range(1000):
        path = root / str(step) / "x"
        path.parent.mkdir()
        child = os.fork()
        if child == 0:
            seen = 0

            def hook(frame: object, event: str, called: object, step: int = step) -> None:
                nonlocal seen
                if event == "c_call" and getattr(called, "__name__", "") in CALLS:
                    if seen == step:
                        os.kill(os.getpid(), signal.SIGKILL)
                    seen += 1

            sys.setprofile(hook)
            put_all(path)
            sys.setprofile(None)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        journal = path.with_name("x.journal")
        done = max(0, (journal.stat().st_size - 65) // 9) if journal.exists() else 0
        assert put_all(path) == [spec.name for spec in FIVE[done:]]
        assert path.read_bytes() == right
        shutil.rmtree(path.parent)
        if status == 0:
            return step
        assert status == -signal.SIGKILL
    raise AssertionError("the writing does not end")


def test_kill_before_each_call(tmp_path: Path) -> None:
    code = (  # in a process without threads, which can fork
        "import sys; sys.path.insert(0, sys.argv[1]); import test_irpa as t;"
        "print(t.kill_before_every_call(t.Path(sys.argv[2])))"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30
