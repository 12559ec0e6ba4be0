"""What the graphs compute, according to JAX: the other side of the build's proof.

Expected outputs of every entry on given inputs, and greedy generations from a few prompts by
folding single steps (no chunked form is involved, so the compiled prefill is compared with the
recurrence itself).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from emit import irpa
from emit.entry import Model, entries, params_of
from emit.ops.quantized import Quantized
from emit.shape import Shape
from emit.storage import Storage
from runtime.progress import Progress, progress

PROMPT_LENGTHS = (1, 3, 9, 19, 40)
TOP = 8
WIDE_BYTES = 2 << 30  # of all parameters in float32
SHAKE = np.float32(2**-22)  # twice the distance of two float32 numbers, at most
SMALL = 1 << 20  # elements
TINY = np.finfo(np.float32).tiny
Item = TypeVar("Item")


def load_params(model: Model, storage: Storage, path: Path) -> dict[str, Any]:
    """The parameters of the archive `path`, as JAX arrays in their stored types, mapped."""
    found = irpa.read(path, storage.specs(model.weight_map))
    return params_of(model, storage, lambda tensor: jax.device_put(found[tensor.name]))


def widened(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same numbers in float32, if all of them are few enough.

    Those that are stored in fewer bits would else be widened in each step.
    """
    leaves, structure = jax.tree.flatten(params, is_leaf=lambda leaf: isinstance(leaf, Quantized))
    if 4 * sum(math.prod(leaf.shape) for leaf in leaves) > WIDE_BYTES:
        return params
    return jax.tree.unflatten(structure, [leaf.astype(jnp.float32) for leaf in leaves])


def shaken(params: Mapping[str, Any], seed: int) -> Mapping[str, Any]:
    """The same parameters, but that each number of a small float32 tensor is `SHAKE` more or less
    of itself, the sign at random: norms, biases, decays, which each layer's numbers go through."""
    rng = np.random.default_rng(seed)

    def shake(leaf: Any) -> Any:
        if leaf.dtype != jnp.float32 or leaf.size > SMALL:
            return leaf
        return leaf * (1 + SHAKE * rng.choice(np.array([-1, 1], np.float32), leaf.shape))

    return jax.tree.map(shake, params)


def expected(
    model: Model, shape: Shape, params: Mapping[str, Any], inputs: Path, out: Path, seed: int
) -> None:
    """Run each entry on `inputs`/<call>.npz, write `out`/<call>.npz (arrays by output name).

    The calls of an entry are named as itself, or that and `@<number>`. Where parameters are read,
    there is a further array, `sensitivity` f64[2]: how far, relative as in the proof, logits and
    state (the furthest of its tensors) moved with `shaken` parameters. Two right ways to compute
    them come as far apart, but for a factor.
    """
    other = shaken(params, seed)
    every = [
        (entry, jax.jit(entry.fn), path)
        for entry in entries(model, shape)
        for path in given_to(entry.name, inputs)
    ]
    for entry, run, path in told(every, progress("expected results", len(every), unit="calls")):
        with np.load(path) as given:
            arrays = [given[name] for name, _ in entry.inputs]
        results = run(params if entry.uses_params else {}, *arrays)
        names = [name for name, _ in entry.outputs]
        named = {n: np.asarray(r) for n, r in zip(names, results, strict=True)}
        more = {}
        if entry.uses_params:
            others = zip(names, run(other, *arrays), strict=True)
            moved = {n: _distance(np.asarray(r), named[n]) for n, r in others if n != "argmax"}
            more["sensitivity"] = np.asarray([moved.pop("logits"), max(moved.values())])
        np.savez(out / path.name, allow_pickle=False, **named, **more)


def given_to(name: str, inputs: Path) -> list[Path]:
    """The files of inputs of the entry `name`, one a call."""
    found = inputs.glob(f"{name}*.npz")
    return sorted(path for path in found if path.stem.partition("@")[0] == name)


def told(items: Iterable[Item], shown: Progress) -> Iterator[Item]:
    """The items, each told as done when the next is asked for."""
    with shown:
        for item in items:
            yield item
            shown.add(1)


def _distance(found: np.ndarray, wanted: np.ndarray) -> float:
    """The larger of the relative errors by the largest number and by the 2-norm, 0 of NaN."""
    off = found.astype(np.float64) - wanted
    largest = np.max(np.abs(off)) / max(np.max(np.abs(wanted)), TINY)
    # Not by BLAS, whose sums go with the processor.
    norms = [np.sqrt(np.sum(np.square(each, dtype=np.float64))) for each in (off, wanted)]
    error = max(largest, norms[0] / max(norms[1], TINY))
    return float(error) if np.isfinite(error) else 0.0


def prompts(vocab_size: int, seed: int, room: float = math.inf) -> list[list[int]]:
    """Seeded random prompts of `PROMPT_LENGTHS` tokens, or as many as there is `room` for."""
    rng = np.random.default_rng(seed)
    lengths = [int(max(1, min(n, room))) for n in PROMPT_LENGTHS]
    return [rng.integers(0, vocab_size, n).tolist() for n in lengths]


def generate(
    model: Model, params: Mapping[str, Any], prompts: list[list[int]], new_tokens: int
) -> list[dict[str, Any]]:
    """Greedy tokens, the `TOP` largest logits before each, and the smallest top-1/top-2 gap.

    All prompts run as rows of one batch, one token a step, each from its own zero state.
    """
    rows = len(prompts)
    names = [spec.name for spec in model.state]

    @jax.jit
    def step(params: Any, tokens: Any, active: Any, positions: Any, state: Any):
        given = dict(zip(names, state, strict=True))
        logits, new = model.family.forward(
            model.cfg, params, tokens[:, None], active, positions, given
        )
        return logits, [new[name] for name in names]

    state: Any = [jnp.zeros(spec.batched(rows), jnp.float32) for spec in model.state]
    texts = [list(prompt) for prompt in prompts]
    tops: list[list[list[list[float]]]] = [[] for _ in prompts]
    goals = [len(prompt) + new_tokens for prompt in prompts]
    steps = max(goals) - 1
    for position in told(range(steps), progress("reference", steps, unit="steps")):
        active = [position < goal - 1 for goal in goals]
        tokens = [text[position] if on else 0 for text, on in zip(texts, active, strict=True)]
        logits, state = step(
            params,
            np.asarray(tokens, np.int32),
            np.asarray(active, np.int32),
            np.full(rows, position, np.int32),
            state,
        )
        values = np.asarray(logits)
        for row, text in enumerate(texts):
            if active[row] and position == len(text) - 1:
                order = np.argsort(-values[row], kind="stable")[:TOP]
                tops[row].append([[int(i), float(values[row, i])] for i in order])
                text.append(int(order[0]))
    return [
        {
            "tokens": prompt,
            "generated": text[len(prompt) :],
            "top_logits": top,
            "min_gap": min((t[0][1] - t[1][1] for t in top if len(t) > 1), default=math.inf),
        }
        for prompt, text, top in zip(prompts, texts, tops, strict=True)
    ]


def reference(
    model: Model, params: Mapping[str, Any], seed: int, new_tokens: int
) -> dict[str, Any]:
    """The `oracle` and `prompts` parts of reference.json; no prompts for 0 new tokens."""
    room = math.inf if model.context is None else model.context
    new_tokens = int(min(new_tokens, room))
    texts = prompts(model.cfg.vocab_size, seed, room + 1 - new_tokens) if new_tokens else []
    rows = generate(model, params, texts, new_tokens) if texts else []
    return {"oracle": {"name": "jax", "version": jax.__version__}, "prompts": rows}


def write_reference(path: Path, content: Mapping[str, Any]) -> None:
    """Canonical JSON, so that the same numbers give the same bytes."""
    path.write_text(json.dumps(content, sort_keys=True, indent=1, allow_nan=False) + "\n")
