"""The graph under JAX against transformers in float32: greedy tokens and first-step logits.

The reference is its cached `generate` of one unpadded prompt with single-shot prefill. Where tokens
differ, the reference's own gap between its two largest logits must be a near tie, and is reported.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cases
import jax
import numpy as np
import oracles
import pytest
from driver import Driver, relative

pytestmark = pytest.mark.oracle

NEW_TOKENS = 48
LENGTHS = (1, 2, 31, 32, 33, 100)
CHUNK = 32
NEAR_TIE = 0.01
REFERENCED = [case for case in cases.CASES if case.reference is None]
OWN_ONLY = [case for case in cases.CASES if case.reference is not None]


@pytest.fixture(autouse=True)
def strict_promotion() -> Any:
    with jax.numpy_dtype_promotion("strict"):
        yield


class Reference:
    """A checkpoint as transformers loads it, in float32."""

    def __init__(self, directory: Path) -> None:
        self.torch = pytest.importorskip("torch", reason="needs torch")
        transformers: Any = pytest.importorskip("transformers", reason="needs transformers")
        assert transformers.__version__ == "5.24.0", "tokens are those of the pinned version"
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model = transformers.AutoModelForCausalLM.from_pretrained(
                directory, dtype=self.torch.float32, local_files_only=True
            ).eval()

    def greedy(self, prompt: Sequence[int], new_tokens: int) -> tuple[list[int], np.ndarray]:
        """Generated tokens, and the raw logits [new_tokens, V] before each."""
        tokens = self.torch.tensor([list(prompt)])
        with self.torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = self.model.generate(
                tokens,
                attention_mask=self.torch.ones_like(tokens),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                eos_token_id=None,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        logits = self.torch.stack(out.logits, dim=1)[0].numpy()
        return out.sequences[0, len(prompt) :].tolist(), logits


def compare(
    got: tuple[list[int], np.ndarray], want: tuple[list[int], np.ndarray], label: str
) -> str:
    """Assert tokens and first logits agree up to a near tie; returns what was measured."""
    tokens, logits = got
    wanted, reference = want
    first = relative(logits[0], reference[0])
    assert first < 1e-4, f"{label}: first-step logits differ by {first:.1e}"
    ordered = np.sort(reference, axis=-1)
    gaps = ordered[:, -1] - ordered[:, -2]
    line = f"{label}: first logits {first:.1e}, smallest gap {gaps.min():.1e}"
    if tokens != wanted:
        at = next(i for i, (a, b) in enumerate(zip(tokens, wanted, strict=True)) if a != b)
        assert gaps[at] < NEAR_TIE, f"{label}: token {at} differs at a gap of {gaps[at]:.3f}"
        second = int(np.argsort(reference[at])[-2])
        assert tokens[at] == second, f"{label}: token {at} is not the other side of the tie"
        line += f"; NEAR TIE at token {at}, gap {gaps[at]:.1e}"
    else:
        line += f", all logits {relative(logits, reference):.1e}"
    return line


def prompts(vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(2)
    return [rng.integers(0, vocab_size, length).tolist() for length in LENGTHS]


def check(directory: Path, kind: str, name: str) -> None:
    """Every prompt length on the checkpoint in `directory`, weights stored as `kind`."""
    driver, reference = Driver.load(directory, kind), Reference(directory)
    lines = []
    for prompt in prompts(driver.model.cfg.vocab_size):
        got = driver.greedy(prompt, NEW_TOKENS, CHUNK)
        want = reference.greedy(prompt, NEW_TOKENS)
        assert len(set(want[0])) > 8, "a model that repeats itself tests nothing"
        lines.append(compare(got, want, f"{name}, prompt of {len(prompt)}"))
    print("\n" + "\n".join(lines))
    ties = [line for line in lines if "NEAR TIE" in line]
    if ties:
        warnings.warn(pytest.PytestWarning("; ".join(ties)), stacklevel=1)


@pytest.mark.filterwarnings("default::pytest.PytestWarning")
def test_the_handed_checkpoint() -> None:
    check(cases.HANDED / "mamba2" / "checkpoint", "f32", "handed")


@pytest.mark.filterwarnings("default::pytest.PytestWarning")
@pytest.mark.parametrize("case", REFERENCED, ids=cases.ids)
def test_cases(case: cases.Case, tmp_path: Path) -> None:
    """Each in its own stored type, which float32 holds exactly on the reference's side."""
    check(cases.build(case, tmp_path), case.dtype, case.name)


@pytest.mark.parametrize("case", OWN_ONLY, ids=cases.ids)
def test_cases_that_transformers_cannot_judge(case: cases.Case, tmp_path: Path) -> None:
    """Against the float64 oracle instead."""
    driver = Driver.load(cases.build(case, tmp_path))
    params = {name: np.asarray(p) for name, p in driver.params.items()}
    for prompt in prompts(driver.model.cfg.vocab_size):
        want, gaps = oracles.oracle(case.family, driver.model.cfg, params).greedy(
            prompt, NEW_TOKENS
        )
        got, _ = driver.greedy(prompt, NEW_TOKENS, CHUNK)
        if got != want:
            at = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
            assert gaps[at] < 1e-4, f"prompt of {len(prompt)}: token {at} differs, gap {gaps[at]}"


def test_where_limits_bind_only_the_reference_decode_step_differs(tmp_path: Path) -> None:
    """Its single-shot prefill clamps dt as we do; its decode step does not."""
    case = next(case for case in cases.CASES if case.name == "limits_bind")
    directory = cases.build(case, tmp_path)
    driver, reference = Driver.load(directory), Reference(directory)
    text = prompts(driver.model.cfg.vocab_size)[-1]
    for length in (5, 33, 100):
        ours, _ = driver.prefill(text[:length], CHUNK)
        _, theirs = reference.greedy(text[:length], 1)
        assert relative(ours, theirs[0]) < 1e-4
    _, theirs = reference.greedy(text[:33], 2)
    own = int(np.argmax(theirs[0]))
    after, _ = driver.prefill([*text[:33], own], CHUNK)
    assert relative(after, theirs[1]) > 1e-3, "the reference has changed: drop this exception"
