"""The block types of GGUF files, as numbers and as the layouts that a bundle can store.

Sums and products are those of the package `gguf` (`gguf.quants`), which dequantises as llama.cpp
does. A block holds codes and a half-precision scale d, some also a least value; a superblock of 256
holds scales and least values of its groups, as small integers times d and dmin:

| types                      | number of code q            | group | as stored here               |
|----------------------------|-----------------------------|-------|------------------------------|
| Q8_0, Q5_0, Q4_0, IQ4_NL   | d q (IQ4_NL: d table[q])    | 32    | int of 8, 8, 4 and 8 bits    |
| Q4_1, Q5_1                 | d q + m                     | 32    | uint of 4 and 8 bits, bias   |
| Q6_K, Q3_K, IQ4_XS         | (d s) q (IQ4_XS: table[q])  | 16/32 | int of 8, 4 and 8 bits, f32  |
| Q2_K, Q4_K, Q5_K           | (d s) q - (dmin m)          | 16/32 | uint of 4, 4 and 8, f32 bias |
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from emit.dequant.coded import KEY, Coded, only
from emit.errors import EmitError
from emit.gguf_file import KINDS, PLAIN
from emit.packed import Layout, Packed, pack4
from emit.weights import Source

METHOD = "gguf"
BLOCKS = {word: (block, size) for word, block, size in KINDS.values() if word not in PLAIN}
SLICE = 1 << 22  # elements dequantised at a time

_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], "i1")
Unpacked = tuple[np.ndarray, np.ndarray, np.ndarray | None]  # codes, scales, offsets


def widen(blocks: np.ndarray, kind: str) -> np.ndarray:
    """u8[..., bytes of a row] of blocks -> f32[..., elements]. Raises EmitError without `gguf`."""
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError:
        raise EmitError(
            f"tensors of type {kind.upper()} need the package gguf: pip install 'gguf>=0.17'"
        ) from None
    block, size = BLOCKS[kind]
    word = GGMLQuantizationType[kind.upper()]
    rows = blocks.reshape(-1, blocks.shape[-1])
    wide = np.empty((rows.shape[0], rows.shape[1] // size * block), np.float32)
    step = max(1, SLICE // wide.shape[1])
    with np.errstate(all="ignore"):
        for at in range(0, len(rows), step):
            wide[at : at + step] = quants.dequantize(
                np.ascontiguousarray(rows[at : at + step]), word
            )
    return wide.reshape(*blocks.shape[:-1], -1)


def pack(blocks: np.ndarray, kind: str) -> Packed:
    """u8[..., bytes of a row] of blocks -> the same codes as a bundle stores them."""
    layout, unpack = STORED[kind]
    size = BLOCKS[kind][1]
    with np.errstate(all="ignore"):
        codes, scales, offsets = unpack(blocks.reshape(-1, size))
    rows = (*blocks.shape[:-1], -1)
    codes = np.ascontiguousarray(codes).view(np.uint8).reshape(rows)
    if layout.bits == 4:
        codes = pack4(codes)
    return Packed(
        layout, codes, scales.reshape(rows), None if offsets is None else offsets.reshape(rows)
    )


def _half(raw: np.ndarray) -> np.ndarray:
    """u8[N, 2] -> f16[N, 1]."""
    return np.ascontiguousarray(raw).view("<f2")


def _nibbles(raw: np.ndarray, run: int) -> np.ndarray:
    """u8[N, B] -> u8[N, 2 B]: of each run of bytes the low halves, then the high ones."""
    runs = raw.reshape(len(raw), -1, 1, run)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(len(raw), -1)


def _pairs(raw: np.ndarray) -> np.ndarray:
    """u8[N, B] -> u8[N, 4 B]: of each 32 bytes their first two bits, then the next two …"""
    runs = raw.reshape(len(raw), -1, 1, 32)
    return np.concatenate([runs >> s & 3 for s in (0, 2, 4, 6)], axis=2).reshape(len(raw), -1)


def _bits(raw: np.ndarray) -> np.ndarray:
    """u8[N, 32] -> u8[N, 256]: the first bit of all, then the second …"""
    return np.concatenate([raw >> s & 1 for s in range(8)], axis=1)


def _signed(codes: np.ndarray, zero: int) -> np.ndarray:
    return codes.astype(np.int8) - np.int8(zero)


def _q4_0(b: np.ndarray) -> Unpacked:
    return _nibbles(b[:, 2:], 16) ^ 8, _half(b[:, :2]), None  # q - 8 in two's complement


def _q4_1(b: np.ndarray) -> Unpacked:
    return _nibbles(b[:, 4:], 16), _half(b[:, :2]), _half(b[:, 2:4])


def _fifth(raw: np.ndarray) -> np.ndarray:
    """u8[N, 4] -> u8[N, 32]: a bit of each code, in the place of its fifth."""
    return np.unpackbits(raw, axis=1, bitorder="little") << 4


def _q5_0(b: np.ndarray) -> Unpacked:
    return _signed(_nibbles(b[:, 6:], 16) | _fifth(b[:, 2:6]), 16), _half(b[:, :2]), None


def _q5_1(b: np.ndarray) -> Unpacked:
    return _nibbles(b[:, 8:], 16) | _fifth(b[:, 4:8]), _half(b[:, :2]), _half(b[:, 2:4])


def _q8_0(b: np.ndarray) -> Unpacked:
    return b[:, 2:], _half(b[:, :2]), None


def _iq4_nl(b: np.ndarray) -> Unpacked:
    return _IQ4[_nibbles(b[:, 2:], 16)], _half(b[:, :2]), None


def _iq4_xs(b: np.ndarray) -> Unpacked:
    high = np.ascontiguousarray(b[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)
    scales = _signed(_nibbles(b[:, 4:8], 1) | (high.astype(np.uint8) & 3) << 4, 32)
    return _IQ4[_nibbles(b[:, 8:], 16)], _scaled(b[:, :2], scales), None


def _scaled(d: np.ndarray, by: np.ndarray) -> np.ndarray:
    """f32[N, G]: half-precision numbers u8[N, 2] times small integers."""
    return _half(d).astype(np.float32) * by.astype(np.float32)


def _q2_k(b: np.ndarray) -> Unpacked:
    scales = _scaled(b[:, 80:82], b[:, :16] & 15)
    return _pairs(b[:, 16:80]), scales, -_scaled(b[:, 82:84], b[:, :16] >> 4)


def _q3_k(b: np.ndarray) -> Unpacked:
    low = np.concatenate([b[:, 96:104] & 15, b[:, 96:104] >> 4], axis=1)
    high = np.concatenate([b[:, 104:108] >> s & 3 for s in (0, 2, 4, 6)], axis=1)
    codes = _signed(_pairs(b[:, 32:96]) | _bits(b[:, :32]) << 2, 4)
    scales = _scaled(b[:, 108:110], _signed(low | high << 4, 32))
    return codes.view(np.uint8) & 15, scales, None


def _sixes(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """u8[N, 12] -> the eight scales and the eight least values of a superblock, 6 bits each."""
    first, second, last = raw[:, :4], raw[:, 4:8], raw[:, 8:]
    scales = np.concatenate([first & 63, last & 15 | (first >> 6) << 4], axis=1)
    return scales, np.concatenate([second & 63, last >> 4 | (second >> 6) << 4], axis=1)


def _q4_k(b: np.ndarray) -> Unpacked:
    scales, least = _sixes(b[:, 4:16])
    return _nibbles(b[:, 16:], 32), _scaled(b[:, :2], scales), -_scaled(b[:, 2:4], least)


def _q5_k(b: np.ndarray) -> Unpacked:
    scales, least = _sixes(b[:, 4:16])
    codes = _nibbles(b[:, 48:], 32) | _bits(b[:, 16:48]) << 4
    return codes, _scaled(b[:, :2], scales), -_scaled(b[:, 2:4], least)


def _q6_k(b: np.ndarray) -> Unpacked:
    codes = _signed(_nibbles(b[:, :128], 64) | _pairs(b[:, 128:192]) << 4, 32)
    scales = np.ascontiguousarray(b[:, 192:208]).view(np.int8)
    return codes, _scaled(b[:, 208:210], scales), None


STORED: dict[str, tuple[Layout, Callable[[np.ndarray], Unpacked]]] = {
    "q4_0": (Layout(4, 32, "int", "f16"), _q4_0),
    "q4_1": (Layout(4, 32, "uint", "f16", "bias"), _q4_1),
    "q5_0": (Layout(8, 32, "int", "f16"), _q5_0),
    "q5_1": (Layout(8, 32, "uint", "f16", "bias"), _q5_1),
    "q8_0": (Layout(8, 32, "int", "f16"), _q8_0),
    "q2_k": (Layout(4, 16, "uint", "f32", "bias"), _q2_k),
    "q3_k": (Layout(4, 16, "int", "f32"), _q3_k),
    "q4_k": (Layout(4, 32, "uint", "f32", "bias"), _q4_k),
    "q5_k": (Layout(8, 32, "uint", "f32", "bias"), _q5_k),
    "q6_k": (Layout(8, 16, "int", "f32"), _q6_k),
    "iq4_nl": (Layout(8, 32, "int", "f16"), _iq4_nl),
    "iq4_xs": (Layout(8, 32, "int", "f32"), _iq4_xs),
}


@dataclass(frozen=True)
class Ggml:
    """The blocks of a GGUF file; which type a tensor has, it says itself."""

    def coded(self, source: Source) -> Mapping[str, Coded]:
        """All tensors of `source` whose dtype is a block type; they read as u8[..., row bytes]."""
        found = {}
        for name, info in source.tensors.items():
            if info.dtype not in STORED:
                continue
            found[name] = Coded(
                info.shape,
                (name,),
                partial(widen, kind=info.dtype),
                STORED[info.dtype][0],
                partial(pack, kind=info.dtype),
                (1,),
            )
        return found


def read(config: Mapping[str, Any]) -> Ggml:
    """The scheme of `config`. Raises EmitError naming the key that is not supported."""
    given = config[KEY]
    if not isinstance(given, Mapping):
        raise EmitError(f"config.json: {KEY} = {json.dumps(given)[:200]}, expected an object")
    only(given, frozenset({"quant_method"}), {})
    return Ggml()
