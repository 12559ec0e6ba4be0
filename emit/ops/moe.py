"""Mixture of experts: top-k routing, and the feed-forward networks of the chosen experts.

    y[n] = sum_k w[n, k] down[e] act(...),  e = index[n, k]           (arXiv:1701.06538, eq. 1)
    gated:  act(gate[e] x[n]) * (up[e] x[n])      plain:  act(up[e] x[n])

| tensor | shape     | dtype                                              |
|--------|-----------|----------------------------------------------------|
| x, y   | [B, T, D] (`step`: [B, 1, D]) | f32                            |
| valid  | [B, T]    | bool: which tokens are not padding                 |
| logits | [B, T, E] | f32, the router's                                  |
| index  | [B, T, K] | i32, the K experts of a token                      |
| weight | [B, T, K] | f32, what their outputs are multiplied by          |
| up, gate | [E, F, D] | f32, bf16 or f16, widened inside the product     |
| down   | [E, D, F] | as up                                              |

Identity update for padding: a padded token counts for no expert, its x is taken as 0 and its y is
0, whatever it holds; nothing here mixes tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

MASKED = -1e30
UNROLLED = 40  # pairs of (row, expert) of a step up to which each is an operation of its own
EPS = 1e-20  # added to the sum of sigmoid scores before dividing by it


@dataclass(frozen=True)
class Routing:
    """How experts are chosen and weighted.

    `score`: `softmax` over all experts (arXiv:2101.03961, eq. 1), `chosen` = softmax over the K
    chosen (arXiv:1701.06538, eq. 3 and 5), or `sigmoid` of each (arXiv:2412.19437, eq. 15).
    `normalize` divides the K weights by their sum; `scale` then multiplies them. With `groups` > 1
    the experts are that many groups of neighbours, of which the `groups_kept` with the largest sum
    of two best scores are eligible (arXiv:2412.19437, section 2.1.2).
    """

    top_k: int
    score: Literal["softmax", "chosen", "sigmoid"] = "softmax"
    normalize: bool = False
    scale: float = 1.0
    groups: int = 1
    groups_kept: int = 1


class Experts(NamedTuple):
    """Stacked weights; `gate` is None for plain experts."""

    up: Array
    down: Array
    gate: Array | None


Activation = Callable[[Array], Array]


def route(logits: Array, routing: Routing, bias: Array | None = None) -> tuple[Array, Array]:
    """(index, weight) of each token's K experts, the best first; the lower index where two tie.

    `bias` f32[E] is added to the scores for choosing only: weights are made of the scores
    themselves (arXiv:2412.19437, eq. 16).
    """
    E = logits.shape[-1]
    if routing.score == "softmax":
        scores = jax.nn.softmax(logits, axis=-1)
    else:
        scores = jax.nn.sigmoid(logits) if routing.score == "sigmoid" else logits
    choice = scores if bias is None else scores + bias
    if routing.groups > 1:
        choice = jnp.where(_eligible(choice, routing), choice, MASKED)
    best, index = jax.lax.top_k(choice, routing.top_k)
    index = jnp.clip(index, 0, E - 1)
    if bias is None:
        weight = best
    else:
        chosen = index[..., None] == jnp.arange(E, dtype=jnp.int32)
        weight = jnp.sum(jnp.where(chosen, scores[..., None, :], 0.0), axis=-1)
    if routing.score == "chosen":
        weight = jax.nn.softmax(weight, axis=-1)
    if routing.normalize:
        eps = EPS if routing.score == "sigmoid" else 0.0
        weight = weight / (jnp.sum(weight, axis=-1, keepdims=True) + eps)
    return index, weight * routing.scale


def _eligible(choice: Array, routing: Routing) -> Array:
    """bool[B, T, E]: experts of the kept groups."""
    *tokens, E = choice.shape
    size = E // routing.groups
    two, _ = jax.lax.top_k(choice.reshape(*tokens, routing.groups, size), min(2, size))
    _, kept = jax.lax.top_k(jnp.sum(two, axis=-1), routing.groups_kept)
    group = jnp.arange(E, dtype=jnp.int32) // size
    return jnp.any(kept[..., None] == group, axis=-2)


def step(
    x: Array, valid: Array, index: Array, weight: Array, experts: Experts, act: Activation
) -> Array:
    """One token for each row: x [B, 1, D] -> y [B, 1, D].

    Reads the weights of the chosen experts and no others, one (row, expert) at a time: as
    separate operations, or, if those are more than `UNROLLED`, in a loop. Where the rows choose at
    least as many as there are, all experts are read once instead (the form of `scan`).
    """
    B, _, K = index.shape
    if experts.up.shape[0] <= B * K:
        return scan(x, valid, index, weight, experts, act)
    x, index, weight = _masked(x, valid, index, weight)
    if B * K > UNROLLED:
        return _looped(x[:, 0], index[:, 0], weight[:, 0], experts, act)[:, None]
    rows = []
    for b in range(B):
        y = jnp.zeros_like(x[b])
        for k in range(K):
            y = y + weight[b, 0, k] * _expert(x[b], index[b, 0, k], experts, act)
        rows.append(y)
    return jnp.stack(rows)


def _looped(x: Array, index: Array, weight: Array, experts: Experts, act: Activation) -> Array:
    """`step` on x [B, D] with one pair (row, expert) at a time, in the same order."""
    B, K = index.shape
    index, weight = index.reshape(B * K), weight.reshape(B * K)

    def pair(i: Array, y: Array) -> Array:
        b = i // K
        row = jax.lax.dynamic_slice_in_dim(x, b, 1)
        sofar = jax.lax.dynamic_slice_in_dim(y, b, 1)
        sofar = sofar + weight[i] * _expert(row, index[i], experts, act)
        return jax.lax.dynamic_update_slice_in_dim(y, sofar, b, 0)

    return jax.lax.fori_loop(0, B * K, pair, jnp.zeros_like(x))


def scan(
    x: Array, valid: Array, index: Array, weight: Array, experts: Experts, act: Activation
) -> Array:
    """T tokens for each row: x [B, T, D] -> y [B, T, D]."""
    B, T, D = x.shape
    x, index, weight = _masked(x, valid, index, weight)
    return _dense(
        x.reshape(B * T, D),
        jnp.where(valid[..., None], index, -1).reshape(B * T, -1),
        weight.reshape(B * T, -1),
        experts,
        act,
    ).reshape(B, T, D)


def _dense(x: Array, index: Array, weight: Array, experts: Experts, act: Activation) -> Array:
    """Every expert on every token of x [N, D]; index -1 is no expert."""
    E = experts.up.shape[0]
    chosen = index[..., None] == jnp.arange(E, dtype=jnp.int32)
    hit = jnp.sum(chosen.astype(jnp.float32), axis=1)
    by = jnp.sum(jnp.where(chosen, weight[..., None], 0.0), axis=1)

    def add(e: Array, y: Array) -> Array:
        own = _expert(x, e, experts, act) * jax.lax.dynamic_slice_in_dim(by, e, 1, axis=1)
        return y + jnp.where(jax.lax.dynamic_slice_in_dim(hit, e, 1, axis=1) > 0, own, 0.0)

    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(E), add, jnp.zeros_like(x))


def _masked(x: Array, valid: Array, index: Array, weight: Array) -> tuple[Array, Array, Array]:
    """Padding as zeros, with the first expert and no weight."""
    mask = valid[..., None]
    return jnp.where(mask, x, 0.0), jnp.where(mask, index, 0), jnp.where(mask, weight, 0.0)


def _expert(x: Array, e: Array, experts: Experts, act: Activation) -> Array:
    """Expert `e` on the rows of x [N, D]."""

    def product(x: Array, stack: Array) -> Array:
        own = jax.lax.dynamic_index_in_dim(stack, e, axis=0, keepdims=False)
        return jax.lax.dot_general(
            x,
            own.astype(jnp.float32),
            (((1,), (1,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )

    hidden = product(x, experts.up)
    if experts.gate is None:
        return product(act(hidden), experts.down)
    return product(act(product(x, experts.gate)) * hidden, experts.down)
