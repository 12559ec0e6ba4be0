"""Projections, norms and activations shared by all families.

Dimensions, here and in every op: B batch rows, T tokens of a chunk, V vocabulary, K inputs of a
projection, O its outputs. Activations are float32; weights are float32, bfloat16, float16 or codes
and are widened inside the product, so the result is that of float32 arithmetic on the stored
weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from emit import kernels
from emit.kernels import Values, on_cpu
from emit.kernels import linear as linear_kernels
from emit.kernels import norm as norm_kernels
from emit.ops import quantized
from emit.ops.quantized import Quantized, Weight

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


def iota(count: int, dtype: Any = jnp.int32) -> Array:
    """0 to `count` - 1, as a constant of the graph.

    An iota that several operations read may become a kernel of its own, which has no input and is
    lost outside the command buffer: the compiler then fails.
    """
    return jnp.asarray(np.arange(count, dtype=dtype))


@on_cpu(linear_kernels.linear)
def linear(x: Array, weight: Weight, bias: Array | None = None) -> Array:
    """`x @ weight.T + bias`: x f32[B, T, K], weight [O, K], bias f32[O] -> f32[B, T, O].

    The widening of a narrow weight becomes part of the product's kernel: no target keeps a widened
    copy. (Multiply and sum, the other form, does that only under fusion flags that are unsafe.)
    """
    y = product(x.reshape(-1, x.shape[2]), weight).reshape(*x.shape[:2], weight.shape[0])
    return y if bias is None else y + bias


def product(x: Array, weight: Weight) -> Array:
    """`x @ weight.T`: x f32[M, K], weight [O, K] -> f32[M, O]."""
    if isinstance(weight, Quantized):
        return quantized.product(x, weight)
    return jax.lax.dot_general(
        x,
        weight.astype(jnp.float32),
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def embed(tokens: Array, table: Weight) -> Array:
    """Rows of `table` [V, K] for tokens i32[B, T], clamped to the table -> f32[B, T, K].

    Padding may hold any number, and the compiler's gather reads wherever an index points (JAX's own
    clamps), so the clamp is an operation of the graph.
    """
    inside = jnp.clip(tokens, 0, table.shape[0] - 1)
    if isinstance(table, Quantized):
        return table.rows(inside)
    return jnp.take(table, inside, axis=0, mode="clip").astype(jnp.float32)


@on_cpu(norm_kernels.rms_norm)
def rms_norm(x: Values, weight: Array, eps: float) -> Array:
    """`x / sqrt(mean(x²) + eps) * weight` over the last axis (arXiv:1910.07467, eq. 4), float32."""
    x = kernels.array(x)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


@on_cpu(norm_kernels.group_rms_norm)
def group_rms_norm(x: Values, weight: Array, groups: int, eps: float) -> Array:
    """RMSNorm over each of `groups` equal parts of the last axis: x f32[B, T, K], weight f32[K]."""
    x = kernels.array(x)
    parts = x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    scale = jax.lax.rsqrt(jnp.mean(parts * parts, axis=-1, keepdims=True) + eps)
    return (parts * scale).reshape(x.shape) * weight


def last_valid(x: Array, lengths: Array) -> Array:
    """The row of each sequence's last valid token: x f32[B, T, K], lengths i32[B] -> f32[B, 1, K].

    One slice a row instead of a batched gather, which not every target lowers. A row of length 0
    gives its position 0.
    """
    if x.shape[1] == 1:
        return x
    rows = [
        jax.lax.dynamic_slice_in_dim(x[b], jnp.maximum(lengths[b] - 1, 0), 1, axis=0)
        for b in range(x.shape[0])
    ]
    return jnp.stack(rows)


def logits(x: Array, lengths: Array, norm: Array, eps: float, table: Weight) -> Array:
    """The head on the norm of each row's last valid token: x f32[B, T, K] -> f32[B, V].

    lengths i32[B], norm f32[K], table [V, K].
    """
    return linear(rms_norm(last_valid(x, lengths), norm, eps), table)[:, 0]


def softcap(x: Array, cap: float) -> Array:
    """`cap tanh(x / cap)` (arXiv:2408.00118, section 2)."""
    return cap * jnp.tanh(x / cap)


def matmul(a: Array, b: Array) -> Array:
    """`a @ b` over the last two axes: [..., M, K] and [..., K, N] -> [..., M, N], float32.

    The leading axes become one batch axis: in this canonical form each product is one kernel on
    every target.
    """
    out = jax.lax.dot_general(
        a.reshape(-1, *a.shape[-2:]),
        b.reshape(-1, *b.shape[-2:]),
        (((2,), (1,)), ((0,), (0,))),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return out.reshape(*a.shape[:-1], b.shape[-1])
