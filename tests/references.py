"""Greedy generations of transformers, recorded so that comparing with them needs no torch.

Where transformers has no such model, or a case's row says that it is at fault, the float64 oracle
generates instead, and the file says so.

`python tests/references.py [FAMILY…]` derives them again and writes `tests/data/references/`, one
file a family; the test marked `oracle` in test_references.py derives them again and compares.

A checkpoint is named `family/name`; `family/handed` is the one under `tests/data/<family>`, which
has prompts of its own.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
import tempfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cases
import numpy as np
import oracles

DIRECTORY = Path(__file__).parent / "data" / "references"
HANDED = "mamba2/handed"  # the checkpoint of most tests of schedules
CHUNK = 8  # the compiled chunk that the prompt lengths are chosen around
LENGTHS = (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 1)
NEW_TOKENS = 48


@dataclass(frozen=True)
class Reference:
    """What a reference gives for one prompt: cached generation in float32, prompt in one shot, by
    transformers; or float64, a token at a time, by the oracle.

    `first_logits` f32[V] are those after the prompt; `gaps` the differences of the two largest
    logits before each of `tokens`.
    """

    prompt: list[int]
    tokens: list[int]
    gaps: list[float]
    first_logits: list[float]


def compared(family: str | None = None) -> list[str]:
    """Names of the checkpoints with references: each handed one and every case."""
    return [
        name
        for each in ([family] if family else cases.FAMILIES)
        for name in (f"{each}/handed", *(c.id for c in cases.CASES if c.family == each))
    ]


def by_transformers(name: str) -> bool:
    """Whether transformers is the reference of the checkpoint called `name`."""
    family, case = name.split("/")
    if case == "handed":
        return not hasattr(cases.family(family), "NO_REFERENCE")
    return cases.find(name).reference is None


def write_checkpoint(name: str, directory: Path) -> Path:
    """The checkpoint called `name`: a handed one where it lies, a case written to `directory`."""
    family, case = name.split("/")
    if case == "handed":
        return cases.HANDED / family / "checkpoint"
    return cases.build(cases.find(name), directory)


def digest(checkpoint: Path) -> str:
    """Of the tensors and the config, so that a case that changed is not taken for a wrong build."""
    sha = hashlib.sha256()
    for path in sorted(checkpoint.iterdir()):
        if path.name == "config.json" or ".safetensors" in path.name:
            sha.update(path.name.encode() + b"\0" + path.read_bytes())
    return sha.hexdigest()[:16]


def prompts(name: str, vocab_size: int) -> list[list[int]]:
    """The handed prompts, or seeded random ones of `LENGTHS` tokens."""
    family, case = name.split("/")
    if case == "handed":
        recorded = json.loads((cases.HANDED / family / "reference.json").read_text())
        return [entry["prompt"] for entry in recorded.values()]
    rng = np.random.default_rng(zlib.crc32(case.encode()))
    return [rng.integers(0, vocab_size, length).tolist() for length in LENGTHS]


def derive(name: str, checkpoint: Path, texts: Iterable[list[int]]) -> list[Reference]:
    """Generate with the reference of the checkpoint called `name`. End tokens end nothing."""
    if by_transformers(name):
        return by_library(checkpoint, texts, NEW_TOKENS)
    return _by_oracle(name.split("/")[0], checkpoint, texts)


def _by_oracle(family: str, checkpoint: Path, texts: Iterable[list[int]]) -> list[Reference]:
    from driver import Driver

    driver = Driver.load(checkpoint)
    params = {key: np.asarray(value) for key, value in driver.params.items()}
    model, found = oracles.oracle(family, driver.model.cfg, params), []
    for text in texts:
        tokens, gaps = model.greedy(text, NEW_TOKENS)
        first = model.run(text)[0][-1]
        found.append(
            Reference(
                text,
                tokens,
                [round(gap, 6) for gap in gaps],
                [float(f"{x:.8g}") for x in first],
            )
        )
    return found


def by_library(checkpoint: Path, texts: Iterable[list[int]], new_tokens: int) -> list[Reference]:
    """Generate with transformers."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    found = []
    for text in texts:
        tokens = torch.tensor([text])
        out = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),  # else it hides every token that pads
            max_new_tokens=new_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits = torch.cat(out.logits).numpy()
        largest = np.sort(logits, axis=1)[:, -2:]
        found.append(
            Reference(
                text,
                out.sequences[0, len(text) :].tolist(),
                [round(float(b - a), 6) for a, b in largest],
                [float(f"{x:.8g}") for x in logits[0]],
            )
        )
    return found


@functools.cache
def _recorded(family: str) -> dict[str, Any]:
    return json.loads((DIRECTORY / f"{family}.json").read_text(encoding="utf-8"))


def recorded(name: str) -> tuple[str, list[Reference]]:
    """(digest of the checkpoint called `name`, its references), from the files."""
    family, case = name.split("/")
    entry = _recorded(family)[case]
    return entry["checkpoint"], [Reference(**row) for row in entry["prompts"]]


def main(families: list[str]) -> None:
    """Derive all references of `families` (all if empty) and write them."""
    DIRECTORY.mkdir(exist_ok=True)
    for family in families or cases.FAMILIES:
        lines = []
        for name in compared(family):
            with tempfile.TemporaryDirectory() as scratch:
                checkpoint = write_checkpoint(name, Path(scratch) / "checkpoint")
                vocab_size = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
                rows = derive(name, checkpoint, prompts(name, vocab_size))
                smallest = min(min(row.gaps) for row in rows)
                print(f"{name}: {len(rows)} prompts, smallest gap {smallest:.6f}")
                head = f'"{name.split("/")[1]}": {{"checkpoint": "{digest(checkpoint)}", '
                lines.append(
                    f'{head}"prompts": [\n '
                    + ",\n ".join(json.dumps(vars(row)) for row in rows)
                    + "\n]}"
                )
        text = "{\n" + ",\n".join(lines) + "\n}\n"
        (DIRECTORY / f"{family}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
