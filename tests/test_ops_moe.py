"""Routing and experts against float64, and every form of the experts against each other.

Tolerances as in test_ops: float32 through two products of at most a hundred terms.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles.moe
import pytest
from driver import relative

from emit.ops import moe, nn
from emit.ops.moe import Experts, Routing

TOLERANCE = 2e-6
HUGE = 1e15
D, F = 13, 17
LENGTHS = (1, 2, 63, 65, 200)

ROUTINGS = {
    "softmax": Routing(2),
    "softmax_normalized": Routing(3, normalize=True),
    "chosen": Routing(3, "chosen"),
    "chosen_scaled": Routing(2, "chosen", scale=0.5),
    "sigmoid": Routing(3, "sigmoid", scale=2.5),
    "sigmoid_normalized": Routing(4, "sigmoid", normalize=True, scale=1.5),
    "groups": Routing(3, "sigmoid", normalize=True, groups=4, groups_kept=2),
    "groups_of_softmax": Routing(4, "softmax", groups=6, groups_kept=3),
    "one": Routing(1),
    "all": Routing(12, "sigmoid", normalize=True),
}

route = jax.jit(moe.route, static_argnums=1)


@pytest.fixture(autouse=True)
def strict_promotion() -> Any:
    with jax.numpy_dtype_promotion("strict"):
        yield


def f32(rng: np.random.Generator, *shape: int) -> Any:
    return rng.standard_normal(shape).astype(np.float32)


# --- routing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("name", ROUTINGS)
def test_routing_is_the_oracle(name: str, biased: bool) -> None:
    rng, routing, E = np.random.default_rng(1), ROUTINGS[name], 12
    logits = 2.0 * f32(rng, 3, 50, E)
    bias = f32(rng, E) if biased else None
    index, weight = route(logits, routing, bias)
    assert index.dtype == jnp.int32 and weight.dtype == jnp.float32
    assert index.shape == weight.shape == (3, 50, routing.top_k)
    for b, t in np.ndindex(3, 50):
        want = oracles.moe.route(logits[b, t], bias=bias, **vars(routing))
        got = dict(zip(np.asarray(index)[b, t].tolist(), np.asarray(weight)[b, t], strict=True))
        assert got.keys() == want.keys()
        for e, w in want.items():
            assert abs(got[e] - w) < TOLERANCE * max(want.values())


def test_a_bias_chooses_and_does_not_weigh() -> None:
    logits = np.zeros((1, 1, 5), np.float32)
    bias = np.array([0.0, 9.0, 0.0, -50.0, 7.0], np.float32)
    index, weight = route(logits, Routing(2, "sigmoid"), bias)
    assert sorted(np.asarray(index)[0, 0].tolist()) == [1, 4]
    assert np.asarray(weight)[0, 0].tolist() == [0.5, 0.5]


def test_of_equal_scores_the_first_are_chosen() -> None:
    index, _ = route(np.zeros((1, 1, 7), np.float32), Routing(3, "sigmoid"), None)
    assert np.asarray(index)[0, 0].tolist() == [0, 1, 2]


def test_hopeless_logits_give_finite_weights() -> None:
    """Sigmoids that underflow: their sum is 0, and weights are 0, not NaN."""
    logits = np.full((1, 1, 6), -200.0, np.float32)
    _, weight = route(logits, Routing(2, "sigmoid", normalize=True), None)
    assert np.asarray(weight).tolist() == [[[0.0, 0.0]]]


# --- experts ---------------------------------------------------------------------------------


def stacks(E: int, gated: bool, dtype: str = "float32", seed: int = 0) -> Experts:
    rng = np.random.default_rng(seed)
    up, down, gate = f32(rng, E, F, D), f32(rng, E, D, F), f32(rng, E, F, D)
    kind = jnp.dtype(dtype)
    return Experts(
        (up * D**-0.5).astype(kind),
        (down * F**-0.5).astype(kind),
        (gate * D**-0.5).astype(kind) if gated else None,
    )


def chosen(B: int, T: int, E: int, K: int, seed: int = 0) -> tuple[Any, Any, Any]:
    """x, index and weight of B × T tokens, experts of very different popularity."""
    rng = np.random.default_rng(seed)
    taste = rng.gumbel(size=(B, T, E)) + rng.standard_normal(E)
    index = np.argsort(-taste, axis=-1)[..., :K].astype(np.int32)
    return f32(rng, B, T, D), index, rng.uniform(0.1, 1.0, (B, T, K)).astype(np.float32)


def oracle(x: Any, index: Any, weight: Any, experts: Experts, activation: str) -> np.ndarray:
    up, down, gate = (None if w is None else np.asarray(w, np.float64) for w in experts)
    assert up is not None and down is not None
    out = np.zeros(x.shape)
    for b, t in np.ndindex(*x.shape[:2]):
        weights = dict(zip(index[b, t].tolist(), weight[b, t].tolist(), strict=True))
        out[b, t] = oracles.moe.mixture(
            x[b, t].astype(np.float64), weights, up, down, gate, activation
        )
    return out


def run(form: Any, x: Any, index: Any, weight: Any, experts: Experts, activation: str) -> Any:
    valid = np.ones(x.shape[:2], bool)
    act = nn.ACTIVATIONS[activation]
    return np.asarray(jax.jit(lambda *a: form(*a, Experts(*experts), act))(x, valid, index, weight))


KINDS = [("silu", True), ("relu2", False), ("gelu", True)]


@pytest.mark.parametrize(("activation", "gated"), KINDS)
@pytest.mark.parametrize("rows", [1, 3])
def test_step_is_the_oracle(activation: str, gated: bool, rows: int) -> None:
    experts = stacks(11, gated)
    x, index, weight = chosen(rows, 1, 11, 3)
    got = run(moe.step, x, index, weight, experts, activation)
    assert got.dtype == np.float32
    assert relative(got, oracle(x, index, weight, experts, activation)) < TOLERANCE


@pytest.mark.parametrize(("activation", "gated"), KINDS[:2])
@pytest.mark.parametrize("steps", LENGTHS)
def test_scan_is_the_oracle(steps: int, activation: str, gated: bool) -> None:
    experts = stacks(11, gated)
    x, index, weight = chosen(2, steps, 11, 3, seed=steps)
    got = run(moe.scan, x, index, weight, experts, activation)
    assert relative(got, oracle(x, index, weight, experts, activation)) < TOLERANCE


@pytest.mark.parametrize("experts", ["one", "half", "few"])
@pytest.mark.parametrize("steps", [3, 70])
def test_all_tokens_may_choose_the_same_experts(experts: str, steps: int) -> None:
    """Blocks of one expert only; most experts have no token."""
    E, K = 11, {"one": 1, "half": 5, "few": 2}[experts]
    x, index, weight = chosen(1, steps, E, K)
    index[...] = np.arange(E - K, E)
    stack = stacks(E, True)
    got = run(moe.scan, x, index, weight, stack, "silu")
    assert relative(got, oracle(x, index, weight, stack, "silu")) < TOLERANCE


@pytest.mark.parametrize(("E", "K"), [(11, 1), (11, 5), (4, 4), (150, 6)])
def test_every_form_is_every_other(E: int, K: int) -> None:
    """Grouped, dense, one pair at a time and all pairs unrolled, on the same tokens."""
    tokens, act = 37, nn.ACTIVATIONS["silu"]
    x, index, weight = chosen(1, tokens, E, K)
    stack = stacks(E, True)
    want = oracle(x, index, weight, stack, "silu")[0]
    for form in (moe._grouped, moe._dense, moe._looped):
        got = jax.jit(lambda *a, form=form: form(*a, stack, act))(x[0], index[0], weight[0])
        assert relative(got, want) < TOLERANCE, form.__name__
    stepped = [
        run(moe.step, x[:, t : t + 1], index[:, t : t + 1], weight[:, t : t + 1], stack, "silu")
        for t in range(5)
    ]
    assert relative(np.concatenate(stepped, axis=1)[0], want[:5]) < TOLERANCE


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("steps", [1, 40])
def test_narrow_weights_are_widened_exactly(dtype: str, steps: int) -> None:
    stack = stacks(11, True, dtype)
    x, index, weight = chosen(2, steps, 11, 3)
    form = moe.step if steps == 1 else moe.scan
    got = run(form, x, index, weight, stack, "silu")
    assert got.dtype == np.float32
    assert relative(got, oracle(x, index, weight, stack, "silu")) < TOLERANCE


@pytest.mark.parametrize("rows", [4, 16])
def test_a_row_of_a_step_is_its_own_whatever_the_others_are(rows: int) -> None:
    """To the bit: unrolled (12 pairs) and in a loop (48)."""
    E, stack, kept = 150, stacks(150, True), 2
    x, index, weight = chosen(rows, 1, E, 3)
    got = run(moe.step, x, index, weight, stack, "silu")
    others = np.arange(rows) != kept
    for array, other in zip((x, index, weight), chosen(rows, 1, E, 3, seed=1), strict=True):
        array[others] = other[others]
    changed = run(moe.step, x, index, weight, stack, "silu")
    assert got[kept].tobytes() == changed[kept].tobytes()
    assert got[others].tobytes() != changed[others].tobytes()
    if rows * 3 <= moe.UNROLLED:
        one = slice(kept, kept + 1)
        alone = run(moe.step, x[one], index[one], weight[one], stack, "silu")
        assert got[one].tobytes() == alone.tobytes()


# --- padding ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("E", "K"), [(11, 3), (4, 3)], ids=["grouped", "dense"])
@pytest.mark.parametrize("steps", [1, 9, 66])
def test_padding_changes_no_bit_and_gives_zeros(steps: int, E: int, K: int) -> None:
    """Whatever padded tokens hold: numbers, NaN, an index outside, an infinite weight."""
    stack, act = stacks(E, True), nn.ACTIVATIONS["silu"]
    run_form: Any = moe.step if steps == 1 else moe.scan
    form = jax.jit(lambda *a: run_form(*a, stack, act))
    x, index, weight = chosen(3, steps, E, K)
    valid = np.arange(steps)[None, :] < np.array([steps, steps // 2, 0])[:, None]
    outcomes = []
    for padding, number in ((0.0, 0), (HUGE, E - 1), (np.nan, -7), (np.inf, 2**31 - 1)):
        for array, value in ((x, padding), (weight, padding), (index, number)):
            array[~valid] = value
        y = np.asarray(form(x, valid, index, weight))
        assert (y[~valid] == 0.0).all()
        outcomes.append(y.tobytes())
    assert all(outcome == outcomes[0] for outcome in outcomes)
    want = oracle(x[:1], index[:1], weight[:1], stack, "silu")
    assert relative(y[:1], want) < TOLERANCE


def test_a_token_that_overflows_touches_no_other() -> None:
    """Infinite hidden values of one token meet the zero weights of the others' and stay there."""
    for E, K in ((11, 3), (4, 3)):
        stack = stacks(E, False)
        x, index, weight = chosen(1, 20, E, K)
        clean = run(moe.scan, x, index, weight, stack, "relu2")
        x[0, 7] = 1e30
        got = run(moe.scan, x, index, weight, stack, "relu2")
        others = np.arange(20) != 7
        assert not np.isfinite(got[0, 7]).all()
        assert got[0, others].tobytes() == clean[0, others].tobytes()
