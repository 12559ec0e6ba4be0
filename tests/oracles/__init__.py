"""Float64 NumPy references, written from the papers' recurrences one token at a time.

Nothing here shares code or an algorithm with `emit`: no chunks, no batches, no masks. One sequence,
loops over tokens, so that each line can be read against its equation. A module an op, and a module
a family with the class `Oracle` (see `oracles.model`).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np


def oracle(family: str, cfg: Any, params: Mapping[str, np.ndarray]) -> Any:
    """The whole model of `family` in float64; see `oracles.model.Model`."""
    return importlib.import_module(f"oracles.{family}").Oracle(cfg, params)
