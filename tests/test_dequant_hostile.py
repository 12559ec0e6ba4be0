"""Whatever a quantised checkpoint says, it reads as numbers or is refused in one line."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import quantised
import test_dequant_awq
import test_dequant_bitsandbytes
import test_dequant_compressed_tensors
import test_dequant_gptq
import test_dequant_modelopt

from emit.checkpoint import open_checkpoint
from emit.dequant import dequantized, plain
from emit.errors import EmitError

WAYS = {
    "gptq": (test_dequant_gptq.SETTINGS, test_dequant_gptq.by_hand(4, 32, 1, [0, 1] * 64)),
    "awq": (test_dequant_awq.SETTINGS, test_dequant_awq.by_hand(32, False)),
    "gemv": (
        test_dequant_awq.SETTINGS | {"version": "gemv"},
        test_dequant_awq.by_hand(32, True),
    ),
    "nf4": (
        test_dequant_bitsandbytes.FOUR,
        test_dequant_bitsandbytes.by_hand("nf4", 64, True),
    ),
    "int8": (test_dequant_bitsandbytes.EIGHT, test_dequant_bitsandbytes.eight_by_hand),
    "packed": (
        test_dequant_compressed_tensors.PACKED,
        test_dequant_compressed_tensors.by_hand(4, 32, True),
    ),
    "nvfp4": (
        test_dequant_modelopt.raw("NVFP4"),
        test_dequant_modelopt.by_hand("NVFP4", 16),
    ),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": None, "expert_dtype": "fp4"},
        test_dequant_modelopt.by_hand("FP8", 0),
    ),
    "mxfp4": ({"quant_method": "mxfp4"}, test_dequant_modelopt.by_hand("MXFP8", 32)),
}
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 4, 8, 31, 2**31, 2**70, 0.5, float("nan"), 1e400, "", "x",
    "gptq", "group", "re:(", "re:.*", [], [1], ["re:a*"], [[]], {}, {"a": 1}, {"weights": {}},
    [0, 0], [2**40, 1], "int", "float", "tensor", "block",
)  # fmt: skip
DTYPES = (np.int8, np.uint8, np.int32, np.int64, np.float16, np.float32, ml_dtypes.bfloat16)


def mutate_settings(rng: random.Random, config: Any) -> None:
    """Change one thing, at any depth."""
    while True:
        keys = list(config) if isinstance(config, dict) else list(range(len(config)))
        key = rng.choice([*keys, "new"]) if isinstance(config, dict) else rng.choice(keys)
        deeper = config.get(key) if isinstance(config, dict) else config[key]
        if not (isinstance(deeper, dict | list) and deeper and rng.random() < 0.7):
            config[key] = copy.deepcopy(rng.choice(VALUES))
            return
        config = deeper


def mutate_tensors(rng: random.Random, stored: quantised.Parts) -> None:
    """Change one tensor: gone, another type, another shape, other bits."""
    name = rng.choice([n for n in stored if ".mixer." in n])
    good, kind = stored[name], rng.randrange(5)
    if kind == 0:
        del stored[name]
    elif kind == 1:
        with np.errstate(all="ignore"):
            stored[name] = good.astype(np.float32).astype(rng.choice(DTYPES))
    elif kind == 2:
        shape = [rng.choice([0, 1, 2, n, n + 1]) for n in good.shape] + [1] * rng.randrange(2)
        stored[name] = np.resize(good, shape)
    elif kind == 3:
        stored[name] = good[..., None] if rng.random() < 0.5 else good.reshape(-1)
    else:
        raw = np.frombuffer(rng.randbytes(good.nbytes), good.dtype)
        stored[name] = raw.reshape(good.shape).copy()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("way", WAYS)
def test_it_reads_or_is_refused(tmp_path: Path, way: str) -> None:
    settings, write = WAYS[way]
    directory = quantised.plain(tmp_path / "checkpoint")
    quantised.quantise(directory, settings, write)
    config = json.loads((directory / "config.json").read_text())
    stored, rng = quantised.tensors(directory), random.Random(1)
    refusals = 0
    for _ in range(150):
        ours, tensors = copy.deepcopy(config), dict(stored)
        if rng.random() < 0.6:
            mutate_settings(rng, ours["quantization_config"])
        else:
            mutate_tensors(rng, tensors)
        (directory / "config.json").write_text(json.dumps(ours))
        quantised.save(directory, tensors)
        try:
            opened = open_checkpoint(directory)
            plain(opened.config)
            source = dequantized(opened, opened.config)
            for name in source.tensors:
                assert source.read(name).shape == source.tensors[name].shape
        except EmitError as error:
            assert "\n" not in str(error) and len(str(error)) < 1500
            refusals += 1
    assert refusals > 30
