"""Mutated files in numbers: only declared errors come out of the parsers, and nothing goes in.

The 50,000 of the slow test are always the same ones, so that a failure is met again; in a thorough
run there are as many others, and their seed is in the message.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attack_corpus
import pytest
from attack_fuzz import HANGS
from attack_parsers import PARSERS

HERE = Path(__file__).resolve().parent
MANY = 50_000
# The .pth is no RWKV-7, nobody signed the signature, and the reference is one of another kind.
NEVER_READ = ("pth of RWKV-7", "signature", "reference")


def fuzzed(count: int, seed: int) -> dict[str, Any]:
    """What attack_fuzz.py found; a parser that takes the process with it fails here."""
    command = [sys.executable, "-W", "ignore", HERE / "attack_fuzz.py", str(count), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, (seed, done.returncode, done.stderr[-2000:])
    found = json.loads(done.stdout)
    assert found["failures"] == [], json.dumps({"seed": seed, **found}, indent=1)
    assert sum(found["ran"].values()) == count
    return found


def test_a_few_thousand() -> None:
    found = fuzzed(2000, 1)
    assert found["ran"].keys() == PARSERS.keys() - {"bundle's tokenizer"}


@pytest.mark.parametrize("name", HANGS)
def test_an_input_that_hangs_or_dies_is_found(name: str) -> None:
    command = [sys.executable, "-W", "ignore", HERE / "attack_fuzz.py", "1", "0", name, "0.2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    (failure,) = json.loads(done.stdout)["failures"]
    assert (failure["parser"], failure["number"]) == (name, 0)
    how = {"planted: in a library": -signal.SIGXCPU, "planted: dies": -signal.SIGABRT}
    assert failure.get("died") == how.get(name) and ("error" in failure) == (name not in how)


def test_mutations_follow_from_their_number_alone() -> None:
    """In any order, and in another process with another hash seed."""
    code = "import test_mutated; print(test_mutated.digest(reversed(range(3000))))"
    path = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONHASHSEED": "5"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == digest(range(3000))


def digest(numbers: Iterable[int]) -> str:
    """Of the inputs of seed 0 of these numbers, made in this order."""
    deck = [seed for seed in attack_corpus.seeds() for _ in range(seed.share)]
    made = {}
    for number in numbers:
        seed = deck[number % len(deck)]
        data = seed.mutator(random.Random(f"0 {number}"), seed.files[seed.name])
        made[number] = hashlib.sha256(data).hexdigest()
    return hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()


@pytest.mark.slow
def test_fifty_thousand() -> None:
    found = fuzzed(MANY, 0)
    for parser, ran in found["ran"].items():
        read = found["read"].get(parser, 0)  # most changes break a file, some do not
        assert ran >= 200 and (parser in NEVER_READ or 0 < read < ran), (parser, ran, read)


@pytest.mark.thorough
def test_fifty_thousand_others() -> None:
    fuzzed(MANY, random.SystemRandom().randrange(1 << 32))
