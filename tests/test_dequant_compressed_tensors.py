"""compressed-tensors checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import quantised
from quantised import Parts

Write = Callable[[np.ndarray], tuple[Parts, np.ndarray]]


def settings(form: str, **weights: Any) -> dict[str, Any]:
    """As the library writes a config of one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "format": form}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "format": form,
        "ignore": ["lm_head", quantised.KEPT],
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.20.1",
    }


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
PACKED = settings("pack-quantized", **INT4)


def words(numbers: list[int], count: int) -> np.ndarray:
    """Long integers as rows of i32, the lowest first."""
    return np.array(
        [[n >> 32 * i & 0xFFFFFFFF for i in range(count)] for n in numbers], np.uint32
    ).view(np.int32)


def by_hand(bits: int, group: int, symmetric: bool, index: list[int] | None = None) -> Write:
    """Writes packed integers one by one, as the format says."""

    def write(weight: np.ndarray) -> tuple[Parts, np.ndarray]:
        outputs, inputs = weight.shape
        rng, half = np.random.default_rng(bits), 2 ** (bits - 1)
        codes = rng.integers(-half, half, weight.shape)
        zeros = rng.integers(-half, half, (outputs, inputs // group)) * (not symmetric)
        scales = rng.uniform(0.01, 0.1, zeros.shape).astype(ml_dtypes.bfloat16)
        where = [i // group for i in range(inputs)] if index is None else index[:inputs]
        mean = np.zeros(weight.shape)
        for o, i in np.ndindex(weight.shape):
            g = where[i]
            mean[o, i] = (int(codes[o, i]) - int(zeros[o, g])) * float(scales[o, g])
        rows = [
            sum(int(code) + half << bits * i for i, code in enumerate(codes[o]))
            for o in range(outputs)
        ]
        parts: Parts = {
            "weight_packed": words(rows, -(-inputs * bits // 32)),
            "weight_scale": scales,
            "weight_shape": np.array(weight.shape),
        }
        if not symmetric:
            columns = [
                sum(int(zero) + half << bits * o for o, zero in enumerate(zeros[:, g]))
                for g in range(zeros.shape[1])
            ]
            parts["weight_zero_point"] = words(columns, -(-outputs * bits // 32)).T
        if index is not None:
            parts["weight_g_idx"] = np.array(where, np.int32)
        return parts, mean

    return write


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return quantised.plain(tmp_path / "checkpoint")


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", range(1, 9))
def test_reads_packed_integers(plain: Path, bits: int, symmetric: bool) -> None:
    given = INT4 | {"num_bits": bits, "symmetric": symmetric}
    means = quantised.quantise(
        plain, settings("pack-quantized", **given), by_hand(bits, 32, symmetric)
    )
    quantised.check(plain, means, packs=True)


@pytest.mark.parametrize("symmetric", [True, False])
def test_order_of_activations(plain: Path, symmetric: bool) -> None:
    rng = np.random.default_rng(0)
    index = [int(g) for g in rng.permutation(np.arange(64) // 32)] * 2
    given = settings("pack-quantized", **INT4, actorder="group")
    given["config_groups"]["group_0"]["weights"]["symmetric"] = symmetric
    means = quantised.quantise(plain, given, by_hand(4, 32, symmetric, index))
    quantised.check(plain, means, packs=False)
    name = f"{quantised.MODULES[0]}.weight_g_idx"
    wrong = np.array([2, *index[1:64]], np.int32)
    assert f"{name} holds a number that is none of" in quantised.damaged(plain, {name: wrong})


def test_the_usual_order_in_g_idx(plain: Path) -> None:
    usual = [i // 32 for i in range(128)]
    means = quantised.quantise(plain, PACKED, by_hand(4, 32, True, usual))
    quantised.check(plain, means, packs=True)


def test_mixed_groups(plain: Path) -> None:
    """A name, a pattern, a class, and what is ignored: each module has its own format."""
    first, second, third = quantised.MODULES
    four = {"weights": INT4, "format": "pack-quantized"}
    eight = {"weights": INT4 | {"num_bits": 8, "group_size": 64, "symmetric": False}}
    given = PACKED | {
        "format": "mixed-precision",
        "config_groups": {
            "a": {"targets": ["Linear"], "weights": INT4 | {"num_bits": 3}, **named("pack")},
            "b": {"targets": [r"re:.*\.(0|9)\.mixer.*"], **eight, **named("pack")},
            "c": {"targets": [first], **four},
        },
        "ignore": [r"re:.*layers\.1\.mixer\.in_.*", "lm_head"],
    }
    stored = quantised.tensors(plain)
    writers = {first: by_hand(4, 32, True), second: by_hand(8, 64, False)}
    writers[third] = by_hand(3, 32, True)
    parts, means = {}, {}
    for module, write in writers.items():
        parts[module], means[f"{module}.weight"] = write(stored[f"{module}.weight"])
    quantised.rewrite(plain, given, parts)
    quantised.check(plain, means, packs=True)
    quantised.converts(plain, means)


def named(word: str) -> dict[str, str]:
    return {"format": f"{word}-quantized"}


def test_tensors_of_activations_are_left_out(plain: Path) -> None:
    def write(weight: np.ndarray) -> tuple[Parts, np.ndarray]:
        parts, mean = by_hand(4, 32, True)(weight)
        one = np.ones(1, np.float32)
        return parts | {"input_scale": one, "input_global_scale": one, "output_scale": one}, mean

    quantised.converts(plain, quantised.quantise(plain, PACKED, write))


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"format": "marlin-24"}, 'format = "marlin-24", expected one of'),
        ({"format": None}, "format = null, expected one of"),
        ({"config_groups": {}}, "config_groups = {}, expected"),
        ({"config_groups": {"W4A16": ["Linear"]}}, "not the name of a preset"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config = "),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "transform_config = "),
        ({"quantization_status": "initialized"}, "quantization_status = "),
        ({"ignore": "lm_head"}, 'ignore = "lm_head", expected a list'),
        ({"ignore": ["re:("]}, "malformed"),
        ({"colour": 1}, "colour = 1 is not supported"),
    ],
)
def test_other_settings_are_refused(plain: Path, keys: dict[str, Any], line: str) -> None:
    quantised.quantise(plain, PACKED, by_hand(4, 32, True))
    groups = {"a": {"targets": ["Linear"], "weights": INT4}}
    quantised.setting(plain, **({"config_groups": groups} | keys))
    assert line in quantised.refused(plain)


@pytest.mark.parametrize(
    ("weights", "line"),
    [
        ({"num_bits": 16}, "expected what pack-quantized can hold"),
        ({"num_bits": "4"}, 'num_bits = "4", expected'),
        ({"type": "float"}, "expected what pack-quantized can hold"),
        ({"type": "complex"}, 'type "int" or "float"'),
        ({"symmetric": 1}, "symmetric true or false"),
        ({"strategy": "token"}, 'strategy = "token", expected'),
        ({"strategy": "block", "block_structure": [128]}, "block_structure = [128], expected"),
        ({"strategy": "block", "block_structure": "1x1"}, "what pack-quantized can hold"),
        ({"group_size": -1}, "group_size = -1, expected"),
        ({"group_size": 48}, "has groups of 48 of 64 inputs"),
        ({"actorder": "sideways"}, 'actorder = "sideways" is not supported'),
        ({"dynamic": True}, "dynamic = true is not supported"),
        ({"colour": 1}, "colour = 1 is not supported"),
    ],
)
def test_other_weights_are_refused(plain: Path, weights: dict[str, Any], line: str) -> None:
    quantised.quantise(plain, PACKED, by_hand(4, 32, True))
    groups = {"a": {"targets": ["Linear"], "weights": INT4 | weights}}
    assert line in quantised.refused(quantised.setting(plain, config_groups=groups))


def test_parts_must_go_together(plain: Path) -> None:
    quantised.quantise(plain, settings("pack-quantized", **INT4), by_hand(4, 32, True))
    good = quantised.tensors(plain)
    module = quantised.MODULES[0]
    codes, scales, shape = (f"{module}.weight_{w}" for w in ("packed", "scale", "shape"))
    for change, line in (
        ({scales: None}, f"{scales} is missing"),
        ({shape: None}, f"{shape} is missing"),
        ({shape: np.array([320, 2**40])}, "which is not [320, 1099511627776]"),
        ({shape: np.array([-320, 64])}, "which is not [-320, 64]"),
        ({shape: np.array([320, 64, 1])}, f"{shape} is i64[3]"),
        ({scales: good[scales][:, :1]}, f"{scales} is bf16[320, 1]"),
        ({codes: good[codes].view(np.uint8)}, f"{codes} is u8"),
    ):
        assert line in quantised.damaged(plain, change)


FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT8 = {"num_bits": 8, "type": "int"}
NV = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group"}
MX = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
LIBRARY: dict[str, tuple[str, dict[str, Any], bool]] = {
    f"int{bits}-{'sym' if symmetric else 'asym'}": (
        "pack-quantized",
        INT4 | {"num_bits": bits, "symmetric": symmetric},
        True,
    )
    for bits in (2, 3, 4, 5, 6, 7, 8)
    for symmetric in (True, False)
}
for _symmetric in (True, False):
    _word = "sym" if _symmetric else "asym"
    _given = {"symmetric": _symmetric, "strategy": "channel"}
    LIBRARY[f"int4-channel-{_word}"] = ("pack-quantized", INT8 | _given | {"num_bits": 4}, True)
    LIBRARY[f"int8-channel-{_word}"] = ("int-quantized", INT8 | _given, True)
    _given |= {"strategy": "group", "group_size": 16}
    LIBRARY[f"int8-group-{_word}"] = ("int-quantized", INT8 | _given, True)
    _given = {"symmetric": _symmetric, "strategy": "tensor"}
    LIBRARY[f"int8-tensor-{_word}"] = ("int-quantized", INT8 | _given, True)
    _given = {"symmetric": _symmetric, "strategy": "block", "block_structure": [48, 40]}
    LIBRARY[f"int8-block-{_word}"] = ("naive-quantized", INT8 | _given, False)
LIBRARY |= {
    "int4-tensor": ("pack-quantized", INT8 | {"num_bits": 4, "strategy": "tensor"}, True),
    "fp8-tensor": ("float-quantized", FLOAT8 | {"strategy": "tensor"}, False),
    "fp8-channel": ("float-quantized", FLOAT8 | {"strategy": "channel"}, False),
    "fp8-group": ("naive-quantized", FLOAT8 | {"strategy": "group", "group_size": 32}, False),
    "fp8-block": (
        "float-quantized",
        FLOAT8 | {"strategy": "block", "block_structure": [128, 40]},
        False,
    ),
    "nvfp4": ("nvfp4-pack-quantized", NV | {"group_size": 16}, True),
    "mxfp4": ("mxfp4-pack-quantized", MX, True),
    "mxfp8": ("mxfp8-quantized", MX | {"num_bits": 8, "scale_dtype": "torch.uint8"}, False),
}


def by_library(form: str, given: dict[str, Any], kind: str) -> Write:
    """Its compressor writes; its dequantize, of scales in float32, says what that stands for."""
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    args = QuantizationArgs(**given)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor: Any = BaseCompressor.get_value_from_registry(form)
    four, mx = given["type"] == "float" and given["num_bits"] == 4, form.startswith("mx")

    def grid(weight: np.ndarray) -> tuple[int, ...]:
        outputs, inputs = weight.shape
        if given["strategy"] == "block":
            rows, columns = given["block_structure"]
            return -(-outputs // rows), -(-inputs // columns)
        strategies = {"tensor": (1,), "channel": (outputs, 1)}
        return strategies.get(given["strategy"]) or (outputs, inputs // given["group_size"])

    def write(weight: np.ndarray) -> tuple[Parts, np.ndarray]:
        rng = np.random.default_rng(5)
        scales = torch.from_numpy(rng.uniform(0.02, 0.2, grid(weight)).astype(np.float32))
        if mx:
            scales = 2.0 ** torch.floor(torch.log2(scales))
        elif not four:
            scales = scales.to(getattr(torch, kind)).float()
        held: dict[str, Any] = {
            "weight": torch.from_numpy(weight),
            "weight_scale": scales.to(torch.float8_e4m3fn) if four and not mx else scales,
        }
        if form.startswith("nv"):
            held["weight_global_scale"] = torch.tensor([2.7])
            held["weight_scale"] = (scales * 100).to(torch.float8_e4m3fn).float()
        if not given.get("symmetric", True):
            half = 2 ** (given["num_bits"] - 1)
            zeros = torch.from_numpy(rng.integers(-half, half, grid(weight)).astype(np.int8))
            held["weight_zero_point"] = zeros
        compressed = compressor.compress(held, scheme)
        if mx or four:
            loose = compressor.decompress(dict(compressed), scheme)["weight"].float()
        else:
            loose = compressor.decompress(compressed, scheme)["weight"]
        if form.startswith("nv"):
            codes = compressed["weight_packed"]
            values = unpack_fp4_from_uint8(codes, *weight.shape, dtype=torch.float32)
            mean = dequantize(
                values,
                compressed["weight_scale"].float(),
                args=args,
                global_scale=compressed["weight_global_scale"],
                dtype=torch.float32,
            )
            assert torch.equal(mean.bfloat16().float(), loose)
        else:
            mean = loose.float()
        parts = {word: quantised.array(tensor) for word, tensor in compressed.items()}
        if not four and not mx:
            parts["weight_scale"] = quantised.array(scales.to(getattr(torch, kind)))
        return parts, mean.numpy()

    return write


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", LIBRARY)
def test_reads_as_the_library_does(plain: Path, name: str, kind: str) -> None:
    form, given, packs = LIBRARY[name]
    config = settings(form, **given)
    means = quantised.quantise(plain, config, by_library(form, given, kind))
    quantised.check(plain, means, packs=packs)
    quantised.converts(plain, means)


@pytest.mark.oracle
def test_targets_mean_what_they_do_in_the_library() -> None:
    import torch
    from compressed_tensors.utils.match import match_targets

    from emit.dequant import compressed_tensors

    groups = {
        "a": (["Linear", "Embedding"], 2),
        "b": (["re:.*mixer.out.*", "layers.1.mlp.up_proj"], 5),
        "c": (["re:.*mixer.*", "re:.*out_proj"], 3),
        "d": (["layers.0.mixer.in_proj"], 4),
    }
    config = settings("pack-quantized", **INT4)
    config["config_groups"] = {
        name: {"targets": targets, "weights": INT4 | {"num_bits": bits}}
        for name, (targets, bits) in groups.items()
    }
    config["ignore"] = []
    found = compressed_tensors.read({"quantization_config": config})
    every = {t: bits for targets, bits in groups.values() for t in targets}
    names = [f"layers.{i}.{m}.{p}_proj" for i in range(3) for m in ("mixer", "mlp") for p in
             ("in", "out", "up")]  # fmt: skip
    for name in [*names, "embed_tokens"]:
        table = name == "embed_tokens"
        module = torch.nn.Embedding(2, 2) if table else torch.nn.Linear(2, 2)
        wanted = every[match_targets(name, module, every)[0]]
        weights = found.of(name)
        assert weights is not None and weights.bits == wanted, name
