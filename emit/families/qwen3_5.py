"""Qwen3.5 (Qwen team, 2026), Hugging Face `qwen3_5`: the text model of a file with images or not.

    x += mixer(rms(x))     Gated DeltaNet, or in each fourth layer attention with an output gate
    x += ffn(rms(x))       one gated FFN

The layers are Qwen3-Next's (see `emit.qwen`); the delta rule's projections q, k and v, z, b and a
are tensors of their own. Positions are those of a text: the three parts that rotation is dealt to
for images are equal, and `mrope_section` says nothing.

Left out: the vision tower (`model.visual.`) and multi-token prediction (`mtp.`). Refused: what
Qwen3-Next refuses.
"""

from __future__ import annotations

from emit.blocks.backbone import forward, state
from emit.qwen import Dense as Config
from emit.qwen import weights

__all__ = ["Config", "forward", "state", "weights"]
