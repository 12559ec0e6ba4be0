"""Quantised checkpoints, read as the numbers they stand for.

What a checkpoint is quantised by stands in its config, `quantization_config` or MLX's
`quantization`; nothing is guessed from its tensors. Each method is a module of its name:
`read(config) -> Scheme`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from emit.dequant import (
    awq,
    bitsandbytes,
    compressed_tensors,
    fp8,
    ggml,
    gptq,
    mlx,
    modelopt,
    mxfp4,
)
from emit.dequant.coded import KEY, Dequantized, Scheme
from emit.errors import EmitError
from emit.weights import Source

# quant_method -> its reader, of the whole config
METHODS: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "awq": awq.read,
    "bitsandbytes": bitsandbytes.read,
    "compressed-tensors": compressed_tensors.read,
    "fp8": fp8.read,
    "gptq": gptq.read,
    "modelopt": modelopt.read,
    "mxfp4": mxfp4.read,
    ggml.METHOD: ggml.read,
}


def scheme(config: Mapping[str, Any]) -> Scheme | None:
    """What `config` says the checkpoint is quantised by, None for nothing.

    Raises EmitError naming the method or the key that is not supported.
    """
    given = config.get(KEY)
    read = _reader(config)
    if read is not None:
        return read(config)
    if given is not None:
        known = ", ".join(f'"{name}"' for name in sorted(METHODS))
        raise EmitError(
            f"config.json: {KEY} = {json.dumps(given)[:200]} is not supported; expected the"
            f" quant_method {known}, or a checkpoint that is not quantised"
        )
    return None


def _reader(config: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Scheme] | None:
    """That of the supported method which `config` names; MLX's is a key of its own."""
    if config.get(mlx.NAME) is not None:
        return mlx.read
    given = config.get(KEY)
    method = given.get("quant_method") if isinstance(given, Mapping) else None
    return METHODS.get(method) if isinstance(method, str) else None


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` as of the same model not quantised; a method that is not known stays in it.

    Raises EmitError where a known method is used in a way that is not supported.
    """
    if _reader(config) is None:
        return dict(config)
    scheme(config)
    return {key: value for key, value in config.items() if key not in (KEY, mlx.NAME)}


def dequantized(source: Source, config: Mapping[str, Any]) -> Source:
    """The checkpoint `source` with every tensor as the numbers it stands for."""
    found = scheme(config)
    return source if found is None else Dequantized.of(source, found.coded(source))
