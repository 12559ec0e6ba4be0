"""RWKV-7's config, layout and traps; its numbers against float64 are in the tests of all families.

Two implementations give second opinions, marked `oracle`: `rwkv`, by the model's author, which
reads BlinkDL's names and knows heads of 64 only, and `rwkv7_hf`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import references
from bundles import check_tokens
from driver import Driver, relative
from references import Reference

from emit.checkpoint import read_config_file
from emit.entry import Model
from emit.errors import EmitError

ROWS = [case for case in cases.CASES if case.family == "rwkv7"]
BASE = cases.family("rwkv7").BASE
CHUNK = 8


def read(**changes: Any) -> Any:
    return Model.of({k: v for k, v in {**BASE, **changes}.items() if v is not ...}).cfg


@pytest.mark.parametrize("case", ROWS, ids=cases.ids)
def test_both_dialects_read_equal(case: cases.Case, tmp_path: Path) -> None:
    found = []
    for dialect in ("native", "hub"):
        path = tmp_path / f"{dialect}.json"
        written = cases.Case(case.name, case.family, case.config, dialect=dialect)
        cases.write_config(path, cases.full_config(case), written)
        found.append(Model.of(read_config_file(path)).cfg)
    assert found[0] == found[1]


def test_sizes_that_follow_from_others() -> None:
    cfg = read(num_heads=..., head_dim=..., hidden_size=128, intermediate_size=None)
    assert (cfg.num_heads, cfg.head_dim, cfg.attention_hidden_size) == (2, 64, 128)
    assert cfg.intermediate_size == 512
    assert read(num_heads=4, head_dim=None).head_dim == 10
    assert read(num_heads=None, head_dim=None, hidden_size=192).num_heads == 3
    assert read(intermediate_size=..., hidden_ratio=3.3).intermediate_size == 160  # from 132
    assert read(intermediate_size=None, hidden_ratio=None).intermediate_size == 160
    wide = read(attention_hidden_size=48, head_dim=16, num_heads=None)
    assert (wide.num_heads, wide.time_mix(1).inner) == (3, 48)
    assert read(num_heads=..., num_attention_heads=5) == read()


def test_only_the_first_layer_has_no_value_residual_and_a_norm_before_it() -> None:
    cfg = read()
    assert [cfg.time_mix(i).v_rank for i in range(3)] == [None, 5, 5]
    assert [cfg.norms(i)[0] for i in range(3)] == ["pre_norm", "attn_norm", "attn_norm"]
    assert cfg.norms(0)[1:] == cfg.norms(1)
    assert "pre_norm" not in read(norm_first=False).norms(0)


def test_one_width_of_values_is_that_of_each_layer() -> None:
    assert read(value_dim=40) == read()


def test_the_group_norms_epsilon_grows_with_the_head() -> None:
    assert read(hidden_size=128, head_dim=64, num_heads=2).time_mix(0).group_eps == 64e-5
    assert read(norm_eps=1e-3).time_mix(0).group_eps == 8e-3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attn": {"layers": [1], "num_heads": 4}}, "attn = "),
        ({"hidden_act": "silu"}, 'hidden_act = "silu" is not supported (only "sqrelu")'),
        ({"value_dim": [40, 40]}, "value_dim = [40, 40], expected 40 for each of 3 layers"),
        ({"value_dim": 80}, "value_dim = [80, 80, 80], expected 40 for each of 3 layers"),
        ({"value_dim": [40, 80, 40]}, "value_dim = [40, 80, 40], expected 40 for each"),
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers = 2147483647, expected 1000 at most"),
        ({"num_heads": 4}, "num_heads × head_dim = 4 × 8, expected 40"),
        ({"head_dim": 16, "num_heads": None}, "num_heads × head_dim = 2 × 16, expected 40"),
        ({"num_attention_heads": 4}, "num_attention_heads = 4 contradicts 5"),
        ({"v_low_rank_dim": ...}, "v_low_rank_dim is missing"),
        ({"gate_low_rank_dim": None}, "gate_low_rank_dim = null is not of type int"),
        ({"norm_eps": 0.0}, "norm_eps = 0 must be above 0"),
        ({"intermediate_size": None, "hidden_ratio": -1.0}, "hidden_ratio = -1, expected a width"),
        ({"intermediate_size": None, "hidden_ratio": float("inf")}, "hidden_ratio = inf, expected"),
        ({"rope_theta": 1e4}, "rope_theta = 10000.0 is not a known key"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(EmitError) as raised:
        read(**changes)
    assert words in str(raised.value) and "\n" not in str(raised.value)


# --- second opinions -------------------------------------------------------------------------


def blinkdl(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A checkpoint's tensors under BlinkDL's names, with the shapes that his files have."""
    words = {
        "model.embeddings": "emb",
        "model.norm": "ln_out",
        "lm_head": "head",
        "model.layers": "blocks",
        "pre_norm": "ln0",
        "attn_norm": "ln1",
        "ffn_norm": "ln2",
        ".attn.": ".att.",
        "r_proj": "receptance",
        "k_proj": "key",
        "v_proj": "value",
        "o_proj": "output",
        "g_norm": "ln_x",
    }
    loras = {"_lora.lora.0.weight": "1", "_lora.lora.2.weight": "2", "_lora.lora.2.bias": "0"}
    found = {}
    for name, tensor in tensors.items():
        for word, short in words.items():
            name = name.replace(word, short)
        for suffix, digit in loras.items():
            if name.endswith(suffix):
                name = name.removesuffix(suffix) + digit
                tensor = tensor.T if digit != "0" else tensor.reshape(1, 1, -1)
        if name.rpartition(".")[2] in ("k_k", "k_a", "x_k"):
            tensor = tensor.reshape(1, 1, -1)
        found[name] = np.ascontiguousarray(tensor)
    return found


def compare(name: str, checkpoint: Path, theirs: Any, capsys: Any) -> None:
    """`theirs(prompt, tokens)` are the logits [tokens, V] of a cached, greedy generation."""
    _, rows = references.recorded(name)
    kind = "f32" if name.endswith("/handed") else cases.find(name).dtype
    driver, worst = Driver.load(checkpoint, kind), 0.0
    for row in rows:
        logits = theirs(row.prompt, references.NEW_TOKENS)
        largest = np.sort(logits, axis=1)[:, -2:]
        found = Reference(
            row.prompt,
            np.argmax(logits, axis=1).tolist(),
            (largest[:, 1] - largest[:, 0]).tolist(),
            logits[0].tolist(),
        )
        tokens, ours = driver.greedy(row.prompt, references.NEW_TOKENS, CHUNK, found.tokens)
        check_tokens(tokens, ours, found)
        assert found.tokens == row.tokens, "the float64 oracle"
        worst = max(worst, relative(ours, logits))
    assert worst < 1e-5
    with capsys.disabled():
        print(f"{name}: logits within {worst:.1e}")


def greedy(step: Any, prompt: list[int], tokens: int) -> np.ndarray:
    """Logits of `tokens` steps; `step(tokens, state)` gives (logits [V], state)."""
    logits, state = step(prompt, None)
    rows = [logits]
    while len(rows) < tokens:
        logits, state = step([int(np.argmax(rows[-1]))], state)
        rows.append(logits)
    return np.array(rows)


@pytest.mark.oracle
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["rwkv7/handed", "rwkv7/one_layer"])
def test_the_author_s_package_generates_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    import torch
    from safetensors.numpy import load_file

    monkeypatch.setenv("RWKV_V7_ON", "1")
    monkeypatch.delitem(sys.modules, "rwkv.model", raising=False)
    from rwkv.model import RWKV

    checkpoint = references.write_checkpoint(name, tmp_path / "checkpoint")
    named = blinkdl(load_file(checkpoint / "model.safetensors"))
    torch.save({n: torch.from_numpy(t) for n, t in named.items()}, tmp_path / "model.pth")
    model = RWKV(model=str(tmp_path / "model"), strategy="cpu fp32")

    def step(tokens: list[int], state: Any) -> tuple[np.ndarray, Any]:
        logits, state = model.forward(tokens, state)
        return logits.numpy(), state

    compare(name, checkpoint, lambda prompt, n: greedy(step, prompt, n), capsys)


@pytest.mark.oracle
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "name",
    [
        "rwkv7/handed",
        *(c.id for c in ROWS if c.dtype == "f32" and c.config.get("norm_first", True)),
    ],
)
def test_rwkv7_hf_generates_the_same(name: str, tmp_path: Path, capsys: Any) -> None:
    import torch
    from rwkv7_hf.configuration_rwkv7 import RWKV7Config
    from rwkv7_hf.modeling_rwkv7 import RWKV7ForCausalLM
    from safetensors.numpy import load_file

    checkpoint = references.write_checkpoint(name, tmp_path / "checkpoint")
    config = read_config_file(checkpoint / "config.json")
    if config.get("intermediate_size") is None:  # rounded to 32 here, as flash-linear-attention
        config["intermediate_size"] = Model.of(config).cfg.intermediate_size
    model = RWKV7ForCausalLM(RWKV7Config(**config)).eval()
    named = load_file(checkpoint / "model.safetensors")
    model.load_state_dict({n: torch.from_numpy(t) for n, t in named.items()})

    def step(tokens: list[int], state: Any) -> tuple[np.ndarray, Any]:
        with torch.no_grad():
            out = model(torch.tensor([tokens]), past_key_values=state, use_cache=True)
        return out.logits[0, -1].numpy(), out.past_key_values

    compare(name, checkpoint, lambda prompt, n: greedy(step, prompt, n), capsys)
