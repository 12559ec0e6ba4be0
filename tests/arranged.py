"""The experts of a checkpoint arranged as other software arranges them."""

from __future__ import annotations

import re

import cases
import numpy as np

EXPERT = re.compile(r"(.*\.)experts\.(\d+)\.(\w+)\.weight")


def groups(tensors: cases.Tensors) -> dict[tuple[str, str], list[str]]:
    """(what comes before `experts`, projection) -> the names of all experts' tensors."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in tensors:
        if match := EXPERT.fullmatch(name):
            found.setdefault((match[1], match[3]), []).append(name)
    return {key: sorted(names, key=lambda n: int(n.split(".")[-3])) for key, names in found.items()}


def stacked(tensors: cases.Tensors) -> cases.Tensors:
    """As MLX holds experts."""
    out = dict(tensors)
    gated = any(which == "gate_proj" for _, which in groups(tensors))
    words = {} if gated else {"up_proj": "fc1", "down_proj": "fc2"}
    for (module, which), names in groups(tensors).items():
        stack = np.stack([out.pop(name) for name in names])
        out[f"{module}switch_mlp.{words.get(which, which)}.weight"] = stack
    return out


def joined(tensors: cases.Tensors) -> cases.Tensors:
    """As transformers' own modules hold experts, and published files of Qwen3.5."""
    out = dict(tensors)
    stacks = {
        key: np.stack([out.pop(name) for name in names]) for key, names in groups(tensors).items()
    }
    for (module, which), stack in stacks.items():
        if which == "gate_proj":
            both = np.concatenate([stack, stacks[module, "up_proj"]], axis=1)
            out[f"{module}experts.gate_up_proj"] = both
        elif which == "down_proj" or (module, "gate_proj") not in stacks:
            out[f"{module}experts.{which}"] = stack
    return out
