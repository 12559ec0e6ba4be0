"""Strict reading of a Hugging Face `config.json` into a family's frozen dataclass.

A key is used, ignored by name, or must stand at the value that a family declares as its only
supported one; anything else raises, with all offenders in one message.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, TypeVar

from emit.errors import EmitError

T = TypeVar("T")

MOST_LAYERS = 1000
Count = int  # in a Config: an int that may be 0; a plain `int` must be positive

# Keys of any transformers config that say nothing about the graph.
BOOKKEEPING = frozenset(
    """_name_or_path architectures auto_map bos_token_id dtype eos_token_id initializer_range
    model_type pad_token_id sep_token_id torch_dtype transformers_version use_cache _commit_hash
    return_dict output_attentions output_hidden_states torchscript finetuning_task
    id2label label2id problem_type task_specific_params tokenizer_class
    attn_implementation _attn_implementation _attn_implementation_autoset""".split()
)

# How the library's own `generate` samples, which older versions wrote into config.json.
GENERATION = frozenset(
    """max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores prefix
    return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens""".split()
)
# Keys of the base class that would change the graph, at the value that leaves it alone.
BASE_DEFAULTS: dict[str, Any] = {
    "is_decoder": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "decoder_start_token_id": None,
    "chunk_size_feed_forward": 0,
    "pruned_heads": {},
    "tie_encoder_decoder": False,
    "use_bfloat16": False,
    "tf_legacy_loss": False,
    "quantization_config": None,
}


def read(
    cls: type[T],
    raw: Mapping[str, Any],
    *,
    ignored: frozenset[str] = frozenset(),
    only: Mapping[str, Any] | None = None,
    aliases: Mapping[str, str] | None = None,
) -> T:
    """Fill the dataclass `cls` from `raw`.

    Fields without a default are required. `ignored` are keys whose value does not matter to the
    graph, each for a reason the family states; `only` maps keys to the one supported value;
    `aliases` maps other dialects' key names to field names; a key and its alias must agree.
    Raises EmitError naming every missing, mistyped, unsupported and unknown key at once.
    """
    only = {**BASE_DEFAULTS, **(only or {})}
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    problems: list[str] = []
    values: dict[str, Any] = {}
    for key, value in raw.items():
        name = (aliases or {}).get(key, key)
        if name in values and values[name] != value:
            problems.append(f"{key} = {json.dumps(value)} contradicts {json.dumps(values[name])}")
        values[name] = value
    filled: dict[str, Any] = {}
    for name, field in fields.items():
        if name in values:
            problem, filled[name] = _convert(name, values[name], str(field.type))
            problems += [problem] if problem else []
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            problems.append(f"{name} is missing")
    for name, value in values.items():
        if name in fields or name in ignored | BOOKKEEPING | GENERATION:
            continue
        if name not in only:
            problems.append(f"{name} = {json.dumps(value)} is not a known key")
        elif value != only[name]:
            problems.append(
                f"{name} = {json.dumps(value)} is not supported (only {json.dumps(only[name])})"
            )
    if problems:
        raise EmitError(f"config.json of {raw.get('model_type', '?')}: " + "; ".join(problems))
    return cls(**filled)


def _convert(name: str, value: Any, kind: str) -> tuple[str | None, Any]:
    """Check `value` against the annotation text `kind`; returns (problem, converted value)."""
    if kind.endswith(" | None"):
        return (
            (None, None) if value is None else _convert(name, value, kind.removesuffix(" | None"))
        )
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind == "int" and number and (isinstance(value, int) or value.is_integer()):
        if 0 < value <= _most(name):
            return None, int(value)
        if _most(name) < value < 2**31:
            return f"{name} = {value}, expected {_most(name)} at most", None
        return f"{name} = {value} must be positive and below 2**31", None
    if kind == "Count" and isinstance(value, int) and number and 0 <= value < 2**31:
        most = _most(name)
        return (None, value) if value <= most else (f"{name} = {value}, expected {most} at most", 0)
    if kind == "float" and _is_float(value):
        return None, float(value)
    if kind == "bool" and isinstance(value, bool):
        return None, value
    if kind == "str" and isinstance(value, str):
        return None, value
    if kind.startswith("tuple[") and isinstance(value, list):
        inner = kind.removeprefix("tuple[").removesuffix("]").split(", ")
        kinds = [inner[0]] * len(value) if inner[-1] == "..." else inner
        if len(kinds) == len(value):
            found = [_convert(name, item, each) for item, each in zip(value, kinds, strict=True)]
            if not any(problem for problem, _ in found):
                return None, tuple(item for _, item in found)
    return f"{name} = {json.dumps(value)} is not of type {kind}", None


def _most(name: str) -> int:
    """The largest value of a number that lists are made of."""
    if name == "num_hidden_layers":
        return MOST_LAYERS
    if "expert" in name and "size" not in name:
        return 2**14
    return 2**16 if name.endswith("head_dim") else 2**31 - 1


def _is_float(value: Any) -> bool:
    """A JSON number, not NaN, that a float can hold."""
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < 2**1000
    return isinstance(value, float) and not math.isnan(value)


def layer_count(layers: Any) -> int:
    """`layers` to make a list of as many; 0 where `read` refuses that as a number of layers."""
    return layers if isinstance(layers, int) and 0 < layers <= MOST_LAYERS else 0


def alike(layers: Any) -> list[str]:
    """`layer_types` of a recurrent model of so many equal layers, whatever `layers` is."""
    return ["linear_attention"] * layer_count(layers)


def token_ids(value: Any) -> tuple[int, ...]:
    """`eos_token_id` as a tuple: null, an int or a list of ints."""
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise EmitError(f"eos_token_id = {json.dumps(value)}: expected an int, a list or null")
    return tuple(ids)
