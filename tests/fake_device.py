"""A device that remembers: its state is the history of tokens itself, so nothing can hide.

One slot owns a `fixed` tensor (a running hash and a count) and a `per_position` region (the ids,
one a position). Logits are a rule of the history; a state that does not fit its positions, a buffer
used after it was consumed, or a row that was fed out of turn raises. For the engine's logic; what
compiled modules do is tested with real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from runtime import manifest as mf
from runtime.errors import UserError
from runtime.session import Session

V, EOS, CONTEXT = 32, 31, 64
MODULUS = 65521
Rule = Callable[[list[int]], np.ndarray]


def spread(history: list[int]) -> np.ndarray:
    """Logits f32[V] that depend on every token of the history and its place."""
    return np.random.default_rng([len(history), *history]).normal(size=V).astype(np.float32) * 2


def following(*tokens: int, prompt: int = 2) -> Rule:
    """A rule under which greedy decoding gives `tokens` in turn after `prompt` tokens."""

    def rule(history: list[int]) -> np.ndarray:
        row = np.sin(np.arange(V) + len(history)).astype(np.float32) * 0.5 - 1
        row[tokens[len(history) - prompt]] = 2.0
        return row

    return rule


def manifest(
    slots: int = 3, chunks: tuple[int, ...] = (4, 8), context: int | None = CONTEXT
) -> mf.Manifest:
    """The manifest of the fake model."""
    state = (
        mf.StateSpec("hash", "i32", (1, 2), 0, "fixed"),
        mf.StateSpec("ids", "i32", (2, 1, context or CONTEXT), 1, "per_position"),
    )
    code = mf.FileRef("model.vmfb", "0" * 64, 1)
    return mf.Manifest(
        schema=mf.SCHEMA,
        model=mf.ModelInfo("fake", "fake", "dir:fake", None, None, "0" * 64, V, (EOS,), None),
        target=mf.TargetInfo("cpu", "local", "local-task", None, (), "0", "0", (), None, None),
        shape=mf.ShapeInfo(f"b{slots}", slots, chunks, context),
        files=mf.Files(code, None, None, (), None, ()),
        functions=mf.expected_functions(V, slots, chunks, state),
        state=state,
        params=(),
        numerics=mf.Numerics("f32", "f32", "f32", None),
        prefix_sharing=False,
        proof=mf.Proof("not-run", "fake", "fast", mf.Tolerance(1e-5, 1e-5)),
        build=None,
        alternatives=(),
    )


class Buffer:
    """An array that can be used until a call consumes it."""

    def __init__(self, array: np.ndarray, name: str = "") -> None:
        self._array: np.ndarray | None = array
        self.name = name

    def get(self) -> np.ndarray:
        """The array; fails if it was consumed."""
        assert self._array is not None, f"buffer {self.name!r} was used after it was consumed"
        return self._array

    def consume(self) -> np.ndarray:
        """The array, for the last time."""
        array, self._array = self.get(), None
        return array


class FakeDevice:
    """Implements runtime.module.Device. `calls` are the functions called, `read` the names of the
    outputs that crossed to the host (rows as `logits[1]`), `fed` every (position, id) read."""

    uri = "fake"

    def __init__(self, of: mf.Manifest, rule: Rule = spread) -> None:
        self.manifest = of
        self.rule = rule
        self.calls: list[str] = []
        self.read: list[str] = []
        self.fed: list[tuple[int, int]] = []
        self.broken: str | None = None  # the function that fails

    def session(self) -> Session:
        """Fresh slots."""
        return Session(self, self.manifest)

    def to_device(self, array: np.ndarray) -> Buffer:
        """See Device."""
        return Buffer(np.array(array))

    def to_host(self, buffer: Buffer) -> np.ndarray:
        """See Device."""
        self.read.append(buffer.name)
        return buffer.get().copy()

    def rows(self, buffer: Buffer, indices: Sequence[int]) -> list[np.ndarray]:
        """See Device."""
        self.read += [f"{buffer.name}[{i}]" for i in indices]
        return [buffer.get()[i] for i in indices]

    def zeros(self, dtype: str, shape: tuple[int, ...]) -> Buffer:
        """See Device."""
        return Buffer(np.zeros(shape, {"i32": np.int32}[dtype]))

    def empty(self, dtype: str, shape: tuple[int, ...]) -> Buffer:
        """See Device."""
        return Buffer(np.full(shape, -1, {"i32": np.int32}[dtype]))

    def call(self, function: str, args: Sequence[Buffer]) -> list[Any]:
        """See Device."""
        spec = self.manifest.functions[function]
        for buffer, want in zip(args, spec.inputs, strict=True):
            assert buffer.get().shape == want.shape and buffer.get().dtype == np.int32, want.name
        self.calls.append(function)
        if self.broken == function:
            raise UserError(f"{function} failed on device 'fake' (planted)")
        given = {tensor.name: buffer for tensor, buffer in zip(spec.inputs, args, strict=True)}
        storage = [name for name in given if name.startswith("out.")]
        assert len({id(buffer) for buffer in args}) == len(args), "one buffer for two arguments"
        arrays = [buffer.get() for name, buffer in given.items() if name not in storage]
        for name in storage:
            given[name].consume()
        kind = function.partition("_")[0]
        outputs = getattr(self, f"_{kind}")(*arrays)
        return [Buffer(array, want.name) for array, want in zip(outputs, spec.outputs, strict=True)]

    def _prefill(self, tokens: Any, length: Any, position: Any, hash_: Any, ids: Any) -> Any:
        hash_, ids = hash_.copy(), ids.copy()
        assert 1 <= length[0] <= tokens.shape[1]
        for i in range(length[0]):
            self._feed(hash_, ids, 0, int(tokens[0, i]), int(position[0]) + i)
        row = self._logits(hash_, ids, 0)
        return row[None], np.array([_argmax(row)], np.int32), hash_, ids

    def _decode(self, tokens: Any, positions: Any, active: Any, hash_: Any, ids: Any) -> Any:
        hash_, ids = hash_.copy(), ids.copy()
        logits = np.full((len(tokens), V), np.nan, np.float32)
        argmax = np.full(len(tokens), -1, np.int32)
        for slot in np.flatnonzero(active).tolist():
            self._feed(hash_, ids, slot, int(tokens[slot]), int(positions[slot]))
            logits[slot] = self._logits(hash_, ids, slot)
            argmax[slot] = _argmax(logits[slot])
        return logits, argmax, hash_, ids

    def _seed(self, slot: Any, hash_: Any, ids: Any, new_hash: Any, new_ids: Any) -> Any:
        hash_, ids = hash_.copy(), ids.copy()
        hash_[slot], ids[:, slot] = new_hash[0], new_ids[:, 0]
        return hash_, ids

    def _extract(self, slot: Any, hash_: Any, ids: Any) -> Any:
        return hash_[slot : slot + 1].copy(), ids[:, slot : slot + 1].copy()

    def _feed(self, hash_: Any, ids: Any, slot: int, token: int, position: int) -> None:
        assert hash_[slot, 1] == position, f"slot {slot} is at {hash_[slot, 1]}, fed {position}"
        hash_[slot] = (int(hash_[slot, 0]) * 31 + token + 1) % MODULUS, position + 1
        ids[0, slot, position] = token + 1
        self.fed.append((position, token))

    def _logits(self, hash_: Any, ids: Any, slot: int) -> np.ndarray:
        count, value = int(hash_[slot, 1]), 0
        history = [int(i) - 1 for i in ids[0, slot, :count]]
        for token in history:
            value = (value * 31 + token + 1) % MODULUS
        assert value == hash_[slot, 0], f"slot {slot}: fixed and per-position state differ"
        assert not ids[0, slot, count:].any(), f"slot {slot}: left-overs beyond position {count}"
        return self.rule(history)


def _argmax(row: np.ndarray) -> int:
    return int(np.argmax(row)) if np.isfinite(np.max(row)) else -1


def zero(session: Session, slot: int) -> bool:
    """Whether a slot's state is all zeros."""
    return not any(buffer.get().any() for buffer in session.extract(slot))
