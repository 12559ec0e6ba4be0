"""Rotary embeddings against float64 at any position, and against transformers' frequencies."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from driver import relative

import emit.rope
from emit.errors import EmitError
from emit.ops import rope

HEAD_DIM, LONGEST = 32, 4096
PARAMETERS: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 100000000000.0},
    {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
        "rope_theta": 500000.0,
    },
    {
        "rope_type": "llama3",
        "factor": 2.0,
        "low_freq_factor": 2.0,
        "high_freq_factor": 3.0,
        "rope_theta": 10000.0,
    },
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "rope_theta": 10000.0,
    },
    {
        "rope_type": "yarn",
        "factor": 16.0,
        "beta_fast": 20,
        "beta_slow": 2,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "truncate": False,
        "original_max_position_embeddings": 256,
        "rope_theta": 1000000.0,
    },
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "attention_factor": 1.25,
        "original_max_position_embeddings": 64,
        "rope_theta": 100.0,
    },
    {"rope_type": "yarn", "factor": 1.0, "partial_rotary_factor": 0.25, "rope_theta": 10000.0},
]


@pytest.fixture(autouse=True)
def strict_promotion() -> Any:
    with jax.numpy_dtype_promotion("strict"):
        yield


def read(config: dict[str, Any], head_dim: int = HEAD_DIM) -> rope.Rope:
    return emit.rope.read({"model_type": "some", **config}, head_dim, LONGEST)


@pytest.mark.parametrize("theta", [100.0, 10000.0, 1e11])
@pytest.mark.parametrize("start", [0, 1000, 123_457, 1_000_000, 2**31 - 100])
def test_angles_are_exact_at_any_position(theta: float, start: int) -> None:
    """To float32's rounding up to 10⁶, where a float32 angle is 0.02 to 0.06 off."""
    spec = rope.Rope(tuple(rope.default(theta, 64)), factor=1.5)
    first = np.array([start, start // 3], np.int32)
    got = jax.jit(lambda p: rope.tables(spec, p, 50))(first)
    positions = first[:, None].astype(np.int64) + np.arange(50)
    angles = positions[:, :, None] * np.array(spec.frequencies)
    bound = 2e-7 if start <= 1_000_000 else 5e-5
    for table, function in zip(got, (np.cos, np.sin), strict=True):
        assert np.abs(np.asarray(table, np.float64) - 1.5 * function(angles)).max() < bound


def test_every_quadrant_and_both_sides_of_its_border() -> None:
    """One token turns by a 64th of a circle and a hair: all eight octants, and their borders."""
    spec = rope.Rope((2 * math.pi / 64, 2 * math.pi / 64 + 1e-7, math.pi, 0.0))
    cos, sin = map(np.asarray, rope.tables(spec, jnp.zeros(1, jnp.int32), 130))
    angles = np.arange(130)[:, None] * np.array(spec.frequencies)
    assert np.abs(cos[0] - np.cos(angles)).max() < 2e-7
    assert np.abs(sin[0] - np.sin(angles)).max() < 2e-7


@pytest.mark.parametrize(("head_dim", "partial"), [(8, 1.0), (16, 0.5), (10, 0.4)])
def test_rotation_is_the_oracle(head_dim: int, partial: float) -> None:
    """Element by element, eq. 34 of the paper; what is not rotated keeps its bits."""
    spec = read({"rope_theta": 30.0, "partial_rotary_factor": partial}, head_dim)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 9, 3, head_dim)).astype(np.float32)
    first = np.array([0, 1234], np.int32)
    got = np.asarray(jax.jit(lambda x, p: rope.rotate(x, *rope.tables(spec, p, 9)))(x, first))
    want, half = x.astype(np.float64), spec.rotary // 2
    for b in range(2):
        for t in range(9):
            for i in range(half):
                angle = (int(first[b]) + t) * 30.0 ** (-2 * i / spec.rotary)
                c, s = math.cos(angle), math.sin(angle)
                for h in range(3):
                    u, w = (float(value) for value in x[b, t, h, [i, half + i]])
                    want[b, t, h, i], want[b, t, h, half + i] = u * c - w * s, w * c + u * s
    assert relative(got, want) < 1e-6
    assert spec.rotary == int(head_dim * partial)
    assert got[..., spec.rotary :].tobytes() == x[..., spec.rotary :].tobytes()


def test_scores_depend_on_the_distance_alone() -> None:
    spec = rope.Rope(tuple(rope.default(10000.0, 16)))
    q, k = np.random.default_rng(1).standard_normal((2, 1, 1, 1, 16)).astype(np.float32)
    scores = []
    for start in (0, 77_777, 1_000_000):
        at = [rope.tables(spec, jnp.array([p], jnp.int32), 1) for p in (start + 9, start)]
        turned = [np.asarray(rope.rotate(x, *tables)) for x, tables in zip((q, k), at, strict=True)]
        scores.append(float((turned[0] * turned[1]).sum()))
    assert max(scores) - min(scores) < 2e-6 * abs(scores[0])


# --- configs ---------------------------------------------------------------------------------


@pytest.mark.oracle
@pytest.mark.parametrize("parameters", PARAMETERS, ids=lambda p: p["rope_type"])
def test_frequencies_are_those_of_transformers(parameters: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=LONGEST,
        rope_parameters=dict(parameters),
    )
    default = LlamaRotaryEmbedding.compute_default_rope_parameters
    function = {**ROPE_INIT_FUNCTIONS, "default": default}[parameters["rope_type"]]
    want, factor = function(config)
    got = read({"rope_parameters": parameters})
    assert np.allclose(got.frequencies, want.numpy(), rtol=1e-6, atol=0)
    assert got.factor == pytest.approx(factor, rel=1e-12)
    assert got.limit == (LONGEST if parameters["rope_type"] == "dynamic" else None)


def test_both_dialects_read_the_same() -> None:
    for parameters in PARAMETERS:
        older = dict(parameters)
        beside = {k: older.pop(k) for k in ("rope_theta", "partial_rotary_factor") if k in older}
        older["type"] = older.pop("rope_type")
        scaling = None if older == {"type": "default"} else older
        assert read({"rope_scaling": scaling, **beside}) == read({"rope_parameters": parameters})
    assert read({}) == read({"rope_theta": 10000.0}) == read({"rope_parameters": None})
    both = {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}, "rope_theta": 5.0}
    assert read(both) == read({"rope_theta": 5})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, 'some: rope_type = "longrope"'),
        ({"rope_scaling": {"rope_type": "yarn"}}, "yarn needs factor"),
        ({"rope_scaling": {"type": "linear", "factor": -2.0}}, "factor = -2.0 must be above 0"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, 'factor = "2" is not of type'),
        ({"rope_scaling": {"type": "linear", "factor": 2, "beta_fast": 3}}, "has no beta_fast"),
        ({"rope_parameters": {"mrope_section": [1, 2]}}, "mrope_section = [1, 2] is not a known"),
        ({"rope_parameters": {"rope_theta": 5.0}, "rope_theta": 6.0}, "rope_theta = 6.0 contrad"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2}}, "contradicts"),
        ({"rope_scaling": "linear"}, '"linear" is no rope_parameters'),
        ({"rope_theta": 0.0}, "rope_theta = 0.0 must be above 0"),
        ({"rope_theta": float("inf")}, "rope_theta = inf must be above 0"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5 does not fit"),
        ({"partial_rotary_factor": 0.01}, "partial_rotary_factor 0.01 does not fit"),
        ({"partial_rotary_factor": 1e308}, "partial_rotary_factor 1e+308 does not fit"),
        ({"partial_rotary_factor": float("inf")}, "partial_rotary_factor inf does not fit"),
        (
            {
                "rope_scaling": {
                    "type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            "low_freq_factor, expected less than high_freq_factor",
        ),
    ],
)
def test_what_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(EmitError) as caught:
        read(config)
    assert words in str(caught.value) and "\n" not in str(caught.value)
