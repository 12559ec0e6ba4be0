"""Progress: its words, a bar on a terminal, lines elsewhere, and its way through the build."""

from __future__ import annotations

import os
import pty
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from artifacts import process
from runtime.errors import UserError
from runtime.progress import ERASE, TOLD_S, Progress, bar, clock, line, sized

GIB = 1 << 30


def test_sizes_and_times_are_short() -> None:
    sizes = [0, 1023, 1024, 10 * 1024, 1023.6 * 1024, 1.5 * GIB, 123.4 * GIB, 5000 * 1024 * GIB]
    assert [sized(n) for n in sizes] == (
        "0 B/1023 B/1.00 KiB/10.0 KiB/1.00 MiB/1.50 GiB/123 GiB/5000 TiB".split("/")
    )
    assert [clock(s) for s in (0, 7.9, 754, 3723)] == ["0:00", "0:07", "12:34", "1:02:03"]


def test_a_line_tells_share_bytes_rate_and_what_is_left() -> None:
    assert line("convert", 3 * GIB, 12 * GIB, GIB / 2) == (
        "convert:  25 %, 3.00 GiB of 12.0 GiB, 512 MiB/s, 0:18 left"
    )
    assert line("convert", 0, 12, 0.0) == "convert:   0 %, 0 B of 12 B"
    assert line("convert", 0, 0, 0.0) == "convert: 100 %, 0 B of 0 B"


@pytest.mark.parametrize("width", [5, 30, 60, 80, 120, 300])
@pytest.mark.parametrize("done", [0, 1, GIB // 2, GIB])
def test_a_bar_fits_the_terminal(done: int, width: int) -> None:
    text = bar("convert", done, GIB, 1e9, width)
    assert len(text) < width and text.startswith("convert"[: width - 1])
    if width >= 120:
        inner = text.partition("[")[2].rstrip("]")
        assert len(inner) == 40 and inner == "#" * (40 * done // GIB) + "." * (
            40 - 40 * done // GIB
        )


class Clock:
    """A time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """The ends of a terminal: the user's, and the program's."""
    user, program = pty.openpty()
    yield user, program
    os.close(user)
    os.close(program)


def seen(terminal: tuple[int, int]) -> str:
    """All that was written to the terminal."""
    user, program = terminal
    os.write(program, b"\0")
    text = b""
    while not text.endswith(b"\0"):
        text += os.read(user, 1 << 16)
    return text[:-1].decode()


def test_on_a_terminal_a_bar_is_drawn_and_gone_at_the_end(terminal: tuple[int, int]) -> None:
    program, time = terminal[1], Clock()
    with Progress("convert", 1000, program, time) as shown:
        for _ in range(9):
            time.now += 0.2
            shown.add(100)
    text = seen(terminal)
    first, *_, last, after = text.split(ERASE)[1:]
    assert first.startswith("convert:  30 %, 300 B of 1000 B, 500 B/s, 0:01 left")
    assert last.startswith("convert:  90 %") and after == ""


def test_a_moment_shows_nothing(terminal: tuple[int, int]) -> None:
    with Progress("convert", 1000, terminal[1], Clock()) as shown:
        shown.add(1000)
    assert seen(terminal) == ""


def test_elsewhere_there_is_a_line_now_and_then(tmp_path: Path) -> None:
    """Soon, then each half minute, and at the end, however often something is done."""
    time = Clock()
    with (tmp_path / "log").open("wb") as out, Progress("w", 1000, out.fileno(), time) as shown:
        for _ in range(1000):
            time.now += 0.0625
            shown.add(1)
    assert (tmp_path / "log").read_text().splitlines() == [
        "w:   8 %, 80 B of 1000 B, 16 B/s, 0:57 left",
        "w:  56 %, 560 B of 1000 B, 16 B/s, 0:27 left",
        "w: 100 %, 1000 B of 1000 B, 16 B/s, in 1:02",
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_elsewhere_a_moment_and_a_failure_have_no_last_line(tmp_path: Path, fails: bool) -> None:
    time, caught = Clock(), pytest.raises(ZeroDivisionError) if fails else nullcontext()
    with (tmp_path / "log").open("wb") as out, caught, Progress("w", 9, out.fileno(), time) as to:
        time.now += TOLD_S + 1 if fails else TOLD_S
        to.add(5)
        assert 1 / (not fails)
    assert (tmp_path / "log").read_text() == ""


def test_other_things_than_bytes_are_counted(terminal: tuple[int, int], tmp_path: Path) -> None:
    assert line("proof", 3, 12, 0.25, "calls") == (
        "proof:  25 %, 3 of 12 calls, 0.25 calls/s, 0:36 left"
    )
    time = Clock()
    with (tmp_path / "log").open("wb") as out:
        shown = Progress("p", 8, out.fileno(), time, unit="calls")
        with shown:
            time.now += 4
            shown.add(8)
    assert (tmp_path / "log").read_text() == "p: 100 %, 8 of 8 calls, 2.0 calls/s, in 0:04\n"


def test_what_was_there_before_counts_for_no_rate(terminal: tuple[int, int]) -> None:
    """A download that goes on: 900 of 1000 bytes are here, and 10 come in a second."""
    time = Clock()
    with Progress("d", 1000, terminal[1], time, done=900) as shown:
        time.now += 1
        shown.reach(910)
    assert seen(terminal).split(ERASE)[1].startswith("d:  91 %, 910 B of 1000 B, 10 B/s, 0:09 left")


def test_a_name_says_nothing_to_the_terminal(terminal: tuple[int, int]) -> None:
    time = Clock()
    with Progress("download \x1b[2Ja\nb", 10, terminal[1], time) as shown:
        time.now += 1
        shown.add(1)
    text = seen(terminal).replace(ERASE, "")
    assert text.startswith("download ?[2Ja?b:") and text.isprintable()


def test_the_rate_is_that_of_the_last_seconds(tmp_path: Path) -> None:
    """What a continued conversion finds done at once does not count for long."""
    time = Clock()
    with (tmp_path / "log").open("wb") as out, Progress("w", 10**6, out.fileno(), time) as shown:
        shown.add(500_000)
        for _ in range(600):
            time.now += 0.2
            shown.add(100)
    assert "500 B/s" in (tmp_path / "log").read_text().splitlines()[-2]


def test_a_terminal_that_went_away_stops_nothing(terminal: tuple[int, int]) -> None:
    time, gone = Clock(), os.dup(terminal[1])
    with Progress("w", 10, gone, time) as shown:
        os.close(gone)
        time.now = 1
        shown.add(1)


STAGE = """
import sys, time
from runtime.progress import progress
print("kept for errors", file=sys.stderr)
with progress("stage", 100) as shown:
    for _ in range(8):
        time.sleep(0.1)
        shown.add(5)
    sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, 1])
def test_the_bar_of_a_stage_reaches_the_terminal_of_the_build(
    code: int, terminal: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stage_of_test.py").write_text(STAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(process, "_USER", terminal[1])
    failed = pytest.raises(UserError, match="kept for errors") if code else nullcontext()
    with failed:
        process.run_module("stage_of_test", [str(code)], tmp_path, progress=True)
    text = seen(terminal)
    assert "stage:  " in text and " of 100 B" in text and "kept" not in text
    assert text.endswith(ERASE)


def test_no_other_stage_has_a_way_to_the_user(
    terminal: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stage_of_test.py").write_text(STAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(process, "_USER", terminal[1])
    process.run_module("stage_of_test", ["0"], tmp_path)
    assert seen(terminal) == ""
