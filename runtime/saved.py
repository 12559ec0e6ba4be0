"""A conversation in one file: its token ids and the state after them, to go on without prefill.

The file is safetensors. Its metadata holds one JSON object, `scanwright`: the digest of the bundle
that made it, the token ids, how many of them the state has read, and a SHA-256 over all of that and
every tensor's bytes. A state means nothing to another module, so a file of another bundle is
refused, as is one with a changed bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from runtime.errors import UserError
from runtime.manifest import Manifest

SCHEMA = 1
_KEY = "scanwright"
_TYPES = {
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
    "i32": np.dtype(np.int32),
    "i8": np.dtype(np.int8),
}


@dataclass(frozen=True, eq=False)
class Saved:
    """A sequence at rest.

    `tokens` are all its ids: `prompt_tokens` of them were given, the rest generated; the state has
    read the first `fed`. `seed` and `draws` say where the sampler's random stream stands. `state`
    holds one slot's tensors by name, in the shapes of the manifest.
    """

    bundle: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    fed: int
    seed: int | None
    draws: int
    state: Mapping[str, NDArray[Any]] = field(repr=False)

    @property
    def pending(self) -> tuple[int, ...]:
        """Tokens that the state has not read yet: as a rule the last one generated."""
        return self.tokens[self.fed :]

    def check(self, manifest: Manifest) -> None:
        """Raise UserError if this is not a conversation of that bundle."""
        if self.bundle != manifest.digest:
            raise UserError(
                f"saved conversation: made by bundle {self.bundle[:12]}…, expected"
                f" {manifest.digest[:12]}… ({manifest.model.name} for {manifest.target.name},"
                f" {manifest.shape.name}); a state is good for the bundle that made it alone:"
                " open that one, or start again from the text"
            )
        expected = {spec.name: (_TYPES[spec.dtype], spec.shape) for spec in manifest.state}
        if expected != {name: (array.dtype, array.shape) for name, array in self.state.items()}:
            raise UserError(
                "saved conversation: its state tensors are not those of the manifest;"
                " start again from the text"
            )
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise UserError(f"saved conversation: seed {self.seed}, expected 0 to 2**64 - 1")
        vocab = manifest.model.vocab_size
        if odd := [token for token in self.tokens if not 0 <= token < vocab]:
            raise UserError(
                f"saved conversation: token id {odd[0]}, expected 0 to {vocab - 1}; start again"
                " from the text"
            )

    def arrays(self, manifest: Manifest) -> list[NDArray[Any]]:
        """The state in the manifest's order."""
        return [self.state[spec.name] for spec in manifest.state]


def save(saved: Saved, manifest: Manifest, path: Path) -> None:
    """Write `saved` to `path`, whole or not at all. Raises UserError if that fails."""
    from safetensors.numpy import save_file

    tensors = {
        spec.name: np.ascontiguousarray(saved.state[spec.name]).view(_stored(spec.dtype))
        for spec in manifest.state
    }
    facts = _facts(saved)
    facts["sha256"] = _digest(facts, tensors)
    scratch: Path | None = None
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(handle)
        scratch = Path(name)
        save_file(tensors, scratch, metadata={_KEY: _canonical(facts)})
        with scratch.open("rb") as file:
            os.fsync(file.fileno())
        scratch.replace(path)
    except Exception as error:  # the library wraps what the system says in its own kind
        if scratch is not None:
            scratch.unlink(missing_ok=True)
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(
            f"{path}: cannot be written ({why}), expected a file name in a directory with room"
        ) from error


def load(path: Path, manifest: Manifest) -> Saved:
    """Read a file that `save` wrote for this bundle.

    Raises UserError: it is missing, damaged, of another kind, or made by another bundle.
    """
    facts, tensors = _read(path)
    try:
        saved = _saved(facts, tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise _refused(path, f"{type(error).__name__}: {error}") from error
    found = _digest(_facts(saved), tensors)
    if facts.get("sha256") != found:
        raise _refused(path, f"sha256 {found[:12]}…, expected {str(facts.get('sha256'))[:12]}…")
    for spec in manifest.state:
        array = tensors.get(spec.name)
        if array is not None and array.dtype == _stored(spec.dtype):
            tensors[spec.name] = array.view(_TYPES[spec.dtype])
    try:
        saved.check(manifest)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return saved


def _read(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """(facts, tensors as they lie in the file)."""
    from safetensors import safe_open

    if not path.is_file():
        what = "not a file" if path.exists() else "no such file"
        raise UserError(f"{path}: {what}, expected a saved conversation")
    try:
        with safe_open(path, framework="np") as file:
            facts = json.loads((file.metadata() or {})[_KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # the library raises its own kinds
        raise _refused(path, f"{type(error).__name__}: {error}") from error
    if not isinstance(facts, dict) or facts.get("schema") != SCHEMA:
        raise _refused(path, f"schema {facts.get('schema') if isinstance(facts, dict) else facts}")
    return facts, tensors


def _saved(facts: dict[str, Any], tensors: dict[str, NDArray[Any]]) -> Saved:
    tokens = tuple(facts["tokens"])
    numbers = [facts["prompt_tokens"], facts["fed"], facts["draws"], *tokens]
    if not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError("tokens and counts, expected integers of 0 or more")
    seed = facts["seed"]
    if seed is not None and (type(seed) is not int or seed < 0):
        raise ValueError(f"seed {seed!r}, expected null or an integer of 0 or more")
    if not 0 < facts["fed"] <= len(tokens) or facts["prompt_tokens"] > len(tokens):
        raise ValueError(f"fed {facts['fed']} and prompt_tokens {facts['prompt_tokens']}")
    return Saved(
        str(facts["bundle"]),
        tokens,
        facts["prompt_tokens"],
        facts["fed"],
        seed,
        facts["draws"],
        tensors,
    )


def _facts(saved: Saved) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "bundle": saved.bundle,
        "tokens": list(saved.tokens),
        "prompt_tokens": saved.prompt_tokens,
        "fed": saved.fed,
        "seed": saved.seed,
        "draws": saved.draws,
    }


def _stored(word: str) -> np.dtype[Any]:
    """How a dtype lies in the file: safetensors.numpy has no bfloat16."""
    return np.dtype(np.uint16) if word == "bf16" else _TYPES[word]


def _canonical(facts: dict[str, Any]) -> str:
    return json.dumps(facts, sort_keys=True, separators=(",", ":"))


def _digest(facts: dict[str, Any], tensors: Mapping[str, NDArray[Any]]) -> str:
    """SHA-256 over the facts and each tensor's name, dtype, shape and bytes, by name."""
    digest = hashlib.sha256(_canonical(facts).encode())
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        digest.update(f"\n{name} {array.dtype.str} {list(array.shape)}\n".encode())
        digest.update(array.view(np.uint8).data if array.size else b"")
    return digest.hexdigest()


def _refused(path: Path, why: str) -> UserError:
    return UserError(
        f"{path}: not a whole saved conversation ({why}), expected a file written with"
        " --save-session; start again from the text"
    )
