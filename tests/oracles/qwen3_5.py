"""Qwen3.5 in float64."""

from __future__ import annotations

import numpy as np

from oracles import qwen3_next
from oracles.qwen3_next import Params


class Oracle(qwen3_next.Oracle):
    """Qwen3-Next with projections of the delta rule that are parameters of their own."""

    def _projected(self, p: Params, x: np.ndarray) -> tuple[np.ndarray, ...]:
        qkv, z, b, a = (p[f"in_proj_{each}.weight"] @ x for each in ("qkv", "z", "b", "a"))
        return qkv, z, b, a
