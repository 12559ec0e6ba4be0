"""mlx-lm as a reference of its own, in float32 on the CPU. Needs mlx and mlx-lm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from driver import relative
from references import Reference

CLOSE = 2e-5  # of the largest first logit: an order above what float32 leaves on tiny models


def load(checkpoint: Path, **changed: Any) -> Any:
    """The library's model of `checkpoint`, `changed` keys of its config replaced.

    Weights in bfloat16 and float16 are widened; the library would compute in their type.
    """
    import mlx.core as mx
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.Device(mx.cpu))
    model = load_model(checkpoint, model_config=changed)[0]
    model.set_dtype(mx.float32)
    return model


def logits(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
    """Logits [len(tokens), V] before each of `tokens`: the prompt in one shot, then single steps.

    A step reads the given token before it, whatever the model would choose.
    """
    import mlx.core as mx

    cache, rows = model.make_cache(), []
    for text in [list(prompt), *([token] for token in tokens[:-1])]:
        rows.append(np.array(model(mx.array([text]), cache=cache)[0, -1]))
    return np.array(rows)


def check(model: Any, row: Reference, steps: int | None = None) -> None:
    """Assert the first logits of `row`, and of its first `steps` tokens (all) each and its gap."""
    tokens = row.tokens[:steps]
    got = logits(model, row.prompt, tokens)
    error = relative(got[0], np.array(row.first_logits))
    assert error < CLOSE, f"{len(row.prompt)} tokens: first logits are off by {error:.2g}"
    close = CLOSE * np.abs(row.first_logits).max()
    two = np.sort(got, axis=1)[:, -2:]
    for step, (token, gap) in enumerate(zip(tokens, row.gaps, strict=False)):
        where, chosen = f"{len(row.prompt)} tokens, step {step}", int(np.argmax(got[step]))
        assert chosen == token or gap < 2 * close, f"{where}: {chosen} for {token}, gap {gap}"
        found = two[step, 1] - two[step, 0] if chosen == token else 0.0
        assert abs(found - gap) < 2 * close, f"{where}: gap {found:.6f} for {gap:.6f}"
