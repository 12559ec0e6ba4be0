"""The graph under JAX generates what the references do; and the references are what they say.

A reference is transformers' cached `generate` of one unpadded prompt with single-shot prefill, or
the float64 oracle where the library is at fault (see `references`). Tokens may differ only where
the reference's own two largest logits all but tie, which is printed.
"""

from __future__ import annotations

from pathlib import Path

import cases
import numpy as np
import pytest
import references
from bundles import check_tokens
from driver import Driver, relative

CHUNK = 8
DEFAULT = {case.id for case in cases.QUICK}
AGAIN = {case.id for case in cases.FIRST}  # derived again in slow runs
EVERY = [
    pytest.param(
        name, marks=() if name in DEFAULT or name.endswith("/handed") else pytest.mark.slow
    )
    for name in references.compared()
]


@pytest.mark.parametrize("name", EVERY)
def test_graph_generates_the_reference(name: str, tmp_path: Path) -> None:
    """In the type that the weights are stored in, which float32 holds exactly."""
    made, rows = references.recorded(name)
    directory = references.write_checkpoint(name, tmp_path / "checkpoint")
    assert references.digest(directory) == made, "run tests/references.py again"
    kind = "f32" if name.endswith("/handed") else cases.find(name).dtype
    driver = Driver.load(directory, kind)
    for row in rows:
        tokens, logits = driver.greedy(row.prompt, references.NEW_TOKENS, CHUNK, row.tokens)
        check_tokens(tokens, logits, row)
    assert max(len(set(row.tokens)) for row in rows) > 8, "repetition tests nothing"


@pytest.mark.oracle
@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n.endswith("/handed") or n in AGAIN else pytest.mark.thorough)
        for n in references.compared()
        if references.by_transformers(n)
    ],
)
def test_recorded_references_are_what_the_library_gives(name: str, tmp_path: Path) -> None:
    """In float32, whose sums the library adds in another order on another processor: the first
    logits of one were within 2.2e-6 of those of another."""
    _, rows = references.recorded(name)
    directory = references.write_checkpoint(name, tmp_path / "checkpoint")
    again = references.derive(name, directory, [row.prompt for row in rows])
    for row, now in zip(rows, again, strict=True):
        assert relative(np.array(now.first_logits), np.array(row.first_logits)) < 1e-5
        assert np.allclose(now.gaps, row.gaps, atol=1e-4) or now.tokens != row.tokens
        check_tokens(now.tokens, np.array([now.first_logits]), row)


@pytest.mark.oracle
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["mamba2/limits_bind", "nemotron_h/limit_binds"])
def test_where_limits_bind_only_the_library_s_decode_step_differs(
    name: str, tmp_path: Path
) -> None:
    """Its single-shot prefill clamps dt as we do; its decode step does not."""
    directory = cases.build(cases.find(name), tmp_path)
    driver = Driver.load(directory)
    text = np.random.default_rng(2).integers(0, driver.model.cfg.vocab_size, 100).tolist()
    for length in (5, 33, 100):
        ours, _ = driver.prefill(text[:length], CHUNK)
        (theirs,) = references.by_library(directory, [text[:length]], 1)
        assert relative(ours, np.array(theirs.first_logits)) < 1e-4
    (theirs,) = references.by_library(directory, [text[:33]], 2)
    after, _ = driver.prefill([*text[:33], theirs.tokens[0]], CHUNK)
    gap = np.diff(np.sort(after)[-2:])[0]
    assert abs(gap - theirs.gaps[1]) > 1e-3, "the library has changed: drop this exception"
