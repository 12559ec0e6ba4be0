"""AWQ (arXiv:2306.00978) as AutoAWQ and GPTQModel write it.

w[o, i] = (q - z[o, g]) × s[o, g] with g = i // group_size.

| version | qweight i32                | qzeros i32                 | scales             |
|---------|----------------------------|----------------------------|--------------------|
| gemm    | [inputs, outputs b / 32]   | [groups, outputs b / 32]   | [groups, outputs]  |
| gemv    | [outputs, inputs b / 32]   | [outputs, W]               | [outputs, 8 W]     |

A row is a stream of b bit codes; in `gemm` eight codes of four bits in a word are those of the
outputs 0, 2, 4, 6, 1, 3, 5, 7. In `gemv` rows are filled up to a width W beyond the groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from emit.dequant import bits as unpack
from emit.dequant.coded import KEY, Coded, only
from emit.dequant.parts import FLOATS, Found, Groups, grouped, refuse, scale_word, stored, whole
from emit.packed import Layout
from emit.weights import Source

PLACE = (0, 4, 1, 5, 2, 6, 3, 7)  # of output o of eight, in its word

_FREE = frozenset(
    """quant_method method bits w_bit group_size q_group_size version format checkpoint_format
    zero_point sym desc_act modules_to_not_convert backend do_fuse modules_to_fuse
    fuse_max_seq_len exllama_config meta lm_head tokenizer dataset damp_percent static_groups
    true_sequential act_group_aware model_seqlen block_name_to_quantize batch_size pad_token_id
    module_name_preceding_first_block max_input_length cache_block_outputs
    modules_in_block_to_quantize""".split()
)
_ONLY: dict[str, tuple[Any, ...]] = {
    "pack_dtype": ("int32",),
    "dynamic": ({},),
    "activation": ({},),
    "rotation": ("",),
}
WIDEST = {32: 4, 64: 2}  # group: what the words of a gemv row of zeros are a multiple of


@dataclass(frozen=True)
class Awq:
    """The settings; `group` None is one group of all inputs."""

    bits: int
    group: int | None
    gemv: bool

    def split(self, codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray) -> Groups:
        """The arrays of a module, as they are stored."""
        if self.gemv:
            inputs = codes.shape[1] * 32 // self.bits
            groups = inputs // (self.group or inputs)
            zero = unpack.stream(zeros, self.bits, groups)
            return Groups(unpack.stream(codes, self.bits, inputs), scales[:, :groups], zero)
        outputs = scales.shape[1]
        return Groups(self._columns(codes, outputs), scales.T, self._columns(zeros, outputs))

    def _columns(self, words: np.ndarray, outputs: int) -> np.ndarray:
        """u8[outputs, rows] of gemm words [rows, W]."""
        codes = unpack.stream(words, self.bits, outputs)
        if self.bits == 4:
            codes = codes.reshape(len(codes), outputs // 8, 8)[..., PLACE].reshape(len(codes), -1)
        return codes.T

    def coded(self, source: Source) -> Mapping[str, Coded]:
        """All modules that have a `qweight`."""
        found = Found(source)
        for module in found.modules("qweight"):
            shape = found.shape(f"{module}.qweight", ("i32",), 2)
            if shape is not None:
                self._add(found, module, shape)
        return found.done()

    def _add(self, found: Found, module: str, shape: tuple[int, ...]) -> None:
        codes, zeros, scales = (f"{module}.{word}" for word in ("qweight", "qzeros", "scales"))
        unpacked = shape[1] * 32 // self.bits
        outputs, inputs = (shape[0], unpacked) if self.gemv else (unpacked, shape[0])
        group = self.group or inputs
        if inputs == 0 or inputs % group or shape[1] * 32 % self.bits:
            found.problems.append(f"{codes} is {list(shape)}: {inputs} inputs in groups of {group}")
            return
        groups = inputs // group
        words, rows = (groups, shape[1]), (groups, outputs)
        if self.gemv:
            width = unpack.length(groups, self.bits)
            width += -width % WIDEST.get(group, 1)
            words, rows = (outputs, width), (outputs, width * 32 // self.bits)
        fits = [found.fits(zeros, ("i32",), words), found.fits(scales, FLOATS, rows)]
        if not all(fits):
            return
        layout = Layout(stored(self.bits), group, "uint", scale_word(found.source, scales), "zero")
        parts = (codes, zeros, scales)
        found.coded[f"{module}.weight"] = grouped((outputs, inputs), parts, self.split, layout)


def read(config: Mapping[str, Any]) -> Awq:
    """The scheme of `config`. Raises EmitError naming the key that is not supported."""
    given = config[KEY]
    only(given, _FREE, _ONLY)
    names = [given[key] for key in ("version", "format", "checkpoint_format") if given.get(key)]
    words = {name.lower() if isinstance(name, str) else str(name) for name in names}
    if len(words) > 1 or not words <= {"gemm", "gemv"}:
        refuse("version", sorted(words), '"gemm" or "gemv"')
    if given.get("backend") == "llm-awq":
        refuse("backend", "llm-awq", "another one, which packs as gemm or gemv")
    gemv = "gemv" in words
    bits = whole(given, "bits", whole(given, "w_bit", 4))
    if bits not in ((4,) if gemv else (2, 3, 4, 5, 6, 7, 8)):
        refuse("bits", bits, "4" if gemv else "2 to 8")
    group = whole(given, "group_size", whole(given, "q_group_size", 128, -1), -1)
    return Awq(bits, None if group == -1 else group, gemv)
