"""BlinkDL's RWKV-7 .pth files as a checkpoint of `emit.families.rwkv7`.

The tensors are the same under other names; there is no config, so sizes follow from shapes.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from emit.pth import WORDS, Pth, Tensor, bad

HEAD = 64  # the group norm's epsilon, 64e-5, is head_dim × norm_eps for heads of this size alone
VOCABULARY = "rwkv_vocab_v20230424.txt"

_TOP = {
    "emb.weight": "model.embeddings.weight",
    "ln_out.weight": "model.norm.weight",
    "ln_out.bias": "model.norm.bias",
    "head.weight": "lm_head.weight",
}
_PARTS = {
    **{f"att.x_{each}": f"attn.x_{each}" for each in "rwkvag"},
    **{f"att.{each}": f"attn.{each}" for each in ("k_k", "k_a", "r_k")},
    **{
        f"att.{theirs}.weight": f"attn.{each}_proj.weight"
        for theirs, each in (("receptance", "r"), ("key", "k"), ("value", "v"), ("output", "o"))
    },
    **{
        f"att.{each}{digit}": f"attn.{each}_lora.lora.{layer}"
        for each in "wavg"
        for digit, layer in (("0", "2.bias"), ("1", "0.weight"), ("2", "2.weight"))
        if f"{each}{digit}" != "g0"
    },
    **{f"{norm}.{kind}": f"{ours}.{kind}" for norm, ours in (
        ("ln0", "pre_norm"), ("ln1", "attn_norm"), ("ln2", "ffn_norm"), ("att.ln_x", "attn.g_norm"),
    ) for kind in ("weight", "bias")},
    "ffn.x_k": "ffn.x_k",
    "ffn.key.weight": "ffn.key.weight",
    "ffn.value.weight": "ffn.value.weight",
}  # fmt: skip


def canonical(name: str) -> str | None:
    """The checkpoint name of `emit.families.rwkv7` for one of BlinkDL's; None for no such tensor.

    "" for the value residual of the first layer, which is there and not used.
    """
    if name in _TOP:
        return _TOP[name]
    match = re.fullmatch(r"blocks\.(0|[1-9]\d{0,3})\.(.+)", name)
    if match is None or match[2] not in _PARTS or (match[2][:3] == "ln0" and match[1] != "0"):
        return None
    if match[1] == "0" and match[2] in ("att.v0", "att.v1", "att.v2"):
        return ""
    return f"model.layers.{match[1]}.{_PARTS[match[2]]}"


def laid_out(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape under the canonical `name` of a tensor with BlinkDL's `shape`, before transposing.

    Vectors lose the axes of size 1 before them, except the six mixtures of time mixing.
    """
    size = tuple(n for n in shape[:-1] if n != 1) + shape[-1:]
    if re.search(r"\.attn\.x_.$", name):
        return (1, 1, *size)
    return shape[-2:] if name.endswith(".r_k") else size


def config(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Any]:
    """The config.json that the shapes imply. Raises EmitError."""

    def shape(name: str, rank: int) -> tuple[int, ...]:
        found = tensors[name].shape if name in tensors else ()
        if len(found) < rank:
            raise bad(path, f"{name} is missing or no matrix; expected an RWKV-7 model")
        return found[-rank:]

    vocab, hidden = shape("emb.weight", 2)
    heads, size = shape("blocks.0.att.r_k", 2)
    if size != HEAD:
        raise bad(path, f"blocks.0.att.r_k has heads of {size}, expected {HEAD}")
    blocks = [int(name.split(".")[1]) for name in tensors if re.match(r"blocks\.\d{1,4}\.", name)]
    layers = max(blocks) + 1
    ranks = {
        f"{word}_low_rank_dim": shape(f"blocks.0.att.{each}1", 2)[1]
        for each, word in (("w", "decay"), ("a", "a"), ("g", "gate"))
    }
    # A single layer has no value residual, so any number is right.
    ranks["v_low_rank_dim"] = shape("blocks.1.att.v1", 2)[1] if layers > 1 else 1
    return {
        "model_type": "rwkv7",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "attention_hidden_size": heads * size,
        "head_dim": size,
        "num_heads": heads,
        "intermediate_size": shape("blocks.0.ffn.key.weight", 2)[0],
        "num_hidden_layers": layers,
        **ranks,
        "norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
    }


def convert(path: Path, out: Path) -> None:
    """Write config.json and model.safetensors of the .pth file at `path` into the directory `out`.

    The vocabulary goes with them where it lies beside the file.
    One tensor at a time is in memory. Raises EmitError: the file is not RWKV-7, or is damaged.
    """
    opened = Pth(path)
    names = {name: canonical(name) for name in opened.tensors}
    if unknown := sorted(name for name, ours in names.items() if ours is None):
        raise bad(path, f"{len(unknown)} tensors are none of RWKV-7's: {', '.join(unknown[:5])}")
    settings = config(opened.tensors, path)
    table: dict[str, tuple[str, str, tuple[int, ...]]] = {}
    for name, ours in names.items():
        if ours:
            tensor = opened.tensors[name]
            shape = laid_out(ours, tensor.shape)
            table[ours] = (name, WORDS[tensor.dtype], shape[::-1] if _turned(ours) else shape)

    def arrays() -> Iterator[np.ndarray]:
        for ours, (name, _, _) in table.items():
            array = opened.read(name)
            array = array.reshape(laid_out(ours, array.shape))
            yield np.ascontiguousarray(array.T) if _turned(ours) else array

    out.mkdir(parents=True, exist_ok=True)
    _write(out / "model.safetensors", {o: (w, s) for o, (_, w, s) in table.items()}, arrays())
    if (path.parent / VOCABULARY).is_file():
        shutil.copyfile(path.parent / VOCABULARY, out / VOCABULARY)
    (out / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _turned(name: str) -> bool:
    """Whether BlinkDL holds this projection as [inputs, outputs]."""
    return bool(re.search(r"_lora\.lora\.[02]\.weight$", name))


def _write(
    path: Path, table: Mapping[str, tuple[str, tuple[int, ...]]], arrays: Iterator[np.ndarray]
) -> None:
    """A safetensors file, written beside `path` and then renamed."""
    sizes = {word: dtype.itemsize for dtype, word in WORDS.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (word, shape) in table.items():
        end = at + sizes[word] * math.prod(shape)
        header[name] = {"dtype": word, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    part = path.with_suffix(".part")
    try:
        with part.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for array in arrays:
                file.write(array.tobytes())
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)
