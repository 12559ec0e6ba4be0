"""delta.c against the float64 recurrence and the JAX form, at every CPU level."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import kernels
import numpy as np
import pytest
from driver import relative
from oracles.delta import delta as oracle

from emit import kernels as used_kernels
from emit.ops import delta

EPS = 1e-5
# rows, tokens, key heads, value heads, K, V, decays of a head; each level's vectors have 4, 8 or 16
# numbers, and blocks of 1, 4 and 8 vectors.
SIZES = (
    (1, 1, 2, 4, 128, 128, 1),
    (3, 1, 2, 6, 7, 5, 7),
    (2, 1, 3, 3, 37, 150, 1),
    (2, 5, 1, 3, 37, 150, 37),
    (1, 3, 2, 2, 64, 64, 64),
    (3, 9, 1, 5, 3, 1, 1),
    (1, 2, 1, 1, 512, 40, 1),
)


def arguments(size: tuple[int, ...], seed: int = 0) -> dict[str, Any]:
    """Random inputs, of which the last row's first half, or all of a single token, is padding."""
    B, T, G, H, K, V, channels = size
    random = np.random.default_rng(seed)

    def f32(*shape: int) -> Any:
        return random.standard_normal(shape).astype(np.float32)

    made = {
        "qkv": f32(B, T, 2 * G * K + H * V),
        "z": f32(B, T, H * V) * 2,
        "g": -np.abs(f32(B, T, H, channels)) * np.float32(0.3),
        "beta": random.uniform(0.0, 1.0, (B, T, H)).astype(np.float32),
        "weight": f32(V),
        "state": f32(B, H, K, V),
    }
    if B > 1:
        made["g"][-1, T // 2 :] = made["beta"][-1, T // 2 :] = 0.0
        made["qkv"][-1, T // 2 :] = 1e15
        made["state"][-1, :, 0] = -0.0
    return made


def wanted(a: dict[str, Any], size: tuple[int, ...], gate: str) -> tuple[Any, Any]:
    """`delta.mixer` in float64."""
    B, T, G, H, K, V, _ = size
    q, k, v = np.split(a["qkv"].astype(np.float64), [G * K, 2 * G * K], axis=-1)
    q, k = (x.reshape(B, T, G, K) for x in (q, k))
    q, k = (x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    v = v.reshape(B, T, H, V)
    rows = [
        oracle(q[b] * K**-0.5, k[b], v[b], a["g"][b], a["beta"][b], a["state"][b]) for b in range(B)
    ]
    y, state = np.stack([y for y, _ in rows]), np.stack([s for _, s in rows])
    z = a["z"].reshape(y.shape).astype(np.float64)
    y = y / np.sqrt(np.mean(y * y, axis=-1, keepdims=True) + EPS) * a["weight"]
    y = y / (1 + np.exp(-z)) * (z if gate == "silu" else 1.0)
    return y.reshape(B, T, H * V), state


def run(level: str, a: dict[str, Any], size: tuple[int, ...], gate: str) -> list[np.ndarray]:
    """What the kernel writes."""
    B, T, G, H, K, V, channels = size
    y, new = np.full((B, T, H * V), np.nan, np.float32), np.full_like(a["state"], np.nan)
    given = [a["qkv"], a["z"], np.exp(a["g"]), a["beta"], a["weight"], a["state"]]
    bits = int(np.float32(EPS).view(np.uint32))
    sizes = (B, T, G, H, K, V, channels, int(gate == "silu"), bits, 2)
    found = kernels.run(level, "delta", [*given, y, new], sizes, -(-B * H // 2))
    for before, after in zip(given, found, strict=False):
        np.testing.assert_array_equal(before, after)
    return found[6:]


@pytest.mark.parametrize("level", kernels.levels())
def test_the_kernel_is_the_recurrence(level: str) -> None:
    """Errors measured are 1e-6 of the largest number; a wrong index costs 1e-2."""
    for i, size in enumerate(SIZES):
        gate = ("silu", "sigmoid")[i % 2]
        a = arguments(size, i)
        y, new = run(level, a, size, gate)
        want, want_state = wanted(a, size, gate)
        for b in range(size[0]):
            end = size[1] // 2 if 0 < b == size[0] - 1 else size[1]
            if end:
                assert relative(y[b, :end], want[b, :end]) < 5e-6
        assert np.isfinite(y).all() and relative(new, want_state) < 5e-6


@pytest.mark.parametrize("level", kernels.levels())
def test_padding_keeps_the_state_to_the_bit(level: str) -> None:
    for size in ((2, 1, 2, 4, 16, 33, 1), (2, 3, 1, 2, 9, 64, 9)):
        a = arguments(size)
        a["g"][1] = a["beta"][1] = 0.0
        _, new = run(level, a, size, "silu")
        assert new[1].tobytes() == a["state"][1].tobytes()
        assert new[0].tobytes() != a["state"][0].tobytes()


def test_a_prompt_is_its_tokens_one_by_one() -> None:
    """To the bit, so it does not matter where a prompt is cut."""
    size = (1, 6, 1, 2, 20, 70, 20)
    a, level = arguments(size), "x86-64-v3"
    y, new = run(level, a, size, "silu")
    for t in range(6):
        one = {n: x[:, t : t + 1] if n in ("qkv", "z", "g", "beta") else x for n, x in a.items()}
        each, a["state"] = run(level, one, (1, 1, *size[2:]), "silu")
        np.testing.assert_array_equal(each[:, 0], y[:, t])
    np.testing.assert_array_equal(a["state"], new)


def test_the_op_calls_the_kernel_only_where_kernels_are_used() -> None:
    a = arguments(SIZES[1])

    def text(on: bool) -> str:
        def mixer(*given: Any) -> Any:
            with used_kernels.used(on):
                return delta.mixer(*given, eps=EPS, gate="silu", chunk=16)

        return jax.jit(mixer).lower(*map(jnp.asarray, a.values())).as_text()

    assert "scanwright.delta" in text(True) and "custom_call" not in text(False)


@pytest.mark.parametrize("size", SIZES[:4])
def test_the_op_is_the_recurrence(size: tuple[int, ...]) -> None:
    a = arguments(size)
    mixer = jax.jit(lambda *given: delta.mixer(*given, eps=EPS, gate="sigmoid", chunk=16))
    y, new = mixer(*a.values())
    want, want_state = wanted(a, size, "sigmoid")
    assert relative(new, want_state) < 5e-6
    assert relative(y[0], want[0]) < 5e-6
