"""Tells how far a long stage is: a bar on a terminal, else a line now and then.

A stage runs as a process whose output is kept for its errors; SCANWRIGHT_PROGRESS then is the
number of a descriptor that leads to the user. Without it that is stderr.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

VARIABLE = "SCANWRIGHT_PROGRESS"
QUIET_S = 0.5  # before a bar is shown
REDRAW_S = 0.1
FIRST_S = 5.0  # before the first line where there is no terminal
LINE_S = 30.0  # between the lines there
TOLD_S = 1.0  # what took longer has a last line there
WINDOW_S = 10.0  # that the rate is measured over
ERASE = "\r\x1b[K"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def sized(count: float) -> str:
    """A number of bytes as a person reads it: `512 B`, `1.50 GiB`."""
    unit = 0
    while count >= 1023.5 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    digits = 0 if unit == 0 or count >= 100 else 1 if count >= 10 else 2
    return f"{count:.{digits}f} {_UNITS[unit]}"


def clock(seconds: float) -> str:
    """`0:07`, `12:34` or `1:02:03`."""
    whole = int(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def line(word: str, done: int, total: int, rate: float, unit: str = "") -> str:
    """What there is to say of `done` of `total`, at `rate` a second (0: not known).

    They count `unit`, a word in the plural, or bytes.
    """
    share = 100 * done // total if total else 100
    of = f"{done} of {total} {unit}" if unit else f"{sized(done)} of {sized(total)}"
    text = f"{word}: {share:3} %, {of}"
    if rate > 0:
        speed = f"{_short(rate)} {unit}" if unit else sized(rate)
        text += f", {speed}/s, {clock(max(0, total - done) / rate)} left"
    return text


def _short(rate: float) -> str:
    """Two digits or more, no exponent."""
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}" if rate >= 1 else f"{rate:.2g}"


def bar(word: str, done: int, total: int, rate: float, width: int, unit: str = "") -> str:
    """The line with a bar behind it, in at most `width` columns."""
    text = line(word, done, total, rate, unit)
    room = min(width - len(text) - 4, 40)
    if room < 8:
        return text[: max(width - 1, 0)]
    full = min(room, room * done // total) if total else room
    return f"{text} [{'#' * full}{'.' * (room - full)}]"


class Progress:
    """Counts up to `total` bytes, or `unit`, and tells of them under the name `word`, as a context.

    On a terminal a bar is redrawn in place once the work takes longer than a moment, and is gone at
    the end. Elsewhere a line is written after some seconds, then every half minute, and one at the
    end of what took longer than a second. `done` are there before any work, and count for no rate.
    """

    def __init__(
        self,
        word: str,
        total: int,
        descriptor: int,
        now: Callable[[], float] = time.monotonic,
        *,
        unit: str = "",
        done: int = 0,
    ) -> None:
        self.done = done
        self._word, self._total, self._to, self._now = _plain(word), total, descriptor, now
        self._unit = unit
        self._terminal = os.isatty(descriptor)
        self._began = (now(), done)
        self._next = self._began[0] + (QUIET_S if self._terminal else FIRST_S)
        self._seen = deque([self._began])
        self._drawn = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._drawn:
            self._write(ERASE)
        then, before = self._began
        seconds = self._now() - then
        if kind is None and not self._terminal and seconds > TOLD_S:
            text = line(self._word, self.done, self._total, 0.0, self._unit)
            rate = (self.done - before) / seconds
            speed = f"{_short(rate)} {self._unit}" if self._unit else sized(rate)
            self._write(f"{text}, {speed}/s, in {clock(seconds)}\n")

    def add(self, count: int) -> None:
        """`count` more are done."""
        self.reach(self.done + count)

    def reach(self, done: int) -> None:
        """`done` are done in all."""
        self.done = done
        now = self._now()
        if now < self._next:
            return
        self._seen.append((now, self.done))
        while len(self._seen) > 2 and self._seen[1][0] <= now - WINDOW_S:
            self._seen.popleft()
        (then, before), rate = self._seen[0], 0.0
        if now > then:
            rate = max(0, self.done - before) / (now - then)
        if self._terminal:
            width = _columns(self._to)
            text = bar(self._word, self.done, self._total, rate, width, self._unit)
            self._drawn, self._next = True, now + REDRAW_S
            self._write(ERASE + text)
        else:
            self._next = now + LINE_S
            self._write(line(self._word, self.done, self._total, rate, self._unit) + "\n")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone: the work goes on
            os.write(self._to, text.encode())


def _plain(word: str) -> str:
    """The word without what a terminal would obey: names of files come from elsewhere."""
    return "".join(char if char.isprintable() else "?" for char in word)


def _columns(descriptor: int) -> int:
    try:
        return os.get_terminal_size(descriptor).columns or 80
    except OSError:
        return 80


def progress(word: str, total: int, *, unit: str = "", done: int = 0) -> Progress:
    """The Progress of this process's stage, told where the user sees it."""
    given = os.environ.get(VARIABLE, "")
    if given:
        # Not of the terminal's foreground group, it would be stopped for writing to some terminals.
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    descriptor = int(given) if given.isdecimal() else 2
    return Progress(word, total, descriptor, unit=unit, done=done)


class _Counted(io.BufferedReader):
    """A file that tells how far it was read."""

    def __init__(self, path: Path, told: Callable[[int], object]) -> None:
        super().__init__(io.FileIO(path))
        self._told = told

    def read(self, size: int | None = -1, /) -> bytes:
        """As of any file."""
        data = super().read(size)
        self._told(self.tell())
        return data


@contextlib.contextmanager
def shown(word: str, path: Path) -> Iterator[io.BufferedReader]:
    """The file, open to be read to its end, and as far as it was, that is told; OSError if not."""
    with progress(word, path.stat().st_size) as told, _Counted(path, told.reach) as file:
        yield file
