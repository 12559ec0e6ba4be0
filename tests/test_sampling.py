"""Host sampling against a written-out reference."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import UserError
from runtime.filters import Kept, filtered, largest
from runtime.sampling import (
    Sampler,
    SamplingParams,
    candidates,
    checked,
    logprobs,
    top_logits,
)

SLACK = 2e-6  # what f32 sums and exponentials may add to the probability of a set of tokens


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


def check_candidates(logits: np.ndarray, params: SamplingParams) -> None:
    """Ids and probabilities equal the reference's, within what the docstring allows."""
    ids, probs = candidates(logits, params)
    want = reference([float(x) for x in logits], params)
    assert (np.diff(ids) > 0).all() and (probs > 0).all()
    assert math.fsum(probs) == pytest.approx(1, abs=1e-12)
    found = dict(zip(ids.tolist(), probs.tolist(), strict=True))
    # at the edge of top-p a token may be in or out; below 1e-37 a weight may be 0
    astray = found.keys() ^ want.keys()
    if params.top_p == 1:
        assert all(want.get(i, 1) < 1e-36 for i in astray)
    else:
        assert len(astray) <= 1 or math.fsum((want | found)[i] for i in astray) <= SLACK
    if params.top_p < 1 and astray:
        return
    z = (logits.astype(np.float64) - float(logits.max())) / params.temperature
    for i in found.keys() & want.keys():
        if logits.size > 4096 and z[i] < -85:  # f32 has few digits left, or none
            continue
        bound = (3 + 2 * abs(z[i])) * 2**-23 + SLACK if logits.size > 4096 else 1e-9
        assert abs(found[i] / want[i] - 1) <= bound


def chi_square_p(counts: np.ndarray, probs: np.ndarray) -> float:
    """Upper tail of the chi-square statistic, by the Wilson-Hilferty normal approximation."""
    expected = probs * counts.sum()
    assert expected.min() > 20
    statistic = float(((counts - expected) ** 2 / expected).sum())
    df = len(probs) - 1
    z = ((statistic / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))
    return 0.5 * math.erfc(z / math.sqrt(2))


CHAINS: dict[str, Any] = {
    "temperature": st.sampled_from([0.3, 0.7, 1.0, 1.7]),
    "top_k": st.sampled_from([0, 1, 2, 7, 40, 300, 699, 5000, 100_000]),
    "top_p": st.sampled_from([0.0, 0.05, 0.5, 0.95, 0.999, 1.0]),
    "min_p": st.sampled_from([0.0, 1e-4, 0.01, 0.3, 1.0]),
}


def rows(sizes: st.SearchStrategy[int]) -> st.SearchStrategy[np.ndarray]:
    """Rows f32[V] of any shape: flat, peaky, with ties, a long tail, and entries at -inf."""

    def make(seed: int, size: int, spread: float, kind: str) -> np.ndarray:
        rng = np.random.default_rng(seed)
        row = (rng.standard_normal(size) * spread).astype(np.float32)
        if kind == "ties":
            row = np.round(row)
        elif kind == "tail":
            row = (-spread * np.log1p(rng.permutation(size))).astype(np.float32)
        elif kind == "holes":
            row[rng.random(size) < 0.3] = -np.inf
            row[rng.integers(size)] = 1
        return row

    kinds = st.sampled_from(["normal", "ties", "tail", "holes"])
    spreads = st.sampled_from([0.01, 1.0, 8.0])
    return st.builds(make, st.integers(0, 2**32 - 1), sizes, spreads, kinds)


@settings(max_examples=300, deadline=None)
@given(row=rows(st.integers(1, 700)), params=st.builds(SamplingParams, **CHAINS))
def test_candidates_match_the_reference(row: np.ndarray, params: SamplingParams) -> None:
    check_candidates(row, params)


@settings(max_examples=80, deadline=None)
@given(
    row=rows(st.sampled_from([4095, 4096, 4097, 4352, 5001, 9999])),
    params=st.builds(SamplingParams, **CHAINS),
)
def test_candidates_of_long_rows_match_the_reference(
    row: np.ndarray, params: SamplingParams
) -> None:
    check_candidates(row, params)


@pytest.mark.parametrize("spread", [0.3, 3.0])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(0.8),
        SamplingParams(1.0, top_k=40, top_p=0.95),
        SamplingParams(0.8, top_p=0.95),
        SamplingParams(0.8, top_p=0.3, min_p=0.2),
        SamplingParams(1.0, min_p=0.05),
    ],
)
def test_a_whole_vocabulary_matches_the_reference(spread: float, params: SamplingParams) -> None:
    row = np.random.default_rng(7).standard_normal(50_288).astype(np.float32) * np.float32(spread)
    check_candidates(row, params)


def test_a_sample_that_misleads_top_p_changes_nothing() -> None:
    size = 9 * 512
    for low, high in ((0.0, 9.0), (9.0, 0.0)):
        row = np.full(size, high, np.float32) + np.linspace(0, 1, size, dtype=np.float32)
        row[::9] += np.float32(low - high)
        for mass in (0.05, 0.5, 0.95):
            check_candidates(row, SamplingParams(1.0, top_p=mass))


@pytest.mark.parametrize("temperature", [1e-3, 0.3, 0.7, 1.0, 1.3, 1e3])
def test_weights_in_f32_stay_within_the_stated_error(temperature: float) -> None:
    z = np.linspace(-85, 0, 30_001)
    row = (z * temperature + 7.3).astype(np.float32)
    exact = np.exp((row.astype(np.float64) - float(row.max())) / temperature)
    found = filtered(*checked(row), SamplingParams(temperature)).weights[: row.size]
    error = np.abs(found / exact - 1)
    assert (error <= (3 - 2 * z) * 2**-23).all()
    assert error.max() > 2**-24  # they are f32


@pytest.mark.parametrize("size", [200, 6000])
@pytest.mark.parametrize("min_p", [0.01, 0.05, 0.1, 0.3, 0.5, 0.7])
def test_min_p_is_exact_to_the_last_bit_of_a_logit(size: int, min_p: float) -> None:
    near = np.float32(math.log(min_p))
    row = np.full(size, -60.0, np.float32)
    row[:4] = 0.0, np.nextafter(near, np.float32(-9)), near, np.nextafter(near, np.float32(9))
    ids, _ = candidates(row, SamplingParams(1.0, min_p=min_p))
    assert ids.tolist() == [i for i in range(4) if float(row[i]) >= math.log(min_p)]


def test_equal_logits_are_kept_by_lower_id() -> None:
    row = np.zeros(20_000, np.float32)
    for params, count in (
        (SamplingParams(1.0), 20_000),
        (SamplingParams(1.0, top_k=123), 123),
        (SamplingParams(1.0, top_k=15_001), 15_001),
        (SamplingParams(1.0, top_p=0.25), 5000),
        (SamplingParams(1.0, top_p=0.0), 1),
        (SamplingParams(1.0, min_p=1.0), 20_000),
        (SamplingParams(1.0, top_k=16_000, top_p=0.5), 8000),
    ):
        ids, probs = candidates(row, params)
        assert abs(len(ids) - count) <= (0 < params.top_p < 1)
        assert ids.tolist() == list(range(len(ids)))
        np.testing.assert_allclose(probs, 1 / len(ids), rtol=1e-6)


def test_a_vocabulary_of_one_and_of_a_million() -> None:
    one = np.array([-3.5], np.float32)
    chain: dict[str, Any]
    for chain in ({}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}):
        assert Sampler(SamplingParams(1.0, seed=1, **chain)).sample(one) == 0
    row = np.full(1_000_000, -4.0, np.float32)
    row[[3, 999_999]] = 14, 13
    mass = 999_998 * math.exp(-18)
    total = 1 + math.exp(-1) + mass
    for chain, want in (
        ({}, {3: 1 / total, 999_999: math.exp(-1) / total, 500: math.exp(-18) / total}),
        ({"top_k": 2}, {3: 1 / (1 + math.exp(-1))}),
        ({"top_p": 0.9}, {999_999: math.exp(-1) / (1 + math.exp(-1))}),
        ({"min_p": 0.1}, {999_999: math.exp(-1) / (1 + math.exp(-1))}),
    ):
        ids, probs = candidates(row, SamplingParams(1.0, **chain))
        found = dict(zip(ids.tolist(), probs.tolist(), strict=True))
        assert len(found) == (2 if chain else 1_000_000)
        for token, p in want.items():
            assert found[token] == pytest.approx(p, rel=5e-6)


@settings(max_examples=60, deadline=None)
@given(
    row=rows(st.sampled_from([3, 500, 4100, 9000])),
    params=st.builds(SamplingParams, seed=st.integers(0, 2**64 - 1), **CHAINS),
)
def test_the_draw_is_the_inverse_cdf_of_the_candidates(
    row: np.ndarray, params: SamplingParams
) -> None:
    ids, probs = candidates(row, params)
    sampler = Sampler(params)
    rng = np.random.Generator(np.random.PCG64(params.seed))
    for _ in range(8):
        token, uniform, below = sampler.sample(row), rng.random(), 0.0
        assert token in ids
        for i, p in zip(ids.tolist(), probs.tolist(), strict=True):
            if i == token:
                assert below - SLACK <= uniform <= below + p + SLACK
            below += p


@pytest.mark.parametrize("uniform", [0.0, 0.25, 0.5, 1 - 2**-53])
def test_a_token_without_probability_is_never_drawn(uniform: float) -> None:
    for size in (10, 5000):
        row = np.full(size, -np.inf, np.float32)
        row[size // 2 : size // 2 + 3] = 1.0
        kept = filtered(*checked(row), SamplingParams(1.0))
        assert size // 2 <= kept.draw(uniform) < size // 2 + 3


def test_rounding_at_the_end_of_the_cdf_draws_no_dropped_token() -> None:
    assert Kept(np.array([1.0, 2.0, 0.0, 0.0]), np.array([3, 5, 7, 9])).draw(1.0) == 5
    weights = np.zeros(768, np.float32)
    weights[[10, 300]] = 1
    assert Kept(weights, None, np.array([1, 1, 0], np.float32)).draw(1.0) == 300
    assert Kept(weights, None, np.array([1, 1.001, 0], np.float32)).draw(1.0) == 300


@pytest.mark.parametrize("chain", [{}, {"top_p": 0.9}, {"min_p": 0.3}, {"top_k": 6000}])
def test_draws_from_a_long_row_follow_its_cdf(chain: dict[str, Any]) -> None:
    row = (np.random.default_rng(4).standard_normal(7001) * 0.3).astype(np.float32)
    params = SamplingParams(0.9, seed=8, **chain)
    cdf: dict[int, tuple[float, float]] = {}
    below = 0.0
    for token, p in reference(row.tolist(), params).items():
        cdf[token] = (below - SLACK, below + p + SLACK)
        below += p
    sampler, rng = Sampler(params), np.random.Generator(np.random.PCG64(8))
    for _ in range(200):
        low, high = cdf[sampler.sample(row)]
        assert low <= rng.random() <= high


@pytest.mark.parametrize("chain", [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.001}])
def test_where_a_row_lies_in_memory_changes_no_bit(chain: dict[str, Any]) -> None:
    params = SamplingParams(0.77, **chain)
    row = np.random.default_rng(3).standard_normal(9001).astype(np.float32)
    want = filtered(*checked(row), params)
    padded = np.zeros((3, 9001 + 40), np.float32)
    for shift in range(1, 20):
        moved = padded[1, shift : shift + 9001]
        moved[:] = row
        found = filtered(*checked(moved), params)
        assert found.weights.tobytes() == want.weights.tobytes()
        assert [found.draw(u / 64) for u in range(64)] == [want.draw(u / 64) for u in range(64)]
    strided = np.zeros((9001, 2), np.float32)
    strided[:, 1] = row
    assert filtered(*checked(strided[:, 1]), params).weights.tobytes() == want.weights.tobytes()


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


def test_a_request_goes_on_where_it_was() -> None:
    row = np.linspace(-1, 1, 40).astype(np.float32)
    params = SamplingParams(1.0, seed=9, repetition_penalty=1.2, dry_multiplier=0.5)
    whole = Sampler(params, (1, 2))
    tokens = [whole.sample(row) for _ in range(20)]
    assert whole.draws == 20
    rest = Sampler(params, (1, 2), tokens[:7], draws=7)
    assert [rest.sample(row) for _ in range(13)] == tokens[7:]
    greedy = Sampler(SamplingParams())
    greedy.sample(row)
    greedy.record(3)
    assert greedy.draws == 0  # nothing was drawn


def test_an_unseeded_request_can_be_repeated_by_its_seed() -> None:
    row = np.zeros(1000, np.float32)
    first = Sampler(SamplingParams(1.0))
    again = Sampler(SamplingParams(1.0, seed=first.seed))
    assert [first.sample(row) for _ in range(8)] == [again.sample(row) for _ in range(8)]


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
@given(st.integers(0, 2**32 - 1), st.integers(1, 2000), st.integers(0, 60), st.integers(1, 9))
def test_largest_breaks_ties_by_lower_id(seed: int, size: int, count: int, levels: int) -> None:
    values = np.random.default_rng(seed).integers(0, levels, size).astype(np.float32)
    want = sorted(range(size), key=lambda i: (-values[i], i))[:count]
    assert largest(values, count).tolist() == sorted(want)


@settings(max_examples=100, deadline=None)
@given(rows(st.integers(1, 500)), st.integers(0, 2**32), st.integers(0, 600))
def test_logprobs_are_those_of_the_raw_row(row: np.ndarray, pick: int, count: int) -> None:
    token = pick % row.size
    best = float(row.max())
    total = best + math.log(math.fsum(math.exp(float(x) - best) for x in row))
    ranked = sorted(range(row.size), key=lambda i: (-row[i], i))
    found = logprobs(row, token, count)
    assert found.logprob == pytest.approx(float(row[token]) - total, abs=1e-12)
    assert found.rank == ranked.index(token) + 1
    want = [(i, float(row[i]) - total) for i in ranked[:count] if row[i] > -math.inf]
    assert [i for i, _ in found.top] == [i for i, _ in want]
    np.testing.assert_allclose([x for _, x in found.top], [x for _, x in want], atol=1e-12)


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
    with pytest.raises(UserError, match=found):
        logprobs(logits, 0, 2)


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
        ({"min_p": True}, "min-p: found True"),
        ({"temperature": "1"}, "temperature: found '1'"),
        ({"temperature": 10**400}, "temperature: found an integer of 1329 bits"),
        ({"top_k": 2.0}, "top-k: found 2.0"),
        ({"top_k": True}, "top-k: found True"),
        ({"top_k": 2**63}, "top-k: found 9223372036854775808"),
        ({"seed": -1}, "seed: found -1"),
        ({"seed": 2**64}, "seed: found 18446744073709551616"),
        ({"seed": 10**5000}, "seed: found an integer of 16610 bits"),
        ({"seed": 1.5}, "seed: found 1.5"),
        ({"repetition_penalty": 0.0}, "repetition-penalty: found 0.0"),
        ({"repetition_penalty": math.inf}, "repetition-penalty: found inf"),
        ({"frequency_penalty": 2.5}, "frequency-penalty: found 2.5"),
        ({"presence_penalty": -2.5}, "presence-penalty: found -2.5"),
        ({"presence_penalty": math.nan}, "presence-penalty: found nan"),
        ({"dry_multiplier": -1}, "dry-multiplier: found -1"),
        ({"dry_base": 0.5}, "dry-base: found 0.5"),
        ({"dry_allowed_length": -1}, "dry-allowed-length: found -1"),
        ({"dry_penalty_last_n": -2}, "dry-penalty-last-n: found -2"),
        ({"logit_bias": ((-1, 0.5),)}, "logit-bias: found -1"),
        ({"logit_bias": ((True, 0.5),)}, "logit-bias: found True"),
        ({"logit_bias": ((4, 100.5),)}, "logit-bias of token id 4: found 100.5"),
        ({"logit_bias": ((4, math.nan),)}, "logit-bias of token id 4: found nan"),
        ({"logit_bias": ((4, 1.0), (4, 2.0))}, "logit-bias: found a token id twice"),
        (
            {"logit_bias": tuple((i, 1.0) for i in range(1025))},
            "logit-bias: found 1025 entries, expected at most 1024",
        ),
    ],
)
def test_bad_parameters_name_the_field(fields: dict, line: str) -> None:
    with pytest.raises(UserError, match=line):
        SamplingParams(**fields)


def test_when_logits_are_needed() -> None:
    assert not SamplingParams().needs_logits
    assert SamplingParams(0.5).needs_logits
    assert SamplingParams(repetition_penalty=1.1).needs_logits
    assert SamplingParams(frequency_penalty=-0.1).needs_logits
    assert SamplingParams(presence_penalty=0.1).needs_logits
    assert SamplingParams(dry_multiplier=0.8).needs_logits
    assert not SamplingParams(dry_multiplier=0.8, dry_penalty_last_n=0).needs_logits
    assert SamplingParams(logit_bias=((1, 1.0),)).needs_logits


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    params = SamplingParams(logit_bias=((7, 1.0),))
    params.check_vocab(8)
    with pytest.raises(UserError, match="logit-bias: found token id 7, expected 0 to 6"):
        params.check_vocab(7)
