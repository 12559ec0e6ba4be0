"""Bias and penalties against their formulas, spelled out, and against transformers'."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.dry import Breakers, Dry
from runtime.penalties import Penalties
from runtime.sampling import Sampler, SamplingParams, candidates

V = 23
F32_MAX = float(np.finfo(np.float32).max)


def reference(
    row: Sequence[float], params: SamplingParams, prompt: Sequence[int], generated: Sequence[int]
) -> list[float]:
    """Every token of the row in turn, in Python floats."""
    dry: dict[int, float] = {}
    if params.dry_multiplier:
        found = Dry(
            params.dry_multiplier,
            params.dry_base,
            params.dry_allowed_length,
            params.dry_penalty_last_n,
            params.dry_breakers or Breakers(),
            [*prompt, *generated],
        ).penalties()
        dry = dict(zip(*(part.tolist() for part in found), strict=True))
    changed = []
    for token, raw in enumerate(row):
        logit = float(raw)
        for biased, bias in params.logit_bias:
            if biased == token:
                logit += bias
        if token in prompt or token in generated:
            if logit > 0:
                logit /= params.repetition_penalty
            else:
                logit *= params.repetition_penalty
        count = list(generated).count(token)
        logit -= params.frequency_penalty * count
        if count > 0:
            logit -= params.presence_penalty
        logit -= dry.get(token, 0.0)
        if math.isfinite(raw):
            logit = min(max(logit, -F32_MAX), F32_MAX)
        changed.append(float(np.float32(logit)))
    return changed


def make_row(seed: int, holes: bool) -> np.ndarray:
    rng = np.random.default_rng(seed)
    row = (rng.standard_normal(V) * 5).astype(np.float32)
    if holes:
        row[rng.random(V) < 0.3] = -np.inf
        row[3] = 1
    return row


TOKENS = st.lists(st.integers(0, V - 1), max_size=30)
PARAMS = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.3, 1e-6, 1e6]),
    frequency_penalty=st.sampled_from([0.0, -2.0, 0.3, 2.0]),
    presence_penalty=st.sampled_from([0.0, -1.0, 0.7, 2.0]),
    dry_multiplier=st.sampled_from([0.0, 0.8, 1e6]),
    dry_allowed_length=st.integers(0, 3),
    dry_penalty_last_n=st.sampled_from([-1, 0, 5]),
    logit_bias=st.dictionaries(st.integers(0, V - 1), st.floats(-100, 100), max_size=4).map(
        lambda pairs: tuple(pairs.items())
    ),
)


@settings(max_examples=300, deadline=None)
@given(PARAMS, TOKENS, TOKENS, TOKENS, st.integers(0, 2**32 - 1), st.booleans())
def test_changes_match_the_formulas(
    params: SamplingParams,
    prompt: list[int],
    generated: list[int],
    more: list[int],
    seed: int,
    holes: bool,
) -> None:
    row = make_row(seed, holes)
    before = row.copy()
    penalties = Penalties(params, prompt, generated)
    for token in more:
        penalties.record(token)
    found = penalties.apply(row)
    want = reference(row.tolist(), params, prompt, generated + more)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, want, rtol=2e-7, atol=1e-30)
    assert np.isneginf(found).tolist() == np.isneginf(row).tolist()
    assert row.tobytes() == before.tobytes()  # the caller's row is left alone
    again = Penalties(params, prompt, generated + more).apply(row)
    assert again.tobytes() == found.tobytes()  # a request that goes on gets the same bits


def test_the_stated_order() -> None:
    row = np.array([1.0, -1.0, 2.0], np.float32)
    params = SamplingParams(
        repetition_penalty=2.0,
        frequency_penalty=0.25,
        presence_penalty=0.5,
        dry_multiplier=1.0,
        dry_allowed_length=1,
        logit_bias=((0, 3.0), (1, 3.0), (2, -3.0)),
    )
    # 4 / 2 - 0.75; 2 / 2; -1 * 2 - 0.75; then DRY takes 1 off token 2, which came after 0
    found = Penalties(params, [0, 2, 1], [2, 0]).apply(row)
    assert found.tolist() == [1.25, 1.0, -3.75]


def test_the_prompt_counts_for_repetition_only() -> None:
    row = np.ones(4, np.float32)
    charge = SamplingParams(frequency_penalty=1.0, presence_penalty=0.5)
    assert Penalties(charge, [1, 1, 2], [2, 2]).apply(row).tolist() == [1, 1, -1.5, 1]
    ctrl = SamplingParams(repetition_penalty=2.0)
    assert Penalties(ctrl, [1, 1, 2], [2, 3]).apply(row).tolist() == [1, 0.5, 0.5, 0.5]


def test_many_tokens_are_recorded() -> None:
    params = SamplingParams(frequency_penalty=0.5, repetition_penalty=1.5, logit_bias=((2, 1.0),))
    penalties, rng = Penalties(params, [5]), np.random.default_rng(0)
    row = rng.standard_normal(2000).astype(np.float32)
    generated = rng.integers(0, 2000, 1500).tolist()
    for token in generated:
        penalties.record(token)
    want = reference(row.tolist(), params, [5], generated)
    np.testing.assert_allclose(penalties.apply(row), want, rtol=2e-7)


def test_greedy_takes_the_best_after_the_penalties() -> None:
    row = np.array([0.0, 2.0, 1.5], np.float32)
    sampler = Sampler(SamplingParams(presence_penalty=1.0))
    assert [sampler.sample(row) for _ in range(4)] == [1, 2, 1, 1]
    sampler = Sampler(SamplingParams(logit_bias=((0, 2.5), (1, -100.0))))
    assert sampler.sample(row) == 0
    recorded = Sampler(SamplingParams(presence_penalty=1.0))
    recorded.record(1)
    assert recorded.sample(row) == 2


def test_no_penalty_leaves_nothing_to_draw_from() -> None:
    row = np.array([3e38, -3e38, 1.0], np.float32)
    params = SamplingParams(
        1.0, repetition_penalty=1e-6, dry_multiplier=1e6, dry_base=1e6, logit_bias=((0, 100.0),)
    )
    sampler = Sampler(params, [0, 1, 2] * 200)
    assert {sampler.sample(row) for _ in range(8)} <= {0, 1, 2}
    only = Sampler(params, [0] * 600)
    assert only.sample(row[:1]) == 0


@pytest.mark.parametrize("chain", [{"top_k": 40}, {"min_p": 0.05}, {"top_p": 0.5}])
def test_penalised_rows_are_filtered_like_any_other(chain: dict[str, Any]) -> None:
    row = np.random.default_rng(1).standard_normal(6000).astype(np.float32)
    bias = tuple((i, 9.0) for i in range(100, 140))
    drawn = Sampler(SamplingParams(1.0, seed=2, logit_bias=bias, **chain))
    changed = row.copy()
    changed[100:140] += 9
    plain = Sampler(SamplingParams(1.0, seed=2, **chain))
    tokens = [drawn.sample(row) for _ in range(50)]
    assert tokens == [plain.sample(changed) for _ in range(50)]
    assert set(tokens) <= set(candidates(changed, SamplingParams(1.0, **chain))[0].tolist())


@pytest.mark.oracle
@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.2, 4.0])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    import torch
    from transformers import RepetitionPenaltyLogitsProcessor

    rng = np.random.default_rng(5)
    row = (rng.standard_normal(500) * 4).astype(np.float32)
    prompt, generated = rng.integers(0, 500, 60).tolist(), rng.integers(0, 500, 60).tolist()
    process = RepetitionPenaltyLogitsProcessor(penalty)
    scores: Any = torch.from_numpy(row.copy())[None]
    ids: Any = torch.tensor([prompt + generated])
    want = process(ids, scores)[0].numpy()
    found = Penalties(SamplingParams(repetition_penalty=penalty), prompt, generated).apply(row)
    np.testing.assert_allclose(found, want, rtol=2e-7)


@pytest.mark.oracle
@pytest.mark.parametrize(
    "chain",
    [{"top_k": 30}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.7, "min_p": 0.1}],
)
def test_the_filters_are_those_of_transformers(chain: dict[str, Any]) -> None:
    import torch
    import transformers as hf

    row = (np.random.default_rng(6).standard_normal(5000) * 3).astype(np.float32)
    scores: Any = torch.from_numpy(row.copy())[None].double() / 0.7
    ids: Any = torch.zeros((1, 0), dtype=torch.long)
    for name, warper in (
        ("top_k", hf.TopKLogitsWarper),
        ("top_p", hf.TopPLogitsWarper),
        ("min_p", hf.MinPLogitsWarper),
    ):
        if name in chain:
            scores = warper(chain[name])(ids, scores)
    want = scores.softmax(-1)[0].numpy()
    kept, probs = candidates(row, SamplingParams(0.7, **chain))
    assert kept.tolist() == np.flatnonzero(want).tolist()
    np.testing.assert_allclose(probs, want[kept], rtol=5e-6)
