"""Checkpoints in MLX's layout: tiny ones, made by mlx-lm, and the handed ones and what they say.

`python tests/mlx_made.py` derives `tests/data/references/mlx.json` again: what transformers
generates from the numbers that the handed ones stand for, written in its own layout.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cases
import numpy as np
import references
import safetensors.numpy
from arranged import joined
from cases.case import Case

HANDED = tuple(
    f"{path.parent.name}/{path.name}" for path in sorted(cases.HANDED.glob("*/mlx_*_*_*"))
)
PROMPTS = (9, 40)  # tokens of those of the handed prompts that are recorded


@dataclass(frozen=True)
class Made:
    """A case whose matrices groups of 32 divide, in part, and keys that mlx-lm wants besides.

    `wrong` is why mlx-lm computes other numbers than the family's; `folded` says that its layout
    has multipliers in the weights, `joined` that published files have the experts so, `nested`
    that the file is that of a model with images.
    """

    case: Case
    keys: Mapping[str, Any] = field(default_factory=dict)
    wrong: str | None = None
    folded: bool = False
    joined: bool = False
    nested: bool = False

    @property
    def id(self) -> str:
        """Of a test."""
        return self.case.id.replace("/", "-")


MAMBA = {"hidden_size": 64, "intermediate_size": 128, "time_step_rank": 32}
JAMBA = {"hidden_size": 64, "intermediate_size": 96, "mamba_dt_rank": 32}
FALCON = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "mamba_d_ssm": 96}
FALCON |= {"mamba_d_head": 16}
NEMOTRON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 64,
    "mamba_head_dim": 16,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
    "num_hidden_layers": 4,
}
QWEN = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
QWEN |= {"shared_expert_intermediate_size": 64, "head_dim": 16}
KIMI = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "kv_lora_rank": 32}
KIMI |= {"linear_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32, "qk_head_dim": 38}
PLAMO = {"hidden_size": 64, "intermediate_size": 96, "hidden_size_per_head": 16}
# mlx-lm takes its default group for `lora.2`, so that a rank of 32 alone would stop it.
RWKV = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "head_dim": 32}
RWKV |= {"a_low_rank_dim": 64, "decay_low_rank_dim": 64, "v_low_rank_dim": 7}
RWKV |= {"norm_eps": 2e-5}  # with which the group norm's is mlx-lm's fixed 64e-5
# Its blocks' norms have an epsilon of 1e-5 in mlx-lm whatever the config says.
GEMMA = {"hidden_size": 64, "intermediate_size": 128, "rms_norm_eps": 1e-5}

SUM = "it weighs experts to a sum of 1"
KEY = "it has key_multiplier in no place, and attention_in_multiplier not in the values"
MADE = (
    Made(Case("made", "mamba", MAMBA)),
    Made(Case("made", "falcon_mamba", MAMBA)),
    Made(Case("made", "mamba2", {"hidden_size": 64, "head_dim": 32}), {"intermediate_size": 128}),
    Made(Case("made", "jamba", JAMBA), wrong=SUM),
    Made(Case("made", "falcon_h1", FALCON), folded=True, wrong=KEY),
    Made(
        Case("made_tied", "falcon_h1", FALCON | {"tie_word_embeddings": True}),
        folded=True,
        wrong=KEY,
    ),
    Made(Case("made", "nemotron_h", NEMOTRON)),
    Made(
        Case("made", "qwen3_next", QWEN, dialect="hub"),
        {"mlp_only_layers": [], "norm_topk_prob": True},
    ),
    Made(
        Case("made", "qwen3_5", QWEN, dialect="hub"),
        {"model_type": "qwen3_5", "full_attention_interval": 2},
    ),
    Made(
        Case("made_nested", "qwen3_5", QWEN, dialect="hub"),
        {"model_type": "qwen3_5_text", "full_attention_interval": 2},
        nested=True,
    ),
    Made(
        Case("made", "qwen3_5_moe", QWEN, dialect="hub"),
        {"model_type": "qwen3_5_moe", "full_attention_interval": 2},
        joined=True,
    ),
    Made(Case("made", "kimi_linear", KIMI, dialect="hub")),
    Made(
        Case("made", "recurrent_gemma", GEMMA, "hub"),
        {"attention_bias": False},
    ),
    Made(Case("made", "plamo2", PLAMO)),
    Made(Case("made", "rwkv7", RWKV)),
)


def write(row: Made, directory: Path, **settings: Any) -> tuple[Path, Path]:
    """The case's checkpoint, and MLX's of it, quantised where there are `settings`."""
    from mlx_lm import utils

    plain, made = directory / "plain", directory / "mlx"
    cases.build(row.case, plain)
    tensors = cases.tensors(row.case)
    config = json.loads((plain / "config.json").read_text()) | dict(row.keys)
    if row.joined:
        cases.write_tensors(plain, joined(tensors))
    if row.nested:
        inner = {n.replace("model.", "model.language_model."): t for n, t in tensors.items()}
        cases.write_tensors(plain, inner)
        config = {"model_type": row.case.family, "text_config": config}
    (plain / "config.json").write_text(json.dumps(config))
    model, config = utils.load_model(plain, lazy=True)
    if settings:
        model, config = utils.quantize_model(model, config, **settings)
    utils.save_model(made, model)
    utils.save_config(config, made / "config.json")
    return plain, made


def dequantised(directory: Path, out: Path) -> dict[str, np.ndarray]:
    """Write the MLX checkpoint's numbers, by mlx.core.dequantize in float32, to `out`.

    Names and shapes are as they were; returns the tensors.
    """
    import mlx.core

    mx: Any = mlx.core
    config = json.loads((directory / "config.json").read_text())
    settings = config.pop("quantization")
    del config["quantization_config"]
    held: dict[str, Any] = {}
    for path in directory.glob("*.safetensors"):
        held |= mx.load(str(path))
    found: dict[str, np.ndarray] = {}
    for name, tensor in held.items():
        module, _, word = name.rpartition(".")
        scales = held.get(f"{module}.scales")
        if word in ("scales", "biases"):
            continue
        if scales is None or word != "weight":
            found[name] = np.array(tensor.astype(mx.float32))
            continue
        common = {k: settings[k] for k in ("group_size", "bits", "mode")}
        said = settings.get(module, common)
        biases = held.get(f"{module}.biases")
        wide = mx.dequantize(tensor, scales, biases, **said, dtype=mx.float32)
        found[name] = np.array(wide)
    out.mkdir(exist_ok=True)
    (out / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(found, out / "model.safetensors", metadata={"format": "mlx"})
    return found


def hugging_face(directory: Path, out: Path) -> Path:
    """A handed checkpoint's numbers in the layout of transformers, for its own loader."""
    tensors = dequantised(directory, out)
    config = json.loads((out / "config.json").read_text())
    undo = {"falcon_h1": _unfolded, "kimi_linear": _kimi, "nemotron_h": _nemotron}
    family = directory.parent.name
    tensors = undo.get(family, lambda _, tensors: tensors)(config, tensors)
    for name in [n for n in tensors if "conv1d.weight" in n]:
        tensors[name] = tensors[name].swapaxes(1, 2)
    original = safetensors.numpy.load_file(
        cases.HANDED / family / "checkpoint" / "model.safetensors"
    )
    assert tensors.keys() == original.keys()
    for name, tensor in tensors.items():
        assert tensor.shape == original[name].shape, name
        tensors[name] = np.ascontiguousarray(tensor)
    safetensors.numpy.save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def _unfolded(config: Mapping[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Without the multipliers of falcon_h1."""
    inner = config["mamba_d_ssm"]
    maps = config["mamba_n_groups"] * config["mamba_d_state"]
    sizes = (inner, inner, maps, maps, config["mamba_n_heads"])
    factors = {
        "embed_tokens": config["embedding_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "q_proj": config["attention_in_multiplier"],
        "k_proj": config["attention_in_multiplier"],
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "gate_proj": config["mlp_multipliers"][0],
        "down_proj": config["mlp_multipliers"][1],
        "in_proj": config["ssm_in_multiplier"]
        * np.repeat(config["ssm_multipliers"], sizes)[:, None],
    }
    out = dict(tensors)
    for name, tensor in tensors.items():
        factor = factors.get(name.split(".")[-2])
        if factor is not None:
            out[name] = (tensor.astype(np.float64) / factor).astype(np.float32)
    return out


def _unstacked(
    tensors: Mapping[str, np.ndarray], words: Mapping[str, str], experts: str
) -> dict[str, np.ndarray]:
    """Stacks `switch_mlp.<word>` as one tensor an expert, `experts.<e>.<words[word]>`."""
    out = {}
    for name, tensor in tensors.items():
        module, found, word = name.partition(".switch_mlp.")
        if not found:
            out[name] = tensor
            continue
        module = module.removesuffix(".mlp") + (experts if module.endswith(".mlp") else "")
        for e, one in enumerate(tensor):
            out[f"{module}.experts.{e}.{words[word.split('.')[0]]}.weight"] = one
    return out


def _nemotron(config: Mapping[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    del config
    return _unstacked(tensors, {"fc1": "up_proj", "fc2": "down_proj"}, "")


def _kimi(config: Mapping[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    sparse = {name.partition(".mlp.")[0] for name in tensors if ".mlp.gate." in name}
    words = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    out: dict[str, np.ndarray] = {}
    for name, tensor in _unstacked(tensors, words, ".block_sparse_moe").items():
        layer, found, rest = name.partition(".mlp.")
        if found:  # the library writes the dense first layer so too
            rest = rest.replace("e_score", "gate.e_score") if layer in sparse else rest
            out[f"{layer}.block_sparse_moe.{rest}"] = tensor
        elif ".embed_q." in name:
            values = tensors[name.replace("embed_q", "unembed_out")]
            both = np.concatenate([tensor.swapaxes(1, 2), values], axis=1)
            joint = both.reshape(-1, config["kv_lora_rank"])
            out[name.replace("embed_q", "kv_b_proj")] = joint
        elif ".unembed_out." not in name:
            out[name.replace("_conv.conv.", "_conv1d.")] = tensor
    return out


def main() -> None:
    """Derive the references of the handed checkpoints and write them."""
    lines = []
    for name in HANDED:
        family, kind = name.split("/")
        recorded = json.loads((cases.HANDED / family / "reference.json").read_text())
        texts = [row["prompt"] for row in recorded.values() if len(row["prompt"]) in PROMPTS]
        with tempfile.TemporaryDirectory() as scratch:
            checkpoint = hugging_face(cases.HANDED / name, Path(scratch) / "checkpoint")
            rows = references.by_library(checkpoint, texts, references.NEW_TOKENS)
        smallest = min(min(row.gaps) for row in rows)
        print(f"{name}: {len(rows)} prompts, smallest gap {smallest:.6f}")
        made = references.digest(cases.HANDED / name)
        shown = ",\n ".join(json.dumps(vars(row)) for row in rows)
        lines.append(f'"{family}-{kind}": {{"checkpoint": "{made}", "prompts": [\n {shown}\n]}}')
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    (references.DIRECTORY / "mlx.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
