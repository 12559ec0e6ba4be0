"""Qwen3.5 with experts in float64: the layers say which they are."""

from __future__ import annotations

from oracles.qwen3_5 import Oracle

__all__ = ["Oracle"]
