"""What a client asks of the engine, and what it gets back: token ids, never text.

No device and no thread here: the engine, the command line and the server share these types.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from runtime.errors import UserError
from runtime.manifest import Manifest
from runtime.sampling import SamplingParams

if TYPE_CHECKING:
    from runtime.saved import Saved

# stop: an end-of-sequence id, or the sink asked for it. length: max_tokens, or a full context.
# cancelled, deadline, error: the request did not come to its end; `Ending.message` says why.
Reason = Literal["stop", "length", "cancelled", "deadline", "error"]
REASONS: tuple[Reason, ...] = get_args(Reason)


@dataclass(frozen=True)
class Request:
    """Tokens to generate after `prompt`. Raises UserError that names the field.

    `saved` is a conversation to go on with: the prompt then follows its tokens, and may be empty.
    `keep` asks for the state at the end (`Ending.saved`). `deadline_s` counts from submission,
    waiting included. A higher `priority` goes first and may take the slot of a lower one, which
    then waits and goes on where it was. `logits` hands the raw row of every step to the sink.
    `score_prompt` does so for every prompt token too: the prompt is then read a token at a time,
    by decode steps.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    ignore_eos: bool = False
    logits: bool = False
    score_prompt: bool = False
    priority: int = 0
    deadline_s: float | None = None
    saved: Saved | None = None
    keep: bool = False

    def __post_init__(self) -> None:
        if not self.prompt and (self.saved is None or not self.saved.pending):
            raise UserError("prompt: found no tokens, expected at least one")
        if self.max_tokens < 0:
            raise UserError(f"max-tokens: found {self.max_tokens}, expected 0 or more")
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise UserError(f"deadline: found {self.deadline_s}, expected more than 0 seconds")
        if self.score_prompt and self.saved is not None:
            raise UserError(
                "score_prompt: found with a saved conversation, expected one or the other"
            )

    @property
    def position(self) -> int:
        """Absolute position of the first prompt token."""
        return 0 if self.saved is None else len(self.saved.tokens)

    def check(self, manifest: Manifest) -> None:
        """Raise UserError if this model cannot run the request."""
        check_tokens(self.prompt, manifest, self.position)
        self.sampling.check_vocab(manifest.model.vocab_size)
        if self.saved is not None:
            self.saved.check(manifest)

    def limit(self, manifest: Manifest) -> int:
        """Tokens that can be generated: the last one needs no room in the context."""
        context = manifest.shape.context
        if context is None:
            return self.max_tokens
        return min(self.max_tokens, context - self.position - len(self.prompt) + 1)


def check_tokens(tokens: Sequence[int], manifest: Manifest, position: int = 0) -> None:
    """Raise UserError for an id outside the vocabulary, or more tokens than the context holds."""
    vocab, context = manifest.model.vocab_size, manifest.shape.context
    for place, token in enumerate(tokens):
        if not 0 <= token < vocab:
            raise UserError(
                f"prompt: found token id {token} at place {place}, expected 0 to {vocab - 1}"
                f" (the vocabulary of {manifest.model.name})"
            )
    if context is not None and position + len(tokens) > context:
        raise UserError(
            f"prompt: found {position + len(tokens)} tokens, expected at most {context} (the"
            f" context of shape {manifest.shape.name}); shorten it or build a shape with a longer"
            " context"
        )


@dataclass(frozen=True)
class Choice:
    """One token and, if the request asked for `logits`, the raw row f32[V] it was chosen from.

    `logits` is the row before penalties, bias and temperature; None for the first prompt token,
    which nothing predicts. `eos`: the id ends the text (it has none itself). `prompt`: a token of
    the prompt, reported only with `score_prompt`.
    """

    token: int
    logits: NDArray[np.float32] | None = None
    eos: bool = False
    prompt: bool = False


@dataclass(frozen=True)
class Ending:
    """How a request ended. `message` is one line for cancelled, deadline and error, else empty.

    Times are seconds of `time.perf_counter`: submitted, prefill started, first token, end; None
    for what never happened. `prompt_tokens` were read, `generated` is the number of tokens that
    came out, `saved` the state if the request asked for it and had begun.
    """

    reason: Reason
    message: str = ""
    prompt_tokens: int = 0
    generated: int = 0
    submitted: float = 0.0
    started: float | None = None
    first_token: float | None = None
    ended: float = 0.0
    saved: Saved | None = None


class Sink(Protocol):
    """Where one request's tokens go. Called on the engine's thread: it must not block."""

    def token(self, choice: Choice) -> bool:
        """Take one token; True ends the request with reason `stop` (a stop string, say)."""
        ...

    def finish(self, ending: Ending) -> None:
        """Called exactly once, last."""
        ...
