"""GPTQ (arXiv:2210.17323) as AutoGPTQ, GPTQModel and Optimum write it.

w[o, i] = (q[i, o] - z[g, o]) × s[g, o] with g = g_idx[i], i // group_size if it is not there.

| tensor  | dtype            | shape                         |                                |
|---------|------------------|-------------------------------|--------------------------------|
| qweight | i32              | [inputs × bits / 32, outputs] | a bit stream down each column  |
| qzeros  | i32              | [groups, outputs × bits / 32] | a bit stream along each row    |
| scales  | f16, bf16 or f32 | [groups, outputs]             |                                |
| g_idx   | i32              | [inputs]                      | act-order: any group           |

Format `gptq` (v1) stores z - 1 modulo 2 ^ bits, `gptq_v2` stores z.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from emit.dequant import bits as unpack
from emit.dequant import names
from emit.dequant.coded import KEY, Coded, only
from emit.dequant.parts import FLOATS, Found, Groups, grouped, refuse, scale_word, stored, whole
from emit.packed import Layout
from emit.weights import Source

BITS = (2, 3, 4, 8)

# How the codes were searched for, and how a library runs them.
_FREE = frozenset(
    """quant_method method bits group_size dynamic format checkpoint_format desc_act sym lm_head
    meta backend tokenizer dataset damp_percent true_sequential static_groups act_group_aware
    model_seqlen block_name_to_quantize module_name_preceding_first_block batch_size pad_token_id
    max_input_length cache_block_outputs modules_in_block_to_quantize use_cuda_fp16 use_exllama
    disable_exllama exllama_config model_name_or_path model_file_base_name quantizer mse
    modules_to_not_convert damp_auto_increment version offload_to_disk v2 v2_alpha hyb_act
    mock_quantization""".split()
)
_ONLY: dict[str, tuple[Any, ...]] = {
    "pack_dtype": ("int32",),
    "is_marlin_format": (False,),
    "rotation": ("",),
    "activation": ({},),
    "adapter": ({},),
}
_OVERRIDES = frozenset("bits group_size sym desc_act damp_percent mse static_groups".split())


@dataclass(frozen=True)
class Settings:
    """Of one module. `group` None is one group of all inputs; `bias` is what z is stored less."""

    bits: int
    group: int | None
    bias: int

    def split(
        self, codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, *index: np.ndarray
    ) -> Groups:
        """The arrays of a module as they are stored; `index` where groups are no equal runs."""
        outputs, inputs = codes.shape[1], codes.shape[0] * 32 // self.bits
        less = unpack.stream(zeros, self.bits, outputs).T
        zero = (less + np.uint8(self.bias)) & np.uint8(2**self.bits - 1)
        found = unpack.columns(codes, self.bits, inputs)
        return Groups(found, scales.T, zero, index[0] if index else None)

    def coded(self, found: Found, module: str) -> Coded | None:
        """The weight of one module; None, and a problem, if it is not what it should be."""
        codes, zeros, scales, order = (
            f"{module}.{word}" for word in ("qweight", "qzeros", "scales", "g_idx")
        )
        shape = found.shape(codes, ("i32",), 2)
        if shape is None:
            return None
        inputs, outputs = shape[0] * 32 // self.bits, shape[1]
        if inputs == 0 or shape[0] % self.bits:
            found.problems.append(
                f"{codes} has {shape[0]} rows, expected a multiple of {self.bits}"
            )
            return None
        group = self.group or inputs
        groups = -(-inputs // group)
        ordered = order in found.source.tensors
        wrong = [
            not found.fits(zeros, ("i32",), (groups, unpack.length(outputs, self.bits))),
            not found.fits(scales, FLOATS, (groups, outputs)),
            ordered and not found.fits(order, ("i32", "i64"), (inputs,)),
        ]
        if any(wrong):
            return None
        plain = np.arange(inputs) // group
        index = found.source.read(order) if ordered else plain
        if index.min() < 0 or index.max() >= groups:
            found.problems.append(f"{order} holds a number that is none of {groups} groups")
            return None
        runs = inputs % group == 0 and np.array_equal(index, plain)

        def split(*arrays: np.ndarray) -> Groups:
            own = () if runs else arrays[3:] or (np.arange(inputs) // group,)
            return self.split(*arrays[:3], *own)

        layout = Layout(stored(self.bits), group, "uint", scale_word(found.source, scales), "zero")
        parts = (codes, zeros, scales, *((order,) if ordered else ()))
        return grouped((outputs, inputs), parts, split, layout, runs)


@dataclass(frozen=True)
class Gptq:
    """The settings, and in order what patterns say of other modules: None leaves them alone."""

    settings: Settings
    dynamic: names.Names

    def of(self, module: str) -> Settings | None:
        """The settings of a module; None where it is not quantised."""
        return self.dynamic.get(module, self.settings)

    def coded(self, source: Source) -> Mapping[str, Coded]:
        """All modules that have a `qweight`."""
        found = Found(source)
        for module in found.modules("qweight"):
            settings = self.of(module)
            weight = settings.coded(found, module) if settings else None
            if weight is not None:
                found.coded[f"{module}.weight"] = weight
        return found.done()


def read(config: Mapping[str, Any]) -> Gptq:
    """The scheme of `config`. Raises EmitError naming the key that is not supported."""
    given = config[KEY]
    only(given, _FREE, _ONLY)
    settings = _settings(given, Settings(0, None, _bias(given)))
    dynamic = given.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        refuse("dynamic", dynamic, "an object of patterns")
    found: dict[str, Settings | None] = {}
    for word, keys in dynamic.items():
        if word.startswith("-:"):
            found[word] = None
        elif isinstance(keys, Mapping):
            only(keys, _OVERRIDES, {})
            found[word] = _settings(keys, settings)
        else:
            refuse(f"dynamic[{word!r}]", keys, "an object of settings")
    return Gptq(settings, names.Names.of(found, _pattern))


def _pattern(word: str) -> Callable[[str], bool]:
    """The modules that a key of `dynamic` means."""
    return names.pattern(word.removeprefix("+:").removeprefix("-:"))


def _settings(given: Mapping[str, Any], otherwise: Settings) -> Settings:
    bits = whole(given, "bits", otherwise.bits or -1)
    if bits not in BITS:
        refuse("bits", bits, "2, 3, 4 or 8")
    default = 128 if otherwise.bits == 0 else otherwise.group or -1
    group = whole(given, "group_size", default, -1)
    return replace(otherwise, bits=bits, group=None if group == -1 else group)


def _bias(given: Mapping[str, Any]) -> int:
    """1 for the format that stores zeros less one."""
    formats = {"gptq": 1, "gptq_v2": 0}
    words = [given[key] for key in ("checkpoint_format", "format") if given.get(key) is not None]
    for word in words:
        if word not in list(formats) or word != words[0]:
            refuse("checkpoint_format", word, 'one of "gptq" and "gptq_v2"')
    return formats[words[0]] if words else 1
