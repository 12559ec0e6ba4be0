"""Falcon Mamba in float64: Mamba whose config says `mixer_rms_eps`, so that dt, B and C are normed.

(arXiv:2410.05355, section 2.2.)
"""

from __future__ import annotations

from oracles.mamba import Oracle

__all__ = ["Oracle"]
