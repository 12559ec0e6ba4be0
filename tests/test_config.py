"""config.json is read strictly: every key that does not fit is named, all in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cases
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emit.checkpoint import read_config, read_config_file
from emit.config import token_ids
from emit.entry import Model, interface
from emit.errors import EmitError
from emit.families import mamba2
from emit.shape import Shape
from emit.state import StateSpec

MAMBA2 = cases.full_config(cases.Case("config", "mamba2"))

# The published config of Mamba-Codestral-7B-v0.1, keys as on the hub.
CODESTRAL = {
    "_name_or_path": "codestral",
    "architectures": ["Mamba2ForCausalLM"],
    "bos_token_id": 0,
    "chunk_size": 256,
    "conv_kernel": 4,
    "eos_token_id": 0,
    "expand": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.1,
    "intermediate_size": 8192,
    "layer_norm_epsilon": 1e-05,
    "model_type": "mamba2",
    "n_groups": 8,
    "norm_before_gate": True,
    "num_heads": 128,
    "num_hidden_layers": 64,
    "pad_token_id": 0,
    "rescale_prenorm_residual": False,
    "residual_in_fp32": True,
    "rms_norm": True,
    "state_size": 128,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_init_scheme": "random",
    "time_step_limit": [0.0, float("inf")],
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "time_step_rank": 256,
    "time_step_scale": 1.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.44.0.dev0",
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "vocab_size": 32768,
}


def refused(raw: dict[str, Any]) -> str:
    """The one line that `raw` is refused with."""
    with pytest.raises(EmitError) as caught:
        Model.of(raw)
    line = str(caught.value)
    assert "\n" not in line and line.isprintable() and line.startswith("config.json")
    return line


@pytest.mark.parametrize("case", cases.CASES, ids=cases.ids)
def test_both_dialects_read_equal(case: cases.Case, tmp_path: Path) -> None:
    read = []
    for dialect in ("native", "hub"):
        path = tmp_path / f"{dialect}.json"
        written = cases.Case(case.name, case.family, case.config, dialect=dialect)
        cases.write_config(path, cases.full_config(case), written)
        read.append(Model.of(read_config_file(path)).cfg)
    assert read[0] == read[1]


@pytest.mark.parametrize("case", [c for c in cases.CASES if c.family == "mamba2"], ids=cases.ids)
def test_every_value_is_read(case: cases.Case, tmp_path: Path) -> None:
    path, wanted = tmp_path / "config.json", cases.full_config(case)
    cases.write_config(path, wanted, cases.Case(case.name, case.family, case.config))
    assert "__float__" in path.read_text() or "time_step_limit" in case.config
    read = [Model.of(read_config_file(path)).cfg]
    for name in vars(read[0]).keys() - {"intermediate_size", "time_step_limit"}:
        assert getattr(read[0], name) == wanted[name], name
    assert read[0].time_step_limit == tuple(wanted["time_step_limit"])
    assert read[0].intermediate_size == wanted["num_heads"] * wanted["head_dim"]


def test_the_handed_checkpoint_and_its_hub_config_read_equal() -> None:
    native = Model.of(read_config(cases.HANDED / "mamba2" / "checkpoint"))
    hub = Model.of(read_config_file(cases.HANDED / "mamba2" / "config.hub.json"))
    assert native.cfg == hub.cfg
    assert native.cfg.n_groups == 2 and native.cfg.time_step_limit == (0.0, float("inf"))


def test_published_config_is_accepted_and_is_the_default() -> None:
    cfg = Model.of(CODESTRAL).cfg
    assert cfg == Model.of({"model_type": "mamba2"}).cfg, "keys left out mean their defaults"
    assert cfg.mixer.conv_dim == 8192 + 2 * 8 * 128


def test_all_offenders_are_named_at_once() -> None:
    wrong = {
        "sliding_window": 128,
        "quantization_config": {"bits": 4},
        "rms_norm": False,
        "vocab_size": "97",
        "n_groups": 1.5,
        "num_hidden_layers": 0,
        "use_bias": 1,
        "hidden_act": None,
        "layer_norm_epsilon": float("nan"),
        "time_step_limit": [0.0],
    }
    line = refused({**MAMBA2, **wrong})
    for key in wrong:
        assert f"{key} = " in line, f"{key} is not in: {line}"
    right = MAMBA2.keys() - wrong.keys()
    assert not [key for key in right if f"{key} = " in line]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", 10**400),
        ("vocab_size", -97),
        ("vocab_size", True),
        ("vocab_size", float("inf")),
        ("head_dim", [16]),
        ("expand", float("inf")),
        ("expand", 10**400),
        ("expand", 3),
        ("expand", 2.01),
        ("n_groups", 3),
        ("conv_kernel", 1),
        ("hidden_act", "mish"),
        ("intermediate_size", 65),
        ("layer_norm_epsilon", 0.0),
        ("layer_norm_epsilon", float("inf")),
        ("time_step_limit", [0.1, 0.01]),
        ("time_step_limit", [-1.0, 1.0]),
        ("time_step_limit", [0.0, float("nan")]),
        ("time_step_limit", [0.0, True]),
        ("time_step_limit", [0.0, 1.0, 2.0]),
        ("time_step_limit", {"min": 0.0}),
        ("tie_word_embeddings", None),
        ("n_routed_experts", 8),
    ],
)
def test_a_value_that_does_not_fit_is_named(key: str, value: Any) -> None:
    assert key in refused({**MAMBA2, key: value})


@pytest.mark.parametrize("key", sorted(mamba2.IGNORED))
def test_an_ignored_key_changes_nothing(key: str) -> None:
    assert Model.of({**MAMBA2, key: 12345}).cfg == Model.of(MAMBA2).cfg


def test_integers_written_as_floats_are_integers() -> None:
    cfg = Model.of({**MAMBA2, "state_size": 12.0}).cfg
    assert cfg == Model.of(MAMBA2).cfg and isinstance(cfg.state_size, int)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([*MAMBA2, "other"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3),
            max_leaves=4,
        ),
        max_size=4,
    )
)
def test_any_json_is_read_or_refused_in_one_line(changes: dict[str, Any]) -> None:
    try:
        Model.of({**MAMBA2, **changes})
    except EmitError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("name", [None, 3, "", "no_such_family", "../mamba2", "mamba2.x", "a b"])
def test_unknown_family_is_refused(name: Any) -> None:
    assert repr(name) in refused({**MAMBA2, "model_type": name})


def test_token_ids() -> None:
    assert token_ids(None) == () and token_ids(2) == (2,) and token_ids([2, 7]) == (2, 7)
    for wrong in ("2", [2, None], 2.5, True):
        with pytest.raises(EmitError, match="eos_token_id"):
            token_ids(wrong)


def test_interface_takes_eos_of_the_config_unless_given_another() -> None:
    model, shape = Model.of({**MAMBA2, "eos_token_id": [2, 5]}), Shape.parse("b2-p4")
    assert interface(model, shape, model.storage("f32"), ())["eos_token_ids"] == [2, 5]
    assert interface(model, shape, model.storage("f32"), (9,))["eos_token_ids"] == [9]
    content = interface(model, shape, model.storage("bf16"), ())
    assert json.loads(json.dumps(content)) == content
    assert content["bos_token_id"] == 1 and content["vocab_size"] == 97


def test_shape_names() -> None:
    shape = Shape.parse("b4-p256+32+32-c2048")
    assert (shape.slots, shape.chunks, shape.context) == (4, (32, 256), 2048)
    assert Shape.parse("b1-p8").context is None
    wrong = ("", "4-p32", "b4", "b4-p", "b4-p32+", "b4-p32-c", "b4-p32 ", "b-1-p3", "B4-P32")
    for name in (*wrong, "b0-p4", "b1-p0", "b1-p4+0", "b1-p4-c0"):
        with pytest.raises(EmitError, match="expected b<slots>"):
            Shape.parse(name)


def test_state_spec_sizes() -> None:
    spec = StateSpec("kv", (2, 1, 5, 3), "bf16", 1, "per_position")
    assert spec.batched(4) == (2, 4, 5, 3) and spec.size == 30
    assert spec.struct(4).shape == (2, 4, 5, 3) and spec.struct(4).dtype.name == "bfloat16"


def test_keys_of_a_full_dump_pass_at_their_defaults_only() -> None:
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2}
    dump = {"is_decoder": False, "pruned_heads": {}, "top_k": 50, "max_length": 20, **layers}
    assert mamba2.Config.read(dump).num_hidden_layers == 2
    wrong = {**dump, "is_decoder": True, "layer_types": ["linear_attention", "full_attention"]}
    with pytest.raises(EmitError, match=r"is_decoder = true is not supported.*layer_types = "):
        mamba2.Config.read(wrong)
