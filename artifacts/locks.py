"""Locks between processes (flock), and scratch directories that die with their process.

flock is released by the kernel when a process ends, however it ends, so no lock is ever stale and
no process id is trusted: a scratch directory is stale exactly if its lock can be taken.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from artifacts.disk import explained, remove_tree

_PATIENCE_S = 1.0


def _open_current(path: Path, mode: int) -> int | None:
    """Open `path` and lock it with `mode`; None if the file was replaced or removed meanwhile.

    Raises BlockingIOError if `mode` has LOCK_NB and another holder is there.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(fd, mode)
        current = os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        current = False
    except BaseException:
        os.close(fd)
        raise
    if current:
        return fd
    os.close(fd)
    return None


def acquire(path: Path, *, shared: bool = False, waiting_for: str) -> int:
    """Take the lock file `path`, blocking; returns the descriptor that holds it until closed.

    After one second of waiting, one line on stderr says `waiting for <waiting_for>`.
    """
    mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    start, told = time.monotonic(), False
    with explained(path):
        while True:
            try:
                # Once the line is out there is nothing left to do but sleep in the kernel.
                fd = _open_current(path, mode if told else mode | fcntl.LOCK_NB)
                if fd is not None:
                    return fd
            except BlockingIOError:
                if time.monotonic() - start < _PATIENCE_S:
                    time.sleep(0.02)
                    continue
                print(f"waiting for {waiting_for}", file=sys.stderr, flush=True)
                told = True


@contextlib.contextmanager
def locked(path: Path, *, shared: bool = False, waiting_for: str) -> Iterator[None]:
    """Hold the lock file `path` for the block; see `acquire`."""
    fd = acquire(path, shared=shared, waiting_for=waiting_for)
    try:
        yield
    finally:
        os.close(fd)


class Scratch:
    """A directory of this process under `parent`, with a lock that says the process lives.

    `parent/<token>.lock` is held while the process lives; `parent/<token>/` holds its files.
    """

    def __init__(self, parent: Path) -> None:
        self.pid = os.getpid()
        self._count = 0
        with explained(parent):
            while True:
                self.token = f"{self.pid}-{os.urandom(6).hex()}"
                fd = _open_current(parent / f"{self.token}.lock", fcntl.LOCK_EX)
                if fd is not None:  # else a sweep took the file before the lock was held
                    break
            self._fd = fd
            self.dir = parent / self.token
            self.dir.mkdir()
        atexit.register(self.close)

    def new_path(self, suffix: str = "") -> Path:
        """A path in the directory that no one else uses."""
        self._count += 1
        return self.dir / f"{self._count}{suffix}"

    def close(self) -> None:
        """Remove the directory and give the lock back."""
        if self.pid == os.getpid() and self._fd >= 0:
            remove_tree(self.dir)
            self.dir.with_name(f"{self.token}.lock").unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


def _claim(parent: Path, token: str) -> int | None:
    """The lock of a scratch whose process is gone, -1 if it has no lock file, None if it lives."""
    try:
        fd = os.open(parent / f"{token}.lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1
    except OSError:
        return None  # another user's: leave it alone
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def alive(parent: Path, token: str) -> bool:
    """True if the process that made scratch `token` under `parent` still lives."""
    fd = _claim(parent, token)
    if fd is not None and fd >= 0:
        os.close(fd)
    return fd is None


def sweep(parent: Path) -> int:
    """Remove the scratch directories of processes that are gone; returns how many."""
    removed = 0
    for token in sorted({path.name.removesuffix(".lock") for path in parent.iterdir()}):
        fd = _claim(parent, token)
        if fd is None:
            continue
        try:
            if not (parent / token).exists() or remove_tree(parent / token):
                # The lock file goes last, and while it is held: a maker that waits for it sees
                # that it is gone and takes another name.
                (parent / f"{token}.lock").unlink(missing_ok=True)
                removed += 1
        finally:
            if fd >= 0:
                os.close(fd)
    return removed
