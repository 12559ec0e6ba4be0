"""The settings that the libraries' own classes write are read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from emit.dequant import METHODS
from emit.dequant.coded import KEY
from emit.errors import EmitError


def reads(settings: Any) -> Any:
    """The scheme of settings as JSON has them."""
    given = json.loads(json.dumps(settings, default=str))
    return METHODS[given["quant_method"]]({KEY: given})


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("GPTQConfig", {"bits": 4, "dataset": "c4", "tokenizer": "x"}),
        ("GPTQConfig", {"bits": 8, "act_group_aware": False, "desc_act": True}),
        ("GPTQConfig", {"bits": 3, "format": "gptq_v2", "meta": {"quantizer": ["gptqmodel:7.7"]}}),
        ("AwqConfig", {}),
        ("AwqConfig", {"format": "gemv", "modules_to_not_convert": ["lm_head"]}),
        ("BitsAndBytesConfig", {"load_in_8bit": True}),
        ("BitsAndBytesConfig", {"load_in_4bit": True}),
        ("BitsAndBytesConfig", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
        ("Mxfp4Config", {}),
        ("FineGrainedFP8Config", {"activation_scheme": "static"}),
    ],
)
def test_transformers(name: str, keys: dict[str, Any]) -> None:
    import transformers

    assert reads(getattr(transformers, name)(**keys).to_dict())


@pytest.mark.oracle
def test_compressed_tensors() -> None:
    """Six bit floats are all that is not read."""
    import torch
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

    names = [name for name, given in PRESET_SCHEMES.items() if given]
    assert len(names) > 20
    for name in names:
        one = preset_name_to_scheme(name, ["Linear"])
        one.format = infer_module_format(torch.nn.Linear, one)
        config = QuantizationConfig(config_groups={"group_0": one}, format=one.format.value)
        given = config.model_dump(mode="json") | {"quantization_status": "compressed"}
        given |= {"version": "0.20.1", "sparsity_config": {}, "transform_config": {}}
        if "MXFP6" in name:
            with pytest.raises(EmitError, match='format = "mxfp6-pack-quantized", expected one of'):
                reads(given)
        else:
            assert reads(given).of("model.layers.0.mlp.up_proj") is not None, name
