"""The demo model as the server sees it, without a device: real tokenizer, no compiled module."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from runtime import manifest as mf
from runtime.server.model import Limits, Model
from runtime.server.template import ChatTemplate
from runtime.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
FILES = ROOT / "recipes" / "models" / "mamba2"
NAME, VOCAB = "mamba2", 2048
LIMITS = Limits(prompt_tokens=64, completion_tokens=100, n=4, choices=8, stops=4, stop_chars=16)
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def manifest(context: int | None = None, vocab: int = VOCAB) -> mf.Manifest:
    """A manifest with no more state than it needs."""
    state = (mf.StateSpec("h", "f32", (1, 4), 0, "fixed"),)
    return mf.Manifest(
        schema=mf.SCHEMA,
        model=mf.ModelInfo(NAME, "mamba2", "dir:mamba2", None, None, "0" * 64, vocab, (0,), 0),
        target=mf.TargetInfo("cpu", "local", "local-task", None, (), "0", "0", (), None, None),
        shape=mf.ShapeInfo("b2", 2, (32,), context),
        files=mf.Files(mf.FileRef("model.vmfb", "0" * 64, 1), None, None, (), None, ()),
        functions=mf.expected_functions(vocab, 2, (32,), state),
        state=state,
        params=(),
        numerics=mf.Numerics("f32", "f32", "f32", None),
        prefix_sharing=False,
        proof=mf.Proof("not-run", "made by hand", "fast", mf.Tolerance(1e-4, 1e-4)),
        build=None,
        alternatives=(),
    )


@functools.cache
def tokenizer() -> Tokenizer:
    """The demo checkpoint's tokenizer."""
    return Tokenizer((FILES / "tokenizer.json").read_text("utf-8"))


def model(
    limits: Limits = LIMITS,
    context: int | None = None,
    template: str | None = TEMPLATE,
    words: Tokenizer | None = None,
) -> Model:
    """The demo model, with `words` or its own tokenizer."""
    chat = None if template is None else ChatTemplate(template)
    return Model(manifest(context), words or tokenizer(), chat, limits, created=1)


def bare() -> Model:
    """The same without tokenizer and template."""
    return Model(manifest(), None, None, LIMITS, created=1)


def body(**fields: Any) -> bytes:
    """A request's body."""
    return json.dumps(fields).encode()
