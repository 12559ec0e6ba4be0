"""rglru.c against the float64 recurrence and the JAX form, at every CPU level."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import kernels
import numpy as np
import pytest
from driver import relative
from oracles import rglru as oracle

from emit import kernels as used_kernels
from emit.ops import mla, rglru

HEADS = 3
# rows, tokens, channels; channels of a tile
SIZES = ((1, 1, 3, 64), (3, 1, 150, 64), (3, 7, 39, 64), (2, 5, 192, 128))


def arguments(size: tuple[int, ...], seed: int = 0) -> dict[str, Any]:
    """Random inputs; row 0 begins, and nothing of the last of several rows is valid."""
    B, T, W, _ = size
    random = np.random.default_rng(seed)

    def f32(*shape: int) -> Any:
        return random.standard_normal(shape).astype(np.float32)

    made: dict[str, Any] = {"x": f32(B, T, W), "branch": f32(B, T, W)}
    for name in "ri":
        made[f"{name}_weight"] = f32(HEADS, W // HEADS, W // HEADS)
        made[f"{name}_bias"] = f32(W)
    made["rate"] = np.exp(f32(W) - 2)
    made["lengths"] = np.array([T, (T + 1) // 2, 0][3 - B :] if B > 1 else [T], np.int32)
    made["positions"] = np.array([0, 5, 0][:B], np.int32)
    return made | {"state": f32(B, W)}


def wanted(a: dict[str, Any], b: int) -> tuple[np.ndarray, np.ndarray]:
    """`rglru.mixer` of row b in float64, valid tokens alone."""
    x = a["x"][b, : a["lengths"][b]]
    r, i = (
        np.array([oracle.gate(t, a[f"{n}_weight"], a[f"{n}_bias"]) for t in x]).reshape(x.shape)
        for n in "ri"
    )
    y, state = oracle.rglru(x, r, i, a["rate"], a["state"][b], int(a["positions"][b]))
    return y * a["branch"][b, : len(x)], state


def run(level: str, a: dict[str, Any], per: int) -> list[np.ndarray]:
    """What the kernel writes, of gates computed here."""
    B, T, W = a["x"].shape
    blocks = a["x"].reshape(B, T, HEADS, -1)
    r, i = (np.einsum("bthi,hoi->btho", blocks, a[f"{n}_weight"]).reshape(B, T, W) for n in "ri")
    names = ("rate", "lengths", "positions", "state")
    given = [a["x"], a["branch"], r, a["r_bias"], i, a["i_bias"], *(a[n] for n in names)]
    y, new = np.full_like(a["x"], np.nan), np.full_like(a["state"], np.nan)
    return kernels.run(level, "rglru", [*given, y, new], (B, T, W, per), -(-W // per))[-2:]


@pytest.mark.parametrize("level", kernels.levels())
def test_the_kernel_is_the_recurrence(level: str) -> None:
    """Errors measured are below 1e-6 of the largest number; a wrong index costs 1e-2."""
    for seed, size in enumerate(SIZES):
        a = arguments(size, seed)
        y, new = run(level, a, size[3])
        for b, length in enumerate(a["lengths"]):
            want, state = wanted(a, b)
            if length:
                assert relative(y[b, :length], want) < 3e-6
                assert relative(new[b], state) < 3e-6
            else:
                assert new[b].tobytes() == a["state"][b].tobytes()
            h = np.broadcast_to(new[b], y[b, length:].shape)
            np.testing.assert_array_equal(y[b, length:], h * a["branch"][b, length:])


def test_the_op_is_the_recurrence_and_calls_the_kernels_where_kernels_are_used() -> None:
    a = arguments(SIZES[2])

    def text(on: bool) -> str:
        def mixer(*given: Any) -> Any:
            with used_kernels.used(on):
                return rglru.mixer(*given, chunk=4)

        return jax.jit(mixer).lower(*map(jnp.asarray, a.values())).as_text()

    assert text(True).count("scanwright.experts_f32") == 2 and "scanwright.rglru" in text(True)
    assert "custom_call" not in text(False)
    y, state = jax.jit(lambda *given: rglru.mixer(*given, chunk=4))(*a.values())
    for b, length in enumerate(a["lengths"]):
        want, want_state = wanted(a, b)
        assert relative(np.asarray(state)[b], want_state) < 3e-6
        assert not length or relative(np.asarray(y)[b, :length], want) < 3e-6


def test_the_absorbed_products_of_latent_attention_are_the_kernel_of_chosen_matrices() -> None:
    n, p, latent, shared = (jnp.ones(s) for s in ((1, 1, 3, 4), (1, 1, 3, 2), (1, 1, 8), (1, 1, 2)))
    up_k, up_v, region = jnp.ones((3, 8, 4)), jnp.ones((3, 5, 8)), jnp.ones((1, 1, 16, 10))
    one = jnp.ones(1, jnp.int32)

    def step(*given: Any) -> Any:
        with used_kernels.used():
            return mla.step(*given, scale=0.3)

    lowered = jax.jit(step).lower(n, p, latent, shared, up_k, up_v, one, one, region)
    assert lowered.as_text().count("scanwright.experts_f32") == 2
