"""The figures of `scanwright bench`, on a toy whose byte counts can be done by hand."""

from __future__ import annotations

import dataclasses
import json

import pytest
import toy

from runtime import bench
from runtime import manifest as mf
from runtime.cli import main

TIMES = ("open_s", "first_token_s", "prefill_tokens_per_s", "decode_tokens_per_s")


def check(found: dict, bundle) -> None:
    """What must hold of any result."""
    for name in (*TIMES, "decode_step_s", "decode_bytes_per_s"):
        low, high = found["spread"][name]
        assert 0 < low <= found[name] <= high
    assert found["batch"] == toy.SLOTS and found["chunk"] == 8
    # embed is looked up (3 rows of 8 bf16), out and bank are read
    assert found["weight_bytes_per_token"] == 3 * 8 * 2 + 8 * 16 * 4 + 16 * 8 * 4
    assert found["state_bytes_per_token"] == 2 * (8 + 2 * 8) * 4
    assert found["peak_rss_bytes"] > 20e6
    step = found["batch"] / found["decode_tokens_per_s"]
    assert step == pytest.approx(found["decode_step_s"], rel=0.5)
    moved = found["weight_bytes_per_token"] + 3 * found["state_bytes_per_token"]
    assert found["decode_bytes_per_s"] == pytest.approx(moved / step, rel=0.5)


@pytest.mark.iree
def test_figures_of_a_bundle(capsys):
    bundle = toy.bundle()
    check(bench.bench(bundle, rounds=3, round_s=0.02), bundle)
    assert main(["bench", str(bundle), "--rounds", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    check(found, bundle)
    assert found["params"] == "file" and found["device"] == "local-task" and found["rounds"] == 1


@pytest.mark.iree
def test_figures_of_a_bundle_without_weights(capsys):
    bundle = toy.bundle("local", toy.V, True)
    found = bench.bench(bundle, "local-sync", random_params=3, rounds=2, round_s=0.02)
    check(found, bundle)
    assert found["params"] == "random seed 3" and found["device"] == "local-sync"
    text = bench.render(found)
    assert "decode (batch 3)" in text and "prefill (chunk 8)" in text and "random seed 3" in text
    assert main(["bench", str(bundle)]) == 1
    assert "--random-params" in capsys.readouterr().err


@pytest.mark.iree
@pytest.mark.vulkan
def test_figures_on_a_discrete_device():
    found = bench.bench(toy.bundle("vulkan"), random_params=0, rounds=1, round_s=0.02)
    assert found["device"] == "vulkan" and found["decode_tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["--rounds", "0"], "rounds: found 0"), (["--random-params", "-1"], "found seed -1")],
)
def test_bad_arguments(arguments, word, capsys, tmp_path):
    assert main(["bench", str(tmp_path), *arguments]) == 1
    assert word in capsys.readouterr().err


def test_weight_bytes_of_tied_and_untied_embeddings():
    def read(*params: mf.ParamSpec) -> int:
        files = mf.Files(mf.FileRef("m", "0" * 64, 1), None, None, (), None, ())
        plain = toy.make_manifest("local", params, files, "0.0")
        return bench.weight_bytes_per_step(dataclasses.replace(plain, params=params))

    table = mf.ParamSpec("embeddings", "f32", (toy.V, 8), 0, 1)
    head = mf.ParamSpec("lm_head", "f32", (toy.V, 8), 0, 1)
    inner = mf.ParamSpec("layers.in_proj", "f32", (100, 8), 0, 1)
    assert read(table, inner) == table.nbytes + inner.nbytes
    assert read(table, head, inner) == toy.SLOTS * 8 * 4 + head.nbytes + inner.nbytes
