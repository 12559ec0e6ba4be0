"""RecurrentGemma's config in both dialects, what it refuses, its sizes, and where it has traps.

The traps are points at which a wrong model is close to the right one, or the library is wrong. Its
numbers otherwise are in the tests of all families.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cases
import numpy as np
import oracles
import pytest
from driver import Driver, relative

from emit.blocks.attention import Attention
from emit.blocks.backbone import Backbone
from emit.blocks.block import Rows
from emit.blocks.mlp import Mlp
from emit.blocks.rglru import Recurrent
from emit.checkpoint import read_config_file
from emit.entry import Model
from emit.errors import EmitError
from recipes.resolve import resolve_model

ROWS = [case for case in cases.CASES if case.family == "recurrent_gemma"]
BASE = cases.family("recurrent_gemma").BASE
CLOSE = 1e-5
WRONG = 1e-3  # no trap below changes less


def read(**changes: Any) -> Any:
    merged = {**BASE, **changes}
    return Model.of({key: value for key, value in merged.items() if value is not ...}).cfg


# --- config ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ROWS, ids=cases.ids)
def test_both_dialects_read_equal(case: cases.Case, tmp_path: Path) -> None:
    found = []
    for dialect in ("native", "hub"):
        path = tmp_path / f"{dialect}.json"
        written = cases.Case(case.name, case.family, case.config, dialect=dialect)
        cases.write_config(path, cases.full_config(case), written)
        found.append(Model.of(read_config_file(path)).cfg)
    assert found[0] == found[1]


def test_the_published_key_of_the_pattern_is_read() -> None:
    """The library ignores `_block_types` and takes its default."""
    given = ["attention", "recurrent", "recurrent"]
    cfg = read(block_types=..., _block_types=given)
    assert cfg.block_types == tuple(given) and cfg == read(block_types=given)
    assert read(block_types=...).block_types == ("recurrent", "recurrent", "attention")


def test_the_pattern_is_repeated_and_cut() -> None:
    def attends(layers: int, *pattern: str) -> list[int]:
        cfg = read(num_hidden_layers=layers, block_types=list(pattern))
        kinds = (Attention, Recurrent)
        blocks = [cfg.temporal_block(i) for i in range(layers)]
        assert all(isinstance(block, kinds) for block in blocks)
        return [i for i, block in enumerate(blocks) if isinstance(block, Attention)]

    assert attends(8, "recurrent", "recurrent", "attention") == [2, 5]
    assert attends(5, "attention", "recurrent") == [0, 2, 4]
    assert attends(1, "recurrent", "attention") == []


def test_sizes_that_follow_from_others() -> None:
    assert read().lru_width == 40 and read(lru_width=48).lru_width == 48
    assert read(num_key_value_heads=None).num_key_value_heads == 4
    assert read().head_dim == 10 and read(head_dim=6).head_dim == 6
    assert read(sliding_window=7, attention_window_size=...).attention_window_size == 7


def test_the_mlp_has_half_of_the_size_in_the_config() -> None:
    for size, half in ((90, 45), (91, 45)):
        (_, branch), *_ = read(intermediate_size=size).backbone.layers
        assert isinstance(branch.block, Mlp) and branch.block.intermediate_size == half


@pytest.mark.parametrize(
    ("changes", "rotary", "theta"),
    [
        ({}, 6, 1e4),  # of 10: 5, in pairs
        ({"rope_parameters": ...}, 6, 1e4),  # the library's default is half of a head, not all
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}, 6, 50.0),
        ({"rope_parameters": ..., "rope_theta": 70.0}, 6, 70.0),
        ({"rope_parameters": ..., "partial_rotary_factor": 0.8}, 8, 1e4),
        ({"rope_parameters": {"partial_rotary_factor": 0.8}}, 8, 1e4),
        ({"rope_parameters": ..., "partial_rotary_factor": None}, 10, 1e4),
        ({"rope_parameters": ..., "rope_scaling": None}, 6, 1e4),
    ],
)
def test_half_of_a_head_is_rotated(changes: dict[str, Any], rotary: int, theta: float) -> None:
    rope = read(**changes).rope
    width = int(10 * 0.5) if rotary == 6 else rotary
    assert rope.rotary == rotary and rope.factor == 1.0 and rope.limit is None
    assert rope.frequencies == pytest.approx([theta ** (-i / width) for i in range(0, width, 2)])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_types": ["recurrent", "mamba"]}, 'block_types = ["recurrent", "mamba"], expected'),
        ({"block_types": []}, "block_types = [], expected a list of recurrent and attention"),
        ({"_block_types": ["attention"]}, '_block_types = ["attention"] contradicts'),
        ({"layer_types": ["linear_attention"]}, "layer_types = ["),
        ({"logits_soft_cap": None}, "logits_soft_cap = null is not of type float"),
        ({"logits_soft_cap": 0.0}, "logits_soft_cap = 0 must be above 0"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps = 0 must be above 0"),
        ({"embeddings_scale_by_sqrt_dim": False}, "embeddings_scale_by_sqrt_dim = false is not"),
        ({"lru_width": 42}, "lru_width = 42, expected a multiple of num_attention_heads = 4"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4, expected a multiple of"),
        ({"hidden_activation": "mish"}, "hidden_activation = 'mish', expected one of"),
        ({"intermediate_size": 1}, "intermediate_size = 1, expected 2 or more"),
        ({"conv1d_width": 1}, "conv1d_width = 1, expected 2 or more"),
        ({"head_dim": 1}, "head_dim 1 × partial_rotary_factor 0.5 does not fit"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 'rope_type = "linear" is not'),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, 'rope_type = "yarn" is not'),
        ({"rope_parameters": [1]}, "[1] is no rope_parameters"),
        ({"rope": {}}, "rope = {} is not of type Rope"),
        ({"use_conv": True}, "use_conv = true is not a known key"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(EmitError) as raised:
        read(**changes)
    assert words in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    # Of the published checkpoints (arXiv:2404.07839, table 1: 2.7 and 8.6 billion; attention is
    # every third layer).
    ("name", "parameters", "attention", "scale"),
    [("2b", 2_682_862_080, 8, 50.5), ("9b", 8_579_977_216, 12, 64.0)],
)
def test_published_sizes(name: str, parameters: int, attention: int, scale: float) -> None:
    for each in (name, name + "-it"):
        model = Model.of(resolve_model(f"recurrentgemma-{each}").config or {}, 4096)
        assert sum(math.prod(p.shape) for p in model.weight_map.params) == parameters
        kept = [spec.shape for spec in model.state if spec.kind == "per_position"]
        assert kept == [(1, 1, 2048, 256)] * 2 * attention
        assert model.cfg.backbone.scale == scale  # of sqrt(2560) = 50.596 and sqrt(4096)


# --- traps -----------------------------------------------------------------------------------


class Trap:
    """A checkpoint's model, and the oracle that judges it and models made wrong on purpose."""

    def __init__(self, directory: Path, **config: Any) -> None:
        case = cases.Case("trap", "recurrent_gemma", config)
        self.driver = Driver.load(cases.build(case, directory / "checkpoint"))
        params = {n: np.asarray(p) for n, p in self.driver.params.items()}
        self.oracle = oracles.oracle("recurrent_gemma", self.driver.model.cfg, params)

    def error(self, text: np.ndarray, **changes: Any) -> float:
        """Of the logits after `text`, a token at a time, where Config or Backbone has `changes`."""
        model = self.driver.model
        own = {k: changes.pop(k) for k in list(changes) if hasattr(model.cfg, k)}
        backbone: Backbone = replace(replace(model.cfg, **own).backbone, **changes)
        family: Any = SimpleNamespace(
            state=lambda cfg, context: backbone.state(context),
            forward=lambda cfg, params, tokens, lengths, positions, state: backbone.forward(
                params, tokens, Rows(lengths, positions), state
            ),
        )
        driver = replace(self.driver, model=replace(model, family=family))
        logits, _ = driver.prefill(text, 1)
        return relative(logits, self.oracle.run(text)[0][-1])


@pytest.fixture(scope="module")
def trap(tmp_path_factory: pytest.TempPathFactory) -> Trap:
    changes = {"block_types": ["recurrent", "attention"], "num_hidden_layers": 2}
    return Trap(tmp_path_factory.mktemp("trap"), **changes, logits_soft_cap=2.0)


def tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, BASE["vocab_size"], count)


@pytest.mark.parametrize(
    "wrong",
    [
        {"scale": math.sqrt(40)},  # not as bfloat16 rounds it
        {"scale": 1.0},
        {"softcap": None},
        {"softcap": 30.0},
        {"norm_offset": 0.0},
        {"attention_window_size": 11},  # a key less
        {"attention_window_size": 13},  # a key more, as the vendor's code has
        {"rope": None},
    ],
    ids=str,
)
def test_a_model_wrong_in_one_point_is_noticed(trap: Trap, wrong: dict[str, Any]) -> None:
    assert trap.error(tokens(40), **wrong) > WRONG


def test_the_model_it_is_compared_with_is_right(trap: Trap) -> None:
    assert trap.error(tokens(40)) < CLOSE


def test_the_scale_is_that_of_bfloat16() -> None:
    for size, scale in ((40, 6.3125), (80, 8.9375), (2560, 50.5), (4096, 64.0), (64, 8.0)):
        assert read(hidden_size=size).backbone.scale == scale


@pytest.mark.parametrize("window", [1, 3, 12, 40])
def test_texts_longer_than_the_window_in_chunks_longer_and_shorter(
    window: int, tmp_path: Path
) -> None:
    """Chunks of 16, in one of which a window passes several times, and single steps."""
    one = Trap(
        tmp_path,
        block_types=["attention", "recurrent"],
        num_hidden_layers=2,
        attention_window_size=window,
    )
    text = tokens(90, seed=window)
    want, want_state = one.oracle.run(text)
    for chunk, cuts in ((16, None), (16, [5, 16, 1, 16, 16, 2, 16, 1, 1, 16])):
        logits, state = one.driver.prefill(text, chunk, cuts=cuts)
        assert relative(logits, want[-1]) < CLOSE
        assert one.driver.agree(state, want_state, 90) < CLOSE
        for t in range(90, 90 + 4):
            after, state = one.driver.call(np.array([[t % 97]]), [1], state, t)
            row, want_state = one.oracle.step(t % 97, want_state)
            assert relative(after[0], row) < CLOSE
        want_state = one.oracle.run(text)[1]


def test_a_recurrence_wider_than_the_residual_starts_with_one_token(tmp_path: Path) -> None:
    """The library's state of such a text has the wrong width, and its first step fails."""
    one = Trap(tmp_path, lru_width=56, num_hidden_layers=2)
    specs = {spec.name: spec.shape for spec in one.driver.model.state}
    assert specs["layers.0.conv"] == (1, 3, 56) and specs["layers.0.lru"] == (1, 56)
    text = tokens(6)
    want, want_state = one.oracle.run(text)
    logits, state = one.driver.prefill(text, 4, cuts=[1, 1, 4])
    assert relative(logits, want[-1]) < CLOSE and one.driver.agree(state, want_state, 6) < CLOSE


def test_a_text_knows_nothing_of_the_one_before(trap: Trap) -> None:
    """At position 0 the recurrence starts anew whatever is held; the library's may go on."""
    driver, text = trap.driver, tokens(5, seed=3)
    for width in (1, 5):
        zero, used = driver.zero_state(), driver.random_state(1, seed=1)
        kept = {**zero, "layers.0.lru": used["layers.0.lru"]}
        outcomes = []
        for state in (zero, kept):
            logits, after = driver.call(text[None, :width], [width], state)
            outcomes.append(
                (logits.tobytes(), {n: np.asarray(a).tobytes() for n, a in after.items()})
            )
        assert outcomes[0] == outcomes[1]
        late, _ = driver.call(text[None, :width], [width], kept, 5)
        early, _ = driver.call(text[None, :width], [width], zero, 5)
        assert relative(late, early) > WRONG  # what is held counts at any other position


@pytest.mark.parametrize("kernel", [2, 3, 5])
def test_the_tail_has_the_convolutions_width(kernel: int, tmp_path: Path) -> None:
    one = Trap(tmp_path, conv1d_width=kernel, num_hidden_layers=1)
    text = tokens(11)
    want, want_state = one.oracle.run(text)
    assert want_state["layers.0.conv"].shape == (kernel - 1, 40)
    for chunk, cuts in ((6, [1, 1, 6, 3]), (6, [4, 1, 6]), (6, [6, 5]), (1, None)):
        logits, state = one.driver.prefill(text, chunk, cuts=cuts)
        assert relative(logits, want[-1]) < CLOSE
        assert one.driver.agree(state, want_state, 11) < CLOSE


def test_gates_are_stored_as_outputs_by_inputs(tmp_path: Path) -> None:
    """A checkpoint has them the other way round, and the parameter of the decay before softplus."""
    case = ROWS[0]
    driver, made = Driver.load(cases.build(case, tmp_path / "checkpoint")), cases.tensors(case)
    name = "layers.1.temporal_block.rg_lru."
    for gate in ("input_gate", "recurrent_gate"):
        stored, given = driver.params[f"{name}{gate}_weight"], made[f"model.{name}{gate}_weight"]
        assert np.array_equal(stored, given.transpose(0, 2, 1))
        bias = made[f"model.{name}{gate}_bias"]
        assert np.array_equal(driver.params[f"{name}{gate}_bias"], bias.reshape(-1))
    rate = np.log1p(np.exp(made[f"model.{name}recurrent_param"].astype(np.float64)))
    assert relative(driver.params[name + "rate"], rate) < 1e-6
