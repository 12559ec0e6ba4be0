"""Mutated files in numbers: only declared errors come out of the parsers, and nothing goes in.

The 50,000 of the slow test are always the same ones, so that a failure is met again; in a thorough
run there are as many others, and their seed is in the message.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from attack_parsers import PARSERS

HERE = Path(__file__).resolve().parent
MANY = 50_000


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


@pytest.mark.thorough
def test_fifty_thousand() -> None:
    found = fuzzed(MANY, 0)
    for parser, ran in found["ran"].items():
        read = found["read"].get(parser, 0)  # most changes break a file, some do not
        assert ran >= 200 and (parser == "pth of RWKV-7" or 0 < read < ran), (parser, ran, read)


@pytest.mark.thorough
def test_fifty_thousand_others() -> None:
    fuzzed(MANY, random.SystemRandom().randrange(1 << 32))
