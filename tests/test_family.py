"""A family's graph: right against float64 for every case, and the same however it is scheduled.

Tolerances are relative to the largest value. Float32 through two or three layers gives 2e-7 to 1e-6
in logits and states (measured for every row of `cases`); CLOSE is the bound that the runtime
promises for any split of a prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from driver import Driver, State, relative, row

from emit import expect
from emit.checkpoint import read_config_file
from emit.entry import Entry, Model, entries
from emit.shape import Shape

CLOSE = 1e-5
CHUNK = 64
START = 9  # tokens that a state in use has seen
SCHEDULED = cases.FIRST
DEFAULT = ("mamba2", "nemotron_h")  # families whose schedules run in a default run


# Every row is compared with its recorded reference in slow runs (test_references.py).
every_case = pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c in cases.QUICK else pytest.mark.thorough) for c in cases.CASES],
    ids=cases.ids,
)
scheduled_case = pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c.family in DEFAULT else pytest.mark.slow) for c in SCHEDULED],
    ids=cases.ids,
)


@pytest.fixture(autouse=True)
def strict_promotion() -> Any:
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[cases.Case], Driver]:
    """The driver of a case, loaded and compiled once for all tests."""

    @cache
    def loaded(case: cases.Case) -> Driver:
        return Driver.load(cases.build(case, tmp_path_factory.mktemp(case.name)))

    return loaded


Load = Callable[[cases.Case], Driver]


def oracle(case: cases.Case, driver: Driver) -> Any:
    params = {n: np.asarray(p) for n, p in driver.params.items()}
    return oracles.oracle(case.family, driver.model.cfg, params)


def tokens(case: cases.Case, count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, cases.full_config(case)["vocab_size"], count)


def worst(got: State, want: State) -> float:
    """The largest relative difference over all state tensors."""
    assert got.keys() == want.keys()
    return max(relative(got[name], want[name]) for name in want)


def bits(state: State, rows: Any = slice(None)) -> dict[str, bytes]:
    return {name: np.asarray(array)[rows].tobytes() for name, array in state.items()}


# --- against float64 -------------------------------------------------------------------------


@every_case
def test_prefill_and_steps_are_the_oracle(case: cases.Case, load: Load) -> None:
    """100 tokens (one full chunk and a padded one), then one more, from a zero state."""
    driver, text = load(case), tokens(case, 101)
    want, want_state = oracle(case, driver).run(text[:100])
    logits, state = driver.prefill(text[:100], CHUNK)
    assert relative(logits, want[-1]) < CLOSE
    assert driver.agree(state, want_state, 100) < CLOSE
    stepped = driver.zero_state()
    for t in range(100):
        step_logits, stepped = driver.call(text[None, t : t + 1], [1], stepped, t)
        assert relative(step_logits[0], want[t]) < CLOSE
    assert driver.agree(stepped, want_state, 100) < CLOSE
    assert worst(stepped, state) < CLOSE and relative(step_logits[0], logits) < CLOSE  # pyright: ignore
    after, _ = driver.call(text[None, 100:], [1], state, 100)
    assert relative(after[0], oracle(case, driver).step(text[100], want_state)[0]) < CLOSE


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65])
@scheduled_case
def test_prefill_of_any_length_from_a_state_in_use(
    case: cases.Case, length: int, load: Load
) -> None:
    driver, text = load(case), tokens(case, length, seed=length)
    start = driver.random_state(1, seed=length)
    want, want_state = oracle(case, driver).run(text, driver.held(start, START))
    logits, state = driver.prefill(text, CHUNK, start, position=START)
    assert relative(logits, want[-1]) < CLOSE
    assert driver.agree(state, want_state, START + length) < CLOSE


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_the_handed_checkpoint_gives_its_recorded_tokens(family: str) -> None:
    directory = cases.HANDED / family
    driver = Driver.load(directory / "checkpoint")
    for recorded in json.loads((directory / "reference.json").read_text()).values():
        got, _ = driver.greedy(recorded["prompt"], len(recorded["tokens"]), 8)
        assert got == recorded["tokens"]


@pytest.mark.parametrize(
    "family", [f for f in cases.FAMILIES if (cases.HANDED / f / "config.hub.json").exists()]
)
def test_both_dialects_of_the_handed_config_are_one_model(family: str) -> None:
    native, hub = (
        Model.of(read_config_file(cases.HANDED / family / name))
        for name in ("checkpoint/config.json", "config.hub.json")
    )
    assert native.cfg == hub.cfg


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@scheduled_case
def test_narrow_weights_are_exactly_the_stored_ones(
    case: cases.Case, kind: str, tmp_path: Path
) -> None:
    """Only weights are narrow: against the oracle on the stored values, errors are float32's."""
    driver = Driver.load(cases.build(case, tmp_path), kind)
    assert {str(p.dtype) for p in driver.params.values()} == {cases.LONG[kind], "float32"}
    text = tokens(case, 70)
    want, want_state = oracle(case, driver).run(text)
    logits, state = driver.prefill(text, CHUNK)
    assert relative(logits, want[-1]) < CLOSE and driver.agree(state, want_state, 70) < CLOSE
    stepped, _ = driver.call(text[None, :1], [1], driver.zero_state())
    assert relative(stepped[0], want[0]) < CLOSE


# --- schedules -------------------------------------------------------------------------------


@scheduled_case
def test_any_split_agrees_with_one_shot(case: cases.Case, load: Load) -> None:
    driver, text = load(case), tokens(case, 100, seed=1)
    one, one_state = driver.prefill(text, CHUNK)
    for cuts in ([1, 62, 37], [3, 1, 1, 31, 64], [33, 33, 33, 1], [50, 50]):
        logits, state = driver.prefill(text, CHUNK, cuts=cuts)
        assert relative(logits, one) < CLOSE and worst(state, one_state) < CLOSE, cuts
        assert int(np.argmax(logits)) == int(np.argmax(one))


@scheduled_case
def test_padding_changes_no_bit(case: cases.Case, load: Load) -> None:
    driver, start = load(case), load(case).random_state(1, seed=2)
    for length in (1, 2, 17, 63):
        outcomes = []
        for padding in (0, 1, cases.full_config(case)["vocab_size"] - 1, 2**31 - 1, -1):
            text = np.full((1, CHUNK), padding)
            text[0, :length] = tokens(case, length)
            logits, state = driver.call(text, [length], start, START)
            outcomes.append((logits.tobytes(), bits(state)))
        assert all(outcome == outcomes[0] for outcome in outcomes)


@scheduled_case
def test_a_row_of_length_0_keeps_its_state(case: cases.Case, load: Load) -> None:
    driver = load(case)
    start = driver.random_state(1, seed=3)
    for width in (1, CHUNK):
        _, state = driver.call(tokens(case, width)[None], [0], start, START)
        assert bits(state) == bits(start)


@scheduled_case
def test_a_ragged_batch_is_its_rows_alone(case: cases.Case, load: Load) -> None:
    driver, lengths = load(case), [64, 1, 0, 37]
    text = tokens(case, 4 * CHUNK).reshape(4, CHUNK)
    start, positions = driver.random_state(4, seed=4), [0, 70, 3, START]
    logits, state = driver.call(text, lengths, start, positions)
    for b, length in enumerate(lengths):
        alone, alone_state = driver.call(
            text[b : b + 1],
            [length],
            {name: array[b : b + 1] for name, array in start.items()},
            positions[b],
        )
        assert worst(row(state, b), row(alone_state, 0)) < CLOSE / 5
        if length:
            assert relative(logits[b], alone[0]) < CLOSE / 5


@scheduled_case
def test_poisoned_slots_touch_no_other(case: cases.Case, load: Load) -> None:
    """Slots not in use hold NaN: they keep it, and the others' bits are as if they held zeros."""
    driver, slots = load(case), 4
    decode = jax.jit(entry(driver, "decode").fn)
    used, unused = np.array([0, 2]), np.array([1, 3])
    outcomes = []
    for poison in (0.0, np.nan):
        start = driver.random_state(slots, seed=5)
        state = {name: array.at[unused].set(poison) for name, array in start.items()}
        active = np.zeros(slots, np.int32)
        active[used] = 1
        logits, argmax, *new = decode(
            driver.params, np.arange(slots, dtype=np.int32), 7 * active, active, *state.values()
        )
        after = dict(zip(state, new, strict=True))
        assert bits(after, unused) == bits(state, unused)
        assert bits(after, used) != bits(state, used)
        outcomes.append((np.asarray(logits)[used].tobytes(), bits(after, used)))
        assert np.isfinite(np.asarray(logits)[used]).all()
        assert np.asarray(argmax)[used].tolist() == np.argmax(logits, -1)[used].tolist()
    assert outcomes[0] == outcomes[1]


def entry(driver: Driver, name: str, shape: str = "b4-p8+64") -> Entry:
    return next(e for e in entries(driver.model, Shape.parse(shape)) if e.name == name)


@scheduled_case
def test_seed_and_extract_move_one_slot(case: cases.Case, load: Load) -> None:
    driver = load(case)
    seed, extract = jax.jit(entry(driver, "seed").fn), jax.jit(entry(driver, "extract").fn)
    start, new = driver.random_state(4, seed=6), driver.random_state(1, seed=7)
    for slot in range(4):
        at = np.int32(slot)
        seeded = dict(zip(start, seed({}, at, *start.values(), *new.values()), strict=True))
        others = [b for b in range(4) if b != slot]
        assert bits(seeded, others) == bits(start, others)
        out = dict(zip(start, extract({}, at, *seeded.values()), strict=True))
        assert bits(out) == bits(new)


@scheduled_case
def test_a_reused_slot_is_a_fresh_one(case: cases.Case, load: Load) -> None:
    driver = load(case)
    seed, decode = jax.jit(entry(driver, "seed").fn), jax.jit(entry(driver, "decode").fn)
    zero, ones = driver.zero_state(), np.ones(4, np.int32)
    fresh, used = driver.zero_state(4), driver.random_state(4, seed=8)
    used = dict(zip(used, seed({}, np.int32(2), *used.values(), *zero.values()), strict=True))
    outcomes = []
    for state in (fresh, used):
        logits, _, *new = decode(driver.params, 5 * ones, 0 * ones, ones, *state.values())
        outcomes.append(
            (np.asarray(logits)[2].tobytes(), [np.asarray(n)[2].tobytes() for n in new])
        )
    assert outcomes[0] == outcomes[1]


@scheduled_case
def test_prefill_entry_is_the_forward_pass_with_a_bounded_length(
    case: cases.Case, load: Load
) -> None:
    driver, text = load(case), tokens(case, CHUNK).astype(np.int32)[None]
    state, zero = driver.random_state(1, seed=9), np.zeros(1, np.int32)
    prefill = jax.jit(entry(driver, "prefill_64").fn)
    for given, meant in ((64, 64), (100, 64), (-3, 0), (5, 5)):
        length = np.array([given], np.int32)
        logits, argmax, *new = prefill(driver.params, text, length, zero, *state.values())
        want, want_state = driver.call(text, [meant], state)
        assert relative(logits, want) < CLOSE and int(argmax[0]) == int(np.argmax(logits))
        assert worst(dict(zip(state, new, strict=True)), want_state) < CLOSE
        assert argmax.dtype == jnp.int32 and argmax.shape == (1,)


@scheduled_case
def test_entries_are_as_described(case: cases.Case, load: Load) -> None:
    """Declared inputs and outputs are what the functions take and give; states have storage."""
    driver = load(case)
    structs = {n: jax.ShapeDtypeStruct(p.shape, p.dtype) for n, p in driver.params.items()}
    names = [e.name for e in entries(driver.model, Shape.parse("b4-p8+64"))]
    assert names == ["prefill_8", "prefill_64", "decode", "seed", "extract"]
    for name in names:
        e = entry(driver, name)
        out = jax.eval_shape(e.fn, structs, *(struct for _, struct in e.inputs))
        assert [(o.shape, o.dtype) for o in out] == [(s.shape, s.dtype) for _, s in e.outputs]
        back = {e.outputs[i][0] for _, i in e.storage} | e.consumed
        assert back == {s.name for s in driver.model.state} and not e.consumed & set(e.storage)
        kept = {s.name for s in driver.model.state if s.kind == "per_position"}
        assert e.consumed == (set() if name == "extract" else kept)


# --- the build's own oracle ------------------------------------------------------------------


def test_expected_generations_are_the_oracle(load: Load) -> None:
    case = SCHEDULED[cases.FAMILIES.index("mamba2")]
    driver = load(case)
    texts = expect.prompts(driver.model.cfg.vocab_size, seed=3)
    assert [len(text) for text in texts] == list(expect.PROMPT_LENGTHS)
    for found in expect.generate(driver.model, driver.params, texts, 8):
        want, gaps = oracle(case, driver).greedy(found["tokens"], 8)
        assert found["generated"] == want
        assert abs(found["min_gap"] - min(gaps)) < 1e-4
        assert [top[0][0] for top in found["top_logits"]] == want
        for top in found["top_logits"]:
            assert len(top) == expect.TOP
            assert [v for _, v in top] == sorted((v for _, v in top), reverse=True)


def test_expected_outputs_are_those_of_the_entries(load: Load, tmp_path: Path) -> None:
    driver, shape = load(SCHEDULED[0]), Shape.parse("b3-p8")
    rng = np.random.default_rng(0)
    for e in entries(driver.model, shape):
        arrays: dict[str, Any] = {}
        for name, struct in e.inputs:
            drawn = rng.standard_normal(struct.shape) if struct.dtype == jnp.float32 else 1
            arrays[name] = np.full(struct.shape, drawn, struct.dtype)
        np.savez(tmp_path / f"{e.name}.npz", allow_pickle=False, **arrays)
    (tmp_path / "out").mkdir()
    expect.expected(driver.model, shape, driver.params, tmp_path, tmp_path / "out", seed=1)
    for e in entries(driver.model, shape):
        with np.load(tmp_path / "out" / f"{e.name}.npz") as found:
            more = ["sensitivity"] if e.uses_params else []
            assert list(found) == [name for name, _ in e.outputs] + more
            assert all(1e-7 < moved < 1e-4 for name in more for moved in found[name])
            assert all(
                found[n].shape == s.shape and found[n].dtype == s.dtype for n, s in e.outputs
            )
            assert all(np.isfinite(found[name]).all() for name in found)
