"""attention.c against float64, at every CPU level, where rows see different parts of a region."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import kernels
import numpy as np
import pytest
from driver import relative
from oracles.attention import attend

from emit import kernels as used_kernels
from emit.kernels.attention import parts
from emit.ops import attention

# rows, tokens, heads, key heads, places, D, numbers of a value, soft cap, parts, tiles
STEPS = (
    (3, 1, 6, 2, 70, 16, 16, 0.0, 1, 6),
    (2, 1, 11, 1, 131, 37, 37, 3.0, 1, 1),
    (2, 1, 8, 4, 300, 128, 128, 0.0, 3, 5),
    (2, 1, 9, 1, 80, 576, 512, 0.0, 2, 4),
    (1, 1, 1, 1, 5, 1, 1, 0.0, 1, 1),
)
SCANS = (
    (2, 9, 6, 2, 70, 16, 16, 0.0, 1, 3),
    (1, 33, 4, 1, 150, 37, 37, 3.0, 1, 7),
    (2, 5, 3, 3, 20, 200, 130, 0.0, 1, 56),
    (1, 2, 2, 1, 70, 640, 600, 0.0, 1, 1),
)


def arguments(size: tuple[Any, ...], seed: int) -> list[Any]:
    """q, a region with NaN where nothing was written, lengths (one row's 0) and positions."""
    B, T, H, G, C, D, _, _, _, _ = size
    random = np.random.default_rng(seed)
    q, keys, values = (
        random.standard_normal(s).astype(np.float32) for s in [(B, T, H, D), *[(B, G, C, D)] * 2]
    )
    positions = np.array([C - T, 3, 10][:B], np.int32)
    lengths = np.array([T, max(T - 2, 1), 0][:B], np.int32)
    for b in range(B):
        end = positions[b] + (1 if T == 1 else lengths[b])
        keys[b, :, end:] = values[b, :, end:] = np.nan
    return [q, keys, values, lengths, positions]


def wanted(a: list[Any], size: tuple[Any, ...], b: int, t: int) -> np.ndarray:
    """The output of one token in float64."""
    q, keys, values, _, positions = a
    end = positions[b] + t + 1
    past = [list(np.swapaxes(x[b, :, :end], 0, 1)) for x in (keys, values)]
    return attend(q[b, t], past[0], past[1], 0.25, None, size[7] or None)[:, : size[6]]


def run(level: str, a: list[Any], size: tuple[Any, ...]) -> np.ndarray:
    """What the kernels write."""
    B, T, H, G, C, D, W, cap, splits, tiles = size
    y = np.full((B, T, H, W), np.nan, np.float32)
    bits = [int(np.float32(x).view(np.uint32)) for x in (0.25, cap)]
    sizes, units = [H, G, C, D, W, *bits], B * G * -(-H // G // 8)
    if T > 1:
        return kernels.run(level, "attention_scan", [*a, y], [B, T, *sizes, tiles], tiles)[5]
    a = [*a[:3], a[4]]
    if splits == 1:
        return kernels.run(level, "attention_step", [*a, y], [units, *sizes, tiles], tiles)[4]
    made = [np.full((B * H, splits, n), np.nan, np.float32) for n in (W, 2)]
    sizes = [units * splits, *sizes, splits, tiles]
    found = kernels.run(level, "attention_part", [*a, *made], sizes, tiles)[4:]
    return kernels.run(level, "attention_join", [*found, y], [B * H, splits, W, 2], -(-B * H // 2))[
        2
    ]


@pytest.mark.parametrize("level", kernels.levels())
def test_the_kernels_are_softmax_attention(level: str) -> None:
    """Nothing is read that is not there; padding gives zeros, a single token its attention.

    Errors measured are 4e-6 where scores are 25, and 1e-6 elsewhere."""
    for seed, size in enumerate([*STEPS, *SCANS]):
        a = arguments(size, seed)
        y = run(level, a, size)
        for b, length in enumerate(a[3]):
            for t in range(size[1]):
                if t < length or size[1] == 1:
                    assert relative(y[b, t], wanted(a, size, b, t)) < 1e-5
                else:
                    assert not y[b, t].any()


# tokens, heads, key heads, places, D, window, positions of two rows
RINGS = (
    (9, 6, 2, 20, 16, 20, (3, 47)),
    (70, 2, 1, 33, 37, 33, (0, 99)),
    (8, 3, 3, 100, 70, 130, (60, 100)),
)


@pytest.mark.parametrize("level", kernels.levels())
def test_a_ring_and_the_tokens_after_it(level: str) -> None:
    """Against attention to a list of all keys, of which the ring holds the last ones."""
    for seed, (T, H, G, C, D, window, positions) in enumerate(RINGS):
        random = np.random.default_rng(seed)
        shapes = [(2, T, H, D), *[(2, max(positions) + T, G, D)] * 2]
        q, keys, values = (random.standard_normal(s).astype(np.float32) for s in shapes)
        rings = [np.full((2, G, C, D), np.nan, np.float32) for _ in range(2)]
        lengths = np.array([T, T - 3], np.int32)
        own = []
        for every, ring in zip((keys, values), rings, strict=True):
            for b, first in enumerate(positions):
                for p in range(max(0, first - C), first):
                    ring[b, :, p % C] = every[b, p]
            own.append(np.stack([every[b, p : p + T] for b, p in enumerate(positions)]))
            own[-1][1, T - 3 :] = np.nan
        arrays = [q, *own, *rings, lengths, np.array(positions, np.int32), np.full_like(q, np.nan)]
        bits = [int(np.float32(x).view(np.uint32)) for x in (0.25, 5.0)]
        sizes = (2, T, H, G, C, D, window, *bits, 5)
        y = kernels.run(level, "attention_ring", arrays, sizes, 5)[7]
        for b, first in enumerate(positions):
            for t in (0, 1, T // 2, lengths[b] - 1):
                past = [list(every[b, : first + t + 1]) for every in (keys, values)]
                want = attend(q[b, t], past[0], past[1], 0.25, window, 5.0)
                assert relative(y[b, t], want) < 3e-6
            assert not y[b, lengths[b] :].any()


def test_a_larger_score_later_takes_over() -> None:
    """Scores that grow by hundreds from block to block, in exponentials of differences alone."""
    size = (1, 1, 2, 1, 200, 8, 8, 0.0, 1, 1)
    a = arguments(size, 0)
    a[1] *= np.arange(200, dtype=np.float32)[:, None] * 5
    assert relative(run("x86-64-v3", a, size)[0, 0], wanted(a, size, 0, 0)) < 3e-6


def test_few_heads_of_many_places_are_cut_into_parts() -> None:
    assert parts(1, 4096) == 16 and parts(2, 2048) == 8 and parts(1, 100) == 1
    assert parts(8, 8192) == 2 and parts(64, 8192) == 1


@pytest.mark.parametrize("places", [64, 2048])
@pytest.mark.parametrize("steps", [1, 4])
def test_the_op_calls_the_kernels_only_where_kernels_are_used(steps: int, places: int) -> None:
    a = arguments((2, steps, 4, 2, places, 8, 8, 0.0, 1, 1), 0)

    def text(on: bool) -> str:
        def read(*given: Any) -> Any:
            with used_kernels.used(on):
                return attention.read(*given, scale=0.25)

        return jax.jit(read).lower(*map(jnp.asarray, a)).as_text()

    names = ["scan"] if steps > 1 else ["step"] if places == 64 else ["part", "join"]
    assert all(f"scanwright.attention_{name}" in text(True) for name in names)
    assert "custom_call" not in text(False)
