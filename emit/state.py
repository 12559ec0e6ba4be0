"""Named, typed per-sequence state of a model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class StateSpec:
    """One state tensor.

    `shape` is that of a single sequence, with size 1 at `slot_axis`. Kind `fixed` is overwritten at
    each token and always float32 (conv tail, SSM state); `per_position` holds a place for each
    position (KV cache) and is updated in place.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    slot_axis: int
    kind: Literal["fixed", "per_position"]

    def batched(self, slots: int) -> tuple[int, ...]:
        """Shape of this state for `slots` sequences."""
        return (*self.shape[: self.slot_axis], slots, *self.shape[self.slot_axis + 1 :])

    def struct(self, slots: int) -> jax.ShapeDtypeStruct:
        """Abstract value of this state for `slots` sequences."""
        return jax.ShapeDtypeStruct(self.batched(slots), DTYPES[self.dtype])

    @property
    def size(self) -> int:
        """Elements of one sequence."""
        return math.prod(self.shape)


DTYPES: dict[str, np.dtype] = {
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(jnp.bfloat16),
    "f16": np.dtype(np.float16),
    "i32": np.dtype(np.int32),
    "i8": np.dtype(np.int8),
    "u8": np.dtype(np.uint8),
}
WORDS = {dtype: word for word, dtype in DTYPES.items()}
