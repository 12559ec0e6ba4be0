"""RG-LRU against float64: `scan` equals `step` folded, padding changes nothing, and as compiled.

Float32 rounds each operation by 6e-8; errors measured here are 1e-7 to 3e-7 of the largest value.
TOLERANCE leaves a factor of a few, and a wrong index or mask costs 1e-2 or more.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from driver import relative
from oracles import rglru as oracle
from test_attention_compiled import DEVICES, TOOLS, compiled

from emit.ops import rglru

TOLERANCE = 2e-6
LENGTHS = (1, 2, 63, 65, 200)
WIDTH, HEADS = 15, 3
CHUNK = 16
POSITION = 7  # of rows that have begun

Arrays = dict[str, Any]
step, scan = jax.jit(rglru.step), jax.jit(rglru.scan, static_argnums=7)
ROWS = ("x", "r", "i", "lengths", "positions", "state")  # what has an axis of rows


@pytest.fixture(autouse=True)
def strict_promotion() -> Any:
    with jax.numpy_dtype_promotion("strict"):
        yield


def inputs(steps: int, rows: int, seed: int = 0) -> Arrays:
    """Random inputs; in every other channel the state fades within a token."""
    rng = np.random.default_rng(seed)

    def f32(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    rate = np.exp(f32(WIDTH) - 4.0)
    rate[::2] *= 100.0
    return {
        "x": f32(rows, steps, WIDTH),
        "r": rng.uniform(0.0, 1.0, (rows, steps, WIDTH)).astype(np.float32),
        "i": rng.uniform(0.0, 1.0, (rows, steps, WIDTH)).astype(np.float32),
        "rate": rate,
        "lengths": np.full(rows, steps, np.int32),
        "positions": np.full(rows, POSITION, np.int32),
        "state": f32(rows, WIDTH),
    }


def padded(a: Arrays, lengths: Any, padding: float) -> Arrays:
    """`padding` in everything after each row's length."""
    out = {name: array.copy() for name, array in a.items()}
    out["lengths"] = np.asarray(lengths, np.int32)
    for b, length in enumerate(lengths):
        for name in ("x", "r", "i"):
            out[name][b, length:] = padding
    return out


def oracle_row(a: Arrays, b: int) -> tuple[np.ndarray, np.ndarray]:
    x, r, i = (a[name][b, : a["lengths"][b]] for name in ("x", "r", "i"))
    return oracle.rglru(x, r, i, a["rate"], a["state"][b], int(a["positions"][b]))


def check(a: Arrays, y: Any, state: Any) -> None:
    """Every row against the oracle."""
    for b, length in enumerate(a["lengths"]):
        want_y, want_state = oracle_row(a, b)
        if length:
            assert relative(y[b, :length], want_y) < TOLERANCE
        assert relative(state[b], want_state) < TOLERANCE


def folded(a: Arrays) -> tuple[np.ndarray, Any]:
    """`step` over every token."""
    state, rows = a["state"], []
    for t in range(a["x"].shape[1]):
        x, r, i = (a[name][:, t : t + 1] for name in ("x", "r", "i"))
        lengths = (a["lengths"] > t).astype(np.int32)
        y, state = step(x, r, i, a["rate"], lengths, a["positions"] + np.int32(t), state)
        rows.append(np.asarray(y))
    return np.concatenate(rows, axis=1), state


def same_bits(a: Any, b: Any) -> bool:
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize(
    ("steps", "chunk"), [*((n, CHUNK) for n in LENGTHS), (65, 4), (65, 32), (130, 64)]
)
def test_scan_is_the_oracle_on_ragged_rows(steps: int, chunk: int) -> None:
    a = inputs(steps, rows=4, seed=steps)
    a["positions"][1:3] = 0
    a = padded(a, [steps, steps // 2, steps, min(steps, 1)], np.inf)
    y, state = scan(*a.values(), chunk)
    assert y.dtype == state.dtype == jnp.float32 and y.shape == a["x"].shape
    check(a, y, state)


@pytest.mark.parametrize("steps", LENGTHS)
def test_step_folded_is_the_oracle_and_the_scan(steps: int) -> None:
    a = inputs(steps, rows=3, seed=steps)
    a["positions"][1] = 0
    a["lengths"][2] = steps // 2
    y, state = folded(a)
    check(a, y, state)
    scanned, scanned_state = scan(*a.values(), CHUNK)
    assert relative(scanned_state, state) < TOLERANCE
    for b, length in enumerate(a["lengths"]):
        assert not length or relative(scanned[b, :length], y[b, :length]) < TOLERANCE


@pytest.mark.parametrize("run", [step, partial(scan, chunk=CHUNK)])
def test_a_row_at_position_0_does_not_know_what_was_there(run: Any) -> None:
    """Neither numbers nor NaN; and its first input is not scaled."""
    steps = 1 if run is step else 5
    a = inputs(steps, rows=3)
    a["positions"][:] = [0, POSITION, 0]
    a["lengths"][2] = 0
    outcomes = []
    for left in (0.0, 3.0, np.nan):
        state = a["state"].copy()
        state[[0, 2]] = left
        y, after = run(**{**a, "state": state})
        outcomes.append((np.asarray(y)[:2].tobytes(), np.asarray(after)[:2].tobytes()))
        assert same_bits(after[2], state[2]), "a row that has not begun keeps its state"
        assert relative(y[0, 0], a["i"][0, 0] * a["x"][0, 0]) < TOLERANCE
    assert outcomes[0] == outcomes[1] == outcomes[2]


@pytest.mark.parametrize("r", [0.0, 1e-7, 1e-4, 1.0])
@pytest.mark.parametrize("rate", [2e-9, 1e-4, 0.7, 60.0])
def test_every_decay_at_a_limit(r: float, rate: float) -> None:
    """From log a = -1e-15, where 1 - a² has no digit in float32, to -480."""
    a = inputs(70, rows=1)
    a["r"][:] = r
    a["rate"][:] = rate
    for y, state in (folded(a), scan(*a.values(), CHUNK)):
        check(a, y, state)
        if r == 0.0:
            assert same_bits(state, a["state"])


def test_a_small_input_to_a_long_memory_counts() -> None:
    """With log a near 0 the state is what the scale sqrt(1 - a²) let in, and nothing else."""
    a = inputs(50, rows=1)
    a["rate"][:] = 1e-6
    a["state"][:] = 0.0
    for y, state in (folded(a), scan(*a.values(), CHUNK)):
        check(a, y, state)


@pytest.mark.parametrize("steps", [1, 7, 70])
def test_padding_changes_no_bit(steps: int) -> None:
    run: Callable[..., Any] = step if steps == 1 else scan
    extra = () if steps == 1 else (CHUNK,)
    lengths = np.minimum(np.array([0, steps, 33, 1], np.int32), steps)
    a = inputs(steps, rows=4)
    a["state"][:, 3] = -0.0
    a["x"][:, :, 3] = -0.0
    outcomes = []
    for padding in (0.0, 1e30, -3.0, np.inf, np.nan):
        y, state = run(*padded(a, lengths, padding).values(), *extra)
        assert same_bits(state[0], a["state"][0]), "a row of length 0 keeps its state"
        valid = [np.asarray(y)[b, :length] for b, length in enumerate(lengths)]
        outcomes.append((np.asarray(state).tobytes(), [v.tobytes() for v in valid]))
    assert all(outcome == outcomes[0] for outcome in outcomes)


@pytest.mark.parametrize("steps", [1, 40])
def test_a_row_is_the_row_alone(steps: int) -> None:
    run: Callable[..., Any] = step if steps == 1 else scan
    extra = () if steps == 1 else (CHUNK,)
    a = inputs(steps, rows=3)
    a["positions"][1] = 0
    y, state = run(*a.values(), *extra)
    for b in range(3):
        one = {n: v[b : b + 1] if n in ROWS else v for n, v in a.items()}
        alone, alone_state = run(*one.values(), *extra)
        assert same_bits(y[b], alone[0]) and same_bits(state[b], alone_state[0])


def test_any_cut_gives_the_digits_of_one_scan() -> None:
    a = inputs(100, rows=2, seed=5)
    a["positions"][:] = [0, POSITION]
    y, state = scan(*a.values(), CHUNK)
    for cuts in ([1, 62, 37], [37, 62, 1]):
        now, rows, at = a["state"], [], 0
        for size in cuts:
            part = {n: a[n][:, at : at + size] for n in ("x", "r", "i")}
            lengths, positions = np.full(2, size, np.int32), a["positions"] + np.int32(at)
            out, now = scan(*part.values(), a["rate"], lengths, positions, now, CHUNK)
            rows.append(np.asarray(out))
            at += size
        assert relative(np.concatenate(rows, 1), y) < 1e-6 and relative(now, state) < 1e-6


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_gates_are_the_oracles_blocks(kind: str) -> None:
    rng = np.random.default_rng(0)
    width = WIDTH // HEADS
    weight = jnp.asarray(rng.standard_normal((HEADS, width, width)), kind)
    x, bias = (rng.standard_normal(s).astype(np.float32) for s in ((2, 9, WIDTH), (WIDTH,)))
    got = jax.jit(rglru.gate)(x, weight, bias)
    stored = np.asarray(weight).astype(np.float64)
    for b in range(2):
        for t in range(9):
            want = oracle.gate(x[b, t].astype(np.float64), stored, bias)
            assert relative(got[b, t], want) < TOLERANCE


# --- as compiled -----------------------------------------------------------------------------

ROWS_COMPILED = 3
WIDTH_COMPILED = 48
FORMS = [("step", 1), ("scan", 16), ("scan", 40)]
everywhere = pytest.mark.parametrize(("name", "steps"), FORMS)


def emitted(name: str, steps: int) -> tuple[str, Any, list[Any]]:
    """Gates and recurrence as a block has them: (text, the function, its arguments)."""
    rng = np.random.default_rng(0)
    B, W, width = ROWS_COMPILED, WIDTH_COMPILED, WIDTH_COMPILED // HEADS

    def f32(*shape: int, scale: float = 1.0) -> Any:
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    def run(
        x: Any, w: Any, b: Any, rate: Any, lengths: Any, positions: Any, state: Any
    ) -> tuple[Any, ...]:
        r, i = (rglru.gate(x, w[j], b[j]) for j in range(2))
        if name == "step":
            return rglru.step(x, r, i, rate, lengths, positions, state)
        return rglru.scan(x, r, i, rate, lengths, positions, state, CHUNK)

    rate = np.exp(f32(W) - 4.0)
    rate[::3] = 1e-7
    rate[1::3] = 3.0
    given = [f32(B, steps, W), f32(2, HEADS, width, width, scale=0.3), f32(2, W), rate]
    given += [np.array([steps, 0, max(steps // 3, 1)], np.int32), np.array([5, 0, 0], np.int32)]
    given.append(f32(B, W))
    jitted = jax.jit(run, keep_unused=True)
    text = jitted.lower(*given).as_text()
    assert "custom_call" not in text and "scatter" not in text
    return text, jitted, given


@pytest.mark.iree
@pytest.mark.parametrize("target", ["cpu", pytest.param("vulkan", marks=pytest.mark.vulkan)])
@everywhere
def test_the_module_gives_the_numbers_of_jax(
    name: str, steps: int, target: str, tmp_path: Path
) -> None:
    text, run, given = emitted(name, steps)
    compiled(text, target, "-o", "model.vmfb", cwd=tmp_path)
    command = [str(TOOLS / "iree-run-module"), f"--device={DEVICES[target]}"]
    command += ["--module=model.vmfb", "--function=main"]
    for j, array in enumerate(given):
        np.save(tmp_path / f"in{j}.npy", array)
        command.append(f"--input=@in{j}.npy")
    command += [f"--output=@out{j}.npy" for j in range(2)]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    (y, state), (want, want_state) = (
        (np.load(tmp_path / f"out{j}.npy") for j in range(2)),
        run(*given),
    )
    lengths, start = given[4], given[6]
    assert same_bits(state[1], start[1]), "a row of length 0 keeps its state"
    for b, length in enumerate(lengths):
        assert relative(state[b], want_state[b]) < 3e-6
        for channel in range(3):  # a long memory has small numbers beside those of others
            got, expected = (z[b, :length, channel::3] for z in (y, np.asarray(want)))
            assert not length or relative(got, expected) < 3e-6


@pytest.mark.iree
@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda-sm121", "rocm-gfx942", "metal"])
@everywhere
def test_every_form_compiles(name: str, steps: int, target: str, tmp_path: Path) -> None:
    compiled(emitted(name, steps)[0], target, "-o", "model.vmfb", cwd=tmp_path)
    assert (tmp_path / "model.vmfb").stat().st_size > 0
