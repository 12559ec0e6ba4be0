"""lm-evaluation-harness as it is installed, on a running server: scores of choices, and texts."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import bundles
import demo
import numpy as np
import pytest
from bundles import Opened
from server import Server

from runtime import tokenizer

pytestmark = [pytest.mark.oracle, pytest.mark.iree]
SCORE = 1e-4
QUESTIONS = [
    {"context": "In the beginning God created", "choices": ["the heaven and the earth.", "a cat"],
     "label": 0},
    {"context": "And God said, Let there be", "choices": ["light: and there was light.", "Moses"],
     "label": 0},
    {"context": "é ü", "choices": ["Ω 東京", "the"], "label": 1},
    {"context": "The LORD is my", "choices": ["shepherd; I shall not want. " * 9, "king"],
     "label": 1},
]  # fmt: skip
TEXTS = ["And the LORD spake unto Moses,", "In those days", "Behold"]
NEW_TOKENS = 24
TASKS = {
    "sw_choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc"}],
    },
    "sw_texts": {
        "output_type": "generate_until",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{label}}",
        "generation_kwargs": {"until": ["@@"], "max_gen_toks": NEW_TOKENS, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def bundle() -> Path:
    """The model that ships with the project."""
    return demo.bundle("b8-p32")


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[Server]:
    """A server of it."""
    with Server(bundle) as running:
        yield running
    assert running.errors == ""


def harness(server: Server, bundle: Path, home: Path, sent: str) -> dict[str, list[dict[str, Any]]]:
    """What `lm_eval` logged for each task, in the order of its documents; nothing is downloaded.

    `sent`: True for prompts of token ids, False for text.
    """
    rows = {"sw_choices": QUESTIONS, "sw_texts": [{"context": t, "label": "?"} for t in TEXTS]}
    for name, task in TASKS.items():
        data = home / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        text = json.dumps({"task": name, "test_split": "test", **source, **task})
        (home / f"{name}.yaml").write_text(text)  # JSON is YAML
    arguments = {
        "model": "mamba2",
        "base_url": f"http://127.0.0.1:{server.port}/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": bundle,
        "tokenized_requests": sent,
        "num_concurrent": 3,
        "max_retries": 1,
    }
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions"]
    command += ["--model_args", ",".join(f"{k}={v}" for k, v in arguments.items())]
    command += ["--tasks", ",".join(TASKS), "--include_path", str(home)]
    command += ["--output_path", str(home / "out"), "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(home / "hf")}
    done = subprocess.run(
        command,
        cwd=home,
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for name in TASKS:
        (path,) = home.glob(f"out/**/samples_{name}_*.jsonl")
        samples = [json.loads(line) for line in path.read_text().splitlines()]
        found[name] = sorted(samples, key=lambda sample: sample["doc_id"])
        assert len(found[name]) == len(rows[name])
    return found


def score(opened: Opened, ids: Sequence[int], start: int) -> tuple[float, bool]:
    """Log-likelihood of `ids[start:]` after what is before, fed one by one; whether each token is
    the likeliest."""
    session, total, greedy = opened.session(), 0.0, True
    inputs = np.zeros((3, session.slots), np.int32)
    for place, token in enumerate(ids[:-1]):
        inputs[:, 0] = token, place, 1
        row = opened.host(session.decode(*inputs)[0])[0].astype(np.float64)
        if place + 1 >= start:
            largest = row.max()
            total += row[ids[place + 1]] - largest - math.log(np.exp(row - largest).sum())
            greedy &= int(row.argmax()) == ids[place + 1]
    return total, greedy


@pytest.mark.parametrize("sent", ["True", "False"], ids=["ids", "text"])
def test_the_harness_sees_what_the_bundle_computes(
    server: Server, bundle: Path, tmp_path: Path, sent: str
) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval")
    found = harness(server, bundle, tmp_path, sent)
    opened = Opened.open(bundle)
    words = tokenizer.load(bundle, opened.manifest.files.tokenizer)
    assert words is not None
    worst = 0.0
    for sample, question in zip(found["sw_choices"], QUESTIONS, strict=True):
        scores = []
        for choice, answer in zip(question["choices"], sample["resps"], strict=True):
            start = len(words.encode(question["context"], special=False))
            ids = words.encode(f"{question['context']} {choice}", special=False)
            want, greedy = score(opened, ids, start)
            got, likeliest = answer[0]
            worst = max(worst, abs(float(got) - want))
            assert float(got) == pytest.approx(want, abs=SCORE), (question, choice)
            assert likeliest in (greedy, str(greedy)), (question, choice)
            scores.append(want)
        assert sample["acc"] == float(int(np.argmax(scores)) == question["label"])
    print(f"largest difference of a log-likelihood: {worst:.2g}")
    for sample, text in zip(found["sw_texts"], TEXTS, strict=True):
        command = [sys.executable, "-m", "runtime", "generate", str(bundle), "--prompt", text]
        command += ["--max-tokens", str(NEW_TOKENS), "--json"]
        done = subprocess.run(command, cwd=bundles.ROOT, capture_output=True, text=True, check=True)
        assert sample["resps"][0][0] == json.loads(done.stdout)["text"] != ""
