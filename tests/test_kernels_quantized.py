"""linear_quantized.c, and products with experts, against float64 at every CPU level."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import kernels
import numpy as np
import pytest

from emit import kernels as used_kernels
from emit.kernels import linear
from emit.ops import nn
from emit.ops.quantized import Quantized
from emit.packed import Layout, Packed, pack4
from emit.state import DTYPES

SCALES = ("f32", "bf16", "f16")
WORDS = [
    *("uint 4 bf16 bias", "uint 4 f16 zero", "int 4 f32 none", "e2m1 4 f32 none"),
    *("nf4 4 bf16 none", "fp4 4 f16 none", "uint 4 f32 bias", "uint 4 f16 bias"),
    *("uint 4 f32 zero", "uint 4 bf16 zero", *(f"int 8 {scale} none" for scale in SCALES)),
    *(f"uint 8 {scale} {offset}" for scale in SCALES for offset in ("none", "bias", "zero")),
]


def layout(words: str, group: int) -> Layout:
    """Of a line of WORDS."""
    table, bits, scale, offset = words.split()
    said: Any = {"bits": int(bits), "table": table, "scale": scale, "offset": offset}
    return Layout(group=group, **said)


# rows, inputs, outputs, group: groups of one block, of some, and of all inputs; and more
# groups than a vector has numbers
SHAPES = (
    *((1, 96, 37, 32), (3, 128, 70, 64), (8, 64, 9, 64), (13, 160, 130, 160), (1, 64, 65, 32)),
    *((1, 64 * 35, 19, 64), (1, 96 * 16, 8, 96), (1, 32 * 2050, 5, 32), (261, 64, 70, 32)),
    *((9, 192, 70, 96), (10, 320, 20, 320)),
)


def made(how: Layout, outputs: tuple[int, ...], inputs: int, seed: int) -> Packed:
    """Random codes of every value, with scales and offsets of the usual size."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 2**how.bits, (*outputs, inputs)).astype(np.uint8)
    groups = (*outputs, inputs // how.group)
    scales = (random.random(groups) * 0.1 + 0.01).astype(DTYPES[how.scale])
    offsets = None
    if how.offset == "bias":
        offsets = (random.standard_normal(groups) * 0.3).astype(DTYPES[how.scale])
    elif how.offset == "zero":
        offsets = random.integers(0, 2**how.bits, groups).astype(np.uint8)
    return Packed(how, pack4(codes) if how.bits == 4 else codes, scales, offsets)


def low(how: Layout, bits: int, outputs: int, inputs: int) -> Packed:
    """Codes of fewer bits than they are stored in, around the number 0."""
    random = np.random.default_rng(bits)
    codes = random.integers(0, 2**bits, (outputs, inputs)).astype(np.uint8)
    scales = (random.random((outputs, inputs // how.group)) + 0.1).astype(DTYPES[how.scale])
    middle = 2 ** (bits - 1)
    zeros = np.full(scales.shape, middle, np.uint8)
    offsets = zeros if how.offset == "zero" else (scales * -middle).astype(scales.dtype)
    return Packed(how, pack4(codes) if how.bits == 4 else codes, scales, offsets)


def as_jax(packed: Packed) -> Quantized:
    def signless(array: np.ndarray) -> jax.Array:
        return jnp.asarray(array.view(np.int8) if array.dtype == np.uint8 else array)

    offsets = None if packed.offsets is None else signless(packed.offsets)
    return Quantized(signless(packed.codes), signless(packed.scales), offsets, packed.layout)


def close(got: np.ndarray, x: np.ndarray, wide: np.ndarray) -> None:
    """Within the rounding of float32 sums; see test_kernels_linear.

    The sum is over codes times scales, whose magnitudes may be larger than the numbers'.
    """
    x, wide = x.astype(np.float64), wide.astype(np.float64)
    bound = 1e-6 * (np.abs(x) @ np.abs(wide).swapaxes(-1, -2)) + 1e-30
    np.testing.assert_array_less(np.abs(got - x @ wide.swapaxes(-1, -2)), bound)


@pytest.mark.parametrize("kind", WORDS)
@pytest.mark.parametrize("level", kernels.levels())
def test_codes_are_multiplied_as_the_numbers_they_are(level: str, kind: str) -> None:
    random = np.random.default_rng(5)
    for seed, (rows, inputs, outputs, group) in enumerate(SHAPES):
        packed = made(layout(kind, group), (outputs,), inputs, seed)
        found = linear.operand(as_jax(packed))
        assert found is not None
        x = random.standard_normal((rows, inputs)).astype(np.float32)
        y = np.full((rows, outputs), np.nan, np.float32)
        tiles = linear.tile_count(rows, outputs, 1 << 15)
        arrays = [x, *map(np.asarray, found.arrays), y]
        sizes = (rows, inputs, outputs, tiles, *found.sizes)
        calls = tiles * linear.parts_of_rows(rows)
        got = kernels.run(level, f"linear_{found.kind}", arrays, sizes, calls)
        close(got[-1], x, packed.widen())


@pytest.mark.parametrize("bits", [2, 3, 5, 6])
@pytest.mark.parametrize("level", kernels.levels())
def test_codes_of_few_bits_do_not_cancel(level: str, bits: int) -> None:
    """Sums of codes that are all far from what their group takes off them would."""
    for offset in ("bias", "zero"):
        how = layout(f"uint {4 if bits < 4 else 8} f32 {offset}", 64)
        packed = low(how, bits, 40, 64)
        found = linear.operand(as_jax(packed))
        assert found is not None
        for rows in (1, 2, 8, 9):
            x = np.abs(np.random.default_rng(rows).standard_normal((rows, 64))).astype(np.float32)
            arrays = [x, *map(np.asarray, found.arrays), np.zeros((rows, 40), np.float32)]
            sizes = (rows, 64, 40, 1, *found.sizes)
            got = kernels.run(level, f"linear_{found.kind}", arrays, sizes, 1)
            close(got[-1], x, packed.widen())


@pytest.mark.parametrize("size", [1.0, 1e3, 1e7, 1e-36, 1e34])
@pytest.mark.parametrize("level", kernels.levels())
def test_a_large_input_takes_nothing_from_the_others(level: str, size: float) -> None:
    """Where its own code is zero; nor does it matter how large or small all of x are."""
    for kind in ("uint 4 f32 none", "uint 4 f32 zero", "int 8 f32 none"):
        packed = made(layout(kind, 32), (9,), 256, 3)
        zeros = 0 if packed.offsets is None else packed.offsets[:, 0]
        packed.codes[:, 0] = zeros * 17 if "4" in kind.split() else 0  # of inputs 0 and 1
        found = linear.operand(as_jax(packed))
        assert found is not None
        x = np.random.default_rng(4).standard_normal((1, 256)).astype(np.float32)
        x *= np.float32(size if size < 1e-30 or size > 1e30 else 1)
        x[0, 0] *= np.float32(size if 1 < size < 1e30 else 1)
        arrays = [x, *map(np.asarray, found.arrays), np.zeros((1, 9), np.float32)]
        got = kernels.run(level, f"linear_{found.kind}", arrays, (1, 256, 9, 1, *found.sizes), 1)
        close(got[-1] / size if size > 1e30 else got[-1], x / size if size > 1e30 else x,
              packed.widen())  # fmt: skip


@pytest.mark.parametrize("kind", [WORDS[0], WORDS[1], WORDS[10], *SCALES])
@pytest.mark.parametrize("level", kernels.levels())
def test_experts_are_those_of_the_index(level: str, kind: str) -> None:
    """With an x for each pair, an x for two of them, and several rows an expert."""
    count, inputs, outputs = 5, 64, 43
    random = np.random.default_rng(6)
    if kind in SCALES:
        wide = random.standard_normal((count, outputs, inputs)).astype(DTYPES[kind])
        found = linear.operand(jnp.asarray(wide))
    else:
        packed = made(layout(kind, 32), (count, outputs), inputs, 6)
        wide, found = packed.widen(), linear.operand(as_jax(packed))
    assert found is not None
    index = np.asarray([4, 0, 0, 3], np.int32)
    for sources, rows in ((4, 1), (2, 1), (1, 3), (1, 11), (2, 260)):
        x = random.standard_normal((sources, rows, inputs)).astype(np.float32)
        y = np.full((len(index), rows, outputs), np.nan, np.float32)
        tiles = linear.tile_count(rows, outputs, 1 << 15, 8)
        share = len(index) // sources
        sizes = (rows, inputs, outputs, tiles, *found.sizes, share)
        arrays = [x, *map(np.asarray, found.arrays), index, y]
        name = f"experts_{found.kind}"
        calls = tiles * linear.parts_of_rows(rows) * len(index)
        got = kernels.run(level, name, arrays, sizes, calls)[-1]
        close(got, np.repeat(x, share, axis=0), wide[index])


@pytest.mark.parametrize("rows", [1, 12])
@pytest.mark.parametrize("kind", WORDS)
def test_the_graph_multiplies_the_same_numbers(kind: str, rows: int) -> None:
    """The form that other targets compile, with groups that no kernel takes too."""
    packed = made(layout(kind, 16), (37,), 48, 9)
    weight = as_jax(packed)
    assert linear.operand(weight) is None and weight.shape == (37, 48)
    np.testing.assert_array_equal(weight.astype(jnp.float32), packed.widen())
    x = np.random.default_rng(8).standard_normal((1, rows, 48)).astype(np.float32)
    close(np.asarray(jax.jit(nn.linear)(x, weight)), x, packed.widen())
    index = np.asarray([[0, 36, 5]], np.int32)
    np.testing.assert_array_equal(nn.embed(jnp.asarray(index), weight), packed.widen()[index])


def test_the_op_calls_the_kernel_of_the_layout() -> None:
    weight = as_jax(made(Layout(4, 32, "uint", "bf16", "bias"), (48,), 64, 1))

    def product(x: jax.Array, weight: Quantized) -> jax.Array:
        with used_kernels.used():
            return nn.linear(x, weight)

    text = jax.jit(product).lower(jnp.ones((2, 1, 64)), weight).as_text()
    assert "scanwright.linear_q4_bf16_bias" in text
