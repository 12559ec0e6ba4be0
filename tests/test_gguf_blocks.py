"""Blocks of GGUF files, bit for bit against the package that writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import canonical

from emit.dequant import dequantized, ggml
from emit.dequant.coded import Dequantized
from emit.errors import EmitError
from emit.gguf_checkpoint import open_gguf
from emit.gguf_file import open_file

pytestmark = pytest.mark.oracle
KINDS = sorted(ggml.BLOCKS)


def library() -> Any:
    import gguf

    return gguf


def same(found: np.ndarray, wanted: np.ndarray) -> bool:
    """Equal bits, NaN for NaN."""
    bits = found.view(np.uint32) == wanted.view(np.uint32)
    return bool((bits | np.isnan(found) & np.isnan(wanted)).all())


@pytest.mark.parametrize("kind", KINDS)
def test_random_blocks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = library()
    block, size = ggml.BLOCKS[kind]
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]] == (block, size)
    raw = np.random.default_rng(5).integers(0, 256, (3, 40, 2 * size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind.upper()])
        monkeypatch.setattr(ggml, "SLICE", 7 * 2 * block)  # several slices, the last one short
        assert same(ggml.widen(raw, kind), wanted)
        packed = ggml.pack(raw, kind)
        packed.check(kind, wanted.shape)
        assert same(packed.widen(), wanted)
    raw[0, 0, -1] ^= 0x11
    with np.errstate(all="ignore"):
        assert not same(ggml.pack(raw, kind).widen(), wanted)


def write(path: Path, kinds: dict[str, str]) -> dict[str, np.ndarray]:
    """A mamba2 of two layers whose matrices have `kinds`; returns their numbers."""
    gguf = library()
    rng, hidden, heads, state = np.random.default_rng(3), 256, 4, 16
    inner, vocab = 2 * hidden, 64
    channels = inner + 2 * state
    writer = gguf.GGUFWriter(path, "mamba2")
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_group_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    shapes = {
        "token_embd.weight": (vocab, hidden),
        "output.weight": (vocab, hidden),
        "output_norm.weight": (hidden,),
        "blk.0.attn_norm.weight": (hidden,),
        "blk.0.ssm_in.weight": (inner + channels + heads, hidden),
        "blk.0.ssm_out.weight": (hidden, inner),
        "blk.0.ssm_conv1d.weight": (channels, 4),
        "blk.0.ssm_conv1d.bias": (channels,),
        "blk.0.ssm_dt.bias": (heads,),
        "blk.0.ssm_a": (heads, 1),
        "blk.0.ssm_d": (heads, 1),
        "blk.0.ssm_norm.weight": (1, inner),
    }
    numbers = {}
    for name, shape in shapes.items():
        kind = kinds.get(name)
        if kind is None:
            array = rng.standard_normal(shape).astype(np.float32)
            writer.add_tensor(name, -abs(array) if name.endswith("ssm_a") else array)
            continue
        word = gguf.GGMLQuantizationType[kind.upper()]
        block, size = ggml.BLOCKS[kind]
        raw = rng.integers(0, 60, (shape[0], shape[1] // block * size), dtype=np.uint8)
        writer.add_tensor(name, raw, raw_shape=raw.shape, raw_dtype=word)
        with np.errstate(all="ignore"):
            numbers[name] = gguf.quants.dequantize(raw, word)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return numbers


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_mixed_types(kind: str, tmp_path: Path) -> None:
    kinds = {"token_embd.weight": "q6_k", "blk.0.ssm_out.weight": "q8_0"}
    kinds["blk.0.ssm_in.weight"] = kind
    numbers = write(tmp_path / "x.gguf", kinds)
    checkpoint = open_gguf(tmp_path / "x.gguf")
    assert checkpoint.config["quantization_config"] == {"quant_method": "gguf"}
    _, found = canonical(checkpoint)
    names = {
        "blk.0.ssm_in.weight": "layers.0.mixer.in_proj.weight",
        "blk.0.ssm_out.weight": "layers.0.mixer.out_proj.weight",
        "token_embd.weight": "embeddings.weight",
    }
    source = dequantized(checkpoint, checkpoint.config)
    assert isinstance(source, Dequantized) and len(source.coded) == 3
    for name, ours in names.items():
        assert same(found[ours], numbers[name]), name
        coded = source.coded[f"backbone.{ours}"]
        assert coded.pack is not None
        assert same(coded.pack(*map(checkpoint.read, coded.parts)).widen(), numbers[name])


def test_files_that_gguf_writes_in_parts(tmp_path: Path) -> None:
    gguf = library()
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba2", split_max_tensors=1)
    arrays = {f"t{i}": np.full((2, 3), i, np.float32) for i in range(3)}
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    first = tmp_path / "x-00001-of-00003.gguf"
    file = open_file(first)
    for name, array in arrays.items():
        np.testing.assert_array_equal(file.read(name), array)
    (tmp_path / "x-00002-of-00003.gguf").unlink()
    with pytest.raises(EmitError, match=r"x-00002-of-00003\.gguf: no such file"):
        open_file(first)
