"""Perplexity: the rows of the text, the losses of a module and of a checkpoint, what is told."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import cases
import fake_device
import numpy as np
import pytest
import quantised
from driver import Driver
from fake_device import FakeDevice, manifest, spread
from test_convert import mlx_checkpoint

from artifacts import perplexity as artifact
from emit import perplexity as emitted
from emit.checkpoint import open_checkpoint
from emit.dequant import dequantized
from emit.entry import Model
from emit.errors import EmitError
from emit.packed import Layout
from emit.weights import resolve
from runtime import perplexity
from runtime.perplexity import TEXT, rows_of, seeded, surprise, told, windows

DEMO = Path(__file__).parents[1] / "recipes" / "models" / "mamba2"


# Rows


def test_rows_are_windows_of_the_beginning() -> None:
    ids = list(range(600))
    assert windows(ids, 64) == [ids[at : at + 64] for at in range(0, 512, 64)]
    assert windows(ids[:129], 64) == [ids[:64], ids[64:128]], "a row of one token has no loss"
    assert windows(ids[:130], 64)[2] == [128, 129]
    assert windows([], 64) == windows([1], 64) == []


def test_rows_of_the_demo_are_the_text(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, tmp_path)
    rows = rows_of(tmp_path, 2048, 64)
    assert [len(row) for row in rows] == [64] * 8, "the text is long enough"
    found = perplexity.tokenizer.load(tmp_path, references(tmp_path))
    assert found is not None
    assert TEXT.read_text().startswith(found.decode([t for row in rows for t in row][:400]))


def references(directory: Path) -> list[perplexity.FileRef]:
    from runtime.verify import sha256

    return [
        perplexity.FileRef(path.name, sha256(path), path.stat().st_size)
        for path in sorted(directory.iterdir())
    ]


def test_rows_without_a_tokenizer_that_fits_are_seeded(tmp_path: Path) -> None:
    random = seeded(90, 16)
    assert rows_of(tmp_path, 90, 16) == random
    assert [len(row) for row in random] == [16] * 8 and random[0][:4] == [70, 55, 20, 88]
    assert len({token for row in random for token in row}) > 50
    assert max(map(max, random)) < 90
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    assert rows_of(tmp_path, 90, 16) == random, "its ids are not in the vocabulary"
    (tmp_path / "tokenizer.json").write_text("{")
    assert rows_of(tmp_path, 2048, 16) == seeded(2048, 16)


def test_builds_and_verify_have_rows_of_one_length() -> None:
    assert artifact.LENGTH == perplexity.LENGTH and artifact.TEXT == TEXT


def test_the_command_writes_rows(tmp_path: Path) -> None:
    words = ["--vocab", "90", "--length", "16"]
    (tmp_path / "none").mkdir()
    assert perplexity.main([str(tmp_path / "none"), *words, "--out", str(tmp_path / "rows")]) == 0
    assert json.loads((tmp_path / "rows").read_text()) == seeded(90, 16)


# Losses


def test_surprise_is_that_of_softmax() -> None:
    logits = np.asarray([1.0, 3.0, -2.0], np.float32)
    chances = np.exp([1.0, 3.0, -2.0]) / np.exp([1.0, 3.0, -2.0]).sum()
    for token in range(3):
        assert surprise(logits, token) == pytest.approx(-math.log(chances[token]), rel=1e-12)
    assert surprise(np.asarray([1e4, 0.0], np.float32), 1) == 1e4
    assert math.isnan(surprise(np.asarray([np.nan, 0.0], np.float32), 1))


RAGGED = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11, 12, 13, 14, 15, 16]]


@pytest.mark.parametrize("slots", [1, 3, 4, 6])
def test_a_module_reads_rows_side_by_side_from_their_beginnings(slots: int) -> None:
    session = FakeDevice(manifest(slots)).session()
    wanted = [surprise(spread(row[:at]), row[at]) for row in RAGGED for at in range(1, len(row))]
    for _ in range(2):  # the second time over what the first left in the slots
        assert perplexity.loss(session, RAGGED) == pytest.approx(math.fsum(wanted) / 12, rel=1e-12)


def test_a_logit_that_is_none_is_no_loss() -> None:
    def rule(history: list[int]) -> np.ndarray:
        return np.full(fake_device.V, np.nan if len(history) == 5 else 0.0, np.float32)

    session = FakeDevice(manifest(2), rule).session()
    assert math.isnan(perplexity.loss(session, RAGGED))
    assert perplexity.loss(session, RAGGED[:3]) == pytest.approx(math.log(fake_device.V))


def test_the_loss_of_a_checkpoint_is_that_of_its_rows_alone(tmp_path: Path) -> None:
    directory = cases.build(cases.find("mamba2/plain"), tmp_path / "checkpoint")
    opened = open_checkpoint(directory)
    driver = Driver.load(directory)
    losses = []
    for row in RAGGED:
        state = driver.zero_state()
        for at, token in enumerate(row[:-1]):
            one = np.ones(1, np.int32)
            logits, state = driver.forward(
                driver.params, np.asarray([[token]], np.int32), one, one * at, state
            )
            losses.append(surprise(np.asarray(logits)[0], row[at + 1]))
    (tmp_path / "scratch").mkdir()
    found = emitted.of_source(opened.config, opened, RAGGED, tmp_path / "scratch")
    assert found == pytest.approx(math.fsum(losses) / len(losses), rel=1e-5)


def test_a_damaged_checkpoint_has_no_loss(tmp_path: Path) -> None:
    case = cases.find("mamba2/plain")
    directory = cases.build(case, tmp_path / "checkpoint")
    tensors = cases.tensors(case)
    tensors["lm_head.weight"] = np.full_like(tensors["lm_head.weight"], 3e38)
    cases.write_tensors(directory, tensors)
    opened = open_checkpoint(directory)
    with pytest.raises(EmitError, match="the loss of the checkpoint is"):
        emitted.of_source(opened.config, opened, RAGGED, tmp_path)


def test_what_is_read_is_exact(tmp_path: Path) -> None:
    source = open_checkpoint(mlx_checkpoint(tmp_path / "mlx"))
    weight_map = Model.of(source.config).weight_map
    read = dequantized(source, source.config)
    how = emitted.exact(weight_map, read, resolve(weight_map, read)).how
    kept = quantised.KEPT.removeprefix("backbone.")
    assert how[f"{kept}.weight"] == "f32" and how["embeddings.weight"] == "f32"
    assert how["layers.0.mixer.in_proj.weight"] == Layout(4, 64, "uint", "f32", "bias")
    narrow = open_checkpoint(cases.build(cases.find("falcon_h1/bf16_sharded"), tmp_path / "narrow"))
    weight_map = Model.of(narrow.config).weight_map
    how = emitted.exact(weight_map, narrow, resolve(weight_map, narrow)).how
    assert set(how.values()) == {"bf16"}


# Told


def test_what_is_told() -> None:
    source, own = math.log(12.301), math.log(12.345)
    assert told(own, source, 504) == "12.345, of the source 12.301 (+0.36 %), 504 tokens"
    assert told(source, own, 1) == "12.301, of the source 12.345 (-0.36 %), 1 tokens"
    assert told(own, None, 504) == "12.345, 504 tokens"
    assert "inf" not in told(1e9, 1.0, 1)
