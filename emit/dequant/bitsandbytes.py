"""bitsandbytes: nf4 and fp4 in blocks (QLoRA, arXiv:2305.14314), and LLM.int8 (arXiv:2208.07339).

4 bit: element n of the matrix, row by row, is table[q[n]] × absmax[n // blocksize]; of the two
codes in a byte the high half comes first. Beside `X.weight` stand `.absmax`, `.quant_map` (the
table) and `.quant_state.bitsandbytes__nf4` or `__fp4`, the other settings as JSON in bytes. Double
quantisation: absmax = nested_quant_map[code] × nested_absmax[n // nested_blocksize] + offset.

8 bit: w[o, i] = q[o, i] × SCB[o] × (1 / 127), rounded after each product, with `X.SCB` f32 [O].
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from emit.dequant.coded import KEY, Coded, only
from emit.dequant.parts import Found, Groups, grouped, refuse
from emit.packed import TABLES, Layout
from emit.weights import Source

STATE = ".quant_state.bitsandbytes__"
MOST = 4096  # bytes of a state
STEP = np.float32(7.874015718698502e-3)  # 1 / 127, as the library spells it

_FREE = frozenset(
    """quant_method load_in_4bit load_in_8bit _load_in_4bit _load_in_8bit llm_int8_threshold
    llm_int8_skip_modules llm_int8_enable_fp32_cpu_offload bnb_4bit_quant_type
    bnb_4bit_use_double_quant bnb_4bit_compute_dtype bnb_4bit_quant_storage""".split()
)
_ONLY: dict[str, tuple[Any, ...]] = {"llm_int8_has_fp16_weight": (False,)}
_PLAIN = frozenset("quant_type blocksize dtype shape".split())
_NESTED = frozenset("nested_blocksize nested_dtype nested_offset".split())


@dataclass(frozen=True)
class State:
    """How one weight is stored. `nested` is (blocksize, offset) of its quantised absmax."""

    kind: str
    block: int
    shape: tuple[int, ...]
    nested: tuple[int, np.float32] | None

    @classmethod
    def parse(cls, raw: bytes, kind: str) -> State | None:
        """The settings in `raw`; None where they are not those of a weight of `kind`."""
        try:
            given = json.loads(raw)
        except (ValueError, RecursionError):
            return None
        if not isinstance(given, dict) or given.get("quant_type") != kind:
            return None
        if given.keys() not in (_PLAIN, _PLAIN | _NESTED):
            return None
        shape, block = given["shape"], given["blocksize"]
        counts = [block, *shape] if isinstance(shape, list) and shape else [None]
        nested = None
        if len(given) > len(_PLAIN):
            counts.append(given["nested_blocksize"])
            offset = given["nested_offset"]
            if type(offset) is not float or not abs(offset) < 3e38:
                return None
            nested = (given["nested_blocksize"], np.float32(offset))
        if not all(type(n) is int and 0 < n < 2**40 for n in counts) or len(shape) > 8:
            return None
        return cls(kind, block, tuple(shape), nested)

    def absmax(self, stored: np.ndarray, nested: tuple[np.ndarray, ...]) -> np.ndarray:
        """f32 [blocks]: the scales, which may be codes themselves."""
        if self.nested is None:
            return stored
        block, offset = self.nested
        scales, table = nested
        with np.errstate(over="ignore", invalid="ignore"):
            return table[stored] * np.repeat(scales, block)[: len(stored)] + offset

    def codes(self, stored: np.ndarray) -> np.ndarray:
        """u8 [elements]."""
        raw = np.ascontiguousarray(stored).reshape(-1).view(np.uint8)
        return np.stack([raw >> 4, raw & 15], axis=-1).reshape(-1)[: math.prod(self.shape)]

    def split(self, stored: np.ndarray, absmax: np.ndarray, *nested: np.ndarray) -> Groups:
        """The arrays as they are stored, of rows that are whole blocks."""
        scales = self.absmax(absmax, nested[: 2 * (self.nested is not None)])
        return Groups(
            self.codes(stored).reshape(self.shape),
            scales.reshape(*self.shape[:-1], self.shape[-1] // self.block),
        )

    def widen(self, stored: np.ndarray, absmax: np.ndarray, *nested: np.ndarray) -> np.ndarray:
        """f32 [shape] of blocks that go over the ends of rows."""
        wide = np.asarray(TABLES[self.kind], np.float32)[self.codes(stored)]
        scales = self.absmax(absmax, nested[: 2 * (self.nested is not None)])
        with np.errstate(over="ignore", invalid="ignore"):
            wide *= np.repeat(scales, self.block)[: len(wide)]
        return wide.reshape(self.shape)


@dataclass(frozen=True)
class Float4:
    """Weights in blocks of nf4 or fp4."""

    kind: str

    def coded(self, source: Source) -> Mapping[str, Coded]:
        """All weights with a state."""
        found, ending = Found(source), STATE + self.kind
        for said in source.tensors:
            name = said.removesuffix(ending)
            if name == said:
                continue
            weight = self._weight(found, name, said)
            if weight is not None:
                found.coded[name] = weight
        return found.done()

    def _weight(self, found: Found, name: str, said: str) -> Coded | None:
        info = found.source.tensors[said]
        small = info.dtype == "u8" and len(info.shape) == 1 and info.shape[0] <= MOST
        state = State.parse(found.source.read(said).tobytes(), self.kind) if small else None
        if state is None:
            found.problems.append(f"{said} is no JSON of a {self.kind} state")
            return None
        elements = math.prod(state.shape)
        blocks = -(-elements // state.block)
        table = f"{name}.quant_map"
        parts = [name, f"{name}.absmax"]
        fits = [
            found.fits(parts[1], ("f32",) if state.nested is None else ("u8",), (blocks,)),
            found.fits(table, ("f32",), (16,)),
        ]
        if state.nested is not None:
            parts += [f"{name}.nested_absmax", f"{name}.nested_quant_map"]
            fits.append(found.fits(parts[2], ("f32",), (-(-blocks // state.nested[0]),)))
            fits.append(found.fits(parts[3], ("f32",), (256,)))
        codes = found.source.tensors.get(name)
        size = 0 if codes is None else found.source.read(name).nbytes
        if codes is None or size != -(-elements // 2):
            found.problems.append(f"{name} has {size} bytes, expected {list(state.shape)} halves")
            return None
        if not all(fits):
            return None
        if not np.array_equal(found.source.read(table), np.asarray(TABLES[self.kind], np.float32)):
            found.problems.append(f"{table} is not the table of {self.kind}")
            return None
        every = (*parts, table, said)
        if state.shape[-1] % state.block:
            return Coded(state.shape, every, state.widen)
        layout = Layout(4, state.block, "nf4" if self.kind == "nf4" else "fp4", "f32")
        return grouped(state.shape, every, state.split, layout)


@dataclass(frozen=True)
class Int8:
    """Rows of i8 codes. The library rounds twice, so no layout stands for its very numbers."""

    def widen(self, codes: np.ndarray, scales: np.ndarray, *_: np.ndarray) -> np.ndarray:
        """i8 [O, I], f32 [O] -> f32 [O, I]."""
        with np.errstate(over="ignore", invalid="ignore"):
            return codes.astype(np.float32) * scales[:, None] * STEP

    def coded(self, source: Source) -> Mapping[str, Coded]:
        """All weights of modules with an `SCB`."""
        found = Found(source)
        for module in found.modules("SCB"):
            codes, scales, form = f"{module}.weight", f"{module}.SCB", f"{module}.weight_format"
            shape = found.shape(codes, ("i8",), 2)
            if shape is None or not found.fits(scales, ("f32",), shape[:1]):
                continue
            parts = (codes, scales)
            if form in source.tensors:
                if not found.fits(form, ("u8",), (), (1,)):
                    continue
                if source.read(form).any():
                    found.problems.append(f"{form} is not 0, which is row by row")
                parts += (form,)
            found.coded[codes] = Coded(shape, parts, self.widen)
        return found.done()


def read(config: Mapping[str, Any]) -> Float4 | Int8:
    """The scheme of `config`. Raises EmitError naming the key that is not supported."""
    given = config[KEY]
    only(given, _FREE, _ONLY)
    four, eight = (
        any(given.get(key) is True for key in (f"load_in_{n}bit", f"_load_in_{n}bit"))
        for n in (4, 8)
    )
    if four == eight:
        refuse("load_in_4bit", given.get("load_in_4bit"), "one of load_in_4bit and load_in_8bit")
    if eight:
        return Int8()
    kind = given.get("bnb_4bit_quant_type", "fp4")
    if kind not in ("nf4", "fp4"):
        refuse("bnb_4bit_quant_type", kind, '"nf4" or "fp4"')
    return Float4(kind)
