"""Routing against the routers of transformers: the same experts with the same weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from emit.ops import moe

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("default")]
TOKENS, HIDDEN = 40, 24


def compare(router: Any, routing: moe.Routing, bias: np.ndarray | None = None) -> None:
    """`router` is a module of the library whose weights are not drawn yet."""
    import torch

    rng = np.random.default_rng(0)
    x = rng.standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    weight = rng.standard_normal(tuple(router.weight.shape)).astype(np.float32)
    with torch.no_grad():
        router.weight.copy_(torch.from_numpy(weight))
        if bias is not None:
            router.e_score_correction_bias.copy_(torch.from_numpy(bias))
        _, theirs, experts = router(torch.from_numpy(x))
    logits = jnp.asarray((x @ weight.T)[None])
    found, ours = moe.route(logits, routing, None if bias is None else jnp.asarray(bias))
    for t in range(TOKENS):
        want = dict(zip(experts[t].tolist(), theirs[t].tolist(), strict=True))
        got = dict(zip(found[0, t].tolist(), ours[0, t].tolist(), strict=True))
        assert got.keys() == want.keys()
        assert all(abs(got[e] - want[e]) < 1e-6 for e in want)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (3, 1)])
def test_sigmoid_scores_with_a_correction_bias_and_groups(
    groups: int, kept: int, normalize: bool
) -> None:
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHTopkRouter

    config: Any = SimpleNamespace(
        num_experts_per_tok=3,
        num_local_experts=12,
        hidden_size=HIDDEN,
        routed_scaling_factor=2.5,
        n_group=groups,
        topk_group=kept,
        norm_topk_prob=normalize,
    )
    bias = 0.3 * np.random.default_rng(1).standard_normal(12).astype(np.float32)
    routing = moe.Routing(3, "sigmoid", normalize, 2.5, groups, kept)
    compare(NemotronHTopkRouter(config), routing, bias)


@pytest.mark.parametrize("normalize", [True, False])
def test_softmax_scores(normalize: bool) -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextTopKRouter

    config: Any = SimpleNamespace(
        num_experts_per_tok=4, num_experts=10, hidden_size=HIDDEN, norm_topk_prob=normalize
    )
    compare(Qwen3NextTopKRouter(config), moe.Routing(4, "softmax", normalize))
