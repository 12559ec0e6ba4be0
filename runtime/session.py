"""Sequences on a module: prefill in canonical chunks, slots, ragged decode.

State stays on the device. A KV cache (kind `per_position`) is updated in place. Of everything else
(kind `fixed`) a call reads one set of buffers and writes another, so each of these objects holds
two sets, which change places with every call: nothing is allocated for a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from runtime.errors import UserError
from runtime.manifest import Manifest, StateSpec, prefill_name
from runtime.module import Buffer, Device

Piece = tuple[int, int]  # (compiled chunk size P, valid tokens n <= P)


def cut(position: int, length: int, chunks: Sequence[int]) -> list[Piece]:
    """How a prompt of `length` tokens starting at absolute `position` is cut into chunks.

    `chunks` are the compiled sizes, ascending. At each place the largest size P that starts on a
    multiple of P and fits is used; else the smallest, up to its next multiple or the end. The
    rest of a cut is the cut of the rest, so where a request stands alone decides how it is cut
    and the same request always gives the same bits.
    """
    smallest = chunks[0]
    pieces: list[Piece] = []
    while length > 0:
        fits = [p for p in chunks if position % p == 0 and p <= length]
        size = fits[-1] if fits else smallest
        count = size if fits else min(length, smallest - position % smallest)
        pieces.append((size, count))
        position += count
        length -= count
    return pieces


class Prefill:
    """One sequence being read into a private one-slot state, a chunk at a time.

    `logits` f32[1,V] and `argmax` i32[1] are those of the last token read; `state` the buffers of
    one slot in the manifest's order, until a session takes them.
    """

    def __init__(
        self,
        device: Device,
        manifest: Manifest,
        tokens: Sequence[int],
        position: int = 0,
        state: list[Buffer] | None = None,
        cuts: Sequence[Piece] | None = None,
    ) -> None:
        """Read `tokens`, the first at absolute `position`, from `state` (zeros if None), whose
        buffers are written over.

        `cuts` replaces the canonical cut. Raises UserError for no tokens, a token outside the
        vocabulary, or tokens beyond the context; ValueError for cuts that do not fit.
        """
        self._tokens = _token_array(tokens, position, manifest)
        chunks = manifest.shape.chunks
        self._pieces = list(cuts) if cuts is not None else cut(position, len(tokens), chunks)
        _check_cuts(self._pieces, len(tokens), chunks)
        self._device = device
        self._manifest = manifest
        self._spare: list[Buffer] | None = None
        self._next = 0
        self._done = 0
        self.position = position
        self.state: list[Buffer] | None = (
            state if state is not None else zero_state(device, manifest, 1)
        )
        self.logits: Buffer = None
        self.argmax: Buffer = None

    @property
    def finished(self) -> bool:
        """Whether every chunk has been read."""
        return self._next == len(self._pieces)

    def step(self) -> bool:
        """Read the next chunk; returns `finished`."""
        size, count = self._pieces[self._next]
        tokens = np.zeros((1, size), np.int32)
        tokens[0, :count] = self._tokens[self._done : self._done + count]
        put = self._device.to_device
        arguments = [put(tokens), put(_i32(count)), put(_i32(self.position))]
        state = self.take()
        spare = self._spare or storage(self._device, self._manifest, 1)
        self.logits, self.argmax, *self.state = self._device.call(
            prefill_name(size), [*arguments, *state, *spare]
        )
        self._spare = _fixed(self._manifest, state)
        self._next += 1
        self._done += count
        self.position += count
        return self.finished

    def take(self) -> list[Buffer]:
        """The state buffers, which this object then no longer has. Raises ValueError if gone."""
        if self.state is None:
            raise ValueError("the state of this prefill has been taken")
        state, self.state = self.state, None
        return state


class Session:
    """The slots of one module and their state.

    Several slots have their memory from the beginning, so that a device that has too little says
    so at once. A single one gets it when it is asked for: mostly that of its first prefill.
    """

    def __init__(self, device: Device, manifest: Manifest) -> None:
        """All slots start with zero state."""
        self.device = device
        self.manifest = manifest
        self.slots = manifest.shape.slots
        self._lost = False
        self._state: list[Buffer] | None = None
        if self.slots > 1:
            self._state = zero_state(device, manifest, self.slots)
        self._spare = storage(device, manifest, self.slots)
        self._zeros: list[Buffer] | None = None
        self._private: Prefill | None = None

    def start(
        self,
        tokens: Sequence[int],
        position: int = 0,
        state: list[Buffer] | None = None,
        cuts: Sequence[Piece] | None = None,
    ) -> Prefill:
        """A prefill to be stepped by the caller; see Prefill."""
        return Prefill(self.device, self.manifest, tokens, position, state, cuts)

    def prefill(
        self, tokens: Sequence[int], cuts: Sequence[Piece] | None = None
    ) -> tuple[Buffer, Buffer]:
        """Read a prompt from position 0 into a private state that `admit` moves into a slot.

        Returns (logits f32[1,V], argmax i32[1]) of the last token, on the device.
        """
        work = self.start(tokens, cuts=cuts)
        while not work.step():
            pass
        self._private = work
        return work.logits, work.argmax

    def admit(self, slot: int, work: Prefill | None = None) -> None:
        """Move the state of `work` (of the last `prefill` if None) into `slot`."""
        work = work or self._private
        if work is None:
            raise ValueError("nothing to admit: prefill first")
        if self.slots == 1 and slot == 0:
            self._state, self._lost = work.take(), False
        else:
            self.seed(slot, work.take())
        self._private = None

    def seed(self, slot: int, state: list[Buffer]) -> None:
        """Replace the state of `slot` by one-slot buffers, which are only read."""
        self._step("seed", [self._slot(slot), *self.state, *state])

    def reset(self, slot: int) -> None:
        """Set the state of `slot` to zeros."""
        if self._zeros is None:
            self._zeros = zero_state(self.device, self.manifest, 1)
        self.seed(slot, self._zeros)

    def extract(self, slot: int) -> list[Buffer]:
        """A copy of the state of `slot`, as one-slot buffers in the manifest's order."""
        room = _room(self.device, self.manifest.state, 1)
        return self.device.call("extract", [self._slot(slot), *self.state, *room])

    def decode(
        self,
        tokens: np.ndarray[Any, Any] | Sequence[int],
        positions: np.ndarray[Any, Any] | Sequence[int],
        active: np.ndarray[Any, Any] | Sequence[int],
    ) -> tuple[Buffer, Buffer]:
        """One token for each slot: i32[B] tokens, their absolute positions, 1 for active rows.

        Returns (logits f32[B,V], argmax i32[B]) on the device. Rows with active 0 keep their
        state; their outputs mean nothing.
        """
        put = self.device.to_device
        arguments = [put(self._row(array)) for array in (tokens, positions, active)]
        logits, argmax = self._step("decode", [*arguments, *self.state])
        return logits, argmax

    @property
    def state(self) -> list[Buffer]:
        """State buffers of all slots; valid until the next call that changes state."""
        if self._lost:
            raise ValueError("the state was lost in a call that failed")
        if self._state is None:
            self._state = zero_state(self.device, self.manifest, self.slots)
        return self._state

    def _step(self, function: str, arguments: list[Buffer]) -> list[Buffer]:
        """Call a function whose last results are all slots' state; returns the others.

        What a call that fails leaves of either set is unknown: the state is then lost.
        """
        state, self._state, self._lost = self.state, None, True
        found = self.device.call(function, [*arguments, *self._spare])
        self._lost = False
        count = len(found) - len(state)
        self._state, self._spare = found[count:], _fixed(self.manifest, state)
        return found[:count]

    def _row(self, values: np.ndarray[Any, Any] | Sequence[int]) -> np.ndarray[Any, Any]:
        row = np.asarray(values, dtype=np.int32)
        if row.shape != (self.slots,):
            raise ValueError(f"decode takes {self.slots} rows, got shape {row.shape}")
        return row

    def _slot(self, slot: int) -> Buffer:
        if not 0 <= slot < self.slots:
            raise ValueError(f"slot {slot}, expected 0 to {self.slots - 1}")
        return self.device.to_device(np.asarray(slot, np.int32))


def zero_state(device: Device, manifest: Manifest, slots: int) -> list[Buffer]:
    """Zero state buffers for `slots` slots, in the manifest's order."""
    return [device.zeros(spec.dtype, spec.batched(slots)) for spec in manifest.state]


def _fixed(manifest: Manifest, state: Sequence[Buffer]) -> list[Buffer]:
    """Those of the buffers in the manifest's order that are not updated in place."""
    return [b for spec, b in zip(manifest.state, state, strict=True) if spec.kind == "fixed"]


def storage(device: Device, manifest: Manifest, slots: int) -> list[Buffer]:
    """Buffers to write the next state of `slots` slots to, where it is not updated in place."""
    return _room(device, [spec for spec in manifest.state if spec.kind == "fixed"], slots)


def _room(device: Device, specs: Sequence[StateSpec], slots: int) -> list[Buffer]:
    return [device.empty(spec.dtype, spec.batched(slots)) for spec in specs]


def _i32(value: int) -> np.ndarray[Any, Any]:
    return np.array([value], np.int32)


def _token_array(tokens: Sequence[int], position: int, manifest: Manifest) -> np.ndarray[Any, Any]:
    array = np.asarray(tokens, dtype=np.int64)
    vocab, context = manifest.model.vocab_size, manifest.shape.context
    if array.ndim != 1 or not len(array):
        raise UserError("prompt: found no tokens, expected at least one")
    if array.min() < 0 or array.max() >= vocab:
        bad = int(array[(array < 0) | (array >= vocab)][0])
        raise UserError(f"prompt: found token id {bad}, expected 0 to {vocab - 1}")
    if context is not None and position + len(array) > context:
        raise UserError(
            f"prompt: {position + len(array)} tokens, expected at most {context} (the context of"
            f" shape {manifest.shape.name}); shorten it or build a shape with a longer context"
        )
    return array.astype(np.int32)


def _check_cuts(pieces: Sequence[Piece], length: int, chunks: Sequence[int]) -> None:
    for size, count in pieces:
        if size not in chunks or not 1 <= count <= size:
            raise ValueError(f"cut ({size}, {count}), expected a compiled size of {list(chunks)}")
    if sum(count for _, count in pieces) != length:
        raise ValueError(f"cuts add up to {sum(n for _, n in pieces)}, expected {length}")
