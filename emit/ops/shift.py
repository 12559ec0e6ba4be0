"""Token shift: each token beside the one before it (arXiv:2305.13048, section 3.1.1).

    before[t] = x[t-1], and x[-1] the state

| tensor   | shape                         | dtype |
|----------|-------------------------------|-------|
| x        | [B, T, D] (`step`: [B, 1, D]) | f32   |
| previous | [B, D]: the last valid token  | f32   |
| before   | as x                          | f32   |

Identity update for padding: the new state is the last *valid* token, so a row of length 0 keeps
its state; what is before padding is meaningless.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def step(x: Array, lengths: Array, previous: Array) -> tuple[Array, Array]:
    """One token for each row; rows with `lengths` 0 (i32[B]) keep their state."""
    return previous[:, None], jnp.where((lengths > 0)[:, None], x[:, 0], previous)


def scan(x: Array, lengths: Array, previous: Array) -> tuple[Array, Array]:
    """T tokens for each row, the first `lengths[b]` (i32[B]) of them valid."""
    rows, steps = x.shape[:2]
    window = jnp.concatenate([previous[:, None], x], axis=1)
    new = [
        jax.lax.dynamic_index_in_dim(window[b], lengths[b], axis=0, keepdims=False)
        for b in range(rows)
    ]
    return window[:, :steps], jnp.stack(new)
