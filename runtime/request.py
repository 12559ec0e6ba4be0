"""What a client asks of the engine, and what it gets back: token ids, never text.

No device and no thread here: the engine, the command line and the server share these types.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.errors import UserError
from runtime.manifest import Manifest
from runtime.sampling import SamplingParams

# stop: an end-of-sequence id, or the sink asked for it. length: max_tokens, or a full context.
# cancelled, deadline, error: the request did not come to its end; `Ending.message` says why.
Reason = Literal["stop", "length", "cancelled", "deadline", "error"]


@dataclass(frozen=True)
class Request:
    """Tokens to generate after `prompt`. Raises UserError that names the field.

    `deadline_s` counts from submission, waiting included. A higher `priority` goes first and may
    take the slot of a lower one, which then waits and goes on where it was. `logits` hands the raw
    row of every step to the sink. `score_prompt` does so for every prompt token too: the prompt is
    then read a token at a time by decode steps.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    ignore_eos: bool = False
    logits: bool = False
    score_prompt: bool = False
    priority: int = 0
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise UserError("prompt: found no tokens, expected at least one")
        if self.max_tokens < 0:
            raise UserError(f"max-tokens: found {self.max_tokens}, expected 0 or more")
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise UserError(f"deadline: found {self.deadline_s}, expected more than 0 seconds")

    def check(self, manifest: Manifest) -> None:
        """Raise UserError if this model cannot run the request."""
        check_tokens(self.prompt, manifest)

    def limit(self, manifest: Manifest, position: int = 0) -> int:
        """Tokens that can be generated when the prompt starts at absolute `position`: the last
        one needs no room in the context."""
        context = manifest.shape.context
        if context is None:
            return self.max_tokens
        return min(self.max_tokens, context - position - len(self.prompt) + 1)


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
    came out, `session` the saved state if the ticket asked for one.
    """

    reason: Reason
    message: str = ""
    prompt_tokens: int = 0
    generated: int = 0
    submitted: float = 0.0
    started: float | None = None
    first_token: float | None = None
    ended: float = 0.0
    session: Any = None


class Sink(Protocol):
    """Where one request's tokens go. Called on the engine's thread: it must not block."""

    def token(self, choice: Choice) -> bool:
        """Take one token; True ends the request with reason `stop` (a stop string, say)."""
        ...

    def finish(self, ending: Ending) -> None:
        """Called exactly once, last."""
        ...
