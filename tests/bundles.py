"""Bundles built by the command that a user types, and sequences run on them.

Each is built once a process, all from one cache, so that tests share what they can. The cache is
that of all processes of a run, and of more than one run where SCANWRIGHT_TESTS_CACHE names it.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import references
from references import Reference

from emit.checkpoint import read_config_file
from emit.entry import Model
from runtime import manifest as manifests
from runtime.company import poisoned
from runtime.manifest import Manifest
from runtime.module import Device, open_bundle
from runtime.session import Session

ROOT = Path(__file__).resolve().parent.parent
# The handed checkpoint of each family; those of two run in a default run.
DEFAULT = ("mamba2", "nemotron_h")
VARIANTS = ("qwen3_5", "qwen3_5_moe")  # the layers of another family: in thorough runs


def often(family: str) -> pytest.MarkDecorator:
    """The mark of a test of a family that is not in a default run."""
    return pytest.mark.thorough if family in VARIANTS else pytest.mark.slow


HANDED = [
    pytest.param(f"{f}/handed", marks=() if f in DEFAULT else often(f), id=f)
    for f in cases.FAMILIES
]
NEAR_TIE = 0.01  # a difference of two logits that decides nothing
FIRST_LOGITS = 1e-4


@functools.cache
def home() -> Path:
    """This process's directory for checkpoints and bundles."""
    path = Path(tempfile.mkdtemp(prefix="scanwright-tests-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def cache() -> Path:
    """The cache of builds."""
    return Path(os.environ["SCANWRIGHT_TESTS_CACHE"])


@functools.cache
def checkpoint(name: str) -> Path:
    """The checkpoint called `name` (see references)."""
    return references.write_checkpoint(name, home() / "checkpoints" / name)


def doit(
    words: Sequence[str],
    cwd: Path,
    cache: Path,
    env: Mapping[str, str] | None = None,
    umask: int = -1,
    one_core: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `doit` on the project's dodo.py with `cwd` as the directory that build/ is made in."""
    cwd.mkdir(parents=True, exist_ok=True)
    alone = ["taskset", "-c", str(min(os.sched_getaffinity(0)))] if one_core else []
    command = [
        *alone,
        sys.executable,
        "-m",
        "doit",
        "-f",
        str(ROOT / "dodo.py"),
        "-d",
        str(cwd),
        *words,
    ]
    variables = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "SCANWRIGHT_CACHE": str(cache),
        **(env or {}),
    }
    return subprocess.run(
        command, cwd=cwd, env=variables, umask=umask, capture_output=True, text=True, check=False
    )


def built(done: subprocess.CompletedProcess[str], cwd: Path) -> Path:
    """The bundle that a `doit build` made."""
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("bundle: "))
    return cwd / line.removeprefix("bundle: ")


CONTEXT = 160  # of a shape for a model with a KV cache


@functools.cache
def shape(name: str, base: str) -> str:
    """The shape `base`, with a context where the checkpoint `name` is of a model that needs one."""
    model = Model.of(read_config_file(checkpoint(name) / "config.json"))
    return f"{base}-c{CONTEXT}" if model.keeps_kv else base


@functools.cache
def build(name: str, target: str = "cpu", base: str = "b1-p8", *words: str) -> Path:
    """The bundle of the checkpoint `name` for the shape `base` (see `shape`), by `doit build`."""
    words = (f"model={checkpoint(name)}", f"target={target}", f"shape={shape(name, base)}", *words)
    family, case = name.split("/")
    extra = "-".join(word.replace("=", "-") for word in words[3:] if "/" not in word)
    cwd = home() / "tree" / family / case / extra  # all handed ones are called `checkpoint`
    return built(doit(["build", *words], cwd, cache()), cwd)


@dataclass(frozen=True)
class Opened:
    """A bundle on a device."""

    path: Path
    manifest: Manifest
    device: Device

    @classmethod
    def open(cls, path: Path, device: str | None = None) -> Opened:
        """As the runtime's own commands do it."""
        manifest = manifests.load(path)
        return cls(path, manifest, open_bundle(path, manifest, device))

    @property
    def family(self) -> str:
        """What `cases` calls its family: a text model may be under a name of its own."""
        return self.manifest.model.family.removesuffix("_text")

    def session(self) -> Session:
        """Fresh slots."""
        return Session(self.device, self.manifest)

    def host(self, buffer: Any) -> np.ndarray:
        """A host copy."""
        return np.asarray(self.device.to_host(buffer))

    def hosts(self, buffers: Sequence[Any]) -> list[np.ndarray]:
        """Host copies."""
        return [self.host(buffer) for buffer in buffers]


def follow(
    opened: Opened, texts: Mapping[int, Sequence[int]], forced: Mapping[int, Sequence[int]]
) -> dict[int, tuple[list[int], np.ndarray]]:
    """Read `texts[slot]` into each slot, then decode all slots together, feeding `forced[slot]`.

    Returns slot → (the token chosen at each of the `len(forced[slot])` steps, logits before each).
    Feeding what another program generated keeps both on one path past a near tie; where all chosen
    tokens are the forced ones, this is what greedy generation gives.
    """
    session, count = opened.session(), max(map(len, forced.values()))
    chosen: dict[int, list[int]] = {slot: [] for slot in texts}
    rows: dict[int, list[np.ndarray]] = {slot: [] for slot in texts}
    inputs = np.zeros((3, session.slots), np.int32)  # tokens, positions, active
    for slot, text in texts.items():
        logits, argmax = session.prefill(text)
        session.admit(slot)
        chosen[slot].append(int(opened.host(argmax)[0]))
        rows[slot].append(opened.host(logits)[0])
        inputs[:, slot] = forced[slot][0], len(text), 1
    for step in range(1, count):
        logits, argmax = map(opened.host, session.decode(*inputs))
        for slot in texts:
            chosen[slot].append(int(argmax[slot]))
            rows[slot].append(logits[slot])
            inputs[0, slot] = forced[slot][step]
        inputs[1] += inputs[2]
    return {slot: (chosen[slot], np.array(rows[slot])) for slot in texts}


def relative(got: np.ndarray, want: np.ndarray) -> float:
    """Largest absolute difference over the largest absolute value wanted; infinite for a NaN."""
    assert got.shape == want.shape
    if not np.isfinite(got).all():
        return float("inf")
    difference = np.abs(got.astype(np.float64) - want.astype(np.float64)).max()
    return float(difference / np.abs(want).max())


def worst(got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> float:
    """The largest `relative` of two lists of arrays."""
    return max(relative(a, b) for a, b in zip(got, want, strict=True))


def same_bits(got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> bool:
    """Whether two lists of arrays are equal to the bit."""
    return all(
        a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        for a, b in zip(got, want, strict=True)
    )


def check_references(opened: Opened, rows: Sequence[Reference]) -> None:
    """Assert the tokens of each reference, as many decoded together as there are slots."""
    slots = opened.manifest.shape.slots
    for start in range(0, len(rows), slots):
        group = dict(enumerate(rows[start : start + slots]))
        found = follow(
            opened,
            {slot: row.prompt for slot, row in group.items()},
            {slot: row.tokens for slot, row in group.items()},
        )
        for slot, row in group.items():
            check_tokens(*found[slot], row)


def check_tokens(chosen: Sequence[int], logits: np.ndarray, row: Reference) -> None:
    """Assert the reference's first logits, and its tokens but where it hardly decides itself."""
    assert len(chosen) == len(row.tokens) == references.NEW_TOKENS
    error = relative(logits[0], np.array(row.first_logits))
    assert error < FIRST_LOGITS, f"{len(row.prompt)} tokens: first logits are off by {error:.2g}"
    for step, (got, want, gap) in enumerate(zip(chosen, row.tokens, row.gaps, strict=True)):
        if got != want:
            where = f"{len(row.prompt)} tokens, step {step}: {got} for {want}, gap {gap}"
            assert gap < NEAR_TIE, where
            print(f"near tie of the reference: {where}")


def check_no_argmax(opened: Opened) -> None:
    """A row with a NaN has the argmax -1, in prefill and in decode; its neighbours have theirs."""
    session = opened.session()
    work = session.start([1, 2, 3], state=poisoned(session, opened.manifest))
    work.step()
    assert np.isnan(opened.host(work.logits)).any()
    assert opened.host(work.argmax).tolist() == [-1]
    slot = session.slots - 1
    session.admit(slot, work)
    inputs = np.zeros((3, session.slots), np.int32)
    inputs[0], inputs[2] = 1, 1
    logits, argmax = map(opened.host, session.decode(*inputs))
    assert argmax[slot] == -1
    assert (argmax[:slot] == np.argmax(logits[:slot], axis=-1)).all()
