"""Gives mutated files to the parsers, in this process; only their declared errors may come out.

usage: python tests/attacks/attack_fuzz.py COUNT SEED [PARSER]

Prints JSON: how many inputs there were of each parser, how many of them were read, and the first
FAILURES that ended otherwise, each with what makes it again. The process may read the working
directory and what Python itself reads, and nothing else.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from attack_guard import ROOT, Guard, limited

FAILURES = 20
SECONDS = 10  # of processor time, of one input


class TooLong(BaseException):
    """An input took SECONDS."""


def _too_long(*_: object) -> NoReturn:
    raise TooLong


def one(seed: Any, rng: random.Random, directory: Path) -> bool:
    """Write `seed` into `directory`, changed, and read it; False for a declared error."""
    from attack_parsers import ERRORS, PARSERS

    (directory / seed.name).write_bytes(seed.mutator(rng, seed.files[seed.name]))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        PARSERS[seed.parser](directory)
        return True
    except ERRORS as error:
        assert str(error).strip(), "an error without words"
        return False
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


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


def fuzz(count: int, start: int, seeds: Sequence[Any], directory: Path) -> dict[str, Any]:
    """`count` inputs. Input `number` follows from `start` and `number` alone."""
    guard = Guard(directory)
    ran, read, failures = Counter[str](), Counter[str](), []
    spent: Counter[str] = Counter()
    deck = [seed for seed in seeds for _ in range(seed.share)]
    homes = {id(seed): directory / str(i) for i, seed in enumerate(seeds)}
    for seed in seeds:
        homes[id(seed)].mkdir()
        for name, data in seed.files.items():
            (homes[id(seed)] / name).write_bytes(data)
    signal.signal(signal.SIGPROF, _too_long)
    for number in range(count):
        seed = deck[number % len(deck)]
        began = time.perf_counter()
        try:
            rng = random.Random(f"{start} {number}")
            read[seed.parser] += one(seed, rng, homes[id(seed)])
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            failures.append(_told(seed, number, error))
        finally:
            spent[f"{seed.parser} {seed.name}"] += time.perf_counter() - began  # type: ignore
        ran[seed.parser] += 1
        if guard.outside:
            failures.append({"parser": seed.parser, "number": number, "outside": guard.outside[:]})
            guard.outside.clear()
        if len(failures) >= FAILURES:
            break
    seconds = {name: round(each, 2) for name, each in spent.items()}
    return {"ran": ran, "read": read, "failures": failures, "seconds": seconds}


def main() -> None:
    """As the command line says."""
    import attack_corpus

    count, start = int(sys.argv[1]), int(sys.argv[2])
    seeds = [s for s in attack_corpus.seeds() if s.parser == sys.argv[3]] if sys.argv[3:] else (
        attack_corpus.seeds())  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        limited()
        os.chdir(place)
        result = fuzz(count, start, seeds, Path(place).resolve())
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    sys.path[1:1] = [str(ROOT), str(ROOT / "tests")]
    main()
