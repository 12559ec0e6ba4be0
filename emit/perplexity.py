"""The loss of a checkpoint as it is, before anything of it is rounded for a bundle."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from emit.convert import convert
from emit.entry import Model
from emit.errors import EmitError
from emit.expect import load_params, widened
from emit.forms import Form, copy
from emit.storage import How, Storage, carriable, own_word
from emit.weights import Source, WeightMap, resolve


def exact(weight_map: WeightMap, source: Source, chosen: Mapping[str, Form]) -> Storage:
    """How to store a checkpoint's own numbers: codes as codes, floats in their type."""
    how: dict[str, How] = {}
    for param in weight_map.params:
        if param.matrix:
            form = chosen[param.name]
            moved = form.rows or form.transform is copy  # and not computed with
            word = own_word(form, source) if moved else "f32"
            how[param.name] = carriable(form, source) or word
    return Storage("f32", how)


def loss(model: Model, params: Mapping[str, Any], rows: Sequence[Sequence[int]]) -> float:
    """Mean of -log p(token | those before it) of all tokens of `rows` but the first of each.

    In nats. All rows are read at once, each from its own zero state, a token a step.
    """
    names = [spec.name for spec in model.state]
    lengths = np.asarray([len(row) for row in rows])
    tokens = np.zeros((len(rows), lengths.max()), np.int32)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = ids

    @jax.jit
    def step(params: Any, now: Any, after: Any, active: Any, positions: Any, state: Any):
        given = dict(zip(names, state, strict=True))
        logits, new = model.family.forward(
            model.cfg, params, now[:, None], active, positions, given
        )
        picked = jnp.take_along_axis(logits, after[:, None], axis=-1)[:, 0]
        return jax.nn.logsumexp(logits, axis=-1) - picked, [new[name] for name in names]

    state: Any = [jnp.zeros(spec.batched(len(rows)), jnp.float32) for spec in model.state]
    found: list[float] = []
    for at in range(tokens.shape[1] - 1):
        active = at + 1 < lengths
        places = np.full(len(rows), at, np.int32)
        after = tokens[:, at + 1]
        losses, state = step(params, tokens[:, at], after, active.astype(np.int32), places, state)
        found += np.asarray(losses, np.float64)[active].tolist()
    return math.fsum(found) / len(found)


def of_source(
    config: Mapping[str, Any], source: Source, rows: Sequence[Sequence[int]], scratch: Path
) -> float:
    """The loss of the checkpoint `source`; its own numbers are mapped from a file in `scratch`.

    Raises EmitError where it is not finite.
    """
    model = Model.of(config, max(map(len, rows)))
    weight_map = model.weight_map
    storage = exact(weight_map, source, resolve(weight_map, source))
    convert(weight_map, source, storage, scratch)
    found = loss(model, widened(load_params(model, storage, scratch / "params.irpa")), rows)
    if not math.isfinite(found):
        raise EmitError(f"perplexity: the loss of the checkpoint is {found}; it is damaged")
    return found
