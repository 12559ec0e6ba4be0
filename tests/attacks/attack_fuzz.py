"""Gives mutated files to the parsers, in this process; only their declared errors may come out.

usage: python tests/attacks/attack_fuzz.py COUNT SEED [PARSER [SECONDS]]

Prints JSON: how many inputs there were of each parser, how many of them were read, what each took
on average, and the first FAILURES that ended otherwise, each with what makes it again. The process
may read the working directory and what Python itself reads, and nothing else.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import math
import mmap
import os
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from attack_guard import ROOT, Guard, limited

sys.path[1:1] = [str(ROOT), str(ROOT / "tests")]

import attack_corpus  # noqa: E402
import attack_mutate  # noqa: E402
from attack_corpus import Seed  # noqa: E402
from attack_parsers import ERRORS, PARSERS  # noqa: E402

FAILURES = 20
SECONDS = 10.0  # of processor time, of one input
STUCK = 3  # times SECONDS before the process is ended: no exception of ours ends what it does


def _in_the_collector(_: Path) -> NoReturn:
    """The first exception is lost in a callback of the collector."""

    def callback(*_: object) -> NoReturn:
        gc.callbacks.remove(callback)
        while True:
            pass

    gc.callbacks.append(callback)
    gc.collect()
    while True:
        pass


# Parsers that do not come to an end, to see that it is seen.
HANGS: dict[str, Callable[[Path], object]] = {
    "planted: in Python": lambda _: [0 for _ in itertools.count() if False],
    "planted: in a library": lambda _: sum(itertools.repeat(0)),
    "planted: in the collector": _in_the_collector,
    "planted: dies": lambda _: os.abort(),
}
ALL = PARSERS | HANGS


class TooLong(BaseException):
    """An input took its time."""


def _too_long(*_: object) -> NoReturn:
    raise TooLong


@contextlib.contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    """TooLong after `seconds` of processor time, again and again: what is raised within a callback
    of the collector or a finaliser is lost. A library that lets no signal in is killed."""
    most = math.ceil(time.process_time() + STUCK * seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_PROF, seconds, seconds / 10)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def one(seed: Any, rng: random.Random, directory: Path, seconds: float = SECONDS) -> bool:
    """Write `seed` into `directory`, changed, and read it; False for a declared error."""
    (directory / seed.name).write_bytes(seed.mutator(rng, seed.files[seed.name]))
    try:
        with _bounded(seconds):
            ALL[seed.parser](directory)
        return True
    except ERRORS as error:
        assert str(error).strip(), "an error without words"
        return False


def _told(seed: Any, number: int, error: BaseException) -> dict[str, Any]:
    place = traceback.extract_tb(error.__traceback__)[-1]
    inner = [f for f in traceback.extract_tb(error.__traceback__) if str(ROOT) in f.filename]
    return {
        "parser": seed.parser,
        "file": seed.name,
        "number": number,
        "error": f"{type(error).__name__}: {error}"[:300],
        "at": f"{place.filename}:{place.lineno} from {inner[-1].filename}:{inner[-1].lineno}",
    }


@dataclass
class Fuzz:
    """`count` inputs of `seeds`. Input `number` follows from `start` and `number` alone."""

    count: int
    start: int
    seeds: Sequence[Seed]
    seconds: float = SECONDS

    def deck(self) -> list[Seed]:
        """The seeds, each as often as its share; dealt again and again."""
        return [seed for seed in self.seeds for _ in range(seed.share)]

    def run(self, directory: Path, at: mmap.mmap) -> dict[str, Any]:
        """Read them all in `directory`; `at` holds the number of the input that is read."""
        guard = Guard(directory)
        ran, read, spent, failures = Counter[str](), Counter[str](), Counter[str](), []
        homes = {id(seed): _home(seed, directory / str(i)) for i, seed in enumerate(self.seeds)}
        signal.signal(signal.SIGPROF, _too_long)
        deck = self.deck()
        for number in range(self.count):
            seed, began = deck[number % len(deck)], time.process_time()
            struct.pack_into("<Q", at, 0, number)
            try:
                rng = random.Random(f"{self.start} {number}")
                read[seed.parser] += one(seed, rng, homes[id(seed)], self.seconds)
            except BaseException as error:
                failures.append(_told(seed, number, error))
            spent[seed.parser] += round((time.process_time() - began) * 1e6)
            ran[seed.parser] += 1
            if guard.outside:
                outside = {"parser": seed.parser, "number": number, "outside": guard.outside[:]}
                failures.append(outside)
                guard.outside.clear()
            if len(failures) >= FAILURES:
                break
        guard.close()
        failures += [{"outside": guard.outside}] if guard.outside else []
        each = {name: round(spent[name] / ran[name]) for name in ran}
        return {"ran": ran, "read": read, "failures": failures, "microseconds": each}

    def in_child(self, directory: Path) -> dict[str, Any]:
        """`run` in a child process; one that is killed is a failure that has a number."""
        at, (read, write) = mmap.mmap(-1, 8), os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            try:
                os.dup2(2, 1)  # stdout is for what is found; libraries print, too
                limited()
                os.chdir(directory)
                with os.fdopen(write, "w") as out:
                    json.dump(self.run(directory, at), out)
                os._exit(0)
            finally:
                os._exit(1)
        os.close(write)
        with os.fdopen(read) as pipe:
            found = pipe.read()
        _, status = os.waitpid(child, 0)
        if status == 0:
            return json.loads(found)
        (number,) = struct.unpack("<Q", at)
        seed, how = self.deck()[number % len(self.deck())], os.waitstatus_to_exitcode(status)
        failure = {"parser": seed.parser, "file": seed.name, "number": number, "died": how}
        return {"ran": {}, "read": {}, "failures": [failure], "microseconds": {}}


def _home(seed: Seed, directory: Path) -> Path:
    directory.mkdir()
    for name, data in seed.files.items():
        (directory / name).write_bytes(data)
    return directory


def main() -> None:
    """As the command line says."""
    count, start = int(sys.argv[1]), int(sys.argv[2])
    seeds = attack_corpus.seeds()
    if sys.argv[3:]:
        planted = [Seed(name, {"x": b"x"}, "x", attack_mutate.in_bytes) for name in HANGS]
        seeds = [seed for seed in [*seeds, *planted] if seed.parser == sys.argv[3]]
    seconds = float(sys.argv[4]) if sys.argv[4:] else SECONDS
    with tempfile.TemporaryDirectory() as place:
        fuzz = Fuzz(count, start, seeds, seconds)
        print(json.dumps(fuzz.in_child(Path(place).resolve()), indent=1))


if __name__ == "__main__":
    main()
