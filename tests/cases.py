"""Tiny random checkpoints, one row a case: the same files that a family's library would write.

A row says what differs from its family's base config; `build` draws the weights from the row's
seed and writes config.json and safetensors. No torch: tests of a checkpoint need none.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy

Tensors = dict[str, np.ndarray]
HANDED = Path(__file__).parent / "data"
DTYPES = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype("f2")}
LONG = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


@dataclass(frozen=True, eq=False)
class Case:
    """One checkpoint.

    `dialect` is that of config.json: `native` as transformers 5 writes it, `hub` as older files
    have it (torch_dtype, plain Infinity, keys at their default left out). `rename` maps tensor
    names to other spellings. `reference` is why transformers cannot be compared with, or None.
    """

    name: str
    family: str
    config: Mapping[str, Any] = field(default_factory=dict)
    dialect: str = "native"
    dtype: str = "f32"
    shards: int = 1
    rename: Mapping[str, str] = field(default_factory=dict)
    reference: str | None = None

    @property
    def seed(self) -> int:
        """Of the name, so that a new row changes no other."""
        return zlib.crc32(f"{self.family}/{self.name}".encode())


CASES = (
    Case("plain", "mamba2"),
    Case(
        "groups2_biases",
        "mamba2",
        {"n_groups": 2, "use_bias": True, "use_conv_bias": True, "layer_norm_epsilon": 1e-3},
    ),
    Case(
        "groups4_tied_no_conv_bias",
        "mamba2",
        {
            "n_groups": 4,
            "num_heads": 8,
            "head_dim": 12,
            "hidden_size": 48,
            "use_conv_bias": False,
            "conv_kernel": 2,
            "tie_word_embeddings": True,
        },
        dialect="hub",
    ),
    Case(
        "odd_sizes",
        "mamba2",
        {
            "vocab_size": 101,
            "hidden_size": 30,
            "num_heads": 3,
            "head_dim": 20,
            "state_size": 7,
            "n_groups": 3,
            "conv_kernel": 5,
            "num_hidden_layers": 3,
            "hidden_act": "gelu",
        },
    ),
    Case("one_head_bias", "mamba2", {"num_heads": 1, "head_dim": 64, "use_bias": True}),
    Case("bf16_sharded", "mamba2", {"n_groups": 2}, dialect="hub", dtype="bf16", shards=3),
    Case("f16", "mamba2", {"conv_kernel": 5, "tie_word_embeddings": True}, dtype="f16"),
    Case(
        "first_published_names",
        "mamba2",
        {"n_groups": 1},
        dialect="hub",
        rename={"backbone.embeddings.weight": "backbone.embedding.weight"},
        reference="transformers 5 renames the old key only for mamba",
    ),
    Case(
        "limits_bind",
        "mamba2",
        {"time_step_limit": [0.05, 0.3], "n_groups": 2},
        reference="it clamps dt in prefill and not in its decode step",
    ),
    Case(
        "expand_one_and_a_half",
        "mamba2",
        {"expand": 1.5, "num_heads": 6, "head_dim": 8, "n_groups": 2},
        reference="its config class takes only integers for expand",
    ),
)


def ids(case: Case) -> str:
    """A test id for `case`."""
    return f"{case.family}-{case.name}"


# --- mamba2 ----------------------------------------------------------------------------------

MAMBA2 = {
    "architectures": ["Mamba2ForCausalLM"],
    "bos_token_id": 1,
    "chunk_size": 8,
    "conv_kernel": 4,
    "eos_token_id": 2,
    "expand": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.1,
    "layer_norm_epsilon": 1e-5,
    "model_type": "mamba2",
    "n_groups": 1,
    "num_heads": 4,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "rescale_prenorm_residual": False,
    "residual_in_fp32": True,
    "state_size": 12,
    "tie_word_embeddings": False,
    "time_step_floor": 1e-4,
    "time_step_limit": [0.0, float("inf")],
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "time_step_rank": 4,
    "transformers_version": "5.24.0",
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "vocab_size": 97,
}


def mamba2_tensors(config: Mapping[str, Any], rng: np.random.Generator) -> Tensors:
    """Well-scaled random weights: variance 1/fan_in, A and dt spread as the library draws them."""

    def normal(shape: tuple[int, ...], scale: float, offset: float = 0.0) -> np.ndarray:
        return (offset + scale * rng.standard_normal(shape)).astype(np.float32)

    hidden, heads, vocab = config["hidden_size"], config["num_heads"], config["vocab_size"]
    inner, kernel = heads * config["head_dim"], config["conv_kernel"]
    channels = inner + 2 * config["n_groups"] * config["state_size"]
    tied = config["tie_word_embeddings"]
    tensors: Tensors = {
        "backbone.embeddings.weight": normal((vocab, hidden), 0.1 if tied else 1.0),
        "backbone.norm_f.weight": normal((hidden,), 0.1, 1.0),
    }
    if not tied:
        tensors["lm_head.weight"] = normal((vocab, hidden), hidden**-0.5)
    for i in range(config["num_hidden_layers"]):
        base, mixer = f"backbone.layers.{i}.", f"backbone.layers.{i}.mixer."
        width = inner + channels + heads
        tensors[base + "norm.weight"] = normal((hidden,), 0.1, 1.0)
        tensors[mixer + "in_proj.weight"] = normal((width, hidden), hidden**-0.5)
        tensors[mixer + "conv1d.weight"] = normal((channels, 1, kernel), kernel**-0.5)
        tensors[mixer + "dt_bias"] = normal((heads,), 1.0, -3.0)
        tensors[mixer + "A_log"] = np.log(rng.uniform(1.0, 9.0, heads)).astype(np.float32)
        tensors[mixer + "D"] = normal((heads,), 0.1, 1.0)
        tensors[mixer + "norm.weight"] = normal((inner,), 0.1, 1.0)
        tensors[mixer + "out_proj.weight"] = normal((hidden, inner), inner**-0.5)
        if config["use_conv_bias"]:
            tensors[mixer + "conv1d.bias"] = normal((channels,), 0.1)
        if config["use_bias"]:
            tensors[mixer + "in_proj.bias"] = normal((width,), 0.1)
            tensors[mixer + "out_proj.bias"] = normal((hidden,), 0.1)
    return tensors


# What a published mamba2 config.json leaves out where the default is meant.
MAMBA2_DEFAULTS = {
    "tie_word_embeddings": False,
    "use_conv_bias": True,
    "use_bias": False,
    "layer_norm_epsilon": 1e-5,
    "hidden_act": "silu",
    "expand": 2,
}


@dataclass(frozen=True)
class FamilyCases:
    """What the rows of one family share."""

    base: Mapping[str, Any]
    tensors: Callable[[Mapping[str, Any], np.random.Generator], Tensors]
    defaults: Mapping[str, Any]


FAMILIES = {"mamba2": FamilyCases(MAMBA2, mamba2_tensors, MAMBA2_DEFAULTS)}


# --- on disk ---------------------------------------------------------------------------------


def full_config(case: Case) -> dict[str, Any]:
    """Every key of the case's config, non-finite numbers as floats."""
    return {**FAMILIES[case.family].base, **case.config}


def tensors(case: Case) -> Tensors:
    """The case's weights by their usual checkpoint names, in the dtype they are stored in."""
    rng = np.random.default_rng(case.seed)
    drawn = FAMILIES[case.family].tensors(full_config(case), rng)
    return {name: array.astype(DTYPES[case.dtype]) for name, array in drawn.items()}


def write_config(path: Path, config: Mapping[str, Any], case: Case) -> None:
    """Write `config` in the case's dialect."""
    out = dict(config)
    if case.dialect == "hub":
        defaults = FAMILIES[case.family].defaults
        out = {k: v for k, v in out.items() if k not in defaults or defaults[k] != v}
        out |= {"torch_dtype": LONG[case.dtype]}
        if "num_heads" in out:
            out["intermediate_size"] = out["num_heads"] * out["head_dim"]
        path.write_text(json.dumps(out, indent=2))
    else:
        out |= {"dtype": LONG[case.dtype]}
        path.write_text(json.dumps(_native(out), indent=2, allow_nan=False))


def _native(value: Any) -> Any:
    """Non-finite floats as transformers 5 writes them."""
    if isinstance(value, dict):
        return {key: _native(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_native(item) for item in value]
    if isinstance(value, float) and value in (float("inf"), -float("inf")):
        return {"__float__": "Infinity" if value > 0 else "-Infinity"}
    return value


def write_tensors(directory: Path, tensors: Tensors, shards: int = 1) -> None:
    """One model.safetensors, or `shards` files (tensors dealt in turn) and their index."""
    if shards == 1:
        path = directory / "model.safetensors"
        safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
        return
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    where = {name: files[i % shards] for i, name in enumerate(tensors)}
    for file in files:
        part = {name: array for name, array in tensors.items() if where[name] == file}
        safetensors.numpy.save_file(part, directory / file, metadata={"format": "pt"})
    total = sum(array.nbytes for array in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def build(case: Case, directory: Path) -> Path:
    """Write the case's checkpoint into `directory` (made if absent) and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    write_config(directory / "config.json", full_config(case), case)
    named = {case.rename.get(name, name): array for name, array in tensors(case).items()}
    write_tensors(directory, named, case.shards)
    return directory
