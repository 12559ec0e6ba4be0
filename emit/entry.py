"""The functions a bundle exports, built from one family's `forward`."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct

from emit import config, dequant
from emit.errors import EmitError
from emit.irpa import Tensor
from emit.ops.quantized import Quantized
from emit.packed import Layout
from emit.shape import Shape
from emit.state import DTYPES, WORDS, StateSpec
from emit.storage import Storage, plan
from emit.weights import WeightMap

DEFAULT_CONTEXT = 4096  # tokens


class Family(Protocol):
    """What a module under `emit/families/` provides."""

    Config: Any
    weights: Callable[[Any], WeightMap]
    state: Callable[[Any, int | None], list[StateSpec]]
    forward: Callable[..., tuple[Array, dict[str, Array]]]


@dataclass(frozen=True)
class Model:
    """A family with its config read. `context` is the number of positions of a KV cache."""

    name: str
    family: Family
    cfg: Any
    raw: Mapping[str, Any]
    context: int | None = None

    @cached_property
    def weight_map(self) -> WeightMap:
        """All parameters."""
        return self.family.weights(self.cfg)

    @cached_property
    def state(self) -> list[StateSpec]:
        """All state. Raises EmitError where a KV cache has no bound."""
        return self.family.state(self.cfg, self.context)

    @classmethod
    def of(cls, raw: Mapping[str, Any], context: int | None = None) -> Model:
        """Find the family named by `model_type` and read `raw` (a parsed config.json).

        What a checkpoint is quantised by is checked and left out: the model is the same.

        A model with a KV cache and no `context` gets DEFAULT_CONTEXT tokens, or as many as it was
        trained on where those are fewer.
        """
        name = raw.get("model_type")
        if not isinstance(name, str) or not name.isidentifier() or name[0] == "_":
            raise EmitError(f"config.json: model_type = {name!r}, expected a family name")
        if importlib.util.find_spec(f"emit.families.{name}") is None:
            raise EmitError(f"config.json: model_type = {name!r} is not a supported family")
        family: Any = importlib.import_module(f"emit.families.{name}")
        raw = dequant.plain(raw)
        cfg = family.Config.read(raw)
        if context is None:
            trained = raw.get("max_position_embeddings", raw.get("model_max_length"))
            bound = trained if isinstance(trained, int) and trained > 0 else DEFAULT_CONTEXT
            guess = cls(name, family, cfg, raw, min(bound, DEFAULT_CONTEXT))
            return guess if guess.keeps_kv else cls(name, family, cfg, raw)
        return cls(name, family, cfg, raw, context)

    def storage(self, weights: str) -> Storage:
        """How parameters of a checkpoint that is not quantised are stored as `weights`."""
        return plan(self.weight_map, weights)

    @property
    def keeps_kv(self) -> bool:
        """Whether any state grows with the text."""
        return any(spec.kind == "per_position" for spec in self.state)


@dataclass(frozen=True)
class Entry:
    """One exported function: `fn(params, *inputs)`; `inputs` and `outputs` are (name, struct).

    `consumed` are inputs that the compiled function updates in place: the output of that name is
    the input's own memory. `storage` are (name, number of an output): further arguments of the
    compiled function, whose memory that output is written to.
    """

    name: str
    fn: Callable[..., Any]
    inputs: tuple[tuple[str, ShapeDtypeStruct], ...]
    outputs: tuple[tuple[str, ShapeDtypeStruct], ...]
    consumed: frozenset[str]
    storage: tuple[tuple[str, int], ...]
    uses_params: bool

    @property
    def arguments(self) -> tuple[tuple[str, ShapeDtypeStruct], ...]:
        """The inputs, then the storage: all arguments of the compiled function."""
        kept = ((name, self.outputs[output][1]) for name, output in self.storage)
        return (*self.inputs, *kept)


def _i32(*shape: int) -> ShapeDtypeStruct:
    return ShapeDtypeStruct(shape, jnp.int32)


def _forward(
    model: Model, params: Any, tokens: Array, lengths: Array, positions: Array, state: Any
) -> tuple[Any, ...]:
    """(logits, their argmax, *new state) of `tokens` [rows, steps].

    The argmax of a row that holds a NaN or no finite largest value is -1: who reads only ids would
    not see it otherwise.
    """
    names = [spec.name for spec in model.state]
    given = dict(zip(names, state, strict=True))
    logits, new = model.family.forward(model.cfg, params, tokens, lengths, positions, given)
    largest = jnp.max(logits, axis=-1)
    valid = (largest > -jnp.inf) & (largest < jnp.inf)
    argmax = jnp.where(valid, jnp.argmax(logits, axis=-1).astype(jnp.int32), -1)
    return logits, argmax, *(new[n] for n in names)


def _rows(model: Model, rows: int) -> tuple[list[Any], list[Any]]:
    """Inputs and outputs of a forward pass that all its forms share: states, and logits before."""
    state = [(spec.name, spec.struct(rows)) for spec in model.state]
    logits = ShapeDtypeStruct((rows, model.cfg.vocab_size), jnp.float32)
    return state, [("logits", logits), ("argmax", _i32(rows)), *state]


def _updated(model: Model, first: int) -> dict[str, Any]:
    """How the states of an entry come back, of which the first is output number `first`.

    A KV cache is updated in place, anything else is written to storage that the caller gives.
    """
    kept = [(i, spec) for i, spec in enumerate(model.state, first) if spec.kind == "fixed"]
    return {
        "consumed": frozenset(s.name for s in model.state if s.kind == "per_position"),
        "storage": tuple((f"out.{spec.name}", i) for i, spec in kept),
    }


def _prefill(model: Model, chunk: int) -> Entry:
    """Up to `chunk` tokens of one sequence, the first `length` of them valid."""

    def fn(params: Any, tokens: Array, length: Array, position: Array, *state: Any):
        return _forward(model, params, tokens, jnp.clip(length, 0, chunk), position, state)

    state, outputs = _rows(model, 1)
    inputs = (("tokens", _i32(1, chunk)), ("length", _i32(1)), ("position", _i32(1)), *state)
    name, back = f"prefill_{chunk}", _updated(model, first=2)
    return Entry(name, fn, inputs, tuple(outputs), **back, uses_params=True)


def _decode(model: Model, slots: int) -> Entry:
    """One token for each slot; a slot whose `active` is 0 keeps its state."""

    def fn(params: Any, tokens: Array, positions: Array, active: Array, *state: Any):
        lengths = (active != 0).astype(jnp.int32)
        return _forward(model, params, tokens[:, None], lengths, positions, state)

    state, outputs = _rows(model, slots)
    words = [(word, _i32(slots)) for word in ("tokens", "positions", "active")]
    inputs, back = (*words, *state), _updated(model, first=2)
    return Entry("decode", fn, inputs, tuple(outputs), **back, uses_params=True)


def _seed(model: Model, slots: int) -> Entry:
    """Put one sequence's state into a slot."""
    count = len(model.state)

    def fn(params: Any, slot: Array, *states: Any):
        del params
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(old, new, slot, spec.slot_axis)
            for spec, old, new in zip(model.state, states[:count], states[count:], strict=True)
        )

    batch = [(spec.name, spec.struct(slots)) for spec in model.state]
    single = [(f"new.{spec.name}", spec.struct(1)) for spec in model.state]
    inputs, back = (("slot", _i32()), *batch, *single), _updated(model, first=0)
    return Entry("seed", fn, inputs, tuple(batch), **back, uses_params=False)


def _extract(model: Model, slots: int) -> Entry:
    """Copy one slot's state out."""

    def fn(params: Any, slot: Array, *states: Any):
        del params
        return tuple(
            jax.lax.dynamic_slice_in_dim(old, slot, 1, spec.slot_axis)
            for spec, old in zip(model.state, states, strict=True)
        )

    batch = [(spec.name, spec.struct(slots)) for spec in model.state]
    single = [(spec.name, spec.struct(1)) for spec in model.state]
    inputs = (("slot", _i32()), *batch)
    storage = tuple((f"out.{spec.name}", i) for i, spec in enumerate(model.state))
    return Entry("extract", fn, inputs, tuple(single), frozenset(), storage, uses_params=False)


def entries(model: Model, shape: Shape) -> list[Entry]:
    """Every function of the bundle for `shape`."""
    prefills = [_prefill(model, chunk) for chunk in shape.chunks]
    batched = [make(model, shape.slots) for make in (_decode, _seed, _extract)]
    return [*prefills, *batched]


def params_of(model: Model, storage: Storage, of: Callable[[Tensor], Any]) -> dict[str, Any]:
    """All parameters by name: what `of` makes of their tensors in the archive."""
    found: dict[str, Any] = {}
    for param in model.weight_map.params:
        parts = [of(tensor) for tensor in storage.tensors(param)]
        how = storage.of(param)
        if isinstance(how, Layout):
            codes, scales, *offsets = parts
            found[param.name] = Quantized(codes, scales, offsets[0] if offsets else None, how)
        else:
            (found[param.name],) = parts
    return found


def param_structs(model: Model, storage: Storage) -> dict[str, Any]:
    """Abstract values of all parameters."""
    return params_of(
        model, storage, lambda tensor: ShapeDtypeStruct(tensor.shape, DTYPES[tensor.dtype])
    )


def interface(model: Model, shape: Shape, storage: Storage, eos: tuple[int, ...]) -> dict[str, Any]:
    """What the manifest says of the graph (see README, "The manifest")."""

    def described(rows: Sequence[tuple[str, ShapeDtypeStruct]]) -> list[dict[str, Any]]:
        return [
            {"name": name, "dtype": WORDS[struct.dtype], "shape": list(struct.shape)}
            for name, struct in rows
        ]

    inner = model.raw.get("text_config")  # of a model with images
    words = {**inner, **model.raw} if isinstance(inner, Mapping) else model.raw
    bos = words.get("bos_token_id")
    return {
        "family": model.name,
        "num_layers": model.cfg.num_hidden_layers,
        "vocab_size": model.cfg.vocab_size,
        "context": model.context,
        "eos_token_ids": list(eos or config.token_ids(words.get("eos_token_id"))),
        "bos_token_id": bos if isinstance(bos, int) else None,
        "functions": {
            entry.name: {"inputs": described(entry.arguments), "outputs": described(entry.outputs)}
            for entry in entries(model, shape)
        },
        "state": [
            {
                "name": spec.name,
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "slot_axis": spec.slot_axis,
                "kind": spec.kind,
            }
            for spec in model.state
        ],
        "params": storage.describe(model.weight_map),
        "numerics": {
            "weights": storage.weights,
            "accumulate": "f32",
            "activations": "f32",
            "quantization": storage.quantization,
        },
    }
