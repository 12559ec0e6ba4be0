"""wkv7.c against the float64 recurrence and the JAX form, at every CPU level."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import kernels
import numpy as np
import pytest
from driver import relative
from oracles.wkv7 import wkv7 as oracle

from emit import kernels as used_kernels
from emit.ops import wkv7

EPS = 1e-4
TOKENS = ("r", "log_w", "k", "v", "a", "g")
# rows, tokens, heads, channels of a head: less than a vector of any level, several, no multiple
SIZES = ((1, 1, 3, 64), (3, 1, 2, 5), (3, 7, 1, 37), (2, 4, 2, 16), (1, 3, 1, 150))


def arguments(size: tuple[int, ...], seed: int = 0) -> dict[str, Any]:
    """Random inputs; of the last of several rows nothing is valid, of the one before it a half."""
    B, T, H, D = size
    random = np.random.default_rng(seed)

    def f32(*shape: int) -> Any:
        return random.standard_normal(shape).astype(np.float32)

    made: dict[str, Any] = {name: f32(B, T, H * D) for name in TOKENS}
    made["log_w"] = -np.abs(np.tanh(made["log_w"])) * np.float32(0.6)
    made["a"] = 1 / (1 + np.exp(-made["a"]))
    for name in ("k_k", "k_a", "r_k", "weight", "bias"):
        made[name] = f32(H, D) if name == "r_k" else f32(H * D)
    made["lengths"] = np.array([T, (T + 1) // 2, 0][3 - B :] if B > 1 else [T], np.int32)
    return made | {"state": f32(B, H, D, D)}


def wanted(a: dict[str, Any], b: int) -> tuple[np.ndarray, np.ndarray]:
    """`wkv7.mixer` of row b in float64, valid tokens alone, or the only token."""
    H, D = a["state"].shape[1:3]
    length, vectors = a["lengths"][b], ("k_k", "k_a", "r_k", "weight", "bias")
    still = length == 0
    length = max(length, 1) if a["r"].shape[1] == 1 else length
    r, log_w, k, v, rate, g = (
        a[n][b, :length].astype(np.float64).reshape(length, H, D) for n in TOKENS
    )
    k_k, k_a, r_k, weight, bias = (a[n].astype(np.float64).reshape(H, D) for n in vectors)
    kappa = k * k_k / np.linalg.norm(k * k_k, axis=-1, keepdims=True)
    k = k * (1 + (rate - 1) * k_a)
    w, added, removed = (np.zeros_like(k) if still else x for x in (log_w, k, kappa))
    y, state = oracle(r, np.exp(w), added, v, -removed, removed * rate, a["state"][b])
    centred = y - y.mean(-1, keepdims=True)
    y = centred / np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + EPS) * weight + bias
    return (g * (y + np.sum(r * k * r_k, axis=-1, keepdims=True) * v)).reshape(length, H * D), state


def run(level: str, a: dict[str, Any]) -> list[np.ndarray]:
    """What the kernel writes."""
    (B, T, _), (_, H, D, _) = a["r"].shape, a["state"].shape
    given = [np.exp(x) if name == "log_w" else x for name, x in a.items()]
    y, new = np.full_like(a["r"], np.nan), np.full_like(a["state"], np.nan)
    bits = int(np.float32(EPS).view(np.uint32))
    sizes = (B, T, H, D, bits, 2)
    found = kernels.run(level, "wkv7", [*given, y, new], sizes, -(-B * H // 2))
    return found[len(given) :]


@pytest.mark.parametrize("level", kernels.levels())
def test_the_kernel_is_the_recurrence(level: str) -> None:
    """Errors measured are below 1e-6 of the largest number; a wrong index costs 1e-2."""
    for seed, size in enumerate(SIZES):
        a = arguments(size, seed)
        y, new = run(level, a)
        for b, length in enumerate(a["lengths"]):
            want, state = wanted(a, b)
            if len(want):
                assert relative(y[b, : len(want)], want) < 3e-6
            if length:
                assert relative(new[b], state) < 3e-6
            else:
                assert new[b].tobytes() == a["state"][b].tobytes()
            assert not y[b, len(want) :].any()


def test_a_prompt_is_its_tokens_one_by_one() -> None:
    """To the bit, so it does not matter where a prompt is cut."""
    a, level = arguments((1, 6, 2, 40)), "x86-64-v3"
    y, new = run(level, a)
    for t in range(6):
        one = {n: x[:, t : t + 1] if n in TOKENS else x for n, x in a.items()}
        one["lengths"] = np.ones(1, np.int32)
        each, a["state"] = run(level, one)
        np.testing.assert_array_equal(each[:, 0], y[:, t])
    np.testing.assert_array_equal(a["state"], new)


def test_the_op_is_the_recurrence_and_calls_the_kernel_where_kernels_are_used() -> None:
    a = arguments(SIZES[2])

    def text(on: bool) -> str:
        def mixer(*given: Any) -> Any:
            with used_kernels.used(on):
                return wkv7.mixer(*given, eps=EPS, chunk=4)

        return jax.jit(mixer).lower(*map(jnp.asarray, a.values())).as_text()

    assert "scanwright.wkv7" in text(True) and "custom_call" not in text(False)
    y, state = jax.jit(lambda *given: wkv7.mixer(*given, eps=EPS, chunk=4))(*a.values())
    for b, length in enumerate(a["lengths"]):
        want, want_state = wanted(a, b)
        assert relative(np.asarray(state)[b], want_state) < 3e-6
        assert not length or relative(np.asarray(y)[b, :length], want) < 3e-6
