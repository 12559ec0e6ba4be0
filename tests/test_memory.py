"""Opening a bundle maps its weights: one copy, in the page cache, for all entry points.

The two models differ in nothing but their vocabulary and so by ten times in weight bytes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import bundles
import cases
import pytest

from runtime import manifest as manifests

pytestmark = [
    pytest.mark.iree,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps"),
]

MB = 1 << 20
SHAPE = "b2-p8"
CONFIG = {"hidden_size": 256, "num_heads": 8, "head_dim": 64, "num_hidden_layers": 1}
VOCABULARY = {"small": 3000, "large": 30000}
ALLOWED = 3 * MB  # logits of 27000 more tokens, and the allocator's mood

# Opens a bundle, runs every entry point, and prints what of it is resident, by smaps.
PROGRAM = """
import json, re, sys
from pathlib import Path
from runtime import manifest
from runtime.module import Module
from runtime.session import Session

bundle, seed = Path(sys.argv[1]), json.loads(sys.argv[2])
described = manifest.load(bundle)
session = Session(Module.open(bundle, described, None, seed), described)
session.prefill(list(range(11)))
session.admit(0)
logits, _ = session.decode([5, 0], [11, 0], [1, 0])
session.device.to_host(logits)
session.extract(0)
found = {"anonymous": 0, "params": 0, "mapped": 0, "mappings": 0}
for area in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())[1:]:
    head, *rows = area.splitlines()
    sizes = {k: int(v.split()[0]) << 10 for k, v in (r.split(":", 1) for r in rows) if "kB" in v}
    found["anonymous"] += sizes["Anonymous"]
    if head.endswith("/params.irpa"):
        found["params"] += sizes["Rss"] - sizes["Anonymous"]
        found["mapped"] += sizes["Size"]
        found["mappings"] += 1
print(json.dumps(found))
"""


@cache
def bundle(name: str) -> Path:
    """The bundle of a seeded random model with the vocabulary called `name`."""
    case = cases.Case(name, "mamba2", {**CONFIG, "vocab_size": VOCABULARY[name]})
    directory = cases.build(case, bundles.home() / "checkpoints" / name)
    cwd = bundles.home() / "memory"
    words = ["build", f"model={directory}", "target=cpu", f"shape={SHAPE}"]
    return bundles.built(bundles.doit(words, cwd, bundles.cache()), cwd)


@cache
def measured(name: str, random_seed: int | None = None) -> dict[str, Any]:
    """Bytes, in a fresh process; with `random_seed` the parameters are made in memory."""
    command = [sys.executable, "-c", PROGRAM, str(bundle(name)), json.dumps(random_seed)]
    done = subprocess.run(command, cwd=bundles.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def params_bytes(name: str) -> int:
    ref = manifests.load(bundle(name)).files.params
    assert ref is not None
    return ref.size


def test_anonymous_memory_does_not_grow_with_the_weights() -> None:
    more = params_bytes("large") - params_bytes("small")
    assert params_bytes("large") > 50 * MB and params_bytes("large") > 6 * params_bytes("small")
    growth = measured("large")["anonymous"] - measured("small")["anonymous"]
    print(f"{more / MB:.1f} MB more of weights: {growth / MB:+.2f} MB of anonymous memory")
    assert growth < ALLOWED < more / 10


def test_all_entry_points_share_one_mapping_of_the_weights() -> None:
    """What every entry has read is resident once: half of it, as the other half is embeddings."""
    found, size = measured("large"), params_bytes("large")
    assert found["mappings"] == 1
    assert size <= found["mapped"] < size + 64 * 1024
    assert 0.45 * size < found["params"] <= found["mapped"]


def test_weights_in_memory_would_be_seen() -> None:
    """The measurement tells: parameters made up in memory grow with the model."""
    growth = measured("large", 1)["anonymous"] - measured("small", 1)["anonymous"]
    more = params_bytes("large") - params_bytes("small")
    assert growth > 0.9 * more
    assert measured("large", 1)["mappings"] == 0


# Steps with more state than the runtime's pools find again: 7 allocations of more than a third of
# their 64 MiB slabs, read and written.
STEPS = """
import json, sys
from pathlib import Path
import numpy as np
from runtime import manifest
from runtime.module import Module
from runtime.session import Session

bundle = Path(sys.argv[1])
described = manifest.load(bundle)
session = Session(Module.open(bundle, described), described)
rows = np.ones(session.slots, np.int32)

def anonymous():
    text = Path("/proc/self/smaps_rollup").read_text()
    (line,) = (line for line in text.splitlines() if line.startswith("Anonymous:"))
    return int(line.split()[1]) << 10

found = []
for _ in range(4):
    for _ in range(8):
        logits, argmax = session.decode(rows, rows, rows)
        session.device.to_host(argmax)
        session.reset(0)
        session.start([1, 2]).step()
        session.extract(0)
    found.append(anonymous())
print(json.dumps(found))
"""


@pytest.mark.slow
def test_steps_keep_no_memory() -> None:
    config = {
        "hidden_size": 64, "num_heads": 16, "head_dim": 32, "expand": 8, "state_size": 128,
        "num_hidden_layers": 7, "vocab_size": 64,
    }  # fmt: skip
    case = cases.Case("stateful", "mamba2", config)
    directory = cases.build(case, bundles.home() / "checkpoints" / "stateful")
    cwd = bundles.home() / "stateful"
    words = ["build", f"model={directory}", "target=cpu", "shape=b128-p8", "--no-proof"]
    made = bundles.built(bundles.doit(words, cwd, bundles.cache()), cwd)
    state = manifests.load(made).state_bytes_per_slot * 128
    assert state > 200 * MB
    command = [sys.executable, "-c", STEPS, str(made)]
    done = subprocess.run(command, cwd=bundles.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, *later = json.loads(done.stdout)
    print(f"{state / MB:.0f} MB of state; anonymous memory {first / MB:.0f} MB, then", later)
    assert max(later) < 1.02 * first
