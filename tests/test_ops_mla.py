"""Latent attention, absorbed, against float64 that makes every key and value; and as compiled.

Errors measured here are 1e-7 to 8e-7 of the largest output.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import oracles.mla
import pytest
from driver import relative
from test_attention_compiled import DEVICES, TOOLS, compiled, copied

from emit.ops import attention, mla

TOLERANCE = 3e-6
HUGE = 1e15  # what padding may hold
H, N, P, R, V = 3, 10, 6, 20, 7  # different: a swapped axis cannot pass
SCALE = 0.21

step = jax.jit(partial(mla.step, scale=SCALE))
scan = jax.jit(partial(mla.scan, scale=SCALE))


@pytest.fixture(autouse=True)
def strict_promotion() -> Any:
    with jax.numpy_dtype_promotion("strict"):
        yield


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (scale * rng.standard_normal(shape)).astype(np.float32)


@dataclass
class Rows:
    """Sequences of `pasts` tokens, T new ones for each, and the region they are in.

    Places without a token hold the numbers of an older use. `shared` may be 0 wide.
    """

    pasts: list[int]
    n: np.ndarray
    p: np.ndarray
    latent: np.ndarray
    shared: np.ndarray
    up_k: np.ndarray
    up_v: np.ndarray
    region: np.ndarray

    @classmethod
    def drawn(cls, pasts: list[int], T: int, capacity: int, seed: int = 0, width: int = P) -> Rows:
        rng, B = np.random.default_rng(seed), len(pasts)
        return cls(
            pasts,
            normal(rng, B, T, H, N),
            normal(rng, B, T, H, width),
            normal(rng, B, T, R),
            normal(rng, B, T, width),
            normal(rng, H, R, N, scale=R**-0.5),
            normal(rng, H, V, R, scale=R**-0.5),
            normal(rng, B, 1, capacity, R + width),
        )

    @property
    def tokens(self) -> tuple[np.ndarray, ...]:
        return self.n, self.p, self.latent, self.shared

    def cut(self, rows: slice, start: int, size: int, region: np.ndarray) -> Rows:
        """Some rows' `size` tokens from `start` on, with `region` as it is by then."""
        n, p, latent, shared = (a[rows, start : start + size] for a in self.tokens)
        pasts = [past + start for past in self.pasts[rows]]
        return Rows(pasts, n, p, latent, shared, self.up_k, self.up_v, region)

    def run(self, lengths: Any, name: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        call = {"step": step, "scan": scan}[name or ("step" if self.n.shape[1] == 1 else "scan")]
        numbers = (np.asarray(each, np.int32) for each in (lengths, self.pasts))
        y, region = call(*self.tokens, self.up_k, self.up_v, *numbers, self.region)
        return np.asarray(y), np.asarray(region)

    def check(self, lengths: Any, y: np.ndarray, region: np.ndarray) -> None:
        """Outputs against the oracle, and every place of the region against what it must hold."""
        new = np.concatenate([self.latent, self.shared], axis=-1)
        q = np.concatenate([self.n, self.p], axis=-1)
        for b, (past, length) in enumerate(zip(self.pasts, lengths, strict=True)):
            if length:
                before = self.region[b, 0, :past]
                want = oracles.mla.attention(
                    q[b, :length], new[b, :length], before, self.up_k, self.up_v, SCALE
                )
                assert relative(y[b, :length], want) < TOLERANCE
            held = self.region[b].copy()
            held[0, past : past + length] = new[b, :length]
            assert region[b].tobytes() == held.tobytes()


@pytest.mark.parametrize("width", [P, 0])
@pytest.mark.parametrize("steps", [1, 2, 63, 65, 200])
def test_scan_is_the_oracle_on_ragged_rows_with_a_past(steps: int, width: int) -> None:
    rows = Rows.drawn([0, 7, 31], steps, 240, seed=steps, width=width)
    lengths = [steps, max(steps // 2, 1), min(steps, 3)]
    rows.check(lengths, *rows.run(lengths, "scan"))


@pytest.mark.parametrize("width", [P, 0])
def test_step_is_the_oracle(width: int) -> None:
    rows = Rows.drawn([0, 7, 31, 15], 1, 40, width=width)
    rows.check([1, 1, 1, 0], *rows.run([1, 1, 1, 0], "step"))


@pytest.mark.parametrize("kind", [ml_dtypes.bfloat16, np.float16])
def test_narrow_weights_are_widened_and_not_rounded_into(kind: Any) -> None:
    rows = Rows.drawn([3, 9], 5, 16)
    narrow = [a.astype(kind) for a in (rows.up_k, rows.up_v)]
    rows.up_k, rows.up_v = (a.astype(np.float32) for a in narrow)
    numbers = np.array([5, 5], np.int32), np.array(rows.pasts, np.int32)
    rows.check([5, 5], *map(np.asarray, scan(*rows.tokens, *narrow, *numbers, rows.region)))


def test_scan_is_folded_step_and_any_split() -> None:
    rows = Rows.drawn([5, 31], 40, 80)
    y, region = rows.run([40, 40])
    for cuts in ([1] * 40, [1, 39], [16, 16, 8], [7, 1, 1, 31]):
        at, parts, now = 0, [], rows.region
        for size in cuts:
            out, now = rows.cut(slice(None), at, size, now).run([size, size])
            parts.append(out)
            at += size
        assert relative(np.concatenate(parts, axis=1), y) < TOLERANCE
        assert now.tobytes() == region.tobytes()


def test_blocks_of_tokens_are_the_whole(monkeypatch: Any) -> None:
    rows = Rows.drawn([0, 7], 13, 24)
    whole, _ = rows.run([13, 5])
    monkeypatch.setattr(attention, "SCORES", 4 * H * 24)
    run = jax.jit(partial(mla.scan, scale=SCALE))
    numbers = np.array([13, 5], np.int32), np.array(rows.pasts, np.int32)
    given = (*rows.tokens, rows.up_k, rows.up_v, *numbers, rows.region)
    assert str(jax.make_jaxpr(run)(*given)).count("dot_general") == 2 + 2 * 4
    y, region = map(np.asarray, run(*given))
    rows.check([13, 5], y, region)
    assert relative(y[0], whole[0]) < TOLERANCE / 4


@pytest.mark.parametrize("steps", [1, 5, 16, 40])
def test_the_last_places_of_a_region(steps: int) -> None:
    """A padded chunk whose tail would pass the end, exactly full, and a chunk above the region."""
    pasts = [15, 11, 0, 16, 9]
    lengths = [min(steps, 16 - past) for past in pasts]
    rows = Rows.drawn(pasts, steps, 16)
    rows.check(lengths, *rows.run(lengths))


@pytest.mark.parametrize("steps", [1, 9])
def test_padding_and_places_of_an_older_use_change_no_bit(steps: int) -> None:
    lengths, outcomes = [0, steps, min(steps, 3), 1], []
    for padding in (0.0, HUGE, -3.0, *([np.nan] if steps > 1 else [])):
        rows = Rows.drawn([4, 7, 12, 0], steps, 24)
        for b, (past, length) in enumerate(zip(rows.pasts, lengths, strict=True)):
            for part in rows.tokens:
                part[b, length:] = padding
            rows.region[b, :, past + length :] = min(np.nan_to_num(padding), HUGE)
        y, region = rows.run(lengths)
        assert region[0].tobytes() == rows.region[0].tobytes()
        ends = [past + length for past, length in zip(rows.pasts, lengths, strict=True)]
        held = [region[b, :, :end] for b, end in enumerate(ends)]
        valid = [y[b, :length] for b, length in enumerate(lengths)]
        outcomes.append([a.tobytes() for a in (*valid, *held)])
    assert all(outcome == outcomes[0] for outcome in outcomes)


@pytest.mark.parametrize("steps", [1, 9])
def test_rows_of_a_batch_are_rows_alone_and_poison_stays_where_it_is(steps: int) -> None:
    rows, lengths = Rows.drawn([0, 7, 12], steps, 24), [steps, 0, 1]
    rows.region[1] = np.nan
    y, region = rows.run(lengths)
    assert region[1].tobytes() == rows.region[1].tobytes()
    for b in (0, 2):
        s = slice(b, b + 1)
        one, one_region = rows.cut(s, 0, steps, rows.region[s]).run(lengths[s])
        assert one_region[0].tobytes() == region[b].tobytes()
        assert relative(y[b, : lengths[b]], one[0, : lengths[b]]) < TOLERANCE / 4


# --- as compiled -----------------------------------------------------------------------------

FORMS = [("step", 1), ("scan", 16), ("scan", 64)]
CAPACITY = 256
REGION = 4 * 3 * CAPACITY * (R + P)


def emitted(name: str, steps: int) -> tuple[str, Any, list[np.ndarray]]:
    """(text whose last argument is consumed, the function, its arguments)."""
    rows = Rows.drawn([CAPACITY - steps, 5, 20], steps, CAPACITY)
    lengths = np.array([steps, 0, max(steps // 3, 1)], np.int32)
    given = [*rows.tokens, rows.up_k, rows.up_v, lengths, np.array(rows.pasts, np.int32)]
    run = {"step": step, "scan": scan}[name]
    text = run.lower(*given, rows.region).as_text()
    assert "custom_call" not in text and "scatter" not in text
    consumed = r"%arg8: \1 {iree.abi.consume}"
    text, count = re.subn(r"%arg8: (tensor<[^>]*>)", consumed, text, count=1)
    assert count == 1
    return text, run, [*given, rows.region]


@pytest.mark.iree
@pytest.mark.parametrize(("name", "steps"), FORMS)
def test_the_region_is_not_copied(name: str, steps: int, tmp_path: Path) -> None:
    text = emitted(name, steps)[0]
    stream = compiled(text, "cpu", "--compile-to=stream", "-o", "-", cwd=tmp_path)
    assert len(re.findall(r"tensor\.import .* consume", stream)) == 1
    assert copied(stream) < REGION
    kept = text.replace(" {iree.abi.consume}", "")  # what the caller keeps has to be copied
    stream = compiled(kept, "cpu", "--compile-to=stream", "-o", "-", cwd=tmp_path)
    assert copied(stream) >= REGION


@pytest.mark.iree
@pytest.mark.parametrize("target", ["cpu", pytest.param("vulkan", marks=pytest.mark.vulkan)])
@pytest.mark.parametrize(("name", "steps"), FORMS)
def test_the_module_gives_the_numbers_of_jax(
    name: str, steps: int, target: str, tmp_path: Path
) -> None:
    text, run, given = emitted(name, steps)
    compiled(text, target, "-o", "model.vmfb", cwd=tmp_path)
    for i, array in enumerate(given):
        np.save(tmp_path / f"in{i}.npy", array)
    command = [str(TOOLS / "iree-run-module"), f"--device={DEVICES[target]}"]
    command += ["--module=model.vmfb", "--function=main"]
    command += [f"--input=@in{i}.npy" for i in range(len(given))]
    command += [f"--output=@out{i}.npy" for i in range(2)]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    y, region = (np.load(tmp_path / f"out{i}.npy") for i in range(2))
    want, want_region = map(np.asarray, run(*given))
    assert region.tobytes() == want_region.tobytes()
    for b, length in enumerate(given[6]):
        if length:
            assert relative(y[b, :length], want[b, :length]) < 3e-6


@pytest.mark.iree
@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda-sm121", "rocm-gfx942", "metal"])
@pytest.mark.parametrize(("name", "steps"), FORMS)
def test_every_form_compiles(name: str, steps: int, target: str, tmp_path: Path) -> None:
    compiled(emitted(name, steps)[0], target, "-o", "model.vmfb", cwd=tmp_path)
    assert (tmp_path / "model.vmfb").stat().st_size > 0
