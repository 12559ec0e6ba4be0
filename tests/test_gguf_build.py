"""Bundles of GGUF files: the tokenizer and the template that the file holds, or files beside it."""

from __future__ import annotations

import json
import shutil
import string
from pathlib import Path
from typing import Any

import pytest
from building import Place
from gguf_files import DATA
from gguf_vocabularies import CONTROL, NORMAL, padded, with_vocabulary

from artifacts import metadata
from artifacts.buildlog import BuildLog
from artifacts.job import Job
from artifacts.stages import Miss, Stages
from artifacts.store import Store
from recipes import resolve
from runtime import manifest, tokenizer
from runtime.errors import UserError
from runtime.server import template

MODEL = DATA / "mamba-plain.gguf"  # an embedding of 97 rows
TOKENS = ["<|end|>", *string.ascii_letters, *string.digits, *"<|>.,", "Ġ", "th", "the"]
KEYS: dict[str, Any] = {
    "ggml.model": "gpt2",
    "ggml.pre": "gpt-2",
    **padded(TOKENS, [CONTROL] + [NORMAL] * (len(TOKENS) - 1)),
    "ggml.merges": ["t h", "th e"],
    "ggml.bos_token_id": 0,
    "ggml.eos_token_id": 0,
    "ggml.add_bos_token": True,
    "chat_template": "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
}
BESIDE = {"tokenizer.json": b"{}", "chat_template.jinja": b"{{ messages }}"}


def stages(model: Path, cache: Path, dry: bool = False) -> Stages:
    """Of a build of `model` for this CPU."""
    found, target = resolve.resolve_model(str(model)), resolve.resolve_target("cpu")
    shape = resolve.resolve_shape("b1-p4", found)
    weights = resolve.weight_chooser(None, found, target)
    job = Job(found, target, shape, weights, params=True, proof=True, kernels=True)
    return Stages(Store(cache), job, BuildLog(), dry)


def names(made: Stages) -> dict[str, bytes]:
    return {name: path.read_bytes() for name, (path, _) in metadata.tokenizer(made).items()}


def test_files_beside_win_over_what_the_file_holds(tmp_path: Path) -> None:
    path = with_vocabulary(MODEL, tmp_path / "x.gguf", KEYS)
    made = names(stages(path, tmp_path / "cache"))
    assert set(made) == {"tokenizer.json", "tokenizer_config.json"} and len(made) == 2
    (tmp_path / "chat_template.jinja").write_bytes(BESIDE["chat_template.jinja"])
    both = names(stages(path, tmp_path / "cache"))
    assert both == made | {"chat_template.jinja": BESIDE["chat_template.jinja"]}
    (tmp_path / "tokenizer.json").write_bytes(BESIDE["tokenizer.json"])
    assert names(stages(path, tmp_path / "cache")) == BESIDE


def test_a_tokenizer_beside_is_the_way_out_of_a_broken_one(tmp_path: Path) -> None:
    path = with_vocabulary(MODEL, tmp_path / "x.gguf", KEYS | {"ggml.merges": ["t zz"]})
    with pytest.raises(UserError, match=r"x.gguf: tokenizer.ggml.merges: element 0 is 't zz'"):
        _ = stages(path, tmp_path / "cache").config
    (tmp_path / "tokenizer.json").write_bytes(BESIDE["tokenizer.json"])
    assert json.loads(stages(path, tmp_path / "cache").config)["model_type"] == "mamba"


def test_more_tokens_than_the_embedding_has_rows(tmp_path: Path) -> None:
    keys = KEYS | padded([*TOKENS, *map(str, range(10, 40))], [NORMAL] * (len(TOKENS) + 30))
    path = with_vocabulary(MODEL, tmp_path / "x.gguf", keys)
    with pytest.raises(UserError, match=r"101 are in use, expected 1 to 97, as token_embd.weight"):
        _ = stages(path, tmp_path / "cache").config


def test_what_is_left_out_is_told_by_every_build_and_by_none_that_looks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = with_vocabulary(MODEL, tmp_path / "x.gguf", KEYS | {"ggml.pre": "new"})
    with pytest.raises(Miss):
        names(stages(path, tmp_path / "cache", dry=True))
    for dry in (False, False, True):
        assert names(stages(path, tmp_path / "cache", dry)) == {}
        told = capsys.readouterr().err.splitlines()
        assert len(told) == (0 if dry else 1)
        assert all(line.startswith(f"warning: {path}: how a tokenizer") for line in told)


@pytest.mark.iree
def test_a_bundle_reads_text(tmp_path: Path) -> None:
    place = Place.new(tmp_path / "place")
    shutil.rmtree(place.work / "tiny")
    with_vocabulary(MODEL, place.work / "tiny.gguf", KEYS)
    place.built("model=tiny.gguf")
    listed = manifest.load(place.bundle)
    assert listed.model.bos_token_id == 0 and listed.model.eos_token_ids == (0,)
    files = listed.files.tokenizer
    read = tokenizer.load(place.bundle, files)
    assert read is not None and read.size == len(TOKENS)
    want = [0, TOKENS.index("the"), TOKENS.index("Ġ"), TOKENS.index("A")]
    assert read.encode("the A") == want and read.decode(want) == "the A"
    chat = template.load(place.bundle, files)
    assert chat is not None
    assert chat.render([{"role": "user", "content": "the"}], True) == "the<|end|>"
    done = place.scanwright("generate", place.bundle, "--prompt", "the A", "--max-tokens", "4")
    assert done.code == 0 and done.out, done.err
