"""The models that peers.py measures: random checkpoints of published shapes, and their files.

WORK/checkpoints/MODEL is written by transformers; WORK/bundles/TYPE holds what `doit build` makes
of it, WORK/gguf/MODEL what llama.cpp makes of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from builds import ROOT, build
from peer_llama import NoPeer, make

PREFIX = 32  # tokens that a decode comes after


@dataclass(frozen=True)
class PeerModel:
    """A recipe's shape with some sizes changed. `shapes` are compiled, by slots; `length` is how
    many positions a text has; `dtype` how the checkpoint is stored; `prompts` the lengths read."""

    recipe: str
    shapes: dict[int, str]
    length: int
    changed: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    prompts: tuple[int, ...] = (256, 1024)

    @property
    def config(self) -> dict[str, Any]:
        """config.json's content, without its name of the family."""
        path = ROOT / "recipes" / "models" / f"{self.recipe}.yaml"
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
        return {"model_type": read["family"], **read["config"], **self.changed}


MODELS = {
    "mamba2-130m": PeerModel(
        "mamba2-130m", {1: "b1-p32+256", 8: "b8-p32"}, 1152
    ),
    "falcon-h1-90m": PeerModel(
        "falcon-h1-tiny-90m",
        {1: "b1-p32+256-c1152", 8: "b8-p32-c1152"},
        1152,
        # llama.cpp's conversion leaves the second out where embeddings are tied.
        {"embedding_multiplier": 1.0, "lm_head_multiplier": 1.0},
    ),
    "qwen3-next-4-layers": PeerModel(
        "qwen3-next-80b-a3b-instruct",
        {1: "b1-p32-c384"},
        384,
        {"num_hidden_layers": 4, "num_experts": 32, "vocab_size": 32000, "eos_token_id": 2,
         "bos_token_id": 1},
        "bfloat16",
        (),
    ),
}  # fmt: skip
# Which files of llama.cpp hold a type; the first is what is compared.
GGUF = {"f32": ("f32",), "bf16": ("bf16",), "int8": ("q8_0",), "int4": ("q4_0", "q4_1", "q4_K")}
LAST = ("out_proj", "o_proj", "down_proj")  # matrices that end a residual branch
TORCH = {"f32": "float32", "bf16": "bfloat16"}


def checkpoint(name: str, work: Path) -> Path:
    """The checkpoint of a model, made if it is missing: seed 0, weights of variance 1/inputs, of a
    branch's last matrix less, so that rounding is not amplified from layer to layer."""
    out = work / "checkpoints" / name
    if (out / "config.json").exists():
        return out
    try:
        import torch
        import transformers
    except ImportError as missing:
        sys.exit(f"error: {missing}: checkpoints are written by it: pip install -e '.[oracle]'")

    model = MODELS[name]
    fields = dict(model.config)
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(0)
    dtype = getattr(torch, model.dtype)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for key, parameter in made.named_parameters():
            if parameter.ndim > 1 and key.endswith(("weight", "_proj")):
                last = any(part in key for part in LAST)
                branches = 2 * config.num_hidden_layers if last else 1
                parameter.normal_(std=(parameter.shape[-1] * branches) ** -0.5)
    made.save_pretrained(out)
    return out


def multiplied(path: Path) -> int:
    """Elements of a checkpoint's matrices that every token is multiplied with: not those of the
    embeddings, nor of the output layer, which sees the last token of a prompt alone."""
    from safetensors import safe_open

    found = 0
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "np") as opened:
            for key in opened.keys():  # noqa: SIM118
                shape = opened.get_slice(key).get_shape()
                if len(shape) == 2 and "embed" not in key and "lm_head" not in key:
                    found += shape[0] * shape[1]
    return found


def bundle_home(work: Path, kind: str) -> Path:
    """Where bundles of a weight type are built."""
    return work / "bundles" / kind


def bundle(name: str, kind: str, slots: int, work: Path) -> Path:
    """The bundle of a model, built or not."""
    shape = MODELS[name].shapes[slots]
    return bundle_home(work, kind) / "build" / name / "cpu" / shape


def built(name: str, kind: str, work: Path) -> bool:
    """Whether every bundle of a model at a type is there."""
    found = MODELS[name].shapes
    return all((bundle(name, kind, n, work) / "manifest.json").exists() for n in found)


def prepare(
    name: str, types: list[str], work: Path, options: list[str], say: Callable[[str], None]
) -> None:
    """Makes what is missing or outdated; what a build or llama.cpp refuses is said and left out.

    `options` are for `doit build`.
    """
    source = checkpoint(name, work)
    for kind in types:
        for shape in MODELS[name].shapes.values():
            words = [*options, f"model={source}", "target=cpu", f"weights={kind}"]
            words += [f"shape={shape}"]
            try:
                made = build(words, bundle_home(work, kind), work / "cache")
                say(f"{made.relative_to(work)}")
            except SystemExit as refused:
                say(f"left out: {name} {kind}: {refused}")
                break
        for each in GGUF[kind]:
            try:
                make(work / "llama", source, each, work / "gguf" / name)
                say(f"gguf/{name}/{each}.gguf")
            except NoPeer as missing:
                say(f"left out: {missing}")
