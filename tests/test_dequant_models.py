"""Whole checkpoints that a quantising library makes of a transformers model and saves itself."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantised

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]


def model(directory: Path) -> Any:
    """The small model, as transformers loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(quantised.plain(directory))


def projections(found: Any) -> dict[str, Any]:
    """The projections of a model by name."""
    return {name: module for name, module in found.named_modules() if name.endswith("_proj")}


def test_compressed_tensors_of_mixed_precision(tmp_path: Path) -> None:
    import torch
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    own, out = model(tmp_path / "plain"), tmp_path / "saved"
    four = {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}
    eight = {"num_bits": 8, "type": "float", "strategy": "channel"}
    tokens = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    groups: Any = {
        "a": {"targets": ["re:.*out_proj"], "weights": four},
        "b": {"targets": ["Linear"], "weights": eight, "input_activations": tokens},
    }
    config = QuantizationConfig(config_groups=groups, ignore=["lm_head", quantised.KEPT])
    apply_quantization_config(own, config, show_progress=False)
    generator = torch.Generator().manual_seed(0)
    for name, module in projections(own).items():
        if name != quantised.KEPT:
            module.weight_scale.data.uniform_(0.01, 0.05, generator=generator)
        if "out" in name:
            module.weight_zero_point.data.random_(-8, 8, generator=generator)
    compressor: Any = ModelCompressor.from_pretrained_model(own)
    compressor.compress_model(own)
    own.save_pretrained(out)
    compressor.update_config(str(out))
    compressor.decompress_model(own)
    means = {
        f"{name}.weight": module.weight.detach().float().numpy()
        for name, module in projections(own).items()
        if name != quantised.KEPT
    }
    assert len(means) == 3
    quantised.check(out, means)
    quantised.converts(out, means)


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
def test_bitsandbytes_modules(tmp_path: Path, kind: str) -> None:
    """The modules that transformers puts in, saved as their own state_dict says."""
    import torch
    from bitsandbytes import functional
    from bitsandbytes.nn import modules
    from transformers import BitsAndBytesConfig

    own, parts, means = model(tmp_path / "plain"), {}, {}
    keys: Any = {"load_in_8bit": True}
    if kind != "int8":
        keys = {"load_in_4bit": True, "bnb_4bit_quant_type": kind}
        keys["bnb_4bit_use_double_quant"] = True
    for name, linear in projections(own).items():
        if name == quantised.KEPT:
            continue
        sizes = linear.in_features, linear.out_features
        made: Any = (
            modules.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
            if kind == "int8"
            else modules.Linear4bit(*sizes, bias=False, quant_type=kind, compress_statistics=True)
        )
        made.load_state_dict({"weight": linear.weight})
        made = made.to("cpu")
        if kind == "int8":
            mean = functional.int8_vectorwise_dequant(made.weight.data, made.weight.SCB)
        else:
            assert made.weight.quant_state is not None
            mean = functional.dequantize_4bit(made.weight.data, made.weight.quant_state)
        saved = made.state_dict()
        parts[name] = {word: quantised.array(tensor) for word, tensor in saved.items()}
        means[f"{name}.weight"] = mean.to(torch.float32).numpy()
    settings = json.loads(json.dumps(BitsAndBytesConfig(**keys).to_dict(), default=str))
    quantised.rewrite(tmp_path / "plain", settings, parts)
    assert all(np.abs(mean).max() > 0 for mean in means.values())
    quantised.check(tmp_path / "plain", means, packs=kind != "int8")
    quantised.converts(tmp_path / "plain", means)


@pytest.mark.parametrize("kind", ["NVFP4", "FP8"])
def test_modelopt_export(tmp_path: Path, kind: str) -> None:
    quantization = pytest.importorskip(
        "modelopt.torch.quantization", reason="nvidia-modelopt is not installed"
    )
    import torch
    from safetensors.torch import load_file

    export = pytest.importorskip("modelopt.torch.export", reason="it needs accelerate")
    own = model(tmp_path / "plain")
    config = getattr(quantization, f"{kind}_DEFAULT_CFG")
    quantization.quantize(own, config, lambda m: m(torch.arange(9)[None]))
    export.export_hf_checkpoint(own, dtype=torch.float32, export_dir=str(tmp_path / "saved"))
    qtensor = importlib.import_module("modelopt.torch.quantization.qtensor")
    held, means = load_file(tmp_path / "saved" / "model.safetensors"), {}
    for name in (f"{name}.weight" for name in projections(own)):
        codes, scale = held[name], held[f"{name}_scale"]
        shape = torch.Size((codes.shape[0], codes.shape[1] * (2 if kind == "NVFP4" else 1)))
        made = getattr(qtensor, f"{kind}QTensor")(shape, torch.float32, codes)
        more: Any = {}
        if kind == "NVFP4":
            more = {"double_scale": held[f"{name}_scale_2"], "block_sizes": {-1: 16}}
        means[name] = made.dequantize(torch.float32, scale=scale, **more).numpy()
    assert len(means) == 4
    quantised.check(tmp_path / "saved", means)
    quantised.converts(tmp_path / "saved", means)
