"""Qwen3-Next (Qwen team, 2025; model card of Qwen3-Next-80B-A3B), Hugging Face `qwen3_next`.

    x += mixer(rms(x))     Gated DeltaNet, or in each fourth layer attention with an output gate
    x += ffn(rms(x))       the best of `num_experts` gated FFNs and a shared one, scaled by a gate

The gates' sigmoids, the norms of q and k and the rotation of a quarter of each head are those of
`blocks.attention`, the delta rule is that of `blocks.gated_delta`. All norms but the delta rule's
own multiply by 1 + w. Expert weights are parts of the softmax over all experts, divided by the sum
of the chosen ones if norm_topk_prob.

Refused: a sliding window, an activation that is not in `nn.ACTIVATIONS`, and any unknown key.
Multi-token prediction layers (`mtp.`) are left out.
"""

from __future__ import annotations

from emit.blocks.backbone import forward, state
from emit.qwen import Config, weights

__all__ = ["Config", "forward", "state", "weights"]
