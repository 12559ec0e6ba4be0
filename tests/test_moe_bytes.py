"""A decode step of a mixture of experts reads the weights of the chosen experts and no others.

Counted in pages: the accessed bits of the mapped parameters are cleared before a step and summed
after it (`Referenced` in smaps). Pages are kept small, else one bit stands for 2 MiB.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import bundles
import cases
import pytest

from runtime import manifest as manifests

pytestmark = [
    pytest.mark.iree,
    pytest.mark.skipif(sys.platform != "linux", reason="reads and clears accessed bits in /proc"),
]

ALLOWED = 1.3  # bytes read for each byte of active parameters
EXPERTS, CHOSEN = 16, 2
CONFIG = {
    "hidden_size": 96,
    "intermediate_size": 1024,
    "num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "num_hidden_layers": 2,
    "expert_layer_period": 1,
    "expert_layer_offset": 0,
}

# Opens a bundle, decodes a few tokens in slot 0, and prints the bytes of params.irpa that each of
# the next steps reads.
PROGRAM = """
import ctypes, json, re, sys
from pathlib import Path

PR_SET_THP_DISABLE = 41
assert ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0

from runtime import manifest
from runtime.module import Module
from runtime.session import Session

bundle = Path(sys.argv[1])
described = manifest.load(bundle)
session = Session(Module.open(bundle, described), described)
idle = [0] * (session.slots - 1)

def decode(token, position):
    logits, _ = session.decode([token, *idle], [position, *idle], [1, *idle])
    session.device.to_host(logits)

def areas():
    text = Path("/proc/self/smaps").read_text()
    found = (a.partition("\\n") for a in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", text))
    return [(head, rest) for head, _, rest in found if head.endswith("/params.irpa")]

def referenced():
    return sum(int(re.search(r"Referenced: +([0-9]+) kB", rest)[1]) << 10 for _, rest in areas())

def touch():  # a page that is not mapped yet comes with its neighbours
    for head, _ in areas():
        start, end = (int(word, 16) for word in head.split()[0].split("-"))
        for page in range(start, end, 4096):
            ctypes.c_char.from_address(page).value

session.prefill([3, 1, 4])
session.admit(0)
decode(5, 3)
touch()
found = []
for step in range(4):
    Path("/proc/self/clear_refs").write_text("1")
    cleared = referenced()
    decode(7 + step, 4 + step)
    found.append((cleared, referenced()))
print(json.dumps(found))
"""


def bundle(shape: str) -> Path:
    """The bundle of a Jamba whose weights are nearly all in experts."""
    case = cases.Case("bytes", "jamba", CONFIG)
    directory = cases.build(case, bundles.home() / "checkpoints" / "bytes")
    cwd = bundles.home() / "bytes"
    words = ["build", f"model={directory}", "target=cpu", f"shape={shape}", "--no-proof"]
    return bundles.built(bundles.doit(words, cwd, bundles.cache()), cwd)


def measured(made: Path) -> list[list[int]]:
    """(bytes found right after clearing, bytes read) of four steps, in a fresh process."""
    command = [sys.executable, "-c", PROGRAM, str(made)]
    done = subprocess.run(command, cwd=bundles.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def sizes(made: Path) -> tuple[float, float]:
    """Bytes of the parameters that a token uses, and of all."""
    params = manifests.load(made).params
    total = sum(param.nbytes for param in params)
    experts = sum(p.nbytes for p in params if ".experts." in p.name)
    assert experts > 0.9 * total
    return total - experts * (1 - CHOSEN / EXPERTS), total


def test_a_step_reads_the_chosen_experts_and_no_others() -> None:
    made = bundle("b1-p8-c16")
    active, total = sizes(made)
    assert total > 5 * active
    for cleared, read in measured(made):
        print(
            f"{read / 1e6:.2f} MB read, {active / 1e6:.2f} MB active, {total / 1e6:.1f} MB in all"
        )
        assert cleared < 0.05 * active, "accessed bits cannot be cleared here"
        assert 0.9 * active < read < ALLOWED * active


@pytest.mark.slow
def test_a_step_that_reads_all_experts_would_be_seen() -> None:
    """Eight slots choose as many experts as there are: that step takes all, and is found to."""
    made = bundle(f"b{EXPERTS // CHOSEN}-p8-c16")
    active, total = sizes(made)
    for _, read in measured(made):
        assert read > 0.95 * total > ALLOWED * active
