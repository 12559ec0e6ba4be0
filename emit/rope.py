"""The rotary embedding that a config.json describes, in either dialect.

transformers 5 has `rope_parameters` with everything in it; older files have `rope_theta` and
`partial_rotary_factor` beside it and `rope_scaling` for the rest, whose kind may be called `type`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from emit import config
from emit.errors import EmitError
from emit.ops import rope
from emit.ops.rope import Rope

# The keys of a config.json that `read` reads, for a family's list of what its own reader ignores.
KEYS = frozenset(
    """rope_parameters rope_scaling rope_theta partial_rotary_factor
    original_max_position_embeddings""".split()
)
_USES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        *("factor", "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    ),
}
_REQUIRED = {name: uses[:3] if name == "llama3" else uses[:1] for name, uses in _USES.items()}


@dataclass(frozen=True)
class _Parameters:
    """The keys of `rope_parameters`, as the library names them."""

    rope_type: str = "default"
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None


def read(raw: Mapping[str, Any], head_dim: int, longest: int, theta: float = 10000.0) -> Rope:
    """The frequencies that `raw` (a parsed config.json) asks for.

    `longest` is the model's max_position_embeddings, `theta` the family's default. Raises EmitError
    naming the key for a kind that is not supported, a missing, mistyped, unknown or unused key, and
    for the same key with two values. `dynamic` scaling depends on the length of the text beyond
    `longest` tokens: the frequencies are those up to there, and `Rope.limit` says so.
    """
    family = raw.get("model_type", "?")
    given = _parameters(raw)
    found = config.read(_Parameters, {**given, "model_type": family}, aliases={"type": "rope_type"})
    kind, problems = found.rope_type, []
    if kind not in _USES:
        raise EmitError(f"{family}: rope_type = {json.dumps(kind)} is not supported")
    used = {"rope_type", "rope_theta", "partial_rotary_factor", *_USES[kind]}
    used |= {"original_max_position_embeddings"}
    for name, value in vars(found).items():
        if name not in used and value is not None:
            problems.append(f"rope_type {kind} has no {name}")
        if name in _REQUIRED[kind] and value is None:
            problems.append(f"rope_type {kind} needs {name}")
        positive = isinstance(value, bool | str) or 0 < (1 if value is None else value) < 1e30
        if not positive:
            problems.append(f"{name} = {value} must be above 0")
    partial = 1.0 if found.partial_rotary_factor is None else found.partial_rotary_factor
    if not 2 <= head_dim * partial < head_dim + 1 or head_dim % 2:
        problems.append(f"head_dim {head_dim} × partial_rotary_factor {partial:g} does not fit")
    if kind == "llama3" and (found.low_freq_factor or 1.0) >= (found.high_freq_factor or 4.0):
        problems.append("low_freq_factor, expected less than high_freq_factor")
    if problems:
        raise EmitError(f"config.json of {family}: " + "; ".join(problems))
    return _scaled(found, found.rope_theta or theta, int(head_dim * partial), longest)


def _parameters(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` or `rope_scaling` with what stands beside; EmitError on two values."""
    family, merged = raw.get("model_type", "?"), {}
    nested = [raw.get("rope_parameters"), raw.get("rope_scaling")]
    for where in nested:
        if where is not None and not isinstance(where, Mapping):
            raise EmitError(f"config.json of {family}: {json.dumps(where)} is no rope_parameters")
    beside = {
        k: raw[k] for k in sorted(KEYS) if k in raw and not k.startswith(("rope_p", "rope_s"))
    }
    for part in (*(p for p in nested if p), beside):
        for key, value in part.items():
            if value is None:
                continue
            if merged.setdefault(key, value) != value:
                raise EmitError(
                    f"config.json of {family}: {key} = {json.dumps(value)} contradicts "
                    f"{json.dumps(merged[key])}"
                )
    return merged


def _scaled(found: _Parameters, theta: float, rotary: int, longest: int) -> Rope:
    base = rope.default(theta, rotary)
    factor, original = found.factor or 1.0, found.original_max_position_embeddings or longest
    if found.rope_type == "linear":
        return Rope(tuple(base / factor))
    if found.rope_type == "dynamic":
        return Rope(tuple(base), limit=longest)
    if found.rope_type == "llama3":
        low, high = found.low_freq_factor or 1.0, found.high_freq_factor or 4.0
        return Rope(tuple(rope.llama3(base, factor, low, high, original)))
    if found.rope_type == "yarn":
        fast, slow = found.beta_fast or 32.0, found.beta_slow or 1.0
        truncate = found.truncate is not False
        frequencies = rope.yarn(base, theta, factor, original, fast, slow, truncate)
        attention = found.attention_factor
        if attention is None:
            attention = rope.yarn_factor(factor, found.mscale or 0.0, found.mscale_all_dim or 0.0)
        return Rope(tuple(frequencies), attention)
    return Rope(tuple(base))
