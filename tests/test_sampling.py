"""Host sampling against a written-out reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import UserError
from runtime.sampling import Sampler, SamplingParams, candidates, largest, top_logits


def reference(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """The chain in plain Python, one sort, no shortcuts."""
    best = max(logits)
    weight = {i: math.exp((x - best) / params.temperature) for i, x in enumerate(logits)}
    ranked = sorted(weight, key=lambda i: (-logits[i], i))
    if params.top_k:
        ranked = ranked[: params.top_k]
    total = math.fsum(weight[i] for i in ranked)
    if params.top_p < 1:
        kept, mass = [], 0.0
        for i in ranked:
            kept.append(i)
            mass += weight[i] / total
            if mass >= params.top_p:
                break
        ranked = kept
    ranked = [i for i in ranked if weight[i] >= params.min_p * weight[ranked[0]]]
    total = math.fsum(weight[i] for i in ranked)
    return {i: weight[i] / total for i in sorted(ranked) if weight[i] > 0}


def chi_square_p(counts: np.ndarray, probs: np.ndarray) -> float:
    """Upper tail of the chi-square statistic, by the Wilson-Hilferty normal approximation."""
    expected = probs * counts.sum()
    assert expected.min() > 20
    statistic = float(((counts - expected) ** 2 / expected).sum())
    df = len(probs) - 1
    z = ((statistic / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))
    return 0.5 * math.erfc(z / math.sqrt(2))


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(1, 700),
    spread=st.sampled_from([0.01, 1.0, 8.0]),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 7, 300, 699, 100_000]),
    top_p=st.sampled_from([0.0, 0.05, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    ties=st.booleans(),
)
def test_candidates_match_the_reference(
    seed: int,
    size: int,
    spread: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    ties: bool,
) -> None:
    logits = (np.random.default_rng(seed).standard_normal(size) * spread).astype(np.float32)
    if ties:
        logits = np.round(logits)
    params = SamplingParams(temperature, top_k, top_p, min_p)
    ids, probs = candidates(logits, params)
    want = reference([float(x) for x in logits], params)
    if len(ids) != len(want):  # a sum that meets top-p to the last bit may round either way
        assert abs(len(ids) - len(want)) == 1 and 0 < top_p < 1
        return
    assert ids.tolist() == list(want)
    np.testing.assert_allclose(probs, list(want.values()), rtol=1e-9)


def test_the_filters_apply_in_the_stated_order() -> None:
    logits = np.log(np.array([0.05, 0.5, 0.3, 0.15]))
    assert candidates(logits, SamplingParams(1.0, top_p=0.79))[0].tolist() == [1, 2]
    # top-p is of the mass that top-k left: 0.5 of 0.8 is 0.625 alone
    assert candidates(logits, SamplingParams(1.0, top_k=2, top_p=0.6))[0].tolist() == [1]
    # temperature first: at 0.5 the best holds 0.25 of 0.365
    assert candidates(logits, SamplingParams(0.5, top_p=0.6))[0].tolist() == [1]
    assert candidates(logits, SamplingParams(1.0, top_p=0.6))[0].tolist() == [1, 2]
    assert candidates(logits, SamplingParams(1.0, min_p=0.29))[0].tolist() == [1, 2, 3]
    assert candidates(logits, SamplingParams(1.0, min_p=0.31))[0].tolist() == [1, 2]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1.0, seed=3),
        SamplingParams(0.6, top_k=5, seed=4),
        SamplingParams(1.3, top_p=0.7, seed=5),
        SamplingParams(1.0, min_p=0.2, seed=6),
        SamplingParams(0.9, top_k=9, top_p=0.9, min_p=0.1, seed=7),
    ],
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    logits = np.array([0.3, -0.5, 1.2, 0.0, 0.9, -1.1, 0.4, 1.0, -0.2, 0.7, 0.1, -0.8], np.float32)
    want = reference([float(x) for x in logits], params)
    sampler = Sampler(params)
    draws = np.array([sampler.sample(logits) for _ in range(8000)])
    assert set(draws.tolist()) == set(want)
    counts = np.array([(draws == i).sum() for i in want])
    probs = np.array(list(want.values()))
    assert chi_square_p(counts, probs) > 0.005
    skewed = probs * np.linspace(0.8, 1.2, len(probs))  # the test can tell a wrong distribution
    assert chi_square_p(counts, skewed / skewed.sum()) < 1e-6


def test_a_seed_gives_one_stream_of_one_draw_a_token() -> None:
    logits = np.linspace(-1, 1, 40).astype(np.float32)
    a, b, c = (Sampler(SamplingParams(1.0, seed=s)) for s in (11, 11, 12))
    first = [a.sample(logits) for _ in range(64)]
    assert first == [b.sample(logits) for _ in range(64)]
    assert first != [c.sample(logits) for _ in range(64)]
    rng = np.random.Generator(np.random.PCG64(11))
    rng.random(64)
    assert a._rng.bit_generator.state == rng.bit_generator.state


def test_unseeded_requests_differ() -> None:
    logits = np.zeros(1000, np.float32)
    streams = {tuple(Sampler(SamplingParams(1.0)).sample(logits) for _ in range(8)) for _ in "ab"}
    assert len(streams) == 2


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-6, 1.0, 1e6, 1e308])
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4, 3e38])
def test_no_temperature_makes_a_nan(temperature: float, scale: float) -> None:
    logits = np.array([-1.0, 1.0, 0.5, -np.inf], np.float32) * np.float32(scale or 1)
    logits[:3] *= scale > 0
    for params in (
        SamplingParams(temperature, seed=0),
        SamplingParams(temperature, top_k=2, top_p=0.9, min_p=0.1, seed=0),
        SamplingParams(temperature, top_p=0.0, seed=0),
    ):
        ids, probs = candidates(logits, params)
        assert np.isfinite(probs).all() and (probs > 0).all()
        assert probs.sum() == pytest.approx(1)
        assert 3 not in ids
        assert Sampler(params).sample(logits) in ids


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    assert Sampler(SamplingParams()).sample(np.array([0.0, 2.0, 2.0], np.float32)) == 1


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-4, 4), min_size=1, max_size=40), st.integers(1, 50))
def test_largest_breaks_ties_by_lower_index(values: list[int], count: int) -> None:
    want = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
    assert largest(np.array(values, np.float32), count).tolist() == want


def test_top_logits_are_raw_best_first() -> None:
    row = np.array([1.5, 3.25, -np.inf, 3.25, -2.0], np.float32)
    assert top_logits(row, 3) == [(1, 3.25), (3, 3.25), (0, 1.5)]
    assert top_logits(row, 99) == [(1, 3.25), (3, 3.25), (0, 1.5), (4, -2.0)]


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ([0.0, math.nan, 1.0], "nan at token id 1"),
        ([0.0, 1.0, math.inf], "inf at token id 2"),
        ([-math.inf, -math.inf], "no finite value"),
        ([], "no finite value"),
    ],
)
def test_unusable_logits_are_refused(row: list[float], found: str) -> None:
    logits = np.array(row, np.float32)
    for params in (SamplingParams(), SamplingParams(1.0, top_k=2)):
        with pytest.raises(UserError, match=found):
            Sampler(params).sample(logits)
    with pytest.raises(UserError, match=found):
        top_logits(logits, 2)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"temperature": -0.1}, "temperature: found -0.1"),
        ({"temperature": math.nan}, "temperature: found nan"),
        ({"temperature": math.inf}, "temperature: found inf"),
        ({"top_k": -1}, "top-k: found -1"),
        ({"top_p": 1.5}, "top-p: found 1.5"),
        ({"top_p": -0.5}, "top-p: found -0.5"),
        ({"top_p": math.nan}, "top-p: found nan"),
        ({"min_p": 2.0}, "min-p: found 2.0"),
        ({"min_p": math.nan}, "min-p: found nan"),
        ({"seed": -1}, "seed: found -1"),
    ],
)
def test_bad_parameters_name_the_field(fields: dict, line: str) -> None:
    with pytest.raises(UserError, match=line):
        SamplingParams(**fields)
