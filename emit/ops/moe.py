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
| up, gate | [E, F, D] | f32, bf16, f16 or codes, widened inside the product |
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

from emit.kernels import linear as kernels
from emit.kernels import on_cpu
from emit.ops import nn
from emit.ops.quantized import Quantized, Weight

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

    up: Weight
    down: Weight
    gate: Weight | None


Activation = Callable[[Array], Array]


def route(logits: Array, routing: Routing, bias: Array | None = None) -> tuple[Array, Array]:
    """(index, weight) of each token's K experts, the best first; the lower index where two tie.

    `bias` f32[E] is added to the scores for choosing only: weights are made of the scores
    themselves (arXiv:2412.19437, eq. 16).
    """
    if routing.score == "softmax":
        scores = jax.nn.softmax(logits, axis=-1)
    else:
        scores = jax.nn.sigmoid(logits) if routing.score == "sigmoid" else logits
    choice = scores if bias is None else scores + bias
    if bias is None and routing.groups == 1:
        choice = logits  # in the same order
    if routing.groups > 1:
        choice = _eligible(choice, routing)
    at = _rank(choice)[..., None, :] == nn.iota(routing.top_k, jnp.float32)[:, None]
    numbers = nn.iota(logits.shape[-1])
    index = jnp.sum(jnp.where(at, numbers, 0), axis=-1)
    weight = jnp.sum(jnp.where(at, scores[..., None, :], 0.0), axis=-1)
    if routing.score == "chosen":
        weight = jax.nn.softmax(weight, axis=-1)
    if routing.normalize:
        eps = EPS if routing.score == "sigmoid" else 0.0
        weight = weight / (jnp.sum(weight, axis=-1, keepdims=True) + eps)
    return index, weight * routing.scale


def _rank(values: Array) -> Array:
    """How many of `values` [..., E] come before each: larger, or as large and earlier; float32.

    All pairs are compared: the targets' own top-k and sort fail or are wrong on some of them.
    """
    E = values.shape[-1]
    own, other = values[..., :, None], values[..., None, :]
    earlier = nn.iota(E)[:, None] > nn.iota(E)[None, :]
    before = (other > own) | ((other == own) & earlier)
    return jnp.sum(before.astype(jnp.float32), axis=-1)


def _eligible(choice: Array, routing: Routing) -> Array:
    """`choice` with the experts of all but the kept groups MASKED."""
    *tokens, E = choice.shape
    grouped = choice.reshape(*tokens, routing.groups, E // routing.groups)
    worth = jnp.sum(jnp.where(_rank(grouped) < 2.0, grouped, 0.0), axis=-1)
    kept = _rank(worth) < routing.groups_kept
    return jnp.where(kept[..., None], grouped, MASKED).reshape(choice.shape)


def _step_by_kernels(
    x: Array, valid: Array, index: Array, weight: Array, experts: Experts, act: Activation
) -> Array | None:
    """`step`, all pairs (row, expert) at once; or all experts, where the rows choose as many."""
    B, _, K = index.shape
    E = experts.up.shape[0]
    x, index, weight = _masked(x, valid, index, weight)
    every = E <= B * K
    pairs = nn.iota(E) if every else jnp.clip(index, 0, E - 1).reshape(B * K)

    def ffn(x: Array) -> Array | None:
        hidden = kernels.experts(x, experts.up, pairs)
        gate = None if experts.gate is None else kernels.experts(x, experts.gate, pairs)
        if hidden is None or (gate is None) != (experts.gate is None):
            return None
        hidden = act(hidden) if gate is None else act(gate) * hidden
        return kernels.experts(hidden, experts.down, pairs)

    if every:
        y, (hit, by) = ffn(x.reshape(1, B, -1)), _table(index[:, 0], weight[:, 0], E)
        if y is None:
            return None
        own = jnp.where(hit.T[..., None] > 0, y * by.T[..., None], 0.0)
        return jnp.sum(own, axis=0)[:, None]
    y = ffn(x)
    if y is None:
        return None
    return jnp.sum(y.reshape(B, K, -1) * weight[:, 0, :, None], axis=1, keepdims=True)


@on_cpu(_step_by_kernels)
def step(
    x: Array, valid: Array, index: Array, weight: Array, experts: Experts, act: Activation
) -> Array:
    """One token for each row: x [B, 1, D] -> y [B, 1, D].

    Reads the weights of the chosen experts and no others, one (row, expert) at a time: as
    separate operations, or, if those are more than `UNROLLED`, in a loop. Where the rows choose at
    least as many as there are, all experts are read once instead.
    """
    B, _, K = index.shape
    x, index, weight = _masked(x, valid, index, weight)
    index = jnp.clip(index, 0, experts.up.shape[0] - 1)
    if experts.up.shape[0] <= B * K:
        return _dense(x[:, 0], index[:, 0], weight[:, 0], experts, act)[:, None]
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

    return jax.lax.fori_loop(0, B * K, pair, _nothing(x))


def scan(
    x: Array, valid: Array, index: Array, weight: Array, experts: Experts, act: Activation
) -> Array:
    """T tokens for each row: x [B, T, D] -> y [B, T, D].

    Tokens are grouped by expert, unless each takes more than half of the experts.
    """
    B, T, D = x.shape
    K, E = index.shape[-1], experts.up.shape[0]
    x, index, weight = _masked(x, valid, index, weight)
    index = jnp.where(valid[..., None], index, -1)
    run = _grouped if 2 * K <= E else _dense
    flat, chosen, by = (a.reshape(B * T, -1) for a in (x, index, weight))
    return run(flat, chosen, by, experts, act).reshape(B, T, D)


def _grouped(x: Array, index: Array, weight: Array, experts: Experts, act: Activation) -> Array:
    """Each expert on its own tokens of x [N, D], in blocks of Q; index -1 is no expert.

    1. A token's rank among its expert's tokens: the number of tokens before it that chose it too.
    2. ceil(count / Q) blocks for each expert, one expert after the other; block i's expert and its
       first rank follow from the running sum of these.
    3. A loop over as many blocks as there are: the block's Q tokens are looked up by their ranks,
       its expert runs on them, and each token that is in the block adds its output.

    So no weight is read of an expert without tokens, each token's outputs are added by ascending
    expert, and nothing is sorted or scattered.
    """
    N, K = index.shape
    E = experts.up.shape[0]
    Q = _block(N * K, E)
    hit, by = _table(index, weight, E)
    upto = jax.lax.optimization_barrier(jnp.cumsum(hit, axis=0))  # 1.
    rank = jnp.where(hit > 0, upto - 1.0, -1.0).T  # [E, N]
    blocks = jnp.ceil(upto[-1] / Q)  # 2.
    ends = jax.lax.optimization_barrier(jnp.cumsum(blocks))
    each = nn.iota(min(E, N * K) + N * K // Q, jnp.float32)
    expert = jnp.sum((ends <= each[:, None]).astype(jnp.int32), axis=1)
    expert = jnp.minimum(expert, E - 1)
    first = (each - jnp.take(ends - blocks, expert, mode="clip")) * Q
    place = jnp.take(rank, expert, axis=0, mode="clip") - first[:, None]  # [blocks, N]
    place = jax.lax.optimization_barrier(place)
    at = place[:, None, :] == nn.iota(Q, jnp.float32)[:, None]
    token = jnp.sum(jnp.where(at, nn.iota(N, jnp.float32), 0.0), axis=-1)
    inside = ((place >= 0.0) & (place < Q)).astype(jnp.float32)
    place, token = (a.astype(jnp.int32) for a in (jnp.clip(place, 0.0, Q - 1.0), token))
    own = jnp.take(by.T, expert, axis=0, mode="clip")
    expert, token, place, own, inside = jax.lax.optimization_barrier(
        (expert, token, place, own, inside)
    )

    def add(i: Array, y: Array) -> Array:  # 3.
        block = jnp.take(x, token[i], axis=0, mode="clip")
        out = _expert(block, expert[i], experts, act)
        back = jnp.take(out, place[i], axis=0, mode="clip") * own[i][:, None]
        return y + jnp.where(inside[i][:, None] > 0.0, back, 0.0)

    total = ends[-1].astype(jnp.int32)
    return jax.lax.fori_loop(jnp.int32(0), total, add, _nothing(x))


def _block(pairs: int, experts: int) -> int:
    """Tokens of a block: the power of two above an expert's mean share, from 8 to 64."""
    return min(64, max(8, 1 << (-(-pairs // experts) - 1).bit_length()))


def _table(index: Array, weight: Array, E: int) -> tuple[Array, Array]:
    """f32[N, E] twice: 1 where a token chose an expert, and the weight it gave it; 0 elsewhere."""
    chosen = index[..., None] == nn.iota(E)
    hit = jnp.sum(chosen.astype(jnp.float32), axis=1)
    return hit, jnp.sum(jnp.where(chosen, weight[..., None], 0.0), axis=1)


def _dense(x: Array, index: Array, weight: Array, experts: Experts, act: Activation) -> Array:
    """Every expert on every token of x [N, D]; index -1 is no expert."""
    E = experts.up.shape[0]
    hit, by = _table(index, weight, E)

    def add(e: Array, y: Array) -> Array:
        own = _expert(x, e, experts, act) * jax.lax.dynamic_slice_in_dim(by, e, 1, axis=1)
        return y + jnp.where(jax.lax.dynamic_slice_in_dim(hit, e, 1, axis=1) > 0, own, 0.0)

    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(E), add, _nothing(x))


def _nothing(x: Array) -> Array:
    """Zeros like x for a loop to begin with, made of x.

    Constant ones would share a buffer with the loop's counter, and the compiled loop has been seen
    to lose a buffer that it is given twice.
    """
    return jax.lax.optimization_barrier(x - x)


def _masked(x: Array, valid: Array, index: Array, weight: Array) -> tuple[Array, Array, Array]:
    """Padding as zeros, with the first expert and no weight."""
    mask = valid[..., None]
    return jnp.where(mask, x, 0.0), jnp.where(mask, index, 0), jnp.where(mask, weight, 0.0)


def _expert(x: Array, e: Array, experts: Experts, act: Activation) -> Array:
    """Expert `e` on the rows of x [N, D]."""

    hidden = _product(x, experts.up, e)
    if experts.gate is None:
        return _product(act(hidden), experts.down, e)
    return _product(act(_product(x, experts.gate, e)) * hidden, experts.down, e)


def _product_by_kernel(x: Array, stack: Weight, e: Array) -> Array | None:
    y = kernels.experts(x[None], stack, e[None])
    return None if y is None else y[0]


@on_cpu(_product_by_kernel)
def _product(x: Array, stack: Weight, e: Array) -> Array:
    """x [N, D] with matrix `e` of the stack [E, O, D]: [N, O]."""
    if isinstance(stack, Quantized):
        return nn.product(x, stack.at(e))
    return nn.product(x, jax.lax.dynamic_index_in_dim(stack, e, axis=0, keepdims=False))
