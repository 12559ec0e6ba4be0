"""Greedy generations of transformers, recorded so that comparing with them needs no torch.

`python tests/references.py` derives them again and writes `tests/data/references.json`; the test
marked `oracle` in test_exact.py derives them again and compares.
"""

from __future__ import annotations

import functools
import hashlib
import json
import tempfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cases
import numpy as np

FILE = Path(__file__).parent / "data" / "references.json"
HANDED = "handed"  # the checkpoint under tests/data/mamba2, with prompts of its own
CHUNK = 8  # the compiled chunk that the prompt lengths are chosen around
LENGTHS = (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 1)
NEW_TOKENS = 48


@dataclass(frozen=True)
class Reference:
    """What transformers gives for one prompt in float32, cached generation, prompt in one shot.

    `first_logits` f32[V] are those after the prompt; `gaps` the differences of the two largest
    logits before each of `tokens`.
    """

    prompt: list[int]
    tokens: list[int]
    gaps: list[float]
    first_logits: list[float]


def compared() -> list[str]:
    """Names of the checkpoints with references: the handed one and every comparable case."""
    return [HANDED, *(case.name for case in cases.CASES if case.reference is None)]


def write_checkpoint(name: str, directory: Path) -> Path:
    """The checkpoint called `name`: the handed one where it lies, a case written to `directory`."""
    if name == HANDED:
        return cases.HANDED / "mamba2" / "checkpoint"
    (case,) = (case for case in cases.CASES if case.name == name)
    return cases.build(case, directory)


def digest(checkpoint: Path) -> str:
    """Of the tensors and the config, so that a case that changed is not taken for a wrong build."""
    sha = hashlib.sha256()
    for path in sorted(checkpoint.iterdir()):
        if path.name == "config.json" or ".safetensors" in path.name:
            sha.update(path.name.encode() + b"\0" + path.read_bytes())
    return sha.hexdigest()[:16]


def prompts(name: str, vocab_size: int) -> list[list[int]]:
    """The handed prompts, or seeded random ones of `LENGTHS` tokens."""
    if name == HANDED:
        recorded = json.loads((cases.HANDED / "mamba2" / "reference.json").read_text())
        return [entry["prompt"] for entry in recorded.values()]
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return [rng.integers(0, vocab_size, length).tolist() for length in LENGTHS]


def derive(checkpoint: Path, texts: Iterable[list[int]]) -> list[Reference]:
    """Generate with transformers. End tokens end nothing."""
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
            max_new_tokens=NEW_TOKENS,
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
def recorded() -> dict[str, tuple[str, list[Reference]]]:
    """Name → (digest of its checkpoint, references), from the file."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    return {
        name: (entry["checkpoint"], [Reference(**row) for row in entry["prompts"]])
        for name, entry in content.items()
    }


def main() -> None:
    """Derive all references and write them."""
    content: dict[str, Any] = {}
    for name in compared():
        with tempfile.TemporaryDirectory() as scratch:
            checkpoint = write_checkpoint(name, Path(scratch) / name)
            vocab_size = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
            rows = derive(checkpoint, prompts(name, vocab_size))
            smallest = min(min(row.gaps) for row in rows)
            print(f"{name}: {len(rows)} prompts, smallest gap {smallest:.6f}")
            content[name] = {"checkpoint": digest(checkpoint), "prompts": [vars(r) for r in rows]}
    lines = (
        f'"{name}": {{"checkpoint": "{entry["checkpoint"]}", "prompts": [\n '
        + ",\n ".join(json.dumps(row) for row in entry["prompts"])
        + "\n]}"
        for name, entry in content.items()
    )
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
