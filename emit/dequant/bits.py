"""Codes of a few bits out of the words that they are packed into."""

from __future__ import annotations

import numpy as np


def stream(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The codes of a bit stream along the last axis: u8[..., count].

    `words` are integers of any width [..., W], the lowest bit first; code i is bits i × `bits` to
    (i + 1) × `bits` of a row, whatever word they fall into. `bits` is 1 to 8.
    """
    rows = np.ascontiguousarray(words)
    found = rows.view(np.uint8).reshape(*rows.shape[:-1], rows.shape[-1] * rows.dtype.itemsize)
    if bits == 8:
        return found[..., :count]
    periods = -(-count // 8)  # eight codes fill `bits` bytes
    spare = periods * bits - found.shape[-1]
    if spare > 0:
        found = np.concatenate([found, np.zeros((*found.shape[:-1], spare), np.uint8)], axis=-1)
    packed = found[..., : periods * bits].reshape(*found.shape[:-1], periods, bits)
    codes = np.empty((*packed.shape[:-1], 8), np.uint8)
    for index in range(8):
        byte, shift = divmod(index * bits, 8)
        code = packed[..., byte] >> shift
        if shift + bits > 8:
            code = code | packed[..., byte + 1] << (8 - shift)
        codes[..., index] = code & (2**bits - 1)
    return codes.reshape(*found.shape[:-1], periods * 8)[..., :count]


def columns(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The codes of streams that run down the first axis of `words` [W, C]: u8[C, count]."""
    return stream(words.T, bits, count)


def length(count: int, bits: int, word: int = 32) -> int:
    """Words of `word` bits that a stream of `count` codes fills."""
    return -(-count * bits // word)
