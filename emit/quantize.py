"""Rounds a matrix to codes and a scale for each group of inputs."""

from __future__ import annotations

import numpy as np

from emit.errors import EmitError
from emit.packed import Layout, Packed, pack4
from emit.state import DTYPES

PIECE = 1 << 22  # numbers that are rounded at once
TINY = 1e-37  # the least scale
FITS = 2  # times that scale and bias are fitted to the codes, and the codes to them


def quantize(name: str, wide: np.ndarray, layout: Layout) -> Packed:
    """f32[..., O, K] as `layout`: `int` without offsets, or `uint` with a bias.

    Codes are those nearest to the numbers under the scales as they are stored. Raises EmitError
    where a scale does not fit in its type.
    """
    rows = wide.reshape(-1, wide.shape[-1])
    step = max(1, PIECE // max(1, rows.shape[1]))
    starts = range(0, max(1, len(rows)), step)
    with np.errstate(over="ignore", invalid="ignore"):  # told below
        pieces = [_rounded(rows[at : at + step], layout) for at in starts]
    outer = wide.shape[:-1]
    codes, scales, *biases = (
        np.concatenate(arrays).reshape(*outer, -1) for arrays in zip(*pieces, strict=True)
    )
    if not np.isfinite(scales.astype(np.float32)).all():
        raise EmitError(f"{name}: its range does not fit in {layout.scale}; use weights=f32")
    packed = pack4(codes) if layout.bits == 4 else codes
    return Packed(layout, packed, scales, biases[0] if biases else None)


def _rounded(rows: np.ndarray, layout: Layout) -> tuple[np.ndarray, ...]:
    """(u8 codes [R, K], scales [R, G]) and, if there is a bias, biases [R, G]."""
    groups = rows.reshape(len(rows), -1, layout.group) if rows.size else rows[..., None]
    if layout.offset == "bias" and layout.table == "uint":
        codes, *stored = _affine(groups, layout)
    elif layout.offset == "none" and layout.table == "int":
        codes, *stored = _symmetric(groups, layout)
    else:
        raise EmitError(f"nothing is rounded to {layout.table} with offset {layout.offset}")
    return (codes.reshape(rows.shape), *stored)


def _symmetric(groups: np.ndarray, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    most = 2 ** (layout.bits - 1) - 1
    largest = np.abs(groups).max(axis=-1, initial=0.0)
    scales = _stored(largest / np.float32(most), layout)
    by = _inverse(scales)[..., None]
    return np.rint(groups * by).clip(-most, most).astype(np.int8).view(np.uint8), scales


def _affine(groups: np.ndarray, layout: Layout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scale and bias from the ends of the range, then by least squares as long as that helps."""
    most = np.float32(2**layout.bits - 1)
    low = groups.min(axis=-1, initial=np.inf) if groups.size else groups.sum(axis=-1)
    high = groups.max(axis=-1, initial=-np.inf) if groups.size else low
    bias = low.astype(DTYPES[layout.scale])
    best = _coded(groups, _stored((high - low) / most, layout), bias, most)
    for _ in range(FITS):
        scales, biases = _line(groups, best[0])
        fitted = _coded(groups, _stored(scales, layout), biases.astype(bias.dtype), most)
        better = fitted[3] < best[3]
        best = tuple(
            np.where(better[..., None] if new.ndim == 3 else better, new, old)
            for new, old in zip(fitted, best, strict=True)
        )
    return best[0], best[1], best[2]


def _coded(
    groups: np.ndarray, scales: np.ndarray, biases: np.ndarray, most: np.float32
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Codes under the stored scales and biases, these, and the squared error of each group."""
    bias = biases.astype(np.float32)[..., None]
    codes = np.rint((groups - bias) * _inverse(scales)[..., None]).clip(0, most)
    error = codes * scales.astype(np.float32)[..., None] + bias - groups
    return codes.astype(np.uint8), scales, biases, np.square(error).sum(axis=-1)


def _line(groups: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(scale, bias) of the least squares line through (code, number), of each group."""
    x = codes.astype(np.float32)
    dx = x - x.mean(axis=-1, keepdims=True)
    mean = groups.mean(axis=-1)
    square = np.square(dx).sum(axis=-1)
    slope = (dx * (groups - mean[..., None])).sum(axis=-1) / np.where(square > 0, square, 1)
    return slope, mean - slope * x.mean(axis=-1)


def _stored(scales: np.ndarray, layout: Layout) -> np.ndarray:
    """Scales in their type; 0 where the inverse would not be a number."""
    return np.where(np.abs(scales) < TINY, 0, scales).astype(DTYPES[layout.scale])


def _inverse(scales: np.ndarray) -> np.ndarray:
    wide = scales.astype(np.float32)
    return np.where(wide != 0, 1 / np.where(wide != 0, wide, 1), 0).astype(np.float32)
