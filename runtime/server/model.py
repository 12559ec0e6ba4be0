"""What the server knows of the bundle it serves: tokenizer, chat template, limits and name."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from runtime import manifest as manifests
from runtime import tokenizer as tokenizers
from runtime.dry import Breakers
from runtime.errors import UserError
from runtime.manifest import Manifest
from runtime.server import template as templates
from runtime.server.template import ChatTemplate
from runtime.tokenizer import Tokenizer

_BREAKERS = 16  # lists of sequence breakers kept: building one walks the vocabulary


@dataclass(frozen=True)
class Limits:
    """What one call may ask for; the body's size is the HTTP side's business.

    `prompt_tokens` and `completion_tokens` are for each choice, `choices` is prompts times n,
    `stop_chars` the length of each stop string, `entries` the log-probabilities of one answer. A
    client may set `priority` only if it is true.
    Raises UserError that names the field.
    """

    prompt_tokens: int = 32768
    completion_tokens: int = 4096
    n: int = 16
    choices: int = 128
    stops: int = 16
    stop_chars: int = 256
    logprobs: int = 20
    entries: int = 100_000
    priority: bool = False
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "completion_tokens", "n", "choices", "stop_chars", "entries"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}: found {getattr(self, name)}, expected 1 or more")
        for name in ("stops", "logprobs"):
            if getattr(self, name) < 0:
                raise UserError(f"{name}: found {getattr(self, name)}, expected 0 or more")
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise UserError(f"deadline_s: found {self.deadline_s}, expected more than 0 seconds")


@dataclass(frozen=True)
class Model:
    """One bundle as clients see it: `name` is what their `model` field must say."""

    manifest: Manifest
    tokenizer: Tokenizer | None = None
    template: ChatTemplate | None = None
    limits: Limits = field(default_factory=Limits)
    name: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    _lists: OrderedDict[tuple[str, ...], Breakers] = field(default_factory=OrderedDict, repr=False)
    _lock: Any = field(default_factory=threading.Lock, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", self.manifest.model.name)

    @classmethod
    def open(
        cls,
        bundle: Path,
        limits: Limits | None = None,
        name: str | None = None,
        manifest: Manifest | None = None,
    ) -> Model:
        """Read a bundle's manifest (unless given), tokenizer and chat template; no device.

        Raises UserError that names the file: missing, changed, or not what it should be.
        """
        manifest = manifest or manifests.load(bundle)
        tokenizer = tokenizers.load(bundle, manifest.files.tokenizer)
        template = templates.load(bundle, manifest.files.tokenizer) if tokenizer else None
        return cls(manifest, tokenizer, template, limits or Limits(), name or "")

    @cached_property
    def fingerprint(self) -> str:
        """Changes whenever the bundle does: OpenAI's `system_fingerprint`."""
        return f"fp_{self.manifest.digest[:12]}"

    def breakers(self, strings: Sequence[str]) -> Breakers:
        """DRY's sequence breakers for these strings; the latest few lists are kept.

        Raises UserError for a model without a tokenizer.
        """
        tokenizer, key = self.tokenizer, tuple(strings)
        if tokenizer is None:
            raise UserError("dry_sequence_breakers: found some, expected a model with a tokenizer")
        with self._lock:
            if key not in self._lists:
                self._lists[key] = tokenizer.breakers(key)
            self._lists.move_to_end(key)
            while len(self._lists) > _BREAKERS:
                self._lists.popitem(last=False)
            return self._lists[key]
