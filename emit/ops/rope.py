"""Rotary position embedding (RoFormer, arXiv:2104.09864, eq. 34), over halves.

    (x[i], x[i + N]) -> (x[i] cos a - x[i + N] sin a, x[i + N] cos a + x[i] sin a),  a = p f[i]

for i < N = rotary / 2, where `rotary` is the rotated width; what is behind it stays as it is.

Position p and frequency f give an angle in turns, p f / 2π, of which only the fraction matters. It
is taken in 32-bit integers: f / 2π is stored as 48 bits, F 2^-32 + L 2^-48, and p F + (p L >> 16)
modulo 2^32 is the fraction in units of 2^-32 turns. So an angle is as exact at position 10^6 as at
position 1 (a float32 product p f would be off by 0.06 radians there). The two upper bits are the
quadrant; sine and cosine of the rest, at most π/4, are their series, and so the same on every
target: no target's own sine with its own range and precision is used.

Frequencies are computed in float64 when the graph is made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


@dataclass(frozen=True)
class Rope:
    """Frequencies in radians a token, N of them, and a factor on sine and cosine.

    `limit` is the longest context for which they hold, where the method changes them beyond it.
    """

    frequencies: tuple[float, ...]
    factor: float = 1.0
    limit: int | None = None

    @property
    def rotary(self) -> int:
        """How many elements of a head are rotated."""
        return 2 * len(self.frequencies)


def default(theta: float, rotary: int) -> np.ndarray:
    """theta^(-2i / rotary) for i < rotary / 2 (arXiv:2104.09864, section 3.2.2), float64."""
    return theta ** (-np.arange(0, rotary, 2, dtype=np.float64) / rotary)


def llama3(
    frequencies: np.ndarray, factor: float, low: float, high: float, original: int
) -> np.ndarray:
    """Llama 3.1: wavelengths above original / low are stretched by `factor`, those below
    original / high kept, and those between interpolated linearly in original / wavelength."""
    turns = original * frequencies / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * ((1 - smooth) / factor + smooth)


def yarn(
    frequencies: np.ndarray,
    theta: float,
    factor: float,
    original: int,
    fast: float = 32.0,
    slow: float = 1.0,
    truncate: bool = True,
) -> np.ndarray:
    """YaRN's interpolation by parts (arXiv:2309.00071, section 3.2).

    Dimensions that turn more than `fast` times over the original context are kept, those that turn
    less than `slow` times are stretched by `factor`, with a linear ramp over dimensions between.
    """
    rotary = 2 * len(frequencies)

    def dimension(turns: float) -> float:
        return rotary * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(fast), dimension(slow)
    if truncate:
        first, last = float(math.floor(first)), float(math.ceil(last))
    first, last = max(first, 0.0), min(last, rotary - 1.0)
    if first == last:
        last += 0.001  # no ramp, and no division by zero
    stretched = np.clip((np.arange(rotary // 2) - first) / (last - first), 0.0, 1.0)
    return frequencies * (1 - stretched) + frequencies / factor * stretched


def yarn_factor(factor: float, mscale: float = 0.0, mscale_all: float = 0.0) -> float:
    """What YaRN multiplies sine and cosine by (arXiv:2309.00071, eq. 22), or DeepSeek's ratio."""

    def attention(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return attention(mscale) / attention(mscale_all) if mscale and mscale_all else attention(1.0)


def tables(rope: Rope, positions: Array, steps: int) -> tuple[Array, Array]:
    """(cos, sin) f32[B, T, N] of `steps` tokens a row, the first at `positions` i32[B] >= 0."""
    p = positions[:, None, None] + jnp.arange(steps, dtype=jnp.int32)[None, :, None]
    units = np.array([round(f / (2 * math.pi) * 2.0**48) for f in rope.frequencies], dtype=object)
    upper = np.array([int(u >> 16) % 2**32 for u in units], np.uint32).view(np.int32)
    lower = np.array([int(u) % 2**16 for u in units], np.int32)
    # p L >> 16 from the halves of p, each product within 32 bits; all sums are modulo 2^32.
    carried = jax.lax.shift_right_logical((p & 0xFFFF) * lower, jnp.int32(16))
    turns = p * upper + jax.lax.shift_right_logical(p, jnp.int32(16)) * lower + carried
    quadrant = jax.lax.shift_right_logical(turns + jnp.int32(2**29), jnp.int32(30))
    rest = turns - jax.lax.shift_left(quadrant, jnp.int32(30))
    cos, sin = _series(rest.astype(jnp.float32) * np.float32(2 * math.pi / 2**32))
    odd = (quadrant & 1) == 1
    cosine = jnp.where(odd, sin, cos) * jnp.where((quadrant == 1) | (quadrant == 2), -1.0, 1.0)
    sine = jnp.where(odd, cos, sin) * jnp.where(quadrant >= 2, -1.0, 1.0)
    return cosine * rope.factor, sine * rope.factor


def _series(x: Array) -> tuple[Array, Array]:
    """Cosine and sine of |x| <= π/4; the first terms left out are below 2e-9."""
    square = x * x
    cos, sin = (jnp.full_like(x, (-1) ** 5 / math.factorial(10 + odd)) for odd in (0, 1))
    for n in range(4, -1, -1):
        cos = cos * square + np.float32((-1) ** n / math.factorial(2 * n))
        sin = sin * square + np.float32((-1) ** n / math.factorial(2 * n + 1))
    return cos, sin * x


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """x f32[B, T, H, D] rotated by `tables`, the part behind 2 N elements unchanged.

    The halves are two rows, turned by themselves and the other: joined from two results they would
    be copied.
    """
    N = cos.shape[-1]
    halves = x[..., : 2 * N].reshape(*x.shape[:-1], 2, N)
    cos, sin = cos[:, :, None, None], sin[:, :, None, None]
    signed = np.array([[-1.0], [1.0]], np.float32) * sin
    y = (halves * cos + jnp.flip(halves, axis=-2) * signed).reshape(*x.shape[:-1], 2 * N)
    return y if x.shape[-1] == 2 * N else jnp.concatenate([y, x[..., 2 * N :]], axis=-1)
